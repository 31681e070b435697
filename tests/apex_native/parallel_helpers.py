"""Models and wrappers that the tests of parallel share."""

import torch
from apex_native.parallel import DistributedDataParallel
from torch import nn


def wrap(model, at_once, **options):
    wrapped = DistributedDataParallel(model, **options)
    if at_once:
        wrapped.average_at_once()
    return wrapped


class Weighted(nn.Module):
    """Module whose weight has its input as gradient."""

    def __init__(self, like):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros_like(like))

    def forward(self, x):
        return (self.weight * x).sum()
