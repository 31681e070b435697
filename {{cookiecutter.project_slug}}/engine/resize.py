"""Crops of many images at once on the GPU: resized with antialiasing, mirrored, in one kernel.

The arithmetic is that of torch's kernel for bytes on the CPU, bit for bit: weights in fixed point,
along rows first, each result rounded to a byte.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 8, 32  # of a tile


@triton.jit
def _to_byte(value, shift):
    return tl.minimum((value + (1 << (shift - 1))) >> shift, 255)


@triton.jit
def _resize(
    images,
    shapes,
    windows,
    weights,
    taps,
    shifts,
    output,
    size,
    most_taps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile of one crop. A pixel is a sum over its window, of `taps` columns and `taps` rows."""
    number = tl.program_id(0)
    y = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    x = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    image = tl.load(images + number).to(tl.pointer_type(tl.uint8))
    height, width = tl.load(shapes + 2 * number), tl.load(shapes + 2 * number + 1)
    row_taps, column_taps = tl.load(taps + 2 * number), tl.load(taps + 2 * number + 1)
    row_shift, column_shift = tl.load(shifts + 2 * number), tl.load(shifts + 2 * number + 1)
    row_windows = 2 * number * size + y
    column_windows = (2 * number + 1) * size + x
    top = tl.load(windows + row_windows, y < size, 0)
    left = tl.load(windows + column_windows, x < size, 0)
    row_weights = weights + (2 * number).to(tl.int64) * most_taps * size + y
    column_weights = weights + (2 * number + 1).to(tl.int64) * most_taps * size + x

    red = tl.zeros((ROWS, COLUMNS), tl.int32)
    green = tl.zeros((ROWS, COLUMNS), tl.int32)
    blue = tl.zeros((ROWS, COLUMNS), tl.int32)
    for i in range(row_taps):
        # A window may reach beyond the image, where its weights are 0.
        row = image + tl.minimum(top + i, height - 1)[:, None] * width
        row_red = tl.zeros((ROWS, COLUMNS), tl.int32)
        row_green = tl.zeros((ROWS, COLUMNS), tl.int32)
        row_blue = tl.zeros((ROWS, COLUMNS), tl.int32)
        for j in range(column_taps):
            pixel = row + tl.minimum(left + j, width - 1)[None, :]
            weight = tl.load(column_weights + j * size, x < size, 0).to(tl.int32)[None, :]
            row_red += tl.load(pixel) * weight
            row_green += tl.load(pixel + height * width) * weight
            row_blue += tl.load(pixel + 2 * height * width) * weight
        weight = tl.load(row_weights + i * size, y < size, 0).to(tl.int32)[:, None]
        red += _to_byte(row_red, column_shift) * weight
        green += _to_byte(row_green, column_shift) * weight
        blue += _to_byte(row_blue, column_shift) * weight

    at = (number.to(tl.int64) * size + y[:, None]) * size + x[None, :]
    inside = (y < size)[:, None] & (x < size)[None, :]
    tl.store(output + 3 * at, _to_byte(red, row_shift), inside)
    tl.store(output + 3 * at + 1, _to_byte(green, row_shift), inside)
    tl.store(output + 3 * at + 2, _to_byte(blue, row_shift), inside)


def resize(images: list[Tensor], spans: Tensor, flips: Tensor, size: int) -> Tensor:
    """The crops of `images`: uint8 (N, 3, size, size), channels_last, on their device.

    Args:
        images: uint8 (3, H, W), of N sizes; they must live until the device has read them.
        spans: int64 (N, 2, 4) on the CPU, as in images.Packed.
        flips: bool (N,) on the CPU.
    """
    device, count = images[0].device, len(images)
    images = [image.contiguous() for image in images]
    scales = (spans[..., 1] / spans[..., 2]).clamp(min=1)
    taps = 2 * scales.ceil().int() + 1
    most_taps = int(taps.max())
    pointers = torch.tensor([image.data_ptr() for image in images])
    shapes = torch.tensor([image.shape[1:] for image in images], dtype=torch.int32)
    pointers, shapes, taps, spans, flips = (
        tensor.to(device, non_blocking=True) for tensor in (pointers, shapes, taps, spans, flips)
    )
    windows, weights, shifts = _weigh(spans, flips, size, most_taps)
    output = torch.empty(
        (count, 3, size, size),
        dtype=torch.uint8,
        device=device,
        memory_format=torch.channels_last,
    )
    _resize[count, triton.cdiv(size, ROWS), triton.cdiv(size, COLUMNS)](
        pointers,
        shapes,
        windows,
        weights,
        taps,
        shifts,
        output,
        size,
        most_taps,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
    )
    return output


def _weigh(spans: Tensor, flips: Tensor, size: int, taps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where each window begins, what its pixels weigh, and of how many bits the fraction is.

    int32 (N, 2, size), int16 (N, 2, taps, size) and int32 (N, 2).
    """
    start, length, resized, first = (part[..., None] for part in spans.double().unbind(-1))
    place = torch.arange(size, device=spans.device).expand(len(spans), 2, size).clone()
    place[:, 1] = torch.where(flips[:, None], place[:, 1].flip(-1), place[:, 1])
    ends = torch.cat([torch.zeros_like(resized), resized - 1], -1)
    place = torch.cat([first + place, ends], -1)  # the ends for `bits` alone
    scale = length / resized
    support = scale.clamp(min=1)
    centre = scale * (place + 0.5)
    begin = (centre - support + 0.5).floor().clamp(min=0)
    end = (centre + support + 0.5).floor().minimum(length)

    # From here on (N, 2, taps, size + 2): a triangle around the centre, as wide as the step is.
    at = begin[..., None, :] + torch.arange(taps, device=spans.device)[:, None]
    distance = (at - centre[..., None, :] + 0.5) * (1 / support)[..., None, :]
    weights = (1 - distance.abs()).clamp(min=0)
    weights = torch.where(at < end[..., None, :], weights, 0)
    weights /= weights.sum(-2, keepdim=True)

    # As many bits as the largest weight of the side leaves in 16; it is mostly that of an end.
    largest = weights.amax((-2, -1))
    bits = (math.log2(2**15 - 0.5) - largest.log2() - 1).ceil().clamp(max=22)
    weights = (weights * bits.exp2()[..., None, None] + 0.5).floor()
    return (start + begin)[..., :size].int(), weights[..., :size].short().contiguous(), bits.int()
