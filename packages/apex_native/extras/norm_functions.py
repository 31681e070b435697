"""Functions of ``apex.normalization.fused_layer_norm``, on torch's kernels.

Their arguments have the same meaning in all of them: `input` (…, *normalized_shape), a `weight` and
a `bias` of the shape `normalized_shape`, and the `eps` that is added to the variance or the mean
square. `memory_efficient` is accepted as in Apex and unused: torch keeps the input, not the output.
Statistics are computed in fp32 at least. Under autocast, torch computes and returns fp32, where
Apex returns autocast's type.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from apex_native.amp.casting import HALF_TYPES
from torch import Tensor
from torch.nn import functional as F

Shape = int | Sequence[int]


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Return the layer norm of `input`, in its type."""
    return _normalize(F.layer_norm, input, normalized_shape, (weight, bias), eps, input.dtype)


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return the layer norm of `input` without weight and bias, in its type."""
    return F.layer_norm(input, _as_shape(normalized_shape), eps=eps)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Return the layer norm of `input`, in the type of `weight`."""
    return _normalize(F.layer_norm, input, normalized_shape, (weight, bias), eps, weight.dtype)


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Return `input` divided by its root mean square, times `weight`, in the type of `input`."""
    return _normalize(F.rms_norm, input, normalized_shape, (weight,), eps, input.dtype)


def fused_rms_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return `input` divided by its root mean square, in its type."""
    return F.rms_norm(input, _as_shape(normalized_shape), eps=eps)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Return `input` divided by its root mean square, times `weight`, in the type of `weight`."""
    return _normalize(F.rms_norm, input, normalized_shape, (weight,), eps, weight.dtype)


def manual_rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float
) -> Tensor:
    """Return `input` divided by its root mean square, in torch operations.

    As in Apex, the quotient is fp32 at least, and is rounded to the type of a half `weight` before
    it is multiplied by that.
    """
    dims = tuple(range(-len(normalized_shape), 0))
    squares = input.float().square().mean(dims, keepdim=True)
    quotient = input * (squares + eps).rsqrt()
    if weight is None:
        return quotient
    if weight.dtype in HALF_TYPES:
        quotient = quotient.to(weight.dtype)
    return weight * quotient


def _as_shape(normalized_shape: Shape) -> list[int]:
    is_number = isinstance(normalized_shape, int)
    return [normalized_shape] if is_number else list(normalized_shape)  # type: ignore


def _normalize(
    function: Callable[..., Tensor],
    input: Tensor,
    normalized_shape: Shape,
    parameters: tuple[Tensor, ...],
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return ``function(input, …)`` as `dtype`, computed in fp32 where the types differ."""
    shape = _as_shape(normalized_shape)
    if all(parameter.dtype == input.dtype for parameter in parameters):
        return function(input, shape, *parameters, eps)
    widest = torch.promote_types(torch.promote_types(input.dtype, parameters[0].dtype), torch.float)
    own = [parameter.to(widest) for parameter in parameters]
    return function(input.to(widest), shape, *own, eps).to(dtype)


# Apex's autograd functions, which copies of its modules call by ``apply``.
FusedLayerNormFunction = SimpleNamespace(apply=fused_layer_norm)
FusedLayerNormAffineFunction = SimpleNamespace(apply=fused_layer_norm_affine)
FusedLayerNormAffineMixedDtypesFunction = SimpleNamespace(apply=mixed_dtype_fused_layer_norm_affine)
FusedRMSNormFunction = SimpleNamespace(apply=fused_rms_norm)
FusedRMSNormAffineFunction = SimpleNamespace(apply=fused_rms_norm_affine)
FusedRMSNormAffineMixedDtypesFunction = SimpleNamespace(apply=mixed_dtype_fused_rms_norm_affine)
