"""Apex's distributed training on torch's own."""

import torch.distributed as dist

from . import LARC
from .distributed import DistributedDataParallel
from .reducer import Reducer
from .sync_batchnorm import SyncBatchNorm, convert_syncbn_model, revert_syncbn_model


def create_syncbn_process_group(group_size: int) -> dist.ProcessGroup | None:
    """The group of `group_size` neighbouring ranks that this process normalises with.

    Every process must call it. 0 stands for all of them, and gives None. Raises ValueError if
    `group_size` does not divide the number of processes.
    """
    if group_size == 0:
        return None
    world_size = dist.get_world_size()
    if group_size < 0 or world_size % group_size:
        raise ValueError(
            f"group_size is {group_size}, which does not divide {world_size} processes."
        )
    return dist.new_subgroups(group_size)[0]


__all__ = [
    "LARC",
    "DistributedDataParallel",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
    "revert_syncbn_model",
]
