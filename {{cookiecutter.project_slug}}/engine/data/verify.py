"""Search for unreadable image files and invalid masks, before a run reads them.

python -m engine.data.verify DATA          decodes all images in a folder; status 1 if one is broken

Masks in annotations/ are compared with the list of classes and the sizes of their images.
"""

import argparse
import glob
import sys
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS
from tqdm import tqdm

from engine import OutageError, UserError, cli, distributed
from engine.data.files import FileError
from engine.data.folders import list_images
from engine.data.images import read_image
from engine.data.masks import odd_sizes, read_classes, read_mask
from engine.data.shards import CLASS_FILES


def list_reads(folder: Path, ignore_index: int | None) -> list[Callable[[], object]]:
    """Return a function for each image file, which reads it as an image or as a mask."""
    files = list_images(folder)
    has_masks = (folder / "annotations").is_dir()  # others may hold such lists for other purposes
    if not has_masks or not any((folder / name).is_file() for name in CLASS_FILES):
        return [partial(read_image, path) for path in files]
    _, numbers = read_classes(folder, ignore_index)
    return [
        partial(check_mask, folder, Path(path), numbers)
        if Path(path).is_relative_to(folder / "annotations") and path.lower().endswith(".png")
        else partial(read_image, path)
        for path in files
    ]


def check_mask(folder: Path, path: Path, numbers: Tensor) -> None:
    """Raise FileError if a mask can't be read, or its image has another size."""
    read_mask(path, numbers)
    name = path.relative_to(folder / "annotations")
    for image in (folder / "images" / name.parent).glob(f"{glob.escape(name.stem)}.*"):
        if image.suffix.lower() in IMG_EXTENSIONS and (problem := odd_sizes((image, path))):
            raise FileError(f"{image}: {problem}; make them alike", str(image))


def find_broken(reads: list[Callable[[], object]], threads: int) -> Iterator[str]:
    """Yield the error message of each unreadable file, in order, and show the progress."""
    with ThreadPool(threads) as pool:  # decoders release Python's lock
        errors = pool.imap(_error, reads, chunksize=16)
        bar = tqdm(errors, "verifying", len(reads), unit=" files", disable=None)
        yield from filter(None, bar)


def _error(read: Callable[[], object]) -> str:
    try:
        read()
    except (FileError, OutageError) as error:
        return str(error)
    return ""


def main() -> None:
    """Print the error of each unreadable file; exit with status 1 if there is one."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.data.verify", description="Find unreadable image files."
    )
    add = parser.add_argument
    add("data", nargs="+", type=cli.local_path, metavar="DATA", help="a folder or a local pack")
    text = "threads that read files (default: one for each CPU core)"
    add("--threads", type=cli.core_count, default=distributed.cpu_cores(), metavar="N", help=text)
    add("--ignore-index", type=cli.non_negative_int, metavar="N", help="label to ignore in masks")
    args = parser.parse_args()
    torch.set_num_threads(1)  # each file is decoded by one thread
    for folder in args.data:
        if not folder.is_dir():
            raise UserError(f"{folder}: there is no such folder")
    reads = [read for folder in args.data for read in list_reads(folder, args.ignore_index)]
    if not reads:
        raise UserError(f"{args.data[0]} holds no images, such as NAME.jpg or NAME.png")
    broken = 0
    for message in find_broken(reads, args.threads):
        broken += 1
        tqdm.write(message)
    print(f"{len(reads)} files, {broken} unreadable", file=sys.stderr)
    sys.exit(broken > 0)


if __name__ == "__main__":
    distributed.run(main)
