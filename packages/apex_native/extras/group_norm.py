"""Group norm of ``apex.contrib.group_norm``, compiled where there is a GPU."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .compiled import compute

ACTIVATIONS = (None, "", "silu", "swish")


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    has_silu: bool,
) -> Tensor:
    dtype = input.dtype
    if weight is not None:
        dtype = torch.promote_types(weight.dtype, input.dtype)
    weight, bias = (p if p is None else p.to(dtype) for p in (weight, bias))
    x = F.group_norm(input.to(dtype), num_groups, weight, bias, eps)
    x = (F.silu(x) if has_silu else x).to(input.dtype)
    if input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last):
        return x.contiguous(memory_format=torch.channels_last)
    return x


class GroupNorm(nn.Module):
    """Group norm with an optional SiLU, of any number of groups and channels.

    Input and parameters may have different types: statistics and activation are of the wider one,
    and the output has the type and the memory format of the input. As Apex's, it has no double
    backward on a GPU.

    Args:
        act: "silu" or "swish", which are the same; others raise ValueError.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        act: str | None = None,
    ) -> None:
        super().__init__()
        if num_channels % num_groups != 0:
            raise ValueError("num_channels must be divisible by num_groups")
        self.num_groups = num_groups
        self.num_channels = num_channels
        self.eps = eps
        self.affine = affine
        self.act = act.lower() if act else act
        if self.act not in ACTIVATIONS:
            raise ValueError(f"GroupNorm: act is {act!r}, not silu or swish.")
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        if affine:
            self.weight = nn.Parameter(torch.ones(num_channels, device=device, dtype=dtype))
            self.bias = nn.Parameter(torch.zeros(num_channels, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Set the weight to ones and the bias to zeros."""
        if self.weight is not None and self.bias is not None:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Return `input` (N, num_channels, …) normalized in each group of channels."""
        return compute(
            _group_norm, input, self.num_groups, self.weight, self.bias, self.eps, bool(self.act)
        )

    def extra_repr(self) -> str:
        """Return the arguments, for ``print(model)``."""
        sizes = f"{self.num_groups}, {self.num_channels}"
        return f"{sizes}, eps={self.eps}, affine={self.affine}, act={self.act}"
