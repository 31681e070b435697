"""Folders of images with masks, or packed ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine import UserError, summarize
from engine.data import shards
from engine.data.folders import list_flat

SUFFIXES = (".jpg", ".jpeg", ".png")


class PackedMasks(Sequence):
    """Paths (image, mask) of a packed folder."""

    def __init__(self, pack: shards.Pack) -> None:
        self.pack = pack
        self.shard_sizes = pack.shard_sizes

    def __len__(self) -> int:
        return len(self.pack)

    def __getitem__(self, index: Any) -> tuple[Path, Path]:  # slices are not used
        return Path(self.pack.image(index)), Path(self.pack.extra(index))


def mask_folders(data: Path, split: str) -> list[Path]:
    """Return the folders of the images and masks of a split: one if it is packed, else two."""
    if shards.is_packed(data / split):
        return [data / split]
    return [data / kind / split for kind in ("images", "annotations")]


def list_masks(data: Path, split: str) -> Sequence[tuple[Path, Path]]:
    """Return the paths of each image and its mask, a PNG file of the same name.

    Raises:
        UserError: if there are no images, one has no mask or several, or the pack is damaged.
    """
    folders = mask_folders(data, split)
    if len(folders) == 1:
        return PackedMasks(shards.Pack(folders[0], "mask.png"))
    images, annotations = folders
    paths = list_flat(images, SUFFIXES)
    found = {path.stem: path for path in paths}
    masks = {path.stem: path for path in list_flat(annotations, [".png"])}
    if not found:
        raise UserError(f"{images} holds no images (NAME.jpg or .png)")
    twice = [path.name for path in paths if found[path.stem] != path]
    if twice:
        others = summarize([found[Path(name).stem].name for name in twice])
        raise UserError(f"{images} has {summarize(twice)} beside {others}; keep one of a name")
    for alone, folder in (
        (found.keys() - masks.keys(), f"{annotations} has no NAME.png"),
        (masks.keys() - found.keys(), f"{images} has no image"),
    ):
        if alone:
            names = ", ".join(sorted(alone)[:5]) + (", …" if len(alone) > 5 else "")
            raise UserError(f"{folder} for {len(alone)} of NAME: {names}; add or remove them")
    return [(found[name], masks[name]) for name in sorted(found)]
