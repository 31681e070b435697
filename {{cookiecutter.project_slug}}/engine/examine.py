"""What ``./run.sh --check`` looks at with torch: in each rank, and with the flags of main.py.

Each check yields marks and texts, as engine/doctor.py describes them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from engine import backend, checkpoint, distributed, doctor
from engine.check import device_identity
from engine.doctor import OK, WARNING, WRONG
from engine.errors import UserError, first_few

if TYPE_CHECKING:
    from engine.doctor import Results

OLDEST_TORCH = (2, 6)
MIB, GIB = 2**20, 2**30
NUMBERS = 4 * MIB  # in fp32, for the all-reduce
WAIT_S = 7.0  # for the other ranks
SHARED_MEMORY = Path("/dev/shm")
MEND_NETWORK = (
    "look at what NCCL_DEBUG=INFO ./run.sh says; start a container with --ipc=host; try "
    "NCCL_P2P_DISABLE=1, or NCCL_SOCKET_IFNAME (on the CPU, GLOO_SOCKET_IFNAME) with the name of "
    "the network interface"
)
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # of a container, which still sees all cores


# In each rank


def torch_itself() -> Results:
    """Whether torch is new enough."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    text = f"{torch.__version__} at {Path(torch.__file__).parent}"
    if version < OLDEST_TORCH:
        yield WRONG, f"{text} is too old: install {'.'.join(map(str, OLDEST_TORCH))} or later"
    else:
        yield OK, text


def cuda() -> Results:
    """Whether torch can use the GPUs that the driver knows."""
    built = torch.version.cuda or torch.version.hip
    if torch.cuda.is_available():
        yield OK, f"{built}, cuDNN {torch.backends.cudnn.version()}"
    elif not doctor.gpus():
        yield OK, f"not needed without a GPU; this torch {f'has {built}' if built else 'has none'}"
    elif os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        yield WARNING, "CUDA_VISIBLE_DEVICES hides every GPU: training runs on the CPU"
    elif not built:
        yield WRONG, "this torch was built without CUDA: install one with it, or hide the GPUs"
    else:
        try:
            torch.cuda.init()
            reason = "torch finds no GPU, and gives no reason"
        except RuntimeError as error:
            reason = str(error).split(". ")[0]
        yield (
            WRONG,
            f"{reason}: update the driver, install a torch for a CUDA older than {built}, or mend "
            f"CUDA_VISIBLE_DEVICES ({os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})",
        )


def nccl() -> Results:
    """The library that carries tensors between processes."""
    if not torch.cuda.is_available():
        yield OK, "not needed without a GPU: gloo serves"
    elif not dist.is_nccl_available():
        yield WRONG, "this torch was built without it: install one with it, or hide the GPUs"
    else:
        yield OK, ".".join(map(str, torch.cuda.nccl.version()))


def peers(processes: int) -> Results:
    """Whether GPUs reach each other's memory."""
    pairs = [(one, two) for two in range(processes) for one in range(two)]
    reach = torch.cuda.can_device_access_peer
    apart = [f"GPU{one}–GPU{two}" for one, two in pairs if not reach(one, two)]
    if apart:
        yield (
            WARNING,
            f"{first_few(apart)} do not reach each other's memory, so that gradients go through "
            "the host's: look for PCIe ACS, or for a virtual machine's settings",
        )
    elif pairs:
        yield OK, "each GPU reaches the others' memory"


def own_device(device: torch.device) -> Results:
    """The GPU of this rank: that it computes, and that its memory is free."""
    name = torch.cuda.get_device_name(device)
    try:
        torch.ones(2, device=device).sum().item()
    except RuntimeError as error:
        major, minor = torch.cuda.get_device_capability(device)
        raise UserError(
            f"{device}, {name}, does not compute ({str(error).splitlines()[0]}): free its memory, "
            f"or install a torch for its kind, sm_{major}{minor}; this one is for "
            f"{' '.join(torch.cuda.get_arch_list())}"
        ) from None
    free, total = torch.cuda.mem_get_info(device)
    text = f"{device}, {name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free < 0.8 * total:
        yield WARNING, f"{text}: others use it (nvidia-smi); CUDA_VISIBLE_DEVICES chooses GPUs"
    else:
        yield OK, text


