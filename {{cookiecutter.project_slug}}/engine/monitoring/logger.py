"""Rank-0 logger: console, progress bars, metrics.csv, curves, TensorBoard and other trackers."""

from __future__ import annotations

import contextlib
import csv
import math
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain, dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from engine import OUTPUT_FIX, UserError, cli, distributed, is_directly_in, replacing, writing
from engine.distributed import consistency
from engine.monitoring import curves, run_files
from engine.monitoring.console import Console, has_terminal
from engine.monitoring.curves import PICTURE
from engine.monitoring.events import PREFIX, EventWriter
from engine.monitoring.lock import FolderLock
from engine.monitoring.meter import LogRecord, Meter
from engine.monitoring.metric import COLUMNS, MonitoredMetric
from engine.monitoring.run_files import CONFIG, POSITION, TABLE
from engine.monitoring.trackers import TENSORBOARD
from engine.monitoring.tracking import Tracking
from engine.text import short_number

if TYPE_CHECKING:
    from engine.checkpoint.format import Progress

EVALUATION = "eval.json"
CHECKPOINT = re.compile(r".*\.pt|step-.*[0-9]|last|best")
STEP_SCALARS = ("train_loss", "lr", "loss_scale", "images_per_second")
LOG_EVERY = 10  # steps
WARM_UP = 3  # batches, in which kernels are chosen and compiled


