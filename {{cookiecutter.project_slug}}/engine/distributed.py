"""Which process this is, which device it has, and how it ends."""

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence, Sized
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.errors import UserError

PATIENCE_S = 5.0  # in which a launcher has ended every process of a job that failed


def is_speaker() -> bool:
    """Whether this process is the one that prints, known before any process group is."""
    return int(os.environ.get("RANK", "0")) == 0


def ranks(local_rank: int | None) -> tuple[int, int, int]:
    """The rank, the local rank and the world size of this process.

    LOCAL_RANK, which torchrun sets, wins over `local_rank`, the --local-rank that older launchers
    pass. Without a launcher this is the only process, and a free port is found for its group.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if "RANK" in os.environ and missing:
        raise UserError(
            f"RANK is set in the environment but not {', '.join(missing)}: start with ./run.sh or "
            "torchrun, which set them all, or unset RANK"
        )
    if missing:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    local = os.environ.get("LOCAL_RANK", local_rank)
    return int(os.environ["RANK"]), int(local or 0), int(os.environ["WORLD_SIZE"])


def is_restart() -> bool:
    """Whether torchrun has started this process in place of one that failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def device_for(local_rank: int) -> torch.device:
    """The GPU of this process, or the CPU where there is none.

    Raises UserError if this machine has fewer GPUs than it was given processes.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    processes = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), local_rank + 1)
    if processes > gpus:
        raise UserError(
            f"{processes} processes were started on a machine with {gpus} GPU"
            f"{'s' * (gpus != 1)}: start at most {gpus} (NPROC={gpus} ./run.sh)"
        )
    return torch.device("cuda", local_rank)


def describe(world_size: int, device: torch.device) -> str:
    """What the run is on, in a few words."""
    processes = f"{world_size} process{'es' * (world_size != 1)}"
    if device.type == "cuda":
        return f"{processes} on {torch.cuda.get_device_name(device)} (nccl)"
    return f"{processes} on the CPU (gloo)"


def cores() -> int:
    """The CPU cores that this process has for itself: those of the machine ÷ its processes."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    available = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, available // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def shard(dataset: Sized, rank: int, world_size: int) -> torch.utils.data.Subset:
    """Every `world_size`-th sample from `rank` on.

    Shards may differ by a sample in length: nothing is padded, so that sums over all shards count
    each sample once, as DistributedSampler's would not.
    """
    return torch.utils.data.Subset(dataset, range(rank, len(dataset), world_size))


def to_device(
    tensors: Sequence[Tensor], device: torch.device, memory_format: torch.memory_format
) -> list[Tensor]:
    """`tensors` on `device`; images, (N, C, H, W), in `memory_format` too."""
    formats = (memory_format if t.dim() == 4 else torch.preserve_format for t in tensors)
    return [
        tensor.to(device, memory_format=layout, non_blocking=True)
        for tensor, layout in zip(tensors, formats, strict=True)
    ]


@torch.no_grad()
def broadcast_buffers(model: nn.Module) -> None:
    """Gives every process rank 0's buffers, which are the ones that are saved.

    Batch norm's running statistics differ between processes unless SyncBatchNorm makes them.
    """
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


def run(main: Callable[[], None]) -> None:
    """Calls `main`, and ends the process at once if it fails.

    A UserError becomes one sentence and status 2, anything else its traceback and status 1. The
    process leaves without Python's usual clean-up, in which a process group or a data loader can
    wait for processes that will never answer; the launcher then ends the others.
    """
    try:
        main()
    except UserError as error:
        stop(str(error))
    except PermissionError as error:
        stop(f"{error.filename} can't be read or written: mend its permissions")
    except KeyboardInterrupt:
        _leave(128 + signal.SIGINT)
    except Exception as error:
        # A process that leaves breaks the connections of the others, which is a RuntimeError
        # there. The launcher ends them before they speak, so that the cause is what is read.
        if isinstance(error, RuntimeError) and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            time.sleep(PATIENCE_S)
        traceback.print_exc()
        _leave(1)
    if dist.is_initialized():
        dist.destroy_process_group()


def stop(message: str) -> NoReturn:
    """Ends this process with status 2, and with `message` if no other process says it.

    A user's mistake is mostly met by every rank at once. Rank 0 speaks, and the launcher then
    ends the others; one that is still there after a while met it alone, and speaks too.
    """
    if not is_speaker():
        time.sleep(PATIENCE_S)
    # A data loader's worker wraps the message in its own traceback: the last line is ours.
    sentence = message.strip().splitlines()[-1].removeprefix("engine.errors.UserError: ")
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    _leave(2)


def _leave(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
