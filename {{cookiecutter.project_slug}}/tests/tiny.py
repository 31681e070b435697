"""The task in small, for test_features.py."""

import torch
from torch import Tensor, nn

CLASSES = 4
FROZEN = "1"  # a part of the model


def targets(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(CLASSES, (count,), generator=generator)


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def build_normed() -> nn.Module:
    """One with a norm, and no bias before it: Adam would step by that one's rounding errors."""
    torch.manual_seed(0)
    first, last = nn.Conv2d(3, 8, 1, bias=False), nn.Linear(8, CLASSES)
    pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(first, nn.BatchNorm2d(8), nn.Tanh(), *pooled, last)
