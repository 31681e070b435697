"""One line to the user, from one process."""

import contextlib

import torch.distributed as dist


def is_rank_zero() -> bool:
    """Whether this process is the one that speaks: rank 0, or the only one."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def say(message: str) -> None:
    """Prints `message` on rank 0 alone."""
    if is_rank_zero():
        with contextlib.suppress(OSError):  # a full disk, or a pipe that nobody reads
            print(message, flush=True)
