"""Which process this is, which device it has, and how it ends."""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence, Sized
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.errors import BAD_USAGE, UserError
from engine.watch import LAUNCHER, is_gone, leave_with_the_launcher

CLOCKS_APART_S = 60.0  # which nobody's logs should be
PATIENCE_S = 5.0  # in which a launcher has ended every process of a job that failed
FAR_PATIENCE_S = 15.0  # in which launchers on several machines know of one that is lost
MAY_DIFFER = ("local_rank", "data", "output", "workers", "config")  # between machines
SIOCGIFADDR = 0x8915  # asks Linux for the address of an interface


def is_speaker() -> bool:
    """Whether this process is the one that prints, known before any process group is."""
    return int(os.environ.get("RANK", "0")) == 0


def is_on_one_machine() -> bool:
    """Whether the launcher started all processes here; what else it started is not known."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    return os.environ.get("LOCAL_WORLD_SIZE", world_size) == world_size


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


def join(device: torch.device, args: Namespace, apex: str) -> None:
    """Makes the process group: NCCL between GPUs, gloo between CPUs.

    Raises UserError if processes don't come, or come with another torch, code or flags.

    Args:
        args: with ``timeout``, seconds for a step. A collective may take a minute more: the step
            is to be named first.
        apex: the name of the module that serves Apex's calls.
    """
    timeout = timedelta(seconds=args.timeout + 60)
    try:
        rank, _, world_size = ranks(None)
        store = _store(timeout)
        _compare(store, rank, world_size, _facts(device, args, apex))
    except dist.DistNetworkError as error:
        raise UserError(
            f"MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']} "
            f"does not answer, or no more ({str(error).splitlines()[0]}): start rank 0 there, or "
            "look at what it says"
        ) from None
    choose_interface()
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _store(timeout: timedelta) -> dist.Store:
    """The launcher's store, or else one that rank 0 keeps for those that are started by hand."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_keeper = is_speaker() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.TCPStore(address, port, None, is_keeper, timeout, wait_for_workers=False)
    # torchrun may hand a restarted job the store of the one before, with addresses of the dead.
    return dist.PrefixStore(f"job {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _facts(device: torch.device, args: Namespace, apex: str) -> dict[str, str]:
    """What must be the same in all processes: versions, flags, and the project's files."""
    facts = {"torch": torch.__version__, "Python": platform.python_version().rpartition(".")[0]}
    facts |= {"torchvision": version("torchvision")}
    facts |= {"the kind of device": device.type, "Apex's backend": apex}
    flags = {name: value for name, value in vars(args).items() if name not in MAY_DIFFER}
    facts |= {f"--{name.replace('_', '-')}": str(value) for name, value in flags.items()}
    project = Path(__file__).parent.parent
    files = {Path(getattr(module, "__file__", None) or "/") for module in sys.modules.values()}
    for path in sorted(files):
        # The environment, too, may be in the project's folder.
        if path.is_relative_to(project) and "site-packages" not in path.parts:
            facts[str(path.relative_to(project))] = hashlib.sha1(path.read_bytes()).hexdigest()[:10]
    return facts


def _compare(store: dist.Store, rank: int, world_size: int, facts: dict[str, str]) -> None:
    """Raises UserError, in all processes, if `facts` differ between two of them."""
    store.set(f"facts {rank}", json.dumps([socket.gethostname(), facts]))
    keys = [f"facts {other}" for other in range(world_size)]
    try:
        store.wait(["difference"] if rank else keys)
    except dist.DistStoreError:
        raise UserError(
            f"rank {_missing(store, keys)} of {world_size} did not come: start what is missing, or "
            "look at what it says"
        ) from None
    if rank == 0:
        told = {other: json.loads(store.get(f"facts {other}")) for other in range(world_size)}
        store.set("difference", json.dumps([time.time(), _difference(told)]))
    theirs, difference = json.loads(store.get("difference"))
    if difference:
        raise UserError(difference)
    apart = time.time() - theirs  # for this, all have waited
    if abs(apart) > CLOCKS_APART_S and os.environ.get("LOCAL_RANK", "0") == "0":
        print(
            f"warning: the clock of {socket.gethostname()} is {apart:+.0f} s from rank 0's: set "
            "both by NTP, or times in logs and files mislead",
            file=sys.stderr,
            flush=True,
        )


def absent_ranks(store: dist.Store, kind: str, world_size: int) -> str:
    """The ranks that do not store their `kind` before the store's timeout, if any."""
    keys = [f"{kind} {rank}" for rank in range(world_size)]
    try:
        store.wait(keys)
    except dist.DistStoreError:
        return _missing(store, keys)
    return ""


def _missing(store: dist.Store, keys: list[str]) -> str:
    return ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))


