"""What a run shows and what it leaves behind: rank 0's words, progress bars, metrics, config."""

import csv
import io
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from engine import distributed
from engine.errors import UserError

COLUMNS = ("epoch", "step", "train_loss", "val_loss", "lr", "loss_scale", "images_per_second")
WARM_UP = 3  # steps, in which kernels are chosen and compiled


class Report:
    """The voice and the pen of a run: does nothing on any rank but 0.

    Args:
        output: the folder for metrics.csv and config.json; made if missing.
        rank: of this process.
        metric: the name of the task's metric, a column of metrics.csv.
    """

    def __init__(self, output: Path, rank: int, metric: str) -> None:
        self.output = output
        self.active = rank == 0
        self.columns = (*COLUMNS[:4], metric, *COLUMNS[4:])
        self.warm_up = WARM_UP

    def open(self, config: dict[str, object], resume: Path | None, epochs: int) -> None:
        """Makes the folder ready, writes config.json and the head of metrics.csv.

        A run that goes on in its own folder keeps the rows of the `epochs` that it has finished.
        Raises UserError if the folder can't be written, or holds a run that is not resumed.
        """
        if not self.active:
            return
        table = self.output / "metrics.csv"
        goes_on = resume is not None and resume.parent.resolve() == self.output.resolve()
        try:
            rows = _rows(table)
            if not goes_on and not distributed.is_restart():
                if rows or any(self.output.glob("*.pt")):
                    raise UserError(
                        f"{self.output} already holds a run: add --resume auto to go on with it, "
                        "or --output with another folder"
                    )
                rows = []
            self.output.mkdir(parents=True, exist_ok=True)
            text = json.dumps(config, indent=2, default=str) + "\n"
            _replace(self.output / "config.json", text)
            head = io.StringIO()
            writer = csv.DictWriter(head, self.columns, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(row for row in rows if int(row["epoch"]) <= epochs)
            _replace(table, head.getvalue())
        except OSError as error:
            raise UserError(
                f"--output {self.output} can't be written ({error.strerror}): "
                "choose another folder, or mend its permissions"
            ) from None
        self.say("  ".join(f"{name:>10}" for name in self.columns))

    def say(self, message: str) -> None:
        """Prints a line."""
        if self.active:
            print(message, flush=True)

    def bar(self, batches: Iterable, description: str, total: int | None = None) -> tqdm:
        """A progress bar over `batches`; not drawn in a log that is no terminal."""
        hidden = not (self.active and sys.stderr.isatty())
        return tqdm(batches, description, total, leave=False, disable=hidden, dynamic_ncols=True)

    def meter(self, device: torch.device, images_per_step: int) -> "Meter":
        """A new Meter; the run's first one has a warm-up."""
        warm_up, self.warm_up = self.warm_up, 0
        return Meter(device, images_per_step, warm_up)

    def row(self, row: dict[str, float]) -> None:
        """Adds a row to metrics.csv, and prints it."""
        if not self.active:
            return
        with (self.output / "metrics.csv").open("a", newline="") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n").writerow(row)
        self.say("  ".join(f"{row[name]:{max(10, len(name))}.5g}" for name in self.columns))


def _rows(table: Path) -> list[dict[str, str]]:
    """The whole rows of `table`; the last one may be torn."""
    if not table.exists():
        return []
    with table.open(newline="") as file:
        return [row for row in csv.DictReader(file) if None not in row.values() and row["epoch"]]


def _replace(path: Path, text: str) -> None:
    """Writes `path` whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    temporary.rename(path)


class Meter:
    """Loss and throughput since it was made.

    The loss is summed on the device: to read it at every step, the CPU would wait for the GPU.

    Args:
        images_per_step: of all processes.
        warm_up: the first so many steps, which choose and compile kernels, are timed apart.
    """

    def __init__(self, device: torch.device, images_per_step: int, warm_up: int = 0) -> None:
        self.loss_sum = torch.zeros((), device=device)
        self.steps = 0
        self.images_per_step, self.warm_up = images_per_step, warm_up
        self.warm_up_s = 0.0
        self.started = time.perf_counter()

    def add(self, loss: Tensor) -> None:
        """Counts a step. Waits for the device once, at the end of the warm-up."""
        self.loss_sum += loss.detach()
        self.steps += 1
        if self.steps == self.warm_up:
            self.loss_sum.item()
            now = time.perf_counter()
            self.warm_up_s, self.started = now - self.started, now

    def _speed(self) -> float:
        """Images/s after the warm-up; within it, of all steps."""
        since = time.perf_counter() - self.started
        if self.steps <= self.warm_up:
            return self.steps * self.images_per_step / (self.warm_up_s or since)
        return (self.steps - self.warm_up) * self.images_per_step / since

    def progress(self) -> dict[str, str]:
        """This process's mean loss and the images/s of all of them. Waits for the device."""
        loss = self.loss_sum.item() / self.steps
        return {"loss": f"{loss:.4f}", "images/s": f"{self._speed():.0f}"}

    def results(self) -> dict[str, float]:
        """The mean loss of all processes and their images/s. Waits for the device."""
        dist.all_reduce(self.loss_sum)
        loss = self.loss_sum.item() / self.steps / dist.get_world_size()
        return {"train_loss": loss, "images_per_second": self._speed()}
