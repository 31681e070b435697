"""DistributedDataParallel with Apex's signature."""

import contextlib
import re
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
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
        self._trained = [name for name, p in module.named_parameters() if p.requires_grad]
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

    def forward(self, *inputs: object, **kwargs: object) -> object:
        """The module's own. Raises RuntimeError if the last backward pass left parameters out."""
        try:
            return super().forward(*inputs, **kwargs)
        except RuntimeError as error:
            unused = re.search(r"indices which did not receive grad.*?: ([\d ]+)", str(error))
            if unused is None:
                raise
            names = ", ".join(self._trained[int(index)] for index in unused[1].split())
            raise RuntimeError(
                f"These parameters got no gradient in the last backward pass: {names}. Use them, "
                "set their requires_grad to False, or pass delay_allreduce=True."
            ) from None


def _allreduce(state: tuple[float, float, bool], bucket: dist.GradBucket) -> Future[Tensor]:
    """Sums a bucket over all processes, scaling before and after, in fp32 if asked."""
    before, after, always_fp32 = state
    buffer = bucket.buffer()
    summed = (buffer.float() if always_fp32 else buffer).mul_(before)
    future = dist.all_reduce(summed, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0].mul_(after)))
