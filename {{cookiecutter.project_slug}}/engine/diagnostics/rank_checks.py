"""Preflight checks of a rank, run as a child of preflight.py: torch, GPUs, NCCL and all-reduce."""

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import combinations
from pathlib import Path

import torch
import torch.distributed as dist

from engine import UserError, distributed, summarize
from engine.diagnostics import preflight
from engine.diagnostics.first_step import device_identity, find_shared_gpu
from engine.diagnostics.preflight import ERROR, GIB, MIB, OK, WARNING, Results
from engine.distributed import consistency
from engine.distributed.network import serve_store, wait_for_server

MIN_TORCH = (2, 6)
ALL_REDUCE_BYTES = 16 * MIB
MIN_BANDWIDTH = 1e9  # bytes/s of NCCL on each link
NETWORK_FIX = (
    "read the output of NCCL_DEBUG=INFO ./run.sh; start a container with --ipc=host; try "
    "NCCL_P2P_DISABLE=1, or NCCL_SOCKET_IFNAME (on the CPU, GLOO_SOCKET_IFNAME) with the name of "
    "the network interface"
)
MORE_TIME = "set CHECK_WAIT to more seconds"
TOGETHER = "run the check on all hosts at the same time"


def check_torch() -> Results:
    """Check the version of torch."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    text = f"{torch.__version__} at {Path(torch.__file__).parent}"
    if version < MIN_TORCH:
        yield ERROR, f"{text} is too old: install {'.'.join(map(str, MIN_TORCH))} or later"
    else:
        yield OK, text


def check_cuda() -> Results:
    """Check that torch can use the GPUs that the driver lists."""
    version = torch.version.cuda or torch.version.hip
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda.is_available():
        yield OK, f"{version}, cuDNN {torch.backends.cudnn.version()}"
    elif not preflight.gpus():
        yield OK, f"not needed without a GPU; this torch has {version or 'none'}"
    elif visible in ("", "-1"):
        yield WARNING, "CUDA_VISIBLE_DEVICES hides every GPU: training runs on the CPU"
    elif not version:
        yield ERROR, "this torch was built without CUDA: install one with it, or hide the GPUs"
    else:
        reason = "torch finds no GPU, and gives no reason"
        try:
            torch.cuda.init()
        except RuntimeError as error:
            reason = str(error).split(". ")[0]
        fix = f"update the driver, install a torch for a CUDA older than {version}, or correct"
        yield ERROR, f"{reason}: {fix} CUDA_VISIBLE_DEVICES ({visible or 'not set'})"


def check_nccl() -> Results:
    """Check that torch has NCCL."""
    if not torch.cuda.is_available():
        yield OK, "not needed without a GPU: gloo is used"
    elif not dist.is_nccl_available():
        yield ERROR, "this torch was built without NCCL: install one with it, or hide the GPUs"
    else:
        yield OK, ".".join(map(str, torch.cuda.nccl.version()))


def check_peer_access(num_gpus: int) -> Results:
    """Check that GPUs can access each other's memory."""
    can_access = torch.cuda.can_device_access_peer
    pairs = list(combinations(range(num_gpus), 2))
    if without := [f"GPU{one}–GPU{two}" for one, two in pairs if not can_access(one, two)]:
        problem = f"{summarize(without)} can't access each other's memory, which is slow"
        yield WARNING, f"{problem}: check PCIe ACS, or the settings of a virtual machine"
    elif pairs:
        yield OK, "each GPU can access the others' memory"


def check_device(device: torch.device) -> Results:
    """Check that this rank's GPU computes and that its memory is free."""
    name = torch.cuda.get_device_name(device)
    try:
        torch.ones(2, device=device).sum().item()
    except RuntimeError as error:
        major, minor = torch.cuda.get_device_capability(device)
        problem = f"{device}, {name}, does not compute ({str(error).splitlines()[0]})"
        fix = f"free its memory, or install a torch for its architecture, sm_{major}{minor}"
        supported = " ".join(torch.cuda.get_arch_list())
        raise UserError(f"{problem}: {fix}; this one supports {supported}") from None
    free, total = torch.cuda.mem_get_info(device)
    text = f"{device}, {name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free < 0.8 * total:
        fix = "choose GPUs with CUDA_VISIBLE_DEVICES"
        yield WARNING, f"{text}: other processes use it (see nvidia-smi); {fix}"
    else:
        yield OK, text


