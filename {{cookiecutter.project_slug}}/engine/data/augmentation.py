"""Augmentation of a classification's training samples, beyond its random crop.

Random numbers are drawn on the CPU with each sample, from the generators that `SeededDataset`
seeds, so that a resumed run draws the same ones. `mix` applies them to the batch on its device.

Sources: Zhang et al., "mixup", ICLR 2018; Yun et al., "CutMix", ICCV 2019; Zhong et al., "Random
Erasing Data Augmentation", AAAI 2020; Cubuk et al., "RandAugment", NeurIPS 2020; Müller and Hutter,
"TrivialAugment", ICCV 2021.
"""

import math
import random
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchvision.transforms import v2

from engine import UserError
from engine.data import DatasetWrapper, SizedDataset, decode_crops, require_default_collate

POLICIES = {"randaugment": v2.RandAugment, "trivialaugment": v2.TrivialAugmentWide}
ERASED_AREA = (0.02, 0.33)  # fraction of the image
ERASED_RATIO = (0.3, 3.3)  # height to width
MIXED_AT_ONCE = 0.5  # probability of mixup where CutMix is used, too
DRAWN = torch.float64  # type of the random numbers, unlike that of weights

Targets = list[tuple[Tensor, Tensor]]  # labels and weights, both (N,), whose losses are added


class Box(NamedTuple):
    """Part of an image, in fractions of its sides."""

    top: float = 0.0
    bottom: float = 0.0
    left: float = 0.0
    right: float = 0.0


class AutoAugmentedDataset(DatasetWrapper):
    """`dataset` with a policy of torchvision applied to its uint8 images, after their crop."""

    def __init__(self, dataset: SizedDataset, policy: str) -> None:
        super().__init__(dataset)
        self.transform = POLICIES[policy]()

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        image, *rest = self.dataset[index]
        pixels = decode_crops(image)
        if pixels.dtype != torch.uint8:  # colours of normalized images would be clamped
            raise UserError(
                f"--auto-augment needs uint8 images, not {pixels.dtype}: return uint8, which the "
                "project normalizes, or leave the flag out and augment them in the data set"
            )
        return (self.transform(pixels), *rest)


class MixedDataset(DatasetWrapper):
    """`dataset` with what `mix` needs: random numbers for each sample, and a weight to mix labels.

    Args:
        dataset: of (image, label) or (image, label, weight).
        mixup: parameter of the beta distribution by which two images are blended; 0 for none.
        cutmix: the same of the area that is replaced by another image's; 0 for none.
        random_erasing: probability of erasing a rectangle.
    """

    def __init__(
        self, dataset: SizedDataset, mixup: float, cutmix: float, random_erasing: float
    ) -> None:
        require_default_collate(dataset, "--mixup, --cutmix or --random-erasing")
        super().__init__(dataset)
        self.mixup, self.cutmix, self.random_erasing = mixup, cutmix, random_erasing

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        image, label, *weight = self.dataset[index]
        if not weight and (self.mixup or self.cutmix):
            weight = [torch.tensor(1.0)]
        return image, label, *weight, self._draw()

    def _draw(self) -> Tensor:
        """Return the fraction of the own image, the box of the other one, and the erased box."""
        own, box, erased = 1.0, Box(), Box()
        if self.mixup and (not self.cutmix or random.random() < MIXED_AT_ONCE):
            own = random.betavariate(self.mixup, self.mixup)
        elif self.cutmix:
            box = cut_box(random.betavariate(self.cutmix, self.cutmix))
        if random.random() < self.random_erasing:
            erased = erased_box()
        return torch.tensor([own, *box, *erased], dtype=DRAWN)


def cut_box(area: float) -> Box:
    """Return a box of that area with a random centre, less what lies outside of the image."""
    half = math.sqrt(area) / 2
    y, x = random.random(), random.random()
    return Box(max(0.0, y - half), min(1.0, y + half), max(0.0, x - half), min(1.0, x + half))


def erased_box() -> Box:
    """Return a random box of an area in ERASED_AREA and a ratio in ERASED_RATIO."""
    while True:
        area = random.uniform(*ERASED_AREA)
        ratio = math.exp(random.uniform(*map(math.log, ERASED_RATIO)))
        height, width = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if height < 1 and width < 1:
            top, left = random.uniform(0, 1 - height), random.uniform(0, 1 - width)
            return Box(top, top + height, left, left + width)


def mix(images: Tensor, labels: Tensor, extra: list[Tensor]) -> tuple[Tensor, Tensor | Targets]:
    """Return images and targets of a batch, mixed and erased as was drawn with its samples.

    Each image is mixed with the one before it in the batch. Targets without any weights are the
    labels, also of images that are erased alone.

    Args:
        images: normalized, (N, C, H, W); erased pixels become 0, the mean colour.
        labels: (N,).
        extra: the further elements of the samples: none, weights (N,), or what `MixedDataset` adds,
            the random numbers (N, 9), perhaps after weights.

    Raises UserError if they are something else, such as indices.
    """
    weights = [*extra]
    drawn = weights.pop() if extra and _is_tensor(extra[-1], DRAWN, 9) else None
    if weights and not (len(weights) == 1 and _is_tensor(weights[0], torch.float32)):
        found = ", ".join(map(_describe, extra))
        raise UserError(
            "a training sample is (image, label), perhaps with the weight of its loss, a float32 "
            f"scalar such as torch.tensor(1.0); after the label, these have {found}"
        )
    if drawn is None:
        return images, [(labels, weights[0])] if weights else labels
    own, box, erased = drawn.float().split([1, 4, 4], dim=1)
    # Arithmetic keeps the memory format of its first operand; masked_fill and where may not.
    images = images * ~_inside(erased, images)
    if not weights:
        return images, labels
    share = own[:, :, None, None] * ~_inside(box, images)  # of the own image, in each pixel
    images = torch.lerp(previous(images), images, share.to(images.dtype))
    own = share.mean(dim=(1, 2, 3))
    weight = weights[0]
    return images, [(labels, own * weight), (previous(labels), (1 - own) * previous(weight))]


def _is_tensor(batch: object, dtype: torch.dtype, *shape: int) -> bool:
    """Return whether a batch has a tensor of that type and shape for each sample."""
    return isinstance(batch, Tensor) and batch.dtype == dtype and batch.shape[1:] == shape


def _describe(batch: object) -> str:
    if not isinstance(batch, Tensor):
        return "no tensor"
    return f"{batch.dtype} of shape {tuple(batch.shape[1:])}"


def previous(batch: Tensor) -> Tensor:
    """Return the batch in which each sample is the one before it, in the same memory format."""
    return torch.cat([batch[-1:], batch[:-1]])


def _inside(boxes: Tensor, images: Tensor) -> Tensor:
    """Return whether each pixel of `images` is in the box of its image: bool (N, 1, H, W)."""
    top, bottom, left, right = boxes[:, :, None].unbind(dim=1)
    height, width = images.shape[-2:]
    rows = torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device)
    in_rows = (rows >= (top * height).floor()) & (rows < (bottom * height).floor())
    in_columns = (columns >= (left * width).floor()) & (columns < (right * width).floor())
    return (in_rows[:, :, None] & in_columns[:, None, :])[:, None]
