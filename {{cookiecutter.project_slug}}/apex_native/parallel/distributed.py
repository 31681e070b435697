"""DistributedDataParallel with Apex's signature."""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.futures import Future

from ..amp import _amp_state


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """Averages gradients over all processes during the backward pass, one device a process.

    Parameters are broadcast from rank 0 once, here; buffers never are. As in Apex there is no
    ``device_ids``: the module is on its device already. This is torch's own class with Apex's
    arguments, so ``no_sync()`` is there too.

    Args:
        module: on the device of this process, after ``amp.initialize``.
        message_size: elements of a communication bucket.
        delay_allreduce: accept that some parameters get no gradient (torch looks for them after
            each forward pass). Without it, a parameter that gets none is an error that names it.
        allreduce_always_fp32: reduce half gradients in fp32.
        gradient_average: divide the sum by the number of processes.
        gradient_predivide_factor: divide by this much before the sum, by the rest after it.
        allreduce_trigger_params, retain_allreduce_buffers, num_allreduce_streams,
            allreduce_communicators, gradient_average_split_factor, prof: accepted and unused;
            torch schedules its own communication.

    Raises ValueError for `shared_param`, and for arguments that exclude each other.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Iterable[nn.Parameter] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: object = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        if shared_param is not None:
            raise ValueError("shared_param is no longer an option: use delay_allreduce.")
        if delay_allreduce and allreduce_trigger_params is not None:
            raise ValueError("allreduce_trigger_params needs delay_allreduce=False.")
        if delay_allreduce and num_allreduce_streams > 1:
            raise ValueError("num_allreduce_streams above 1 needs delay_allreduce=False.")
        # By name: what torch's arguments leave, a broadcast here or one in each forward pass,
        # depends on its version.
        buffers = [name for name, _ in module.named_buffers()]
        self._set_params_and_buffers_to_ignore_for_model(module, buffers)
        super().__init__(
            module,
            bucket_cap_mb=message_size * 4 / 2**20,
            find_unused_parameters=delay_allreduce,
            gradient_as_bucket_view=True,
        )
        self._trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._hook: Callable | None = None
        self._buckets: list[_Bucket] = []
        self._is_due = False
        # torch divides before it sums; fp16 gradients overflow where Apex's do only the other way.
        has_half = any(parameter.dtype == torch.float16 for parameter in module.parameters())
        is_apexs_own = not gradient_average or gradient_predivide_factor != 1.0
        if has_half or allreduce_always_fp32 or is_apexs_own:
            world_size = dist.get_world_size()
            after = gradient_predivide_factor / world_size if gradient_average else 1.0
            self.register_comm_hook(
                (1.0 / gradient_predivide_factor, after, allreduce_always_fp32), _allreduce
            )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """As torch's; ``amp.scale_loss`` leaves gradients scaled in it until they are reduced."""
        with super().no_sync():
            _amp_state.unsynced.append(self.module)
            try:
                yield
            finally:
                _amp_state.unsynced.remove(self.module)

    def disable_allreduce(self) -> None:
        """Leaves gradients as they are, from the next forward pass on (in Apex, backward pass)."""
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        """Averages gradients again, from the next forward pass on."""
        self.require_backward_grad_sync = True

    def average_at_once(self) -> None:
        """From now on, averages all gradients of a type at once, after the backward pass.

        For a compiled model whose kernels are CUDA graphs. torch would cut it into a graph for each
        bucket, and count and copy gradients one by one, which takes a CPU longer than the graphs
        take; but nothing overlaps the communication, and memory for it, as much as gradients take,
        is kept: gradients are views of it, to be cloned by who keeps them beyond the next pass.
        Communication hooks see one bucket for each type; PowerSGD's asks more of it, and fails.
        Where two forward passes come before their backward passes, only the first of the latter
        averages, as in torch's class. A parameter without a gradient, or with one that is sparse,
        is a RuntimeError in the backward pass; ``join()`` does not know of it.
        """
        for dtype in dict.fromkeys(p.dtype for p in self._trained.values()):
            same = [p for p in self._trained.values() if p.dtype == dtype]
            self._buckets.append(_Bucket(same, len(self._buckets)))
        self._await_gradients()

    def _await_gradients(self) -> None:
        for parameter in self._trained.values() if self._buckets else ():
            parameter.register_post_accumulate_grad_hook(self._enqueue)

    def __setstate__(self, state: dict) -> None:
        """For copy and pickle, which leave hooks behind."""
        super().__setstate__(state)
        self._await_gradients()

    def _enqueue(self, _: Tensor) -> None:
        """Called for each gradient; the first one of a backward pass has it end with averages."""
        if self._is_due:
            self._is_due = False
            Variable._execution_engine.queue_callback(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        unused = [name for name, p in self._trained.items() if p.grad is None]
        if unused:
            raise RuntimeError(_no_gradient(unused))
        for bucket in self._buckets:
            bucket.average(self._hook)

    def register_comm_hook(self, state: object, hook: Callable) -> None:
        """As torch's."""
        super().register_comm_hook(state, hook)
        self._hook = partial(hook, state)

    def forward(self, *inputs: object, **kwargs: object) -> object:
        """The module's own. Raises RuntimeError if the last backward pass left parameters out."""
        if self._buckets:
            if torch.is_grad_enabled():  # a look without gradients changes nothing
                self._is_due = self.require_backward_grad_sync
            return self.module(*inputs, **kwargs)
        try:
            return super().forward(*inputs, **kwargs)
        except RuntimeError as error:
            unused = re.search(r"indices which did not receive grad.*?: ([\d ]+)", str(error))
            if unused is None:
                raise
            trained = list(self._trained)
            names = [trained[int(index)] for index in unused[1].split()]
            raise RuntimeError(_no_gradient(names)) from None


def _no_gradient(names: Iterable[str]) -> str:
    return (
        f"These parameters got no gradient in the last backward pass: {', '.join(names)}. Use "
        "them, set their requires_grad to False, or pass delay_allreduce=True."
    )


class _Bucket:
    """All gradients of a type as one tensor, in which they lie as their parameters do.

    The methods without an underscore are those that torch's hooks ask a bucket for which compress
    gradients or average them; PowerSGD's asks for more.
    """

    def __init__(self, parameters: list[nn.Parameter], index: int) -> None:
        self._parameters, self._index = parameters, index
        self._buffer: Tensor | None = None
        self._views: list[Tensor] = []
        self._starts: list[int] = []

    def __getstate__(self) -> dict:
        """Without the memory: its views would be views of nothing."""
        return self.__dict__ | {"_buffer": None, "_views": []}

    def average(self, hook: Callable | None) -> None:
        """Gives each parameter the average of its gradients, or what `hook` makes of them."""
        grads = [parameter.grad for parameter in self._parameters]
        if any(grad.is_sparse for grad in grads):
            raise RuntimeError("average_at_once() takes no sparse gradients.")
        if not self._is_laid_out():
            self._lay_out()
        torch._foreach_copy_(self._views, grads)
        averaged = hook(self).wait() if hook else _allreduce_mean(self._buffer)
        if averaged is not self._buffer:
            self._buffer.copy_(averaged)
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view

    def _is_laid_out(self) -> bool:
        """Whether the views, which are gradients, are still in the buffer.

        What sets ``parameter.grad.data``, as ``module.double()`` does, moves them out of it.
        """
        if self._buffer is None or self._buffer.dtype != self._parameters[0].dtype:
            return False
        start, size = self._buffer.data_ptr(), self._buffer.element_size()
        at = [start + offset * size for offset in self._starts]
        return at == [view.data_ptr() for view in self._views]

    def _lay_out(self) -> None:
        dense = [torch.empty_like(parameter, device="meta") for parameter in self._parameters]
        *self._starts, size = accumulate((each.numel() for each in dense), initial=0)
        self._buffer = self._parameters[0].new_empty(size)
        self._views = [
            self._buffer.as_strided(each.shape, each.stride(), start)
            for each, start in zip(dense, self._starts, strict=True)
        ]

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        return list(self._views)

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def index(self) -> int:
        return self._index


def _allreduce_mean(values: Tensor) -> Tensor:
    """`values`, averaged over all processes in place."""
    if dist.get_backend() == "nccl":  # gloo has no averages
        dist.all_reduce(values, dist.ReduceOp.AVG)
    else:
        dist.all_reduce(values.div_(dist.get_world_size()))
    return values


def _allreduce(state: tuple[float, float, bool], bucket: dist.GradBucket) -> Future[Tensor]:
    """Sums a bucket over all processes, scaling before and after, in fp32 if asked."""
    before, after, always_fp32 = state
    buffer = bucket.buffer()
    summed = (buffer.float() if always_fp32 else buffer).mul_(before)
    future = dist.all_reduce(summed, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0].mul_(after)))
