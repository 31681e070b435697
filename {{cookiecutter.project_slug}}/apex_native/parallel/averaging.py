"""Gradient averaging after the backward pass, for compiled models that replay CUDA graphs."""

from collections.abc import Callable, Iterable
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable


class GradientAverager:
    """Average of all gradients of a type at once, when a backward pass has computed them.

    torch's DistributedDataParallel would split a compiled model into a graph for each bucket, and
    count and copy gradients one by one, which takes a CPU longer than the graphs take.

    Args:
        parameters: the trained parameters by name.
        hook: a communication hook with its state bound, or None for the mean.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], hook: Callable | None) -> None:
        self.parameters = parameters
        self.hook = hook
        self.is_due = False  # set by a forward pass, cleared by its backward pass
        self.buckets: list[Bucket] = []
        for dtype in dict.fromkeys(p.dtype for p in parameters.values()):
            same = [parameter for parameter in parameters.values() if parameter.dtype == dtype]
            self.buckets.append(Bucket(same))
        self._register_hooks()

    def __setstate__(self, state: dict) -> None:
        """Register the hooks that copy and pickle leave behind."""
        self.__dict__.update(state)
        self._register_hooks()

    def _register_hooks(self) -> None:
        for parameter in self.parameters.values():
            parameter.register_post_accumulate_grad_hook(self._enqueue)

    def _enqueue(self, _: Tensor) -> None:
        """Schedule the averages for the end of the backward pass, at its first gradient."""
        if self.is_due:
            self.is_due = False
            # As torch's own DistributedDataParallel: there is no public way to the end of a pass.
            Variable._execution_engine.queue_callback(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        if unused := [name for name, p in self.parameters.items() if p.grad is None]:
            raise RuntimeError(no_gradient_message(unused))
        for bucket in self.buckets:
            bucket.average(self.hook)


class Bucket:
    """All gradients of a type as one tensor, in which they have their parameters' strides.

    ``buffer``, ``gradients`` and ``parameters`` are those of ``dist.GradBucket`` that communication
    hooks of torch call which compress gradients or average them; PowerSGD's calls others.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._buffer: Tensor | None = None
        self._views: list[Tensor] = []
        self._pointers: list[int] = []

    def __getstate__(self) -> dict:
        """Return the state without the memory: copied views would not be views of it."""
        return self.__dict__ | {"_buffer": None, "_views": []}

    def average(self, hook: Callable | None) -> None:
        """Replace each gradient by its average over the processes, or by the result of `hook`."""
        grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if any(grad.is_sparse for grad in grads):
            raise RuntimeError("average_at_once() takes no sparse gradients.")
        buffer = self._allocated_buffer()
        torch._foreach_copy_(self._views, grads)
        averaged = hook(self).wait() if hook else _allreduce_mean(buffer)
        if averaged is not buffer:
            buffer.copy_(averaged)
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view

    def _allocated_buffer(self) -> Tensor:
        """Return the buffer; allocate it if the views are no longer in it.

        Code that sets ``parameter.grad.data``, such as ``module.double()``, moves them out of it.
        """
        pointers = [view.data_ptr() for view in self._views]
        dtype = self._parameters[0].dtype
        if self._buffer is not None and self._buffer.dtype == dtype and pointers == self._pointers:
            return self._buffer
        dense = [torch.empty_like(parameter, device="meta") for parameter in self._parameters]
        *offsets, size = accumulate((each.numel() for each in dense), initial=0)
        self._buffer = self._parameters[0].new_empty(size)
        self._views = [
            self._buffer.as_strided(each.shape, each.stride(), offset)
            for each, offset in zip(dense, offsets, strict=True)
        ]
        self._pointers = [view.data_ptr() for view in self._views]
        return self._buffer

    def buffer(self) -> Tensor | None:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        return list(self._views)

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters


def no_gradient_message(names: Iterable[str]) -> str:
    """Return the error message for parameters that a backward pass left without gradient."""
    return (
        f"These parameters got no gradient in the last backward pass: {', '.join(names)}. Use "
        "them, freeze them before the model is wrapped, or pass delay_allreduce=True."
    )


def _allreduce_mean(values: Tensor) -> Tensor:
    """Average `values` over all processes in place."""
    if dist.get_backend() == "nccl":  # gloo has no averages
        dist.all_reduce(values, dist.ReduceOp.AVG)
    else:
        dist.all_reduce(values.div_(dist.get_world_size()))
    return values
