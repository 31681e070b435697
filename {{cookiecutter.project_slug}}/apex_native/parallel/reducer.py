"""Gradients averaged when the user says so."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Reducer:
    """Averages gradients over all processes at each call of `reduce`, and at no other time.

    Args:
        module_or_grads: a module, whose parameters are broadcast from rank 0 here, or gradients in
            any nesting of lists and tuples.
    """

    def __init__(self, module_or_grads: nn.Module | Iterable) -> None:
        self.module = module_or_grads if isinstance(module_or_grads, nn.Module) else None
        self.grads = [] if self.module else list(_tensors(module_or_grads))
        if self.module:
            for parameter in self.module.parameters():
                dist.broadcast(parameter.detach(), src=0)

    @torch.no_grad()
    def reduce(self) -> None:
        """Replaces each gradient by its mean over the processes, in place."""
        grads = self.grads
        if self.module:
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            same = [grad for grad in grads if grad.dtype == dtype]
            flat = torch.cat([grad.reshape(-1) for grad in same])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for grad, mean in zip(same, flat.split([grad.numel() for grad in same]), strict=True):
                grad.copy_(mean.view(grad.shape))


def _tensors(value: object) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for item in value:
            yield from _tensors(item)
