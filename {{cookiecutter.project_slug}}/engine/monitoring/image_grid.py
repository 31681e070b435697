"""Pictures of validation samples: grids with captions, and panels with headings and a legend."""

import errno
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms.v2.functional import pil_to_tensor
from torchvision.utils import make_grid

from engine import replacing
from engine.data import SizedDataset, select_batch
from engine.data.images import MEAN, STD
from engine.monitoring.fonts import LINE_HEIGHT, draw_text

COLUMNS = 4
MIN_WIDTH = 128  # pixels, to which smaller images are enlarged
MIN_PANEL_WIDTH = 192
MAX_LINES = 8  # of a caption; names of classes may hold more
MARGIN = 4  # pixels around an image and its caption
LEGEND_WIDTH = 148  # pixels of an entry


def image_path(output: Path, epoch: int | None) -> Path:
    """Return the path of a run's image after an epoch, or of --eval-only if it is None.

    Raises OSError if a link is there, by which files elsewhere would be replaced, or a FIFO.
    """
    stem = "eval_only" if epoch is None else f"epoch_{epoch:03}"
    path = output / "validation" / f"{stem}.png"
    for one in (path.parent, path, path.with_suffix(".csv")):
        if one.is_symlink():
            raise OSError(errno.ELOOP, f"{one} is a link")
        if one.is_fifo():  # opening it would never end
            raise OSError(0, f"{one} is a FIFO")
    return path


def sample_evenly(dataset: SizedDataset, count: int) -> list[Tensor]:
    """Return a batch of at most `count` samples at equal distances from all over the dataset."""
    return select_batch(dataset, evenly(len(dataset), count))


def evenly(size: int, count: int) -> list[int]:
    """Return at most `count` indices below `size`, at equal distances."""
    chosen = min(size, count)
    return [index * size // chosen for index in range(chosen)]


def to_pixels(images: Tensor) -> Tensor:
    """Return normalized images, (N, C, H, W), as uint8 (N, 3, H, W) on the CPU.

    Of other than three channels, the first three are shown, or else the first in grey.
    """
    images = images[:, : 3 if images.shape[1] > 2 else 1]
    mean, std = torch.tensor([MEAN, STD]).view(2, 3, 1, 1)
    return images.cpu().float().mul(std).add(mean).mul(255).round().clamp(0, 255).byte()


def save_image_grid(path: Path, images: Tensor, captions: Sequence[tuple[str, bool]]) -> None:
    """Save normalized images, (N, 3, H, W), in rows of 4, and create the folder if missing.

    Each caption is a text of one or more lines and whether the sample is correct; if not, the first
    line is red.
    """
    pixels = to_pixels(images)
    factor = -(-MIN_WIDTH // images.shape[-1])  # rounded up
    pixels = pixels.repeat_interleave(factor, 2).repeat_interleave(factor, 3)
    height = LINE_HEIGHT * max(len(_lines(text)) for text, _ in captions)
    cells = [
        torch.cat([image, _draw_caption(text, is_correct, image.shape[-1], height)], dim=1)
        for image, (text, is_correct) in zip(pixels, captions, strict=True)
    ]
    framed = F.pad(torch.stack(cells), [MARGIN] * 4, value=255)
    grid = make_grid(framed, nrow=COLUMNS, padding=0, pad_value=255)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        Image.fromarray(grid.permute(1, 2, 0).numpy()).save(temporary, "PNG")


def _lines(caption: str) -> list[str]:
    return caption.split("\n", MAX_LINES)[:MAX_LINES]


def _draw_caption(text: str, is_correct: bool, width: int, height: int) -> Tensor:
    """Return the text as an image, (3, height, width) of uint8."""
    strip = Image.new("RGB", (width, height), "white")
    for number, line in enumerate(_lines(text)):
        colour = "black" if is_correct or number else "red"
        draw_text(strip, (0, number * LINE_HEIGHT), line, width, colour)
    return pil_to_tensor(strip)


def save_panels(
    path: Path,
    rows: Sequence[Sequence[Tensor]],
    headings: Sequence[str],
    legend: Sequence[tuple[str, Sequence[int]]],
) -> None:
    """Save rows of images, uint8 (3, H, W) of one size, with a heading above each column.

    Below them are the names and the colours, (red, green, blue), of the legend.
    """
    zoom = max(1, MIN_PANEL_WIDTH // rows[0][0].shape[2])
    height, width = (zoom * side + MARGIN for side in rows[0][0].shape[1:])
    entries_per_row = max(1, len(headings) * width // LEGEND_WIDTH)
    legend_rows = -(-len(legend) // entries_per_row)
    total = LINE_HEIGHT * (1 + legend_rows) + height * len(rows) + 2 * MARGIN
    picture = Image.new("RGB", (width * len(headings) + MARGIN, total), "white")
    for column, heading in enumerate(headings):
        draw_text(picture, (column * width + MARGIN, 1), heading, width - MARGIN)
    for row, panels in enumerate(rows):
        for column, panel in enumerate(panels):
            pixels = panel.repeat_interleave(zoom, 1).repeat_interleave(zoom, 2)
            image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
            picture.paste(image, (column * width + MARGIN, row * height + LINE_HEIGHT))
    draw = ImageDraw.Draw(picture)
    for number, (name, colour) in enumerate(legend):
        row, column = divmod(number, entries_per_row)
        left = column * LEGEND_WIDTH + MARGIN
        top = LINE_HEIGHT * (1 + row) + height * len(rows) + MARGIN
        draw.rectangle((left, top + 2, left + 10, top + 12), tuple(colour), "grey")
        draw_text(picture, (left + 16, top), name, LEGEND_WIDTH - 16 - MARGIN)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        picture.save(temporary, "PNG")
