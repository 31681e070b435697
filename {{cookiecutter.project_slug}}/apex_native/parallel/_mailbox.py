"""Sums of each channel, exchanged between GPUs that reach each other's memory, within a kernel.

Each process writes what it has to say into the memory of every other one, raises a flag there, and
waits for the flags of the others: some microseconds, where NCCL takes 36 on two H200s, and nothing
for the CPU to do. The kernels that make the sums end in it; compiled sums have one for it alone.
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from ._rows import CHANNELS, ROWS, _sum_gradients, _sum_powers, ceil_div, split

VALUES = tl.constexpr(4)  # of each channel, in a letter; each tile of CHANNELS has its own letters


@triton.jit
def _add_up(sums, parts, channel, channels, CHANNELS: tl.constexpr, PARTS: tl.constexpr):
    """The two sums of each channel, over all parts."""
    first = tl.zeros((PARTS, CHANNELS), tl.float32)
    second = tl.zeros((PARTS, CHANNELS), tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        at = sums + part[:, None] * (2 * channels) + channel[None, :]
        there = (part < parts)[:, None] & (channel < channels)[None, :]
        first += tl.load(at, there, 0)
        second += tl.load(at + channels, there, 0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def _swap(first, second, third, subject, tile, mailbox, CHANNELS: tl.constexpr):
    """Sends three values of each channel to every process; where those of process 0 have come to.

    Returns that, how far it is to those of the next process, and the number of processes. The
    memory of each process has a letter of every sender and tile, twice, and then their flags, which
    hold the number of the turn, the turns it has taken itself, and how many of its programs came
    to `_is_last`. Two letters are enough: a sender begins turn t when it has seen the flags of
    t − 1, which their owners raise after they have read the letters of t − 2.
    """
    rank, world = tl.load(mailbox).to(tl.int32), tl.load(mailbox + 1).to(tl.int32)
    tiles, memories = tl.load(mailbox + 2).to(tl.int32), mailbox + 3
    lane = tl.arange(0, CHANNELS)
    size = VALUES * CHANNELS
    flags = 2 * world * tiles * size + tile
    own = tl.load(memories + rank).to(tl.pointer_type(tl.int32))
    taken = own + flags + world * tiles
    turn = tl.load(taken) + 1  # may pass 2³¹: only its last bit and differences count
    letters = (turn & 1) * (world * tiles * size) + tile * size
    for receiver in range(world):
        memory = tl.load(memories + receiver).to(tl.pointer_type(tl.float32))
        letter = memory + letters + rank * tiles * size + lane
        tl.store(letter, first)
        tl.store(letter + CHANNELS, second)
        tl.store(letter + 2 * CHANNELS, tl.zeros((CHANNELS,), tl.float32) + third)
        tl.store(letter + 3 * CHANNELS, tl.zeros((CHANNELS,), tl.float32) + subject)
    tl.debug_barrier()  # one thread raises the flag, for all
    for receiver in range(world):
        memory = tl.load(memories + receiver).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(memory + flags + rank * tiles, turn, sem="release", scope="sys")
    for sender in range(world):
        flag = own + flags + sender * tiles
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") - turn < 0:  # a load, in order
            pass
    tl.debug_barrier()
    tl.store(taken, turn)
    letter = tl.load(memories + rank).to(tl.pointer_type(tl.float32)) + letters + lane
    return letter, tiles * size, world


@triton.jit
def _read(letter, which: tl.constexpr, subject, CHANNELS: tl.constexpr):
    """A value of each channel; nan if the sender is at another norm, as NCCL would object to."""
    is_meant = tl.load(letter + 3 * CHANNELS) == subject
    return tl.where(is_meant, tl.load(letter + which * CHANNELS), float("nan"))


@triton.jit
def _is_last(column, programs, mailbox, CHANNELS: tl.constexpr):
    """Whether all other programs of this column have stored their sums, which can be read then."""
    rank, world = tl.load(mailbox).to(tl.int32), tl.load(mailbox + 1).to(tl.int32)
    tiles = tl.load(mailbox + 2).to(tl.int32)
    own = tl.load(mailbox + 3 + rank).to(tl.pointer_type(tl.int32))
    came = own + 2 * world * tiles * VALUES * CHANNELS + (world + 1) * tiles + column
    tl.debug_barrier()  # one thread counts, for all
    last = tl.atomic_add(came, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(came, 0)
    return last


@triton.jit
def _lerp(kept, new, rate, there):
    """As torch's, which is exact at rates of 0 and of 1."""
    before = tl.load(kept, there, 0)
    way = new - before
    after = tl.where(rate < 0.5, before + way * rate, new - way * (1 - rate))
    tl.store(kept, after, there)


