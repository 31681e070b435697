"""Report on a classification: precision, recall and F1, confusion matrix, top-5 accuracy."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from engine import UserError, replacing
from engine.monitoring.confusion_picture import draw_confusion
from engine.monitoring.run_files import write_csv
from engine.text import csv_cell

TABLE = "class_report.csv"
MATRIX = "confusion_matrix.csv"
PICTURE = "confusion_matrix.png"
TOP = 5
TOP_METRIC = f"val_top{TOP}_accuracy"
MAX_CLASSES = 4096  # whose matrix takes 128 MiB


class ClassReport:
    """Confusion matrix and top-5 accuracy of a validation set, exact for any number of processes.

    Attributes:
        confusion: numbers of samples, int64 (true class, predicted class); those of all processes
            after `compute`.

    Raises UserError if there are too many classes for a matrix.
    """

    def __init__(self, num_classes: int, device: torch.device) -> None:
        if num_classes > MAX_CLASSES:
            raise UserError(
                f"--report: the confusion matrix of {num_classes} classes is too large; leave it "
                f"out, or use at most {MAX_CLASSES} classes"
            )
        self.confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64, device=device)
        self.in_top = torch.zeros((), dtype=torch.int64, device=device)

    def reset(self) -> None:
        """Clear the counts."""
        self.confusion.zero_()
        self.in_top.zero_()

    def update(self, output: Tensor, targets: Tensor) -> None:
        """Add a batch: logits (N, num_classes) and labels (N,). Does not wait for the device."""
        cells = targets.long(), output.argmax(dim=1)  # uint8 indices would be a mask
        self.confusion.index_put_(cells, torch.ones_like(cells[0]), accumulate=True)
        top = output.topk(min(TOP, len(self.confusion)), dim=1).indices
        self.in_top += (top == targets.unsqueeze(1)).sum()

    def compute(self) -> dict[str, float]:
        """Sum the counts of all processes, which call it together; return further metrics.

        With more than five classes that is the top-5 accuracy, 0 to 1.
        """
        dist.all_reduce(self.confusion)
        dist.all_reduce(self.in_top)
        if len(self.confusion) <= TOP:
            return {}
        return {TOP_METRIC: int(self.in_top) / int(self.confusion.sum())}

    def write(self, folder: Path, classes: Sequence[str]) -> None:
        """Write class_report.csv, confusion_matrix.csv and confusion_matrix.png into `folder`."""
        confusion = self.confusion.cpu()
        folder.mkdir(parents=True, exist_ok=True)
        write_csv(folder / TABLE, _class_rows(confusion, classes))
        names = [csv_cell(name) for name in classes]
        rows = ([name, *counts.tolist()] for name, counts in zip(names, confusion, strict=True))
        write_csv(folder / MATRIX, [["true class", *names], *rows])
        with replacing(folder / PICTURE) as temporary:
            draw_confusion(confusion, classes).save(temporary, format="PNG")


def _class_rows(confusion: Tensor, classes: Sequence[str]) -> Iterable[list]:
    """Yield the heading and the row of each class. A quotient of zeros is an empty cell."""
    yield ["class", "samples", "predicted", "correct", "precision", "recall", "f1", "accuracy"]
    total = int(confusion.sum())
    columns = confusion.sum(dim=1), confusion.sum(dim=0), confusion.diag()
    counts = torch.stack(columns, dim=1).tolist()
    for name, (samples, predicted, correct) in zip(classes, counts, strict=True):
        wrong = samples + predicted - 2 * correct  # taken for another class, or for this one
        quotients = [
            _quotient(correct, predicted),
            _quotient(correct, samples),
            _quotient(2 * correct, samples + predicted),
            _quotient(total - wrong, total),
        ]
        yield [csv_cell(name), samples, predicted, correct, *quotients]


def _quotient(part: int, whole: int) -> float | str:
    return part / whole if whole else ""
