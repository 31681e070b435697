"""Images a second out of JPEG files: the project's loader and the one of the usual scripts.

    python benchmarks/loader.py [--workers 2] [--images 400]

Both read the same folder with torch's DataLoader, as training does: crop to 224² and flip. The
usual one, torchvision's reference script, has PIL and torchvision.transforms, and normalises; the
project leaves that to the training device and sends uint8. The files
are cut from the two photographs that scikit-learn carries, about 500 × 375 and 55 KB each, as
ImageNet's are when scaled down; they are in the page cache, and so are no test of a disk. The two
take turns, a whole epoch each, after one that is not timed. Prints a table.
"""

import argparse
import os
import platform
import random
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from statistics import median

import torch
import torchvision
from PIL import Image
from sklearn.datasets import load_sample_images
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "{{cookiecutter.project_slug}}"))
sys.dont_write_bytecode = True  # cookiecutter would take the caches for a part of the template
import task  # noqa: E402

USUAL = transforms.Compose(
    [
        transforms.RandomResizedCrop(224),
        transforms.RandomHorizontalFlip(),
        transforms.PILToTensor(),
        transforms.ConvertImageDtype(torch.float),
        transforms.Normalize(task.MEAN, task.STD),
    ]
)


def write_photographs(folder: Path, count: int) -> float:
    """Fills train/CLASS and val/CLASS; returns the mean size of a file in KB."""
    photographs = [Image.fromarray(image) for image in load_sample_images().images]
    chance, sizes = random.Random(0), []
    for index in range(count):
        source = photographs[index % 2]
        left, top = chance.randrange(0, 60), chance.randrange(0, 40)
        cut = source.crop((left, top, left + 580, top + 385)).resize((500, 375))
        for part in ("train", "val") if index < 2 else ("train",):
            path = folder / part / str(index % 2) / f"{index}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            cut.save(path, quality=92)
        sizes.append(path.stat().st_size)
    return sum(sizes) / count / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        size = write_photographs(Path(name), args.images)
        project, _ = task.build_datasets(Path(name))
        usual = ImageFolder(Path(name) / "train", USUAL)
        loaders = {
            key: DataLoader(dataset, 50, num_workers=args.workers, persistent_workers=True)
            for key, dataset in (("usual (PIL)", usual), ("the project's", project))
        }
        speeds = {key: [] for key in loaders}
        for turn in range(args.rounds + 1):
            for key, loader in loaders.items():
                started = time.perf_counter()
                images = sum(len(images) for images, _ in loader)
                if turn:
                    speeds[key].append(images / (time.perf_counter() - started))
    print(
        f"{date.today()}, {args.workers} workers, Python {platform.python_version()}, torch "
        f"{torch.__version__}, torchvision {torchvision.__version__}, {args.images} files of "
        f"{size:.0f} KB, {args.rounds} epochs\n\n"
        "| loader | images/s | spread | to the usual |\n|---|---|---|---|"
    )
    usual = median(speeds["usual (PIL)"])
    for key, seen in speeds.items():
        spread = f"{min(seen):.0f}–{max(seen):.0f}"
        print(f"| {key} | {median(seen):.0f} | {spread} | {median(seen) / usual:.2f} |")


if __name__ == "__main__":
    main()