class Logger(Console):
    """Console output and files of a run. On every rank but 0 most methods do nothing.

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
        super().__init__(rank == 0, log_every)
        self.output = output
        self.folder_lock = FolderLock(output, self.warning)
        self.monitored = metric
        self.started_at = time.monotonic()
        self.is_restart = distributed.is_restart()  # of a run that this launch has begun
        self.has_moved = False  # rank 0, from the host of the checkpoint that is resumed
        self.rows: list[dict[str, Any]] = []  # of metrics.csv; a checkpoint holds them, too
        self.throughputs: list[float] = []  # images/s of each epoch
        self._metrics: set[str] = set()  # of the task, once there was a validation
        self._differing: set[str] = set()  # those that differ between the processes
        self.run_id = ""  # of the trackers; a checkpoint holds it, too
        self.discarded: list[int] = []  # of checkpoints: engine.checkpoint.selection
        self._config = ""  # the text of config.json
        self.events: EventWriter | None = None
        self.tracking: Tracking | None = None
        self._due_rows: list[tuple[EventWriter | Tracking, dict[str, Any]]] = []  # not written yet
        self._trackers = trackers
        self.curves = curves.BackgroundProcess(output, self.warning)
        self._meter: Meter | None = None

    def open(
        self,
        config: dict[str, object] | None,
        resume: Path | None,
        progress: Progress,
        settings: dict[str, object] | None = None,
    ) -> None:
        """Create the folder, and write config.json, metrics.csv and the first TensorBoard event.

        `config` is None if nothing is left to train: the config.json that is there stays. The
        trackers get `settings`, which also have the defaults that follow from other flags.

        A resumed run continues with the rows up to `progress`: those of its checkpoint, which
        `rows` holds, and, if it is in the run's own folder, those of the table there.

        Raises UserError if the folder cannot be written, is in use, or holds a run that is not
        resumed.
        """
        if not self.active:
            return
        try:
            with writing(self.output, OUTPUT_FIX):
                self.output.mkdir(parents=True, exist_ok=True)
                self.lock()
                table = self._read_table()
                self.rows = self._rows_to_keep(table, config or {}, resume, progress)
                # First: a config.json without metrics.csv is not that of a run.
                run_files.write_rows(self.output / TABLE, self.rows, self.monitored.name)
                self.curves.is_current = not self.rows  # a killed run has not drawn all
                if config is not None:
                    facts: dict[str, object] = {run_files.METRIC: self.monitored.name}
                    facts[run_files.METRIC_MODE] = self.monitored.mode
                    facts[run_files.LAUNCH] = distributed.launch_ids()
                    facts[run_files.DISCARDED] = self.discarded
                    facts[run_files.FILES] = consistency.file_digests(owners=True)
                    self._config = cli.as_json(config | facts)
                    self._write_config()
        except (KeyError, TypeError, ValueError, csv.Error):
            problem = f"{self.output / TABLE} is not in the format of this program"
            raise UserError(f"{problem}: move it away, then resume again") from None
        if TENSORBOARD in self._trackers:
            with self._errors_as_warning("TensorBoard events are not written"):
                self.events = self._open_events(progress.step, table)
        with self._errors_as_warning("nothing is logged to the trackers"):
            self._open_tracking((settings or config) if config else {}, resume, progress.step)
        self.print_heading(run_files.main_columns(self.monitored.name))

    def _write_config(self) -> None:
        with replacing(self.output / CONFIG) as temporary:
            temporary.write_text(self._config)

    def _read_table(self) -> list[dict[str, float]]:
        """Return the rows of the folder's metrics.csv."""
        path = self.output / TABLE
        if not path.exists():
            return []
        return [run_files.parse_row(row) for row in run_files.read_rows(path)]

    def _rows_to_keep(
        self,
        table: list[dict[str, float]],
        config: dict[str, object],
        resume: Path | None,
        progress: Progress,
    ) -> list[dict[str, Any]]:
        """Return the rows of the checkpoint and the folder's metrics.csv up to `progress`.

        The table has rows that an old checkpoint lacks. It lacks rows that did not fit on the disk,
        and those of epochs in which rank 0 was on another host.
        """
        is_resumed = self._is_own(resume)
        is_auto = config.get("resume") == Path("auto")
        is_moved = is_auto and self.has_moved  # best.pt may have been copied here
        if not (is_resumed or is_moved or self.is_restart):
            # A run that stopped before its first checkpoint may have written a row.
            if has_checkpoints(self.output) or (table and not is_auto):
                fix = "add --resume auto to resume it, or --output with another folder"
                if is_auto:  # all that the folder has are links
                    fix = "its checkpoints are elsewhere, or can't be read; choose another folder"
                raise UserError(f"{self.output} already holds a run: {fix}")
            if (self.output / CONFIG).exists() and not (self.output / TABLE).exists():
                fix = "move it away, or add --output with another folder"
                raise UserError(f"{self.output / CONFIG} is not that of a run: {fix}")
            table = []
        by_epoch = {int(row["epoch"]): row for row in table}
        by_epoch |= {int(row["epoch"]): row for row in self.rows}
        # The row of an epoch within which --steps ended is of a later epoch, but of this step.
        return [
            row
            for epoch, row in sorted(by_epoch.items())
            if epoch <= progress.epoch or row["step"] == progress.step
        ]

    def _is_own(self, checkpoint: Path | None) -> bool:
        """Return whether a checkpoint is in this run's folder, and no link to one elsewhere."""
        return checkpoint is not None and is_directly_in(checkpoint, self.output)

    def _open_events(self, step: int, table: list[dict[str, float]]) -> EventWriter:
        """Return the writer of events after `step`; it starts with those of rows that have none.

        These are the rows from the first one that is not in the folder's `table`, or all if the
        folder has no events. TensorBoard's reader in Python hides older events of these steps.
        """
        has_events = any(self.output.glob(f"{PREFIX}.*"))
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
        is_new = not (is_own or self.is_restart or config.get("resume") == Path("auto"))
        tracking = Tracking(self.output, names, self.info, self.warning)
        tracking.start(self.run_id if is_own else "", is_new, step, config)
        self._add_rows(tracking, self.rows)  # those that a tracker has are not sent again
        self.tracking = tracking
        self.run_id = tracking.run_id

    def _add_rows(self, sink: EventWriter | Tracking, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            values = {name: row[name] for name in row if name not in POSITION}
            sink.add_scalars("epoch", values, int(row["step"]))

    def lock(self) -> None:
        """Lock the folder, if there is one, until this process exits.

        Call it before reading the folder's checkpoints: the run that writes them may be about to
        end. Raises UserError if another run holds the lock.
        """
        if self.active:
            with writing(self.output, OUTPUT_FIX):
                self.folder_lock.acquire()

    def lock_again(self) -> None:
        """Lock the folder again, which may have lost its lock; create it if it was removed.

        Raises UserError if another run holds the lock, or another folder has the name. If the disk
        does not answer just now, that is a warning: the lock is kept.
        """
        if self.folder_lock.file:  # not for an evaluation
            with self._errors_as_warning(f"{self.output} does not answer", OSError):
                self.folder_lock.acquire()

    @contextlib.contextmanager
    def _errors_as_warning(
        self, consequence: str, kind: type[Exception] = Exception
    ) -> Iterator[None]:
        """Turn an error, such as a full disk or a missing package, into a warning."""
        try:
            yield
        except kind as error:
            self.warning(f"{consequence} ({getattr(error, 'strerror', None) or error})")

    def start_epoch(self, device: torch.device, images_per_batch: int) -> Meter:
        """Return a new Meter; the first one of a run has a warm-up."""
        warm_up = WARM_UP if self._meter is None else 0
        reserved = {*COLUMNS, *self._metrics}
        meter = Meter(device, images_per_batch, warm_up, self._log_record, reserved)
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
            throughput = short_number(record.images_per_second)
            text = (
                f"step {record.step}, loss {record.train_loss:.4f}, {throughput} images/s, "
                f"loss scale {record.loss_scale:g}"
            )
            bar.set_postfix_str(text, refresh=has_terminal())
        return record

    def _log_record(self, record: LogRecord) -> None:
        values = {name: getattr(record, name) for name in STEP_SCALARS} | dict(record.means)
        self._write_event(lambda events: events.add_scalars("step", values, record.step))

    def log_epoch(self, row: Mapping[str, Tensor | float]) -> None:
        """Add a row to metrics.csv, to the events and to the curves, and print it."""
        if not self.active:
            return
        self.lock_again()
        values = {name: float(value) for name, value in row.items() if name not in POSITION}
        throughput = values["images_per_second"]
        if throughput:
            self.throughputs.append(throughput)
        else:  # the run was resumed after the last step of the epoch
            del values["images_per_second"]
        position = {name: int(row[name]) for name in POSITION}
        # There is a row of the epoch if a run that ended in it, or in its validation, was resumed.
        is_logged = any({n: int(one[n]) for n in POSITION} == position for one in self.rows)
        self.rows = [one for one in self.rows if int(one["epoch"]) != position["epoch"]]
        self.rows.append(position | values)
        if not is_logged:
            self._due_rows += [(writer, self.rows[-1]) for writer in self._writers()]
        self._write_rows()
        with self._errors_as_warning(f"rows are missing in {TABLE}"):
            run_files.write_rows(self.output / TABLE, self.rows, self.monitored.name)
        with self._errors_as_warning(f"{CONFIG} may be missing"):
            if self._config and not (self.output / CONFIG).exists():  # the folder was removed
                self._write_config()
        if self.tracking:
            self.tracking.check()
        self.curves.start()
        self._print_warm_up(throughput)
        self.print_row(self.rows[-1], run_files.main_columns(self.monitored.name))

    def agree_on(self, results: dict[str, float]) -> dict[str, float]:
        """Return the results of rank 0, on all ranks; warn of those that differ.

        Raises UserError without the monitored metric, and for names that the loop logs, too.
        """
        self.monitored.require(results)
        self._metrics |= results.keys()
        logged = self._meter.sums.keys() if self._meter else set()
        if taken := self._metrics & logged:
            raise UserError(
                f"meter.log({min(taken)}=...) in the loop and Metrics.compute in task.py use the "
                "same name: rename one"
            )
        everywhere = distributed.all_gather(results, dist.group.WORLD)
        for name in dict.fromkeys(chain.from_iterable(everywhere)):
            others = torch.tensor(
                [one.get(name, math.nan) for one in everywhere], dtype=torch.float64
            )
            is_same = others.allclose(others[0], rtol=1e-3, atol=1e-6, equal_nan=True)
            if name not in self._differing and not is_same:
                self._differing.add(name)
                shown = ", ".join(f"{one:.4g}" for one in others[:4].tolist())
                self.warning(
                    f"{name} is not that of all samples, but differs between the processes "
                    f"({shown}): sum its counts in Metrics.compute, with dist.all_reduce"
                )
        return everywhere[0]  # on which --patience depends, and with it who trains on

    def _print_warm_up(self, images_per_second: float) -> None:
        """Print how long the warm-up took, if it was notably longer than other batches."""
        meter = self._meter
        seconds = meter.warm_up_seconds() if meter else 0.0
        if not (meter and seconds):  # such as in a resumed run, which only validates this epoch
            return
        usual = WARM_UP * meter.images_per_batch / images_per_second
        if seconds > usual + 1:
            self.info(f"warm-up: {WARM_UP} batches in {seconds:.1f} s, not counted in images/s")

    def log_image(self, step: int, write_image: Callable[[], Any]) -> None:
        """Call `write_image`, which writes files; if it returns a PNG file, log that."""
        if not self.active:
            return
        self.lock_again()
        # Errors other than those of the disk are bugs of write_image.
        with self._errors_as_warning("files of the validation are not written", OSError):
            path = Path(write_image() or "")
            if path.suffix == ".png":
                self._write_event(lambda events: events.add_image(path.parent.name, path, step))

    def check_folder(self) -> None:
        """Create the folder; raise UserError, before an evaluation, if it can't be written."""
        if self.active:
            with writing(self.output, OUTPUT_FIX):
                self.output.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(buffering=0, dir=self.output) as file:
                    file.write(bytes(4096))  # not on a full disk

    def log_evaluation(self, results: Mapping[str, float], **facts: object) -> None:
        """Print the results of a checkpoint; write them, and `facts` about it, to eval.json."""
        if not self.active:
            return
        path = self.output / EVALUATION
        text = " ".join(f"{name} {value:.4f}" for name, value in results.items())
        self.info(f"{path}: {text}")
        finite = {name: value if math.isfinite(value) else None for name, value in results.items()}
        with writing(self.output, OUTPUT_FIX):
            self.output.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:
                temporary.write_text(cli.as_json({"metrics": finite, **facts}))

    def _write_rows(self) -> None:
        """Write the rows that are due, and those that an error has held up, in their order."""
        waiting, self._due_rows = self._due_rows, []
        for writer, row in waiting:
            is_held_up = any(other is writer for other, _ in self._due_rows)
            if is_held_up or not self._write(writer, partial(self._add_rows, rows=[row])):
                self._due_rows.append((writer, row))

    def _writers(self) -> list[EventWriter | Tracking]:
        return [writer for writer in (self.events, self.tracking) if writer]

    def _write_event(self, write: Callable[[EventWriter | Tracking], None]) -> None:
        """Call `write` with each writer."""
        for writer in self._writers():
            self._write(writer, write)

    def _write(
        self, writer: EventWriter | Tracking, write: Callable[[EventWriter | Tracking], None]
    ) -> bool:
        """Call `write` with a writer; return whether that has succeeded."""
        kind = "TensorBoard events" if writer is self.events else "points of the trackers"
        with self._errors_as_warning(f"{kind} are missing"):
            write(writer)
            return True
        return False

    def finish_tracking(self, status: str) -> None:
        """End the run in the trackers as FINISHED or KILLED; wait for them, but not for long."""
        self._write_rows()
        tracking, self.tracking = self.tracking, None
        if tracking:
            with self._errors_as_warning("the trackers do not know that the run has ended"):
                tracking.finish(status)

    def close(self, best: float = -math.inf) -> None:
        """Finish the curves; print the run's best result, its duration and its folder.

        `best` is the score of best.pt, perhaps from within an epoch whose row was dropped later, or
        less than that of an epoch whose checkpoint is in another folder, or could not be written.
        """
        if not self.active:
            return
        self._write_rows()
        self.curves.finish()
        if self.tracking and self.rows:
            with self._errors_as_warning("the trackers do not have the curves"):
                self.tracking.add_image("curves", self.output / PICTURE, int(self.rows[-1]["step"]))
        self.finish_tracking("FINISHED")
        facts = []
        with contextlib.suppress(UserError):  # no finished epoch, or no room for its row
            run = run_files.read_run(self.output)
            facts.append(run.describe_best())
            score = run.best[0].score
            if math.isfinite(best) and best != score:
                origin = "within an epoch" if best > score else "another validation"
                facts.append(f"best.pt has {self.monitored.value(best):.4f} from {origin}")
        facts.append(f"took {timedelta(seconds=round(time.monotonic() - self.started_at))}")
        if self.throughputs:
            facts.append(f"{short_number(statistics.median(self.throughputs))} images/s")
        self.info(f"{', '.join(facts)}; checkpoints, {TABLE} and {PICTURE} are in {self.output}")


def has_checkpoints(folder: Path) -> bool:
    """Return whether there are complete checkpoints, files or folders, in `folder`.

    Raises OSError if the disk does not answer; Path.glob finds nothing then since Python 3.13.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return any(CHECKPOINT.fullmatch(path.name) for path in folder.iterdir())
    return False


def _as_text(row: Mapping[str, float]) -> str:
    """Return a text that is the same for the same row, also if it holds nan."""
    return str(sorted(row.items()))
