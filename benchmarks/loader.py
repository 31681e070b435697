"""Images a second out of JPEG files, by the project's loader and by the one of the usual scripts.

    python benchmarks/loader.py                    loading alone
    python benchmarks/loader.py --train --cores 8  training from files

The usual one, torchvision's reference script, has PIL and torchvision.transforms, and normalises;
the project leaves that to the training device and sends uint8. The files are cut from photographs
that installed packages carry: a long side of 500, a short one of 333 to 400, 100 KB, as ImageNet's
are, and some of twice the size. They are in the page cache, and so are no test of a disk.

Loading alone: the two take turns, a whole epoch each, after one that is not timed.

With --train, main.py trains a ResNet-50: with --dummy, from the usual loader, and with --decode cpu
and --decode gpu from the files, and from what engine.data.pack makes of them. They take turns as in
step.py, each with all the cores. Before its steps are timed, a turn uses up what was loaded while
the others had theirs. First of all, it shows how far the crops of the two decoders differ, and how
long a batch takes on the GPU alone.
"""

import argparse
import csv
import os
import random
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from functools import cache, partial
from multiprocessing import Pool
from pathlib import Path
from statistics import mean, median

import torch
from flags import file_name, whole_number
from PIL import Image
from step import Contestant, Kind, Turn, compete, conditions, main_py, say
from torch.utils.data import DataLoader, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "{{cookiecutter.project_slug}}"))
sys.dont_write_bytecode = True  # cookiecutter would take the caches for a part of the template
import task  # noqa: E402
from engine.data import collate, gpu_decoding, images  # noqa: E402
from fresh import UNCHANGED  # noqa: E402

CLASSES = 1000  # as many as task.dummy_batch has, so that the models are the same
VALIDATION = 128

# Scripts that run main.py, each with its own flags.
RUN = """
import sys
sys.argv[1:] = {flags!r}
import main, task
from engine import distributed
main.DUMMY_STEPS = 10**6
{change}
distributed.run(main.main)
"""
USE_THE_USUAL = """
sys.path.append({benchmarks!r})
import loader
task.build_datasets = lambda args: loader.usual_datasets(args.data)
"""
# The change to the script, its flags, and whether its data are packed.
FROM_FILES = {
    "usual (PIL)": (USE_THE_USUAL, [], False),
    "--decode cpu": ("", ["--decode", "cpu"], False),
    "--decode gpu": ("", ["--decode", "gpu"], False),
    "packed, --decode cpu": ("", ["--decode", "cpu"], True),
    "packed, --decode gpu": ("", ["--decode", "gpu"], True),
}


def usual_datasets(data: Path) -> tuple[ImageFolder, ImageFolder]:
    """The training and the validation set as torchvision's reference script has them."""
    normalised = [
        transforms.PILToTensor(),
        transforms.ConvertImageDtype(torch.float),
        transforms.Normalize(task.MEAN, task.STD),
    ]
    train = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), *normalised]
    val = [transforms.Resize(256), transforms.CenterCrop(224), *normalised]
    train_set = ImageFolder(data / "train", transforms.Compose(train))
    val_set = ImageFolder(data / "val", transforms.Compose(val))
    val_set.classes = train_set.classes  # it has images of the first ones alone
    return train_set, val_set


def project_datasets(data: Path) -> tuple[task.SizedDataset, task.SizedDataset]:
    """Return the training and the validation set of the project's task."""
    return task.build_datasets(Namespace(data=data, decode="cpu", eval_only=False, **UNCHANGED))


@cache
def photographs() -> list[Image.Image]:
    """Those that are there of scikit-learn's, Matplotlib's and scikit-image's."""
    found = []
    for package, names in {
        "sklearn": ("datasets/images/china.jpg", "datasets/images/flower.jpg"),
        "matplotlib": ("mpl-data/sample_data/grace_hopper.jpg",),
        "skimage": ("data/astronaut.png", "data/chelsea.png", "data/coffee.png"),
    }.items():
        for folder in sys.path:
            paths = [Path(folder) / package / name for name in names]
            found += [Image.open(path).convert("RGB") for path in paths if path.is_file()]
    if not found:
        sys.exit("there are no photographs: pip install scikit-learn")
    return found