def check_all_reduce(rank: int, local_rank: int, world_size: int, device: torch.device) -> Results:
    """Check that all ranks join, on different devices, and sum a tensor correctly and fast.

    The first rank of each host reports success or a hang; each rank reports its own failure.
    """
    if local_rank == 0:
        yield ERROR, f"it did not finish in {preflight.CHECK_WAIT_S} s: {MORE_TIME}; {NETWORK_FIX}"
    try:
        store = rendezvous(rank, world_size, device)
    except dist.DistNetworkError:
        if rank == local_rank > 0:
            return  # rank 0, on this host, has exited and reported the reason
        address = "MASTER_ADDR={MASTER_ADDR}, MASTER_PORT={MASTER_PORT}".format_map(os.environ)
        fix = f"{TOGETHER}, and open this port of the first one"
        raise UserError(f"{address} can't be reached: {fix}") from None
    except dist.DistStoreError:
        problem = "a rank did not answer in time" if rank == 0 else "rank 0 did not answer in time"
        raise UserError(f"{problem}: {TOGETHER}, or {MORE_TIME}") from None
    distributed.select_gloo_interface()
    try:
        seconds = _time_all_reduce(store, rank, world_size, device)
    except RuntimeError as error:
        reason = str(error).split("Last error:")[-1].strip().splitlines()[0]  # NCCL's comes last
        raise UserError(f"it failed ({reason}): {NETWORK_FIX}") from None
    store.set(f"done {rank}", "")
    with contextlib.suppress(dist.DistNetworkError):  # rank 0 has seen all, and has exited
        store.wait([f"done {other}" for other in range(world_size)])  # an exit breaks connections
    if local_rank > 0:
        return
    backend = dist.get_backend()
    size = f"{ALL_REDUCE_BYTES // MIB} MiB"
    text = f"{size} over {backend} in {1000 * seconds:.1f} ms, {world_size} ranks"
    link_bytes = 2 * ALL_REDUCE_BYTES * (world_size - 1) / world_size  # of each link in a ring
    if backend == "nccl" and world_size > 1 and link_bytes / seconds < MIN_BANDWIDTH:
        yield WARNING, f"{text}, which is slow: NCCL_DEBUG=INFO ./run.sh shows its transport"
    else:
        yield OK, text


def _time_all_reduce(store: dist.Store, rank: int, world_size: int, device: torch.device) -> float:
    """Return the median time of an all-reduce in seconds. Raises UserError if its sum is wrong."""
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("all-reduce", store),
        rank=rank,
        world_size=world_size,
        timeout=time_left(),
    )
    tensor = torch.full((ALL_REDUCE_BYTES // 4,), rank + 1.0, device=device)
    dist.all_reduce(tensor)
    if not torch.all(tensor == world_size * (world_size + 1) / 2):
        fix = "turn the IOMMU (PCIe ACS) off in the BIOS, or train with NCCL_P2P_DISABLE=1"
        raise UserError(f"the sum is wrong: {fix}")
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        dist.all_reduce(tensor)
        tensor[0].item()  # waits for the GPU
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def time_left() -> timedelta:
    """Return how long this rank may wait; rank 0 stops earlier, to send the others the reason."""
    rest = 3.0 if distributed.is_rank_zero() else 1.0
    left = float(os.environ[preflight.DEADLINE]) - time.monotonic() - rest
    return timedelta(seconds=max(1.0, left))


def rendezvous(rank: int, world_size: int, device: torch.device) -> dist.Store:
    """Return a store that all ranks have joined.

    Raises UserError if their devices conflict, or their versions, code or clocks differ.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        store = serve_store(address, port, time_left())
    else:
        wait_for_server(address, port, time_left().total_seconds()).close()
        store = dist.TCPStore(address, port, None, False, time_left(), wait_for_workers=False)
    store.set(f"processes {os.environ.get('NODE_RANK') or 0}", os.environ["LOCAL_WORLD_SIZE"])
    consistency.store_facts(store, rank, consistency.collect_facts(device, {}, ""))
    store.set(f"device {rank}", device_identity(device))
    if rank == 0:
        problem = find_problem(store, world_size)
        store.set("time", str(time.time()))
        clocks = (store.get(f"clock {other}").decode() for other in range(1, world_size))
        store.set("problem", problem or next(filter(None, clocks), ""))
    else:
        store.set(f"clock {rank}", consistency.clock_problem(float(store.get("time")), "rank 0's"))
    if problem := store.get("problem").decode():
        if rank == 0:
            time.sleep(1)  # the others read it from this rank's store
        raise UserError(problem)
    return store


def find_problem(store: dist.Store, world_size: int) -> str:
    """Return what is wrong with the hosts, devices and versions of the ranks, if anything."""
    num_hosts = preflight.num_hosts()
    store.set_timeout(time_left())
    if absent := consistency.missing_ranks(store, "processes", num_hosts):
        return f"host {absent} of {num_hosts} did not join: read its output, or run the check there"
    counts = [store.get(f"processes {host}").decode() for host in range(num_hosts)]
    if len(set(counts)) > 1:
        fix = "they can train, but the check needs the same NPROC on all"
        return f"the hosts start {', '.join(counts)} processes: {fix}"
    store.set_timeout(time_left())
    if absent := consistency.missing_ranks(store, "device", world_size):
        return f"rank {absent} of {world_size} did not join: read its result, or check its host too"
    shared = find_shared_gpu([store.get(f"device {rank}").decode() for rank in range(world_size)])
    fix = "give each host its own NODE_RANK, and list each GPU once in CUDA_VISIBLE_DEVICES"
    return f"{shared}: {fix}" if shared else consistency.compare_facts(store, world_size)


def main() -> None:
    """Run the checks of this rank."""
    rank, local_rank, world_size = distributed.resolve_ranks(None)
    of_torch = {"torch": check_torch, "CUDA": check_cuda, "NCCL": check_nccl}
    if local_rank == 0 and not preflight.run_checks(of_torch):
        return
    try:
        device = distributed.select_device(local_rank)
    except UserError as error:
        preflight.send("GPU", ERROR, str(error))
        return
    checks: dict[str, Callable[[], Results]] = {}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        checks[f"rank {rank}"] = partial(check_device, device)
        if local_rank == 0:
            num_gpus = int(os.environ["LOCAL_WORLD_SIZE"])
            checks["peer access"] = partial(check_peer_access, num_gpus)
    checks["all-reduce"] = partial(check_all_reduce, rank, local_rank, world_size, device)
    preflight.run_checks(checks)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # destroying the process group would wait for all ranks
