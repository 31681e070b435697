"""Apex's fused layer norms, on torch's own kernels."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F


class _Fused(nn.Module):
    """Mixin with Apex's arguments, whose forward pass takes input of another type than the weight.

    `memory_efficient` is accepted and unused: torch keeps the input, not the output.
    """

    weight: Any
    normalized_shape: Any
    eps: Any
    function: Callable[..., Tensor]  # of torch.nn.functional

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)

    def forward(self, input: Tensor) -> Tensor:
        """Return `input` normalized; compute in fp32 where input and weight differ in type."""
        if self.weight is None or self.weight.dtype == input.dtype:
            return super().forward(input).to(input.dtype)  # which autocast makes fp32
        given = (getattr(self, name, None) for name in ("weight", "bias"))
        parameters = [value.float() for value in given if value is not None]
        output = self.function(input.float(), self.normalized_shape, *parameters, self.eps)
        return output.to(input.dtype)


class FusedLayerNorm(_Fused, nn.LayerNorm):
    """Layer norm over the last dimensions, which have the shape `normalized_shape`.

    Input (…, *normalized_shape) gives output of the same shape and type, whatever the parameters'
    type is.

    Source: Ba et al., "Layer Normalization", 2016 (arXiv 1607.06450).
    """

    function = staticmethod(F.layer_norm)


class FusedRMSNorm(_Fused, nn.RMSNorm):
    """Division of the input by its root mean square, times a weight. Types as in FusedLayerNorm.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019.
    """

    function = staticmethod(F.rms_norm)


class _Mixed(nn.Module):
    """Mixin that casts the input to the parameters' type, which is then that of the output."""

    weight: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.weight is None:
            raise RuntimeError(f"{type(self).__name__} needs elementwise_affine=True.")

    def forward(self, input: Tensor) -> Tensor:
        """Return `input` (…, *normalized_shape) normalized, in the parameters' type."""
        return super().forward(input.to(self.weight.dtype))


class MixedFusedLayerNorm(_Mixed, FusedLayerNorm):
    """FusedLayerNorm whose output has the parameters' type. Raises RuntimeError without them."""


class MixedFusedRMSNorm(_Mixed, FusedRMSNorm):
    """FusedRMSNorm whose output has the weight's type. Raises RuntimeError without one."""
