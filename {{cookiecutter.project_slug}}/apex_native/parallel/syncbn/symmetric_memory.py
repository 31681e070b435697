"""Exchange of sums between GPUs that can access each other's memory, inside the kernels.

Each process writes its values into the memory of every process of the group, sets a flag there,
and waits for the flags of the others. That takes some microseconds, where NCCL takes 36 on two
H200s, and no work of the CPU. The kernels that compute the sums end with this exchange; sums that
torch.compile computed have a kernel for the exchange alone.

Layout of the buffer of one process, for W processes and T tiles of 64 channels, in 4-byte words::

    +--------------------+--------------------+----------------+---------+----------+
    | slots, even epochs | slots, odd epochs  | flags          | epochs  | arrivals |
    | [sender][tile]     | [sender][tile]     | [sender][tile] | [tile]  | [tile]   |
    +--------------------+--------------------+----------------+---------+----------+
      W·T·256, fp32        W·T·256, fp32        W·T, int32       T, int32  T, int32

    +---------+---------+---------+---------+
    | value 0 | value 1 | value 2 | tag     |   one slot; [channel]: 64 words each
    +---------+---------+---------+---------+

flags: the last epoch that the sender has written; epochs: the last one that this process finished;
arrivals: how many programs have stored their part of the sums.

An epoch is one exchange of a tile; its number increases by one each time. Two sets of slots are
enough: a sender starts epoch t after it has read all flags of epoch t − 1, which their owners set
after they had read the slots of epoch t − 2. The tag is the number of channels, negated in the
backward pass, so that processes at different layers obtain nan and not each other's sums.
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory  # documented by this name

from .kernels import (
    CHANNELS,
    ROWS,
    TritonKernels,
    ceil_div,
    gradient_sums,
    power_sums,
    reduction_grid,
)
from .reference import Collectives, Running

SLOT_VALUES = tl.constexpr(4)  # for each channel: three values and the tag


@triton.jit
def _sum_parts(sums, parts, channel, channels, CHANNELS: tl.constexpr, PARTS: tl.constexpr):
    """Return the two sums of each channel over all parts."""
    first = tl.zeros((PARTS, CHANNELS), tl.float32)
    second = tl.zeros((PARTS, CHANNELS), tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        pointers = sums + part[:, None] * (2 * channels) + channel[None, :]
        mask = (part < parts)[:, None] & (channel < channels)[None, :]
        first += tl.load(pointers, mask, 0)
        second += tl.load(pointers + channels, mask, 0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def _all_gather(first, second, third, tag, tile, buffer, CHANNELS: tl.constexpr):
    """Send three values of each channel to all processes, and wait for those of all processes.

    Returns a pointer to the slot of sender 0, the distance to the next sender's, and the number of
    processes. `buffer` points to a SymmetricBuffer's descriptor.
    """
    rank, world = tl.load(buffer).to(tl.int32), tl.load(buffer + 1).to(tl.int32)
    tiles, memories = tl.load(buffer + 2).to(tl.int32), buffer + 3
    lane = tl.arange(0, CHANNELS)
    size = SLOT_VALUES * CHANNELS
    flags = 2 * world * tiles * size + tile
    own = tl.load(memories + rank).to(tl.pointer_type(tl.int32))
    finished = own + flags + world * tiles
    epoch = tl.load(finished) + 1  # may exceed 2³¹: only its last bit and differences count
    slots = (epoch & 1) * (world * tiles * size) + tile * size
    for receiver in range(world):
        memory = tl.load(memories + receiver).to(tl.pointer_type(tl.float32))
        slot = memory + slots + rank * tiles * size + lane
        tl.store(slot, first)
        tl.store(slot + CHANNELS, second)
        tl.store(slot + 2 * CHANNELS, tl.zeros((CHANNELS,), tl.float32) + third)
        tl.store(slot + 3 * CHANNELS, tl.zeros((CHANNELS,), tl.float32) + tag)
    tl.debug_barrier()  # one thread sets the flag for all
    for receiver in range(world):
        memory = tl.load(memories + receiver).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(memory + flags + rank * tiles, epoch, sem="release", scope="sys")
    for sender in range(world):
        flag = own + flags + sender * tiles
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") - epoch < 0:  # an ordered load
            pass
    tl.debug_barrier()
    tl.store(finished, epoch)
    slot = tl.load(memories + rank).to(tl.pointer_type(tl.float32)) + slots + lane
    return slot, tiles * size, world


@triton.jit
def _slot_value(slot, index: tl.constexpr, tag, CHANNELS: tl.constexpr):
    """Return a value of each channel; nan if the sender is at another layer."""
    is_same_layer = tl.load(slot + 3 * CHANNELS) == tag
    return tl.where(is_same_layer, tl.load(slot + index * CHANNELS), float("nan"))


@triton.jit
def _is_last_program(tile, programs, buffer, CHANNELS: tl.constexpr):
    """Return whether the other programs of this tile have stored their parts, readable then."""
    rank, world = tl.load(buffer).to(tl.int32), tl.load(buffer + 1).to(tl.int32)
    tiles = tl.load(buffer + 2).to(tl.int32)
    own = tl.load(buffer + 3 + rank).to(tl.pointer_type(tl.int32))
    arrivals = own + 2 * world * tiles * SLOT_VALUES * CHANNELS + (world + 1) * tiles + tile
    tl.debug_barrier()  # one thread counts for all
    last = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(arrivals, 0)
    return last


@triton.jit
def _lerp(pointer, new, rate, mask):
    """Interpolate as torch.lerp does, which is exact at rates of 0 and of 1."""
    old = tl.load(pointer, mask, 0)
    difference = new - old
    result = tl.where(rate < 0.5, old + difference * rate, new - difference * (1 - rate))
    tl.store(pointer, result, mask)


@triton.jit
def _finish_statistics(  # noqa: PLR0913, a kernel takes pointers and sizes one by one
    sums, shift, statistics, buffer, count, eps, running_mean, running_var, momentum,
    parts, channels, tile, CUMULATIVE: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Compute the group's statistics from Σ(x − shift) and Σ(x − shift)² of `count` values."""
    channel = tile * CHANNELS + tl.arange(0, CHANNELS)
    mask = channel < channels
    first, second = _sum_parts(sums, parts, channel, channels, CHANNELS, PARTS)
    number = tl.zeros((CHANNELS,), tl.float32) + count
    offset = first / tl.maximum(number, 1)
    mean = tl.load(shift + channel, mask, 0) + offset
    squares = tl.maximum(second - first * offset, 0)
    slot, step, world = _all_gather(mean, squares, number, channels, tile, buffer, CHANNELS)
    total = tl.zeros((CHANNELS,), tl.float32)
    mean = tl.zeros((CHANNELS,), tl.float32)
    squares = tl.zeros((CHANNELS,), tl.float32)
    for _ in range(world):  # Chan's update
        number = _slot_value(slot, 2, channels, CHANNELS)
        difference = _slot_value(slot, 0, channels, CHANNELS) - mean
        fraction = number / tl.maximum(total + number, 1)
        mean += difference * fraction
        other = _slot_value(slot, 1, channels, CHANNELS)
        squares += other + difference * difference * (total * fraction)
        total += number
        slot += step
    total = tl.maximum(total, 1)  # as in the reference implementation
    var = squares / tl.maximum(total - 1, 1)
    tl.store(statistics + channel, mean, mask)
    deviation = tl.sqrt_rn((squares / total + eps).to(tl.float32))  # torch.compile has eps in fp64
    tl.store(statistics + channels + channel, 1 / deviation, mask)
    tl.store(statistics + 2 * channels + channel, total, mask)
    tl.store(statistics + 3 * channels + channel, var, mask)
    if running_mean is not None:
        rate = tl.load(momentum).to(tl.float32) if CUMULATIVE else momentum
        _lerp(running_mean + channel, mean, rate, mask)
        _lerp(running_var + channel, var, rate, mask)


