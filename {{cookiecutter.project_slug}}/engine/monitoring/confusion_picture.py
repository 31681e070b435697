"""Picture of a confusion matrix of any size, with the names of classes in any script."""

from collections.abc import Sequence

import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn import functional as F

from engine.monitoring.fonts import LINE_HEIGHT, draw_text

SIDE = 1024  # pixels of the matrix at most
MAX_CELL = 48  # pixels
MIN_NUMBER_CELL = 34  # pixels, with room for a count
NAME_WIDTH = 140  # pixels
MARGIN = 8  # pixels
WHITE, BLUE = (255, 255, 255), (8, 48, 107)
LEGEND = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0)
LEGEND_WIDTH = 56  # pixels of an entry
MIN_PICTURE_WIDTH = 560  # pixels, for the texts


def draw_confusion(confusion: Tensor, classes: Sequence[str]) -> Image.Image:
    """Return a picture of counts, int64 (true class, predicted class), on the CPU.

    The colour is the fraction of the true class. A large matrix has names at some of its classes
    only. Where it has more classes than pixels, a pixel has the largest of several fractions.
    """
    per_pixel = -(-len(classes) // SIDE)  # rounded up
    fractions = confusion / confusion.sum(dim=1, keepdim=True).clamp(min=1)
    pooled = F.max_pool2d(fractions[None, None], per_pixel, ceil_mode=True)[0, 0]
    cell = min(MAX_CELL, SIDE // len(pooled))
    matrix = _colours(pooled).repeat_interleave(cell, 0).repeat_interleave(cell, 1)
    side = len(matrix)
    left, top = NAME_WIDTH + MARGIN, NAME_WIDTH + LINE_HEIGHT + 2 * MARGIN
    width = max(left + side + MARGIN, MIN_PICTURE_WIDTH)
    picture = Image.new("RGB", (width, top + side + 3 * LINE_HEIGHT + 2 * MARGIN), "white")
    picture.paste(Image.fromarray(matrix.numpy()), (left, top))
    ImageDraw.Draw(picture).rectangle((left - 1, top - 1, left + side, top + side), None, "grey")
    draw_text(picture, (MARGIN, MARGIN), "rows: true class; columns: predicted class", width)
    _draw_names(picture, classes, left, top, side)
    if cell >= MIN_NUMBER_CELL:
        _draw_counts(picture, confusion, pooled, (left, top), cell)
    _draw_legend(picture, top + side + MARGIN, per_pixel)
    return picture


def _colours(fractions: Tensor) -> Tensor:
    """Return colours from white to blue, uint8 (…, 3); the root makes rare confusions visible."""
    white, blue = torch.tensor([WHITE, BLUE], dtype=torch.float32)
    return (white + fractions.sqrt().unsqueeze(-1) * (blue - white)).byte()


def _draw_names(
    picture: Image.Image, classes: Sequence[str], left: int, top: int, side: int
) -> None:
    """Draw the names of classes that are at least a line apart, at the rows and the columns."""
    step = -(-LINE_HEIGHT * len(classes) // side)  # rounded up
    for index in range(0, len(classes), step):
        start = round((index + 0.5) * side / len(classes) - LINE_HEIGHT / 2)
        strip = Image.new("RGB", (NAME_WIDTH, LINE_HEIGHT), "white")
        draw_text(strip, (0, 1), classes[index], NAME_WIDTH)
        picture.paste(strip, (MARGIN // 2, top + start))
        picture.paste(strip.rotate(90, expand=True), (left + start, top - NAME_WIDTH - 2))


def _draw_counts(
    picture: Image.Image, confusion: Tensor, fractions: Tensor, corner: tuple[int, int], cell: int
) -> None:
    """Draw the counts other than 0 into their cells."""
    for row, column in confusion.nonzero().tolist():
        count = int(confusion[row, column])
        text = str(count) if count < 10_000 else f"{count / 1000:.0f}k"
        place = corner[0] + column * cell + 4, corner[1] + row * cell + (cell - LINE_HEIGHT) // 2
        colour = "white" if fractions[row, column] > 0.25 else "black"
        draw_text(picture, place, text, cell - 4, colour)


def _draw_legend(picture: Image.Image, top: int, per_pixel: int) -> None:
    """Draw the colours of some fractions, and what a pixel stands for."""
    text = "colour: fraction of the true class"
    if per_pixel > 1:
        text += f", the largest of {per_pixel} × {per_pixel} cells"
    draw_text(picture, (MARGIN, top), text, picture.width)
    colours = _colours(torch.tensor(LEGEND)).tolist()
    draw = ImageDraw.Draw(picture)
    for number, (fraction, colour) in enumerate(zip(LEGEND, colours, strict=True)):
        left = MARGIN + number * LEGEND_WIDTH
        box = (left, top + LINE_HEIGHT + 2, left + 12, top + LINE_HEIGHT + 14)
        draw.rectangle(box, tuple(colour), "grey")
        draw_text(picture, (left + 16, top + LINE_HEIGHT), f"{fraction:g}", LEGEND_WIDTH - 16)
