"""Small grayscale images in IDX files, the format of MNIST, Fashion-MNIST and KMNIST.

The whole set is held in memory, so that a sample takes microseconds. Debian and Ubuntu have
Fashion-MNIST as the package dataset-fashion-mnist, in /usr/share/datasets/fashion-mnist.
"""

import gzip
import math
import random
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from engine import UserError

SPLITS = {True: "train", False: "t10k"}  # by whether it is for training
IMAGES, LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"
UNSIGNED_BYTE = 8  # code of the values' type in the header
MAX_BYTES = 2**30  # of the values of a file, which are held in memory
MAX_SAMPLES = 2**24  # whose labels take more memory than their bytes
MAX_SHIFT = 7  # divisor of the size: images of 28 pixels are shifted by up to 4


def find_file(folder: Path, train: bool, kind: str) -> Path | None:
    """Return the file of a split, compressed by gzip or not; None if there is none."""
    names = (f"{SPLITS[train]}-{kind}{suffix}" for suffix in (".gz", ""))
    return next((folder / name for name in names if (folder / name).is_file()), None)


def is_idx(folder: Path | None) -> bool:
    """Return whether `folder` holds the images of the validation split as an IDX file."""
    # Not for a RemoteFolder, which would read its manifests at once.
    return isinstance(folder, Path) and find_file(folder, False, IMAGES) is not None


def read_file(folder: Path, train: bool, kind: str) -> np.ndarray:
    """Return the values of a split's images, uint8 (N, H, W), or labels, uint8 (N,).

    Raises UserError if the file is missing or damaged.
    """
    path = find_file(folder, train, kind)
    if path is None:
        raise UserError(f"--data {folder}: there is no file {SPLITS[train]}-{kind}.gz")
    with _opened(path, num_dims=3 if kind == IMAGES else 1) as (file, shape):
        size = math.prod(shape)
        values = file.read(size + 1)  # no more: a small file may decompress to gigabytes
    if len(values) != size:
        raise UserError(f"{path} is damaged or no IDX file of bytes; copy or download it again")
    return np.frombuffer(values, np.uint8).reshape(shape)


@contextmanager
def _opened(path: Path, num_dims: int) -> Iterator[tuple[Any, list[int]]]:
    """Yield an IDX file, open after its header, and the shape of its values."""
    magic = bytes([0, 0, UNSIGNED_BYTE, num_dims])
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            header = file.read(4 + 4 * num_dims)
            is_idx_header = header[:4] == magic and len(header) == 4 + 4 * num_dims
            shape = np.frombuffer(header[4:], ">u4").tolist() if is_idx_header else [0]
            if not 0 < math.prod(shape) <= MAX_BYTES or shape[0] > MAX_SAMPLES:
                limits = f"{MAX_BYTES} bytes and {MAX_SAMPLES} samples"
                raise UserError(f"{path} is damaged or no IDX file of up to {limits}")
            yield file, shape
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} can't be read ({error}); copy or download it again") from None


def image_size(folder: Path) -> int:
    """Return the height and width of the validation images, which are squares."""
    path = find_file(folder, False, IMAGES)
    assert path, "see is_idx"
    with _opened(path, num_dims=3) as (_, shape):  # the flags need no more than the header
        _, height, width = shape
    _require_squares(folder, height, width)
    return height


def _require_squares(folder: Path, height: int, width: int) -> None:
    if height != width:
        raise UserError(f"--data {folder}: its images have {height} × {width} pixels, no squares")


class IdxImages(Dataset):
    """Images uint8 (3, size, size) with equal channels, and their labels.

    Training images are shifted by up to a seventh, with black pixels from the border on, and
    flipped horizontally.

    Args:
        folder: of the IDX files.
        size: height and width to which the images are resized.
        hflip: probability of a flip in training.
        classes: those of the training set, for the validation set: no others may occur.
    """

    def __init__(
        self,
        folder: Path,
        train: bool,
        size: int,
        hflip: float = 0.0,
        classes: Sequence[str] | None = None,
    ) -> None:
        images = torch.tensor(read_file(folder, train, IMAGES))
        labels = read_file(folder, train, LABELS)
        if len(images) != len(labels):
            raise UserError(f"--data {folder}: {len(images)} images, but {len(labels)} labels")
        _require_squares(folder, *images.shape[1:])
        if images.shape[1] != size:
            images = resize(images, size)
        self.size = size
        self.hflip = hflip if train else 0.0
        self.margin = size // MAX_SHIFT if train else 0
        self.images = F.pad(images, [self.margin] * 4).unsqueeze(1)
        self.labels: list[int] = labels.tolist()
        highest = max(self.labels)
        if classes is not None and highest >= len(classes):
            raise UserError(
                f"--data {folder}: the {SPLITS[train]} labels go up to {highest}, those of the "
                f"training images to {len(classes) - 1}; use the files of one data set"
            )
        self.classes = list(classes or map(str, range(highest + 1)))

    def reorder_classes(self, classes: list[str]) -> None:
        """Change the labels to the positions in `classes`, which include all of its own."""
        positions = [classes.index(name) for name in self.classes]
        self.labels = [positions[label] for label in self.labels]
        self.classes = list(classes)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        top, left = self._offset(), self._offset()
        image = self.images[index, :, top : top + self.size, left : left + self.size]
        if random.random() < self.hflip:
            image = image.flip(2)
        return image.expand(3, -1, -1), self.labels[index]

    def _offset(self) -> int:
        return int(random.random() * (2 * self.margin + 1))


def resize(images: Tensor, size: int) -> Tensor:
    """Return images uint8 (N, H, W), resized bilinearly: uint8 (N, size, size)."""
    resized = [
        F.interpolate(part[:, None].float(), (size, size), mode="bilinear", antialias=True)
        for part in images.split(1024)
    ]
    return torch.cat([part.round().to(torch.uint8) for part in resized]).squeeze(1)
