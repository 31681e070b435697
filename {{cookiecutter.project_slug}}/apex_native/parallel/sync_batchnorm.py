"""Batch normalisation over the batches of all processes."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules._functions import SyncBatchNorm as sync_batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from .._say import say


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

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """(N, C, …) → the same shape and type. `z` (same shape) is added before the ReLU."""
        synced = self.training and input.is_cuda and dist.is_initialized()
        if synced and dist.get_world_size(self.process_group) > 1:
            output = self._forward_synced(input)
        else:
            output = super().forward(input)
        if z is not None:
            output = output + z
        return F.relu(output) if self.fuse_relu else output

    def _forward_synced(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        factor = self.momentum
        if self.track_running_stats:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / self.num_batches_tracked.item()
        group = self.process_group or dist.group.WORLD
        return sync_batch_norm.apply(
            input,
            self.weight,
            self.bias,
            self.running_mean,
            self.running_var,
            self.eps,
            factor or 0.0,
            group,
            dist.get_world_size(group),
        )

    def _check_input_dim(self, input: Tensor) -> None:
        if not 2 <= input.dim() <= 5:
            raise ValueError(f"SyncBatchNorm takes 2-D to 5-D input, not {input.dim()}-D.")


def convert_syncbn_model(
    module: nn.Module,
    process_group: dist.ProcessGroup | None = None,
    channel_last: bool = False,
) -> nn.Module:
    """Puts a SyncBatchNorm in the place of every batch norm in `module`, which may be one itself.

    Parameters, buffers, requires_grad and the training mode stay as they are (Apex makes new
    parameters, all of them trainable, in training mode).
    """
    converted = _converted(module, process_group, channel_last)
    if not torch.cuda.is_available():
        say("SyncBatchNorm: on the CPU each process normalises over its own batch")
    return converted


def _converted(
    module: nn.Module, process_group: dist.ProcessGroup | None, channel_last: bool
) -> nn.Module:
    if isinstance(module, _BatchNorm):
        synced = SyncBatchNorm(
            module.num_features,
            module.eps,
            module.momentum,
            module.affine,
            module.track_running_stats,
            process_group,
            channel_last,
        )
        synced._parameters = module._parameters
        synced._buffers = module._buffers
        return synced.train(module.training)
    for name, child in module._modules.items():  # named_children() passes over second names
        if child is not None:
            module._modules[name] = _converted(child, process_group, channel_last)
    return module
