"""Thread that writes a run's checkpoints while the training continues."""

import math
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine import SUFFIX, UserError, exists
from engine.checkpoint import archive, files, manifest, validation
from engine.checkpoint.files import BEST, BEST_FOLDER, LAST
from engine.checkpoint.format import Progress
from engine.distributed import all_gather
from engine.distributed.peers import SHARD_WRITER, WRITER


@dataclass
class CheckpointWriter:
    """Writer of one checkpoint at a time, which also updates ``last.pt`` and ``best.pt``."""

    folder: Path  # of the checkpoints
    keep: int  # how many numbered checkpoints to keep
    progress: Progress  # of the run, whose `best` is updated
    warn: Callable[[str], None]  # called with a message if a checkpoint cannot be written
    # Of all ranks, whose threads write a sharded checkpoint together; else only rank 0 writes.
    group: dist.ProcessGroup | None
    main_group: dist.ProcessGroup  # of all ranks, for their main threads
    problem: str = field(default="", init=False)  # with the last write
    nan_steps: set[int] = field(default_factory=set, init=False)  # of the last writes, with nan
    failures: int = field(default=0, init=False)  # before the first success, not of the disk
    newest: Path | None = field(default=None, init=False)  # written, or resumed from
    written_step: int = field(default=-1, init=False)  # of the last folder written, or resumed from
    rewind: files.Rewind | None = field(default=None, init=False)  # until a resumed run saves
    replaced: files.Rewind | None = field(default=None, init=False)  # best.pt, if not compared

    def __post_init__(self) -> None:
        self._stuck: set[Path] = set()  # incomplete folders that can't be removed
        self._best: Path | None = None  # what is to become best.pt
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._pending: list[dict[str, Any]] = []  # of one step: being written, and next

    def start(self, entries: dict[str, Any]) -> None:
        """Start to write `entries`. Their copies from the GPU may still be in the current stream.

        Call `wait` before.
        """
        copied = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None
        self._pending = [entries]
        name = SHARD_WRITER if self.group else WRITER
        self._thread = threading.Thread(None, self._write_all, name, (copied,), daemon=True)
        self._thread.start()

    def amend(self, values: dict[str, Any]) -> bool:
        """Queue another write of the checkpoint that is being written, with other `values`.

        Returns False, and does nothing, if no checkpoint of their step is being written. The ranks
        of `group` call it together: the threads of all of them must write the same ones.
        """
        with self._lock:  # which no thread needs to finish a write
            is_same = any(one["step"] == values["step"] for one in self._pending)
            if not all(all_gather(is_same, self.main_group if self.group else None)):
                return False
            amended = self._pending[-1] | values
            if not self.group:  # else, all ranks must write the same ones
                del self._pending[1:]
            self._pending.append(amended)
            return True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until everything that was saved is on the disk, or could not be written.

        Returns whether it is still being written after `timeout_s`.
        """
        if self._thread:
            self._thread.join(timeout_s)
        return self._thread is not None and self._thread.is_alive()

    def _write_all(self, copied: torch.cuda.Event | None) -> None:
        while self._pending:
            self._write(self._pending[0], copied)
            with self._lock:
                del self._pending[0]

    def _write(self, entries: dict[str, Any], copied: torch.cuda.Event | None) -> None:
        """Write `entries`; `copied` is recorded after their copies from the GPU."""
        path = self.folder / f"step-{entries['step']}{'' if self.group else '.pt'}"
        self._forget_missing_best()
        # One before, which may have been written only after this was saved, may be better.
        entries["best"] = max(entries["best"], self.progress.best)
        failed = f"{path} could not be written"
        try:
            if copied:
                copied.synchronize()
            if self.group:
                self._write_shards(path, entries, self.group)
            else:
                validation.check_savable(path, entries)  # or the file could not be resumed
                self._prepare()
                files.write_or_make_room(path, entries, self.warn, self.rewind)
            failed = f"{path} was written, but files can't be renamed or removed"
            if dist.get_rank() == 0:
                rewind = self.rewind or files.Rewind(entries["step"])
                rewind.finish(self.folder, path)
            self.rewind = None
            if entries["best"] > self.progress.best:
                self.progress.best = entries["best"]
                self._best = path
            if dist.get_rank() == 0:
                files.alias(path, LAST)
                if self._best:
                    self.keep_best()
                    files.alias(self._best, BEST)
                    self._best = None
                files.prune(self.folder, self.keep)
            self.newest = path
            self.forget_failures()
            self.problem = ""
        except Exception as error:  # the training goes on without this checkpoint
            text = getattr(error, "strerror", None) or str(error) or type(error).__name__
            is_nan = isinstance(error, FloatingPointError)
            self.nan_steps = self.nan_steps | {entries["step"]} if is_nan else set()
            self.problem = f"{failed} ({text.splitlines()[0]})"
            # Disk or memory may have room later.
            is_full = isinstance(error, OSError) or bool(archive.reason_of(error))
            self.failures += not (self.newest or is_full or is_nan)
            if not self.is_hopeless:  # else, the run ends with this problem
                ends = "; nan in the next one, too, ends the run" if is_nan else ""
                ends = "; if the next one fails, too, it ends" if self.failures else ends
                kept = f"the run goes on, the checkpoints before it are kept{ends}"
                self.warn(f"{self.problem}; {kept}")

    @property
    def is_hopeless(self) -> bool:
        """Return whether no later write is likely to succeed."""
        return self.failures > 1 or len(self.nan_steps) > 1

    def forget_failures(self) -> None:
        """Reset the counts of failures."""
        self.failures, self.nan_steps = 0, set()

    def error(self) -> UserError:
        """Return the error of a run that ends with `problem`."""
        if not self.nan_steps:
            is_back = self.rewind is not None and self.rewind.has_later  # the newest ones still
            fix = "start again with the same --resume" if is_back else "add --resume auto"
            fix = fix if self.newest else "start again"
            return UserError(f"{self.problem}: fix that, and {fix}")
        cause = "nan in the images of a batch, an overflow in half precision, or too high a --lr"
        good = f"resume from {self.newest}, the last good checkpoint"
        then = good if self.newest else "start again"
        return UserError(f"{self.problem}, probably due to {cause}: fix this first, then {then}")

    def keep_best(self) -> None:
        """Rename a best.pt of another validation, so that no save replaces it."""
        if self.replaced:
            self.replaced.keep_best(self.folder)
            self.replaced = None

    def _forget_missing_best(self) -> None:
        """Reset the best score if best.pt was removed: the next validation replaces it."""
        is_expected = dist.get_rank() == 0 and self.progress.best > -math.inf and not self.rewind
        with suppress(OSError):  # the disk does not answer just now: it may be there
            best = self._best or self.folder / (BEST_FOLDER if self.group else BEST)
            if is_expected and not (exists(best) if self._best else files.best_of(self.folder)):
                self._best, self.progress.best = None, -math.inf
                self.warn(f"{best} was removed: the next validation replaces it")

    def _prepare(self) -> None:
        """Remove what a killed process left incomplete; keep the best of what is replaced."""
        if self.rewind:
            self.rewind.keep_best(self.folder)
        for incomplete in self.folder.glob("*.pt" + SUFFIX):
            if incomplete.is_symlink() or not incomplete.is_dir():
                incomplete.unlink(missing_ok=True)
        for incomplete in self.folder.glob("step-*" + SUFFIX):
            files.remove(incomplete)
            if incomplete.exists() and incomplete not in self._stuck:
                self._stuck.add(incomplete)
                self.warn(f"{incomplete} can't be removed: remove it, to free its space")

    def _write_shards(self, path: Path, entries: dict[str, Any], group: dist.ProcessGroup) -> None:
        """Write a folder; all ranks call it. `written_step` has its tensors already."""
        is_written = self.written_step == entries["step"]
        if dist.get_rank() == 0:
            with suppress(OSError):  # the disk does not answer just now: it may be there
                is_written = is_written and exists(path / manifest.MANIFEST)
        is_written = all_gather(is_written, group)[0]
        if dist.get_rank() == 0:
            try:
                self._prepare()
            except OSError as error:  # the other ranks are waiting for this one
                self.warn(f"{self.folder}: files can't be removed or renamed ({error})")
        if not is_written:
            files.write_or_make_room(path, entries, self.warn, self.rewind, group)
            self.written_step = entries["step"]
        elif dist.get_rank() == 0:
            files.write_or_make_room(path, entries, self.warn)
