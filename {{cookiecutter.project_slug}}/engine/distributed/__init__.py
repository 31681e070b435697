"""Start and end of a process: its rank, its device, its process group, its exit status."""

import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from engine import EXIT_USAGE, FULL_DISK, PeerError, UserError, log_line, print_error
from engine.distributed import consistency
from engine.distributed.network import is_loopback, local_address, select_interface, serve_store
from engine.distributed.peers import (
    PeerMonitor,
    announce_failure,
    exit_process,
    finish_writing,
    peer_monitor,
)
from engine.launch import IN_RANK, LAUNCH_ID, RESTART, SIGNALS, end_with_launcher
from engine.text import one_message

T = TypeVar("T")
MAX_PORT = 2**16 - 1
CORRECTABLE = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, *FULL_DISK)
PATIENCE_S = 5.0  # for a launcher to end all processes of a job that has failed
GLOO_THREADS_S = 0.1  # for gloo's threads to end
SETTLE_S = 3.0  # for the peer monitor to receive another process's failure
FORK_PAUSE_S = 0.01  # for threads to release Python's locks
_interrupts: list[int] = []  # signals of Ctrl-C in this pause


def is_rank_zero() -> bool:
    """Return whether this process has rank 0; works before there is a process group."""
    return os.environ.get("RANK", "0") == "0"


def is_local_leader() -> bool:
    """Return whether this process is the first one of its host."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def all_gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return the `value` of each rank of `group`; without a group, that of this process alone."""
    values = [value]
    if group:
        values *= dist.get_world_size(group)
        dist.all_gather_object(values, value, group)
    return values


def operation_limit(timeout_s: float) -> timedelta:
    """Return the limit of an operation between ranks; the watchdog reports a slow step first."""
    return timedelta(seconds=timeout_s + 60)


def print_on_rank_zero(message: str) -> None:
    """Print a line on standard error if this process has rank 0."""
    if is_rank_zero():
        log_line(one_message(message))


