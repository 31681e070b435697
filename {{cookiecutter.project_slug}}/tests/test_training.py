"""Tests of a short training run: two processes on the CPU, started by run.sh.

They hold for any task; metrics and paths are asked of task.py and of the run.
"""

import csv
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_task import FLAGS, PROJECT
from torchvision.utils import save_image

import task

STEPS = 4  # of a run, which ends within its first epoch
MIDDLE = 2  # the step of its first checkpoint
# % if ddp == "fsdp"
LAST, EARLIER = "last", f"step-{MIDDLE}"  # folders with a file of each process
# % else
LAST, EARLIER = "last.pt", f"step-{MIDDLE}.pt"
# % endif
SHORT = (*FLAGS, "--batch-size", "16", "--steps", str(STEPS), "--save-every", str(MIDDLE))
# % if backend == "apex"
SHORT += ("--backend", "native")  # real Apex needs a GPU
# % endif


def execute(*command: object, folder: Path, **variables: str) -> subprocess.CompletedProcess:
    """Run a command without GPUs in `folder`; check that it succeeds."""
    # One thread each: the processes share the cores, and the same number gives the same sums.
    cpu = {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=os.environ | cpu | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def train(output: Path, *flags: object, **variables: str) -> str:
    """Return what run.sh prints."""
    command = (PROJECT / "run.sh", *SHORT, "--output", output, *flags)
    return execute(*command, folder=output.parent, **variables).stdout


def read_metrics(output: Path) -> list[dict[str, str]]:
    """Return the rows of metrics.csv that are the same in equal runs."""
    with (output / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        del row["images_per_second"]
    return rows


def load(checkpoint: Path) -> dict:
    # % if ddp == "fsdp"
    from engine.checkpoint import format

    return format.load(checkpoint)  # puts the shards of all processes together
    # % else
    return torch.load(checkpoint, weights_only=True)
    # % endif


def flatten(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the entries of nested containers with their paths."""
    if isinstance(value, dict | list | tuple):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flatten(entry, f"{path}/{key}")
    else:
        yield path, value


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run."""
    output = tmp_path_factory.mktemp("trained") / "run"
    train(output)
    return output


def test_run_writes_checkpoints_and_metrics(trained: Path) -> None:
    assert {LAST, "metrics.csv", "config.json"} <= {path.name for path in trained.iterdir()}
    (row,) = read_metrics(trained)
    assert int(row["step"]) == STEPS
    assert math.isfinite(float(row["train_loss"]))
    assert math.isfinite(float(row[task.METRIC]))


def test_training_changes_the_weights(trained: Path) -> None:
    before, after = (load(trained / name)["model"] for name in (EARLIER, LAST))
    assert before.keys() == after.keys()
    weights = [name for name in after if name.endswith("weight")]  # no statistics of a batch norm
    assert any(not torch.equal(before[name], after[name]) for name in weights)


def test_checkpoint_fits_the_model(trained: Path) -> None:
    """No name has a prefix, and no weight is missing."""
    state = load(trained / LAST)
    metadata = state["metadata"]
    options = metadata.get("model_options", {})
    model = task.build_model(metadata["arch"], len(metadata.get("classes", ())), **options)
    model.load_state_dict(state["model"])


def test_resume_is_bit_identical(trained: Path, tmp_path: Path) -> None:
    resumed = tmp_path / "resumed"
    train(resumed, "--resume", trained / EARLIER)
    # It did not start again from the first step.
    assert not (resumed / EARLIER).exists()
    ours = dict(flatten(load(resumed / LAST)))
    theirs = dict(flatten(load(trained / LAST)))
    for path, value in theirs.items():
        if path.endswith("images_per_second"):  # in the history of metrics
            continue
        if torch.is_tensor(value):
            assert torch.equal(ours[path], value), path
        else:
            assert repr(ours[path]) == repr(value), path  # a metric may be nan
    assert read_metrics(resumed) == read_metrics(trained)


def test_evaluation_in_one_process_gives_the_same_metric(trained: Path, tmp_path: Path) -> None:
    flags = ("--eval-only", "--resume", trained / LAST)
    words = train(tmp_path / "evaluated", *flags, NPROC="1").split()
    value = float(words[words.index(task.METRIC) + 1])
    (row,) = read_metrics(trained)
    assert value == pytest.approx(float(row[task.METRIC]), rel=0.01, abs=0.01)


def test_predict_reads_an_image_file(trained: Path, tmp_path: Path) -> None:
    image = tmp_path / "image.png"
    save_image(torch.rand(3, 48, 64, generator=torch.Generator().manual_seed(0)), image)
    flags: list[object] = ["--json"]
    # % if task == "contrastive"
    captions = tmp_path / "captions.txt"
    captions.write_text("a photograph\na drawing\n")
    flags += ["--captions", captions]
    # % endif
    command = (sys.executable, PROJECT / "predict.py", trained / LAST, image)
    done = execute(*command, *flags, folder=tmp_path)
    line = json.loads(done.stdout)
    assert line["file"] == str(image)
    assert line["found"]
