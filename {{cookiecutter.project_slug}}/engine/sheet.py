"""What a run shows of validation: a few samples, where their picture is, and words below each."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten

import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from engine.images import MEAN, STD

COLUMNS = 4
SMALLEST = 128  # pixels, to which smaller images are enlarged
LETTER, LINE = 6, 16  # pixels: the width of a letter, about, and the height of a line


def path_of(output: Path, epoch: int | None) -> Path:
    """Where a run's picture after `epoch` is; without one, that of --eval-only."""
    stem = "eval_only" if epoch is None else f"epoch_{epoch:03}"
    return output / "validation" / f"{stem}.png"


def spread(dataset: Dataset, count: int) -> list[Tensor]:
    """A batch of `count` samples from all over `dataset`, or of all that it has."""
    chosen = range(0, len(dataset), max(1, len(dataset) // count))[:count]
    return default_collate([dataset[index] for index in chosen])


def write(path: Path, images: Tensor, words: Sequence[tuple[str, bool]]) -> None:
    """Saves normalised `images`, (N, 3, H, W), with `words` and whether they are right.

    Makes the folder. Those that are not right are red.
    """
    mean, std = torch.tensor([MEAN, STD]).view(2, 3, 1, 1)
    pixels = images.cpu().float().mul(std).add(mean).mul(255).clamp(0, 255).byte()
    times = -(-SMALLEST // images.shape[-1])
    pixels = pixels.repeat_interleave(times, 2).repeat_interleave(times, 3)
    height, width = pixels.shape[2:]
    rows = -(-len(pixels) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * (width + 8), rows * (height + LINE + 8)), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (image, (text, is_right)) in enumerate(zip(pixels, words, strict=True)):
        row, column = divmod(index, COLUMNS)
        left, top = 4 + column * (width + 8), 4 + row * (height + LINE + 8)
        sheet.paste(Image.fromarray(image.permute(1, 2, 0).numpy()), (left, top))
        # Pillow's own font before 10.1 has no other letters than these.
        text = shorten(text, width // LETTER, placeholder=" …").encode("latin-1", "replace")
        colour = "black" if is_right else "red"
        draw.text((left, top + height + 2), text.decode("latin-1"), fill=colour)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)