@triton.jit
def _finish_means(  # noqa: PLR0913, a kernel takes pointers and sizes one by one
    sums, statistics, local, means, buffer, parts, channels, tile,
    CHANNELS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Compute the local sums of each channel, and the group's sums over its number of values."""
    channel = tile * CHANNELS + tl.arange(0, CHANNELS)
    mask = channel < channels
    first, second = _sum_parts(sums, parts, channel, channels, CHANNELS, PARTS)
    tl.store(local + channel, first, mask)
    tl.store(local + channels + channel, second, mask)
    tag = -channels
    slot, step, world = _all_gather(first, second, 0.0, tag, tile, buffer, CHANNELS)
    first = tl.zeros((CHANNELS,), tl.float32)
    second = tl.zeros((CHANNELS,), tl.float32)
    for _ in range(world):
        first += _slot_value(slot, 0, tag, CHANNELS)
        second += _slot_value(slot, 1, tag, CHANNELS)
        slot += step
    total = tl.load(statistics + 2 * channels + channel, mask, 1)
    tl.store(means + channel, first / total, mask)
    tl.store(means + channels + channel, second / total, mask)


@triton.jit
def _exchange_statistics(  # noqa: PLR0913, a kernel takes pointers and sizes one by one
    sums, shift, statistics, buffer, count, eps, channels, CHANNELS: tl.constexpr
):
    """Run `_finish_statistics` on sums from torch.compile; one program for each tile."""
    tile = tl.program_id(0)
    _finish_statistics(
        sums, shift, statistics, buffer, count, eps, None, None, None,
        1, channels, tile, False, CHANNELS, 1,
    )  # fmt: skip


@triton.jit
def _exchange_means(sums, statistics, local, means, buffer, channels, CHANNELS: tl.constexpr):
    """Run `_finish_means` on sums from torch.compile; one program for each tile."""
    tile = tl.program_id(0)
    _finish_means(sums, statistics, local, means, buffer, 1, channels, tile, CHANNELS, 1)


@triton.jit
def _fused_statistics(  # noqa: PLR0913, a kernel takes pointers and sizes one by one
    x, sums, statistics, buffer, eps, running_mean, running_var, momentum,
    rows, channels, part_rows, CUMULATIVE: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Sum x, a part in each program; the last program of a tile does the exchange."""
    parts, tile = tl.num_programs(0), tl.program_id(1)
    shift = sums + 2 * parts * channels
    power_sums(x, shift, sums, rows, channels, part_rows, ROWS, CHANNELS)
    if _is_last_program(tile, parts, buffer, CHANNELS):
        _finish_statistics(
            sums, shift, statistics, buffer, rows, eps, running_mean, running_var, momentum,
            parts, channels, tile, CUMULATIVE, CHANNELS, ROWS,
        )  # fmt: skip


@triton.jit
def _fused_means(  # noqa: PLR0913, a kernel takes pointers and sizes one by one
    grad, x, sums, statistics, local, means, buffer, rows, channels, part_rows,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Sum gradients, a part in each program; the last program of a tile does the exchange."""
    parts, tile = tl.num_programs(0), tl.program_id(1)
    gradient_sums(grad, x, statistics, sums, rows, channels, part_rows, ROWS, CHANNELS)
    if _is_last_program(tile, parts, buffer, CHANNELS):
        _finish_means(sums, statistics, local, means, buffer, parts, channels, tile, CHANNELS, ROWS)


class SymmetricBuffer:
    """Buffer in the memory of each process of `group`, for layers of up to `channels` channels.

    All processes must create it together, and then use it in the same order, on one stream.
    `descriptor` holds what the kernels need: this process's rank, the number of processes, the
    number of tiles, and the address of each process's buffer.
    """

    def __init__(self, group: dist.ProcessGroup, channels: int, device: torch.device) -> None:
        tiles = ceil_div(channels, CHANNELS)
        size = tiles * (group.size() * (2 * SLOT_VALUES.value * CHANNELS + 1) + 2)
        self.memory = symmetric_memory.empty(size, dtype=torch.float32, device=device)
        self.memory.zero_().sum().item()  # finished before another process writes here
        self.handle = symmetric_memory.rendezvous(self.memory, group.group_name)
        starts = self.handle.buffer_ptrs
        offset = self.memory.data_ptr() - starts[group.rank()]
        addresses = [start + offset for start in starts]
        descriptor = [group.rank(), group.size(), tiles, *addresses]
        self.descriptor = torch.tensor(descriptor, dtype=torch.int64, device=device)


class SymmetricExchange(Collectives):
    """Exchange through a SymmetricBuffer, given by its descriptor, of sums (1, 2, C)."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer

    def batch_statistics(self, sums: Tensor, shift: Tensor, count: int, eps: float) -> Tensor:
        channels = len(shift)
        statistics = sums.new_empty(4, channels)
        grid = (ceil_div(channels, CHANNELS),)
        _exchange_statistics[grid](
            sums, shift, statistics, self.buffer, count, eps, channels, CHANNELS
        )
        return statistics

    def gradient_means(self, sums: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor]:
        channels = sums.shape[-1]
        local, means = sums.new_empty(2, channels), sums.new_empty(2, channels)
        grid = (ceil_div(channels, CHANNELS),)
        _exchange_means[grid](sums, statistics, local, means, self.buffer, channels, CHANNELS)
        return local, means


class FusedKernels(TritonKernels):
    """Implementation whose kernels compute the sums and exchange them, in one launch each."""

    def __init__(self, buffer: Tensor) -> None:
        super().__init__(SymmetricExchange(buffer))
        self.buffer = buffer

    def batch_statistics(
        self, x: Tensor, eps: float, running: Running, momentum: float | Tensor
    ) -> Tensor:
        rows, channels, part_rows, grid = reduction_grid(x)
        sums = torch.empty(2 * grid[0] + 1, channels, dtype=torch.float32, device=x.device)
        statistics = torch.empty(4, channels, dtype=torch.float32, device=x.device)
        _fused_statistics[grid](
            x, sums, statistics, self.buffer, eps, *(running or (None, None)), momentum,
            rows, channels, part_rows, isinstance(momentum, Tensor), ROWS, CHANNELS,
        )  # fmt: skip
        if running:
            torch.autograd.graph.increment_version(running)  # as torch's operations do
        return statistics

    def gradient_means(self, grad: Tensor, x: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor]:
        rows, channels, part_rows, grid = reduction_grid(x)
        sums = torch.empty(2 * grid[0], channels, dtype=torch.float32, device=x.device)
        local, means = torch.empty(2, 2, channels, dtype=torch.float32, device=x.device)
        outputs = statistics, local, means
        sizes = rows, channels, part_rows, ROWS, CHANNELS
        _fused_means[grid](grad, x, sums, *outputs, self.buffer, *sizes)
        return local, means
