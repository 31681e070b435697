"""Reference implementation of synchronized batch norm: torch operations and collectives.

It runs on any device, with any backend of torch.distributed. torch.compile fuses the operations
with their neighbours. Everything is computed in fp32, or in fp64 for fp64 input.

The other implementations override methods of `Reference`. Shapes: x and gradients (N, C, …), sums
(parts, 2, C), and statistics (4, C), whose rows are the mean, 1 / √(variance + eps), the number of
values, and the unbiased variance of each channel over all processes of the group.

Source: Ioffe and Szegedy, "Batch Normalization", ICML 2015.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

Running = tuple[Tensor, Tensor] | None  # the running mean and variance, (C,) each, to be updated


class Reference:
    """Implementation in torch operations, for any memory layout; the interface of the others."""

    def __init__(self, exchange: "Collectives") -> None:
        self.exchange = exchange

    def to_layout(self, x: Tensor) -> Tensor:
        """Return x in the memory layout that the other methods take; x itself if it has it."""
        return x

    def batch_statistics(
        self, x: Tensor, eps: float, running: Running, momentum: float | Tensor
    ) -> Tensor:
        """Return the statistics of x over the group; move `running` towards them by `momentum`."""
        with torch.no_grad():
            sums, shift = self.power_sums(x)
            count = x.numel() // x.shape[1]
            statistics = self.exchange.batch_statistics(sums, shift, count, eps)
            if running is not None:
                for old, new in zip(running, statistics[::3], strict=True):
                    old.lerp_(new.to(old.dtype), momentum)
        return statistics

    def gradient_means(self, grad: Tensor, x: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor]:
        """Return the local gradient sums (2, C), and their means over the group's values (2, C)."""
        return self.exchange.gradient_means(self.gradient_sums(grad, x, statistics), statistics)

    def power_sums(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return Σ(x − shift) and Σ(x − shift)² of each channel, and the shift (C,).

        The shift is the mean of some of the first values. It saves the digits that a mean far from
        0 costs. Where all values of a channel are equal it is that value, so that a ReLU after the
        norm gets exactly 0 and not a rounding error.
        """
        sample = _widen(x[:8].movedim(1, -1).flatten(0, -2)[:64])
        first = sample[:1].sum(0)  # zero where there are no values
        shift = first + (sample - first).sum(0) / max(1, len(sample))
        centred = _widen(x) - _per_channel(shift, x)
        sums = [centred.sum(_reduced_dims(x)), centred.square().sum(_reduced_dims(x))]
        return torch.stack(sums)[None], shift

    def normalize(
        self, x: Tensor, statistics: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """Return (x − mean) · invstd · weight + bias, in the type of x."""
        mean, invstd = (_per_channel(values, x) for values in statistics[:2])
        output = (_widen(x) - mean) * invstd
        if weight is not None:
            output = output * _per_channel(weight, x)
        if bias is not None:
            output = output + _per_channel(bias, x)
        # A cast to the type that it has makes torch 2.11 compile a backward pass of zeros.
        return output if output.dtype == x.dtype else output.to(x.dtype)

    def gradient_sums(self, grad: Tensor, x: Tensor, statistics: Tensor) -> Tensor:
        """Return Σ grad and Σ grad · x̂ of each channel, where x̂ is x normalized."""
        grad = _widen(grad)
        products = (grad * _mean_minus(x, statistics)).sum(_reduced_dims(x)) * -statistics[1]
        return torch.stack([grad.sum(_reduced_dims(x)), products])[None]

    def input_gradient(
        self, grad: Tensor, x: Tensor, statistics: Tensor, means: Tensor, weight: Tensor | None
    ) -> Tensor:
        """Return (grad − mean of grad − x̂ · mean of grad · x̂) · invstd · weight."""
        invstd = statistics[1]
        scale = invstd if weight is None else invstd * weight
        slope = _per_channel(invstd * means[1], x)
        result = _widen(grad) - _per_channel(means[0], x) + _mean_minus(x, statistics) * slope
        return (result * _per_channel(scale, x)).to(x.dtype)


class Collectives:
    """Exchange of each process's sums within a group, through NCCL or gloo.

    While compiling, it happens in operators, because dynamo must not trace it.
    """

    def __init__(self, group: str) -> None:
        self.group = group

    def batch_statistics(self, sums: Tensor, shift: Tensor, count: int, eps: float) -> Tensor:
        """Return the statistics, from Σ(x − shift) and Σ(x − shift)² of `count` local values."""
        function = _statistics_op if torch.compiler.is_compiling() else _gathered_statistics
        return function(sums, shift, count, eps, self.group)

    def gradient_means(self, sums: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor]:
        """Return the local sums (2, C) and the means over the group's values (2, C)."""
        function = _gradient_means_op if torch.compiler.is_compiling() else _reduced_means
        return function(sums, statistics, self.group)


def resolve_group(name: Any) -> dist.ProcessGroup:
    """Return the process group of that name, which, unlike the group, an operator can take.

    torch has no public function for it; torch's own functional collectives use this one.
    """
    return _resolve_process_group(name)


def _gathered_statistics(sums: Tensor, shift: Tensor, count: int, eps: float, group: str) -> Tensor:
    members = resolve_group(group)
    first, second = sums.double().sum(0)
    offset = first / max(count, 1)
    mean = offset + shift
    squares = (second - first * offset).clamp(min=0)
    local = torch.stack([mean, squares, torch.full_like(mean, count)])
    gathered = [torch.empty_like(local) for _ in range(members.size())]
    dist.all_gather(gathered, local, members)
    means, all_squares, counts = torch.stack(gathered, dim=1)
    total = counts.sum(0).clamp(min=1)  # a nan would stay in the running statistics
    mean = (means * counts).sum(0) / total
    squares = (all_squares + (means - mean).square() * counts).sum(0)
    invstd = (squares / total + eps).rsqrt()
    return torch.stack([mean, invstd, total, squares / (total - 1).clamp(min=1)]).to(sums.dtype)


def _reduced_means(sums: Tensor, statistics: Tensor, group: str) -> tuple[Tensor, Tensor]:
    local = sums.double().sum(0)
    total = local.clone()
    dist.all_reduce(total, group=resolve_group(group))
    return local.to(sums.dtype), (total / statistics[2]).to(sums.dtype)


def _define(name: str, function: Callable, schema: str, fake: Callable) -> Callable:
    """Define `function` as an operator; return that of another copy of this file, if any."""
    if not hasattr(torch.ops.apex_native, name):
        torch.library.define(f"apex_native::{name}", schema)
        torch.library.impl(f"apex_native::{name}", ["CPU", "CUDA"], function)
        torch.library.register_fake(f"apex_native::{name}", fake)
    return getattr(torch.ops.apex_native, name)


_statistics_op = _define(
    "syncbn_batch_statistics",
    _gathered_statistics,
    "(Tensor sums, Tensor shift, SymInt count, float eps, str group) -> Tensor",
    lambda sums, shift, count, eps, group: sums.new_empty(4, sums.shape[-1]),
)
_gradient_means_op = _define(
    "syncbn_gradient_means",
    _reduced_means,
    "(Tensor sums, Tensor statistics, str group) -> (Tensor, Tensor)",
    lambda sums, statistics, group: (torch.empty_like(sums[0]), torch.empty_like(sums[0])),
)


def _mean_minus(x: Tensor, statistics: Tensor) -> Tensor:
    """Return mean − x. A compiler would keep x − mean from the forward pass, in fp32, besides x."""
    return _per_channel(statistics[0], x) - _widen(x)


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _reduced_dims(x: Tensor) -> list[int]:
    """Return all dimensions except that of the channels."""
    return [dim for dim in range(x.dim()) if dim != 1]


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.dim() - 2))
