"""The arithmetic of synced batch norm in torch's operations, which any device has.

torch.compile fuses them with their neighbours. Everything is computed in fp32, or in fp64 for fp64
input. Source: Ioffe and Szegedy, "Batch Normalization", ICML 2015.
"""

import torch
from torch import Tensor


def sum_powers(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of x (N, C, …): Σ(x − shift) and Σ(x − shift)² of each channel (1, 2, C), and shift (C,).

    The shift is the mean of some of the first values. It saves the digits that a mean far from 0
    costs, and where all values of a channel are the same, it is that value: a ReLU then finds 0
    and not an error of rounding.
    """
    some = _wide(x[:8].movedim(1, -1).flatten(0, -2)[:64])
    first = some[:1].sum(0)  # nothing where there are no values
    shift = first + (some - first).sum(0) / max(1, len(some))
    centred = _wide(x) - _per_channel(shift, x)
    return torch.stack([centred.sum(_places(x)), centred.square().sum(_places(x))])[None], shift


def normalise(x: Tensor, statistics: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """(x − mean) · invstd · weight + bias, in the type of x; `statistics` as `moments` has them."""
    mean, invstd = (_per_channel(values, x) for values in statistics[:2])
    output = (_wide(x) - mean) * invstd
    if weight is not None:
        output = output * _per_channel(weight, x)
    if bias is not None:
        output = output + _per_channel(bias, x)
    # A cast to the type that it has makes torch 2.11 compile a backward pass of zeros.
    return output if output.dtype == x.dtype else output.to(x.dtype)


def sum_gradients(grad: Tensor, x: Tensor, statistics: Tensor) -> Tensor:
    """Σ grad and Σ grad · x̂ of each channel (1, 2, C), where x̂ is x normalised."""
    grad = _wide(grad)
    products = (grad * _below_mean(x, statistics)).sum(_places(x)) * -statistics[1]
    return torch.stack([grad.sum(_places(x)), products])[None]


def differentiate(
    grad: Tensor, x: Tensor, statistics: Tensor, means: Tensor, weight: Tensor | None
) -> Tensor:
    """(grad − mean of grad − x̂ · mean of grad · x̂) · invstd · weight: the gradient of x."""
    invstd = statistics[1]
    scale = invstd if weight is None else invstd * weight
    slope = _per_channel(invstd * means[1], x)
    result = _wide(grad) - _per_channel(means[0], x) + _below_mean(x, statistics) * slope
    return (result * _per_channel(scale, x)).to(x.dtype)


def _below_mean(x: Tensor, statistics: Tensor) -> Tensor:
    """mean − x. A compiler would keep x − mean from the forward pass, in fp32, in place of x."""
    return _per_channel(statistics[0], x) - _wide(x)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _places(x: Tensor) -> list[int]:
    """All dimensions but the channels'."""
    return [dim for dim in range(x.dim()) if dim != 1]


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.dim() - 2))
