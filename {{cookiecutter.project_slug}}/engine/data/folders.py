"""Lists of the image files in folders, with reports of what is ignored there."""

import errno
import os
import time
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from torchvision.datasets.folder import IMG_EXTENSIONS

from engine import OutageError, UserError, distributed, summarize
from engine.data import shards
from engine.data.files import LASTING, try_again
from engine.text import printable

LISTS = (*shards.CLASS_FILES, "captions.tsv")
LOST_AND_FOUND = "lost+found"  # folder at the root of a file system, which only root may read
REPORT_EVERY_S = 10.0


class Scan:
    """Image files in a folder, and the names of what is ignored there, by reason.

    Hidden files are ignored: .ipynb_checkpoints, or ._NAME.jpg of macOS, which holds no image.
    """

    def __init__(self, root: Path, suffixes: Sequence[str] = IMG_EXTENSIONS) -> None:
        self.root = str(root)
        self.suffixes = tuple(suffixes)
        self.ignored: dict[str, list[str]] = defaultdict(list)
        self.num_files = 0
        self.report_at = time.monotonic() + REPORT_EVERY_S

    def ignore(self, reason: str, path: str) -> None:
        """Add a path to those that are ignored."""
        self.ignored[reason].append(os.path.relpath(path, self.root))

    def read(self, folder: str) -> tuple[list[os.DirEntry], list[os.DirEntry]]:
        """Return the subfolders and the files of a folder by name, without hidden ones.

        Raises UserError if it can't be read, or OutageError if the disk does not answer.
        """
        self._report_progress(folder)
        try:
            entries = try_again(folder, partial(_list, folder))
        except OSError as error:
            if os.path.basename(folder) == LOST_AND_FOUND:
                self.ignore("folders of the file system", folder)
                return [], []
            problem = f"{error.filename or folder} can't be read ({error.strerror})"
            if error.errno not in LASTING:
                raise OutageError(problem) from None
            if error.errno in (errno.EACCES, errno.EPERM):
                problem += "; correct its permissions"
            raise UserError(problem) from None
        folders: list[os.DirEntry] = []
        files: list[os.DirEntry] = []
        for entry, is_folder in entries:
            if entry.name.startswith("."):
                self.ignore("hidden files and folders", entry.path)
            else:
                (folders if is_folder else files).append(entry)
        return folders, files

    def images(self, files: Sequence[os.DirEntry]) -> list[str]:
        """Return the paths of the images among files."""
        found = []
        for entry in files:
            if entry.name.lower().endswith(self.suffixes):
                found.append(entry.path)
            elif entry.name not in LISTS:
                self.ignore("files of other types", entry.path)
        self.num_files += len(found)
        return found

    def walk(self, folder: str, others: Sequence[str] = ()) -> list[str]:
        """Return the image files in a folder and in those below, links included.

        Each folder is read once, whatever links lead to it. Links to `others`, which are real
        paths, and to a folder that holds the root, are not followed.
        """
        seen = {os.path.realpath(folder), *others}
        pending = [(folder, os.path.realpath(folder))]
        links: list[os.DirEntry] = []  # follow the folders, so that a folder has its own path
        found: list[tuple[str, list[str]]] = []
        while pending or links:
            if not pending:
                link = links.pop(0)
                target = os.path.realpath(link.path)
                if target in seen or self.leads_back(link.path):
                    self.ignore("links to folders that are read already", link.path)
                    continue
                pending.append((link.path, target))
                seen.add(target)
            current, real = pending.pop()
            folders, files = self.read(current)
            for entry in folders:
                target = os.path.join(real, entry.name)
                if entry.is_symlink():
                    links.append(entry)
                elif target not in seen:
                    pending.append((entry.path, target))
                    seen.add(target)
            found.append((current, self.images(files)))
        return [path for _, paths in sorted(found) for path in paths]

    def leads_back(self, path: str) -> bool:
        """Return whether a path is that of the root, or of a folder that holds it."""
        target = os.path.realpath(path)
        return os.path.commonpath([target, os.path.realpath(self.root)]) == target

    def report(self) -> None:
        """Print what was ignored, with counts, on rank 0."""
        if self.ignored:
            reasons = (f"{why}: {len(x)} ({summarize(x)})" for why, x in self.ignored.items())
            distributed.print_on_rank_zero(f"warning: {self.root}: ignored {'; '.join(reasons)}")

    def _report_progress(self, folder: str) -> None:
        if time.monotonic() > self.report_at:
            self.report_at = time.monotonic() + REPORT_EVERY_S
            distributed.print_on_rank_zero(
                f"{self.root}: {self.num_files} images so far, reading {folder}"
            )


def _list(folder: str) -> list[tuple[os.DirEntry, bool]]:
    """Return the entries of a folder by name, and whether each is a folder that is not hidden."""
    with os.scandir(folder) as found:
        return [(entry, _is_folder(entry)) for entry in sorted(found, key=lambda one: one.name)]


def _is_folder(entry: os.DirEntry) -> bool:
    try:
        return not entry.name.startswith(".") and entry.is_dir()
    except OSError as error:
        if error.errno not in LASTING:
            raise
        return False  # a link to itself, or to where the user may not look


