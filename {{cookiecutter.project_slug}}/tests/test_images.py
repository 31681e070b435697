"""engine/images.py and task: images of any kind, and the same crops wherever files are decoded."""

import io
import struct
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

import task
from engine import images
from engine.errors import UserError
from engine.images import Crop, DecodingLoader, Span

CPU = torch.device("cpu")
decodes_files = pytest.mark.skipif(
    not hasattr(task, "gpu_loader"), reason="this task has no --decode gpu"
)
KINDS = {
    "baseline.jpg": ("RGB", {"quality": 92}),
    "full_chroma.jpg": ("RGB", {"subsampling": 0}),
    "grey.jpg": ("L", {}),
    "phone.jpg": (
        "RGB",
        {"format": "MPO", "save_all": True, "append_images": [Image.new("L", (9, 9))]},
    ),
    "progressive.jpg": ("RGB", {"progressive": True}),
    "holds_rgb.jpg": ("RGB", {"keep_rgb": True}),
    "print.jpg": ("CMYK", {}),
    "colours.png": ("RGB", {}),
    "with_alpha.png": ("RGBA", {}),
    "palette.png": ("P", {}),
    "bits.png": ("1", {}),
}
FOR_THE_GPU = {"baseline.jpg", "full_chroma.jpg", "grey.jpg", "phone.jpg"}