def same_data(train_set: Sized, val_set: Sized) -> tuple[Sized, Sized]:
    """The two sets, if they are alike in all processes. Raises UserError, in all of them, if not.

    Each machine may have its data in a place of its own: it must be the same, in numbers of samples
    and in classes.
    """
    classes = [str(name) for name in getattr(train_set, "classes", ())]
    facts = {
        "the number of samples to train on": str(len(train_set)),
        "the number of samples to validate on": str(len(val_set)),
        "the number of classes": str(len(classes)),
        **{f"class {index}": name for index, name in enumerate(classes)},
    }
    rank, own = dist.get_rank(), (socket.gethostname(), facts)
    first = [own]
    dist.broadcast_object_list(first)
    differences = [""] * dist.get_world_size()
    dist.all_gather_object(differences, _difference({0: first[0], rank: own}))
    if any(differences):
        raise UserError(next(filter(None, differences)))
    return train_set, val_set


def _difference(told: dict[int, tuple[str, dict[str, str]]]) -> str:
    """A sentence about the first fact that is not the same in all processes, if any.

    Not all have loaded the same files: what one has alone is no difference.
    """
    host, ours = told[0]
    for rank, (name, theirs) in told.items():
        for fact in ours:
            if theirs.get(fact, ours[fact]) != ours[fact]:
                return (
                    f"{fact} is {theirs[fact]} on {name} (rank {rank}) but {ours[fact]} on {host} "
                    "(rank 0): give all machines the same versions, code, flags and data"
                )
    return ""


def choose_interface() -> None:
    """On several machines, has gloo take the network that leads to MASTER_ADDR.

    It would take the address of this machine's name, which often is one that only this machine
    can reach. So may be MASTER_ADDR, on the machine that has it.
    """
    if is_on_one_machine():
        return
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        own = _own_address(os.environ["MASTER_ADDR"])
        if own.startswith("127."):
            own = _own_address("192.0.2.1")  # anywhere outside
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                request = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == own:
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _own_address(target: str) -> str:
    """The address with which this machine would speak to `target`."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((target, 1))  # which sends nothing
        return probe.getsockname()[0]


def is_restart() -> bool:
    """Whether torchrun or SLURM has started this process in place of one that was stopped."""
    names = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return any(int(os.environ.get(name, "0")) > 0 for name in names)


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


def make_deterministic() -> None:
    """The same numbers each time, on a GPU too. An operation that can't promise it raises.

    DistributedDataParallel needs its flag for unused parameters as well. Without it, gradients are
    summed in an order that the first step settles: with three processes and more, a resumed run
    would round otherwise than before.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


class Agreement:
    """What any process asks for, known to all of them after the same step, without a wait.

    The answer to what is asked after one step is there after the next one: it was exchanged
    meanwhile, through the CPU, so that nothing waits for a GPU.

    Args:
        group: one of gloo, which nothing else uses at the same time.
        count: how many numbers are asked for at once.
    """

    def __init__(self, group: dist.ProcessGroup, count: int) -> None:
        self.group = group
        self.numbers, self.work = torch.zeros(count, dtype=torch.int64), None

    def ask(self, *numbers: int) -> None:
        """Tells the others; every process calls it."""
        self.numbers = torch.tensor([int(number) for number in numbers])
        self.work = dist.all_reduce(
            self.numbers, dist.ReduceOp.MAX, group=self.group, async_op=True
        )

    def answer(self) -> list[int]:
        """The highest of what the processes asked last."""
        if self.work:
            self.work.wait()
        return self.numbers.tolist()


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
    if sys.stdout:
        sys.stdout.reconfigure(errors="replace")  # an old terminal may lack some letters
    if "TORCHELASTIC_RUN_ID" in os.environ:
        parent = (os.getppid(),)
        threading.Thread(target=leave_with_the_launcher, args=parent, daemon=True).start()
        # It may have been killed while torch was imported, so that this is not its process.
        if is_gone(int(os.environ.pop(LAUNCHER, os.getpid()))):
            print("error: the launcher is gone", file=sys.stderr)
            leave(1)
    try:
        main()
    except UserError as error:
        stop(str(error))
    except PermissionError as error:
        stop(f"{error.filename} can't be read or written: mend its permissions")
    except KeyboardInterrupt:
        leave(128 + signal.SIGINT)
    except Exception as error:
        # A process that leaves breaks the connections of the others, which is a RuntimeError
        # there. The launcher ends them before they speak, so that the cause is what is read.
        if isinstance(error, RuntimeError) and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            time.sleep(PATIENCE_S if is_on_one_machine() else FAR_PATIENCE_S)
        traceback.print_exc()
        leave(1)
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
    leave(BAD_USAGE)


def leave(status: int) -> NoReturn:
    """Ends this process at once, without Python's clean-up."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # one may be closed
        stream.flush()
    os._exit(status)
