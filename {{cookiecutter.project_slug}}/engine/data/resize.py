"""Crops of many images on the GPU: resized with antialiasing and flipped, in two kernels.

The arithmetic is that of torch's kernel for bytes on the CPU, bit for bit: weights in fixed point,
along rows first, each result rounded to a byte. torch's own functions are not used: real Apex's O1
patches casts into them, for all threads, and they fail for float64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 8, 32  # of a tile
MOST_BITS = tl.constexpr(22)  # of a weight's fraction
FIELDS = tl.constexpr(12)  # of an image: address, height, width, its 2 × 4 of spans, its flip


@triton.jit
def _weight(at, end, centre, inverse):
    """Evaluate a triangle around the centre, as wide as the step; 0 outside the image."""
    return tl.where(at < end, tl.maximum(1 - tl.abs((at - centre + 0.5) * inverse), 0), 0)


@triton.jit
def _weigh(table, windows, weights, shifts, size, most_taps, PLACES: tl.constexpr):
    """Compute the windows of one side of a crop: starts, weights, and bits of their fraction.

    In float64.
    """
    side = tl.program_id(0)
    entry = table + side // 2 * FIELDS
    span = entry + 3 + side % 2 * 4
    start, first = tl.load(span), tl.load(span + 3)
    length, resized = tl.load(span + 1).to(tl.float64), tl.load(span + 2).to(tl.float64)
    is_mirrored = (side % 2 == 1) & (tl.load(entry + 11) == 1)

    # The places after the crop's are the ends of the resized side, only for the bits.
    x = tl.arange(0, PLACES)
    place = (first + tl.where(is_mirrored, size - 1 - x, x)).to(tl.float64)
    place = tl.where(x < size, place, tl.where(x == size, 0, resized - 1))
    scale = length / resized
    support = tl.maximum(scale, 1)
    inverse = 1 / support
    centre = scale * (place + 0.5)
    begin = tl.maximum(tl.floor(centre - support + 0.5), 0)
    end = tl.minimum(tl.floor(centre + support + 0.5), length)

    total = tl.zeros((PLACES,), tl.float64)
    largest = tl.zeros((PLACES,), tl.float64)
    for i in range(most_taps):
        weight = _weight(begin + i, end, centre, inverse)
        total += weight
        largest = tl.maximum(largest, weight)
    # As many bits as the largest weight of the side leaves of 16; mostly it is at an end.
    bit = tl.arange(0, 32)
    one_more = (tl.full((32,), 2, tl.int64) << bit).to(tl.float64)
    fits = tl.max(largest / total, 0) * one_more + 0.5 < 2**15
    bits = tl.sum((fits & (bit < MOST_BITS)).to(tl.int32), 0)
    one = (tl.full((PLACES,), 1, tl.int64) << bits).to(tl.float64)

    tl.store(shifts + side, bits)
    tl.store(windows + side * size + x, (start + begin.to(tl.int64)).to(tl.int32), x < size)
    weights += side.to(tl.int64) * most_taps * size + x
    for i in range(most_taps):
        weight = _weight(begin + i, end, centre, inverse) / total
        tl.store(weights + i * size, tl.floor(weight * one + 0.5).to(tl.int16), x < size)


@triton.jit
def _taps(span):
    """Return the largest number of pixels of a window."""
    return 2 * tl.cdiv(tl.load(span + 1), tl.load(span + 2)).to(tl.int32) + 1


@triton.jit
def _to_byte(value, shift):
    return tl.minimum((value + (1 << (shift - 1))) >> shift, 255)


@triton.jit
def _resize(  # noqa: PLR0913 - a kernel takes pointers and sizes, not objects
    table,
    windows,
    weights,
    shifts,
    output,
    size,
    most_taps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute a tile of one crop. Each pixel is a weighted sum over its window."""
    number = tl.program_id(0)
    y = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    x = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    entry = table + number * FIELDS
    image = tl.load(entry).to(tl.pointer_type(tl.uint8))
    height, width = tl.load(entry + 1).to(tl.int32), tl.load(entry + 2).to(tl.int32)
    row_taps, column_taps = _taps(entry + 3), _taps(entry + 7)
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
    """Return the crops of `images`: uint8 (N, 3, size, size), channels_last, on their device.

    Args:
        images: uint8 (3, H, W), of N sizes; they must not be freed before the device has read them.
        spans: int64 (N, 2, 4) on the CPU, as in gpu_decoding.Packed.
        flips: bool (N,) on the CPU.
    """
    device = images[0].device
    count = len(images)
    images = [image.contiguous() for image in images]
    most_taps = 2 * int((-(-spans[..., 1] // spans[..., 2])).max()) + 1  # as in _taps
    places = torch.tensor([(image.data_ptr(), *image.shape[1:]) for image in images])
    table = torch.cat([places, spans.flatten(1), flips[:, None]], 1).to(device, non_blocking=True)
    windows = torch.empty((count, 2, size), dtype=torch.int32, device=device)
    weights = torch.empty((count, 2, most_taps, size), dtype=torch.int16, device=device)
    shifts = torch.empty((count, 2), dtype=torch.int32, device=device)
    output = torch.empty(
        (count, 3, size, size), dtype=torch.uint8, device=device, memory_format=torch.channels_last
    )
    prepared = table, windows, weights, shifts
    # Fused multiply-add instructions would round the weights differently.
    _weigh[(2 * count,)](
        *prepared, size, most_taps, PLACES=triton.next_power_of_2(size + 2), enable_fp_fusion=False
    )
    _resize[count, triton.cdiv(size, ROWS), triton.cdiv(size, COLUMNS)](
        *prepared, output, size, most_taps, ROWS=ROWS, COLUMNS=COLUMNS
    )
    return output