def picture(height, width, seed=0):
    """Smooth colours with some noise, as photographs have."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    smooth = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    noise = Image.effect_noise((width, height), 30).convert("RGB")
    return Image.blend(smooth, noise, 0.2)


def centre(height, width):
    return Crop(Span(0, height, 24), Span(0, width, 24), 24)


@pytest.mark.parametrize("name", KINDS)
def test_an_image_has_the_pixels_that_pil_gives(tmp_path, name):
    mode, options = KINDS[name]
    picture(40, 60).convert(mode).save(tmp_path / name, **options)
    encoded = images.read(str(tmp_path / name), centre)
    assert encoded.suits_gpu == (name in FOR_THE_GPU)
    image = images.decode(encoded)
    assert image.dtype == torch.uint8
    with Image.open(tmp_path / name) as expected:
        assert torch.equal(image, functional.pil_to_tensor(expected.convert("RGB")))


def test_16_bits_become_8(tmp_path):
    values = np.linspace(0, 65535, 600).reshape(20, 30).astype(np.uint16)
    Image.fromarray(values).save(tmp_path / "deep.png")
    image = images.decode(images.read(str(tmp_path / "deep.png"), centre))
    expected = torch.from_numpy(values / 257).expand(3, -1, -1)
    torch.testing.assert_close(image.double(), expected, rtol=0, atol=1)


def test_images_are_normalised_on_the_device(device):
    batch = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8, device=device)
    batch = batch.contiguous(memory_format=torch.channels_last)
    prepared = task.prepare(batch)
    expected = functional.normalize(batch.float() / 255, images.MEAN, images.STD)
    torch.testing.assert_close(prepared, expected)
    assert prepared.is_contiguous(memory_format=torch.channels_last)
    assert task.prepare(prepared) is prepared


def test_a_torn_image_is_named_with_the_reason(tmp_path):
    path = tmp_path / "torn.jpg"
    picture(200, 200).save(path)
    path.write_bytes(path.read_bytes()[:700])
    encoded = images.read(str(path), centre)
    for decode in (images.decode, lambda encoded: images.pack([(encoded, 0)])):
        with pytest.raises(UserError, match=r"torn.jpg can't be read as an image \([\w ]+\); mend"):
            decode(encoded)


def test_a_file_that_claims_to_be_enormous_is_refused(tmp_path):
    """A decompression bomb: few bytes, and gigabytes of pixels."""
    path = tmp_path / "bomb.png"
    Image.new("L", (1, 1)).save(path)
    data = bytearray(path.read_bytes())
    data[16:24] = struct.pack(">II", 50_000, 50_000)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"bomb.png can't be read as an image .*; mend or remove"):
        images.read_image(path)


@decodes_files
def test_crops_are_those_of_torchvisions_transforms():
    train = v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip()])
    val = v2.Compose([v2.Resize(256), v2.CenterCrop(224)])
    chances = np.random.default_rng(0)
    for seed, (height, width) in enumerate(chances.integers(8, 500, (40, 2)).tolist()):
        image = torch.randint(0, 256, (3, height, width), dtype=torch.uint8)
        for choose, transform in ((task.random_crop, train), (task.central_crop, val)):
            torch.manual_seed(seed)
            expected = transform(image)
            torch.manual_seed(seed)
            assert torch.equal(images.cut(image, choose(height, width)), expected)


# Packed batches


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """For --data: two classes, files of every kind in many sizes."""
    folder = tmp_path_factory.mktemp("images")
    sizes = np.random.default_rng(0).integers(90, 300, (40, 2)).tolist()
    for split in ("train", "val"):
        for index, (height, width) in enumerate(sizes):
            mode, options = list(KINDS.values())[index % len(KINDS)]
            path = folder / split / f"{index % 2}" / f"{index}-{list(KINDS)[index % len(KINDS)]}"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture(height, width, index).convert(mode).save(path, **options)
    return folder


def batches(loader):
    torch.manual_seed(0)
    return list(loader)


@decodes_files
@pytest.mark.parametrize("workers", [0, 2])
def test_packed_batches_become_what_a_plain_loader_gives(folder, workers, monkeypatch):
    monkeypatch.setattr(images, "PIXELS_AT_ONCE", 200_000)  # a few images
    for dataset in task.build_datasets(folder):
        options = {"batch_size": 15, "num_workers": workers, "shuffle": True}
        expected = batches(DataLoader(dataset, **options))
        found = batches(DecodingLoader(CPU, dataset, **options))
        assert [len(labels) for _, labels in found] == [15, 15, 10]
        assert expected[0][0].shape == (15, 3, 224, 224)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def without_tables(data):
    """The JPEG file without its quantisation tables, which no header is missed for."""
    start = data.index(b"\xff\xdb")
    length = int.from_bytes(data[start + 2 : start + 4], "big")
    return data[:start] + data[start + 2 + length :]


@decodes_files
def test_a_file_that_fails_is_named_wherever_it_is_decoded(folder, tmp_path):
    path = tmp_path / "broken.jpg"
    buffer = io.BytesIO()
    picture(100, 100).save(buffer, "JPEG", optimize=True)
    data = buffer.getvalue()
    while b"\xff\xdb" in data[:600]:
        data = without_tables(data)
    path.write_bytes(data)
    broken = images.read(str(path), centre)
    whole = next(path for path, _ in task.build_datasets(folder)[0].samples if "baseline" in path)
    batch = [(images.read(whole, centre), 0), (broken, 0), (images.read(whole, centre), 0)]
    named = pytest.raises(UserError, match=r"broken.jpg can't be read as an image .*; mend or rem")
    assert not broken.suits_gpu  # nvJPEG would make something of it
    with named:
        images.pack(batch)
    batch[1] = (broken._replace(suits_gpu=True), 0)
    packed, _ = images.pack(batch)
    with named:
        images.unpack(packed, CPU)
    packed, _ = images.pack(batch[::2])
    assert torch.equal(*images.unpack(packed, CPU))  # the decoder goes on


@decodes_files
def test_many_workers_decode_some_of_the_files(folder, monkeypatch):
    dataset = task.build_datasets(folder)[0]
    chosen = [index for index, (path, _) in enumerate(dataset.samples) if "baseline" in path]
    batch = [dataset[chosen[0]] for _ in range(2 * images.SHARE)]
    for workers, decoded in ((1, 0), (images.MANY_WORKERS, 2)):
        info = SimpleNamespace(num_workers=workers)
        monkeypatch.setattr(images, "get_worker_info", lambda info=info: info)
        packed, _ = images.pack(batch)
        assert (packed.files[:, 2] == 0).sum() == decoded


@decodes_files
def test_a_file_that_only_the_cpu_decodes_is_decoded_there(folder, monkeypatch):
    def hardly(files, mode, device=None):
        if device is not None:
            raise RuntimeError("Unknown chroma subsampling")
        return decode_jpeg(files, mode)

    decode_jpeg = images.decode_jpeg
    monkeypatch.setattr(images, "decode_jpeg", hardly)
    (expected, _), *_ = batches(DataLoader(task.build_datasets(folder)[1], 5))
    (found, _), *_ = batches(DecodingLoader(CPU, task.build_datasets(folder)[1], batch_size=5))
    assert torch.equal(found, expected)


def test_a_data_set_without_files_is_refused():
    with pytest.raises(UserError, match="--decode gpu: .* leave it out"):
        next(iter(DecodingLoader(CPU, task.Digits(train=True))))


def cropped_by_the_kernel(device, seed):
    """By engine/resize.py, and one by one: uint8 (N, 3, 24, 24) each."""
    from engine.resize import resize

    torch.manual_seed(seed)
    chances = np.random.default_rng(seed)
    crops, whole = [], []
    for index in range(6):
        height, width = chances.integers(5, 130, 2).tolist()
        rows, columns = (
            Span(start, int(chances.integers(1, side - start + 1)), 24)
            for side in (height, width)
            for start in [int(chances.integers(0, side))]
        )
        crops.append(Crop(rows, columns, 24, flip=index % 2 == 1))
        whole.append(torch.randint(0, 256, (3, height, width), dtype=torch.uint8))
    whole.append(whole[0])  # a part of the resized image
    crops.append(Crop(Span(0, whole[0].shape[1], 27, 2), Span(0, whole[0].shape[2], 40, 8), 24))
    spans = torch.tensor([(crop.rows, crop.columns) for crop in crops])
    flips = torch.tensor([crop.flip for crop in crops])
    found = resize([image.to(device) for image in whole], spans, flips, 24)
    assert found.is_contiguous(memory_format=torch.channels_last)
    return found.cpu(), torch.stack(list(map(images.cut, whole, crops)))


def cropped_on_each_rank():
    return cropped_by_the_kernel(CPU, seed=dist.get_rank())


def test_the_kernel_crops_as_torchvision_does(interpreted_processes):
    for found, expected in interpreted_processes(cropped_on_each_rank):
        assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_the_compiled_kernel_crops_as_torchvision_does(seed):
    found, expected = cropped_by_the_kernel(torch.device("cuda"), seed)
    assert torch.equal(found, expected)


@decodes_files
@pytest.mark.gpu
def test_the_gpu_gives_the_crops_that_the_cpu_gives(folder, monkeypatch):
    """But for the arithmetic of nvJPEG, which differs by a few levels where colours change."""
    monkeypatch.setattr(images, "PIXELS_AT_ONCE", 200_000)
    device = torch.device("cuda", 0)
    means = {}
    for dataset in task.build_datasets(folder):
        options = {"batch_size": 15, "num_workers": 2, "pin_memory": True}
        expected = batches(DataLoader(dataset, **options))
        found = batches(images.gpu_loader(device)(dataset, **options))
        assert all(batch.device == device for batch, _ in found)
        names = (path.split("-")[-1] for path, _ in dataset.samples)
        for (ours, labels), (theirs, their_labels) in zip(found, expected, strict=True):
            assert torch.equal(labels, their_labels)
            for mean in (ours.cpu().float() - theirs).abs().mean(dim=(1, 2, 3)).tolist():
                means.setdefault(next(names), []).append(mean)
    for name, seen in means.items():
        assert max(seen) < (2 if name in FOR_THE_GPU else 1e-9), (name, max(seen))


def test_decoding_on_the_gpu_needs_one():
    with pytest.raises(UserError, match="--decode gpu: this run is on the CPU; leave it out"):
        images.gpu_loader(CPU)
