"""Generate a project into build/demo, train it there, and show the results.

The answers are the defaults, except for the task, which the variable TASK may name.
"""

import csv
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from cookiecutter.main import cookiecutter
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from fresh import copy_template  # noqa: E402

DEMO = ROOT / "build" / "demo"
TASK = os.environ.get("TASK") or "classification"
ROWS = 5
IMAGES = 4


def number(text):
    try:
        return f"{float(text):.6g}" if "." in text or "e" in text else text
    except ValueError:
        return text


def table(path):
    with open(path, newline="") as file:
        head, *rows = csv.reader(file)
    rows = [head] + [[number(cell) for cell in row] for row in rows[-ROWS:]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)


def generate(output: Path, answers: dict[str, str]) -> Path:
    """Generate a project into `output`, by default answers but for these; return its folder."""
    with tempfile.TemporaryDirectory() as folder:
        template = str(copy_template(Path(folder)))
        options = {"no_input": True, "default_config": True, "output_dir": str(output)}
        return Path(cookiecutter(template, extra_context=answers, **options))


def draw(project, folder):
    """Write validation digits to PNG files named by their labels; four each for segmentation."""
    folder.mkdir()
    file = np.load(project / "data" / "digits.npz")
    validation = slice(30, None, 5)
    images, labels = 15 * file["images"][validation], file["labels"][validation]
    for number in range(IMAGES):
        if TASK == "segmentation":
            chosen = range(4 * number, 4 * number + 4)
            one, two, three, four = images[chosen]
            image = np.block([[one, two], [three, four]])
        else:
            chosen = [number]
            image = images[number]
        Image.fromarray(image).save(folder / f"{'_'.join(map(str, labels[chosen]))}.png")


def run(command, folder):
    """Run a command to its end; Ctrl-C reaches it too, and is left to it."""
    signal.signal(signal.SIGINT, lambda *_: None)
    with subprocess.Popen(command, cwd=folder) as process:
        return process.wait()


def main():
    shutil.rmtree(DEMO, ignore_errors=True)
    project = generate(DEMO, {"task": TASK})
    print(f"\n$ cd {os.path.relpath(project)} && ./run.sh\n", flush=True)
    status = run(["./run.sh"], project)
    if status:
        sys.exit(status if status > 0 else 128 - status)
    (metrics,) = project.glob("runs/*/metrics.csv")
    output = metrics.parent
    print(f"\nThe end of {os.path.relpath(metrics)}:\n\n{table(metrics)}\n")
    print(f"In {os.path.relpath(output)}: {', '.join(sorted(os.listdir(output)))}")
    draw(project, DEMO / "images")
    predict = ["predict.py", os.path.relpath(output / "best.pt", project), "../images"]
    print(f"\n$ python {' '.join(predict)}\n", flush=True)
    status = run([sys.executable, *predict], project)
    if status:
        sys.exit(status)
    print()
    print(f"The project is yours to look at: {os.path.relpath(project)}")


if __name__ == "__main__":
    main()
