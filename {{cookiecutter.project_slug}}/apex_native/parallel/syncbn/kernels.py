"""Triton kernels of synchronized batch norm, for input whose channels are adjacent in memory.

Such input is channels_last, or (N, C): rows of channels. Each kernel reads its input once.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import Reference

ROWS, CHANNELS = 64, 64  # of a tile; 64 half values are a cache line
ROWS_PER_PROGRAM = 8 * ROWS  # of an elementwise kernel
REDUCTION_PROGRAMS = 1024  # that share one reduction
FORMATS = {2: torch.contiguous_format, 4: torch.channels_last, 5: torch.channels_last_3d}


@triton.jit
def _tile(first_row, first_channel, rows, channels, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Return the offsets of a tile's values, and the mask of those that exist."""
    row = first_row + tl.arange(0, ROWS).to(tl.int64)
    channel = first_channel + tl.arange(0, CHANNELS)
    offsets = row[:, None] * channels + channel[None, :]
    return offsets, (row < rows)[:, None] & (channel < channels)[None, :]


@triton.jit
def power_sums(  # noqa: PLR0913, a kernel takes pointers and sizes one by one
    x, shift, sums, rows, channels, part_rows, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):
    """Sum x − shift and (x − shift)² of each channel over `part_rows` rows; store the shift."""
    part, first_channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHANNELS
    channel = first_channel + tl.arange(0, CHANNELS)
    mask = channel < channels
    first = tl.load(x + channel, channel < channels * min(rows, 1), 0).to(tl.float32)[None, :]
    offsets, inside = _tile(0, first_channel, rows, channels, ROWS, CHANNELS)
    sample = tl.where(inside, tl.load(x + offsets, inside, 0).to(tl.float32) - first, 0)
    middle = first + (tl.sum(sample, 0) / max(1, min(rows, ROWS)))[None, :]
    if part == 0:
        tl.store(shift + channel[None, :], middle, mask[None, :])
    first = tl.zeros((ROWS, CHANNELS), tl.float32)
    second = tl.zeros((ROWS, CHANNELS), tl.float32)
    end = min(part * part_rows + part_rows, rows)
    for row in range(part * part_rows, end, ROWS):
        offsets, inside = _tile(row, first_channel, end, channels, ROWS, CHANNELS)
        value = tl.where(inside, tl.load(x + offsets, inside, 0).to(tl.float32) - middle, 0)
        first += value
        second += value * value
    tl.store(sums + part * 2 * channels + channel, tl.sum(first, 0), mask)
    tl.store(sums + (part * 2 + 1) * channels + channel, tl.sum(second, 0), mask)