def exchange(rank: int, local_rank: int, world_size: int, device: torch.device) -> Results:
    """Whether all ranks come, each with a device of its own, and sum a tensor right and fast.

    What went well, or not at all, is said by the first rank of each machine, what failed by all.
    """
    if local_rank == 0:
        yield WRONG, f"it did not end: {MEND_NETWORK}"
    try:
        store = _meet(rank, world_size, device_identity(device))
    except dist.DistNetworkError:
        if rank == local_rank > 0:
            return  # rank 0, on this machine, is gone, and has said why
        raise UserError(
            f"MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']} is "
            "out of reach: look from all machines at the same time, and open the port in the first "
            "one's firewall"
        ) from None
    distributed.choose_interface()
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("exchange", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=WAIT_S),
        )
        tensor = torch.full((NUMBERS,), rank + 1.0, device=device)
        dist.all_reduce(tensor)
        is_right = torch.all(tensor == world_size * (world_size + 1) / 2).item()
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            dist.all_reduce(tensor)
            tensor[0].item()  # it is over when the number is here
            seconds.append(time.perf_counter() - start)
    except RuntimeError as error:
        reason = str(error).split("Last error:")[-1].strip().splitlines()[0]  # NCCL's is the last
        raise UserError(f"it failed ({reason}): {MEND_NETWORK}") from None
    if not is_right:
        raise UserError(
            "it gives a wrong sum: turn the IOMMU (PCIe ACS) off in the BIOS, or train with "
            "NCCL_P2P_DISABLE=1"
        )
    store.set(f"done {rank}", "")
    with contextlib.suppress(dist.DistNetworkError):  # rank 0 has seen all, and is gone
        store.wait([f"done {other}" for other in range(world_size)])  # or one breaks off another's
    took = sorted(seconds)[2]
    text = f"{tensor.nbytes // MIB} MiB over {dist.get_backend()} in {1000 * took:.1f} ms"
    bandwidth = 2 * tensor.nbytes * (world_size - 1) / world_size / took  # on each link of a ring
    if local_rank > 0:
        return
    if dist.get_backend() == "nccl" and world_size > 1 and bandwidth < 1e9:
        yield WARNING, f"{text}, which is slow: NCCL_DEBUG=INFO ./run.sh says which way it takes"
    else:
        yield OK, f"{text}, {world_size} ranks"


