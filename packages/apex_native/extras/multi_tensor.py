"""``apex.multi_tensor_apply``, and the operations of ``amp_C`` that are no optimizers.

Each function of ``amp_C`` takes `chunk_size`, which does nothing here; `noop_flag`, an int tensor
(1,), which some set to 1 where they find an inf or nan; and lists of tensors of equal lengths. They
compute in fp32, in float64 where the tensors are.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Lists = Sequence[list[Tensor]]


class MultiTensorApply:
    """Function that calls an operation of ``amp_C`` on lists of tensors."""

    available = True

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Do nothing: the operations are always available here."""

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Lists, *args: Any
    ) -> Any:
        """Return ``op(chunk_size, noop_flag_buffer, tensor_lists, *args)``."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)


def in_fp32(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return half tensors as fp32 copies, and others unchanged."""
    wide = (torch.float32, torch.float64)
    return [tensor if tensor.dtype in wide else tensor.float() for tensor in tensors]


def write_back(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy `values` to `tensors` where they are other ones."""
    others = [(t, v) for t, v in zip(tensors, values, strict=True) if t is not v]
    if others:
        targets, sources = zip(*others, strict=True)
        torch._foreach_copy_(targets, sources)


def flag_non_finite(noop_flag: Tensor, tensors: Sequence[Tensor]) -> None:
    """Set `noop_flag` to 1 if an element of `tensors` is inf or nan. Does not wait."""
    given = [tensor for tensor in tensors if tensor.numel()]
    if given:
        largest = torch.stack([n.float() for n in torch._foreach_norm(given, float("inf"))])
        found = (~largest.isfinite()).any().to(noop_flag)
        noop_flag.copy_(torch.maximum(noop_flag, found.expand_as(noop_flag)))


@torch.no_grad()
def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float | Tensor
) -> None:
    """Write ``input × scale`` to the outputs: [inputs, outputs]. Flags inputs.

    `scale` is a number or a tensor with one, such as `multi_tensor_l2norm` returns.
    """
    inputs, outputs = tensor_lists
    scale = scale.squeeze() if isinstance(scale, Tensor) else scale
    flag_non_finite(noop_flag, inputs)
    write_back(outputs, torch._foreach_mul(in_fp32(inputs), scale))


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    a: float | Tensor,
    b: float | Tensor,
    arg_to_check: int,
) -> None:
    """Write ``a·x + b·y`` to the outputs: [x, y, outputs].

    Flags x if `arg_to_check` is 0, y if it is 1, and both if it is -1.
    """
    x, y, outputs = tensor_lists
    flag_non_finite(noop_flag, {0: x, 1: y, -1: [*x, *y]}[arg_to_check])
    sums = torch._foreach_mul(in_fp32(x), float(a))
    torch._foreach_add_(sums, in_fp32(y), alpha=float(b))
    write_back(outputs, sums)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Return the norm of [tensors] together (1,), and of each (n,) if `per_tensor`, in fp32.

    Without `per_tensor`, the second result is empty. Flags the norm.
    """
    (tensors,) = tensor_lists
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(in_fp32(tensors))])
    total = torch.linalg.vector_norm(norms).reshape(1)
    flag_non_finite(noop_flag, [total])
    return total, norms if per_tensor else norms.new_empty(0)
