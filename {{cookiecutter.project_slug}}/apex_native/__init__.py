"""Apex's training calls on torch alone; README.md states what is covered and how to use it.

Behaviour follows Apex at tag 25.05; docstrings state each difference and its reason.
"""

import contextlib

import torch.distributed as dist

VERSION = "1.0.0"


def log_rank_zero(message: str) -> None:
    """Print `message` on rank 0, or in the only process."""
    if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
        return
    with contextlib.suppress(OSError):  # a full disk, or a pipe without a reader
        print(message, flush=True)


from . import amp, normalization, optimizers, parallel  # noqa: E402, they import the function above

__all__ = ["VERSION", "amp", "log_rank_zero", "normalization", "optimizers", "parallel"]
