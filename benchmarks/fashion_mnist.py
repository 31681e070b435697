"""Accuracy and time of the recipes for Fashion-MNIST, over seeds and precisions.

    apt-get install dataset-fashion-mnist
    python benchmarks/fashion_mnist.py
    python benchmarks/fashion_mnist.py --recipes fashion_mnist_resnet18 --seeds 2
    python benchmarks/fashion_mnist.py --answers fused_adam=false     # SGD
    python benchmarks/fashion_mnist.py --flags "--steps 4 --batch-size 16 --eval-every 1"

Each run is ``python main.py --config recipes/NAME.json`` of a generated project, in one process.
The accuracy is that on the 10,000 test images after the last epoch, and with --ema also that of the
average of the weights. "best" is the highest of all validations: the result for WRN-28-10 that the
data set's authors list is such a one, by the script of its paper. The seconds are those of the
whole command: start, training, validation and checkpoints. Writes a row for each run to --output as
soon as it is there, and prints a table of means and standard deviations.
"""

import argparse
import csv
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import mean, stdev

from flags import file_name, whole_number

HERE = Path(__file__).resolve().parent
ACCURACIES = ("val_accuracy", "val_accuracy_ema", "best")
FIELDS = ("recipe", "opt_level", "seed", *ACCURACIES, "seconds", "images_per_second", "device")
DATA = Path("/usr/share/datasets/fashion-mnist")
LAST_LINES = 15


def parse_args() -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    recipes = ["fashion_mnist_resnet18", "fashion_mnist_wrn"]
    add("--recipes", nargs="+", default=recipes, metavar="NAME", help="files of recipes/")
    add("--opt-levels", nargs="+", default=["O1", "O4"], metavar="LEVEL")
    add("--seeds", type=whole_number, default=5, metavar="N", help="seeds 0 to N - 1")
    add("--data", type=Path, default=DATA, metavar="DIR", help="folder of the IDX files")
    add("--project", type=Path, metavar="DIR", help="a generated project (default: a new one)")
    add("--answers", nargs="+", default=[], metavar="NAME=VALUE", help="of the new project")
    add("--flags", default="", help="further flags of main.py, such as '--epochs 2'")
    add("--output", type=file_name, default=HERE / "fashion_mnist.csv", metavar="FILE")
    args = parser.parse_args()
    if args.project and args.answers:
        parser.error("--answers are for a new project, not for that of --project")
    return args


def generate(folder: str, answers: list[str]) -> Path:
    """Generate a project with the default answers, except for `answers`, into `folder`."""
    from cookiecutter.main import cookiecutter  # which --project does without

    sys.path.insert(0, str(HERE.parent / "tests"))
    from fresh import copy_template

    template = Path(folder, "template")
    template.mkdir()
    extra = dict(answer.split("=", 1) for answer in answers)
    options = {"no_input": True, "default_config": True, "output_dir": folder}
    return Path(cookiecutter(str(copy_template(template)), extra_context=extra, **options))


def train(project: Path, args: argparse.Namespace, run: tuple[str, str, int]) -> dict:
    """Return the row of one run."""
    recipe, opt_level, seed = run
    with tempfile.TemporaryDirectory() as output:
        flags = ["--config", f"recipes/{recipe}.json", "--opt-level", opt_level, "--seed", seed]
        flags += ["--data", args.data.resolve(), "--output", output, *shlex.split(args.flags)]
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "main.py", *map(str, flags)],
            cwd=project,
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - start
        if done.returncode:
            sys.exit("\n".join(done.stdout.splitlines()[-LAST_LINES:]))
        with Path(output, "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
    speeds = sorted(float(row["images_per_second"]) for row in rows)
    measured = [{key: float(row[key]) for key in ACCURACIES if row.get(key)} for row in rows]
    return {
        "recipe": recipe,
        "opt_level": opt_level,
        "seed": seed,
        **measured[-1],
        "best": max(max(row.values()) for row in measured if row),
        "seconds": round(seconds, 1),
        "images_per_second": round(speeds[len(speeds) // 2]),
        "device": done.stdout.splitlines()[0],
    }


def table(rows: list[dict]) -> str:
    """Return a table of the mean and the standard deviation of each recipe and precision."""
    titles = ("recipe", "opt_level", "seeds", "accuracy", "average", "best", "seconds", "images/s")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for recipe, level in dict.fromkeys((row["recipe"], row["opt_level"]) for row in rows):
        group = [row for row in rows if (row["recipe"], row["opt_level"]) == (recipe, level)]
        accuracies = [spread([row[key] for row in group if key in row]) for key in ACCURACIES]
        seconds = mean(row["seconds"] for row in group)
        speed = mean(row["images_per_second"] for row in group)
        cells = (recipe, level, len(group), *accuracies, f"{seconds:.1f}", f"{speed:.0f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    """Return the mean of `values`, with their standard deviation if there are several."""
    if not values:
        return "-"
    deviation = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
    return f"{mean(values):.4f}{deviation}"


def main() -> None:
    """Train all runs one after the other; write and print their results."""
    args = parse_args()
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as folder, args.output.open("w", newline="") as file:
        project = args.project or generate(folder, args.answers)
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        for run in product(args.recipes, args.opt_levels, range(args.seeds)):
            rows.append(train(project, args, run))
            writer.writerow(rows[-1])
            file.flush()
            print(json.dumps(rows[-1]), flush=True)
    print(f"\n{table(rows)}")


if __name__ == "__main__":
    main()
