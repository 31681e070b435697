"""Tests of engine.data.images and gpu_decoding: decoding and cropping of image files."""

import io
import struct
import zlib
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import task
import torch
import torch.distributed as dist
from engine import UserError
from engine.data import collate, gpu_decoding, images
from engine.data.files import FileError
from engine.data.gpu_decoding import DecodingLoader
from engine.data.images import Crop, Span, read_image
from fresh import UNCHANGED
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

CPU = torch.device("cpu")
decodes_files = pytest.mark.skipif(
    not hasattr(task, "random_crop"), reason="this task has no --decode gpu"
)
ROTATED = Image.Exif()
ROTATED[0x0112] = 6
KINDS = {
    "baseline.jpg": ("RGB", {"quality": 92}),
    "full_chroma.jpg": ("RGB", {"subsampling": 0}),
    "grey.jpg": ("L", {}),
    "phone.jpg": (
        "RGB",
        {"format": "MPO", "save_all": True, "append_images": [Image.new("L", (9, 9))]},
    ),
    "rotated.jpg": ("RGB", {"exif": ROTATED}),  # which is not applied, as by PIL
    "progressive.jpg": ("RGB", {"progressive": True}),
    "holds_rgb.jpg": ("RGB", {"keep_rgb": True}),
    "print.jpg": ("CMYK", {}),
    "colours.png": ("RGB", {}),
    "with_alpha.png": ("RGBA", {}),
    "palette.png": ("P", {}),
    "bits.png": ("1", {}),
}
FOR_THE_GPU = {"baseline.jpg", "full_chroma.jpg", "grey.jpg", "phone.jpg", "rotated.jpg"}


