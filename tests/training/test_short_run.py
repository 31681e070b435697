"""A short run on the CPU through run.sh: its files, and the samples that each process reads."""

import json
import shutil
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
import torch
from projects import load_project
from running import metrics, run, run_two

pytestmark = pytest.mark.xdist_group("train")
BATCH_SIZE = 64
PROJECTS = [
    pytest.param({"task": "classification"}, id="classification"),
    pytest.param({"task": "segmentation"}, id="segmentation", marks=pytest.mark.weekly),
    pytest.param({"task": "contrastive"}, id="contrastive", marks=pytest.mark.weekly),
    pytest.param(
        {"ddp": "dataparallel", "sync_bn": False}, id="dataparallel", marks=pytest.mark.weekly
    ),
]
RECORDER = """
import json, os, runpy
from pathlib import Path
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
"""A program in the place of main.py that records which samples are read."""


@dataclass(frozen=True)
class ShortRun:
    """A run of two epochs."""

    project: Path
    flags: tuple
    processes: int
    sizes: dict[str, int]  # of the training set and the validation set
    pictured: list[int]  # samples of the validation set
    metric: str
    output: Path
    stdout: str
    stderr: str
    seen: list[list[list[int]]]  # by each rank: the size of a dataset, and the index

    @property
    def steps_per_epoch(self) -> int:
        return self.sizes["train"] // self.processes // BATCH_SIZE

    @property
    def middle(self) -> int:
        """The step in the middle of the second epoch."""
        return self.steps_per_epoch + self.steps_per_epoch // 2

    @property
    def shard(self) -> int:
        """The samples that a process reads in an epoch."""
        return BATCH_SIZE * self.steps_per_epoch


@pytest.fixture(scope="module", params=PROJECTS)
def whole(request, bake, shared_project, tmp_path_factory) -> ShortRun:
    answers, folder = request.param, tmp_path_factory.mktemp("runs")
    processes = 1 if answers.get("ddp") == "dataparallel" else 2
    segments = answers.get("task") == "segmentation"
    # Small, with batch norm, without dropout.
    flags = ("--arch", "unet" if segments else "shufflenet_v2_x0_5", "--batch-size", BATCH_SIZE)
    task = load_project(shared_project(**answers)).task
    sizes = {"train": len(task.Digits(train=True)), "val": len(task.Digits(train=False))}
    middle = (sizes["train"] // processes // BATCH_SIZE) * 3 // 2
    project = bake(**answers)
    kept = (project / "main.py").rename(project / "kept.py")
    program = RECORDER.format(main=str(kept), folder=str(folder))
    (project / "main.py").write_text(program)
    extra = ("--epochs", 2, "--save-every", middle, "--keep", 3, "--output", folder / "run")
    done = run(project, *flags, *extra, nproc=processes, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    seen = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]
    pictured = [0, 1, 2, 3] if segments else [*range(0, sizes["val"], sizes["val"] // 8)[:8]]
    return ShortRun(
        *(project, flags, processes, sizes, pictured),
        *(task.METRIC, folder / "run", done.stdout, done.stderr, seen),
    )


def test_run_writes_its_files(whole):
    names = {path.name for path in whole.output.iterdir()}
    assert names >= {"last.pt", "metrics.csv", "config.json"}
    rows = metrics(whole.output)
    steps = [(row["epoch"], row["step"]) for row in rows]
    assert steps == [(1, whole.steps_per_epoch), (2, 2 * whole.steps_per_epoch)]
    assert rows[1]["train_loss"] < rows[0]["train_loss"]
    assert json.loads((whole.output / "config.json").read_text())["arch"] == whole.flags[1]
    # Rank 0 alone logs: each line is there once.
    lines = whole.stdout.splitlines()
    assert len(lines) == len(set(lines))
    assert lines[0].startswith(f"{whole.processes} process")
    assert " on the CPU (gloo)" in lines[0]
    assert "Warning" not in whole.stderr


def test_checkpoint_holds_tensors_and_plain_types(whole):
    state = torch.load(whole.output / "last.pt", weights_only=True)
    assert state.keys() >= {"model", "optimizer", "amp", "epoch", "step"}
    assert not [name for name in state["model"] if name.startswith("module.")]
    assert {tensor.dtype for tensor in state["model"].values()} <= {torch.float32, torch.int64}
    assert (state["epoch"], state["step"]) == (2, 2 * whole.steps_per_epoch)


@pytest.mark.slow
def test_resume_within_an_epoch_gives_the_same_metrics(whole, tmp_path):
    checkpoint = whole.output / f"step-{whole.middle}.pt"
    flags = (*whole.flags, "--epochs", 2, "--resume", checkpoint, "--output", tmp_path)
    start = run_two if whole.processes == 2 else partial(run, nproc=1)
    done = start(whole.project, *flags, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    resumed, undisturbed = metrics(tmp_path)[-1], metrics(whole.output)[-1]
    for column in ("epoch", "step", "val_loss", whole.metric, "lr", "loss_scale"):
        assert resumed[column] == undisturbed[column], column


@pytest.mark.slow
def test_resume_with_nothing_left_changes_no_file(whole):
    """Such as one of an earlier checkpoint, by mistake."""
    before = {path.name: path.stat().st_mtime_ns for path in whole.output.iterdir()}
    checkpoint = whole.output / f"step-{whole.middle}.pt"
    flags = (*whole.flags, "--epochs", 1, "--resume", checkpoint, "--output", whole.output)
    done = run(whole.project, *flags, nproc=1, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing is left to train: --epochs, --steps" in done.stdout
    assert {path.name: path.stat().st_mtime_ns for path in whole.output.iterdir()} == before


@pytest.mark.slow
def test_settings_that_trained_nothing_are_not_those_of_the_run(whole, tmp_path):
    output = shutil.copytree(whole.output, tmp_path / "run")
    flags = (*whole.flags, "--epochs", 2, "--lr", 0.123, "--resume", "auto", "--output", output)
    done = run(whole.project, *flags, nproc=1, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing is left to train" in done.stdout
    for name in ("config.json", "metrics.csv"):
        assert (output / name).read_bytes() == (whole.output / name).read_bytes()


@pytest.fixture(scope="module")
def reads(whole):
    """The samples that each rank read, in order: {split: [[indices], …]}."""
    reads = {
        split: [[index for size, index in seen if size == total] for seen in whole.seen]
        for split, total in whole.sizes.items()
    }
    for indices in reads["train"]:
        assert indices[:2] == [0, 1]  # on which the model is checked before the run
        del indices[:2]
    size = whole.sizes["val"]
    for indices in reads["val"]:
        # And on which validation is.
        assert indices[:8] == [index * size // 8 for index in range(8)]
        del indices[:8]
    return reads


def test_shards_are_disjoint_and_complete(whole, reads):
    shards = [set(indices[: whole.shard]) for indices in reads["train"]]
    assert [len(shard) for shard in shards] == [whole.shard] * whole.processes
    assert len(set.union(*shards)) == whole.shard * whole.processes  # less the last short batch


def test_order_changes_with_the_epoch(whole, reads):
    for indices in reads["train"]:
        epochs = indices[: whole.shard], indices[-whole.shard :]
        assert epochs[0] != epochs[1]


def test_validation_reads_each_sample_once(whole, reads):
    shards = [indices[: len(indices) // 2] for indices in reads["val"]]
    pictured = whole.pictured
    assert shards[0][-len(pictured) :] == pictured
    del shards[0][-len(pictured) :]
    assert sorted(chain(*shards)) == list(range(whole.sizes["val"]))
