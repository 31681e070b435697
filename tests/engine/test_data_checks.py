"""engine.diagnostics.data_checks: size, random samples and memory of the data."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import task
import torch
from engine import UserError
from engine.diagnostics import data_checks
from engine.diagnostics.data_checks import (
    Measured,
    Sample,
    check_data,
    check_samples,
    check_shared_memory,
    measure,
)
from engine.diagnostics.preflight import ERROR, OK, PENDING, WARNING
from fresh import UNCHANGED
from PIL import Image


def settings(**changed: object) -> SimpleNamespace:
    """Return the settings of a default run that concern the data, with some changed."""
    defaults = {"data": None, "dummy": False, "workers": 0, "batch_size": 2, "skip_broken": 0}
    defaults |= {"eval_only": False} | UNCHANGED
    return SimpleNamespace(**defaults | changed)


class ListDataset(list):
    classes = ("cat", "dog")


IMAGE = torch.zeros(3, 224, 224, dtype=torch.uint8), 1


def test_data_is_counted(run_check):
    sets = ListDataset([IMAGE] * 6), ListDataset([IMAGE])
    text = "the project's own data set: 6 training samples, 1 validation samples, 2 classes"
    assert run_check(check_data, settings(), lambda: sets) == (OK, text)
    assert run_check(check_data, settings(dummy=True), None) == (OK, "synthetic")
    assert run_check(check_data, settings(), lambda: (sets[0], ListDataset()))[0] == ERROR
    message = "--data x: there is no folder x"
    build_datasets = mock.Mock(side_effect=UserError(message))
    assert run_check(check_data, settings(), build_datasets) == (ERROR, message)
    build_datasets = mock.Mock(side_effect=OSError("stale"))
    assert run_check(check_data, settings(), build_datasets)[0] == ERROR


def test_batch_of_more_samples_than_a_process_has_is_an_error(run_check, monkeypatch):
    monkeypatch.setenv("NNODES", "2")
    sets = ListDataset([IMAGE] * 14), ListDataset([IMAGE])
    assert run_check(check_data, settings(batch_size=3), lambda: sets)[0] == OK
    status, text = run_check(check_data, settings(batch_size=4), lambda: sets)
    assert status == ERROR
    assert "--batch-size 4 is more than the 3 training samples of each process: use at" in text
    given = settings(batch_size=4, eval_only=True)
    assert run_check(check_data, given, lambda: sets)[0] == OK


def test_samples_are_collated_by_their_data_set():
    """default_collate may refuse them."""
    collate_fn = staticmethod(lambda samples: torch.stack([image for image, _ in samples]))
    kind = type("Data", (ListDataset,), {"collate_fn": collate_fn})
    sets = kind([(IMAGE[0], object())] * 6), kind([(IMAGE[0], object())])
    (shapes,) = {sample.shapes for sample in measure(settings(), lambda: sets).samples}
    assert shapes == "uint8 3 × 224 × 224"


def test_slow_data_is_explained_in_advance():
    status, text = next(check_data(settings(data="/nfs/images"), None))
    assert status == WARNING and "/nfs/images was not counted in time" in text
    status, text = next(check_samples(settings(), None))
    assert status == WARNING and "no sample was read in time" in text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for --data: 12 images for training, 4 for validation."""
    for split, count in (("train", 12), ("val", 4)):
        for number in range(count):
            path = tmp_path / split / f"{number % 2}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.effect_noise((300, 260), 50).convert("RGB").save(path)
    return tmp_path


def check(run_check, folder, **changed):
    """Return the results of the three checks for a folder of images."""
    given = settings(data=folder, decode="cpu", **changed)
    sets = task.build_datasets(given)
    measured = measure(given, lambda: sets)
    return (
        run_check(check_data, given, lambda: task.build_datasets(given)),
        run_check(check_samples, given, lambda: measured),
        run_check(check_shared_memory, given, lambda: measured),
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_image_folders_are_measured(run_check, folder, workers):
    data, samples, memory = check(run_check, folder, workers=workers, batch_size=6)
    assert data[0] == samples[0] == memory[0] == OK
    assert samples[1].startswith("16 random samples of uint8 3 × 224 × 224, ")
    assert " per second in each process; a batch takes 0.9 MiB, a loading process" in samples[1]
    # Of two processes with two loaders each, two batches of 6 from a worker and one in use.
    assert memory[1].endswith(f"batches take up to {workers * 10}")


def test_damaged_samples_are_an_error_unless_they_are_skipped(run_check, folder):
    for path in (folder / "train" / "0").iterdir():
        path.write_bytes(path.read_bytes()[:2000])
    _, (status, text), memory = check(run_check, folder)
    assert status == ERROR and memory[0] == OK
    assert text.startswith(f"6 of 16 random samples can't be read: {folder}/train/0/")
    assert f"python -m engine.data.verify {folder} finds all, --skip-broken N" in text
    assert check(run_check, folder, skip_broken=6)[1][0] == WARNING


def test_ignored_files_are_a_warning(run_check, folder):
    (folder / "val" / ".ipynb_checkpoints").mkdir()
    (status, text), *_ = check(run_check, folder)
    assert status == WARNING
    assert text.endswith("val: ignored hidden files and folders: 1 (.ipynb_checkpoints)")


def test_notes_are_no_warnings(run_check):
    def build_datasets():
        print("--image-size 32:64: image size 32 from epoch 1", file=sys.stderr)
        return ListDataset([IMAGE] * 4), ListDataset([IMAGE])

    status, text = run_check(check_data, settings(), build_datasets)
    assert status == OK and "--image-size" not in text


def test_reading_stops_after_some_seconds(folder, monkeypatch):
    monkeypatch.setattr(data_checks, "SECONDS", -1.0)
    sets = task.build_datasets(settings(data=folder, decode="cpu"))
    assert len(measure(settings(), lambda: sets).samples) == 2 * data_checks.CHUNK


def test_synthetic_data_is_not_read(run_check):
    given = settings(dummy=True)
    assert measure(given, None) == Measured()
    assert run_check(check_samples, given, None) == (PENDING, "")
    assert run_check(check_shared_memory, given, Measured)[0] == OK


def test_small_shared_memory_is_an_error(run_check, monkeypatch):
    free = SimpleNamespace(free=64 * 2**20)  # what Docker gives a container
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    measured = Measured([Sample("", IMAGE[0].nbytes, "", 0)])
    given = settings(workers=8, batch_size=256)
    status, text = run_check(check_shared_memory, given, lambda: measured)
    assert status == ERROR and "64 MiB free, batches take up to 2499" in text
    assert "--ipc=host" in text
    assert run_check(check_shared_memory, settings(), lambda: measured)[0] == OK
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    status, text = run_check(check_shared_memory, settings(), lambda: measured)
    assert status == WARNING and "NCCL" in text
