"""Image files: reading, decoding and cropping on the CPU.

A dataset returns `Encoded` images. With `engine.data.collate`, a DataLoader's workers decode and
crop them; gpu_decoding.DecodingLoader transfers the bytes and does the same on the device.
"""

import io
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile  # also of MPO, which phones write
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode, functional

from engine import UserError
from engine.data.files import FileError, naming_errors, open_file, read_file

JPEG_DECODER = "PIL"
decode_jpeg: Any = None  # of torchcodec or torchvision
RGB: Any = None  # what it calls this mode
try:
    from torchcodec import decoders

    JPEG_DECODER, decode_jpeg, RGB = "torchcodec", decoders.decode_jpeg, "RGB"
except (ImportError, AttributeError, OSError, RuntimeError):  # older, or made for another torch
    with suppress(ImportError, AttributeError):  # deprecated since torchvision 0.29
        from torchvision import io as torchvision_io

        decode_jpeg, RGB = torchvision_io.decode_jpeg, torchvision_io.ImageReadMode.RGB
        JPEG_DECODER = "torchvision"

# PIL reports damaged metadata of images that it decodes, and large images, for each file. Here, not
# where images are opened: a loader's workers have threads, which share the filters.
warnings.filterwarnings("ignore", module=r"PIL\.")
logging.getLogger("PIL").addHandler(logging.NullHandler())

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, in RGB
# Formats of files, MPO being a kind of JPEG. PIL has more; for EPS it would run Ghostscript.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
TILE_WIDTH, TILE_LENGTH = 322, 323  # tags of TIFF
MAX_TILES = 2**16
MAX_TILE = 2**12  # height and width of a tile that is larger than the image
MAX_RLE_PIXELS = 2**22  # of a compressed BMP file, which PIL decodes in Python
# Of a segment, which has a length. In place of a restart marker, libjpeg skips others alone.
MARKER = re.compile(rb"\xff([\xc0-\xc7\xc9-\xcf\xd9-\xdf\xe0-\xef\xfe])")
MAX_SCANS = 200  # of a progressive JPEG file; each decodes all pixels again
# Of comments of a text file of PPM, by its first bytes, or Exif segments of a JPEG file. PIL copies
# what it has read of them for each further one.
MAX_PARTS = 10_000
PARTS = {b"P1": b"#", b"P2": b"#", b"P3": b"#", b"\xff\xd8": b"\xff\xe1"}
MAX_PIXEL_BYTES, MARGIN_BYTES = 16, 2**26  # of a file: four floats for each pixel, and the rest
MAX_RATIO = 64  # of the sides of an image that is resized, see `trim`
MAX_PIXELS = 2**30 // 12  # of an image that is read: PIL warns of more
MAX_SIDE = 4096  # of an image that the GPU decodes
MAX_SIZE = 2**12  # height and width of a model's images: a checkpoint may be anyone's
INTERPOLATIONS = ("bilinear", "bicubic")


class ImageSpec(NamedTuple):
    """Images that a model is trained and validated with: squares of `size` pixels.

    For validation, `crop_fraction` of the shorter side is cropped from the centre, and resized to
    `eval_size` pixels if that is given.
    """

    size: int = 224
    interpolation: str = "bilinear"  # one of INTERPOLATIONS
    crop_fraction: float = 0.875
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD
    eval_size: int | None = None

    def for_eval(self) -> "ImageSpec":
        """Return the images of validation and inference."""
        return self._replace(size=self.eval_size or self.size)

    def changes(self) -> dict[str, Any]:
        """Return the fields that differ from the defaults."""
        fields = self._asdict().items()
        return {name: value for name, value in fields if value != self._field_defaults[name]}

    def describe(self) -> str:
        """Return a text for the log."""
        mean, std = (", ".join(f"{one:g}" for one in values) for values in (self.mean, self.std))
        return (
            f"images of {self.size} × {self.size} pixels, {self.interpolation}, "
            f"crop {self.crop_fraction:g}, mean {mean}, standard deviation {std}"
        )


def is_image_spec(fields: Any) -> bool:
    """Return whether `fields` is a dict of fields of an ImageSpec, with values in their ranges."""
    if not isinstance(fields, dict) or not fields.keys() <= set(ImageSpec._fields):
        return False
    spec = ImageSpec(**fields)
    sizes = [spec.size] if spec.eval_size is None else [spec.size, spec.eval_size]
    numbers = [spec.crop_fraction]
    for values in spec.mean, spec.std:
        numbers += values if isinstance(values, tuple | list) and len(values) == 3 else [math.nan]
    return (
        all(type(size) is int and 0 < size <= MAX_SIZE for size in sizes)
        and spec.interpolation in INTERPOLATIONS
        and all(type(number) in (int, float) and abs(number) <= MAX_SIZE for number in numbers)
        and 0.01 <= spec.crop_fraction <= 1
        and max(sizes) / spec.crop_fraction <= 2 * MAX_SIZE
    )


