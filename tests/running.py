"""Running a generated project as its owner does."""

import contextlib
import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

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


def predict(project: Path, checkpoint: Path, images: Path, *flags: object) -> list[dict]:
    """What predict.py makes of images, on the CPU, as its ``--json`` has it."""
    done = subprocess.run(
        [sys.executable, "predict.py", *map(str, (checkpoint, images, *flags)), "--json"],
        cwd=project,
        env=SCREENED,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def predicted_accuracy(
    project: Path, checkpoint: Path, folder: Path, names: Sequence[str]
) -> float:
    """The share of validation's digits that predict.py finds in files, each as its name."""
    folder.mkdir()
    file = np.load(project / "data" / "digits.npz")
    labels = {}
    for image, label in zip(file["images"][::5], file["labels"][::5], strict=True):
        path = folder / f"{len(labels):03}.png"
        Image.fromarray((image * (255 / 16)).round().astype(np.uint8)).save(path)
        labels[str(path)] = names[label]
    lines = predict(project, checkpoint, folder, "--top", 1)
    assert [line["file"] for line in lines] == sorted(labels)
    return sum(line["found"][0][0] == labels[line["file"]] for line in lines) / len(lines)


def metrics(output: Path) -> list[dict[str, float]]:
    """The rows of a run's metrics.csv."""
    with (output / "metrics.csv").open() as file:
        return [{name: float(cell) for name, cell in row.items()} for row in csv.DictReader(file)]


def best(output: Path, metric: str) -> float:
    """The best value of that metric in a run."""
    return max(row[metric] for row in metrics(output))


def best_accuracy(output: Path) -> float:
    """The best val_accuracy of a run."""
    return best(output, "val_accuracy")


class Run:
    """``./run.sh`` in the background, of two processes; `flags` have an ``--output``.

    `prefix` is a command that starts it elsewhere.
    """

    def __init__(
        self, project: Path, *flags: object, prefix: Sequence[str] = (), **variables: str
    ) -> None:
        self.output = Path(flags[flags.index("--output") + 1])
        self.log = self.output.with_name(f"{self.output.name}.log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*prefix, str(project / "run.sh"), *map(str, flags)],
                env=os.environ | {"PYTHON": sys.executable, "NPROC": "2"} | variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.wait_until(lambda: not self.ranks())

    def wait_until(self, holds: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def wait_for(self, pattern: str) -> None:
        """Until the log has the pattern, or the run is over."""
        self.wait_until(lambda: re.search(pattern, self.said) or self.process.poll() is not None)

    @property
    def said(self) -> str:
        return self.log.read_text()

    def ranks(self) -> dict[int, int]:
        """The processes that train, by rank."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (folder / "cmdline").read_bytes().decode().split("\0")
                variables = (folder / "environ").read_bytes().decode().split("\0")
                is_ours = str(self.output) in words and "-m" not in words[:3]
                of_rank = [entry[5:] for entry in variables if entry.startswith("RANK=")]
                if is_ours and of_rank:
                    found.setdefault(int(of_rank[0]), int(folder.name))
        return found

    def end(self, seconds: float = 60) -> tuple[int, float]:
        """The exit status, and how long it took."""
        began = time.monotonic()
        return self.process.wait(seconds), time.monotonic() - began


def flat(value: dict | list | tuple, name: str = "") -> Iterator[tuple[str, object]]:
    """The entries of nested containers, with their paths."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, entry in entries:
        if isinstance(entry, dict | list | tuple):
            yield from flat(entry, f"{name}/{key}")
        else:
            yield f"{name}/{key}", entry


def assert_same_run(output: Path, whole: Path) -> None:
    """The same to the last bit: weights, moments, random numbers, and what was reported."""
    ours, theirs = (
        dict(flat(torch.load(folder / "last.pt", weights_only=True))) for folder in (output, whole)
    )
    ours.pop("/optimizer/param_groups/0/differentiable", None)  # torch adds it when it loads
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        same = torch.equal(ours[name], value) if torch.is_tensor(value) else ours[name] == value
        assert same, name
    rows = [
        [
            {name: row[name] for name in row if name != "images_per_second"}
            for row in metrics(folder)
        ]
        for folder in (output, whole)
    ]
    assert rows[0] == rows[1]
