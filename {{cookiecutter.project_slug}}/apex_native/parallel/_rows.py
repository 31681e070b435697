"""The arithmetic of synced batch norm in Triton, for input that lies in rows of channels.

That is channels_last, or (N, C). Each kernel reads what it needs once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, CHANNELS = 64, 64  # of a tile; 64 half values are a line of the cache
ROWS_PER_PROGRAM = 8 * ROWS
PROGRAMS = 1024  # that share a reduction
FORMATS = {2: torch.contiguous_format, 4: torch.channels_last, 5: torch.channels_last_3d}


@triton.jit
def _tile(first_row, first_channel, rows, channels, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Where a tile's values lie, and which of them there are."""
    row = first_row + tl.arange(0, ROWS).to(tl.int64)
    channel = first_channel + tl.arange(0, CHANNELS)
    offsets = row[:, None] * channels + channel[None, :]
    return offsets, (row < rows)[:, None] & (channel < channels)[None, :]


@triton.jit
def _sum_powers(x, shift, sums, rows, channels, share, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Σ(x − shift) and Σ(x − shift)² of each channel over `share` rows, and the shift."""
    part, first_channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHANNELS
    channel = first_channel + tl.arange(0, CHANNELS)
    there = channel < channels
    first = tl.load(x + channel, channel < channels * min(rows, 1), 0).to(tl.float32)[None, :]
    at, inside = _tile(0, first_channel, rows, channels, ROWS, CHANNELS)
    some = tl.where(inside, tl.load(x + at, inside, 0).to(tl.float32) - first, 0)
    middle = first + (tl.sum(some, 0) / max(1, min(rows, ROWS)))[None, :]
    if part == 0:
        tl.store(shift + channel[None, :], middle, there[None, :])
    first = tl.zeros((ROWS, CHANNELS), tl.float32)
    second = tl.zeros((ROWS, CHANNELS), tl.float32)
    end = min(part * share + share, rows)
    for row in range(part * share, end, ROWS):
        at, inside = _tile(row, first_channel, end, channels, ROWS, CHANNELS)
        value = tl.where(inside, tl.load(x + at, inside, 0).to(tl.float32) - middle, 0)
        first += value
        second += value * value
    tl.store(sums + part * 2 * channels + channel, tl.sum(first, 0), there)
    tl.store(sums + (part * 2 + 1) * channels + channel, tl.sum(second, 0), there)


@triton.jit
def _normalise(
    x,
    output,
    statistics,
    weight,
    bias,
    rows,
    channels,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
):
    """(x − mean) · invstd · weight + bias, in this order: what is the mean must come out as bias"""
    first_channel = tl.program_id(1) * CHANNELS
    channel = first_channel + tl.arange(0, CHANNELS)
    there = channel < channels
    mean = tl.load(statistics + channel, there, 0)[None, :]
    scale = tl.load(statistics + channels + channel, there, 0)
    offset = tl.zeros((CHANNELS,), tl.float32)
    if HAS_WEIGHT:
        scale *= tl.load(weight + channel, there, 0).to(tl.float32)
    if HAS_BIAS:
        offset += tl.load(bias + channel, there, 0).to(tl.float32)
    first_row = tl.program_id(0).to(tl.int64) * ROWS_PER_PROGRAM
    for row in range(first_row, min(first_row + ROWS_PER_PROGRAM, rows), ROWS):
        at, inside = _tile(row, first_channel, rows, channels, ROWS, CHANNELS)
        value = tl.load(x + at, inside, 0).to(tl.float32)
        tl.store(output + at, (value - mean) * scale[None, :] + offset[None, :], inside)


@triton.jit
def _sum_gradients(
    grad, x, statistics, sums, rows, channels, share, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):
    """Σ grad and Σ grad · (x − mean) · invstd of each channel over `share` rows."""
    part, first_channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHANNELS
    channel = first_channel + tl.arange(0, CHANNELS)
    mean = tl.load(statistics + channel, channel < channels, 0)[None, :]
    invstd = tl.load(statistics + channels + channel, channel < channels, 0)
    first = tl.zeros((ROWS, CHANNELS), tl.float32)
    second = tl.zeros((ROWS, CHANNELS), tl.float32)
    end = min(part * share + share, rows)
    for row in range(part * share, end, ROWS):
        at, there = _tile(row, first_channel, end, channels, ROWS, CHANNELS)
        gradient = tl.load(grad + at, there, 0).to(tl.float32)
        first += gradient
        second += gradient * (tl.load(x + at, there, 0).to(tl.float32) - mean)
    products = tl.sum(second, 0) * invstd
    tl.store(sums + part * 2 * channels + channel, tl.sum(first, 0), channel < channels)
    tl.store(sums + (part * 2 + 1) * channels + channel, products, channel < channels)


@triton.jit
def _differentiate(
    grad,
    x,
    grad_input,
    statistics,
    means,
    weight,
    rows,
    channels,
    HAS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
):
    """(grad − mean of grad − x̂ · mean of grad · x̂) · invstd · weight, where x̂ is normalised x"""
    first_channel = tl.program_id(1) * CHANNELS
    channel = first_channel + tl.arange(0, CHANNELS)
    there = channel < channels
    mean = tl.load(statistics + channel, there, 0)[None, :]
    scale = tl.load(statistics + channels + channel, there, 0)
    mean_grad = tl.load(means + channel, there, 0)[None, :]
    slope = (scale * tl.load(means + channels + channel, there, 0))[None, :]
    if HAS_WEIGHT:
        scale *= tl.load(weight + channel, there, 0).to(tl.float32)
    first_row = tl.program_id(0).to(tl.int64) * ROWS_PER_PROGRAM
    for row in range(first_row, min(first_row + ROWS_PER_PROGRAM, rows), ROWS):
        at, inside = _tile(row, first_channel, rows, channels, ROWS, CHANNELS)
        gradient = tl.load(grad + at, inside, 0).to(tl.float32)
        centred = tl.load(x + at, inside, 0).to(tl.float32) - mean
        result = (gradient - mean_grad - centred * slope) * scale[None, :]
        tl.store(grad_input + at, result, inside)


def sum_powers(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `_formula.sum_powers`, the sums in parts."""
    shift = torch.empty(x.shape[1], dtype=torch.float32, device=x.device)
    return _reduce(_sum_powers, x, shift), shift


def normalise(x: Tensor, statistics: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """As `_formula.normalise`."""
    has = {"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None}
    return _map(_normalise, (x,), (statistics, weight, bias), has)


def sum_gradients(grad: Tensor, x: Tensor, statistics: Tensor) -> Tensor:
    """As `_formula.sum_gradients`, the sums in parts."""
    return _reduce(_sum_gradients, grad, x, statistics)


def differentiate(
    grad: Tensor, x: Tensor, statistics: Tensor, means: Tensor, weight: Tensor | None
) -> Tensor:
    """As `_formula.differentiate`."""
    has = {"HAS_WEIGHT": weight is not None}
    return _map(_differentiate, (grad, x), (statistics, means, weight), has)


def in_rows(x: Tensor) -> Tensor:
    """`x` (N, C, …), with the channels of each place side by side in memory."""
    return x if lies_in_rows(x) else x.movedim(1, -1).contiguous().movedim(-1, 1)


def lies_in_rows(x: Tensor) -> bool:
    """Whether `in_rows` has nothing to do, at a tenth of the time of movedim."""
    if x.dim() in FORMATS:
        return x.is_contiguous(memory_format=FORMATS[x.dim()])
    return x.movedim(1, -1).is_contiguous()


def split(x: Tensor) -> tuple[int, int, int, tuple[int, int]]:
    """How programs share the sums of `x`: rows and channels, rows of each program, and the grid."""
    channels, rows = x.shape[1], x.numel() // x.shape[1]
    across = ceil_div(channels, CHANNELS)
    share = ceil_div(ceil_div(rows, max(1, PROGRAMS // across)), ROWS) * ROWS
    return rows, channels, share, (ceil_div(rows, share) if rows else 1, across)


def _reduce(kernel: object, x: Tensor, *others: Tensor) -> Tensor:
    """(parts, 2, C): the two sums that `kernel` makes, of which each program makes a part."""
    rows, channels, share, grid = split(x)
    sums = torch.empty(grid[0], 2, channels, dtype=torch.float32, device=x.device)
    kernel[grid](x, *others, sums, rows, channels, share, ROWS=ROWS, CHANNELS=CHANNELS)
    return sums


def _map(kernel: object, inputs: tuple, values: tuple, has: dict[str, bool]) -> Tensor:
    """What `kernel` makes of each value of `inputs`, whose channels have `values`."""
    x = inputs[-1]
    channels, rows = x.shape[1], x.numel() // x.shape[1]
    output = torch.empty_like(x)
    if rows:
        grid = ceil_div(rows, ROWS_PER_PROGRAM), ceil_div(channels, CHANNELS)
        sizes = {"ROWS": ROWS, "CHANNELS": CHANNELS, "ROWS_PER_PROGRAM": ROWS_PER_PROGRAM}
        kernel[grid](*inputs, output, *values, rows, channels, **has, **sizes)
    return output


def ceil_div(numerator: int, denominator: int) -> int:
    """⌈numerator / denominator⌉. triton.cdiv takes 8 µs for it, seven times for each norm."""
    return -(-numerator // denominator)
