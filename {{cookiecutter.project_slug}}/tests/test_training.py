"""The training loop as it is, on two CPU processes, through run.sh."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROJECT = Path(__file__).parent.parent
SCREENED = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "NPROC": "2"}
ARCH = ("--arch", "shufflenet_v2_x0_5")  # small, with batch norm, without dropout
STEPS_PER_EPOCH = 22  # 1437 digits, 2 processes, batch 32


def run(*flags, program="main.py", **variables):
    """run.sh with `flags`; `program` stands in for main.py."""
    script = (PROJECT / "run.sh").read_text().replace("main.py", program)
    command = ["sh", "-c", script, str(PROJECT / "run.sh"), *map(str, flags)]
    done = subprocess.run(
        command, env=SCREENED | variables, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def rows(output):
    with (output / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two epochs."""
    output = tmp_path_factory.mktemp("runs") / "whole"
    done = run(*ARCH, "--epochs", 2, "--output", output)
    return output, done


def test_a_run_leaves_what_it_promises(whole):
    output, done = whole
    assert {path.name for path in output.iterdir()} >= {"last.pt", "metrics.csv", "config.json"}
    assert [(row["epoch"], row["step"]) for row in rows(output)] == [("1", "22"), ("2", "44")]
    assert json.loads((output / "config.json").read_text())["arch"] == "shufflenet_v2_x0_5"
    # Rank 0 alone speaks: each line is there once.
    lines = done.stdout.splitlines()
    assert len(lines) == len(set(lines))
    assert lines[0].startswith("2 processes on the CPU (gloo)")


def test_a_checkpoint_holds_tensors_and_plain_types_only(whole):
    state = torch.load(whole[0] / "last.pt", weights_only=True)
    assert state.keys() >= {"model", "optimizer", "amp", "epoch", "step"}
    assert not [name for name in state["model"] if name.startswith("module.")]
    assert {tensor.dtype for tensor in state["model"].values()} <= {torch.float32, torch.int64}
    assert (state["epoch"], state["step"]) == (2, 44)


@pytest.mark.parametrize("stop", [7, 30])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(whole, tmp_path, stop):
    run(*ARCH, "--epochs", 2, "--steps", stop, "--output", tmp_path)
    run(*ARCH, "--epochs", 2, "--resume", "auto", "--output", tmp_path)
    resumed, undisturbed = rows(tmp_path)[-1], rows(whole[0])[-1]
    for column in ("epoch", "step", "val_loss", "val_accuracy", "lr", "loss_scale"):
        assert resumed[column] == undisturbed[column], column


RECORDER = """
import json, os, runpy, sys
from pathlib import Path
sys.path.insert(0, {project!r})
import task
seen = []
read = task.Digits.__getitem__
def recording(self, index):
    seen.append([self.labels.numel(), int(index)])
    return read(self, index)
task.Digits.__getitem__ = recording
runpy.run_path({main!r}, run_name="__main__")
Path({folder!r}, os.environ["RANK"] + ".json").write_text(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def reads(tmp_path_factory):
    """Which samples each of two ranks read, epoch by epoch: {split: [[indices], [indices]]}."""
    folder = tmp_path_factory.mktemp("reads")
    program = PROJECT / "recorder_of_the_tests.py"
    names = {"project": str(PROJECT), "main": str(PROJECT / "main.py"), "folder": str(folder)}
    program.write_text(RECORDER.format(**names))
    try:
        run(*ARCH, "--epochs", 2, "--output", folder / "run", program=program.name)
    finally:
        program.unlink()
    by_rank = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    reads = {
        split: [[index for size, index in seen if size == total] for seen in by_rank]
        for split, total in (("train", 1437), ("val", 360))
    }
    for indices in reads["train"]:
        assert indices[:2] == [0, 1]  # on which the model is tried out
        del indices[:2]
    return reads


def test_shards_are_disjoint_and_complete(reads):
    first, second = (set(indices[: 32 * STEPS_PER_EPOCH]) for indices in reads["train"])
    assert not first & second
    assert len(first) == len(second) == 32 * STEPS_PER_EPOCH  # less the last short batch


def test_the_order_changes_with_the_epoch(reads):
    for indices in reads["train"]:
        epochs = indices[: 32 * STEPS_PER_EPOCH], indices[-32 * STEPS_PER_EPOCH :]
        assert epochs[0] != epochs[1]


def test_validation_reads_each_sample_once(reads):
    first, second = (indices[: len(indices) // 2] for indices in reads["val"])
    assert sorted(first + second) == list(range(360))


@pytest.mark.parametrize("flags", [["--help"], ["--opt-level", "01"]], ids=["help", "error"])
def test_the_command_line_answers_once(flags):
    done = subprocess.run(
        [str(PROJECT / "run.sh"), *flags], env=SCREENED, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == (0 if flags == ["--help"] else 2)
    assert (done.stdout + done.stderr).count("--opt-level") == (2 if flags == ["--help"] else 1)
