"""DistributedDataParallel and Reducer with Apex's signatures."""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.utils.hooks import unserializable_hook

from ..amp.casting import current_master, nested_tensors
from ..amp.state import _amp_state
from .averaging import GradientAverager, no_gradient_message

APEXS_METHODS = {"allreduce_bucket", "allreduce_fallback", "comm_ready_buckets", "create_hooks"}


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """Wrapper that averages gradients over all processes in the backward pass; one device each.

    Parameters and their masters are broadcast from rank 0 once, here; buffers never are. As in Apex
    there is no ``device_ids``: the module is on its device already. This is torch's own class with
    Apex's arguments, so ``no_sync()`` is available too.

    Args:
        module: on the device of this process, after ``amp.initialize``.
        message_size: elements of a communication bucket.
        delay_allreduce: accept that some parameters get no gradient (torch searches for them after
            each forward pass). Without it, a parameter that gets none is an error that names it.
        allreduce_always_fp32: reduce half gradients in fp32.
        gradient_average: divide the sum by the number of processes.
        gradient_predivide_factor: divide by this much before the sum, by the rest after it.
        retain_allreduce_buffers: make gradients views of the buckets instead of copies, torch's
            ``gradient_as_bucket_view``: the next backward pass overwrites them.
        allreduce_trigger_params, num_allreduce_streams, allreduce_communicators,
            gradient_average_split_factor, prof: accepted, without effect.

    Raises ValueError for `shared_param`, and for arguments that exclude each other.
    """

    def __init__(  # noqa: PLR0913, Apex's signature
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
        # Without a public way: what torch's arguments leave, a broadcast here or one in each
        # forward pass, depends on its version.
        buffers = [name for name, _ in module.named_buffers()]
        self._set_params_and_buffers_to_ignore_for_model(module, buffers)
        super().__init__(
            module,
            bucket_cap_mb=message_size * 4 / 2**20,
            find_unused_parameters=delay_allreduce,
            gradient_as_bucket_view=retain_allreduce_buffers,
        )
        _amp_state.parallel_models.add(self)
        _broadcast_masters(module)
        self._trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
        self._hook: partial | None = None
        self._in_no_sync = False
        self.is_unsynced = False  # whether the last forward pass was in no_sync()
        self.is_due = False  # from a synced forward pass until the next backward pass
        self._is_switched = False  # by `disable_allreduce` or `enable_allreduce`
        self._is_pending = False  # whether a backward pass is to follow, once it is switched
        self._averager: GradientAverager | None = None
        self.averages_at_once = False
        # torch divides before it sums; fp16 gradients overflow where Apex's do only the other way.
        has_half = any(parameter.dtype == torch.float16 for parameter in module.parameters())
        is_apexs_own = not gradient_average or gradient_predivide_factor != 1.0
        if has_half or allreduce_always_fp32 or is_apexs_own:
            after = gradient_predivide_factor / dist.get_world_size() if gradient_average else 1.0
            self.register_comm_hook(
                (1.0 / gradient_predivide_factor, after, allreduce_always_fp32), _allreduce
            )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raise TypeError for a class that extends Apex's own way to reduce, which is not used."""
        super().__init_subclass__(**kwargs)
        if own := sorted(vars(cls).keys() & APEXS_METHODS):
            raise TypeError(f"{own[0]} of {cls.__name__} would not be called: use a comm hook.")

    def __setstate__(self, state: dict) -> None:
        """Register the communication hook, which copy and pickle leave behind."""
        super().__setstate__(state)
        _amp_state.parallel_models.add(self)
        if self._hook is not None:
            super().register_comm_hook(self._hook.args[0], self._hook.func)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging them, as torch's method does.

        The forward pass decides. ``amp.scale_loss`` leaves gradients scaled until they are reduced.
        As in torch, the next backward pass reduces if that of a synced forward pass is missing.
        """
        outer = self._in_no_sync
        self._in_no_sync = True
        try:
            with super().no_sync():
                yield
        finally:
            self._in_no_sync = outer

    @property
    def awaits_averages(self) -> bool:
        """True if the backward pass of a forward pass that averages is to come."""
        return self.is_due and (self._averager is None or self._averager.is_due)

    def disable_allreduce(self) -> None:
        """Stop averaging gradients, from the next forward pass on (in Apex, backward pass).

        Raises RuntimeError between a forward pass and its backward pass.
        """
        self._switch(False)

    def enable_allreduce(self) -> None:
        """Average gradients again, from the next forward pass on; raises RuntimeError likewise."""
        self._switch(True)

    def _switch(self, is_synced: bool) -> None:
        if self._is_pending and is_synced != self.require_backward_grad_sync:
            raise RuntimeError(
                "enable_allreduce() and disable_allreduce() take effect in the next forward pass, "
                "and the backward pass of the last one is to come: call them before it."
            )
        self._is_switched = True
        self.require_backward_grad_sync = is_synced

    def _await_backward(self, outputs: object) -> None:
        is_pending = self._is_switched and self.training

        @unserializable_hook
        def begin_backward(_: Tensor) -> None:  # of any kind, also without amp.scale_loss
            self.is_due = False
            if is_pending:
                self._is_pending = False

        for output in nested_tensors(outputs):
            if output.grad_fn is not None:  # a parameter would keep the hook
                self._is_pending |= is_pending
                output.register_hook(begin_backward)

    def average_at_once(self) -> None:
        """Average all gradients of a type at once, after each backward pass from now on.

        For compiled models of CUDA graphs (see GradientAverager). The next pass overwrites the
        gradients, communication hooks get a Bucket; ``join()`` and reentrant checkpoints of
        activations are not supported. If two forward passes come before their backward passes, only
        the first of these averages, as in torch. A parameter without a gradient, or with a sparse
        one, is a RuntimeError in a backward pass.
        """
        self._averager = GradientAverager(self._trained, self._hook)
        self.averages_at_once = True

    def register_comm_hook(self, state: object, hook: Callable) -> None:
        """Register a communication hook, as torch's method does."""
        super().register_comm_hook(state, hook)
        self._hook = partial(hook, state)
        if self._averager is not None:
            self._averager.hook = self._hook

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module.

        Raises RuntimeError if the last backward pass left parameters out, or if parameters have
        been unfrozen that this one would not average.
        """
        if torch.is_grad_enabled():  # an evaluation changes nothing
            unfrozen = [name for name, p in self._frozen.items() if p.requires_grad]
            if unfrozen and dist.get_world_size() > 1:
                raise RuntimeError(
                    "These parameters were unfrozen after the model was wrapped, so that their "
                    f"gradients would not be averaged: {', '.join(unfrozen)}. Wrap the module anew."
                )
            self.is_unsynced = self._in_no_sync
            if self.require_backward_grad_sync:
                self.is_due = True
                if self._averager is not None:
                    self._averager.is_due = True
        if self._averager is not None:
            return self.module(*inputs, **kwargs)
        try:
            outputs = super().forward(*inputs, **kwargs)
        except RuntimeError as error:
            unused = re.search(r"indices which did not receive grad.*?: ([\d ]+)", str(error))
            if unused is None:
                raise
            trained = list(self._trained)
            names = [trained[int(index)] for index in unused[1].split()]
            raise RuntimeError(no_gradient_message(names)) from None
        self._await_backward(outputs)
        return outputs


def _allreduce(state: tuple[float, float, bool], bucket: dist.GradBucket) -> Future[Tensor]:
    """Sum a bucket over all processes, with factors before and after, optionally in fp32."""
    before, after, always_fp32 = state
    buffer = bucket.buffer()
    summed = (buffer.float() if always_fp32 else buffer).mul_(before)
    future = dist.all_reduce(summed, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0].mul_(after)))


@torch.no_grad()
def _broadcast_masters(module: nn.Module) -> None:
    """Give all processes rank 0's masters, which may be more precise than the half parameters."""
    for parameter in module.parameters():
        master = current_master(parameter)
        if master is not None:
            values = master.to(parameter.device).contiguous()
            dist.broadcast(values, src=0)
            parameter.copy_(master.copy_(values))


class Reducer:
    """Average of gradients over all processes at each call of `reduce`, and at no other time.

    Args:
        module_or_grads: a module, whose parameters are broadcast from rank 0 here, or gradients in
            any nesting of lists and tuples.
    """

    def __init__(self, module_or_grads: nn.Module | Iterable) -> None:
        self.module: nn.Module | None = None
        self.grads: list[Tensor] = []
        if isinstance(module_or_grads, nn.Module):
            self.module = module_or_grads
            for parameter in self.module.parameters():
                values = parameter.detach().contiguous()  # torch would send a view's other memory
                dist.broadcast(values, src=0)
                parameter.detach().copy_(values)
            _broadcast_masters(self.module)
        else:
            self.grads = list(nested_tensors(list(module_or_grads)))

    @torch.no_grad()
    def reduce(self) -> None:
        """Replace each gradient by its mean over the processes, in place."""
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
