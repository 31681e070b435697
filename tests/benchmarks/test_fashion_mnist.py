"""benchmarks/fashion_mnist.py on the CPU: few images, a small model, few epochs."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import pytest
from engine.data import idx
from fresh import ROOT
from idx_files import write_idx
from running import SCREENED

SOURCE = Path("/usr/share/datasets/fashion-mnist")  # Debian's dataset-fashion-mnist
COUNTS = {True: 1000, False: 500}  # by whether the images are for training

pytestmark = [
    pytest.mark.weekly,
    pytest.mark.skipif(not idx.is_idx(SOURCE), reason="dataset-fashion-mnist is not installed"),
]


@pytest.fixture
def subset(tmp_path: Path) -> Path:
    """The first images of both sets."""
    folder = tmp_path / "subset"
    folder.mkdir()
    for train, count in COUNTS.items():
        for kind in (idx.IMAGES, idx.LABELS):
            values = np.array(idx.read_file(SOURCE, train, kind)[:count])
            write_idx(folder / f"{idx.SPLITS[train]}-{kind}.gz", values)
    return folder


def test_recipes_of_fashion_mnist_on_a_subset(subset: Path, tmp_path: Path) -> None:
    """Two seeds; a chance accuracy is 0.1."""
    small = "--arch wrn10_1 --epochs 4 --eval-every 2 --ema 0.9 --batch-size 32 --workers 1"
    small += " --scale-lr 32 --lr 0.01"
    output = tmp_path / "results.csv"
    flags = ("--recipes", "fashion_mnist_wrn", "--opt-levels", "O0", "--seeds", "2")
    flags += ("--data", subset, "--output", output, "--flags", small)
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "fashion_mnist.py", *flags],
        env=SCREENED,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with output.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["seed"] for row in rows] == ["0", "1"]
    accuracies = [float(row["val_accuracy"]) for row in rows]
    assert min(accuracies) > 0.3
    for row in rows:
        assert 0.3 < float(row["val_accuracy_ema"]) <= float(row["best"])
        assert float(row["val_accuracy"]) <= float(row["best"])
    printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["val_accuracy"] for row in printed] == accuracies
    table = [line for line in done.stdout.splitlines() if line.startswith("| fashion_mnist_wrn")]
    expected = f"{mean(accuracies):.4f} ± {stdev(accuracies):.4f}"
    assert len(table) == 1 and f"| O0 | 2 | {expected} |" in table[0]
