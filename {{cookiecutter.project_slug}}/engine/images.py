"""Images out of files: read by loading processes, decoded there or, a batch at once, on the GPU.

A dataset gives `Encoded` images, that is bytes and what is to be cropped out of them. A plain
DataLoader decodes and crops them where it collates its batches; a `DecodingLoader` passes the bytes
on and leaves that to the device, which gives the same crops.
"""

import io
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from importlib import util
from pathlib import Path
from typing import NamedTuple

import torch
import torchvision
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map
from torchvision.io import ImageReadMode
from torchvision.transforms.v2 import functional

from engine.errors import UserError

try:
    from torchvision.io import decode_jpeg
except ImportError:  # deprecated since torchvision 0.29
    decode_jpeg = None

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, in RGB
RGB = ImageReadMode.RGB
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)  # of PIL
JPEG = ("JPEG", "MPO")  # PIL's names; the second is of phones, whose files hold more than one image
MAX_SIDE = 4096  # of an image that the GPU decodes
PIXELS_AT_ONCE = 2**26  # that the GPU decodes: 200 MB
AHEAD = 2  # batches that are decoded before they are asked for
MANY_WORKERS = 6  # have cores to spare: of every SHARE files they decode one, which the GPU would
SHARE = 4  # be late with, as its decoder waits for kernels behind those of the training step


class Span(NamedTuple):
    """One side of a crop: `length` pixels from `start` on become `resized`.

    Those of the crop begin at `first` of them.
    """

    start: int
    length: int
    resized: int
    first: int = 0


class Crop(NamedTuple):
    """What is taken of an image: a square of `size` pixels, perhaps mirrored."""

    rows: Span
    columns: Span
    size: int
    flip: bool = False


class Encoded(NamedTuple):
    """A file's bytes, and the crop that is wanted of its image."""

    path: str
    data: bytearray
    pixels: int
    crop: Crop
    suits_gpu: bool


def read(path: str, choose: Callable[[int, int], Crop]) -> Encoded:
    """The file at `path`, its image not yet decoded.

    Args:
        choose: the crop of an image of that height and width.

    Raises:
        UserError: if it is no image.
    """
    try:
        data = bytearray(Path(path).read_bytes())
        with Image.open(io.BytesIO(data)) as image:  # reads no more than the header
            width, height = image.size
            suits_gpu = _suits_gpu(image, data)
    except UNREADABLE as error:
        raise _unreadable(path, error) from None
    return Encoded(path, data, height * width, choose(height, width), suits_gpu)


def read_image(path: str | Path) -> Tensor:
    """The whole image at `path`, as RGB: uint8 (3, H, W).

    Raises:
        UserError: if it is none, or broken.
    """
    return decode(read(str(path), lambda height, width: None))


def _suits_gpu(image: Image.Image, data: bytearray) -> bool:
    """Whether nvJPEG makes of the file what the CPU's decoder makes of it, and as fast.

    Of a progressive file it would leave half of the work to one core. Without an error it would
    fill up a torn one in grey, take RGB for YCbCr, and do without quantisation tables.
    """
    return bool(
        image.format in JPEG
        and (image.mode == "L" or image.mode == "RGB" and not _holds_rgb(image))
        and "progressive" not in image.info
        and image.quantization
        and data.endswith(b"\xff\xd9")
        and max(image.size) <= MAX_SIDE
    )


def _holds_rgb(image: Image.Image) -> bool:
    return image.info.get("adobe_transform") == 0 or image.layer[0][0] == ord("R")


def decode(encoded: Encoded) -> Tensor:
    """The whole image, as RGB, decoded on the CPU: uint8 (3, H, W).

    Raises:
        UserError: if it is broken.
    """
    try:
        with Image.open(io.BytesIO(encoded.data)) as image:
            if decode_jpeg and image.format in JPEG and image.mode in ("L", "RGB"):
                # The same pixels as PIL's, in half of the time.
                return decode_jpeg(torch.frombuffer(encoded.data, dtype=torch.uint8), RGB)
            if image.mode.startswith("I"):  # 16 bits, which PIL would cut off at 255
                image = image.convert("I").point(lambda value: value / 257).convert("L")
            # PIL warns of transparent palettes unless they go through RGBA.
            mode = "RGBA" if "transparency" in image.info else "RGB"
            return functional.pil_to_tensor(image.convert(mode).convert("RGB"))
    except (RuntimeError, *UNREADABLE) as error:
        raise _unreadable(encoded.path, error) from None


