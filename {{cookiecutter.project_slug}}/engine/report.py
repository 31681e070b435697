"""What a run shows and what it leaves behind: words, progress bars, metrics, events, curves.

python -m engine.report draws runs that are there; engine/curves.py says how.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from itertools import islice
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from engine import cli, curves, distributed
from engine.curves import COLUMNS, CONFIG, PICTURE, TABLE
from engine.errors import UserError
from engine.files import replacing
from engine.watch import watched

if TYPE_CHECKING:
    from engine.checkpoint import Progress
    from engine.events import Events

LOGGED = ("train_loss", "lr", "loss_scale", "images_per_second")  # in the events
WARM_UP = 3  # steps, in which kernels are chosen and compiled
PATIENCE_S = 60.0  # for the last picture


class Report:
    """The voice and the pen of a run: does nothing on any rank but 0.

    What can't be written once a run has begun is a warning, and does not end the run.

    Args:
        output: the folder of all that it writes; made if missing.
        rank: of this process.
        metric: the name of the task's metric, a column of metrics.csv.
    """

    def __init__(self, output: Path, rank: int, metric: str) -> None:
        self.output = output
        self.active = rank == 0
        self.columns = (*COLUMNS[:4], metric, *COLUMNS[4:])
        self.warm_up = WARM_UP
        self.last: Meter | None = None
        self.began = time.monotonic()
        self.rows: list[dict[str, object]] = []
        self.speeds: list[float] = []
        self.events: Events | None = None
        self.drawing: subprocess.Popen | None = None
        self.is_drawn = True  # or will be, with all rows, when that process is done
        self.warnings: set[str] = set()

    def open(self, config: dict[str, object], resume: Path | None, progress: Progress) -> None:
        """Makes the folder ready, writes config.json, the head of metrics.csv, the first events.

        A run that goes on in its own folder keeps the rows and the events up to `progress`. Raises
        UserError if the folder can't be written, holds a run that is not resumed, or one that is
        still at work.
        """
        if not self.active:
            return
        table = self.output / TABLE
        goes_on = resume is not None and resume.parent.resolve() == self.output.resolve()
        try:
            self.output.mkdir(parents=True, exist_ok=True)
            self._lock()
            rows = curves.rows(table)
            if not goes_on and not distributed.is_restart():
                is_lost = config.get("resume") == Path("auto")  # before its first checkpoint
                if any(self.output.glob("*.pt")) or rows and not is_lost:
                    raise UserError(
                        f"{self.output} already holds a run: add --resume auto to go on with it, "
                        "or --output with another folder"
                    )
                rows = []
            self.rows = [row for row in rows if int(row["epoch"]) <= progress.epoch]
            with replacing(self.output / CONFIG) as temporary:
                temporary.write_text(cli.as_json(config))
            self._write_table()
        except OSError as error:
            raise UserError(
                f"--output {self.output} can't be written ({error.strerror}): "
                "choose another folder, or mend its permissions"
            ) from None
        except (KeyError, ValueError, csv.Error):
            raise UserError(
                f"{table} is not as a run wrote it: move it away, and the run goes on"
            ) from None
        with self._warning("there are no events for TensorBoard"):
            from engine.events import Events  # takes a moment, which only rank 0 needs

            self.events = Events(self.output, progress.step)
        self.say("  ".join(f"{name:>10}" for name in self.columns))

    def _lock(self) -> None:
        """Raises UserError if another run is at work in the folder.

        The lock is gone when this process is, however it ends, and its children don't have it.
        """
        self.lock = (self.output / ".lock").open("w")
        try:
            fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise UserError(
                f"another run is at work in {self.output}: wait for its end, or add --output with "
                "another folder"
            ) from None
        except OSError as error:  # a file system without locks
            self._warn(
                f"{self.output} can't be locked ({error.strerror}): start no other run there"
            )

    def say(self, message: str) -> None:
        """Prints a line."""
        if self.active:
            with contextlib.suppress(OSError):  # a full disk, or a pipe that nobody reads
                print(message, flush=True)

    def _warn(self, message: str) -> None:
        """Prints a warning, once."""
        if message not in self.warnings:
            self.warnings.add(message)
            self.say(f"warning: {message}")

    @contextlib.contextmanager
    def _warning(self, what: str) -> Iterator[None]:
        """Makes a warning of an error, such as a full disk or a package that is missing."""
        try:
            yield
        except Exception as error:
            self._warn(f"{what} ({getattr(error, 'strerror', None) or error})")

    def bar(
        self, batches: Iterable, description: str, total: int | None = None, **look: str
    ) -> tqdm:
        """The first `total` of `batches`, or all, with a bar; it is drawn in a terminal alone."""
        look |= {"leave": False, "disable": not (self.active and sys.stderr.isatty())}
        if total is None:
            total = len(batches)
        else:
            batches = islice(batches, total)
        return tqdm(watched(batches, description), description, total, dynamic_ncols=True, **look)

    @contextlib.contextmanager
    def clock(self, description: str) -> Iterator[None]:
        """Shows, where a bar would be drawn, how long its body takes."""
        is_over = Event()
        bar = self.bar((), description, bar_format="{desc}: {elapsed}")

        def tick() -> None:
            while not is_over.wait(0.5):
                bar.refresh()
            bar.close()

        thread = Thread(target=tick, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def meter(self, device: torch.device, images_per_step: int) -> Meter:
        """A new Meter; the run's first one has a warm-up."""
        warm_up, self.warm_up = self.warm_up, 0
        meter = Meter(device, images_per_step, warm_up, self._add_log)
        if self.last is not None:
            meter.bad = self.last.bad
        self.last = meter
        return meter

    def step(self, bar: tqdm, step: int, lr: float, loss_scale: Tensor | float) -> Log | None:
        """Shows on `bar` and in the events how the epoch goes, by what `Meter.note` returns."""
        log = self.last.note(step, lr, loss_scale)
        if log:
            speed, scale = log.images_per_second, log.loss_scale
            bar.set_postfix_str(
                f"loss {log.train_loss:.4f}, {speed:.0f} images/s, loss scale {scale:g}"
            )
        return log

    def _add_log(self, log: Log) -> None:
        values = {name: getattr(log, name) for name in LOGGED}
        self._add_event(lambda events: events.scalars("step", values, log.step))

    def row(self, row: dict[str, Tensor | float]) -> None:
        """Adds a row to metrics.csv, to the events and to the curves, and prints it."""
        if not self.active:
            return
        row = row | {"loss_scale": float(row["loss_scale"])}  # which may still be on the device
        self.rows.append(row)
        with self._warning(f"rows are missing in {TABLE}"):
            self._write_table()
        self.speeds.append(row["images_per_second"])
        values = {name: row[name] for name in self.columns[2:]}
        self._add_event(lambda events: events.scalars("epoch", values, row["step"]))
        self._draw()
        self.say("  ".join(f"{row[name]:{max(10, len(name))}.5g}" for name in self.columns))

    def _write_table(self) -> None:
        """Writes all of metrics.csv: a row that found no room is there once there is some."""
        with replacing(self.output / TABLE) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)

    def picture(self, step: int, show: Callable[..., Path], *args: object) -> None:
        """Has ``show(*args)`` write a PNG file, and adds it to the events."""
        if not self.active:
            return
        try:
            path = show(*args)
        except OSError as error:  # such as a full disk; any other is a mistake in `show`
            self._warn(f"there is no picture of validation ({error.strerror or error})")
            return
        self._add_event(lambda events: events.picture(path.parent.name, path, step))

    def _add_event(self, add: Callable[[Events], None]) -> None:
        if self.events:
            events, self.events = self.events, None  # after an error the file may be torn
            with self._warning("there are no more events for TensorBoard"):
                add(events)
                self.events = events

    def _draw(self) -> None:
        """Starts to draw the curves, unless that is still going on, in another process.

        There it takes what the training leaves of the cores, and nothing waits for it.
        """
        self.is_drawn = self._has_drawn()
        if not self.is_drawn:
            return
        path = os.pathsep.join(filter(None, sys.path))
        with self._warning(f"{PICTURE} is not drawn"):
            self.drawing = subprocess.Popen(
                [sys.executable, "-m", "engine.curves", str(self.output)],
                env=os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )

    def _has_drawn(self, patience_s: float = 0.0) -> bool:
        """Whether the last drawing is over, which it is after `patience_s` if those are given."""
        if self.drawing:
            try:
                self.drawing.wait(patience_s)
            except subprocess.TimeoutExpired:
                if not patience_s:
                    return False
                self.drawing.kill()
            _, said = self.drawing.communicate()
            if self.drawing.returncode:
                reason = (said.splitlines() or ["it takes too long"])[-1].removeprefix("error: ")
                self._warn(f"{PICTURE} is not drawn ({reason})")
            self.drawing = None
        return True

    def close(self, best: float = -math.inf) -> None:
        """Finishes the curves, and says what the run came to, and where it is.

        `best` is that of best.pt, of a row or of where a run ended within an epoch: a run that goes
        on drops the row of that.
        """
        if not self.active:
            return
        self._has_drawn(PATIENCE_S)
        if not self.is_drawn:
            self._draw()
            self._has_drawn(PATIENCE_S)
        facts = []
        with contextlib.suppress(UserError):  # no epoch, or no room for its row
            run = curves.read(self.output)
            facts.append(run.best)
            if best > max(filter(math.isfinite, run.columns[run.metric]), default=best):
                facts.append(f"best.pt has {best:.4f}, of within an epoch")
        facts.append(f"took {timedelta(seconds=round(time.monotonic() - self.began))}")
        if self.speeds:
            facts.append(f"{statistics.median(self.speeds):.0f} images/s")
        self.say(f"{', '.join(facts)}; checkpoints, {TABLE} and {PICTURE} are in {self.output}")


