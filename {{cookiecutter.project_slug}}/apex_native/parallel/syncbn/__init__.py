"""Batch normalization over the batches of all processes.

Modules: `reference` has the formulas in torch operations and the exchange by collectives;
`kernels` has the Triton kernels; `symmetric_memory` has the exchange inside the kernels, between
GPUs that can access each other's memory.
"""

import os
import shutil
import socket
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm  # the base of all batch norms; none is public

from ... import log_rank_zero
from .reference import Collectives, Reference, Running, resolve_group


class SyncBatchNorm(_BatchNorm):
    """Batch norm whose statistics are those of all processes' batches together.

    It is no subclass of torch's SyncBatchNorm, which DistributedDataParallel refuses on the CPU.
    There, and in one process, it is a plain batch norm over the local batch. The processes must run
    the same norms in the same order, all compiled or none, on one stream.

    Args:
        num_features: C of an input of shape (N, C, …), 2-D to 5-D, of any float type.
        process_group: the processes to normalize over; all by default.
        channel_last: accepted as in Apex; the memory format is read off the input.
        fuse_relu: end in a ReLU, after adding the second argument of ``forward``, if any.

    Source: Ioffe and Szegedy, "Batch Normalization", ICML 2015.
    """

    def __init__(  # noqa: PLR0913, Apex's signature
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu
        self.converted_from: type[_BatchNorm] = nn.BatchNorm2d

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Return `input` (N, C, …) normalized; `z`, of the same shape, is added before the ReLU."""
        synced = self.training and input.is_cuda and dist.is_initialized()
        if synced and dist.get_world_size(self.process_group) > 1:
            output = self.forward_synced(input)
        else:
            output = super().forward(input)
        if z is not None:
            output = output + z
        return F.relu(output) if self.fuse_relu else output

    def forward_synced(self, input: Tensor) -> Tensor:
        """Run `forward` in training mode, on any device; all processes of the group must call it.

        The kernels take input in rows of channels. Other input is copied to that layout and back,
        because torch's kernels for it round the mean of half input, and return nan where a batch is
        empty.
        """
        self._check_input_dim(input)
        running, momentum = self._count_batch()
        compiling = torch.compiler.is_compiling()
        if compiling and not input.numel():  # exchanges whose results are unused would be dropped
            raise ValueError("SyncBatchNorm cannot be compiled for an empty batch.")
        group: Any = self.process_group or dist.group.WORLD
        name = group.group_name
        buffer = symmetric_buffer(name, self.num_features, input.device, input.dtype)
        implementation = select_implementation(input, name, buffer)
        x = implementation.to_layout(input)
        # Triton launches kernels on the current device; in a compiled step, that is set.
        device: AbstractContextManager = nullcontext() if compiling else torch.cuda.device_of(x)
        with device:
            statistics = implementation.batch_statistics(x, self.eps, running, momentum)
            output = _Normalize.apply(x, self.weight, self.bias, statistics, name, buffer)
        return output if x is input or input.stride(1) == 1 else output.contiguous()

    def _count_batch(self) -> tuple[Running, float | Tensor]:
        """Count this batch; return the tracked statistics, and the momentum of their update."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return None, 0.0
        momentum: float | Tensor | None = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = self.num_batches_tracked.to(self.running_mean.dtype).reciprocal()
        return (self.running_mean, self.running_var), 0.0 if momentum is None else momentum

    def _check_input_dim(self, input: Tensor) -> None:
        if not 2 <= input.dim() <= 5:
            raise ValueError(f"SyncBatchNorm takes 2-D to 5-D input, not {input.dim()}-D.")
        if input.shape[1] != self.num_features or not input.is_floating_point():
            raise ValueError(
                f"SyncBatchNorm takes {self.num_features} channels of a floating-point type, not "
                f"{input.shape[1]} of {input.dtype}."
            )


class _Normalize(torch.autograd.Function):
    """(input − mean) · invstd · weight + bias, where the statistics depend on the input, too."""

    @staticmethod
    def forward(ctx, input, weight, bias, statistics, group, buffer):
        ctx.save_for_backward(input, weight, statistics, buffer)
        ctx.group, ctx.bias_dtype = group, None if bias is None else bias.dtype
        implementation = select_implementation(input, group, buffer)
        return implementation.normalize(input, statistics, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        input, weight, statistics, buffer = ctx.saved_tensors
        implementation = select_implementation(input, ctx.group, buffer)
        grad = implementation.to_layout(grad)
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            local, means = implementation.gradient_means(grad, input, statistics)
            grad_input = implementation.input_gradient(grad, input, statistics, means, weight)
        else:
            local = implementation.gradient_sums(grad, input, statistics).sum(0)
        if weight is not None:
            grad_weight = local[1].to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = local[0].to(ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None, None


def select_implementation(input: Tensor, group: str, buffer: Tensor | None) -> Reference:
    """Return the fastest implementation for `input`: torch.compile fuses the reference formulas.

    `group` is the name of the process group, `buffer` what `symmetric_buffer` returns for it.
    """
    compiling = torch.compiler.is_compiling()
    if compiling or not input.is_cuda or input.dtype == torch.float64 or not has_triton():
        exchange = Collectives(group)
        if buffer is not None:
            from .symmetric_memory import SymmetricExchange

            exchange = SymmetricExchange(buffer)
        return Reference(exchange)
    if buffer is not None:
        from .symmetric_memory import FusedKernels

        return FusedKernels(buffer)
    from .kernels import TritonKernels

    return TritonKernels(Collectives(group))


@cache
def has_triton() -> bool:
    """Return whether Triton can build kernels here; log the reason once if not."""
    reason = "Triton finds no C compiler"
    if any(map(shutil.which, (os.environ.get("CC", "gcc"), "gcc", "clang"))):
        try:
            from . import kernels  # the test is whether the import succeeds

            return True
        except ImportError as error:
            reason = f"Triton is missing ({error})"
    log_rank_zero(f"apex_native: uses torch operations, which are slower, because {reason}")
    return False


# One buffer for each group, size and device; kept for the process, because compiled graphs hold its
# address. Keyed by the group itself, not by its name, which a later group may reuse.
_buffers: WeakKeyDictionary[dist.ProcessGroup, dict[tuple, Any]] = WeakKeyDictionary()


@torch.compiler.assume_constant_result
def symmetric_buffer(
    group: str, channels: int, device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    """Return the descriptor of a SymmetricBuffer for input of `dtype`; None to use collectives.

    Every process of the group must call this for the first time together.
    """
    if device.type != "cuda" or dtype == torch.float64:
        return None
    members = resolve_group(group)
    existing = _buffers.setdefault(members, {})
    size = max(2048, 1 << (channels - 1).bit_length())  # so that one buffer serves most models
    key = size, device
    if key not in existing:
        with torch.cuda.device(device):  # NCCL moves Python objects through the current device
            existing[key] = _create_buffer(members, size, device)
    return None if existing[key] is None else existing[key].descriptor


def _create_buffer(group: dist.ProcessGroup, channels: int, device: torch.device) -> Any:
    """Return a SymmetricBuffer, or None unless every process of `group` supports it."""
    gpus: list[Any] = [None] * group.size()
    own_gpu = socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)
    dist.all_gather_object(gpus, own_gpu, group)
    problems: list[Any] = [None] * group.size()
    dist.all_gather_object(problems, _unsupported_reason(gpus, own_gpu, device), group)
    if problem := next(filter(None, problems), None):
        log_rank_zero(
            f"SyncBatchNorm: exchanges sums through NCCL, which is slower, because {problem}"
        )
        return None
    from .symmetric_memory import SymmetricBuffer  # needs Triton, which takes a while to import

    return SymmetricBuffer(group, channels, device)


def _unsupported_reason(
    gpus: list[tuple[str, str]], own_gpu: tuple[str, str], device: torch.device
) -> str | None:
    """Return why this process can't write into the memory of `gpus` (host, UUID), or None."""
    hosts = {host for host, _ in gpus}
    uuids = {uuid for _, uuid in gpus}
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    visible = {str(gpu.uuid): index for index, gpu in enumerate(properties)}
    reasons = (
        (torch.__version__ < "2.9", f"torch {torch.__version__} is older than 2.9"),
        (not has_triton(), "Triton can't build kernels here"),
        (torch.version.hip, "the GPUs are AMD's, on which shared memory was never tried"),
        (os.environ.get("NCCL_P2P_DISABLE", "0") != "0", "NCCL_P2P_DISABLE is set"),
        (len(hosts) > 1, "the processes are on several hosts"),
        (len(uuids) < len(gpus), "processes share a GPU"),
        (not uuids <= visible.keys(), "CUDA_VISIBLE_DEVICES hides the GPUs of other processes"),
    )
    for applies, reason in reasons:
        if applies:
            return reason
    others = [visible[uuid] for uuid in uuids - {own_gpu[1]}]
    if not all(torch.cuda.can_device_access_peer(device, other) for other in others):
        return "the GPUs can't reach each other's memory"
    return None
