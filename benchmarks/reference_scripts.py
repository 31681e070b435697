"""The recipe fashion_mnist_resnet18 by main.py and by the scripts of torchvision and timm.

    python benchmarks/reference_scripts.py --torchvision vision/references/classification \\
        --timm pytorch-image-models/train.py --gpus 3 --seeds 0 1 2

Model, crops and values of the recipe (SGD) are the same; the scripts read the images as PNG files
and use their own loaders, precision (fp16) and training loops. Each runs in one process on a GPU
and a share of the cores of its own, as many at the same time as there are GPUs. The accuracy is
that of the last epoch, and the seconds are those of the whole command.
"""

import argparse
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from queue import Queue

from fashion_mnist import DATA, generate
from flags import file_name, whole_number
from PIL import Image

HERE = Path(__file__).resolve().parent
Job = tuple[str, int, list[str], Path]  # script, seed, command, its output folder
MEAN, STD = ("0.485", "0.456", "0.406"), ("0.229", "0.224", "0.225")
# The scripts' models and crops are replaced: they have neither for images of 28 pixels.
PREPARE = """
import runpy, sys
sys.path[:0] = [{folder!r}, {project!r}]
import torchvision
from torchvision.transforms import transforms
import task
crop = lambda size, **_: transforms.RandomCrop(size, padding=4)
model = task.build_model("resnet18_cifar", 10)  # the seed of its weights is not --seed
build = lambda *_, **__: model
{replace}
sys.argv[1:] = {flags!r}
runpy.run_path({script!r}, run_name="__main__")
"""
OF_TORCHVISION = "transforms.RandomResizedCrop = crop; torchvision.models.get_model = build"
OF_TIMM = """
import timm.data.transforms_factory as factory
import timm.models
factory.RandomResizedCropAndInterpolation, timm.models.create_model = crop, build
"""


def write_images(project: Path, data: Path, folder: Path) -> None:
    """Write the images of the IDX files as PNG files, in a folder for each class."""
    sys.path.insert(0, str(project.resolve()))
    from engine.data import idx

    for split in ("train", "val"):
        images, labels = (
            idx.read_file(data, split == "train", kind) for kind in (idx.IMAGES, idx.LABELS)
        )
        for label in range(10):
            (folder / split / str(label)).mkdir(parents=True)
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            Image.fromarray(image).save(folder / split / str(label) / f"{number}.png")


def commands(
    args: argparse.Namespace, project: Path, images: Path, output: Path, seed: int
) -> dict[str, list[str]]:
    """Return the command of each script."""
    recipe = json.loads((project / "recipes/fashion_mnist_resnet18.json").read_text())
    epochs = str(args.epochs or recipe["epochs"])
    every = str(recipe["eval_every"])
    workers = str(args.workers)
    shared = ["--epochs", epochs, "--lr", str(recipe["lr"]), "--momentum", str(recipe["momentum"])]
    shared += ["--weight-decay", str(recipe["weight_decay"]), "--workers", workers]
    shared += ["--model", "resnet18_cifar", "--amp", "--batch-size", str(recipe["batch_size"])]
    tv = ["--data-path", images, "--val-resize-size", 28, "--val-crop-size", 28]
    tv += ["--train-crop-size", 28, "--lr-scheduler", "cosineannealinglr", "--lr-warmup-epochs"]
    tv += [recipe["warmup_epochs"], "--lr-warmup-method", "linear", "--random-erase"]
    tv += [recipe["random_erasing"], "--output-dir", output]
    timm = ["--data-dir", images, "--train-split", "train", "--val-split", "val"]
    timm += ["--num-classes", 10, "--input-size", 3, 28, 28, "--mean", *MEAN, "--std", *STD]
    timm += ["--crop-pct", 1.0, "--opt", "momentum", "--sched", "cosine", "--sched-on-updates"]
    timm += ["--warmup-epochs", recipe["warmup_epochs"], "--warmup-lr", 0, "--color-jitter", 0]
    timm += ["--reprob", recipe["random_erasing"], "--remode", "const", "--smoothing", 0]
    timm += ["--channels-last", "--val-interval", every, "--checkpoint-hist", 1]
    timm += ["--output", output, "--experiment", "timm", "--seed", str(seed)]
    own = ["--config", "recipes/fashion_mnist_resnet18.json", "--data", args.data.resolve()]
    own += ["--epochs", epochs, "--workers", workers]
    own += ["--seed", seed, "--output", output / "own"]
    result = {"main.py": [sys.executable, "main.py", *map(str, own)]}
    scripts = {
        "torchvision": (args.torchvision and args.torchvision / "train.py", OF_TORCHVISION, tv),
        "timm": (args.timm, OF_TIMM, timm),
    }
    for name, (script, replace, flags) in scripts.items():
        if script:
            path = script.resolve()
            code = PREPARE.format(
                folder=str(path.parent),
                project=str(project),
                replace=replace,
                flags=[*shared, *map(str, flags)],
                script=str(path),
            )
            result[name] = [sys.executable, "-c", code]
    return result