def picture(height, width, seed=0):
    """Smooth colours with some noise, as photographs have."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    smooth = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    noise = Image.effect_noise((width, height), 30).convert("RGB")
    return Image.blend(smooth, noise, 0.2)


def centre(height, width):
    return Crop(Span(0, height, 24), Span(0, width, 24), 24)


def torchvision_decoder():
    torchvision_io = pytest.importorskip("torchvision.io")
    if not hasattr(torchvision_io, "decode_jpeg"):
        pytest.skip("this torchvision decodes no JPEG files")
    return torchvision_io.decode_jpeg, torchvision_io.ImageReadMode.RGB


def torchcodec_decoder():
    reason = "torchcodec is not installed, or is made for another torch"
    decoders = pytest.importorskip("torchcodec.decoders", reason=reason, exc_type=Exception)
    return decoders.decode_jpeg, "RGB"


DECODERS = {
    "torchcodec": torchcodec_decoder,
    "torchvision": torchvision_decoder,
    "PIL": lambda: (None, None),
}


@pytest.fixture(params=DECODERS)
def decoder(request, monkeypatch):
    """Each library that decodes JPEG files."""
    decode_jpeg, mode = DECODERS[request.param]()
    monkeypatch.setattr(images, "decode_jpeg", decode_jpeg)
    monkeypatch.setattr(images, "RGB", mode)


def test_torchcodec_is_preferred_where_it_is_installed():
    torchcodec_decoder()
    assert images.JPEG_DECODER == "torchcodec"
    assert images.decode_jpeg.__module__.startswith("torchcodec.")


@pytest.mark.parametrize("name", KINDS)
def test_decoded_pixels_equal_those_of_pil(decoder, tmp_path, name):
    mode, options = KINDS[name]
    picture(40, 60).convert(mode).save(tmp_path / name, **options)
    encoded = images.read_encoded(str(tmp_path / name), centre)
    assert encoded.suits_gpu == (name in FOR_THE_GPU)
    image = images.decode(encoded)
    assert image.dtype == torch.uint8
    with Image.open(tmp_path / name) as expected:
        assert torch.equal(image, functional.pil_to_tensor(expected.convert("RGB")))


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_exif_orientation_is_not_applied(decoder, tmp_path, suffix):
    path = tmp_path / f"rotated.{suffix}"
    picture(40, 60).save(path, exif=ROTATED)
    with Image.open(path) as image:
        assert image.getexif()[0x0112] == 6
    assert read_image(path).shape == (3, 40, 60)
    assert images.read_encoded(str(path), centre).crop == centre(40, 60)


def test_orientation_in_another_segment_is_not_applied(decoder, tmp_path):
    """TorchCodec reads it without the name Exif, too."""
    path = tmp_path / "rotated.jpg"
    picture(40, 60).save(path, exif=ROTATED)
    path.write_bytes(path.read_bytes().replace(b"Exif\0\0", b"AAAAAA"))
    assert read_image(path).shape == (3, 40, 60)


def test_orientation_of_tiff_is_applied(tmp_path):
    """PIL does so when it reads the file; no other library reads TIFF."""
    picture(40, 60).save(tmp_path / "rotated.tif", tiffinfo={0x0112: 6})
    assert read_image(tmp_path / "rotated.tif").shape == (3, 60, 40)


def test_16_bit_images_are_scaled_to_8_bits(tmp_path):
    values = np.linspace(0, 65535, 600).reshape(20, 30).astype(np.uint16)
    Image.fromarray(values).save(tmp_path / "deep.png")
    image = images.decode(images.read_encoded(str(tmp_path / "deep.png"), centre))
    expected = torch.from_numpy(values // 256).expand(3, -1, -1)  # to_dtype of torchvision's
    assert torch.equal(image, expected.to(torch.uint8))
    assert abs(image.double().mean().item() - 255 / 2) < 0.1  # not darker


def test_images_are_normalized_on_the_device(device):
    batch = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8, device=device)
    batch = batch.contiguous(memory_format=torch.channels_last)
    prepared, labels = task.prepare([batch, torch.arange(2)])
    expected = functional.normalize(batch.float() / 255, images.MEAN, images.STD)
    torch.testing.assert_close(prepared, expected)
    assert prepared.is_contiguous(memory_format=torch.channels_last)
    assert task.prepare([prepared, labels])[0] is prepared


@pytest.mark.parametrize(
    ("dtype", "channels"), [(torch.int16, 3), (torch.uint16, 1), (torch.bool, 3), (torch.uint8, 4)]
)
def test_images_of_an_unknown_range_or_other_channels_are_an_error(dtype, channels):
    batch = torch.zeros(2, channels, 4, 5, dtype=dtype)
    with pytest.raises(UserError, match=f"the images are {dtype} with {channels} channels: a data"):
        images.normalize(batch)


def test_grey_images_are_normalized_as_three_equal_channels():
    batch = torch.randint(0, 256, (2, 1, 4, 5), dtype=torch.uint8)
    assert torch.equal(images.normalize(batch), images.normalize(batch.expand(-1, 3, -1, -1)))


def test_truncated_image_raises_an_error_with_its_path_and_the_reason(decoder, tmp_path):
    path = tmp_path / "torn.jpg"
    picture(200, 200).save(path)
    path.write_bytes(path.read_bytes()[:700])
    encoded = images.read_encoded(str(path), centre)
    for decode in (images.decode, lambda encoded: gpu_decoding.pack([(encoded, 0)])):
        with pytest.raises(
            UserError, match=r"torn.jpg can't be read as an image \([\w ().]+\); fix"
        ):
            decode(encoded)


def test_decompression_bomb_is_refused(tmp_path):
    """Few bytes, and gigabytes of pixels."""
    path = tmp_path / "bomb.png"
    Image.new("L", (1, 1)).save(path)
    data = bytearray(path.read_bytes())
    data[16:24] = struct.pack(">II", 50_000, 50_000)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"bomb.png can't be read as an image .*; fix or remove"):
        images.read_image(path)


@decodes_files
def test_crops_equal_those_of_torchvisions_transforms():
    train = v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip()])
    val = v2.Compose([v2.Resize(256), v2.CenterCrop(224)])
    chances = np.random.default_rng(0)
    for seed, (height, width) in enumerate(chances.integers(8, 500, (40, 2)).tolist()):
        image = torch.randint(0, 256, (3, height, width), dtype=torch.uint8)
        for choose, transform in ((task.random_crop, train), (task.center_crop, val)):
            torch.manual_seed(seed)
            expected = transform(image)
            torch.manual_seed(seed)
            assert torch.equal(images.crop_and_resize(image, choose(height, width)), expected)


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


def datasets_in(folder):
    return task.build_datasets(
        SimpleNamespace(data=folder, decode="cpu", eval_only=False, **UNCHANGED)
    )


def batches(loader):
    torch.manual_seed(0)
    return list(loader)


@decodes_files
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_images_of_32_bits_are_refused(tmp_path, dtype):
    """Their values may be from 0 to 1, to 255 or of a measurement; clipped, they would be black."""
    path = tmp_path / "a.tif"
    Image.fromarray(np.linspace(0, 255, 64, dtype=dtype).reshape(8, 8)).save(path)
    with pytest.raises(FileError, match=r"a\.tif can't be read as an image \(32 bits a pixel"):
        read_image(path)


@pytest.mark.parametrize("workers", [0, 2])
def test_packed_batches_equal_those_of_a_dataloader(folder, workers, monkeypatch):
    monkeypatch.setattr(gpu_decoding, "MAX_PIXELS", 200_000)  # a few images
    for dataset in datasets_in(folder):
        options = {"batch_size": 15, "num_workers": workers, "shuffle": True}
        expected = batches(DataLoader(dataset, collate_fn=collate, **options))
        found = batches(DecodingLoader(CPU, dataset, **options))
        assert [len(labels) for _, labels in found] == [15, 15, 10]
        assert expected[0][0].shape == (15, 3, 224, 224)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def without_tables(data):
    """Return the JPEG file without its first quantization table; its headers are intact."""
    start = data.index(b"\xff\xdb")
    length = int.from_bytes(data[start + 2 : start + 4], "big")
    return data[:start] + data[start + 2 + length :]


@decodes_files
def test_damaged_file_raises_an_error_with_its_path_wherever_it_is_decoded(folder, tmp_path):
    path = tmp_path / "broken.jpg"
    buffer = io.BytesIO()
    picture(100, 100).save(buffer, "JPEG", optimize=True)
    data = buffer.getvalue()
    while b"\xff\xdb" in data[:600]:
        data = without_tables(data)
    path.write_bytes(data)
    broken = images.read_encoded(str(path), centre)
    whole = next(path for path, _ in datasets_in(folder)[0].samples if "baseline" in path)
    intact = images.read_encoded(whole, centre)
    batch = [(intact, 0), (broken, 0), (intact, 0)]
    named = pytest.raises(UserError, match=r"broken.jpg can't be read as an image .*; fix or rem")
    assert not broken.suits_gpu  # nvJPEG would make something of it
    with named:
        gpu_decoding.pack(batch)
    batch[1] = (broken._replace(suits_gpu=True), 0)
    packed, _ = gpu_decoding.pack(batch)
    with named:
        gpu_decoding.unpack(packed, CPU)
    packed, _ = gpu_decoding.pack(batch[::2])
    assert torch.equal(*gpu_decoding.unpack(packed, CPU))  # the decoder goes on


@decodes_files
def test_many_workers_decode_a_share_of_the_files(folder, monkeypatch):
    dataset = datasets_in(folder)[0]
    chosen = [index for index, (path, _) in enumerate(dataset.samples) if "baseline" in path]
    image, label = dataset[chosen[0]]
    many, large = gpu_decoding.MANY_WORKERS, gpu_decoding.SMALL_IMAGE + 1
    for workers, pixels, decoded in ((1, 1, 0), (many, 1, 4), (many, large, 2)):
        info = SimpleNamespace(num_workers=workers)
        monkeypatch.setattr(gpu_decoding, "get_worker_info", lambda info=info: info)
        packed, _ = gpu_decoding.pack(8 * [(image._replace(pixels=pixels), label)])
        assert (packed.files[:, 2] == 0).sum() == decoded


@decodes_files
def test_files_that_the_gpu_cannot_decode_are_decoded_on_the_cpu(folder, monkeypatch):
    def hardly(files, mode, device=None):
        if device is not None:
            raise RuntimeError("Unknown chroma subsampling")
        return decode_jpeg(files, mode=mode)

    decode_jpeg = images.decode_jpeg
    monkeypatch.setattr(gpu_decoding, "decode_jpeg", hardly)
    (expected, _), *_ = batches(DataLoader(datasets_in(folder)[1], 5, collate_fn=collate))
    (found, _), *_ = batches(DecodingLoader(CPU, datasets_in(folder)[1], batch_size=5))
    assert torch.equal(found, expected)


@decodes_files
@pytest.mark.parametrize("reports", [True, False])
@pytest.mark.parametrize("kind", gpu_decoding.DEVICE_ERRORS)
def test_error_of_the_gpu_is_not_reported_as_one_of_a_file(folder, monkeypatch, kind, reports):
    """The decoder reports it, or fails in another way, and copying the image reports it."""

    class Image:
        def to(self, device):
            raise kind("CUDA error")

    def decode_jpeg(files, mode, device=None):
        if device is None and not reports:
            return Image()
        raise kind("CUDA error") if device and reports else RuntimeError("it failed")

    monkeypatch.setattr(gpu_decoding, "decode_jpeg", decode_jpeg)
    with pytest.raises(kind, match="CUDA error"):
        next(iter(DecodingLoader(CPU, datasets_in(folder)[1], batch_size=5)))


@decodes_files
def test_decoding_thread_uses_the_gpu_of_its_process(folder, monkeypatch):
    """A thread starts with GPU 0, on which each process would have a context."""
    loader = DecodingLoader(CPU, datasets_in(folder)[0], batch_size=5)
    loader.stream = SimpleNamespace(device=torch.device("cuda", 1))
    calls = []
    batch = SimpleNamespace(record_stream=calls.append)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext(calls.append("entered")))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "of the training")
    monkeypatch.setattr(gpu_decoding, "unpack", lambda *_: batch)
    next(iter(loader))
    assert calls[:2] == [loader.stream.device, "entered"]
    assert "of the training" in calls


def test_decoding_loader_refuses_a_data_set_without_files():
    with pytest.raises(UserError, match="--decode gpu: .* add --decode cpu"):
        next(iter(DecodingLoader(CPU, task.Digits(train=True))))


def cropped_by_the_kernel(device, seed):
    """Return crops by engine/data/resize.py, and one by one: uint8 (N, 3, 24, 24) each."""
    from engine.data.resize import resize

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
    return found.cpu(), torch.stack(list(map(images.crop_and_resize, whole, crops)))


def cropped_on_each_rank():
    return cropped_by_the_kernel(CPU, seed=dist.get_rank())


@pytest.mark.slow
def test_kernel_equals_torchvision(interpreted_processes):
    for found, expected in interpreted_processes(cropped_on_each_rank):
        assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_compiled_kernel_equals_torchvision(seed):
    found, expected = cropped_by_the_kernel(torch.device("cuda"), seed)
    assert torch.equal(found, expected)


@decodes_files
@pytest.mark.gpu
def test_crops_on_the_gpu_equal_those_on_the_cpu(folder, monkeypatch):
    """But for the arithmetic of nvJPEG, which differs by a few levels where colours change."""
    monkeypatch.setattr(gpu_decoding, "MAX_PIXELS", 200_000)
    device = torch.device("cuda", 0)
    gpu_decoding.require_gpu_decoder(device)
    means = {}
    for dataset in datasets_in(folder):
        options = {"batch_size": 15, "num_workers": 2, "pin_memory": True}
        expected = batches(DataLoader(dataset, collate_fn=collate, **options))
        found = batches(DecodingLoader(device, dataset, **options))
        assert all(batch.device == device for batch, _ in found)
        names = (path.split("-")[-1] for path, _ in dataset.samples)
        for (ours, labels), (theirs, their_labels) in zip(found, expected, strict=True):
            assert torch.equal(labels, their_labels)
            for mean in (ours.cpu().float() - theirs).abs().mean(dim=(1, 2, 3)).tolist():
                means.setdefault(next(names), []).append(mean)
    for name, seen in means.items():
        assert max(seen) < (2 if name in FOR_THE_GPU else 1e-9), (name, max(seen))


@decodes_files
def test_new_memory_is_not_filled_beside_the_decoder(folder, monkeypatch):
    """With deterministic algorithms, torch would; eight runs on one GPU showed white images."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    DecodingLoader(torch.device("cpu"), datasets_in(folder)[0])
    assert not torch.utils.deterministic.fill_uninitialized_memory