class Span(NamedTuple):
    """One side of a crop: `length` pixels from `start` on are resized to `resized` pixels.

    The crop starts at pixel `first` of the resized side.
    """

    start: int
    length: int
    resized: int
    first: int = 0


class Crop(NamedTuple):
    """The part of an image that is used: a square of `size` pixels, flipped horizontally or not."""

    rows: Span
    columns: Span
    size: int
    flip: bool = False
    interpolation: str = "bilinear"  # or bicubic, on the CPU alone


class Encoded(NamedTuple):
    """A file's bytes, and the crop of its image."""

    path: str
    data: bytearray
    pixels: int
    crop: Crop
    suits_gpu: bool


def read_encoded(path: str, choose_crop: Callable[[int, int], Crop]) -> Encoded:
    """Read the file at `path` without decoding its image.

    Args:
        choose_crop: function from height and width of an image to its crop.

    Raises FileError if the file is not an image.
    """
    with naming_errors(path, "an image"):
        data = read_file(path)
        part = PARTS.get(bytes(data[:2]))
        if part and data.count(part) > MAX_PARTS:
            raise OSError(0, f"it has more than {MAX_PARTS} comments or Exif segments")
        if data.startswith(b"\xff\xd8"):
            _hide_orientation(data)  # first: PIL before 13 copies its values as often as it says
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:  # reads only the header
            _check_size(image)
            width, height = image.size
            if len(data) > MAX_PIXEL_BYTES * width * height + MARGIN_BYTES:  # a batch holds many
                raise OSError(0, f"it has {len(data)} bytes, far more than its pixels take")
            suits_gpu = _suits_gpu(image, data)
            is_suspect = isinstance(image, JpegImageFile) and data.count(b"\xff\xda") > MAX_SCANS
            # Without those of previews and appended videos.
            if is_suspect and [one for _, one in _segments(data)].count(b"\xda") > MAX_SCANS:
                raise OSError(0, f"it has more than {MAX_SCANS} scans")
    return Encoded(path, data, height * width, choose_crop(height, width), suits_gpu)


def read_image(path: str | Path) -> Tensor:
    """Return the whole image at `path`, as RGB: uint8 (3, H, W).

    Raises FileError if the file is not an image, or damaged.
    """
    return decode(read_encoded(str(path), whole))


@contextmanager
def open_image(
    path: Path,
    kind: str = "an image",
    formats: tuple[str, ...] = FORMATS,
    is_whole: bool = False,
) -> Iterator[Image.Image]:
    """Open an image with PIL, which reads only the header unless `is_whole`.

    Raises FileError if that fails, or the body does; `kind` is what the body reads the file as.
    """
    with (
        naming_errors(path, kind),
        io.BytesIO(read_file(path)) if is_whole else open_file(path) as file,
        Image.open(file, formats=formats) as image,
    ):
        _check_size(image)
        yield image


