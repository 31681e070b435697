"""Write the fixtures of test_checkpoints_0_9.py: checkpoints of version 0.9, and their results.

    OMP_NUM_THREADS=1 python tests/training/make_checkpoints_0_9.py

Each run in RUNS generates a project from the template at COMMIT, replaces the project's model by a
tiny one (tiny_model_TASK.py), and trains it on the digits with two processes on the CPU. The first
half of the run stops in the middle of the second epoch; its last.pt is NAME.pt. In the second half,
the same project resumes NAME.pt in a new output folder and trains into the third epoch; its final
weights are NAME.expected.pt. runs.json holds the answers, the flags, the other results of the
second half, and the environment.
"""

import csv
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import torch
from cookiecutter.main import cookiecutter

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent / "fixtures" / "checkpoints_0_9"
COMMIT = "ffd758680d5753b521b979a8aa5a79f032ba8b47"  # the last commit of version 0.9
FIRST_STEPS, STEPS = 16, 24  # of 11 steps per epoch
FLAGS = ["--batch-size", "64", "--epochs", "3"]
ADAM, SGD = ["--lr", "0.01"], ["--lr", "0.1"]
EMA = ["--ema", "0.9"]

RUNS = {
    "classification_O0": ({"opt_level": "O0"}, ADAM + EMA),
    "classification_O1": ({"opt_level": "O1"}, ADAM),
    "classification_O2": ({"opt_level": "O2"}, ADAM + EMA),
    "classification_O3": ({"opt_level": "O3"}, ADAM),
    "classification_O4": ({"opt_level": "O4"}, ADAM),
    "classification_O5": ({"opt_level": "O5"}, ADAM),
    "classification_O2_sgd": ({"opt_level": "O2", "fused_adam": False}, SGD),
    "segmentation_O1": ({"task": "segmentation", "opt_level": "O1"}, ADAM),
    "contrastive_O1": ({"task": "contrastive", "opt_level": "O1"}, ADAM + EMA),
}
"""The answers that differ from the defaults, and flags of both halves in addition to FLAGS."""


def append_tiny_model(project: Path, answers: dict[str, object]) -> None:
    """Replace the model of a generated project by the tiny one of its task."""
    snippet = FOLDER / f"tiny_model_{answers.get('task', 'classification')}.py"
    with (project / "task.py").open("a") as file:
        file.write("\n\n" + snippet.read_text())


def environment() -> dict[str, str]:
    """Return the versions and settings that decide the exact bits of a result on the CPU."""
    cpu = "unknown"
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        fields = dict(line.replace("\t", "").partition(":")[::2] for line in lines)
        names = ("vendor_id", "cpu family", "model")
        cpu = " ".join(fields.get(name, "").strip() for name in names)
    return {
        "torch": torch.__version__,
        "cpu": cpu,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
    }


def results(output: Path) -> tuple[dict[str, object], dict[str, object]]:
    """Return the weights (``model`` and, if any, ``ema``) and the other results of a run."""
    state = torch.load(output / "last.pt", weights_only=True)
    weights = {name: state[name] for name in ("model", "ema") if name in state}
    others = {name: state[name] for name in ("epoch", "step", "samples", "amp")}
    with (output / "metrics.csv").open() as file:
        others["metrics"] = [
            {name: float(value) for name, value in row.items() if name != "images_per_second"}
            for row in csv.DictReader(file)
        ]
    return weights, others


def train(project: Path, *flags: object) -> None:
    """Train with two processes on the CPU."""
    command = [project / "run.sh", *map(str, flags)]
    variables = {"PYTHON": sys.executable, "NPROC": "2", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, env=os.environ | variables, check=True)


def make(template: Path, folder: Path, name: str) -> dict[str, object]:
    """Write the two files of the run `name`; return its entry in runs.json."""
    answers, own_flags = RUNS[name]
    flags = [*FLAGS, *own_flags]
    project = Path(
        cookiecutter(
            str(template),
            no_input=True,
            default_config=True,
            extra_context=answers,
            output_dir=str(folder / name),
        )
    )
    append_tiny_model(project, answers)
    first, second = folder / name / "first", folder / name / "second"
    train(project, *flags, "--steps", FIRST_STEPS, "--output", first)
    checkpoint = FOLDER / f"{name}.pt"
    shutil.copyfile(first / "last.pt", checkpoint)
    flags += ["--steps", str(STEPS)]
    train(project, *flags, "--resume", checkpoint, "--output", second)
    weights, others = results(second)
    torch.save(weights, FOLDER / f"{name}.expected.pt")
    return {"answers": answers, "flags": flags, "expected": others}


def main() -> None:
    """Write all fixtures."""
    if os.environ.get("OMP_NUM_THREADS") != "1":
        sys.exit("OMP_NUM_THREADS must be 1, as in the tests")
    with tempfile.TemporaryDirectory() as temporary:
        template, folder = Path(temporary, "template"), Path(temporary, "runs")
        archive = subprocess.run(
            ["git", "archive", COMMIT], cwd=ROOT, stdout=subprocess.PIPE, check=True
        )
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(template, filter="data")
        runs = {name: make(template, folder, name) for name in RUNS}
    record = {"commit": COMMIT, "environment": environment(), "runs": runs}
    (FOLDER / "runs.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
