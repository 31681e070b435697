"""Image size that grows during the training: --image-size 128:224.

Most epochs train on smaller images, which is faster; the last fifth trains on the full size. Sizes
are multiples of 32, so that there are few of them, for each of which kernels are compiled and
cuDNN's algorithms are chosen once. The size depends on the epoch alone, so that a resumed run
trains on the same images.

Source: Touvron et al., "Fixing the train-test resolution discrepancy", NeurIPS 2019; Howard,
"Now anyone can train ImageNet in 18 minutes", 2018.
"""

import argparse
import math
import re
from typing import Any, NamedTuple

from engine import UserError
from engine.data import DatasetWrapper, SizedDataset
from engine.data.images import MAX_SIZE, Crop, Encoded, Span

MULTIPLE = 32
FULL_SIZE = 0.2  # fraction of the epochs at the last size


class SizeSchedule(NamedTuple):
    """Image size of each epoch, from `first` to `last` pixels."""

    first: int
    last: int
    epochs: int

    def at(self, epoch: int) -> int:
        """Return the size in an epoch, counted from 0."""
        progress = epoch / max(1.0, self.epochs * (1 - FULL_SIZE))
        if progress >= 1 or epoch == self.epochs - 1:
            return self.last
        size = self.first + progress * (self.last - self.first)
        return max(self.first, int(size) // MULTIPLE * MULTIPLE)

    def describe(self) -> str:
        """Return a text for the log."""
        sizes = [self.at(epoch) for epoch in range(self.epochs)]
        starts = (f"{size} from epoch {sizes.index(size) + 1}" for size in dict.fromkeys(sizes))
        return f"image size {', '.join(starts)}"


def size_range(text: str) -> str:
    """Check the argument of --image-size: a size, such as 224, or two, such as 128:224."""
    first, last = parse_size(text) if re.fullmatch(r"0*[1-9]\d*(:0*[1-9]\d*)?", text) else (1, 0)
    if not 0 < first <= last <= MAX_SIZE:
        expected = f"a number of pixels up to {MAX_SIZE}, such as 224, or a range, such as 128:224"
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return text


def parse_size(text: str) -> tuple[int, int]:
    """Return the first and the last size of a valid argument of --image-size."""
    first, _, last = text.partition(":")
    return int(first), int(last or first)


class ProgressiveDataset(DatasetWrapper):
    """`dataset` of encoded images whose crops are resized to the size of the epoch."""

    def __init__(self, dataset: SizedDataset, schedule: SizeSchedule) -> None:
        super().__init__(dataset)
        self.schedule = schedule
        self.size = schedule.at(0)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, on which the size depends; SeededDataset calls it."""
        self.size = self.schedule.at(epoch)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        encoded, *rest = self.dataset[index]
        if not isinstance(encoded, Encoded):
            problem = "this data set's images are not files; give one size"
            raise UserError(f"--image-size with two sizes: {problem}")
        return encoded._replace(crop=resized(encoded.crop, self.size)), *rest


def resized(crop: Crop, size: int) -> Crop:
    """Return the crop of the same part of an image in `size` pixels a side."""
    rows, columns = (_scaled(span, crop.size, size) for span in (crop.rows, crop.columns))
    return crop._replace(rows=rows, columns=columns, size=size)


def _scaled(span: Span, before: int, size: int) -> Span:
    resized = math.ceil(span.resized * size / before)  # rounded so that it holds the crop
    return span._replace(resized=resized, first=span.first * size // before)