def list_images(folder: Path) -> list[str]:
    """Return the image files in a folder and in those below, some of which may be packed.

    Raises OSError if the folder can't be read, and UserError if one of those below can't.
    """
    folders = (path for path in folder.iterdir() if path.name != LOST_AND_FOUND)
    packed = sorted(path for path in (folder, *folders) if shards.is_packed(path))
    images = [path for pack in map(shards.Pack, packed) for path in pack.images()]
    if folder not in packed:
        scan = Scan(folder)
        images += scan.walk(scan.root, [os.path.realpath(path) for path in packed])
        scan.report()
    return images


def list_flat(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return the files with these suffixes in a folder, by name, without its subfolders."""
    scan = Scan(folder, suffixes)
    subfolders, files = scan.read(scan.root)
    for entry in subfolders:
        scan.ignore("subfolders", entry.path)
    paths = scan.images(files)
    scan.report()
    return [Path(path) for path in paths]


def list_classes(
    folder: Path, classes: Sequence[str] | None = None
) -> tuple[Sequence[tuple[str, int]], list[str]]:
    """Return the samples (path, label) and the classes of a folder of CLASS/IMAGE, or a packed one.

    The classes are the subfolders that hold images, sorted, and a label is the place of a class.

    Args:
        classes: those of the training set, for the validation set: no others may occur.

    Raises UserError if the folder holds no images, or other classes, or two are one folder.
    """
    if shards.is_packed(folder):
        return _list_packed(folder, classes)
    scan = Scan(folder)
    subfolders, outside = scan.read(scan.root)
    for entry in outside:
        scan.ignore("files outside the class folders", entry.path)
    targets = {entry.name: os.path.realpath(entry.path) for entry in subfolders}
    others = [os.path.realpath(scan.root), *targets.values()]
    files = {
        entry.name: [] if scan.leads_back(entry.path) else scan.walk(entry.path, others)
        for entry in subfolders
    }
    found = [name for name, paths in files.items() if paths]
    for entry in subfolders:
        if not files[entry.name]:
            scan.ignore("class folders without images", entry.path)
    _require_distinct(folder, {name: targets[name] for name in found})
    if not found:
        scan.report()
        raise UserError(f"{folder} holds no images (CLASS/IMAGE.jpg or .png)")
    labels = _number_classes(folder, found, classes)
    for name in labels:
        if name not in files:
            scan.ignore("classes without images", os.path.join(scan.root, name))
    scan.report()
    return [(path, labels[name]) for name in found for path in files[name]], list(labels)


def _require_distinct(folder: Path, targets: dict[str, str]) -> None:
    """Raise UserError if two classes have the same real path, of those in `targets`."""
    names: dict[str, str] = {}
    for name, target in targets.items():
        first = names.setdefault(target, name)
        if first != name:
            raise UserError(
                f"{folder}: {printable(first)} and {printable(name)} are the same folder, so its "
                "images have two labels; remove the link"
            )


def _number_classes(
    folder: Path, found: Sequence[str], classes: Sequence[str] | None
) -> dict[str, int]:
    """Return the label of each class: of `classes`, or of those that are `found`.

    Raises UserError if one is found that is not among `classes`.
    """
    labels = {name: label for label, name in enumerate(found if classes is None else classes)}
    unknown = [name for name in found if name not in labels]
    if not unknown:
        return labels
    names = {unicodedata.normalize("NFC", name): name for name in labels}
    for name in unknown:
        if alike := names.get(unicodedata.normalize("NFC", name)):
            raise UserError(
                f"{folder}/{name} is {ascii(name)}, but {ascii(alike)} in train/, the same letters "
                "in another Unicode form: rename it"
            )
    raise UserError(
        f"{folder} has classes that train/ does not have: {', '.join(unknown)}; "
        "remove them, or add them to train/"
    )


def _list_packed(
    folder: Path, classes: Sequence[str] | None
) -> tuple[Sequence[tuple[str, int]], list[str]]:
    pack = shards.Pack(folder, "cls")
    found = pack.manifest.classes
    labels = _number_classes(folder, found, classes)
    return shards.PackedImages(pack, [labels[name] for name in found]), list(labels)


def list_labels(samples: Sequence[tuple[str, int]]) -> list[int]:
    """Return the labels of samples (path, label), without the paths of packed ones."""
    if isinstance(samples, shards.PackedImages):
        return np.array(samples.labels)[samples.pack.records["label"]].tolist()
    return [label for _, label in samples]


def warn_if_enlarged(samples: Sequence[tuple[str, int]], short_side: int) -> None:
    """Log a warning if samples (path, label) are packed with fewer than `short_side` pixels."""
    if isinstance(samples, shards.PackedImages):
        folder, packed = samples.pack.folder, samples.pack.manifest.options.get("short_side")
        if packed and packed < short_side:
            distributed.print_on_rank_zero(
                f"warning: {folder} is packed with --short-side {packed}, and validation enlarges "
                f"images to {short_side} pixels: if the original files have more than {packed}, "
                f"pack them again with --short-side {short_side}"
            )


def relabel(samples: Sequence[tuple[str, int]], labels: Sequence[int]) -> Sequence[tuple[str, int]]:
    """Return samples (path, label) with `labels[label]` in place of each label."""
    if isinstance(samples, shards.PackedImages):
        return shards.PackedImages(samples.pack, [labels[label] for label in samples.labels])
    return [(path, labels[label]) for path, label in samples]
