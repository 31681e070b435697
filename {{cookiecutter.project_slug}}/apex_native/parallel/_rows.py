"""Synced batch norm in Triton, over input that lies in memory as rows of channels.

That is channels_last, or (N, C). Each kernel reads what it needs once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from ._gather import gather

ROWS, CHANNELS = 64, 64  # of a tile; 64 half values are a line of the cache
ROWS_PER_PROGRAM = 8 * ROWS
PROGRAMS = 1024  # that reduce at once; an H200 runs as many


@triton.jit
def _tile(first_row, first_channel, rows, channels, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Where a tile's values lie, and which of them there are."""
    row = first_row + tl.arange(0, ROWS)
    channel = first_channel + tl.arange(0, CHANNELS)
    offsets = row.to(tl.int64)[:, None] * channels + channel[None, :]
    return offsets, (row < rows)[:, None] & (channel < channels)[None, :]


@triton.jit
def _sum_powers(x, sums, rows, channels, share, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Σ(x − x₀) and Σ(x − x₀)² of each channel over `share` rows; x₀, its first, saves digits."""
    part, first_channel = tl.program_id(0), tl.program_id(1) * CHANNELS
    channel = first_channel + tl.arange(0, CHANNELS)
    shift = tl.load(x + channel, channel < channels, 0).to(tl.float32)[None, :]
    first = tl.zeros((ROWS, CHANNELS), tl.float32)
    second = tl.zeros((ROWS, CHANNELS), tl.float32)
    end = min(part * share + share, rows)
    for row in range(part * share, end, ROWS):
        at, there = _tile(row, first_channel, end, channels, ROWS, CHANNELS)
        value = tl.where(there, tl.load(x + at, there, 0).to(tl.float32) - shift, 0)
        first += value
        second += value * value
    tl.store(sums + part * 2 * channels + channel, tl.sum(first, 0), channel < channels)
    tl.store(sums + (part * 2 + 1) * channels + channel, tl.sum(second, 0), channel < channels)


@triton.jit
def _combine(gathered, world, channel, channels):
    """Mean and variance over all processes, and the number of values, from those of each."""
    there = channel < channels
    total = tl.zeros((), tl.float32)
    mean = tl.zeros(channel.shape, tl.float32)
    squares = tl.zeros(channel.shape, tl.float32)
    for rank in range(world):  # Chan's update
        of_rank = gathered + rank * (2 * channels + 1)
        count = tl.load(of_rank + 2 * channels)
        difference = tl.load(of_rank + channel, there, 0) - mean
        share = count / tl.maximum(total + count, 1)  # of none where all batches so far are empty
        mean += difference * share
        squares += tl.load(of_rank + channels + channel, there, 0) * count
        squares += difference * difference * (total * share)
        total += count
    total = tl.maximum(total, 1)
    return mean, squares / total, total


@triton.jit
def _normalise(
    x,
    output,
    gathered,
    weight,
    bias,
    running_mean,
    running_var,
    statistics,
    world,
    rows,
    channels,
    eps,
    momentum,
    AFFINE: tl.constexpr,
    TRACKED: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
):
    """(x − mean) · invstd · weight + bias; keeps mean, invstd and the total in `statistics`."""
    first_channel = tl.program_id(1) * CHANNELS
    channel = first_channel + tl.arange(0, CHANNELS)
    there = channel < channels
    mean, var, total = _combine(gathered, world, channel, channels)
    invstd = 1 / tl.sqrt(var + eps)
    if tl.program_id(0) == 0:
        tl.store(statistics + channel, mean, there)
        tl.store(statistics + channels + channel, invstd, there)
        tl.store(statistics + 2 * channels, total)
        if TRACKED:
            old_mean = tl.load(running_mean + channel, there, 0).to(tl.float32)
            old_var = tl.load(running_var + channel, there, 0).to(tl.float32)
            unbiased = var * (total / tl.maximum(total - 1, 1))
            tl.store(running_mean + channel, old_mean + momentum * (mean - old_mean), there)
            tl.store(running_var + channel, old_var + momentum * (unbiased - old_var), there)
    scale, offset = invstd, -mean * invstd
    if AFFINE:
        factor = tl.load(weight + channel, there, 0).to(tl.float32)
        scale, offset = scale * factor, offset * factor
        offset += tl.load(bias + channel, there, 0).to(tl.float32)
    first_row = tl.program_id(0) * ROWS_PER_PROGRAM
    for row in range(first_row, min(first_row + ROWS_PER_PROGRAM, rows), ROWS):
        at, inside = _tile(row, first_channel, rows, channels, ROWS, CHANNELS)
        value = tl.load(x + at, inside, 0).to(tl.float32)
        tl.store(output + at, value * scale[None, :] + offset[None, :], inside)


@triton.jit
def _sum_gradients(
    grad, x, statistics, sums, rows, channels, share, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):
    """Σ grad and Σ grad · (x − mean) · invstd of each channel over `share` rows."""
    part, first_channel = tl.program_id(0), tl.program_id(1) * CHANNELS
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
    gathered,
    weight,
    world,
    rows,
    channels,
    AFFINE: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
):
    """(grad − mean of grad − x̂ · mean of grad · x̂) · invstd · weight."""
    first_channel = tl.program_id(1) * CHANNELS
    channel = first_channel + tl.arange(0, CHANNELS)
    there = channel < channels
    first = tl.zeros((CHANNELS,), tl.float32)
    second = tl.zeros((CHANNELS,), tl.float32)
    for rank in range(world):
        first += tl.load(gathered + rank * 2 * channels + channel, there, 0)
        second += tl.load(gathered + (rank * 2 + 1) * channels + channel, there, 0)
    mean = tl.load(statistics + channel, there, 0)
    invstd = tl.load(statistics + channels + channel, there, 0)
    total = tl.load(statistics + 2 * channels)
    scale = invstd
    if AFFINE:
        scale *= tl.load(weight + channel, there, 0).to(tl.float32)
    slope = -scale * invstd * second / total
    offset = -scale * first / total - slope * mean
    first_row = tl.program_id(0) * ROWS_PER_PROGRAM
    for row in range(first_row, min(first_row + ROWS_PER_PROGRAM, rows), ROWS):
        at, inside = _tile(row, first_channel, rows, channels, ROWS, CHANNELS)
        gradient = tl.load(grad + at, inside, 0).to(tl.float32)
        value = tl.load(x + at, inside, 0).to(tl.float32)
        result = gradient * scale[None, :] + value * slope[None, :] + offset[None, :]
        tl.store(grad_input + at, result, inside)


def sync_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    eps: float,
    momentum: float | Tensor,
    group: str,
) -> Tensor:
    """`input` (N, C, …) normalised over the group of that name; updates the running buffers.

    What does not lie in rows is put there and taken back, since torch's kernels for it round the
    mean of half input, and turn to nan where a process has an empty batch.
    """
    rows = input.movedim(1, -1)
    lies_in_rows = rows.is_contiguous()
    if not lies_in_rows:
        input = rows.contiguous().movedim(-1, 1)
    buffers = (running_mean, running_var)
    with torch.cuda.device_of(input):  # where Triton starts its kernels
        output = _ByRows.apply(input, weight, bias, *buffers, eps, float(momentum), group)
    return output if lies_in_rows else output.contiguous()


class _ByRows(torch.autograd.Function):
    """`sync_batch_norm` of input that lies in rows."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        eps: float,
        momentum: float,
        group: str,
    ) -> Tensor:
        rows, channels = input.numel() // input.shape[1], input.shape[1]
        here = torch.zeros(2 * channels + 1, dtype=torch.float32, device=input.device)
        if rows:
            first, second = _reduce(_sum_powers, rows, channels, input)
            shift = input.movedim(1, -1).reshape(rows, channels)[0]
            mean = first / rows
            torch.add(mean, shift, out=here[:channels])
            torch.addcmul(second / rows, mean, mean, value=-1, out=here[channels:-1])
            here[-1] = rows
        gathered = gather(here, group)
        statistics = torch.empty_like(here)
        output = torch.empty_like(input)
        _normalise[_grid(rows, channels)](
            input,
            output,
            gathered,
            weight,
            bias,
            running_mean,
            running_var,
            statistics,
            gathered.shape[0],
            rows,
            channels,
            eps,
            momentum,
            AFFINE=weight is not None,
            TRACKED=running_mean is not None,
            **_SIZES,
        )
        ctx.save_for_backward(input, weight, statistics)
        ctx.group = group
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, statistics = ctx.saved_tensors
        rows, channels = input.numel() // input.shape[1], input.shape[1]
        grad = grad.movedim(1, -1).contiguous().movedim(-1, 1)
        sums = _reduce(_sum_gradients, rows, channels, grad, input, statistics)
        grad_input = None
        if ctx.needs_input_grad[0]:
            gathered = gather(sums.flatten(), ctx.group)
            grad_input = torch.empty_like(input)
            _differentiate[_grid(rows, channels)](
                grad,
                input,
                grad_input,
                statistics,
                gathered,
                weight,
                gathered.shape[0],
                rows,
                channels,
                AFFINE=weight is not None,
                **_SIZES,
            )
        grad_bias, grad_weight = (None, None) if weight is None else sums.to(weight.dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None, None


_SIZES = {"ROWS": ROWS, "CHANNELS": CHANNELS, "ROWS_PER_PROGRAM": ROWS_PER_PROGRAM}


def _grid(rows: int, channels: int) -> tuple[int, int]:
    return max(1, triton.cdiv(rows, ROWS_PER_PROGRAM)), triton.cdiv(channels, CHANNELS)


def _reduce(kernel: object, rows: int, channels: int, *tensors: Tensor) -> Tensor:
    """(2, C): the two sums that `kernel` makes, which many programs share in."""
    across = triton.cdiv(channels, CHANNELS)
    share = triton.cdiv(triton.cdiv(rows, max(1, PROGRAMS // across)), ROWS) * ROWS
    parts = triton.cdiv(rows, share) if rows else 0
    sums = torch.empty(parts, 2, channels, dtype=torch.float32, device=tensors[0].device)
    if parts:
        kernel[parts, across](*tensors, sums, rows, channels, share, ROWS=ROWS, CHANNELS=CHANNELS)
    return sums.sum(0)