def _check_size(image: Image.Image) -> None:
    """Raise OSError for an image that would take more than a gigabyte to decode."""
    tags = getattr(image, "tag_v2", {})  # of a TIFF file, whose tiles can be larger than the image
    sides = [tags.get(name) for name in (TILE_WIDTH, TILE_LENGTH)]
    tile = [side for side in sides if isinstance(side, int) and side > 0]
    tiled = [-(-length // side) * side for length, side in zip(image.size, tile, strict=False)]
    pixels = max(math.prod(image.size), math.prod(tiled))
    if pixels > MAX_PIXELS:
        raise OSError(0, f"it has {pixels} pixels, more than {MAX_PIXELS}")
    if max(tile, default=0) > max(*image.size, MAX_TILE):  # a small file may have many of them
        raise OSError(0, f"it has tiles of {' × '.join(map(str, tile))} pixels")
    parts = [extent for _, extent, *_ in getattr(image, "tile", ())]  # strips are tiles for PIL
    area = sum((right - left) * (lower - upper) for left, upper, right, lower in parts)
    if len(parts) > MAX_TILES or area > 12 * MAX_PIXELS:
        raise OSError(0, f"it has {len(parts)} strips or tiles of {area} pixels in all")
    is_rle = image.format == "BMP" and image.info.get("compression") in (1, 2)
    if is_rle and pixels > MAX_RLE_PIXELS:
        raise OSError(0, f"it is a compressed BMP file of more than {MAX_RLE_PIXELS} pixels")


def read_labels(path: Path) -> Tensor:
    """Return the pixel values of a PNG file: int64 (H, W)."""
    # JPEG changes values, and PIL scales those of PGM.
    with open_image(path, "a mask", ("PNG",), is_whole=True) as image:
        # PIL scales the values of grey images of 2 and 4 bits, so that they are no labels.
        is_scaled = any(tile[3] in ("L;2", "L;4") for tile in getattr(image, "tile", ()))
        if image.mode not in ("L", "P") or is_scaled:
            found = "2 or 4" if is_scaled else image.mode
            form = f"one value of 8 bits for each pixel, not {found}"
            raise FileError(f"{path} is no mask: it must hold {form}", str(path))
        return torch.from_numpy(np.array(image)).long()


def trim(image: Tensor) -> Tensor:
    """Return the central part whose longer side is at most MAX_RATIO times the shorter.

    To resize the shorter side of 60,000 × 1 pixels to 256 would take 12 GB. For transforms of
    images and masks, (..., H, W).
    """
    height, width = image.shape[-2:]
    longest = MAX_RATIO * min(height, width)
    if max(height, width) <= longest:
        return image
    return functional.center_crop(image, [min(height, longest), min(width, longest)])


def whole(height: int, width: int) -> Crop:
    """Return the crop of all of an image, in its own size."""
    size = max(height, width)
    return Crop(Span(0, height, height), Span(0, width, width), size)


def _hide_orientation(data: bytearray) -> None:
    """Keep TorchCodec from turning a JPEG image as its EXIF data say: torchvision and PIL do not.

    TorchCodec reads them from any APP1 segment.
    """
    for place, marker in _segments(data):
        if marker == b"\xda":  # the start of the first scan
            return
        if marker == b"\xe1":
            data[place] = 0xEF  # APP15, which none reads


def _segments(data: bytearray) -> Iterator[tuple[int, bytes]]:
    """Yield the position and the value of the marker of each segment of a JPEG file."""
    position = 2
    while (found := MARKER.search(data, position)) and found[1] != b"\xd9":
        marker, position = found[1], found.end()
        yield position - 1, marker
        position += int.from_bytes(data[position : position + 2], "big")


def _suits_gpu(image: Image.Image, data: bytearray) -> bool:
    """Return whether nvJPEG decodes the file as the CPU's decoder does, and faster.

    It leaves half of the work on a progressive file to one core. Without an error, it fills a
    truncated file with grey, reads RGB as YCbCr, and ignores missing quantization tables.
    """
    if not isinstance(image, JpegImageFile):
        return False
    holds_rgb = image.info.get("adobe_transform") == 0 or image.layer[0][0] == ord("R")
    return bool(
        (image.mode == "L" or (image.mode == "RGB" and not holds_rgb))
        and "progressive" not in image.info
        and image.quantization
        and data.endswith(b"\xff\xd9")
        and max(image.size) <= MAX_SIDE
    )


def decode(encoded: Encoded) -> Tensor:
    """Return the whole image, as RGB, decoded on the CPU: uint8 (3, H, W).

    Raises FileError if the file is damaged.
    """
    with (
        naming_errors(encoded.path, "an image"),
        Image.open(io.BytesIO(encoded.data), formats=FORMATS) as image,
    ):
        if decode_jpeg and isinstance(image, JpegImageFile) and image.mode in ("L", "RGB"):
            # The same pixels as PIL's, in half the time.
            return decode_jpeg(torch.frombuffer(encoded.data, dtype=torch.uint8), mode=RGB)
        if image.mode == "F" or (image.mode == "I" and image.format == "TIFF"):
            raise ValueError("32 bits a pixel in an unknown range: convert it to 8 or 16 bits")
        if image.mode.startswith("I"):  # 16 bits, which PIL would clip at 255
            eight_bits = image.convert("I").point(lambda value: value / 256)  # as torchvision's
            return functional.pil_to_tensor(eight_bits.convert("L").convert("RGB"))
        # PIL warns of transparent palettes unless they go through RGBA.
        mode = "RGBA" if "transparency" in image.info else "RGB"
        return functional.pil_to_tensor(image.convert(mode).convert("RGB"))


def crop_and_resize(image: Tensor, crop: Crop) -> Tensor:
    """Return the crop of `image`, uint8 (3, H, W), antialiased: uint8 (3, size, size)."""
    rows = crop.rows
    columns = crop.columns
    image = functional.crop(image, rows.start, columns.start, rows.length, columns.length)
    size = [rows.resized, columns.resized]
    image = functional.resize(image, size, InterpolationMode(crop.interpolation), antialias=True)
    image = image[:, rows.first : rows.first + crop.size, columns.first : columns.first + crop.size]
    return functional.horizontal_flip(image) if crop.flip else image


def normalize(images: Tensor) -> Tensor:
    """Normalize a batch of uint8 (N, 3 or 1, H, W) on its device; return floats unchanged.

    Raises UserError for other integers, whose range is unknown, and other numbers of channels.
    """
    if images.is_floating_point():
        return images
    if images.dtype != torch.uint8 or images.shape[1] not in (1, 3):
        raise UserError(
            f"the images are {images.dtype} with {images.shape[1]} channels: a data set returns "
            "uint8 with 1 or 3 channels, or float32 that it has normalized"
        )
    mean, std = _statistics(images.device)
    return torch.sub(images, mean).div_(std)


@cache  # without it, each batch would wait for a copy to the device
def _statistics(device: torch.device) -> Tensor:
    return 255 * torch.tensor([MEAN, STD], device=device).view(2, 3, 1, 1)
