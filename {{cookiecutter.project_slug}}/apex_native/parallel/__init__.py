"""Apex's distributed training on torch's own."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # the base of all batch norms; none is public

from .. import log_rank_zero
from . import LARC
from .distributed import DistributedDataParallel, Reducer
from .syncbn import SyncBatchNorm

SPECIAL = "a forward pass or train() of its own or a pruned or parametrized weight"  # of a norm


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
    """Make every batch norm in `module`, which may be one itself, a SyncBatchNorm; return `module`.

    Each stays the same object, with its tensors, hooks and attributes (Apex makes other modules
    with new parameters, all of them trainable, in training mode). A norm of a class with a forward
    pass of its own, such as timm's, which end in a ReLU, is not converted, and logged (Apex's
    conversion loses the ReLU); nor is one with a train() of its own, or whose weight is pruned or
    parametrized.
    """
    kept = set()
    norms: list[Any] = [norm for norm in module.modules() if isinstance(norm, _BatchNorm)]
    for norm in norms:
        if is_special(norm):
            kept.add(type(norm).__name__)
            continue
        if not isinstance(norm, SyncBatchNorm):
            kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
            plain = next((kind for kind in kinds if isinstance(norm, kind)), nn.BatchNorm2d)
            norm.__class__ = SyncBatchNorm
            norm.fuse_relu, norm.converted_from = False, plain
        norm.process_group, norm.channel_last = process_group, channel_last
    if any(isinstance(norm, SyncBatchNorm) for norm in norms) and not torch.cuda.is_available():
        log_rank_zero("SyncBatchNorm: on the CPU each process normalizes over its own batch")
    if kept:
        names = ", ".join(sorted(kept))
        log_rank_zero(f"SyncBatchNorm: {names} has {SPECIAL}, and is not converted")
    return module


def is_special(norm: _BatchNorm) -> bool:
    """Return whether conversion would lose what `norm` has of SPECIAL."""
    plain = (_BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward)
    given = (one for one in (norm.weight, norm.bias) if one is not None)
    is_computed = not all(isinstance(one, nn.Parameter) for one in given)
    has_own_train = type(norm).train is not nn.Module.train  # such as to stay in eval mode
    return type(norm).forward not in plain or has_own_train or is_computed


def revert_syncbn_model(module: nn.Module) -> nn.Module:
    """Put plain batch norms back, for export or for one process; keep what conversion keeps.

    Each becomes what it was converted from, one that was not converted a BatchNorm2d. Raises
    ValueError for one with `fuse_relu`, whose ReLU would be lost.
    """
    norms: list[Any] = [norm for norm in module.modules() if isinstance(norm, SyncBatchNorm)]
    if any(norm.fuse_relu for norm in norms):
        raise ValueError("A SyncBatchNorm with fuse_relu=True has no plain batch norm's place.")
    for norm in norms:
        norm.__class__ = norm.converted_from
        for name in ("process_group", "channel_last", "fuse_relu", "converted_from"):
            delattr(norm, name)
    return module