def write(job: tuple[Path, int]) -> int:
    """Writes photograph `number`; returns its size in bytes."""
    path, number = job
    chance, sources = random.Random(number), photographs()
    source = sources[number % len(sources)]
    size = [round(side * chance.uniform(0.7, 1)) for side in source.size]
    place = [chance.randint(0, whole - side) for whole, side in zip(source.size, size, strict=True)]
    box = (*place, place[0] + size[0], place[1] + size[1])
    longest = 1000 if number % 20 == 0 else 500
    sides = [longest, round(longest * chance.uniform(0.667, 0.8))]
    if size[0] < size[1]:
        sides.reverse()
    source.crop(box).resize(sides, Image.Resampling.LANCZOS).save(path, quality=97)
    return path.stat().st_size


def write_folder(folder: Path, count: int, epoch: int) -> float:
    """Fills train/CLASS and val/CLASS with `count` files, in KB each as long as is returned.

    They are linked until there are `epoch` of them in train/.
    """
    jobs = [(folder / f"{number}.jpg", number) for number in range(count)]
    with Pool() as pool:
        size = mean(pool.map(write, jobs, chunksize=16)) / 1e3
    for split, length in (("train", epoch), ("val", min(count, VALIDATION))):
        for label in range(min(CLASSES, length)):
            (folder / split / f"{label:03}").mkdir(parents=True)
        for index in range(length):
            place = folder / split / f"{index % CLASSES:03}" / f"{index}.jpg"
            place.hardlink_to(jobs[index % count][0])
    return size


# Loading alone


def load(folder: Path, args: Namespace) -> dict[str, list[float]]:
    """Images/s of each loader in each round."""
    sets = {
        "usual (PIL)": usual_datasets(folder)[0],
        "--decode cpu": project_datasets(folder)[0],
    }
    loaders = {
        key: DataLoader(
            dataset, 50, num_workers=args.workers, persistent_workers=True, collate_fn=collate
        )
        for key, dataset in sets.items()
    }
    speeds = {key: [] for key in loaders}
    for turn in range(args.rounds + 1):
        for key, loader in loaders.items():
            started = time.perf_counter()
            count = sum(len(labels) for _, labels in loader)
            if turn:
                speeds[key].append(count / (time.perf_counter() - started))
    return speeds


# Training


def show_differences(folder: Path) -> None:
    """How far the crops of both decoders are apart, in levels of 255."""
    device = torch.device("cuda", 0)
    print("| crops | mean difference | at most | of all values within 2 |\n|---|---|---|---|")
    for name, dataset in zip(("training", "validation"), project_datasets(folder), strict=True):
        part = Subset(dataset, range(VALIDATION))
        batches = []
        for make in (
            partial(DataLoader, collate_fn=collate),
            partial(gpu_decoding.DecodingLoader, device),
        ):
            torch.manual_seed(0)
            batches.append(torch.cat([batch.cpu().int() for batch, _ in make(part, batch_size=32)]))
        difference = (batches[0] - batches[1]).abs()
        within = (difference <= 2).double().mean()
        mean_difference = difference.double().mean()
        print(f"| {name} | {mean_difference:.3f} | {difference.max()} | {within:.2%} |")


def show_speed_alone(folder: Path, batch_size: int) -> None:
    """How long the GPU takes for a batch, if it has nothing else to do."""
    from engine.data.resize import resize  # needs Triton

    device = torch.device("cuda", 0)
    dataset = project_datasets(folder)[0]
    packed, _ = gpu_decoding.pack([dataset[index] for index in range(batch_size)])
    files = packed.data.split(packed.files[:, 0].tolist())

    def decode() -> list[torch.Tensor]:
        return images.decode_jpeg(list(files), mode=images.RGB, device=device)

    decoded, flips = decode(), packed.files[:, 3].bool()

    def cut() -> torch.Tensor:
        return resize(decoded, packed.spans, flips, packed.size)

    parts = {"decode": decode, "crop": cut, "both": lambda: gpu_decoding.unpack(packed, device)}
    for name, act in parts.items():
        took = median(milliseconds(act) for _ in range(20))
        print(f"a batch of {batch_size} on the GPU alone, {name}: {took:.2f} ms", flush=True)


def milliseconds(act: Callable) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    act()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


