"""Runs a training script as it is, but lets it train in turns.

    python turnstile.py PIPE WARMUP SETTLE BLOCK SCRIPT [the script's flags]

The script is an ordinary one that trains on and on, and knows nothing of this: torch calls a hook
after each step of any optimizer, and this one may wait there. The script runs freely for WARMUP
steps, then only when step.py, at the other end of the file descriptor PIPE, says so, for SETTLE
steps and BLOCK timed ones each time. A step that an overflow skips counts only if the optimizer is
called for it. A script whose weights are not finite is ended: that is no training, and a GPU is
faster at it.
"""

import os
import runpy
import sys
import time
from collections.abc import Generator
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


def turns(
    pipe: Connection, warmup: int, settle: int, block: int
) -> Generator[None, Optimizer, None]:
    """Is sent each step's optimizer; reports seconds per step and peak memory."""
    for _ in range(warmup):
        optimizer = yield
    synchronize()
    result = None
    while True:
        if not all(p.isfinite().all() for group in optimizer.param_groups for p in group["params"]):
            raise FloatingPointError("the weights are not finite")
        # What a script keeps between two steps is small; what it has cached for the next one is
        # not, and others need it now.
        torch.cuda.empty_cache()
        try:
            pipe.send(result)
            pipe.recv()
        except (EOFError, OSError):  # step.py has ended
            os._exit(0)
        for _ in range(settle):
            yield
        synchronize()
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for _ in range(block):
            optimizer = yield
        synchronize()
        result = (time.perf_counter() - start) / block, torch.cuda.max_memory_allocated()


def synchronize() -> None:
    """Waits for the GPU, if the script has one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def main() -> None:
    descriptor, warmup, settle, block = map(int, sys.argv[1:5])
    os.set_inheritable(descriptor, False)  # its end is how step.py learns that this one is dead
    pipe = Connection(descriptor)
    pipe.send("torch is imported")
    pipe.recv()

    turn = turns(pipe, warmup, settle, block)
    next(turn)
    register_optimizer_step_post_hook(lambda optimizer, *_: turn.send(optimizer))
    del sys.argv[:5]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
