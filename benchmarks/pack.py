"""Files a second that engine.data.pack packs, and that its processes decode and encode alone.

    python benchmarks/pack.py --cores 8

The files are those of loader.py: JPEG, most with a long side of 500 pixels, 100 KB. Both take turns
on all the files with as many processes as cores: "encode" decodes, resizes and encodes each file
and throws the result away; "pack" also writes the shards with their checksums and the index.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median

from flags import whole_number
from loader import HERE, table, write_folder
from step import conditions

sys.path.insert(0, str(HERE.parent / "{{cookiecutter.project_slug}}"))
from engine.data import pack, packing

IMAGENET = 1_281_167  # training images


def encode_chunk(sources: list[packing.Source], options: packing.Options) -> int:
    """Return the bytes that the files would take when packed, which are thrown away."""
    return sum(len(one.image) for one in packing.encode_chunk(0, sources, options))


def encode(packer: packing.SplitPacker, workers: int) -> int:
    """Return what `encode_chunk` does, of all files."""
    chunks = [
        packer.sources[first : first + packing.CHUNK]
        for first in range(0, len(packer.sources), packing.CHUNK)
    ]
    with ProcessPoolExecutor(workers, initializer=packing.prepare_process) as pool:
        return sum(pool.map(encode_chunk, chunks, [packer.options] * len(chunks)))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--cores", type=whole_number, default=cores)
    parser.add_argument("--images", type=whole_number, default=4000, help="files")
    parser.add_argument("--rounds", type=whole_number, default=3, help="turns of each")
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    args.gpus, args.device = 1, "cpu"
    return args


def main() -> None:
    args = parse_args()
    options = packing.Options(0, 90, 256 * 10**6)
    rates: dict[str, list[float]] = {"encode": [], "pack": []}
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name, "data"), Path(name, "packed")
        folder.mkdir()
        before = write_folder(folder, args.images, args.images)
        shutil.rmtree(folder / "val")
        for _ in range(args.rounds):
            for key, seen in rates.items():
                (packer,) = pack.plan(folder, out, options)
                started = time.perf_counter()
                if key == "encode":
                    after = encode(packer, args.cores) / args.images / 1e3
                else:
                    pack.pack([packer], args.cores, 0)
                seen.append(args.images / (time.perf_counter() - started))
                shutil.rmtree(out)
    print(conditions(args))
    print(f"{args.images} files of {before:.0f} KB, {after:.0f} KB packed; {args.cores} cores\n")
    print(table(rates, "encode").replace("| loader |", "| files |"))
    hours = IMAGENET / median(rates["pack"]) / 3600
    print(f"\nImageNet's {IMAGENET:,} training images would take {hours:.2f} hours.")


if __name__ == "__main__":
    main()
