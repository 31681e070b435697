"""Batch normalisation over the batches of all processes."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from .._say import say
from ._gather import gather

try:
    from . import _rows
except ImportError:  # Triton, which torch brings along on Linux, is not there
    _rows = None

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class SyncBatchNorm(_BatchNorm):
    """Batch norm whose statistics are those of all processes' batches together.

    It is no subclass of torch's SyncBatchNorm, which DistributedDataParallel refuses on the CPU.
    There, and in one process, it is a plain batch norm over the local batch.

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
                momentum = self.num_batches_tracked.reciprocal()
        return _function_for(input)(
            input,
            self.weight,
            self.bias,
            self.running_mean,
            self.running_var,
            self.eps,
            0.0 if momentum is None else momentum,
            (self.process_group or dist.group.WORLD).group_name,
        )

    def _check_input_dim(self, input: Tensor) -> None:
        if not 2 <= input.dim() <= 5:
            raise ValueError(f"SyncBatchNorm takes 2-D to 5-D input, not {input.dim()}-D.")
        if input.shape[1] != self.num_features or not input.is_floating_point():
            raise ValueError(
                f"SyncBatchNorm takes {self.num_features} channels of a floating-point type, not "
                f"{input.shape[1]} of {input.dtype}."
            )


def _function_for(input: Tensor) -> Callable:
    """What normalises `input` fastest."""
    has_kernels = _rows is not None and input.is_cuda and input.dtype != torch.float64
    if has_kernels and not torch.compiler.is_compiling():
        return _rows.sync_batch_norm
    return _by_formula


def _by_formula(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    eps: float,
    momentum: float | Tensor,
    group: str,
) -> Tensor:
    """In operations that a compiler fuses with their neighbours, and that any device has."""
    with torch.no_grad():
        mean, var, total = _moments(input, group)
        if running_mean is not None:
            unbiased = var * (total / (total - 1).clamp(min=1))
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
        invstd = (var + eps).rsqrt()
    return _ByFormula.apply(input, weight, bias, mean, invstd, total, group)


def _moments(input: Tensor, group: str) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of each channel over the group, and of how many values; in float64."""
    x = _at_least_fp32(input)
    channels, count = input.shape[1], input.numel() // input.shape[1]
    if count:
        var, mean = torch.var_mean(x, _all_but_channels(input), correction=0)
    elif torch.compiler.is_compiling():  # it would leave out gathers whose result is not used
        raise ValueError("SyncBatchNorm cannot be compiled for an empty batch.")
    else:
        var = mean = x.new_zeros(channels)
    here = torch.cat([mean, var, x.new_full((1,), count)])
    means, variances, counts = gather(here, group).double().split([channels, channels, 1], dim=1)
    total = counts.sum().clamp(min=1)  # nan has no way out of the running statistics
    mean = (means * counts).sum(0) / total
    var = ((variances + (means - mean).square()) * counts).sum(0) / total
    return mean, var, total


class _ByFormula(torch.autograd.Function):
    """(input − mean) · invstd · weight + bias, where mean and invstd come from the input, too."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        invstd: Tensor,
        total: Tensor,
        group: str,
    ) -> Tensor:
        x = _at_least_fp32(input)
        mean, invstd = mean.to(x.dtype), invstd.to(x.dtype)
        ctx.save_for_backward(input, weight, mean, invstd, total)
        ctx.group = group
        output = (x - _per_channel(mean, x)) * _per_channel(invstd, x)
        if weight is not None:
            output = output * _per_channel(weight, x) + _per_channel(bias, x)
        # A cast to the type that it has makes torch 2.11 compile a backward pass of zeros.
        return output if output.dtype == input.dtype else output.to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, invstd, total = ctx.saved_tensors
        grad = _at_least_fp32(grad)
        centred = _at_least_fp32(input) - _per_channel(mean, input)
        sum_grad = grad.sum(_all_but_channels(input))
        sum_product = (grad * centred).sum(_all_but_channels(input)) * invstd
        grad_input = grad_weight = grad_bias = None
        if weight is not None:
            grad_weight, grad_bias = sum_product.to(weight.dtype), sum_grad.to(weight.dtype)
        if ctx.needs_input_grad[0]:
            sums = gather(torch.cat([sum_grad, sum_product]), ctx.group).double().sum(0)
            mean_grad, mean_product = (sums / total).to(invstd.dtype).chunk(2)
            scale = invstd if weight is None else invstd * weight
            grad_input = grad - _per_channel(mean_grad, grad)
            grad_input = grad_input - centred * _per_channel(invstd * mean_product, grad)
            grad_input = (grad_input * _per_channel(scale, grad)).to(input.dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None


def _at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _all_but_channels(tensor: Tensor) -> list[int]:
    return [dim for dim in range(tensor.dim()) if dim != 1]


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.dim() - 2))


def convert_syncbn_model(
    module: nn.Module,
    process_group: dist.ProcessGroup | None = None,
    channel_last: bool = False,
) -> nn.Module:
    """Puts a SyncBatchNorm in the place of every batch norm in `module`, which may be one itself.

    Parameters, buffers, requires_grad and the training mode stay as they are (Apex makes new
    parameters, all of them trainable, in training mode).
    """
    if not torch.cuda.is_available():
        say("SyncBatchNorm: on the CPU each process normalises over its own batch")

    def synced(norm: _BatchNorm) -> SyncBatchNorm:
        made = SyncBatchNorm(*_options(norm), process_group, channel_last)
        if isinstance(norm, SyncBatchNorm):
            made.fuse_relu, made.converted_from = norm.fuse_relu, norm.converted_from
        made.converted_from = next(filter(partial(isinstance, norm), _PLAIN), made.converted_from)
        return made

    return _replace(module, _BatchNorm, synced)


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