def pack(folder: Path, out: Path, workers: int, *flags: str) -> None:
    """Packs the folder as its owner would."""
    command = [sys.executable, "-m", "engine.data.pack", folder, out, "--workers", str(workers)]
    command += flags
    subprocess.run(command, check=True, cwd=HERE.parent / "{{cookiecutter.project_slug}}")


def train(folder: Path, args: Namespace) -> list[Turn]:
    """The turns of main.py with each loader, and with --dummy."""
    packed = folder / "packed"
    pack(folder, packed, args.workers)
    script = main_py(folder, sync_bn="no")
    common = ["--arch", args.arch, "--batch-size", str(args.batch_size), "--epochs", "1000"]
    common += ["--workers", str(args.workers), "--backend", "native"]
    common += ["--compile"] if args.compile else []
    variants = {"synthetic": ("", ["--dummy"])}
    for name, (change, flags, is_packed) in FROM_FILES.items():
        if name not in args.variants:
            continue
        if args.device == "cuda" or "gpu" not in flags:
            variants[name] = (change, [*flags, "--data", str(packed if is_packed else folder)])
    contestants = []
    for number, (name, (change, flags)) in enumerate(variants.items()):
        flags = [*common, *flags, "--output", str(folder / f"run{number}")]
        path = script.with_name(f"run{number}.py")
        change = change.format(benchmarks=str(HERE))
        path.write_text(RUN.format(flags=flags, change=change))
        contestants.append(Contestant(name, Kind(path)))
    turns = []
    for turn in compete([(one, args) for one in contestants], args.rounds, folder):
        say(f"{turn.contestant}: {args.batch_size / turn.seconds:.0f} images/s")
        turns.append(turn)
    return turns


# The report


def table(speeds: dict[str, list[float]], to: str) -> str:
    """Images/s of each, in Markdown, with the ratio to that of `to`."""
    rows = [f"| loader | images/s | spread | to {to} |", "|---|---|---|---|"]
    for key, seen in speeds.items():
        ratio = f"{median(seen) / median(speeds[to]):.2f}" if to in speeds else "–"
        rows.append(f"| {key} | {median(seen):.0f} | {min(seen):.0f}–{max(seen):.0f} | {ratio} |")
    return "\n".join(rows)


def parse_args() -> Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, cores = parser.add_argument, len(os.sched_getaffinity(0))
    add("--train", action="store_true", help="on a GPU, if there is one")
    add("--cores", type=whole_number, default=cores, help="for all that a loader or training does")
    add("--workers", type=whole_number, help="default: one for each core")
    add("--images", type=whole_number, help="files (default: 400; with --train 4000)")
    add("--rounds", type=whole_number, default=5, help="turns of each")
    add("--arch", default="resnet50", help="with --train, as what follows")
    add("--batch-size", type=whole_number, default=256)
    add("--compile", action="store_true")
    add("--warmup", type=whole_number, default=20, help="steps before the first turn")
    add("--block", type=whole_number, default=30, help="timed steps of a turn")
    add(
        "--variants", nargs="+", choices=FROM_FILES, default=[*FROM_FILES], help="besides synthetic"
    )
    add("--output", type=file_name, default=HERE / "loader.csv")
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    args.workers = args.workers or args.cores
    args.images = args.images or (4000 if args.train else 400)
    args.gpus, args.device = 1, "cuda" if args.train and torch.cuda.is_available() else "cpu"
    args.settle = 2 * args.workers + 4  # each worker loads two batches ahead
    return args


def main() -> None:
    args = parse_args()
    steps = args.warmup + args.rounds * (args.settle + args.block) + 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        epoch = max(args.images, steps * args.batch_size) if args.train else args.images
        size = write_folder(folder, args.images, epoch)
        print(conditions(args))
        print(f"{args.images} files of {size:.0f} KB, {args.cores} cores, {args.workers} workers\n")
        if args.train:
            if args.device == "cuda":
                show_differences(folder)
                show_speed_alone(folder, args.batch_size)
            turns = train(folder, args)
            with args.output.open("w", newline="") as file:
                csv.writer(file).writerows([Turn._fields, *turns])
            speeds = {turn.contestant: [] for turn in turns}
            for turn in turns:
                speeds[turn.contestant].append(args.batch_size / turn.seconds)
            print("\n" + table(speeds, "synthetic"))
        else:
            print(table(load(folder, args), "usual (PIL)"))


if __name__ == "__main__":
    main()
