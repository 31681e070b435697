"""Time from the last step of an epoch to the first batch of the next, validation apart.

    python benchmarks/epoch_gap.py
    python benchmarks/epoch_gap.py --workers 8 --batch-size 256 --step-ms 50 --images 8192

Three loaders read the same JPEG files in turn, epoch by epoch: the project's, DataLoader as the
usual scripts have it, and DataLoader with persistent_workers. A step is a pause, as a GPU's is for
the CPU. Each line gives the median gap of a loader and its range.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import torch
from loader import project_datasets, write_folder  # makes `engine` importable
from torch.utils.data import DataLoader

from engine.data import ResumableDistributedSampler, SeededDataset, collate  # isort: skip
from engine.data.loading import TrainLoader, prepare_worker  # isort: skip


def train_epoch(batches: Iterable, step_s: float) -> tuple[float, float]:
    """Return when the first batch was there and when the last step ended."""
    first = None
    for _ in batches:
        first = first or time.perf_counter()
        time.sleep(step_s)
    assert first is not None
    return first, time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N")
    parser.add_argument("--step-ms", type=float, default=500.0, metavar="MS")
    parser.add_argument("--images", type=int, default=1024, metavar="N")
    parser.add_argument("--epochs", type=int, default=5, metavar="N")
    args = parser.parse_args()
    if args.images < args.batch_size:
        parser.error("--images must be at least --batch-size")

    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), min(args.images, 512), args.images)
        data = SeededDataset(project_datasets(Path(folder))[0], 0)
        samplers = [ResumableDistributedSampler(data, 0, 1, 0) for _ in range(3)]
        usual = {
            "batch_size": args.batch_size,
            "num_workers": args.workers,
            "drop_last": True,
            "collate_fn": collate,
            "worker_init_fn": prepare_worker,
        }
        loaders = {
            "project": TrainLoader(
                data,
                samplers[0],
                batch_size=args.batch_size,
                epochs=args.epochs,
                workers=args.workers,
                device=torch.device("cpu"),
            ),
            "DataLoader": DataLoader(data, sampler=samplers[1], **usual),
            "persistent_workers": DataLoader(
                data, sampler=samplers[2], persistent_workers=True, **usual
            ),
        }
        for (name, loader), sampler in zip(loaders.items(), samplers, strict=True):
            gaps, end = [], None
            for epoch in range(args.epochs):
                sampler.set_epoch(epoch)
                first, next_end = train_epoch(loader, args.step_ms / 1000)
                if end is not None:
                    gaps.append(first - end)
                end = next_end
            print(f"{name:20}{median(gaps):8.3f} s  ({min(gaps):.3f} to {max(gaps):.3f})")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