def accuracy(name: str, output: Path, text: str) -> float:
    """Return the accuracy of the last validation."""
    if name == "torchvision":
        return float(re.findall(r"Test: .*Acc@1 ([\d.]+)", text)[-1]) / 100
    path = output / ("own/metrics.csv" if name == "main.py" else "timm/summary.csv")
    with path.open() as file:
        last = list(csv.DictReader(file))[-1]
    return float(last["val_accuracy"]) if name == "main.py" else float(last["eval_top1"]) / 100


def run(job: Job, project: Path, gpu: int, num_gpus: int) -> tuple:
    """Return name, seed, accuracy and seconds of a script, run on a GPU and a share of the cores.

    The accuracy is nan if the script fails, which does not end the others.
    """
    name, seed, command, output = job
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // num_gpus)
    command = ["taskset", "-c", ",".join(map(str, cores[gpu * share :][:share])), *command]
    variables = {"CUDA_VISIBLE_DEVICES": str(gpu), "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    done = subprocess.run(
        command,
        cwd=project,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - start
    try:
        done.check_returncode()
        return name, seed, accuracy(name, output, done.stdout), seconds
    except (subprocess.CalledProcessError, OSError, LookupError):
        print(f"{name} failed:\n{done.stdout[-3000:]}", file=sys.stderr)
        return name, seed, float("nan"), seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--torchvision", type=Path, metavar="DIR", help="references/classification")
    add("--timm", type=Path, metavar="FILE", help="timm's train.py")
    add("--data", type=Path, default=DATA, metavar="DIR", help="folder of the IDX files")
    add("--epochs", type=whole_number, help="default: the recipe's")
    add("--workers", type=whole_number, default=12)
    add("--seeds", type=int, nargs="+", default=[0], metavar="N")
    add("--gpus", type=whole_number, default=1)
    add("--project", type=Path, metavar="DIR", help="a generated project (default: a new one)")
    add("--output", type=file_name, default=HERE / "reference_scripts.csv", metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        project = args.project or generate(name, ["fused_adam=false"])
        write_images(project, args.data, folder / "images")
        jobs: list[Job] = []
        for seed in args.seeds:
            output = folder / str(seed)
            found = commands(args, project.resolve(), folder / "images", output, seed)
            jobs += [(script, seed, command, output) for script, command in found.items()]
        free: Queue[int] = Queue()
        for gpu in range(args.gpus):
            free.put(gpu)

        def run_on_free_gpu(job: Job) -> tuple:
            gpu = free.get()
            try:
                return run(job, project, gpu, args.gpus)
            finally:
                free.put(gpu)

        with ThreadPoolExecutor(args.gpus) as pool:
            rows = list(pool.map(run_on_free_gpu, jobs))
    print(f"{date.today()}\n\n| script | seed | accuracy | seconds |\n|---|---|---|---|")
    for script, seed, value, seconds in rows:
        print(f"| {script} | {seed} | {value:.4f} | {seconds:.0f} |")
    is_new = not args.output.exists()
    with args.output.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(("date", "script", "seed", "accuracy", "seconds"))
        for script, seed, value, seconds in rows:
            row = (date.today(), script, seed, f"{value:.4f}", f"{seconds:.1f}")
            writer.writerow(row)


if __name__ == "__main__":
    main()