class Log(NamedTuple):
    """Numbers of a run after one of its steps."""

    step: int
    lr: float
    train_loss: float  # this process's mean since the log before
    bad: float  # losses in a row, up to this one, that are not finite
    loss_scale: float
    images_per_second: float  # of all processes


class Meter:
    """Loss and throughput since it was made.

    The loss is summed, and the time taken, on the device: the CPU is steps ahead of a GPU, and if
    it waited for a number, the GPU would wait for work after that.

    Args:
        images_per_step: of all processes.
        warm_up: the first so many steps, which choose and compile kernels, are timed apart.
        show: called with each log.
    """

    def __init__(
        self,
        device: torch.device,
        images_per_step: int,
        warm_up: int = 0,
        show: Callable[[Log], None] = lambda log: None,
    ) -> None:
        self.loss_sum = torch.zeros((), device=device)
        self.losses = 0  # more than the steps, if the epoch was begun by a run that was stopped
        self.shown = 0.0, 0  # the sum and the count at the last log
        self.show = show
        self.latest: Log | None = None
        self.pending: tuple | None = None  # a log that is on its way
        self.bad = torch.zeros((), device=device)  # losses in a row, over epochs
        self.steps = 0
        self.images_per_step, self.warm_up = images_per_step, warm_up
        self.warm_up_s = 0.0
        self.started = self._now()

    def add(self, loss: Tensor) -> None:
        """Counts a step. Waits for the device once, at the end of the warm-up."""
        loss = loss.detach()
        self.loss_sum += loss
        self.bad = (self.bad + 1) * ~loss.isfinite()
        self.losses += 1
        self.steps += 1
        if self.steps == self.warm_up:
            now = self._now()
            self.warm_up_s, self.started = _seconds(self.started, now), now

    def state(self) -> tuple[float, int]:
        """What `load` goes on from. Waits for the device, and for the last log."""
        self.read()
        return self.loss_sum.item(), self.losses

    def load(self, states: list[tuple[float, int]]) -> None:
        """Goes on from `states`, of this process or of several."""
        for loss_sum, losses in states:
            self.loss_sum += loss_sum
            self.losses += losses
        self.shown = self.state()

    def _now(self) -> torch.cuda.Event | float:
        """The time when the device has done what it was given so far."""
        if not self.loss_sum.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _speed_until(self, now: torch.cuda.Event | float) -> Callable[[], float]:
        """Images/s after the warm-up; within it, of all steps. Waits until it is `now`."""
        if self.steps > self.warm_up:
            images, started = (self.steps - self.warm_up) * self.images_per_step, self.started
            return lambda: images / _seconds(started, now)
        images, seconds, started = self.steps * self.images_per_step, self.warm_up_s, self.started
        return lambda: images / (seconds or _seconds(started, now))

    @property
    def is_late(self) -> bool:
        """Whether to wait for a number would keep the device from its work."""
        return self.loss_sum.is_cuda

    def note(self, step: int, lr: float, loss_scale: Tensor | float) -> Log | None:
        """Has the numbers of now copied; returns those of the call before, which are there.

        On the CPU, where there is nothing to wait for, it returns those of now.
        """
        self.read()
        numbers = [self.loss_sum, self.bad, torch.zeros_like(self.bad) + loss_scale]
        copy = torch.stack(numbers).to("cpu", non_blocking=True)
        self.pending = step, lr, self.losses, copy, self._speed_until(self._now())
        return self.latest if self.is_late else self.read()

    def read(self) -> Log | None:
        """What the last `note` had copied, if there was one. Waits for that alone."""
        if self.pending is not None:
            (step, lr, losses, copy, speed), self.pending = self.pending, None
            per_second = speed()  # from here on the copy is there
            loss_sum, bad, loss_scale = copy.tolist()
            (before, count), self.shown = self.shown, (loss_sum, losses)
            mean = (loss_sum - before) / (losses - count)
            self.latest = Log(step, lr, mean, bad, loss_scale, per_second)
            self.show(self.latest)
        return self.latest

    def results(self) -> dict[str, float]:
        """The mean loss of all processes and their images/s. Waits for the device."""
        sums = torch.stack([self.loss_sum, torch.full_like(self.loss_sum, self.losses)])
        dist.all_reduce(sums)
        loss_sum, losses = sums.tolist()
        speed = self._speed_until(self._now())
        return {"train_loss": loss_sum / losses, "images_per_second": speed()}


def _seconds(start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    """From `start` to `end`. Waits until it is over."""
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


if __name__ == "__main__":
    curves.main()