def test_decoding_on_the_gpu_requires_a_gpu():
    with pytest.raises(UserError, match="--decode gpu: this run is on the CPU; leave it out"):
        gpu_decoding.require_gpu_decoder(CPU)


@pytest.mark.parametrize(
    ("wanted", "gpu", "cores", "works", "skipped", "expected", "logged"),
    [
        (
            "auto",
            True,
            8,
            True,
            0,
            "gpu",
            "--decode auto: gpu, on 8 CPU cores for each process, fewer",
        ),
        ("auto", True, 14, True, 0, "cpu", "decode auto: cpu, on 14 CPU cores for each process\n"),
        ("auto", True, 8, False, 0, "cpu", "fewer than 14; --decode gpu: no decoder"),
        ("auto", True, 8, True, 1, "cpu", "--decode auto: cpu, which --skip-broken requires\n"),
        ("auto", False, 8, True, 1, "cpu", ""),
        ("cpu", True, 8, True, 1, "cpu", ""),
        ("gpu", True, 99, False, 0, "gpu", ""),  # refused when the loader is built
    ],
)
def test_decoder_is_chosen_by_the_cpu_cores(
    wanted, gpu, cores, works, skipped, expected, logged, monkeypatch, capsys
):
    def require_gpu_decoder(device):
        if not works:
            raise UserError("--decode gpu: no decoder")

    monkeypatch.setattr(gpu_decoding, "require_gpu_decoder", require_gpu_decoder)
    monkeypatch.setattr(gpu_decoding.distributed, "cpu_cores", lambda: cores)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert gpu_decoding.choose_decoder(wanted, skipped) == expected
    said = capsys.readouterr().err
    assert logged in said if logged else not said


@pytest.mark.parametrize("depth", [2, 4])
def test_mask_of_less_than_8_bits_is_an_error(tmp_path, depth):
    """PIL scales its values to 255; those of a palette it keeps."""

    def chunk(kind, content):
        checksum = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)

    def write(colour_type, palette=b""):
        header = struct.pack(">IIBBBBB", 2, 1, depth, colour_type, 0, 0, 0)
        pixels = zlib.compress(bytes([0, 1 << (8 - 2 * depth)]))  # the labels 0 and 1
        content = chunk(b"IHDR", header) + palette + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
        path = tmp_path / "mask.png"
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + content)
        return path

    with pytest.raises(FileError, match=r"one value of 8 bits for each pixel, not 2 or 4"):
        images.read_labels(write(0))
    labels = images.read_labels(write(3, chunk(b"PLTE", bytes(12))))
    assert labels.tolist() == [[0, 1]]


def test_whole_image_is_not_padded() -> None:
    image = torch.randint(0, 256, (3, 20, 30), dtype=torch.uint8)
    assert torch.equal(images.crop_and_resize(image, images.whole(20, 30)), image)
