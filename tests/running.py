"""Running a generated project as its owner does."""

import csv
import os
import subprocess
import sys
from pathlib import Path

SCREENED = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
"""The environment of a run that sees no GPU."""


def run(
    project: Path, *flags: object, nproc: int = 2, timeout: float = 300, **variables: str
) -> subprocess.CompletedProcess:
    """``./run.sh`` with the tests' own Python; its output is text.

    With ``nproc=0`` it is ``python main.py``: one process, and no launcher to start first.
    """
    command = [str(project / "run.sh")] if nproc else [sys.executable, str(project / "main.py")]
    return subprocess.run(
        [*command, *map(str, flags)],
        cwd=project,
        env=os.environ | {"PYTHON": sys.executable, "NPROC": str(nproc)} | variables,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def metrics(output: Path) -> list[dict[str, float]]:
    """The rows of a run's metrics.csv."""
    with (output / "metrics.csv").open() as file:
        return [{name: float(cell) for name, cell in row.items()} for row in csv.DictReader(file)]


def best_accuracy(output: Path) -> float:
    """The best val_accuracy of a run."""
    return max(row["val_accuracy"] for row in metrics(output))
