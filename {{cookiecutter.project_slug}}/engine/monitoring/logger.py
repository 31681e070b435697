"""Rank-0 logger: console, progress bars, metrics.csv, curves, TensorBoard and other trackers."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from io import FileIO
from itertools import chain, dropwhile, islice
from pathlib import Path
from textwrap import wrap
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from engine import UserError, cli, distributed, replacing
from engine.monitoring import curves
from engine.monitoring.curves import COLUMNS, CONFIG, METRIC, METRIC_MODE, PICTURE, TABLE
from engine.monitoring.events import EventWriter
from engine.monitoring.meter import LogRecord, Meter
from engine.monitoring.metric import MonitoredMetric
from engine.monitoring.trackers import TENSORBOARD
from engine.monitoring.tracking import Tracking
from engine.text import printable

if TYPE_CHECKING:
    from engine.checkpoint.format import Progress

EVALUATION = "eval.json"
STEP_SCALARS = ("train_loss", "lr", "loss_scale", "images_per_second")
LOG_EVERY = 10  # steps
LINE_S = 60.0  # seconds between progress lines where there is no terminal
LINE = "{desc}: {n_fmt}/{total_fmt}{postfix}, {remaining} left"
WARM_UP = 3  # steps, in which kernels are chosen and compiled
POSITION = ("epoch", "step")
# Of the console's table, which fits a terminal with 80 columns.
WIDTH = 80
WIDTHS = {"epoch": 5, "step": 6, "train_loss": 10, "val_loss": 9, "lr": 9, "loss_scale": 10}
WIDTHS["images_per_second"] = 8
METRIC_WIDTH = 16
HEADINGS = {"images_per_second": "images/s"}


class Logger:
    """Console output and files of a run. On every rank but 0 its methods do nothing.

    Once a run has started, an output that cannot be written causes one warning and does not stop
    the run.

    Args:
        output: folder of all files; created if missing.
        rank: of this process.
        metric: that selects the best model.
        log_every: steps between two records; without it, LOG_EVERY, and a line a minute.
        trackers: names of those to log to (--tracker).
    """

    def __init__(
        self,
        output: Path,
        rank: int,
        metric: MonitoredMetric,
        log_every: int | None = None,
        trackers: Sequence[str] = (TENSORBOARD,),
    ) -> None:
        self.output = output
        self.active = rank == 0
        self.monitored = metric
        self.log_every = log_every
        self.started_at = time.monotonic()
        self.rows: list[dict[str, Any]] = []  # of metrics.csv; a checkpoint holds them, too
        self.throughputs: list[float] = []  # images/s of each epoch
        self.warnings: set[str] = set()
        self.run_id = ""  # of the trackers; a checkpoint holds it, too
        self.events: EventWriter | None = None
        self.tracking: Tracking | None = None
        self._trackers = trackers
        self.curves = curves.BackgroundProcess(output, self.warning)
        self._meter: Meter | None = None
        self._lock_file: FileIO | None = None

    def open(self, config: dict[str, object], resume: Path | None, progress: Progress) -> None:
        """Create the folder, and write config.json, metrics.csv and the first TensorBoard event.

        A resumed run continues with the rows up to `progress`: those of its checkpoint, which
        `rows` holds, and, if it is in the run's own folder, those of the table there.

        Raises UserError if the folder cannot be written, is in use, or holds a run that is not
        resumed.
        """
        if not self.active:
            return
        try:
            with self._writing_output():
                self.output.mkdir(parents=True, exist_ok=True)
                self.lock()
                table = self._read_table()
                self.rows = self._rows_to_keep(table, config, resume, progress.epoch)
                with replacing(self.output / CONFIG) as temporary:
                    metric = {METRIC: self.monitored.name, METRIC_MODE: self.monitored.mode}
                    temporary.write_text(cli.as_json(config | metric))
                self._write_table()
        except (KeyError, TypeError, ValueError, csv.Error):
            problem = f"{self.output / TABLE} is not in the format of this program"
            raise UserError(f"{problem}: move it away, then resume again") from None
        if TENSORBOARD in self._trackers:
            with self._errors_as_warning("TensorBoard events are not written"):
                self.events = self._open_events(progress.step, table)
        with self._errors_as_warning("nothing is logged to the trackers"):
            self._open_tracking(config, resume, progress.step)
        self._print_cells({name: HEADINGS.get(name, name) for name in self._main_columns()})

    def _read_table(self) -> list[dict[str, float]]:
        """Return the rows of the folder's metrics.csv."""
        path = self.output / TABLE
        return [_parse_row(row) for row in curves.read_rows(path)] if path.exists() else []

    def _rows_to_keep(
        self,
        table: list[dict[str, float]],
        config: dict[str, object],
        resume: Path | None,
        epoch: int,
    ) -> list[dict[str, Any]]:
        """Return the rows of the checkpoint and the folder's metrics.csv up to `epoch`.

        The table has rows that an old checkpoint lacks. It lacks rows that did not fit on the disk,
        and those of epochs in which rank 0 was on another host.
        """
        is_resumed = self._is_own(resume)
        if not is_resumed and not distributed.is_restart():
            # A run that stopped before its first checkpoint may have written a row.
            has_no_checkpoint = config.get("resume") == Path("auto")
            if any(self.output.glob("*.pt")) or table and not has_no_checkpoint:
                fix = "add --resume auto to resume it, or --output with another folder"
                raise UserError(f"{self.output} already holds a run: {fix}")
            table = []
        by_epoch = {int(row["epoch"]): row for row in table}
        by_epoch |= {int(row["epoch"]): row for row in self.rows}
        return [by_epoch[one] for one in sorted(by_epoch) if one <= epoch]

    def _is_own(self, checkpoint: Path | None) -> bool:
        """Return whether a checkpoint is one of this run, and not of another folder's."""
        return checkpoint is not None and checkpoint.parent.resolve() == self.output.resolve()

    def _open_events(self, step: int, table: list[dict[str, float]]) -> EventWriter:
        """Return the writer of events after `step`; it starts with those of rows that have none.

        These are the rows from the first one that is not in the folder's `table`, or all if the
        folder has no events. Older events of these steps are hidden.
        """
        has_events = any(self.output.glob("events.out.tfevents.*"))
        known = {_as_text(row) for row in table if has_events}
        rows = list(dropwhile(lambda row: _as_text(row) in known, self.rows))
        before_rows = int(rows[0]["step"]) - 1 if rows else step
        events = EventWriter(self.output, min(step, before_rows))
        self._add_rows(events, rows)
        return events

    def _open_tracking(self, config: dict[str, object], resume: Path | None, step: int) -> None:
        """Start logging to the other trackers, if any; a resumed run continues its own there."""
        names = [name for name in self._trackers if name != TENSORBOARD]
        if not names:
            return
        is_own = self._is_own(resume)
        is_new = not (is_own or distributed.is_restart() or config.get("resume") == Path("auto"))
        tracking = Tracking(self.output, names, self.info, self.warning)
        tracking.start(self.run_id if is_own else "", is_new, step, config)
        if tracking.is_first:
            self._add_rows(tracking, self.rows)
        self.tracking = tracking
        self.run_id = tracking.run_id

    def _add_rows(self, sink: EventWriter | Tracking, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            values = {name: row[name] for name in row if name not in POSITION}
            sink.add_scalars("epoch", values, int(row["step"]))

    def lock(self) -> None:
        """Lock the folder, if there is one, until this process exits; child processes do not.

        Call it before reading the folder's checkpoints: the run that writes them may be about to
        end. Raises UserError if another run holds the lock.
        """
        path = self.output / ".lock"
        # A link would lead to another file, and to open a FIFO could take for ever.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        with self._writing_output():
            while self.active and self.output.exists() and not self._holds(path):
                self._lock_file = os.fdopen(os.open(path, flags, 0o666), "wb", 0)
                try:
                    fcntl.lockf(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except (BlockingIOError, PermissionError):
                    fix = "wait until it ends, or add --output with another folder"
                    raise UserError(f"another run is writing to {self.output}: {fix}") from None
                except OSError as error:  # a file system without locks
                    problem = f"{self.output} can't be locked ({error.strerror})"
                    self.warning(f"{problem}: start no other run there")

    @contextlib.contextmanager
    def _writing_output(self) -> Iterator[None]:
        """Turn an OSError of the body into a UserError about --output."""
        try:
            yield
        except OSError as error:
            problem = f"--output {self.output} can't be written ({error.strerror})"
            fix = "choose another folder, or correct its permissions"
            raise UserError(f"{problem}: {fix}") from None

    def _holds(self, path: Path) -> bool:
        """Return whether the file at `path` is locked, and not one that it has replaced."""
        if self._lock_file is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._lock_file.fileno()), path.stat())
        except FileNotFoundError:
            return False

    def info(self, message: str) -> None:
        """Print a message."""
        if self.active:
            with contextlib.suppress(OSError):  # a full disk, or a closed pipe
                print(printable(message), flush=True)

    def warning(self, message: str) -> None:
        """Print a warning. The same warning is printed once."""
        if message not in self.warnings:
            self.warnings.add(message)
            self.info(f"warning: {message}")

    @contextlib.contextmanager
    def _errors_as_warning(
        self, consequence: str, kind: type[Exception] = Exception
    ) -> Iterator[None]:
        """Turn an error, such as a full disk or a missing package, into a warning."""
        try:
            yield
        except kind as error:
            self.warning(f"{consequence} ({getattr(error, 'strerror', None) or error})")

    def progress_bar(
        self, batches: Iterable, description: str, total: int | None = None, **options: str
    ) -> tqdm:
        """Return an iterable over the first `total` batches, or all, that shows the progress.

        On a terminal it is a bar; elsewhere a line a minute, or every `log_every` batches.
        """
        if total is not None:
            batches = islice(batches, total)
        look: dict[str, Any] = {"leave": False, "disable": not self.active, **options}
        if sys.stderr.isatty():
            look["dynamic_ncols"] = True
        else:
            look |= {"file": _LineStream(self.info), "bar_format": LINE, "delay": 1e-9}
            look |= {"miniters": self.log_every or 1}
            look |= {"mininterval": 0.0 if self.log_every else LINE_S}
        return tqdm(batches, description, total, **look)

    @contextlib.contextmanager
    def timer(self, description: str) -> Iterator[None]:
        """Show the elapsed time of the body on a terminal."""
        if not sys.stderr.isatty():
            yield
            return
        is_done = Event()

        def refresh() -> None:
            with self.progress_bar((), description, bar_format="{desc}: {elapsed}") as bar:
                while not is_done.wait(0.5):
                    bar.refresh()

        thread = Thread(target=refresh, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_done.set()
            thread.join()

    def start_epoch(self, device: torch.device, images_per_step: int) -> Meter:
        """Return a new Meter; the first one of a run has a warm-up."""
        warm_up = WARM_UP if self._meter is None else 0
        meter = Meter(device, images_per_step, warm_up, self._log_record)
        if self._meter is not None:
            meter.nonfinite_losses = self._meter.nonfinite_losses
        self._meter = meter
        return meter

    def is_due(self, step: int) -> bool:
        """Return whether to call `log_step` after this step."""
        return step % (self.log_every or LOG_EVERY) == 0

    def log_step(
        self, bar: tqdm, meter: Meter, step: int, lr: float, loss_scale: Tensor | float
    ) -> LogRecord | None:
        """Log the training's numbers; return the latest record that is complete (`Meter.record`).

        Does not wait for a GPU: the record is then that of the logging step before.
        """
        record = meter.record(step, lr, loss_scale)
        if record:
            text = (
                f"step {record.step}, loss {record.train_loss:.4f}, "
                f"{record.images_per_second:.0f} images/s, loss scale {record.loss_scale:g}"
            )
            bar.set_postfix_str(text, refresh=sys.stderr.isatty())
        return record

    def _log_record(self, record: LogRecord) -> None:
        values = {name: getattr(record, name) for name in STEP_SCALARS} | dict(record.means)
        self._write_event(lambda events: events.add_scalars("step", values, record.step))

    def log_epoch(self, row: Mapping[str, Tensor | float]) -> None:
        """Add a row to metrics.csv, to the events and to the curves, and print it."""
        if not self.active:
            return
        values = {name: float(value) for name, value in row.items() if name not in POSITION}
        position = {name: int(row[name]) for name in POSITION}
        # A row of the epoch is there if a run that ended within it was resumed.
        self.rows = [one for one in self.rows if int(one["epoch"]) != position["epoch"]]
        self.rows.append(position | values)
        with self._errors_as_warning(f"rows are missing in {TABLE}"):
            self._write_table()
        self.throughputs.append(values["images_per_second"])
        self._write_event(lambda events: events.add_scalars("epoch", values, position["step"]))
        if self.tracking:
            self.tracking.check()
        self.curves.start()
        self._print_warm_up(values["images_per_second"])
        self._print_row(self.rows[-1])

    def _print_warm_up(self, images_per_second: float) -> None:
        """Print how long the warm-up took, if it was notably longer than other steps."""
        meter = self._meter
        seconds = meter.warm_up_seconds() if meter else 0.0
        if not (meter and seconds):  # such as in a resumed run, which only validates this epoch
            return
        usual = WARM_UP * meter.images_per_step / images_per_second
        if seconds > usual + 1:
            self.info(f"warm-up: {WARM_UP} steps in {seconds:.1f} s, not counted in images/s")

    def _main_columns(self) -> list[str]:
        """Return the columns of the console's table, with which metrics.csv starts."""
        return list(dict.fromkeys([*COLUMNS[:4], self.monitored.name, *COLUMNS[4:]]))

    def _print_row(self, row: dict[str, Any]) -> None:
        """Print a row of the table, and further metrics below it."""
        texts = {
            name: f"{value:.4g}" if value < 1000 else f"{value:.0f}" for name, value in row.items()
        }
        columns = self._main_columns()
        self._print_cells({name: texts.get(name, "") for name in columns})
        further = " ".join(f"{name}={text}" for name, text in texts.items() if name not in columns)
        if further:
            margin = " " * 6
            lines = wrap(further, WIDTH - len(margin), break_on_hyphens=False)
            for line in lines:
                self.info(margin + line)

    def _print_cells(self, texts: dict[str, str]) -> None:
        cells = []
        for name, text in texts.items():
            width = WIDTHS.get(name, METRIC_WIDTH)
            cells.append(f"{text if len(text) <= width else text[: width - 1] + '…':>{width}}")
        self.info(" ".join(cells))

    def _write_table(self) -> None:
        """Write metrics.csv as a whole, so that a row that did not fit is written later."""
        with replacing(self.output / TABLE) as temporary, temporary.open("w", newline="") as file:
            names = dict.fromkeys(chain.from_iterable(self.rows))
            columns = self._main_columns()
            if names:  # the metric's column is there before the first validation
                columns = [name for name in columns if name in {*names, self.monitored.name}]
            columns += [name for name in names if name not in columns]
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)

    def log_image(self, step: int, write_image: Callable[..., Path], *args: object) -> None:
        """Call ``write_image(*args)``, which writes a PNG file, and add the file to the events.

        It may write further files.
        """
        if not self.active:
            return
        # Errors other than those of the disk are bugs of write_image.
        with self._errors_as_warning("files of the validation are not written", OSError):
            path = write_image(*args)
            self._write_event(lambda events: events.add_image(path.parent.name, path, step))

    def log_evaluation(self, results: Mapping[str, float], **facts: object) -> None:
        """Write the results of a checkpoint, and `facts` about it, to eval.json; print them."""
        if not self.active:
            return
        path = self.output / EVALUATION
        finite = {name: value if math.isfinite(value) else None for name, value in results.items()}
        with self._writing_output():
            self.output.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:
                temporary.write_text(cli.as_json({"metrics": finite, **facts}))
        text = " ".join(f"{name} {value:.4f}" for name, value in results.items())
        self.info(f"{path}: {text}")

    def _write_event(self, write: Callable[[EventWriter | Tracking], None]) -> None:
        """Call `write` with each writer. After an error, its file may end in a torn event."""
        events, tracking = self.events, self.tracking
        self.events = self.tracking = None
        if events:
            with self._errors_as_warning("no further TensorBoard events are written"):
                write(events)
                self.events = events
        if tracking:
            with self._errors_as_warning("no further points are logged to the trackers"):
                write(tracking)
                self.tracking = tracking

    def finish_tracking(self, status: str) -> None:
        """End the run in the trackers as FINISHED or KILLED; wait for them, but not for long."""
        tracking, self.tracking = self.tracking, None
        if tracking:
            with self._errors_as_warning("the trackers do not know that the run has ended"):
                tracking.finish(status)

    def close(self, best: float = -math.inf) -> None:
        """Finish the curves; print the run's best result, its duration and its folder.

        `best` is the score of best.pt, perhaps from within an epoch whose row was dropped later.
        """
        if not self.active:
            return
        self.curves.finish()
        if self.tracking and self.rows:
            step = int(self.rows[-1]["step"])
            self.tracking.add_image("curves", self.output / PICTURE, step)
        self.finish_tracking("FINISHED")
        facts = []
        with contextlib.suppress(UserError):  # no finished epoch, or no room for its row
            run = curves.read_run(self.output)
            facts.append(run.describe_best())
            if best > run.best[0].score:
                value = self.monitored.value(best)
                facts.append(f"best.pt has {value:.4f} from within an epoch")
        facts.append(f"took {timedelta(seconds=round(time.monotonic() - self.started_at))}")
        if self.throughputs:
            facts.append(f"{statistics.median(self.throughputs):.0f} images/s")
        self.info(f"{', '.join(facts)}; checkpoints, {TABLE} and {PICTURE} are in {self.output}")


def _parse_row(row: Mapping[str, str]) -> dict[str, float]:
    """Return the numbers in a row of metrics.csv."""
    position = {name: int(row[name]) for name in ("epoch", "step")}
    return {name: float(value) for name, value in row.items() if value} | position


def _as_text(row: Mapping[str, float]) -> str:
    """Return a text that is the same for the same row, also if it holds nan."""
    return str(sorted(row.items()))


class _LineStream:
    """Text stream that passes the progress bars of tqdm on as lines."""

    def __init__(self, write_line: Callable[[str], None]) -> None:
        self.write_line = write_line

    def write(self, text: str) -> None:
        """Pass on a bar, without the control characters of a terminal."""
        if line := text.strip():
            self.write_line(line)

    def flush(self) -> None:
        """Do nothing: `write_line` flushes."""