def _meet(rank: int, world_size: int, device: str) -> dist.Store:
    """A store that all ranks have come to, each on a `device` of its own, or on the CPU."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    patience = timedelta(seconds=WAIT_S)
    store = dist.TCPStore(
        address, port, world_size, rank == 0, timeout=patience, wait_for_workers=False
    )
    store.set(f"processes {os.environ.get('NODE_RANK') or 0}", os.environ["LOCAL_WORLD_SIZE"])
    store.set(f"device {rank}", device)
    if rank == 0:
        store.set("problem", _problem(store, world_size))
    store.set_timeout(2 * patience)
    problem = store.get("problem").decode()
    if problem:
        time.sleep(rank == 0)  # the others read it from this one's store
        raise UserError(problem)
    return store


def _problem(store: dist.Store, world_size: int) -> str:
    """What is wrong with the devices of the ranks, or nothing."""
    machines = doctor.machines()
    absent = distributed.absent_ranks(store, "processes", machines)
    if absent:
        return (
            f"machine {absent} of {machines} did not come: read what it says, or look from it at "
            "the same time"
        )
    counts = [store.get(f"processes {machine}").decode() for machine in range(machines)]
    if len(set(counts)) > 1:
        return (
            f"machines start {', '.join(counts)} processes: they can train, but to look at them "
            "give all the same NPROC"
        )
    absent = distributed.absent_ranks(store, "device", world_size)
    if absent:
        return (
            f"rank {absent} of {world_size} did not come: read its own line, or look from its "
            "machine at the same time"
        )
    holders: dict[str, int] = {}
    for rank in range(world_size):
        device = store.get(f"device {rank}").decode()
        if device and holders.setdefault(device, rank) != rank:
            return (
                f"ranks {holders[device]} and {rank} have the same GPU ({device}): give each "
                "machine its own NODE_RANK, and each GPU once in CUDA_VISIBLE_DEVICES"
            )
    return ""


def main() -> None:
    """Looks from one rank."""
    rank, local_rank, world_size = distributed.ranks(None)
    first = {"torch": torch_itself, "CUDA": cuda, "NCCL": nccl}
    if local_rank == 0 and not doctor.look(first):
        return
    try:
        device = distributed.device_for(local_rank)
    except UserError as error:
        doctor.tell("GPU", WRONG, str(error))
        return
    checks: dict[str, Callable[[], Results]] = {}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        checks[f"rank {rank}"] = partial(own_device, device)
        if local_rank == 0:
            checks["peer access"] = partial(peers, int(os.environ["LOCAL_WORLD_SIZE"]))
    checks["all-reduce"] = partial(exchange, rank, local_rank, world_size, device)
    doctor.look(checks)


# In main.py


def settings(
    args: Namespace, build_datasets: Callable[[], tuple], needs: dict[str, bool]
) -> NoReturn:
    """Looks at what main.py was told to do, and ends the program.

    Args:
        args: the flags of main.py.
        build_datasets: makes the training and the validation set.
        needs: what it asks of backend.load_backend beside the opt_level.
    """
    if doctor.PIPE not in os.environ:
        _become_the_doctor()
    doctor.look({"flags": partial(flags, args)})
    datasets = cache(build_datasets)
    doctor.look({"Apex": partial(apex, args, **needs), "CPU": partial(cpu, args)})
    doctor.look({"output": partial(output, args), "resume": partial(resumed, args)})
    if doctor.look({"data": partial(data, args, datasets)}):
        doctor.look({"shared memory": partial(shared_memory, args, datasets)})
    sys.exit()


def _become_the_doctor() -> NoReturn:
    """For ``python main.py --check`` and ``torchrun main.py --check``: as run.sh starts it."""
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        sys.exit()  # the first one looks for all
    processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "PYTHONSAFEPATH": "1",
    }
    command = [sys.executable, "-m", "engine.doctor", f"--nproc-per-node={processes}", *sys.argv]
    os.execve(sys.executable, command, environment)


def flags(args: Namespace) -> Results:
    """What it was told, as it was told."""
    given = [flag for flag in sys.argv[1:] if flag not in ("--check", "--json")]
    text = " ".join(given) or "the defaults"
    if args.batch_size == 1:
        text += ": batch norm takes no single value, such as DeepLab's pooling has; take 2 or more"
    yield WARNING if args.batch_size == 1 else OK, text


def apex(args: Namespace, **needs: bool) -> Results:
    """Which one serves Apex's calls and why, and what there is of real Apex."""
    problem = backend.problem_with_apex(args.opt_level, **needs)
    _, reason = backend.load_backend(args.backend, args.opt_level, **needs)
    parts = backend.parts_of_apex()
    there = [part for part in parts if parts[part]]
    missing = [part for part in parts if not parts[part]]
    if there:
        reason += f"; Apex here has {', '.join(there)}"
        reason += f", but no {', '.join(missing)}" if missing else ""
    if problem and problem.remedy:
        yield WARNING, f"{reason}: {problem.remedy}"
    elif problem is None and missing:
        yield WARNING, f"{reason}: {backend.BUILD} for its full speed"
    else:
        yield OK, reason


def cpu(args: Namespace) -> Results:
    """Cores against threads and loading processes."""
    processes = int(os.environ["LOCAL_WORLD_SIZE"])
    cores, threads = distributed.cores(), torch.get_num_threads()
    text = f"{processes} × (cores {cores}, threads {threads}, --workers {args.workers})"
    limit, period = CPU_LIMIT.read_text().split() if CPU_LIMIT.exists() else ("max", "")
    if limit != "max" and int(limit) / int(period) < cores * processes:
        allowed = int(limit) / int(period)
        yield (
            WARNING,
            f"{text}; but this container may use {allowed:g} cores in all: give it more, or set "
            "OMP_NUM_THREADS and --workers for these",
        )
    elif threads > cores or threads == 1 and cores >= 4:
        yield WARNING, f"{text}: leave OMP_NUM_THREADS unset, run.sh gives each its share"
    elif args.workers > cores:
        yield WARNING, f"{text}: --workers {cores} is what the cores can do"
    else:
        yield OK, text