@triton.jit
def _normalize(  # noqa: PLR0913, a kernel takes pointers and sizes one by one
    x, output, statistics, weight, bias, rows, channels,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, ROWS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Compute (x − mean) · invstd · weight + bias, in this order: the mean itself gives bias."""
    first_channel = tl.program_id(1) * CHANNELS
    channel = first_channel + tl.arange(0, CHANNELS)
    mask = channel < channels
    mean = tl.load(statistics + channel, mask, 0)[None, :]
    scale = tl.load(statistics + channels + channel, mask, 0)
    offset = tl.zeros((CHANNELS,), tl.float32)
    if weight is not None:
        scale *= tl.load(weight + channel, mask, 0).to(tl.float32)
    if bias is not None:
        offset += tl.load(bias + channel, mask, 0).to(tl.float32)
    first_row = tl.program_id(0).to(tl.int64) * ROWS_PER_PROGRAM
    for row in range(first_row, min(first_row + ROWS_PER_PROGRAM, rows), ROWS):
        offsets, inside = _tile(row, first_channel, rows, channels, ROWS, CHANNELS)
        value = tl.load(x + offsets, inside, 0).to(tl.float32)
        tl.store(output + offsets, (value - mean) * scale[None, :] + offset[None, :], inside)


@triton.jit
def gradient_sums(  # noqa: PLR0913, a kernel takes pointers and sizes one by one
    grad, x, statistics, sums, rows, channels, part_rows, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):
    """Sum grad and grad · (x − mean) · invstd of each channel over `part_rows` rows."""
    part, first_channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHANNELS
    channel = first_channel + tl.arange(0, CHANNELS)
    mean = tl.load(statistics + channel, channel < channels, 0)[None, :]
    invstd = tl.load(statistics + channels + channel, channel < channels, 0)
    first = tl.zeros((ROWS, CHANNELS), tl.float32)
    second = tl.zeros((ROWS, CHANNELS), tl.float32)
    end = min(part * part_rows + part_rows, rows)
    for row in range(part * part_rows, end, ROWS):
        offsets, inside = _tile(row, first_channel, end, channels, ROWS, CHANNELS)
        gradient = tl.load(grad + offsets, inside, 0).to(tl.float32)
        first += gradient
        second += gradient * (tl.load(x + offsets, inside, 0).to(tl.float32) - mean)
    products = tl.sum(second, 0) * invstd
    tl.store(sums + part * 2 * channels + channel, tl.sum(first, 0), channel < channels)
    tl.store(sums + (part * 2 + 1) * channels + channel, products, channel < channels)


@triton.jit
def _input_gradient(  # noqa: PLR0913, a kernel takes pointers and sizes one by one
    grad, x, grad_input, statistics, means, weight, rows, channels,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, ROWS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Compute (grad − mean of grad − x̂ · mean of grad · x̂) · invstd · weight; x̂: normalized x."""
    first_channel = tl.program_id(1) * CHANNELS
    channel = first_channel + tl.arange(0, CHANNELS)
    mask = channel < channels
    mean = tl.load(statistics + channel, mask, 0)[None, :]
    scale = tl.load(statistics + channels + channel, mask, 0)
    mean_grad = tl.load(means + channel, mask, 0)[None, :]
    slope = (scale * tl.load(means + channels + channel, mask, 0))[None, :]
    if weight is not None:
        scale *= tl.load(weight + channel, mask, 0).to(tl.float32)
    first_row = tl.program_id(0).to(tl.int64) * ROWS_PER_PROGRAM
    for row in range(first_row, min(first_row + ROWS_PER_PROGRAM, rows), ROWS):
        offsets, inside = _tile(row, first_channel, rows, channels, ROWS, CHANNELS)
        gradient = tl.load(grad + offsets, inside, 0).to(tl.float32)
        centred = tl.load(x + offsets, inside, 0).to(tl.float32) - mean
        result = (gradient - mean_grad - centred * slope) * scale[None, :]
        tl.store(grad_input + offsets, result, inside)


class TritonKernels(Reference):
    """Implementation in Triton kernels, for input in rows of channels."""

    def to_layout(self, x: Tensor) -> Tensor:
        return x if _is_in_rows(x) else x.movedim(1, -1).contiguous().movedim(-1, 1)

    def power_sums(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shift = torch.empty(x.shape[1], dtype=torch.float32, device=x.device)
        return _reduce(power_sums, x, shift), shift

    def normalize(
        self, x: Tensor, statistics: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        return _map(_normalize, (x,), (statistics, weight, bias))

    def gradient_sums(self, grad: Tensor, x: Tensor, statistics: Tensor) -> Tensor:
        return _reduce(gradient_sums, grad, x, statistics)

    def input_gradient(
        self, grad: Tensor, x: Tensor, statistics: Tensor, means: Tensor, weight: Tensor | None
    ) -> Tensor:
        return _map(_input_gradient, (grad, x), (statistics, means, weight))


def _is_in_rows(x: Tensor) -> bool:
    """Return whether the channels are adjacent, without the time that movedim takes."""
    if x.dim() in FORMATS:
        return x.is_contiguous(memory_format=FORMATS[x.dim()])
    return x.movedim(1, -1).is_contiguous()


def reduction_grid(x: Tensor) -> tuple[int, int, int, tuple[int, int]]:
    """Return the rows and channels of x, the rows of each program, and the grid of programs."""
    channels = x.shape[1]
    rows = x.numel() // channels
    tiles = ceil_div(channels, CHANNELS)
    part_rows = ceil_div(ceil_div(rows, max(1, REDUCTION_PROGRAMS // tiles)), ROWS) * ROWS
    return rows, channels, part_rows, (ceil_div(rows, part_rows) if rows else 1, tiles)


def _reduce(kernel: triton.JITFunction, x: Tensor, *others: Tensor) -> Tensor:
    """Return the sums (parts, 2, C) that `kernel` computes, one part for each program."""
    rows, channels, part_rows, grid = reduction_grid(x)
    sums = torch.empty(grid[0], 2, channels, dtype=torch.float32, device=x.device)
    kernel[grid](x, *others, sums, rows, channels, part_rows, ROWS=ROWS, CHANNELS=CHANNELS)
    return sums


def _map(
    kernel: triton.JITFunction, inputs: Sequence[Tensor], channel_values: Sequence[Tensor | None]
) -> Tensor:
    """Return what `kernel` computes from each value of `inputs` and its channel's values."""
    x = inputs[-1]
    channels, rows = x.shape[1], x.numel() // x.shape[1]
    output = torch.empty_like(x)
    if rows:
        grid = ceil_div(rows, ROWS_PER_PROGRAM), ceil_div(channels, CHANNELS)
        sizes = {"ROWS": ROWS, "CHANNELS": CHANNELS, "ROWS_PER_PROGRAM": ROWS_PER_PROGRAM}
        kernel[grid](*inputs, output, *channel_values, rows, channels, **sizes)
    return output


def ceil_div(numerator: int, denominator: int) -> int:
    """Return ⌈numerator / denominator⌉. triton.cdiv takes 8 µs for it, seven times a norm."""
    return -(-numerator // denominator)
