"""Packing of image folders into tar files, for data that is read faster.

python -m engine.data.pack DATA OUT        packs DATA/train and DATA/val; OUT is for --data
python -m engine.data.pack OUT --verify    compares checksums; status 1 if a file is damaged

An interrupted command continues after its last complete shard when it is run again. The module
engine.data.shards describes the files.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from engine import UserError, cli, distributed
from engine.data import shards
from engine.data.folders import list_classes
from engine.data.packing import MAX_SHORT_SIDE, Options, Source, SplitPacker

SPLITS = ("train", "val")
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def plan(data: Path, out: Path, options: Options) -> list[SplitPacker]:
    """Return the packing of each split of `data`. Raises UserError if it has none."""
    splits = [split for split in SPLITS if (data / split).is_dir()]
    if not splits:
        raise UserError(f"{data} has neither train/ nor val/: it takes train/CLASS/IMAGE")
    packers = []
    classes = None
    for split in splits:
        samples, classes = list_classes(data / split, classes)
        sources = [Source(path, (label,), b"%d" % label) for path, label in samples]
        packers.append(SplitPacker(out / split, sources, classes, options, "cls"))
    return packers


def pack(packers: Sequence[SplitPacker], workers: int, skip_broken: int) -> None:
    """Pack all splits. Raises UserError if more than `skip_broken` files can't be read."""
    for packer in packers:
        if packer.is_complete:
            print(f"{packer.folder} is complete", file=sys.stderr)
            continue
        try:
            packer.run(workers)
        except BrokenProcessPool:
            raise UserError(
                f"a process ended, perhaps for lack of memory; give fewer than {workers} "
                "--workers: complete shards are kept"
            ) from None
    broken = sum(len(packer.progress.broken) for packer in packers)
    if broken > skip_broken:
        raise UserError(
            f"{broken} files can't be read; fix or remove them and pack into a new folder, or run "
            f"the same command with --skip-broken {broken}"
        )
    for packer in packers:
        if not packer.progress.samples:
            raise UserError(f"{packer.folder}: no file of it can be read")
        if not packer.is_complete:
            packer.finish()
        shard_count, broken_count = len(packer.progress.shards), len(packer.progress.broken)
        print(
            f"{packer.folder}: {packer.progress.samples} samples in {shard_count} shards, "
            f"{broken_count} unreadable files",
            file=sys.stderr,
        )


@contextmanager
def naming_write_errors(out: Path) -> Iterator[None]:
    """Turn an OSError of the body, such as that of a full disk, into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or out} can't be written ({error.strerror}); complete shards are "
            "kept: correct this, and run the same command again"
        ) from None


def verify(out: Path) -> bool:
    """Report damaged files of a pack; return whether there are none."""
    folders = [out / split for split in SPLITS if (out / split).is_dir()]
    if not folders:
        raise UserError(f"{out} has neither train/ nor val/: it is no pack")
    is_intact = True
    for folder in folders:
        total = 1 + len(shards.read_manifest(folder).shards)
        bar = tqdm(shards.find_damage(folder), f"verifying {folder.name}", total, disable=None)
        for message in filter(None, bar):
            is_intact = False
            tqdm.write(message)
    print(f"{out}: {'intact' if is_intact else 'damaged'}", file=sys.stderr)
    return is_intact


def size_type(text: str) -> int:
    """Convert a number of bytes, such as 256MB."""
    found = re.fullmatch(r"(\d+)([KMG]B|)", text)
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text} must be a size, such as 256MB")
    return int(found[1]) * UNITS[found[2]]


def parse_args() -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.data.pack", description="Pack image folders into tar files."
    )
    add = parser.add_argument
    add("data", nargs="?", type=Path, metavar="DATA", help="a folder as for --data")
    add("out", type=Path, metavar="OUT", help="a new folder, or one to continue or to verify")
    side = cli.number_type(int, 1, MAX_SHORT_SIDE, f"an integer from 1 to {MAX_SHORT_SIDE - 1}")
    add("--short-side", type=side, default=288, metavar="PIXELS", help="of larger images")
    quality = cli.number_type(int, 1, 101, "an integer from 1 to 100")
    add("--quality", type=quality, default=90, help="of resized images, as JPEG (default: 90)")
    add("--shard-size", type=size_type, default="256MB", metavar="SIZE", help="of a tar file")
    add("--workers", type=cli.positive_int, default=distributed.cpu_cores(), metavar="N")
    add("--skip-broken", type=cli.non_negative_int, default=0, metavar="N", help="leave out up to")
    add("--verify", action="store_true", help="compare all checksums at the end")
    args = parser.parse_args()
    if args.data is None and not args.verify:
        parser.error("name both DATA and OUT, or give --verify")
    return args


def main() -> None:
    """Pack, verify, or both."""
    args = parse_args()
    if args.data is not None:
        options = Options(args.short_side, args.quality, args.shard_size)
        with naming_write_errors(args.out):
            pack(plan(args.data, args.out, options), args.workers, args.skip_broken)
    if args.verify and not verify(args.out):
        sys.exit(1)


if __name__ == "__main__":
    distributed.run(main)
