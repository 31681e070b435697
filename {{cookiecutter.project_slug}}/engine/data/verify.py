"""Search for unreadable image files, before a run meets them.

python -m engine.data.verify DATA          decodes all images in a folder; status 1 if one is broken
"""

import argparse
import sys
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool

import torch
from tqdm import tqdm

from engine import UserError, cli, distributed
from engine.data.files import FileError
from engine.data.folders import list_images
from engine.data.images import read_image


def find_broken(files: list[str], threads: int) -> Iterator[str]:
    """Yield the error message of each unreadable file, in order, and show the progress."""
    with ThreadPool(threads) as pool:  # decoders release Python's lock
        errors = pool.imap(_error, files, chunksize=16)
        bar = tqdm(errors, "verifying", len(files), unit=" files", disable=None)
        yield from filter(None, bar)


def _error(path: str) -> str:
    try:
        read_image(path)
    except FileError as error:
        return str(error)
    return ""


def main() -> None:
    """Print the error of each unreadable file; exit with status 1 if there is one."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.data.verify", description="Find unreadable image files."
    )
    parser.add_argument(
        "data", nargs="+", type=cli.local_path, metavar="DATA", help="a folder of images"
    )
    parser.add_argument("--threads", type=int, default=distributed.cpu_cores(), metavar="N")
    args = parser.parse_args()
    torch.set_num_threads(1)  # each file is decoded by one thread
    for folder in args.data:
        if not folder.is_dir():
            raise UserError(f"{folder}: there is no such folder")
    files = [path for folder in args.data for path in list_images(folder)]
    if not files:
        raise UserError(f"{args.data[0]} holds no images, such as NAME.jpg or NAME.png")
    broken = 0
    for message in find_broken(files, max(1, args.threads)):
        broken += 1
        tqdm.write(message)
    print(f"{len(files)} files, {broken} unreadable", file=sys.stderr)
    sys.exit(broken > 0)


if __name__ == "__main__":
    distributed.run(main)