@triton.jit
def _share_moments(
    sums,
    shift,
    statistics,
    mailbox,
    count,
    eps,
    running_mean,
    running_var,
    momentum,
    parts,
    channels,
    tile,
    TRACKED: tl.constexpr,
    CUMULATIVE: tl.constexpr,
    CHANNELS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """From Σ(x − shift) and Σ(x − shift)² of `count` values here to the statistics of all."""
    channel = tile * CHANNELS + tl.arange(0, CHANNELS)
    there = channel < channels
    first, second = _add_up(sums, parts, channel, channels, CHANNELS, PARTS)
    number = tl.zeros((CHANNELS,), tl.float32) + count
    away = first / tl.maximum(number, 1)
    mean = tl.load(shift + channel, there, 0) + away
    squares = tl.maximum(second - first * away, 0)
    letter, step, world = _swap(mean, squares, number, channels, tile, mailbox, CHANNELS)
    total = tl.zeros((CHANNELS,), tl.float32)
    mean = tl.zeros((CHANNELS,), tl.float32)
    squares = tl.zeros((CHANNELS,), tl.float32)
    for _ in range(world):  # Chan's update
        number = _read(letter, 2, channels, CHANNELS)
        difference = _read(letter, 0, channels, CHANNELS) - mean
        share = number / tl.maximum(total + number, 1)
        mean += difference * share
        squares += _read(letter, 1, channels, CHANNELS) + difference * difference * (total * share)
        total += number
        letter += step
    total = tl.maximum(total, 1)  # as in _exchange
    var = squares / tl.maximum(total - 1, 1)
    tl.store(statistics + channel, mean, there)
    deviation = tl.sqrt_rn((squares / total + eps).to(tl.float32))  # torch.compile has eps in fp64
    tl.store(statistics + channels + channel, 1 / deviation, there)
    tl.store(statistics + 2 * channels + channel, total, there)
    tl.store(statistics + 3 * channels + channel, var, there)
    if TRACKED:
        rate = tl.load(momentum).to(tl.float32) if CUMULATIVE else momentum
        _lerp(running_mean + channel, mean, rate, there)
        _lerp(running_var + channel, var, rate, there)


@triton.jit
def _share_means(
    sums,
    statistics,
    local,
    means,
    mailbox,
    parts,
    channels,
    tile,
    CHANNELS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The two sums of each channel here, and those of all processes by the number of values."""
    channel = tile * CHANNELS + tl.arange(0, CHANNELS)
    there = channel < channels
    first, second = _add_up(sums, parts, channel, channels, CHANNELS, PARTS)
    tl.store(local + channel, first, there)
    tl.store(local + channels + channel, second, there)
    subject = -channels
    letter, step, world = _swap(first, second, 0.0, subject, tile, mailbox, CHANNELS)
    first = tl.zeros((CHANNELS,), tl.float32)
    second = tl.zeros((CHANNELS,), tl.float32)
    for _ in range(world):
        first += _read(letter, 0, subject, CHANNELS)
        second += _read(letter, 1, subject, CHANNELS)
        letter += step
    total = tl.load(statistics + 2 * channels + channel, there, 1)
    tl.store(means + channel, first / total, there)
    tl.store(means + channels + channel, second / total, there)


@triton.jit
def _moments_of_sums(
    sums, shift, statistics, mailbox, count, eps, channels, CHANNELS: tl.constexpr
):
    """`_share_moments`, of sums that a compiler has made, by a program for each tile."""
    tile = tl.program_id(0)
    _share_moments(
        sums, shift, statistics, mailbox, count, eps, None, None, None,
        1, channels, tile, False, False, CHANNELS, 1,
    )  # fmt: skip


@triton.jit
def _means_of_sums(sums, statistics, local, means, mailbox, channels, CHANNELS: tl.constexpr):
    """`_share_means`, of sums that a compiler has made, by a program for each tile."""
    tile = tl.program_id(0)
    _share_means(sums, statistics, local, means, mailbox, 1, channels, tile, CHANNELS, 1)


@triton.jit
def _moments(
    x,
    sums,
    statistics,
    mailbox,
    eps,
    running_mean,
    running_var,
    momentum,
    rows,
    channels,
    share,
    TRACKED: tl.constexpr,
    CUMULATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The sums of x, of which each program makes a part, and the last one of a tile the rest."""
    parts, tile = tl.num_programs(0), tl.program_id(1)
    shift = sums + 2 * parts * channels
    _sum_powers(x, shift, sums, rows, channels, share, ROWS, CHANNELS)
    if _is_last(tile, parts, mailbox, CHANNELS):
        _share_moments(
            sums, shift, statistics, mailbox, rows, eps, running_mean, running_var, momentum,
            parts, channels, tile, TRACKED, CUMULATIVE, CHANNELS, ROWS,
        )  # fmt: skip


@triton.jit
def _means(
    grad,
    x,
    sums,
    statistics,
    local,
    means,
    mailbox,
    rows,
    channels,
    share,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The sums of gradients, of which each program makes a part, and the last one the rest."""
    parts, tile = tl.num_programs(0), tl.program_id(1)
    _sum_gradients(grad, x, statistics, sums, rows, channels, share, ROWS, CHANNELS)
    if _is_last(tile, parts, mailbox, CHANNELS):
        _share_means(sums, statistics, local, means, mailbox, parts, channels, tile, CHANNELS, ROWS)


class Mailbox:
    """The memory in which the processes of `group` leave each other sums of up to `channels`.

    All of them must make it at once, and then use it in the same order, on one stream. `address` is
    what kernels need to know of it: rank, number of processes and of tiles, and the memories.
    """

    def __init__(self, group: dist.ProcessGroup, channels: int, device: torch.device) -> None:
        tiles = ceil_div(channels, CHANNELS)
        size = tiles * (group.size() * (2 * VALUES.value * CHANNELS + 1) + 2)
        self.memory = symmetric_memory.empty(size, dtype=torch.float32, device=device)
        self.memory.zero_().sum().item()  # before anyone else writes here
        self.handle = symmetric_memory.rendezvous(self.memory, group.group_name)
        starts = self.handle.buffer_ptrs
        inside = self.memory.data_ptr() - starts[group.rank()]
        memories = [start + inside for start in starts]
        address = [group.rank(), group.size(), tiles, *memories]
        self.address = torch.tensor(address, dtype=torch.int64, device=device)


def moments(
    x: Tensor,
    eps: float,
    running: tuple[Tensor, Tensor] | None,
    momentum: float | Tensor,
    mailbox: Tensor,
) -> Tensor:
    """As `_exchange.moments`, of x in rows, at that address."""
    rows, channels, share, grid = split(x)
    sums = torch.empty(2 * grid[0] + 1, channels, dtype=torch.float32, device=x.device)
    statistics = torch.empty(4, channels, dtype=torch.float32, device=x.device)
    _moments[grid](
        x, sums, statistics, mailbox, eps, *(running or (None, None)), momentum,
        rows, channels, share, running is not None, isinstance(momentum, Tensor), ROWS, CHANNELS,
    )  # fmt: skip
    if running:
        torch.autograd.graph.increment_version(running)  # as torch's operations do
    return statistics


def means(grad: Tensor, x: Tensor, statistics: Tensor, mailbox: Tensor) -> tuple[Tensor, Tensor]:
    """As `_exchange.means`, of grad and x in rows, at that address."""
    rows, channels, share, grid = split(x)
    sums = torch.empty(2 * grid[0], channels, dtype=torch.float32, device=x.device)
    local, means = torch.empty(2, 2, channels, dtype=torch.float32, device=x.device)
    outputs = statistics, local, means
    _means[grid](grad, x, sums, *outputs, mailbox, rows, channels, share, ROWS, CHANNELS)
    return local, means


def moments_of_sums(sums: Tensor, shift: Tensor, count: int, eps: float, mailbox: Tensor) -> Tensor:
    """The statistics, from sums (1, 2, C) that a compiler has made."""
    channels = len(shift)
    statistics = sums.new_empty(4, channels)
    grid = (ceil_div(channels, CHANNELS),)
    _moments_of_sums[grid](sums, shift, statistics, mailbox, count, eps, channels, CHANNELS)
    return statistics


def means_of_sums(sums: Tensor, statistics: Tensor, mailbox: Tensor) -> tuple[Tensor, Tensor]:
    """The sums and their means over all, from sums (1, 2, C) that a compiler has made."""
    channels = sums.shape[-1]
    local, means = sums.new_empty(2, channels), sums.new_empty(2, channels)
    grid = (ceil_div(channels, CHANNELS),)
    _means_of_sums[grid](sums, statistics, local, means, mailbox, channels, CHANNELS)
    return local, means