def output(args: Namespace) -> Results:
    """Whether --output can be written, holds a run already, and has room."""
    folder = args.output.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            free = shutil.disk_usage(there).free
    except OSError as error:
        raise UserError(
            f"{args.output} can't be written ({error.strerror}): choose another --output, or mend "
            "its permissions"
        ) from None
    text = f"{args.output} can be written, {free / GIB:.1f} GiB free"
    if free < GIB:
        yield WRONG, f"{text}, too little for checkpoints: make room, or choose another --output"
    elif args.resume is None and any(args.output.glob("*.pt")):
        yield WARNING, f"{text}, but holds a run: add --resume auto, or choose another --output"
    elif free < 10 * GIB:
        yield WARNING, f"{text}, little for checkpoints of a large model"
    else:
        yield OK, text


def resumed(args: Namespace) -> Results:
    """Whether there is a whole checkpoint to go on from."""
    if args.resume is None:
        return
    yield WARNING, f"{args.resume} is not read yet: a slow disk, or a large file"
    if args.resume == Path("auto"):
        said: list[str] = []
        path = checkpoint.newest(args.output, said.append)
        if said:
            yield WARNING, f"{path} serves: {'; '.join(said)}"
            return
    else:
        path = args.resume
    if path is None:
        yield OK, f"{args.output} has no checkpoint: the run begins"
    else:
        state = checkpoint.load(path)
        yield OK, f"{path}, after {state['epoch']} epochs, {state['step']} steps"


def data(args: Namespace, datasets: Callable[[], tuple]) -> Results:
    """The number of samples and classes, and what a sample is."""
    if args.dummy:
        yield OK, "synthetic"
        return
    yield (
        WARNING,
        f"{args.data} is not counted yet: a slow disk, which delays each run's start; nor is what "
        "its batches take of /dev/shm",
    )
    train_set, val_set = datasets()
    text = f"{args.data or 'the set that comes with the project'}: {len(train_set)} samples to "
    text += f"train on, {len(val_set)} to validate on"
    if hasattr(train_set, "classes"):
        text += f", {len(train_set.classes)} classes"
    start = time.perf_counter()
    tensors = [leaf for leaf in tree_leaves(train_set[0]) if isinstance(leaf, Tensor)]
    took = time.perf_counter() - start
    shapes = (f"{str(t.dtype)[6:]} {' × '.join(map(str, t.shape))}" for t in tensors if t.dim())
    text += f"; a sample ({', '.join(shapes)}) takes {1000 * took:.0f} ms"
    if not len(train_set) or not len(val_set):
        yield WRONG, f"{text}: fill both, train and val"
    else:
        yield OK, text


def shared_memory(args: Namespace, datasets: Callable[[], tuple]) -> Results:
    """Whether /dev/shm, through which loading processes hand batches over, is large enough."""
    if not SHARED_MEMORY.exists():
        return
    free = shutil.disk_usage(SHARED_MEMORY).free
    processes = int(os.environ["LOCAL_WORLD_SIZE"])
    sample = [] if args.dummy else tree_leaves(datasets()[0][0])
    size = sum(leaf.nbytes for leaf in sample if isinstance(leaf, Tensor))
    # A loading process works ahead by two batches (DataLoader's prefetch_factor).
    needed = processes * args.workers * 2 * args.batch_size * size
    text = f"{SHARED_MEMORY} has {free / MIB:.0f} MiB free, batches take up to {needed / MIB:.0f}"
    remedy = "start the container with --ipc=host, or --shm-size=16g"
    if free < needed:
        yield WRONG, f"{text}: {remedy}, or train with fewer --workers"
    elif free < GIB and torch.cuda.device_count() > 1:
        yield WARNING, f"{text}, and NCCL takes some: {remedy}"
    else:
        yield OK, text


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # without the process group's clean-up, which waits for all ranks