def _unreadable(path: str, error: Exception) -> UserError:
    reason = str(error).splitlines()[0].split(", ")[-1]  # torchvision's begins with its source
    return UserError(f"{path} can't be read as an image ({reason}); mend or remove it")


def cut(image: Tensor, crop: Crop) -> Tensor:
    """The crop of `image`, uint8 (3, H, W), resized with antialiasing: uint8 (3, size, size)."""
    (top, height, to_height, y), (left, width, to_width, x), size, flip = crop
    image = functional.resized_crop(
        image, top, left, height, width, [to_height, to_width], antialias=True
    )
    image = image[:, y : y + size, x : x + size]
    return functional.horizontal_flip(image) if flip else image


def normalise(images: Tensor) -> Tensor:
    """A batch of uint8 (N, 3, H, W), normalised on its device; one of floats as it is."""
    if images.is_floating_point():
        return images
    mean, std = _statistics(images.device)
    return torch.sub(images, mean).div_(std)


@cache  # or each batch would wait for a copy to the device
def _statistics(device: torch.device) -> Tensor:
    return 255 * torch.tensor([MEAN, STD], device=device).view(2, 3, 1, 1)


def _collate(batch: list[Encoded], *, collate_fn_map: dict | None = None) -> Tensor:
    """The crops of a batch, decoded here: uint8 (N, 3, size, size)."""
    return default_collate([cut(decode(encoded), encoded.crop) for encoded in batch])


default_collate_fn_map[Encoded] = _collate  # by which a plain DataLoader knows what to do


class Packed(NamedTuple):
    """A batch of files in one tensor: a list of small ones would need a file descriptor each."""

    paths: list[str]
    data: Tensor  # uint8; the files, one after the other
    files: Tensor  # int64 (N, 4): bytes, pixels, whether encoded or a ready crop, whether to flip
    spans: Tensor  # int64 (N, 2, 4): rows and columns
    size: int


def pack(batch: list[tuple]) -> list:
    """A batch of (Encoded, …) as [Packed, …]; what the GPU is not to decode is cut here.

    Raises:
        UserError: if the dataset gives something else, or a file is broken.
    """
    if not isinstance(batch[0][0], Encoded):
        raise UserError("--decode gpu: this data set's images are not files; leave it out")
    images, *others = zip(*batch, strict=True)
    (size,) = {image.crop.size for image in images}
    workers = get_worker_info()
    helps = workers is not None and workers.num_workers >= MANY_WORKERS
    pieces, files, spans = [], [], []
    for place, image in enumerate(images):
        piece, pixels, crop = image.data, image.pixels, image.crop
        suits_gpu = image.suits_gpu and not (helps and place % SHARE == 0)
        if not suits_gpu:
            piece = cut(decode(image), crop).contiguous().flatten().numpy().data
            pixels, crop = size**2, Crop(Span(0, size, size), Span(0, size, size), size)
        pieces.append(piece)
        files.append((len(piece), pixels, suits_gpu, crop.flip))
        spans.append((crop.rows, crop.columns))
    data = torch.frombuffer(bytearray().join(pieces), dtype=torch.uint8)
    paths = [image.path for image in images]
    packed = Packed(paths, data, torch.tensor(files), torch.tensor(spans), size)
    return [packed, *map(default_collate, others)]


def unpack(packed: Packed, device: torch.device) -> Tensor:
    """The crops of a batch: uint8 (N, 3, size, size) on `device`, which has made them.

    Raises:
        UserError: if a file is broken.
    """
    size = packed.size
    lengths, pixels, are_encoded, flips = packed.files.T.tolist()
    files = packed.data.split(lengths)
    # Ready crops are few, or all of a batch: they travel in one piece.
    ready = files if all(are_encoded) else packed.data.to(device).split(lengths)
    crops = []
    for group in _groups(pixels):
        encoded = [index for index in group if are_encoded[index]]
        paths = [packed.paths[index] for index in encoded]
        decoded = iter(_decode_on(device, [files[index] for index in encoded], paths))
        images = [
            next(decoded) if are_encoded[index] else ready[index].view(3, size, size)
            for index in group
        ]
        spans = packed.spans[group.start : group.stop]
        mirrored = flips[group.start : group.stop]
        crops.append(_cut_all(images, spans, mirrored, size))
        if device.type == "cuda":
            # torchvision's decoder has a stream of its own, which doesn't wait for this one: it
            # would write the next images over these, once they are freed.
            torch.cuda.current_stream(device).synchronize()
        del images, decoded
    if len(crops) == 1:
        return crops[0]
    images = torch.cat(crops)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # as above: others read it without waiting
    return images


