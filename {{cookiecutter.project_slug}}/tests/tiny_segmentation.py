"""The task in small, and its loss and features as test_features.py expects them."""

from argparse import Namespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 4
FROZEN = "0"  # a part of the model
FORWARD_PASSES = 1  # of a batch, by DDP
ACCUMULATED, STOPPED = ("--accumulate", 2), (1, 4, 32)  # after four steps: epoch, step, samples
OWN_FLAGS = [
    ACCUMULATED,
    ("--accumulate", 2, "--clip-grad", 0.1),
    ("--label-smoothing", 0.5),
    ("--scale-lr", 64, "--accumulate", 2),
]


def targets(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(CLASSES, (count, 4, 4), generator=generator)


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, CLASSES, 1))


def build_normed() -> nn.Module:
    """One with a norm, and no bias before it: Adam would step by that one's rounding errors."""
    torch.manual_seed(0)
    first, last = nn.Conv2d(3, 8, 1, bias=False), nn.Conv2d(8, CLASSES, 1)
    return nn.Sequential(first, nn.BatchNorm2d(8), nn.Tanh(), last)


def loss_of(model: nn.Module, images: Tensor, masks: Tensor, args: Namespace) -> Tensor:
    return F.cross_entropy(model(images), masks, label_smoothing=args.label_smoothing)


def val_loss_of(model: nn.Module, images: Tensor, masks: Tensor) -> Tensor:
    return F.cross_entropy(model(images), masks)


def parts_of(model: nn.Module, args: Namespace) -> list[tuple[nn.Module, float]]:
    """What is trained, with the highest learning rate of each."""
    return [(model, args.lr)]
