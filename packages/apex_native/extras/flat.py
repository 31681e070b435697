"""Flat tensors: ``apex_C``, and the functions of ``apex.parallel.distributed`` that use it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of `tensors`, which have one type, in one new tensor (n,)."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of `flat`, the result of ``flatten``, in the shapes of `tensors`."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def split_by_type(tensors: Iterable[Tensor]) -> dict[str, list[Tensor]]:
    """Return `tensors` by ``tensor.type()``, in the order of their first ones."""
    buckets: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        buckets.setdefault(tensor.type(), []).append(tensor)
    return buckets


def flat_dist_call(
    tensors: Iterable[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Apply the collective `call` to `tensors` in place, once for each of their types.

    It is called with a flat tensor and `extra_args`. Results of ``dist.all_reduce`` are divided by
    the number of processes, as in Apex.
    """
    for bucket in split_by_type(tensors).values():
        apply_flat_dist_call(bucket, call, extra_args)


@torch.no_grad()
def apply_flat_dist_call(
    bucket: Sequence[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Apply `call` to tensors of one type in place; see ``flat_dist_call``."""
    flat = flatten(bucket)
    call(flat, *(extra_args or ()))
    if call is dist.all_reduce:
        flat /= dist.get_world_size()
    for tensor, result in zip(bucket, unflatten(flat, bucket), strict=True):
        tensor.copy_(result)
