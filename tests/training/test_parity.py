"""benchmarks/parity.py: what it measures on GPUs, and on the CPU whether it can tell."""

import csv
import subprocess
import sys

import pytest
from fresh import ROOT
from running import SCREENED
from test_gpu import GPUS, needs_apex

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("short")]
BENCHMARKS = ROOT / "benchmarks"


def start(*command, timeout=180, **options):
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=timeout,
        **options,
    )


def rows(done):
    """The cells of the table of a run."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


@pytest.mark.gpu
@pytest.mark.apex
@needs_apex
@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
def test_apex_native_trains_as_real_apex_does(tmp_path):
    gpus = (1, 2)[:GPUS]
    flags = ("--quick", "--gpus", *gpus, "--output", tmp_path)
    done = start(BENCHMARKS / "parity.py", *flags, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(rows(done)) == 3 * 2 * len(gpus) * 4  # models, optimizers, GPUs, levels
    for row in rows(done):
        assert row[-1].startswith("yes"), f"other loss scales: {row}"


@pytest.mark.weekly
def test_parity_benchmark_detects_differences(tmp_path):
    small = ("--models", "transformer", "--optimizers", "SGD", "--gpus", 1, "--steps", 3)
    runs = ("native", "native-other", "native")
    flags = ("--device", "cpu", "--variants", *runs, *small, "--output", tmp_path)
    done = start(BENCHMARKS / "parity.py", *flags, env=SCREENED)
    assert done.returncode == 0, done.stderr
    for row, level in zip(rows(done), ("O0", "O1", "O2", "O3"), strict=True):
        name, optimizer, gpus, of, loss, _, gradient, of_band, skipped, scales = row
        assert (name, optimizer, gpus, of) == ("transformer", "SGD", "1", level)
        assert (loss, gradient, skipped, scales) == ("0", "0", "0, 0, 0", "yes, yes")
        assert 0 < float(of_band) < (1e-5 if level == "O0" else 1e-1)
    with (tmp_path / "parity.csv").open() as file:
        lines = list(csv.DictReader(file))
    curves = {
        run: [{**line, "variant": ""} for line in lines if line["variant"] == run]
        for run in ("native", "native 2")
    }
    assert len(curves["native"]) == 4 * 3
    assert curves["native"] == curves["native 2"]
    assert (tmp_path / "parity.png").stat().st_size > 10_000


JUDGE = """
import torch
from parity import table

def run(gradient):
    gradient = torch.tensor([gradient])
    return {"loss": torch.ones(1), "scale": [1.0], "skipped": [0], "gradient": gradient}

for level, band, judged in (
    ("O0", 1.0, 1.0 + 5e-6),
    ("O0", 1.0, 1.0 + 5e-5),
    ("O1", 1.0, 1.0 + 5e-5),
    ("O1", 1.02, 1.01),
    ("O1", 1.01, 1.02),
    ("O1", 1.0, float("nan")),
):
    runs = {"apex": run(1.0), "apex-other": run(band), "native": run(judged)}
    print(table({("resnet18", "SGD", 1, level): runs}, list(runs))[1])
del runs["native"]
print(table({("resnet18", "SGD", 1, "O1"): runs}, ["apex", "apex-other", "native"])[1])
for judged in (1.0035, 1.0045):  # with SyncBN
    runs = {"apex": run(1.0), "apex-other": run(1.001), "native": run(judged)}
    print(table({("resnet18-silu", "SGD", 2, "O1"): runs}, list(runs))[1])
"""


def test_gradient_tolerance_is_the_limit_or_the_band():
    done = start("-c", JUDGE, env=SCREENED, cwd=BENCHMARKS)
    near = [True, False, True, True, False, False, False, True, False]
    assert done.stdout.split() == list(map(str, near))


def test_parity_benchmark_without_apex_is_an_error(tmp_path):
    (tmp_path / "apex.py").write_text("raise ImportError('not here')")
    (tmp_path / "amp_C.py").touch()
    done = start(BENCHMARKS / "parity.py", env=SCREENED | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2
    assert done.stderr == "error: real Apex can't be imported here (ImportError: not here)\n"
