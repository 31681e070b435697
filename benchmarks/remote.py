"""Images a second out of packed data by URL, from nginx on this machine, and out of local shards.

    python benchmarks/remote.py --cores 8

Both take turns with the project's training loader, a whole epoch each, after one that is not timed;
by URL once with an empty cache, which is removed before each turn, and once with a full one. The
time to the first batch, with an empty cache, is that from opening the data to the batch, workers'
start included. The files are those of loader.py, packed; they are in the page cache.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from statistics import median

import torch
from flags import whole_number
from loader import HERE, pack, project_datasets, table, write_folder
from step import conditions

sys.path.append(str(HERE.parent / "tests"))
from engine.data import ResumableDistributedSampler, SeededDataset
from engine.data.loading import TrainLoader
from engine.data.remote import RemoteFolder
from nginx import NGINX, serving

CACHE_SIZE = 10**12
LOCAL, EMPTY, FULL = "local shards", "URL, empty cache", "URL, full cache"


def read_epoch(data: Path | RemoteFolder, args: Namespace) -> tuple[float, float]:
    """Return the images/s of an epoch and the seconds to its first batch."""
    opened = time.perf_counter()
    train_set = SeededDataset(project_datasets(data)[0], 0)
    sampler = ResumableDistributedSampler(train_set, 0, num_replicas=1, rank=0)
    options = {"batch_size": args.batch_size, "workers": args.workers, "epochs": 1}
    loader = TrainLoader(train_set, sampler, device=torch.device("cpu"), **options)
    batches = iter(loader)
    next(batches)
    started = time.perf_counter()
    count = args.batch_size * sum(1 for _ in batches)
    return count / (time.perf_counter() - started), started - opened


def parse_args() -> Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, cores = parser.add_argument, len(os.sched_getaffinity(0))
    add("--cores", type=whole_number, default=cores, help="for all, nginx included")
    add("--workers", type=whole_number, help="default: one for each core")
    add("--images", type=whole_number, default=4000, help="files")
    add("--shard-size", type=whole_number, default=16, help="in MB, so that there are several")
    add("--batch-size", type=whole_number, default=256)
    add("--rounds", type=whole_number, default=3, help="turns of each")
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    args.workers = args.workers or args.cores
    args.gpus, args.device = 1, "cpu"
    return args


def main() -> None:
    args = parse_args()
    if NGINX is None:
        sys.exit("nginx is missing: apt-get install nginx-light")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "files").mkdir()
        write_folder(folder / "files", args.images, args.images)
        packed, cache = folder / "served" / "packed", folder / "cache"
        packed.parent.mkdir()
        pack(
            folder / "files", packed, args.workers, "--shuffle", f"--shard-size={args.shard_size}MB"
        )
        (folder / "nginx").mkdir()
        speeds: dict[str, list[float]] = {LOCAL: [], EMPTY: [], FULL: []}
        first_batches = []
        with serving(packed.parent, folder / "nginx") as server:
            for turn in range(args.rounds + 1):
                for key in speeds:
                    if key == EMPTY:
                        shutil.rmtree(cache, ignore_errors=True)
                    url = RemoteFolder(f"{server.url}/packed", cache, CACHE_SIZE)
                    speed, seconds = read_epoch(packed if key == LOCAL else url, args)
                    if turn:
                        speeds[key].append(speed)
                    if turn and key == EMPTY:
                        first_batches.append(seconds)
        print(conditions(args))
        print(f"{args.images} files, batches of {args.batch_size}, {args.workers} workers\n")
        print(table(speeds, LOCAL))
        spread = f"{min(first_batches):.2f}–{max(first_batches):.2f}"
        print(f"\nfirst batch by URL: {median(first_batches):.2f} s ({spread})")


if __name__ == "__main__":
    main()
