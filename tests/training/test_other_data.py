"""A checkpoint is used with data that only its labels, or its classes, tell from its own."""

import csv
import json
import shutil

import numpy as np
import pytest
from idx_files import COUNTS, write_dataset, write_idx
from running import run

pytestmark = pytest.mark.xdist_group("short")
SMALL = ("--arch", "shufflenet_v2_x0_5", "--batch-size", 8, "--workers", 0)
EVALUATION = ("--eval-only", "--resume")


def evaluation(folder):
    """The content of the file that --eval-only wrote."""
    return json.loads((folder / "eval.json").read_text())


@pytest.mark.slow
def test_checkpoint_of_another_idx_data_set_is_reported(shared_project, tmp_path):
    """As Fashion-MNIST's with MNIST: sizes and class names are the same."""
    project, checkpoint = shared_project(), tmp_path / "run" / "last.pt"
    own = write_dataset(tmp_path / "own", size=32)
    other = tmp_path / "other"
    shutil.copytree(own, other)
    for split, count in COUNTS.items():
        labels = np.random.default_rng(0).permutation(np.arange(count) % 10)
        write_idx(other / f"{split}-labels-idx1-ubyte.gz", labels)
    flags = (*SMALL, "--data", own, "--steps", 3, "--output", checkpoint.parent)
    done = run(project, *flags, nproc=0)
    assert done.returncode == 0, done.stderr

    for folder, is_same in ((own, True), (other, False)):
        flags = (*SMALL, "--data", folder, *EVALUATION, checkpoint, "--output", tmp_path / "eval")
        done = run(project, *flags, nproc=0)
        assert done.returncode == 0, done.stderr
        assert evaluation(tmp_path / "eval")["same_data_as_in_training"] is is_same
        assert ("this is other data than it was validated on" in done.stdout) != is_same

    flags = (*SMALL, "--data", other, "--steps", 4, "--resume", checkpoint)
    done = run(project, *flags, "--output", tmp_path / "resumed", nproc=0)
    assert done.returncode == 0, done.stderr
    changes = "(train: other labels, val: other labels; the rest of its epoch may repeat or leave"
    assert f"warning: --resume {checkpoint}: the data has changed {changes}" in done.stdout


@pytest.mark.slow
def test_validation_data_without_some_classes_is_evaluated(shared_project, image_folder, tmp_path):
    """The labels are those of the checkpoint, by the names of the classes."""
    project, checkpoint = shared_project(), tmp_path / "run" / "last.pt"
    (image_folder / "train" / "green").mkdir()
    shutil.copy(image_folder / "train" / "red" / "1.png", image_folder / "train" / "green")
    flags = (*SMALL, "--data", image_folder, "--epochs", 1, "--output", checkpoint.parent)
    done = run(project, *flags, "--report", nproc=0)
    assert done.returncode == 0, done.stderr
    with (checkpoint.parent / "class_report.csv").open() as file:
        correct = {row["class"]: int(row["correct"]) for row in csv.DictReader(file)}
    assert [*correct] == ["blue", "green", "red"]

    shutil.rmtree(image_folder / "train")
    shutil.rmtree(image_folder / "val" / "blue")
    flags = (*SMALL, "--data", image_folder, *EVALUATION, checkpoint)
    done = run(project, *flags, "--output", tmp_path / "eval", nproc=0)
    assert done.returncode == 0, done.stderr
    assert f"the 3 classes of {checkpoint}; the data has no blue, green\n" in done.stdout
    found = evaluation(tmp_path / "eval")
    assert found["metrics"]["val_accuracy"] == pytest.approx(correct["red"] / 5)
    assert found["same_data_as_in_training"] is False
