"""Batch normalisation over the batches of all processes."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from .._say import say
from . import _exchange, _formula

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class SyncBatchNorm(_BatchNorm):
    """Batch norm whose statistics are those of all processes' batches together.

    It is no subclass of torch's SyncBatchNorm, which DistributedDataParallel refuses on the CPU.
    There, and in one process, it is a plain batch norm over the local batch. The processes must run
    the same norms in the same order, all compiled or none, on one stream.

    Args:
        num_features: C of an input of shape (N, C, …), 2-D to 5-D, of any float type.
        process_group: the processes to normalise over; all by default.
        channel_last: accepted as in Apex; the memory format is read off the input.
        fuse_relu: ends in a ReLU, after adding the second argument of ``forward``, if any.

    Source: Ioffe and Szegedy, "Batch Normalization", ICML 2015.
    """

    def __init__(
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
        """(N, C, …) → the same shape and type. `z` (same shape) is added before the ReLU."""
        synced = self.training and input.is_cuda and dist.is_initialized()
        if synced and dist.get_world_size(self.process_group) > 1:
            output = self.forward_synced(input)
        else:
            output = super().forward(input)
        if z is not None:
            output = output + z
        return F.relu(output) if self.fuse_relu else output

    def forward_synced(self, input: Tensor) -> Tensor:
        """`forward` in training mode, on any device; every process of the group must call it."""
        self._check_input_dim(input)
        momentum = self.momentum
        if self.track_running_stats:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = self.num_batches_tracked.to(self.running_mean.dtype).reciprocal()
        tracked = self.track_running_stats
        group = (self.process_group or dist.group.WORLD).group_name
        return _normalise(
            input,
            self.weight,
            self.bias,
            (self.running_mean, self.running_var) if tracked else None,
            self.eps,
            0.0 if momentum is None else momentum,
            group,
            _exchange.mailbox_of(group, self.num_features, input.device, input.dtype),
        )

    def _check_input_dim(self, input: Tensor) -> None:
        if not 2 <= input.dim() <= 5:
            raise ValueError(f"SyncBatchNorm takes 2-D to 5-D input, not {input.dim()}-D.")
        if input.shape[1] != self.num_features or not input.is_floating_point():
            raise ValueError(
                f"SyncBatchNorm takes {self.num_features} channels of a floating-point type, not "
                f"{input.shape[1]} of {input.dtype}."
            )


def _normalise(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: tuple[Tensor, Tensor] | None,
    eps: float,
    momentum: float | Tensor,
    group: str,
    mailbox: Tensor | None,
) -> Tensor:
    """`input` (N, C, …) normalised over the group of that name; updates the running statistics.

    The kernels take input in rows of channels. Other input is put so and taken back, since torch's
    kernels for it round the mean of half input, and turn to nan where a batch is empty.
    """
    compiling = torch.compiler.is_compiling()
    if compiling and not input.numel():  # it would leave out exchanges whose results are not used
        raise ValueError("SyncBatchNorm cannot be compiled for an empty batch.")
    arithmetic = _arithmetic_for(input)
    in_rows = arithmetic is _formula or arithmetic.lies_in_rows(input)
    x = input if in_rows else arithmetic.in_rows(input)
    # Triton starts its kernels on the current device; where a step is compiled, that is set.
    with nullcontext() if compiling else torch.cuda.device_of(x):
        statistics = _exchange.moments(x, arithmetic, eps, running, momentum, group, mailbox)
        output = _Normalised.apply(x, weight, bias, statistics, group, mailbox)
    return output if in_rows or input.stride(1) == 1 else output.contiguous()


class _Normalised(torch.autograd.Function):
    """(input − mean) · invstd · weight + bias, where the statistics come from the input, too."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: Tensor,
        group: str,
        mailbox: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, statistics, mailbox)
        ctx.group, ctx.bias_dtype = group, None if bias is None else bias.dtype
        return _arithmetic_for(input).normalise(input, statistics, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, statistics, mailbox = ctx.saved_tensors
        arithmetic = _arithmetic_for(input)
        if arithmetic is not _formula:
            grad = arithmetic.in_rows(grad)
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            exchanged = arithmetic, statistics, ctx.group, mailbox
            local, means = _exchange.means(grad, input, *exchanged)
            grad_input = arithmetic.differentiate(grad, input, statistics, means, weight)
        else:
            local = arithmetic.sum_gradients(grad, input, statistics).sum(0)
        if weight is not None:
            grad_weight = local[1].to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = local[0].to(ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None, None


def _arithmetic_for(input: Tensor) -> ModuleType:
    """What is fastest for `input`: a compiler fuses the formula with what is around it."""
    if torch.compiler.is_compiling() or not input.is_cuda or input.dtype == torch.float64:
        return _formula
    return _exchange.kernels() or _formula


def convert_syncbn_model(
    module: nn.Module,
    process_group: dist.ProcessGroup | None = None,
    channel_last: bool = False,
) -> nn.Module:
    """Puts a SyncBatchNorm in the place of every batch norm in `module`, which may be one itself.

    Parameters, buffers, requires_grad and the training mode stay as they are (Apex makes new
    parameters, all of them trainable, in training mode). A norm of a class with a forward pass of
    its own, such as timm's, which end in a ReLU, stays too, with a line that says so (Apex's
    conversion loses the ReLU).
    """
    if not torch.cuda.is_available():
        say("SyncBatchNorm: on the CPU each process normalises over its own batch")

    plain_forwards = (_BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward)
    kept = set()

    def synced(norm: _BatchNorm) -> _BatchNorm:
        if type(norm).forward not in plain_forwards:
            kept.add(type(norm).__name__)
            return norm
        made = SyncBatchNorm(*_options(norm), process_group, channel_last)
        if isinstance(norm, SyncBatchNorm):
            made.fuse_relu, made.converted_from = norm.fuse_relu, norm.converted_from
        made.converted_from = next(filter(partial(isinstance, norm), _PLAIN), made.converted_from)
        return made

    converted = _replace(module, _BatchNorm, synced)
    if kept:
        say(
            f"SyncBatchNorm: {', '.join(sorted(kept))} does more than normalise, and stays as it is"
        )
    return converted


def revert_syncbn_model(module: nn.Module) -> nn.Module:
    """Puts plain batch norms back, for export or for one process; it keeps what conversion keeps.

    Each becomes what it was converted from, one that was not converted a BatchNorm2d. Raises
    ValueError for one with `fuse_relu`, whose ReLU would be lost.
    """

    def plain(norm: SyncBatchNorm) -> _BatchNorm:
        if norm.fuse_relu:
            raise ValueError("A SyncBatchNorm with fuse_relu=True has no plain batch norm's place.")
        return norm.converted_from(*_options(norm))

    return _replace(module, SyncBatchNorm, plain)


def _options(norm: _BatchNorm) -> tuple:
    """The arguments that every batch norm begins with."""
    return norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats


def _replace(module: nn.Module, kind: type, replacement: Callable) -> nn.Module:
    """Puts ``replacement(norm)`` with the tensors of `norm` in the place of each `kind`."""
    if isinstance(module, kind):
        norm = replacement(module)
        norm._parameters, norm._buffers = module._parameters, module._buffers
        return norm.train(module.training)
    for name, child in module._modules.items():  # named_children() passes over second names
        if child is not None:
            module._modules[name] = _replace(child, kind, replacement)
    return module
