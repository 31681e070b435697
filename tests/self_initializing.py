"""Layer that initializes itself with its first batch, in training and eval mode alike."""

import torch
from torch import Tensor, nn


class SelfInitializing(nn.Module):
    """Normalization by the mean and the deviation of the first batch, as in flow-based models.

    One is a parameter, the other a buffer that is replaced.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(()))
        self.register_buffer("deviation", torch.ones(()))
        self.is_initialized = False

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.is_initialized:
            self.mean.data.copy_(inputs.mean())
            self.deviation = inputs.std()
            self.is_initialized = True
        return (inputs - self.mean) / self.deviation