def _groups(pixels: list[int]) -> Iterator[range]:
    """The images in order, in groups of up to PIXELS_AT_ONCE pixels."""
    start = total = 0
    for index, count in enumerate(pixels):
        if total and total + count > PIXELS_AT_ONCE:
            yield range(start, index)
            start, total = index, 0
        total += count
    yield range(start, len(pixels))


def _decode_on(device: torch.device, files: list[Tensor], paths: list[str]) -> list[Tensor]:
    """The images of JPEG files: uint8 (3, H, W), each of its own size."""
    if not files:
        return []
    try:
        return decode_jpeg(files, RGB, device=device)
    except RuntimeError:  # because of one of them, and it doesn't say which
        return [_decode_alone(device, *file) for file in zip(files, paths, strict=True)]


def _decode_alone(device: torch.device, file: Tensor, path: str) -> Tensor:
    try:
        return decode_jpeg(file, RGB, device=device)
    except RuntimeError:  # of a kind that only the CPU's decoder knows, or broken
        pass
    try:
        image = decode_jpeg(file, RGB)
    except RuntimeError as error:
        raise _unreadable(path, error) from None
    return image.to(device)


def _cut_all(images: list[Tensor], spans: Tensor, flips: list[int], size: int) -> Tensor:
    if images[0].is_cuda:
        from engine.resize import resize  # needs Triton, which comes with torch for GPUs

        return resize(images, spans, torch.tensor(flips, dtype=torch.bool), size)
    crops = [
        Crop(Span(*rows), Span(*columns), size, bool(flip))
        for (rows, columns), flip in zip(spans.tolist(), flips, strict=True)
    ]
    return torch.stack([cut(image, crop) for image, crop in zip(images, crops, strict=True)])


class DecodingLoader(DataLoader):
    """A DataLoader of Encoded images that decodes and crops them on `device`, ahead of their use.

    A thread waits for the decoder, without Python's lock, on a stream of its own; so neither the
    steps nor the CPU that starts them wait.
    """

    def __init__(self, device: torch.device, dataset: Dataset, **options: object) -> None:
        super().__init__(dataset, collate_fn=pack, **options)
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def __iter__(self) -> Iterator[list[Tensor]]:
        return self._decoded(super().__iter__())  # which draws the workers' seed at once

    def _decoded(self, batches: Iterator[list]) -> Iterator[list[Tensor]]:
        with ThreadPoolExecutor(1) as thread:
            ahead = deque()
            for packed, *others in batches:
                ahead.append((thread.submit(self._decode, packed), others))
                if len(ahead) > AHEAD:
                    yield self._taken(*ahead.popleft())
            while ahead:
                yield self._taken(*ahead.popleft())

    def _decode(self, packed: Packed) -> Tensor:
        with torch.cuda.stream(self.stream):
            return unpack(packed, self.device)

    def _taken(self, decoding: Future, others: list[Tensor]) -> list[Tensor]:
        images = decoding.result()
        if self.stream:  # its memory is not to be given out again before the training has read it
            images.record_stream(torch.cuda.current_stream(self.device))
        return [images, *others]


def gpu_loader(device: torch.device) -> Callable[..., DecodingLoader]:
    """What stands in for DataLoader with --decode gpu.

    Raises:
        UserError: if images can't be decoded on `device`.
    """
    if device.type != "cuda":
        raise UserError("--decode gpu: this run is on the CPU; leave it out")
    if util.find_spec("triton") is None:
        raise UserError("--decode gpu needs Triton, which is not installed here; leave it out")
    version = torchvision.__version__
    if decode_jpeg is None:
        raise UserError(f"--decode gpu: torchvision {version} has no decode_jpeg; leave it out")
    probe = io.BytesIO()
    Image.new("RGB", (8, 8)).save(probe, "JPEG")
    try:
        decode_jpeg(torch.frombuffer(probe.getbuffer(), dtype=torch.uint8), RGB, device=device)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"--decode gpu: torchvision {version} can't decode on this GPU ({reason}); leave it out"
        ) from None
    return partial(DecodingLoader, device)
