"""Sums of each channel, exchanged between GPUs that reach each other's memory, in one kernel.

Each process writes what it has to say into the memory of every other one, raises a flag there, and
waits for the flags of the others: some microseconds, where NCCL takes 36 on two H200s, and nothing
for the CPU to do but to start it.
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from ._rows import ceil_div

CHANNELS = 16  # of a program, which has letters of its own
VALUES = tl.constexpr(4)  # a letter's, for each channel
PARTS = 256  # that are added at once


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
def _swap(first, second, third, subject, mailbox, CHANNELS: tl.constexpr):
    """Sends three values of each channel to every process; where those of process 0 have come to.

    Returns that, how far it is to those of the next process, and the number of processes. The
    memory of each process has a letter of every sender and tile, twice, and then their flags, which
    hold the number of the turn, and the turns it has taken itself. Two letters are enough: a sender
    begins turn t when it has seen the flags of t − 1, which their owners raise after they have read
    the letters of t − 2.
    """
    rank, world = tl.load(mailbox).to(tl.int32), tl.load(mailbox + 1).to(tl.int32)
    tiles, memories = tl.load(mailbox + 2).to(tl.int32), mailbox + 3
    tile = tl.program_id(0)
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
def _moments(
    sums,
    shift,
    statistics,
    mailbox,
    count,
    eps,
    parts,
    channels,
    CHANNELS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """From Σ(x − shift) and Σ(x − shift)² of `count` values here to the statistics of all."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    there = channel < channels
    first, second = _add_up(sums, parts, channel, channels, CHANNELS, PARTS)
    number = tl.zeros((CHANNELS,), tl.float32) + count
    away = first / tl.maximum(number, 1)
    mean = tl.load(shift + channel, there, 0) + away
    squares = tl.maximum(second - first * away, 0)
    letter, step, world = _swap(mean, squares, number, channels, mailbox, CHANNELS)
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
    tl.store(statistics + channel, mean, there)
    deviation = tl.sqrt_rn((squares / total + eps).to(tl.float32))  # torch.compile has eps in fp64
    tl.store(statistics + channels + channel, 1 / deviation, there)
    tl.store(statistics + 2 * channels + channel, total, there)
    tl.store(statistics + 3 * channels + channel, squares / tl.maximum(total - 1, 1), there)


@triton.jit
def _means(
    sums,
    statistics,
    local,
    means,
    mailbox,
    parts,
    channels,
    CHANNELS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The two sums of each channel here, and those of all processes by the number of values."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    there = channel < channels
    first, second = _add_up(sums, parts, channel, channels, CHANNELS, PARTS)
    tl.store(local + channel, first, there)
    tl.store(local + channels + channel, second, there)
    subject = -channels
    letter, step, world = _swap(first, second, 0.0, subject, mailbox, CHANNELS)
    first = tl.zeros((CHANNELS,), tl.float32)
    second = tl.zeros((CHANNELS,), tl.float32)
    for _ in range(world):
        first += _read(letter, 0, subject, CHANNELS)
        second += _read(letter, 1, subject, CHANNELS)
        letter += step
    total = tl.load(statistics + 2 * channels + channel, there, 1)
    tl.store(means + channel, first / total, there)
    tl.store(means + channels + channel, second / total, there)


class Mailbox:
    """The memory in which the processes of `group` leave each other sums of up to `channels`.

    All of them must make it at once, and then use it in the same order, on one stream. `address` is
    what kernels need to know of it: rank, number of processes and of tiles, and the memories.
    """

    def __init__(self, group: dist.ProcessGroup, channels: int, device: torch.device) -> None:
        tiles = ceil_div(channels, CHANNELS)
        size = tiles * (group.size() * (2 * VALUES.value * CHANNELS + 1) + 1)
        self.memory = symmetric_memory.empty(size, dtype=torch.float32, device=device)
        self.memory.zero_().sum().item()  # before anyone else writes here
        self.handle = symmetric_memory.rendezvous(self.memory, group.group_name)
        starts = self.handle.buffer_ptrs
        inside = self.memory.data_ptr() - starts[group.rank()]
        memories = [start + inside for start in starts]
        address = [group.rank(), group.size(), tiles, *memories]
        self.address = torch.tensor(address, dtype=torch.int64, device=device)


def moments(sums: Tensor, shift: Tensor, count: int, eps: float, mailbox: Tensor) -> Tensor:
    """As `_exchange.moments`, at that address."""
    statistics = sums.new_empty(4, sums.shape[-1])
    _start(_moments, sums, shift, statistics, mailbox, count, eps)
    return statistics


def means(sums: Tensor, statistics: Tensor, mailbox: Tensor) -> tuple[Tensor, Tensor]:
    """As `_exchange.means`, at that address."""
    local, means = sums.new_empty(sums.shape[1:]), sums.new_empty(sums.shape[1:])
    _start(_means, sums, statistics, local, means, mailbox)
    return local, means


def _start(kernel: object, sums: Tensor, *arguments: object) -> None:
    parts, _, channels = sums.shape
    grid = (ceil_div(channels, CHANNELS),)
    added = PARTS if parts > 1 else 1
    kernel[grid](sums, *arguments, parts, channels, CHANNELS=CHANNELS, PARTS=added)
