"""Folders of images with masks, or packed ones."""

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS

from engine import UserError, distributed, read_text, summarize
from engine.data import shards
from engine.data.files import FileError
from engine.data.folders import list_flat
from engine.data.images import open_image, read_labels

IGNORED = 255  # label of pixels that count neither in the loss nor in the metric
MAX_SAMPLE = 100  # masks that are read to find absent classes


class PackedMasks(shards.PackedSamples):
    """Paths (image, mask) of a packed folder."""

    def __getitem__(self, index: Any) -> tuple[Path, Path]:  # slices are not used
        return Path(self.pack.image(index)), Path(self.pack.extra(index))


def mask_folders(data: Path, split: str) -> list[Path]:
    """Return the folders of the images and masks of a split: one if it is packed, else two."""
    if shards.is_packed(data / split):
        return [data / split]
    return [data / kind / split for kind in ("images", "annotations")]


def odd_sizes(pair: tuple[Path, Path]) -> str:
    """Return the error message for an image and a mask of different sizes, or an empty string."""
    sizes = []
    for path in pair:
        try:
            with open_image(path) as image:
                sizes.append(" × ".join(map(str, image.size)))
        except FileError:
            return ""  # reading it raises the error
    has_others = sizes[0] != sizes[1]
    return f"{pair[0].name} has {sizes[0]} pixels and its mask {sizes[1]}" if has_others else ""


def list_masks(data: Path, split: str) -> Sequence[tuple[Path, Path]]:
    """Return the paths of each image and its mask, a PNG file of the same name.

    Raises UserError if there are no images, one has no mask or several, or the pack is damaged.
    """
    folders = mask_folders(data, split)
    if len(folders) == 1:
        return PackedMasks(shards.Pack(folders[0], "mask.png"))
    images, annotations = folders
    found, masks = _by_name(images, IMG_EXTENSIONS), _by_name(annotations, [".png"])
    if not found:
        raise UserError(f"{images} holds no images, such as NAME.jpg or NAME.png")
    for alone, folder in (
        (found.keys() - masks.keys(), f"{annotations} has no NAME.png"),
        (masks.keys() - found.keys(), f"{images} has no image"),
    ):
        if alone:
            names = ", ".join(sorted(alone)[:5]) + (", …" if len(alone) > 5 else "")
            raise UserError(f"{folder} for {len(alone)} of NAME: {names}; add or remove them")
    return [(found[name], masks[name]) for name in sorted(found)]


def _by_name(folder: Path, suffixes: Sequence[str]) -> dict[str, Path]:
    """Return the files in a folder by name without suffix. Raises UserError for two of a name."""
    paths = list_flat(folder, suffixes)
    found = {path.stem: path for path in paths}
    if twice := [path.name for path in paths if found[path.stem] != path]:
        others = summarize([found[Path(name).stem].name for name in twice])
        raise UserError(f"{folder} has {summarize(twice)} beside {others}; keep one of a name")
    return found


def read_classes(data: Path, ignore_index: int | None) -> tuple[list[str], Tensor]:
    """Return the class names and the class of each label (256,), IGNORED, or -1 for no class.

    `data`/classes.txt has a name in each line, those of the labels 0, 1, 2 and so on. ADE20K's
    objectInfo150.txt will do as well: there 0 stands for whatever has no name.
    """
    own, ade20k = (data / name for name in shards.CLASS_FILES)
    try:
        if own.exists() or not ade20k.exists():
            text = read_text(own).rstrip()
            names = text.split("\n") if text else []  # a name may hold U+2028 and the like
        else:
            lines = read_text(ade20k, errors="replace").rstrip().splitlines()[1:]
            names = ["other", *(line.strip().split("\t")[-1] for line in lines)]
            ignore_index = 0 if ignore_index is None else ignore_index
    except FileNotFoundError:
        raise UserError(
            f"{own} is missing: it has the name of a class in each line, from label 0"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"{own} is not UTF-8; save it as that") from None
    except OSError as error:
        raise UserError(f"{error.filename} can't be read ({error.strerror}); correct it") from None
    if not 0 < len(names) <= IGNORED:
        raise UserError(f"{own} must hold 1 to {IGNORED} names, one in each line")
    for number, name in enumerate(names, 1):
        if not name.strip() or name in names[: number - 1]:
            raise UserError(
                f"line {number} of {own} is {'a duplicate' if name.strip() else 'blank'}: "
                "each line must hold the name of another class"
            )
    ignored = {IGNORED, IGNORED if ignore_index is None else ignore_index}
    if max(ignored) > 255:
        raise UserError(f"--ignore-index {ignore_index}: labels are of 8 bits, from 0 to 255")
    counted = [label for label in range(len(names)) if label not in ignored]
    if not counted:
        raise UserError(
            f"--data {data}: its only label with a name, {ignore_index}, is ignored "
            "(--ignore-index): name the others, or ignore another"
        )
    numbers = torch.full((256,), -1)
    numbers[counted] = torch.arange(len(counted))
    numbers[list(ignored)] = IGNORED
    return [names[label] for label in counted], numbers


def renumber(numbers: Tensor, names: Sequence[str], classes: Sequence[str]) -> Tensor:
    """Return the class of each label by its position in `classes`, which include all of `names`.

    Args:
        numbers: the class of each label (256,) by its position in `names`.

    Raises UserError for more classes than a mask can have.
    """
    if len(classes) > IGNORED:
        raise UserError(f"the checkpoint has {len(classes)} classes; masks have up to {IGNORED}")
    renumbered = numbers.clone()
    for number, name in enumerate(names):
        renumbered[numbers == number] = classes.index(name)
    return renumbered


def read_mask(path: Path, numbers: Tensor) -> Tensor:
    """Return the class of each pixel of a mask, from that of each label: int64 (H, W).

    Raises FileError if the file can't be read, or holds a label without a class.
    """
    labels = read_labels(path)
    mask = numbers[labels]
    if mask.min() < 0:
        label = labels[mask < 0][0].item()
        count = ((numbers >= 0) & (numbers != IGNORED)).sum().item()
        raise FileError(
            f"{path} holds the label {label}, which is neither one of the {count} classes nor "
            "ignored; correct it, or the list of classes",
            str(path),
        )
    return mask


def warn_of_absent_classes(
    files: Sequence[tuple[Path, Path]], classes: Sequence[str], numbers: Tensor
) -> None:
    """Print a warning on rank 0 if no pixel of the training masks has the label of a class.

    Of many masks, a sample is read, which may lack rare classes: half of them must be absent.
    """
    if not distributed.is_rank_zero():
        return
    step = math.ceil(len(files) / MAX_SAMPLE)
    absent = set(range(len(classes)))
    num_read = 0
    for index in range(0, len(files), step):
        with contextlib.suppress(FileError):  # which training reports
            absent -= set(read_mask(files[index][1], numbers).unique().tolist())
            num_read += 1
        if not absent:
            return
    if not num_read or (step > 1 and 2 * len(absent) < len(classes)):
        return
    labels = numbers.tolist()
    names = [f"{labels.index(number)} ({classes[number]})" for number in sorted(absent)]
    ignored = [str(label) for label, number in enumerate(labels) if number == IGNORED]
    distributed.print_on_rank_zero(
        f"warning: no pixel of {num_read} of {len(files)} training masks has the label "
        f"{summarize(names)}; ignored: {', '.join(ignored)}"
    )
