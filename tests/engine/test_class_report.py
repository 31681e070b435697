"""engine.monitoring.class_report: the figures against scikit-learn's, files, pictures."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from engine import UserError
from engine.monitoring import confusion_picture
from engine.monitoring.class_report import MAX_CLASSES, ClassReport
from PIL import Image
from processes import Processes
from sklearn import metrics

CPU = torch.device("cpu")


def make_samples(num_classes: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and labels; the last class neither occurs nor is predicted."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(num_classes - 1, (count,), generator=generator)
    logits = torch.randn(count, num_classes, generator=generator)
    logits[torch.arange(count), labels] += 1.5
    logits[:, -1] = -9
    return logits, labels


def write_report(folder: Path, num_classes: int, count: int) -> dict[str, float]:
    """Return what `compute` returns on each rank, with all samples divided unevenly."""
    logits, labels = make_samples(num_classes, count)
    rank = torch.distributed.get_rank()
    own = slice(0, 5) if rank == 0 else slice(5, count)
    report = ClassReport(num_classes, CPU)
    for _ in range(2):  # the second time, after a reset
        report.reset()
        for batch in zip(logits[own].split(8), labels[own].split(8), strict=True):
            report.update(*batch)
        results = report.compute()
    if rank == 0:
        report.write(folder, [f"class {index}" for index in range(num_classes)])
    torch.distributed.barrier()
    return results


def read(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.reader(file))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_report_of_labels_of_other_types(dtype: torch.dtype) -> None:
    logits, labels = make_samples(7, 50)
    reports = [ClassReport(7, CPU) for _ in range(2)]
    for report, given in zip(reports, (labels, labels.to(dtype)), strict=True):
        report.update(logits, given)
    assert torch.equal(reports[0].confusion, reports[1].confusion)
    assert reports[0].in_top == reports[1].in_top


SLOW = [pytest.param(number, marks=pytest.mark.slow) for number in (5, 6, 40)]


@pytest.mark.parametrize("num_classes", [3, *SLOW])
def test_report_equals_that_of_scikit_learn(
    two_processes: Processes, tmp_path: Path, num_classes: int
) -> None:
    results = two_processes(write_report, tmp_path, num_classes, 301)
    logits, labels = make_samples(num_classes, 301)
    predictions, every = logits.argmax(1), list(range(num_classes))
    expected = {}
    if num_classes > 5:
        top = metrics.top_k_accuracy_score(labels, logits.numpy(), k=5, labels=every)
        expected = {"val_top5_accuracy": top}
    assert results == [pytest.approx(expected)] * 2

    confusion = metrics.confusion_matrix(labels, predictions, labels=every)
    heading, *rows = read(tmp_path / "confusion_matrix.csv")
    assert heading == ["true class", *(f"class {index}" for index in every)]
    assert [row[0] for row in rows] == heading[1:]
    assert np.array_equal([list(map(int, row[1:])) for row in rows], confusion)

    *scores, support = metrics.precision_recall_fscore_support(
        labels, predictions, labels=every, zero_division=math.nan
    )
    heading, *rows = read(tmp_path / "class_report.csv")
    columns = dict(zip(heading, zip(*rows, strict=True), strict=True))
    numbers = {
        name: [float(cell or "nan") for cell in cells]
        for name, cells in columns.items()
        if name != "class"
    }
    assert numbers["samples"] == support.tolist()
    assert numbers["predicted"] == confusion.sum(axis=0).tolist()
    assert numbers["correct"] == confusion.diagonal().tolist()
    for name, values in zip(("precision", "recall", "f1"), scores, strict=True):
        assert numbers[name] == pytest.approx(values.tolist(), nan_ok=True)
    one_against_all = [
        metrics.accuracy_score(labels == index, predictions == index) for index in every
    ]
    assert numbers["accuracy"] == pytest.approx(one_against_all)
    assert (rows[-1][1], rows[-1][5]) == ("0", "")  # a class without samples has no recall


def write_counts(folder: Path, confusion: torch.Tensor, names: list[str]) -> np.ndarray:
    """Return the picture's pixels."""
    report = ClassReport(len(names), CPU)
    report.confusion += confusion
    report.write(folder, names)
    with Image.open(folder / "confusion_matrix.png") as picture:
        return np.array(picture).astype(int)


def test_picture_shows_fractions_of_the_true_class(tmp_path):
    confusion = torch.tensor([[90, 10, 0], [0, 0, 0], [0, 0, 7]])
    pixels = write_counts(tmp_path / "new", confusion, ["собака", "=1+1", "a\nb"])
    left, top = 148, 172
    corners = pixels[top + 2 : top + 146 : 48, left + 2 : left + 146 : 48]
    brightness = corners.sum(axis=2)
    assert (brightness[1] == 3 * 255).all()  # no sample of that class
    assert brightness[2, 2] == sum(confusion_picture.BLUE)
    assert brightness[2, 2] < brightness[0, 0] < brightness[0, 1] < 3 * 255 == brightness[0, 2]
    rows = [pixels[top + 48 * row : top + 48 * row + 48, :140] for row in range(3)]
    assert all((row < 100).any() for row in rows)  # names
    names = [row[0] for row in read(tmp_path / "new" / "class_report.csv")]
    assert names == ["class", "собака", "'=1+1", "a\\nb"]


@pytest.mark.parametrize("num_classes", [1, 30, 1000, pytest.param(2500, marks=pytest.mark.slow)])
def test_picture_of_many_classes_has_a_limited_size(tmp_path, num_classes):
    """A single confused sample is visible in it."""
    confusion = 50 * torch.eye(num_classes, dtype=torch.int64)
    names = [f"class {index}" for index in range(num_classes)]
    clean = write_counts(tmp_path, confusion, names)
    assert max(clean.shape) < 1400
    confusion[num_classes // 2, num_classes // 4] += 1
    confused = write_counts(tmp_path, confusion, names)
    assert confused.shape == clean.shape
    assert num_classes == 1 or (confused != clean).any()


def test_too_many_classes_are_an_error():
    with pytest.raises(UserError, match="--report: .* of 4097 classes is too large; leave it out"):
        ClassReport(MAX_CLASSES + 1, CPU)
