"""Apex's fused layer norms, on torch's own kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class FusedLayerNorm(nn.LayerNorm):
    """Layer norm over the last dimensions, of the shape `normalized_shape`.

    Input (…, *normalized_shape) gives output of the same shape and type, whatever the parameters'
    type is. `memory_efficient` is accepted and unused: torch keeps the input, not the output.

    Source: Ba et al., "Layer Normalization", 2016 (arXiv 1607.06450).
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)

    def forward(self, input: Tensor) -> Tensor:
        """Computes in fp32 where input and parameters differ in type."""
        if self.weight is None or self.weight.dtype == input.dtype:
            return super().forward(input)
        weight, bias = self.weight.float(), self.bias.float()
        output = F.layer_norm(input.float(), self.normalized_shape, weight, bias, self.eps)
        return output.to(input.dtype)


class FusedRMSNorm(nn.Module):
    """The input over its root mean square, times a weight.

    Shapes, types and `memory_efficient` as in FusedLayerNorm.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
        self.normalized_shape, self.eps = torch.Size(shape), eps
        self.elementwise_affine = elementwise_affine
        weight = nn.Parameter(torch.ones(self.normalized_shape)) if elementwise_affine else None
        self.register_parameter("weight", weight)

    def forward(self, input: Tensor) -> Tensor:
        """Computes in fp32 where input and weight differ in type."""
        if self.weight is None or self.weight.dtype == input.dtype:
            return F.rms_norm(input, self.normalized_shape, self.weight, self.eps)
        weight = self.weight.float()
        output = F.rms_norm(input.float(), self.normalized_shape, weight, self.eps)
        return output.to(input.dtype)

    def extra_repr(self) -> str:
        return (
            f"{tuple(self.normalized_shape)}, eps={self.eps}, "
            f"elementwise_affine={self.elementwise_affine}"
        )


class _InTheParametersType:
    """What makes a norm a mixed one: its output has its parameters' type, not its input's."""

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float = 1e-5, **kwargs: bool
    ) -> None:
        if not kwargs.get("elementwise_affine", True):
            raise RuntimeError(f"{type(self).__name__} needs elementwise_affine=True.")
        super().__init__(normalized_shape, eps, **kwargs)

    def forward(self, input: Tensor) -> Tensor:
        """(…, *normalized_shape) → the same shape, in the parameters' type."""
        return super().forward(input.to(self.weight.dtype))


class MixedFusedLayerNorm(_InTheParametersType, FusedLayerNorm):
    """FusedLayerNorm whose output has the parameters' type. Raises RuntimeError without them."""


class MixedFusedRMSNorm(_InTheParametersType, FusedRMSNorm):
    """FusedRMSNorm whose output has the weight's type. Raises RuntimeError without one."""
