"""How the speed of a training step grows with the GPUs, with the batch and with the images.

    python benchmarks/scaling.py --contestants project-O1,torch-fp16 --gpus 1,4 --batch-sizes 32,256

Each of step.py's contestants takes part once for each number of GPUs, each batch and each size of
images, all of them in one run and in turns. Prints a table, in which the efficiency is images/s by
those of as many single GPUs, and writes every turn to scaling.csv.
"""

import argparse
import csv
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from flags import file_name
from step import (
    HERE,
    Contestant,
    add_turns,
    compete,
    conditions,
    obstacle,
    read_contestants,
    say,
    usual_size,
)


class Point(NamedTuple):
    """A contestant in one of its places."""

    name: str
    gpus: int
    batch_size: int  # of each GPU
    image_size: int


def numbers(text: str) -> list[int]:
    found = [int(word) for word in text.split(",")]
    if min(found) < 1:
        raise ValueError
    return found


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--contestants", default="project-O1,torch-fp16", help="as of step.py")
    add("--gpus", type=numbers, default=[1, 2, 4], help="with commas between them")
    add("--batch-sizes", type=numbers, default=[32, 256], help="of each GPU; likewise")
    add("--arch", default="resnet50", help="one of torchvision's models")
    add("--image-sizes", type=numbers, help="likewise (default: 224, or 512 of segmentation)")
    add_turns(parser, rounds=6)
    add("--output", type=file_name, default=HERE / "scaling.csv")
    args = parser.parse_args()
    args.image_sizes = args.image_sizes or [usual_size(args.arch)]
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cuda" and max(args.gpus) > torch.cuda.device_count():
        parser.error(f"--gpus {max(args.gpus)}: this machine has {torch.cuda.device_count()}")
    args.contestants = read_contestants(parser, args, "sgd")
    return args


def main() -> int:
    args = parse_args()
    entrants: dict[str, tuple[Point, Contestant, argparse.Namespace]] = {}
    places = product(args.contestants, args.gpus, args.batch_sizes, args.image_sizes)
    for one, gpus, batch_size, image_size in places:
        reason = obstacle(one, gpus, args.device)
        if reason:
            say(f"{one.name} is left out on {gpus}: {reason}")
            continue
        point = Point(one.name, gpus, batch_size, image_size)
        own = argparse.Namespace(**vars(args) | point._asdict())
        entrant = one._replace(name=f"{one.name}-on-{gpus}-by-{batch_size}-of-{image_size}")
        entrants[entrant.name] = point, entrant, own

    if not entrants:  # and the file stays as it is
        return 1
    times: dict[Point, list[float]] = {point: [] for point, *_ in entrants.values()}
    memory: dict[Point, int] = {}
    with tempfile.TemporaryDirectory() as folder, args.output.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*Point._fields, "round", "seconds", "memory"])
        who = [(entrant, own) for _, entrant, own in entrants.values()]
        for turn in compete(who, args.rounds, Path(folder), args.starts):
            point = entrants[turn.contestant][0]
            times[point].append(turn.seconds)
            memory[point] = max(turn.memory, memory.get(point, 0))
            writer.writerow([*point, turn.round, f"{turn.seconds:.7f}", turn.memory])
            file.flush()
    args.gpus = max(args.gpus)
    print(conditions(args))
    print(table(times, memory))
    return int(any(len(seconds) < args.starts * args.rounds for seconds in times.values()))


def table(times: dict[Point, list[float]], memory: dict[Point, int]) -> str:
    """Time, speed, efficiency and memory of each point that had a turn, in Markdown."""
    speeds = {
        point: point.gpus * point.batch_size / median(seconds)
        for point, seconds in times.items()
        if seconds
    }
    heads = ["contestant", "batch a GPU", "image", "GPUs"]
    heads += ["ms/step", "images/s", "efficiency", "peak GiB"]
    rows = [heads, ["---"] * len(heads)]
    for point in sorted(speeds, key=lambda point: (point.name, *point[2:], point.gpus)):
        alone = speeds.get(point._replace(gpus=1))
        rows.append(
            [
                point.name,
                str(point.batch_size),
                f"{point.image_size}²",
                str(point.gpus),
                f"{median(times[point]) * 1e3:.2f}",
                f"{speeds[point]:.0f}",
                f"{speeds[point] / point.gpus / alone:.3f}" if alone else "–",
                f"{memory[point] / 2**30:.1f}" if memory[point] else "–",
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