def is_single_host() -> bool:
    """Return whether all processes of the run are on this host.

    Without LOCAL_WORLD_SIZE, which some launchers do not set, a loopback MASTER_ADDR shows it.
    """
    world_size = os.environ.get("WORLD_SIZE", "1")
    is_local = world_size == "1" or is_loopback(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    return os.environ.get("LOCAL_WORLD_SIZE", world_size if is_local else "") == world_size


def is_restart() -> bool:
    """Return whether torchrun or SLURM has restarted the job, or a process of it.

    All processes return the same after `rendezvous`.
    """
    names = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    counts = (os.environ.get(name, "") for name in names)
    return RESTART in os.environ or any(count.isdecimal() and int(count) > 0 for count in counts)


def launch_ids() -> dict[str, str]:
    """Return the ids of this launch: of run.sh, and of the SLURM job, which may be requeued."""
    return {name: os.environ[name] for name in (LAUNCH_ID, "SLURM_JOB_ID") if name in os.environ}


def requeue(info: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Ask SLURM, if it started this job, to start it again; log that by `info` or `warn`."""
    job = os.environ.get("SLURM_JOB_ID")
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:  # the plain id of an array's last job would mean all
        job = f"{array}_{task}"
    if not job:
        return
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, timeout=20)
        info(f"SLURM starts job {job} again")
    except (OSError, subprocess.SubprocessError) as error:
        warn(f"scontrol requeue {job} failed ({error})")


def resolve_ranks(local_rank: int | None) -> tuple[int, int, int]:
    """Return the rank, the local rank and the world size of this process.

    Without a launcher, this is the only process, and the variables of a group of one are set.

    Args:
        local_rank: the value of --local-rank, which old launchers pass; LOCAL_RANK, which torchrun
            sets, overrides it.

    Raises UserError in a process that has trained before, such as a notebook, or if the variables
    are incomplete, no numbers or contradict each other.
    """
    if dist.is_initialized():
        raise UserError(
            "this process has trained before: start each run as a process of its own, in a "
            "notebook with !./run.sh --output runs/NAME"
        )
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    start = "start with ./run.sh or torchrun, which set them all, or unset them"
    if missing and ("RANK" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1"):
        given = ", ".join(name for name in names if name not in missing)
        raise UserError(f"the environment has {given} but not {', '.join(missing)}: {start}")
    if missing:
        # A group of one has a store of its own, and listens at no port.
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    values = {"LOCAL_RANK": os.environ.get("LOCAL_RANK") or str(local_rank or 0)}
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_WORLD_SIZE"):
        values[name] = os.environ.get(name, "1")
    if wrong := [name for name, value in values.items() if not re.fullmatch(r"[0-9]{1,9}", value)]:
        raise UserError(f"{' and '.join(wrong)} in the environment must be a number: {start}")
    if int(values["MASTER_PORT"]) > MAX_PORT:
        raise UserError(f"MASTER_PORT={values['MASTER_PORT']} is more than {MAX_PORT}: {start}")
    rank, world_size = int(values["RANK"]), int(values["WORLD_SIZE"])
    if rank >= world_size:
        raise UserError(f"RANK={rank} must be less than WORLD_SIZE={world_size}: {start}")
    return rank, int(values["LOCAL_RANK"]), world_size


def select_device(local_rank: int) -> torch.device:
    """Return the GPU of this process, or the CPU where there is none.

    Raises UserError if the host has fewer GPUs than processes.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    processes = max(_local_world_size(), local_rank + 1)
    if processes > gpus:
        raise UserError(
            f"{processes} processes were started on a machine with {gpus} GPU"
            f"{'s' * (gpus != 1)}: start at most {gpus} (NPROC={gpus} ./run.sh)"
        )
    return torch.device("cuda", local_rank)


def rendezvous(
    device: torch.device, settings: dict[str, object], backend_name: str, timeout: timedelta
) -> dist.Store:
    """Wait for all processes, compare them, and return the store for `init_process_group`.

    Args:
        settings: values of the flags by name, which must be the same in all processes.
        backend_name: the Apex implementation in use, which must be the same, too.
        timeout: the longest wait for the other processes.

    Raises:
        PeerError: if a process does not arrive.
        UserError: if one has another torch, code or flags.
    """
    rank, _, world_size = resolve_ranks(None)
    try:
        store = _connect_store(timeout)
        if world_size > 1:
            PeerMonitor.connect(store, rank, _reachable_address())
        if is_restart():
            store.set("restart", os.environ.get(RESTART, ""))
        facts = consistency.collect_facts(device, settings, backend_name)
        consistency.require_same_facts(store, rank, world_size, facts)
        if store.check(["restart"]):  # a host that joins a job late has not restarted itself
            os.environ.setdefault(RESTART, store.get("restart").decode())
            _log_restart(rank)
    except dist.DistNetworkError as error:
        raise PeerError(
            f"MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']} "
            f"does not answer, or no more ({str(error).splitlines()[0]}): start rank 0 there, or "
            "look at its output"
        ) from None
    select_gloo_interface()
    if sys.version_info < (3, 12):
        # There, a process that is forked while a thread of gloo enters Python waits for ever.
        os.register_at_fork(before=pause_before_fork, after_in_parent=repeat_interrupt)
    return store


def pause_before_fork() -> None:
    """Wait before a process is forked. Python ignores exceptions here; see `repeat_interrupt`."""
    try:
        time.sleep(FORK_PAUSE_S)
    except KeyboardInterrupt:
        _interrupts.append(signal.SIGINT)


def repeat_interrupt() -> None:
    """Let Ctrl-C in the pause before a fork have its effect after it, however long that took."""
    if _interrupts:
        main = threading.main_thread().ident
        threading.Timer(FORK_PAUSE_S / 2, signal.pthread_kill, (main, _interrupts.pop())).start()


def _log_restart(rank: int) -> None:
    """Log, on rank 0, how often torchrun has restarted the job, and why."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if rank != 0 or count is None:
        return
    own = "SLURM has requeued the job" if count == "0" else "a process failed"
    reason = os.environ[RESTART] or own
    limit = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
    with suppress(OSError):  # a full disk
        print(f"restarted: {reason}; {count} of MAX_RESTARTS={limit} are used", flush=True)


def select_gloo_interface() -> None:
    """Make gloo use the network interface by which the other processes reach this host."""
    select_interface(_reachable_address())


def _reachable_address() -> str:
    """Return the address of this host by which the other processes can reach it."""
    return "127.0.0.1" if is_single_host() else local_address(os.environ["MASTER_ADDR"])


def _connect_store(timeout: timedelta) -> dist.Store:
    """Return the launcher's store, or one that rank 0 serves."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if os.environ["WORLD_SIZE"] == "1" and not is_served:
        return dist.HashStore()  # needs no port
    if is_rank_zero() and not is_served:
        return serve_store(address, port, timeout)
    store = dist.TCPStore(address, port, None, False, timeout, wait_for_workers=False)
    if not is_served:
        return store
    # torchrun reuses its store after a restart: it holds addresses of processes that ended.
    return dist.PrefixStore(f"job {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


def describe(world_size: int, device: torch.device) -> str:
    """Return a summary for the log: number of processes, device, communication backend."""
    processes = f"{world_size} process{'es' * (world_size != 1)}"
    if device.type == "cuda":
        return f"{processes} on {torch.cuda.get_device_name(device)} (nccl)"
    return f"{processes} on the CPU (gloo)"


@contextmanager
def folder_of_rank(folder: Path) -> Iterator[Path]:
    """Yield `folder` on rank 0, and a temporary folder, for files that nobody needs, on others.

    There, the body ends without an error if the disk is full.
    """
    if is_rank_zero():
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        try:
            yield Path(temporary)
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise


def cpu_cores() -> int:
    """Return the number of CPU cores for each process of this host."""
    return max(1, len(os.sched_getaffinity(0)) // _local_world_size())


def own_part() -> slice:
    """Return this process's part of work that the processes of its host share."""
    processes = _local_world_size()
    rank = os.environ.get("LOCAL_RANK")
    return slice(int(rank) % processes, None, processes) if rank else slice(None)


def _local_world_size() -> int:
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def make_deterministic() -> None:
    """Request the same numbers in each run, on a GPU too; operations that cannot will raise.

    DistributedDataParallel needs its flag for unused parameters as well. Without it, gradients are
    summed in an order that depends on the first step: with three processes or more, a resumed run
    would round differently.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


@torch.no_grad()
def broadcast_buffers(model: nn.Module) -> None:
    """Broadcast rank 0's persistent buffers, except constants, to all processes.

    Batch norm's running statistics differ between processes unless SyncBatchNorm is used. So may
    frozen parameters that a forward pass updates, such as a codebook, which are copied, too.
    """
    is_trained = any(one.requires_grad for one in model.parameters())  # else, an average
    frozen = [one for one in model.parameters() if is_trained and is_frozen(one)]
    for buffer in chain(saved_buffers(model).values(), frozen):
        if buffer.layout is torch.strided and not is_expanded(buffer):  # else, a constant
            buffer.copy_(broadcast_values(buffer))


def broadcast_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return rank 0's values of a dense tensor of any type and layout, as a contiguous tensor."""
    values = tensor.contiguous()  # torch would send other memory than that of a view
    dist.broadcast(values.flatten().view(torch.uint8), src=0)  # gloo and NCCL lack int16
    return values


def saved_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a checkpoint of `model` holds, perhaps by another name."""
    saved = model.state_dict()  # with keep_vars, apex_native would update its masters
    kept = {*saved, *map(_memory, saved.values())} - {None}
    return {n: one for n, one in model.named_buffers() if n in kept or _memory(one) in kept}


def _memory(value: Any) -> int | None:
    is_plain = type(value) is torch.Tensor and value.layout is torch.strided
    return value.data_ptr() if is_plain else None


def extra_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that modules' ``get_extra_state`` has made, by torch's name of them."""
    return {name: one for name, one in state_dict.items() if name.split(".")[-1] == "_extra_state"}


def is_frozen(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is not trained, and this process has it whole."""
    return not parameter.requires_grad and not hasattr(parameter, "to_local")


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether elements share memory, as after ``expand``: they are constants."""
    return tensor.layout is torch.strided and any(
        not step and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


class AsyncMax:
    """Maximum of integers over all processes, without a wait.

    The exchange runs on the CPU while the next step is computed: what is submitted after one step
    can be read after the next one.

    Args:
        group: a gloo group that nothing else uses at the same time.
        count: number of integers of each submission.
    """

    def __init__(self, group: dist.ProcessGroup, count: int) -> None:
        self.group = group
        self.numbers = torch.zeros(count, dtype=torch.int64)
        self.work: dist.Work | None = None

    def submit(self, *numbers: int) -> None:
        """Start the exchange; every process calls it."""
        self.numbers = torch.tensor([int(number) for number in numbers])
        self.work = dist.all_reduce(
            self.numbers, dist.ReduceOp.MAX, group=self.group, async_op=True
        )

    def result(self) -> list[int]:
        """Return the maxima of what the processes submitted last; zeros before that."""
        if self.work:
            self.work.wait()
        return self.numbers.tolist()


def run(main: Callable[[], None]) -> None:
    """Call `main`, and exit at once if it fails.

    A UserError becomes one message and its status, any other exception its traceback and status 1.
    The process exits without Python's usual clean-up, in which a process group or a data loader
    can wait for processes that will never answer. It exits, too, when its launcher does.
    """
    if isinstance(sys.stdout, TextIOWrapper):  # not None, nor a notebook's
        sys.stdout.reconfigure(errors="replace")  # not all terminals have all characters
    end_with_launcher()
    os.environ[IN_RANK] = "1"
    try:
        # The launcher has blocked them; SIGUSR1 can be handled after the first step.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS - {signal.SIGUSR1})
        _call(main)
    except UserError as error:
        stop(str(error), error.status)
    except KeyboardInterrupt:
        exit_process(128 + signal.SIGINT)
    except Exception as error:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch raises for each data-loading worker
        if isinstance(error, OSError) and error.errno in CORRECTABLE:
            stop(f"{error.filename or 'a file'} can't be read or written ({error.strerror})")
        # A process that ends breaks the connections of the others, which is a RuntimeError there:
        # the peer monitor ends them meanwhile, so that only the cause is logged.
        if isinstance(error, RuntimeError) and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            time.sleep(SETTLE_S)
        if announce_failure(1):
            with suppress(OSError):  # a full disk: the exit status remains
                traceback.print_exc()
        exit_process(1)
    if dist.is_initialized():
        # In torch 2.6, a group that is destroyed waits with the GIL for gloo's threads, which may
        # need it to end the last operation: this gives them time for it.
        time.sleep(GLOO_THREADS_S)
        dist.destroy_process_group()
    if monitor := peer_monitor():
        monitor.finish()


def _call(main: Callable[[], None]) -> None:
    """Call `main`, and wait for a checkpoint that is being written, also after `sys.exit()`."""
    try:
        main()
    except SystemExit as error:
        if error.code:
            finish_writing()
            raise
    finish_writing()


def stop(message: str, status: int = EXIT_USAGE) -> NoReturn:
    """Exit with `status`, after logging `message` unless another process logs it.

    Mostly all ranks find a user's error at once. The first one logs it; before the processes are
    connected it is rank 0, and any other one that still runs after PATIENCE_S.
    """
    if not peer_monitor() and not is_rank_zero():
        time.sleep(PATIENCE_S)
    if announce_failure(status):
        # A data loader's worker wraps the message in its own traceback: the last line is ours.
        if message.startswith("Caught "):
            message = message.strip().splitlines()[-1]
            message = re.sub(r"^[\w.]*(User|File|Outage)Error: ", "", message)
        print_error(one_message(message))
    exit_process(status)
