"""Apex's distributed training on torch's own."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # the base of all batch norms; none is public

from .. import log_rank_zero
from . import LARC
from .distributed import DistributedDataParallel, Reducer
from .syncbn import SyncBatchNorm

SPECIAL = "a forward pass of its own or a pruned or parametrized weight"  # of a norm


def create_syncbn_process_group(group_size: int) -> dist.ProcessGroup | None:
    """Return the group of `group_size` neighbouring ranks that this process normalizes with.

    Every process must call it. 0 stands for all processes, and gives None.
    """
    if group_size == 0:
        return None
    world_size = dist.get_world_size()
    if group_size < 0 or world_size % group_size:
        raise ValueError(f"group_size {group_size} does not divide {world_size} processes.")
    return dist.new_subgroups(group_size)[0]


def convert_syncbn_model(
    module: nn.Module, process_group: dist.ProcessGroup | None = None, channel_last: bool = False
) -> nn.Module:
    """Replace every batch norm in `module`, which may be one itself, by a SyncBatchNorm.

    Parameters, buffers, requires_grad and the training mode are kept (Apex makes new parameters,
    all of them trainable, in training mode). A norm of a class with a forward pass of its own, such
    as timm's, which end in a ReLU, is not converted, and logged (Apex's conversion loses the ReLU);
    nor is one whose weight is pruned or parametrized.
    """
    kept = set()
    options: dict[str, Any] = {"process_group": process_group, "channel_last": channel_last}

    def to_synced(norm: Any) -> _BatchNorm:
        if is_special(norm):
            kept.add(type(norm).__name__)
            return norm
        synced = SyncBatchNorm(**_options(norm), **options)
        if isinstance(norm, SyncBatchNorm):
            synced.fuse_relu, synced.converted_from = norm.fuse_relu, norm.converted_from
        for plain in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            if isinstance(norm, plain):
                synced.converted_from = plain
        return synced

    converted = _replace(module, _BatchNorm, to_synced)
    has_synced = any(isinstance(child, SyncBatchNorm) for child in converted.modules())
    if has_synced and not torch.cuda.is_available():
        log_rank_zero("SyncBatchNorm: on the CPU each process normalizes over its own batch")
    if kept:
        names = ", ".join(sorted(kept))
        log_rank_zero(f"SyncBatchNorm: {names} has {SPECIAL}, and is not converted")
    return converted


def is_special(norm: _BatchNorm) -> bool:
    """Return whether conversion would lose what `norm` has of SPECIAL."""
    plain = (_BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward)
    given = (one for one in (norm.weight, norm.bias) if one is not None)
    is_computed = not all(isinstance(one, nn.Parameter) for one in given)
    return type(norm).forward not in plain or is_computed


def revert_syncbn_model(module: nn.Module) -> nn.Module:
    """Put plain batch norms back, for export or for one process; keep what conversion keeps.

    Each becomes what it was converted from, one that was not converted a BatchNorm2d. Raises
    ValueError for one with `fuse_relu`, whose ReLU would be lost.
    """

    def to_plain(norm: Any) -> _BatchNorm:
        if norm.fuse_relu:
            raise ValueError("A SyncBatchNorm with fuse_relu=True has no plain batch norm's place.")
        return norm.converted_from(**_options(norm))

    return _replace(module, SyncBatchNorm, to_plain)


def _options(norm: _BatchNorm) -> dict[str, Any]:
    """Return the constructor arguments that all batch norms have."""
    names = ("num_features", "eps", "momentum", "affine", "track_running_stats")
    return {name: getattr(norm, name) for name in names}


def _replace(
    module: nn.Module, kind: type[nn.Module], replacement: Callable[[Any], nn.Module]
) -> nn.Module:
    """Replace each `kind` in `module` by ``replacement(norm)``, with the tensors of `norm`."""
    replaced: dict[nn.Module, nn.Module] = {}  # one may have several names
    for name, norm in list(module.named_modules(remove_duplicate=False)):
        if isinstance(norm, kind):
            if norm not in replaced:
                replaced[norm] = replacement(norm).train(norm.training)
                _share_tensors(norm, replaced[norm])
            if not name:
                return replaced[norm]
            module.set_submodule(name, replaced[norm])
    return module


def _share_tensors(norm: nn.Module, new: nn.Module) -> None:
    """Give `new` the parameters and buffers of `norm`, and no others."""
    for key, _ in (*new.named_parameters(recurse=False), *new.named_buffers(recurse=False)):
        if getattr(norm, key, None) is None:
            setattr(new, key, None)
    for key, parameter in norm.named_parameters(recurse=False):
        new.register_parameter(key, parameter)
    for key, buffer in norm.named_buffers(recurse=False):
        new.register_buffer(key, buffer)
