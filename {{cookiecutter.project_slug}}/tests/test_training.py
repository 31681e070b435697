"""The training loop as it is, on two CPU processes, through run.sh."""

import csv
import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch

import task

PROJECT = Path(__file__).parent.parent
# % if ddp == "dataparallel"
PROCESSES = 1
# % else
PROCESSES = 2
# % endif
NPROC = {"NPROC": str(PROCESSES)}
SCREENED = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""} | NPROC
BATCH_SIZE = 64
# Small, with batch norm, without dropout.
# % if task == "segmentation"
ARCH = ("--arch", "unet", "--batch-size", BATCH_SIZE)
# % else
ARCH = ("--arch", "shufflenet_v2_x0_5", "--batch-size", BATCH_SIZE)
# % endif
TRAIN, VAL = map(len, task.build_datasets(None))
STEPS_PER_EPOCH = TRAIN // PROCESSES // BATCH_SIZE
SHARD = BATCH_SIZE * STEPS_PER_EPOCH
MIDDLE = STEPS_PER_EPOCH + STEPS_PER_EPOCH // 2


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


RECORDER = """
import json, os, runpy, sys
from pathlib import Path
sys.path.insert(0, {project!r})
import task
seen = []
read = task.Digits.__getitem__
def recording(self, index):
    seen.append([len(self), int(index)])
    return read(self, index)
task.Digits.__getitem__ = recording
runpy.run_path({main!r}, run_name="__main__")
Path({folder!r}, os.environ["RANK"] + ".json").write_text(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two epochs: its folder, what it printed, and the samples that each rank read."""
    folder = tmp_path_factory.mktemp("runs")
    program = PROJECT / "recorder_of_the_tests.py"
    names = {"project": str(PROJECT), "main": str(PROJECT / "main.py"), "folder": str(folder)}
    program.write_text(RECORDER.format(**names))
    try:
        flags = (*ARCH, "--epochs", 2, "--save-every", MIDDLE, "--keep", 3)
        done = run(*flags, "--output", folder / "run", program=program.name)
    finally:
        program.unlink()
    seen = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(PROCESSES)]
    return folder / "run", done, seen


def test_a_run_leaves_what_it_promises(whole):
    output, done, _ = whole
    assert {path.name for path in output.iterdir()} >= {"last.pt", "metrics.csv", "config.json"}
    steps = [(int(row["epoch"]), int(row["step"])) for row in rows(output)]
    assert steps == [(1, STEPS_PER_EPOCH), (2, 2 * STEPS_PER_EPOCH)]
    assert json.loads((output / "config.json").read_text())["arch"] == ARCH[1]
    # Rank 0 alone speaks: each line is there once.
    lines = done.stdout.splitlines()
    assert len(lines) == len(set(lines))
    assert lines[0].startswith(f"{PROCESSES} process")
    assert " on the CPU (gloo)" in lines[0]


def test_a_checkpoint_holds_tensors_and_plain_types_only(whole):
    state = torch.load(whole[0] / "last.pt", weights_only=True)
    assert state.keys() >= {"model", "optimizer", "amp", "epoch", "step"}
    assert not [name for name in state["model"] if name.startswith("module.")]
    assert {tensor.dtype for tensor in state["model"].values()} <= {torch.float32, torch.int64}
    assert (state["epoch"], state["step"]) == (2, 2 * STEPS_PER_EPOCH)


def test_a_run_goes_on_from_the_middle_of_an_epoch_as_if_it_had_stopped_there(whole, tmp_path):
    middle = whole[0] / f"step-{MIDDLE}.pt"
    run(*ARCH, "--epochs", 2, "--resume", middle, "--output", tmp_path)
    resumed, undisturbed = rows(tmp_path)[-1], rows(whole[0])[-1]
    for column in ("epoch", "step", "val_loss", task.METRIC, "lr", "loss_scale"):
        assert resumed[column] == undisturbed[column], column


@pytest.fixture(scope="module")
def reads(whole):
    """Which samples each rank read, epoch by epoch: {split: [[indices], …]}."""
    reads = {
        split: [[index for size, index in seen if size == total] for seen in whole[2]]
        for split, total in (("train", TRAIN), ("val", VAL))
    }
    for indices in reads["train"]:
        assert indices[:2] == [0, 1]  # on which the model is tried out
        del indices[:2]
    return reads


def test_shards_are_disjoint_and_complete(reads):
    shards = [set(indices[:SHARD]) for indices in reads["train"]]
    assert [len(shard) for shard in shards] == [SHARD] * PROCESSES
    assert len(set.union(*shards)) == SHARD * PROCESSES  # less the last short batch


def test_the_order_changes_with_the_epoch(reads):
    for indices in reads["train"]:
        epochs = indices[:SHARD], indices[-SHARD:]
        assert epochs[0] != epochs[1]


def test_validation_reads_each_sample_once(reads):
    shards = [indices[: len(indices) // 2] for indices in reads["val"]]
    # % if task == "segmentation"
    shown = [0, 1, 2, 3]  # in a picture
    # % else
    shown = [*range(0, VAL, VAL // 8)[:8]]  # in a picture
    # % endif
    assert shards[0][-len(shown) :] == shown
    del shards[0][-len(shown) :]
    assert sorted(chain(*shards)) == list(range(VAL))


def test_a_wrong_flag_is_answered_once():
    command = [str(PROJECT / "run.sh"), "--opt-level=01"]
    done = subprocess.run(command, env=SCREENED, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert (done.stdout + done.stderr).count("'01'") == 1


# % if ddp == "dataparallel"
@pytest.mark.parametrize(
    ("batch_size", "gpus", "last"), [(8, 8, 1), (5, 4, 1), (64, 2, 32), (7, 0, 7)]
)
def test_the_first_batch_is_tried_as_the_last_gpu_sees_it(monkeypatch, batch_size, gpus, last):
    """DeepLab's pooling, for one, takes no single image."""
    from engine import training

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert training.smallest_share(batch_size) == last
    assert last == len(torch.arange(batch_size).chunk(max(1, gpus))[-1])  # as DataParallel does


# % endif
