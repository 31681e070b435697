"""Packing of image folders into tar files, for data that is read faster.

python -m engine.data.pack DATA OUT        packs DATA, which is as for --data; so is OUT
python -m engine.data.pack OUT --verify    compares checksums; status 1 if a file is damaged

An interrupted command continues after its last complete shard when it is run again. The module
engine.data.shards describes the files.
"""

import argparse
import random
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from tqdm import tqdm

from engine import UserError, cli, distributed, replacing, writing
from engine.data import shards
from engine.data.captions import read_captions
from engine.data.folders import list_classes
from engine.data.masks import list_masks
from engine.data.packing import MAX_SHORT_SIDE, Options, Source, SplitPacker
from engine.data.shards import CLASS_FILES, MASK_SPLITS, SPLITS

SHORT_SIDES = {"cls": 288, "txt": 288, "mask.png": 576}  # crops of 224 and 512 pixels


def find_layout(data: Path) -> tuple[str, list[str]]:
    """Return the kind of the data, as in engine.data.shards, and its splits."""
    layouts = {
        "mask.png": [name for name in MASK_SPLITS if (data / "images" / name).is_dir()],
        "txt": [name for name in SPLITS if (data / name / "captions.tsv").is_file()],
        "cls": [name for name in SPLITS if (data / name).is_dir()],
    }
    for kind, splits in layouts.items():
        if splits:
            return kind, splits
    raise UserError(f"{data} has neither train/ nor val/, nor images/training/: is it for --data?")


def list_sources(
    data: Path, split: str, kind: str, classes: list[str] | None
) -> tuple[list[Source], list[str] | None]:
    """Return what to pack of a split, and the classes if `kind` has any."""
    if kind == "mask.png":
        pairs = list_masks(data, split)
        return [Source(str(image), (0,), b"", str(mask)) for image, mask in pairs], None
    if kind == "txt":
        captions: dict[Path, list[bytes]] = {}  # an image is stored once
        for path, caption in read_captions(data / split, sys.maxsize):
            captions.setdefault(path, []).append(caption)
        return [
            Source(str(path), range(len(texts)), b"\n".join(texts))
            for path, texts in captions.items()
        ], None
    samples, classes = list_classes(data / split, classes)
    return [Source(path, (label,), b"%d" % label) for path, label in samples], classes


def plan(data: Path, out: Path, options: Options) -> list[SplitPacker]:
    """Return the packing of each split of `data`; copy the files that name its classes.

    Raises UserError if `data` has no splits, or a different pack is in `out`.
    """
    if any(shards.is_packed(data / split) for split in (*SPLITS, *MASK_SPLITS)):
        raise UserError(f"{data} is packed already; name the folder that it was made of")
    kind, splits = find_layout(data)
    if not options.short_side:
        options = options._replace(short_side=SHORT_SIDES[kind])
    packers = []
    classes = None
    for split in splits:
        sources, classes = list_sources(data, split, kind, classes)
        if options.shuffle and split in (SPLITS[0], MASK_SPLITS[0]):
            random.Random(0).shuffle(sources)
        packers.append(SplitPacker(out / split, sources, classes or [], options, kind))
    for name in CLASS_FILES:
        if kind == "mask.png" and (data / name).is_file():
            if not (data / name).resolve().is_relative_to(data.resolve()):  # a pack is for others
                raise UserError(f"{data / name} is a link to a file outside of {data}: copy it")
            with replacing(out / name) as temporary:
                shutil.copyfile(data / name, temporary)
    return packers


def pack(packers: Sequence[SplitPacker], workers: int, skip_broken: int) -> None:
    """Pack all splits. Raises UserError if more than `skip_broken` files can't be read."""
    for packer in packers:
        if packer.is_complete:
            same = "its files have the same names, sizes and times of modification as before"
            print(f"{packer.folder} is complete: {same}", file=sys.stderr)
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


def verify(out: Path) -> bool:
    """Report damaged files of a pack; return whether there are none."""
    folders = [out / name for name in (*SPLITS, *MASK_SPLITS) if (out / name).is_dir()]
    if not folders:
        raise UserError(f"{out} has neither train/ nor training/, val/ nor validation/: no pack")
    is_intact = True
    for folder in folders:
        total = 1 + len(shards.read_manifest(folder).shards)
        bar = tqdm(shards.find_damage(folder), f"verifying {folder.name}", total, disable=None)
        for message in filter(None, bar):
            is_intact = False
            tqdm.write(message)
        if is_intact:
            shards.Pack(folder)  # also checks the labels
    print(f"{out}: {'intact' if is_intact else 'damaged'}", file=sys.stderr)
    return is_intact


def parse_args() -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.data.pack", description="Pack image folders into tar files."
    )
    add = parser.add_argument
    add("data", nargs="?", type=cli.local_path, metavar="DATA", help="a folder, as for --data")
    text = "a new folder, or one to continue or to verify"
    add("out", type=cli.local_path, metavar="OUT", help=text)
    text = "shorter side of larger images (default: 288; 576 with masks)"
    side = cli.number_type(int, 1, MAX_SHORT_SIDE, f"an integer from 1 to {MAX_SHORT_SIDE - 1}")
    add("--short-side", type=side, default=0, metavar="PIXELS", help=text)
    quality = cli.number_type(int, 1, 101, "an integer from 1 to 100")
    add("--quality", type=quality, default=90, help="JPEG quality of resized images (default: 90)")
    text = "size of a tar file (default: 256MB)"
    add("--shard-size", type=cli.size_type, default="256MB", metavar="SIZE", help=text)
    add("--shuffle", action="store_true", help="random order of training images, for data by URL")
    text = "encoding processes (default: all CPU cores)"
    add("--workers", type=cli.core_count, default=distributed.cpu_cores(), metavar="N", help=text)
    text = "leave out at most N unreadable files (default: 0)"
    add("--skip-broken", type=cli.non_negative_int, default=0, metavar="N", help=text)
    add("--verify", action="store_true", help="compare all checksums at the end")
    args = parser.parse_args()
    if args.data is None and not args.verify:
        parser.error("name both DATA and OUT, or give --verify")
    return args


def main() -> None:
    """Pack, verify, or both."""
    args = parse_args()
    if args.data is not None:
        options = Options(args.short_side, args.quality, args.shard_size, args.shuffle)
        with writing(
            args.out, "complete shards are kept: correct this, and run the same command again"
        ):
            pack(plan(args.data, args.out, options), args.workers, args.skip_broken)
    if args.verify and not verify(args.out):
        sys.exit(1)


if __name__ == "__main__":
    distributed.run(main)
