"""Manager of a run's checkpoints: when to save, and how to resume."""

import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from engine import UserError, distributed, is_directly_in
from engine.backend import bit_sums, is_sharded, local_shard, unwrap
from engine.checkpoint import compatibility, files, format, sharded, validation
from engine.checkpoint.archive import UnreadableError, security_warning
from engine.checkpoint.format import TrainingState
from engine.checkpoint.restore import optimizer_name, restore, restore_average, restore_ranks
from engine.checkpoint.selection import (
    AUTO,
    File,
    Source,
    find,
    has_saved_since,
    identify,
    times_after,
)
from engine.checkpoint.writer import CheckpointWriter
from engine.data import get_rng_state
from engine.distributed import all_gather, consistency
from engine.distributed.watchdog import StopSignals, Watchdog
from engine.monitoring import lock
from engine.monitoring.console import LINE_S
from engine.monitoring.logger import Logger
from engine.monitoring.meter import Meter, Sums
from engine.monitoring.metric import AVERAGE
from engine.optim import frozen_parameters

T = TypeVar("T")
POLL_S = 5.0  # between the exchanges of the ranks that wait for a write
# Of the threads that write together: to write slowly is no failure for them. Lost processes are
# detected otherwise; gloo uses no group again of which an operation has timed out, and its store
# takes 24 days at most.
WRITE_LIMIT = timedelta(days=7)


@dataclass
class CheckpointManager:
    """Manager of a run's checkpoints. All ranks create one and call its methods together.

    A checkpoint is copied to the memory of rank 0, and a thread writes it to ``step-<step>.pt``
    while the training continues. ``last.pt`` and ``best.pt`` are links to such files. If the model
    is sharded, each rank does that with its shards, in a folder ``step-<step>``.
    """

    folder: Path  # of the checkpoints; rank 0 writes to it
    keep: int  # how many numbered checkpoints to keep
    save_every: str | None  # interval in steps ("500") or minutes ("10m"), if any
    timeout_s: float  # limit of an operation between the ranks
    state: TrainingState
    metadata: dict[str, Any]  # plain values that describe the model, such as its arch
    data_sets: compatibility.DataSets  # whose classes and sizes are compared with a checkpoint's
    settings: dict[str, Any]  # of the run; a restart requires those of the folder's config.json
    logger: Logger
    stop_signals: StopSignals
    watchdog: Watchdog  # of the steps

    # Whether the validation data is that of the resumed checkpoint; None if that is unknown.
    has_same_val_data: bool | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.metadata |= compatibility.describe_data(self.data_sets)
        self.metadata["optimizer"] = optimizer_name(self.state.optimizer)
        self.metadata["files"] = consistency.file_digests()
        if frozen := frozen_parameters(unwrap(self.state.model)):
            self.metadata["frozen"] = frozen
        if not validation.is_metadata(self.metadata):  # no run could resume from it
            raise UserError("invalid classes, fingerprints or model_options['image'] (ImageSpec)")
        kind = type(self.state.optimizer).__name__
        try:
            optimizer = self.state.optimizer.state_dict()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"the state_dict() of {kind} fails ({reason})") from None
        if missing := {"param_groups", "state"} - optimizer.keys():
            raise UserError(f"the state_dict() of {kind} has no {min(missing)}: extend torch's")
        groups = optimizer["param_groups"]
        try:
            model = unwrap(self.state.model).state_dict(keep_vars=True)
        except TypeError as error:
            problem = f"state_dict() of the model must take the arguments of nn.Module's: {error}"
            raise UserError(problem) from None
        entries = self.metadata | {"param_groups": groups, "model": model}
        validation.require_plain(entries, "the checkpoint")
        self._fresh_groups = deepcopy(groups)
        limit = distributed.operation_limit(self.timeout_s + lock.wait_limit())
        group = dist.new_group(backend="gloo", timeout=limit)
        assert isinstance(group, dist.ProcessGroup)  # every rank is in it
        self._group = group
        self._agreement = distributed.AsyncMax(group, 2)
        self._is_sharded = is_sharded(self.state.model)
        writers = dist.new_group(backend="gloo", timeout=WRITE_LIMIT) if self._is_sharded else None
        assert not isinstance(writers, int)  # every rank is in it
        self._writer = CheckpointWriter(
            self.folder, self.keep, self.state.progress, self.logger.warning, writers, group
        )
        interval = self.save_every or "0"
        is_in_minutes = interval.endswith("m")
        self._interval_s = 60.0 * int(interval[:-1]) if is_in_minutes else math.inf
        self._interval_steps = 0 if is_in_minutes else int(interval)
        self.saved_at = time.monotonic()
        self._saved_step = -1
        self._weights: tuple[int, dict[str, Tensor]] = (-1, {})  # step and sums of what was saved
        self._is_searched = True  # this host's folder, which may hold another run
        self._has_pinned_memory = False
        self._meter: Meter | None = None
        self._means: list[Sums] = []

    def resume(
        self, choice: Path | None, steps_per_epoch: int, required: bool = False
    ) -> Path | None:
        """Restore a checkpoint; return its path, or None if the run starts from the beginning.

        A process that replaces a failed one restores the newest checkpoint, whatever `choice` is.

        Args:
            choice: a checkpoint, "auto" for the newest one in the folder, if any, or None.
            steps_per_epoch: to convert the epochs of another script's checkpoint.
            required: for --eval-only, which always uses `choice`.

        Raises UserError if the checkpoint cannot be used, or is `required` and there is none; or if
        the hosts of a sharded model don't share the folder.
        """
        if not required:
            self._lock_folder()
        source = self._find(choice, required)
        if source is None:
            if required:
                missing = f": {self.folder} has none, see --output" if choice == AUTO else ""
                raise UserError(f"--eval-only needs --resume with a checkpoint{missing}")
            return None
        entries = self._load(source, with_optimizer=not required)
        saved = entries["metadata"]
        is_own = all_gather(is_directly_in(source.path, self.folder), self._group)[source.rank]
        if not required:
            format.require_own_format(source.path, entries, is_own)
            compatibility.require_same_frozen(source.path, saved, self.metadata)
        compatibility.warn_of_changed_files(
            f"--resume {source.path}", saved, self.logger.warning, is_training=not required
        )
        notes = compatibility.compare_metadata(
            source.path, saved, self.metadata, self.data_sets, self.logger.warning
        )
        self.has_same_val_data = compatibility.is_same_val_data(saved, self.metadata)
        compatibility.warn_of_changed_data(
            source.path, entries, self.metadata, required, self.logger.warning
        )
        moments_note = restore(source.path, entries, self.state, is_evaluation=required)
        self._restore_progress(source.path, entries, is_own, required)
        progress = self.state.progress
        if progress.step is None:  # in another script's checkpoint
            progress.step = progress.epoch * steps_per_epoch
        message = f"resumed {source.path} after {progress.epoch} epochs, {progress.step} steps"
        if source.rank:
            self.logger.has_moved = True
            message += f", from the host of rank {source.rank}"
        try:
            self._means, ranks_note = restore_ranks(
                entries["ranks"], progress.step, bool(self.settings.get("scale_lr"))
            )
            message += restore_average(entries.get("ema"), self.state)
        except Exception as error:  # altered values raise anything
            reason = shorten(str(error), 160)
            raise UserError(
                f"--resume {source.path}: the state of its processes, or its average of the "
                f"weights, is altered ({reason}); use another one"
            ) from None
        self._writer.newest = source.path
        self._note_weights(format.collect(self.state))
        notes += "" if required else moments_note + ranks_note  # which are about training
        self.logger.info(message + notes + format.describe_origin(entries["origin"]))
        if is_own and not required:
            self._restore_best(source, entries, is_newest=choice == AUTO)
        return source.path

    def _restore_best(self, source: Source, entries: dict[str, Any], is_newest: bool) -> None:
        """Restore which checkpoint is the best one up to the resumed one.

        Args:
            source, entries: of the resumed checkpoint, which is in this run's folder.
            is_newest: it is the newest valid one, not one that the user chose.
        """
        progress = self.state.progress
        is_writer = dist.get_rank() == 0
        # A process may have been killed between writing a checkpoint and naming it best.pt.
        *before, score = progress.scores or [-math.inf]
        own_best = files.read_patiently(files.best_of, self.folder) if is_writer else None
        has_best = source.rank > 0 or bool(all_gather(own_best, self._group)[0])
        # Another one of the same score is best.pt, unless it was removed.
        highest = max(before, default=-math.inf) if has_best else -math.inf
        results = entries.get("results") or {}  # of an owner's `save`, which may not be scored
        is_scored = bool(results) and self.logger.monitored.best(results).score == score
        is_best = is_scored and score == entries["best"] > highest
        if source.rank:
            self._fetch_best(source if is_best else None)
        elif not has_best:
            progress.best = -math.inf
        own = files.Rewind.to(progress.step, self.folder, is_newest) if is_writer else None
        if is_writer and not is_newest:  # of no use to a restart with --resume auto
            self.logger.discarded = times_after(self.folder, progress.step)
        rewind = all_gather(own, self._group)[0]
        assert rewind is not None  # rank 0's
        if rewind.has_later and not is_newest:
            self.logger.warning(
                "the first save, also that of a stop, removes the checkpoints after step "
                f"{progress.step}: to keep them, name another folder as --output"
            )
        if rewind.best_step >= 0:
            progress.best = -math.inf
            self.logger.warning(rewind.describe(self.folder))
        elif progress.best == -math.inf or (is_best and source.rank == 0):
            compared = self._compare_best(source, own_best) if is_writer else -math.inf
            progress.best = all_gather(compared, self._group)[0]
        if is_best and source.rank == 0:
            progress.best = score
            rewind.best = source.path.resolve()
            self._writer.keep_best()
            if is_writer and not rewind.has_later and rewind.best_step < 0:
                files.alias(rewind.best, files.BEST)
        self._writer.rewind = rewind
        if entries["samples"] and is_scored:  # its epoch is validated again later
            progress.scores = before

    def _compare_best(self, source: Source, best: Path | None) -> float:
        """Return the score of best.pt if its validation was this run's, or -inf; call it on rank 0.

        The file of another validation gets another name once a new one is the best.
        """
        known = self.state.progress.best
        if not best or (known > -math.inf and files.read_patiently(best.samefile, source.path)):
            return known
        entries = files.read_patiently(files.load_best, best)
        score = float(entries["best"])
        change = compatibility.compare_scores(entries["metadata"], self.metadata)
        if score > -math.inf and source.rank == 0 and not change:
            if known == -math.inf:  # else the resumed one is the best
                self.logger.info(f"{best} is of the same validation as now: its score is compared")
            return score
        self._writer.replaced = files.Rewind(0, best_step=entries["step"] or 0)  # another script's
        self.logger.warning(self._writer.replaced.describe(self.folder))
        return -math.inf

    def _fetch_best(self, source: Source | None) -> None:
        """Copy the best checkpoint to rank 0's host from that which has it; forget it if none has.

        The hosts share no disk, and rank 0 has moved. Its own best.pt may be of steps that the run
        has lost since.

        Args:
            source: of the best checkpoint, if it is the resumed one.
        """
        progress = self.state.progress
        if progress.best == -math.inf:
            return
        own = files.identify_best(self.folder) if distributed.is_local_leader() else None
        if source is None:
            found = all_gather(own if self._is_searched else None, self._group)
            scores = [best and best[0] for best in found]
            ranks = (*range(1, len(found)), 0)  # rank 0's own may be of lost steps
            owner = next((rank for rank in ranks if scores[rank] == progress.best), None)
            if owner is not None and found[owner] == found[0]:
                return
            source = None if owner is None else Source(self.folder / files.BEST, owner)
        content = source and format.broadcast_file(source.path, source.rank, self._group)
        if source is None or content is None:
            self.logger.warning(
                f"no host has the best checkpoint, of {progress.best:.4g}: the next validation "
                "makes a new best.pt"
            )
            progress.best = -math.inf
            return
        is_kept = dist.get_rank() == 0 and self._write_best(
            content.getbuffer(), source.rank, own[1] if own else None
        )
        if not all_gather(is_kept, self._group)[0]:
            progress.best = -math.inf

    def _write_best(self, content: memoryview, owner: int, own_step: int | None) -> bool:
        """Write best.pt of rank `owner`, and keep that of `own_step`; return False if it fails."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            earlier = files.replace_best(self.folder, content, own_step)
        except OSError as error:
            self.logger.warning(f"{files.BEST} can't be written ({error.strerror or error})")
            return False
        kept = f"; the one that was here is {earlier.name} now" if earlier else ""
        self.logger.info(f"copied {files.BEST} from the host of rank {owner}{kept}")
        return True

    def _restore_progress(
        self, path: Path, entries: dict[str, Any], is_own: bool, is_evaluation: bool
    ) -> None:
        """Restore the counters, the history and the best score, if it is of the same metric.

        An epoch that is further than its number of samples, which has changed, starts again.
        """
        progress = self.state.progress
        for name, value in vars(progress).items():
            setattr(progress, name, entries.get(name, value))
        self.logger.rows = entries["history"]
        self.logger.run_id = entries.get("run_id", "") if is_own else ""
        if is_evaluation and not self.state.ema and format.best_weights(entries) == "ema":
            self.logger.warning(
                f"--resume {path}: its average of the weights is the better one; add --ema to "
                "validate that, too"
            )
        change = compatibility.compare_scores(entries["metadata"], self.metadata)
        is_comparable = is_evaluation or not change
        if not (is_own and is_comparable):  # another folder's best checkpoint is not this one's
            progress.best = -math.inf
            progress.scores = []
        if is_own and not is_comparable:
            self.logger.warning(f"--resume {path}: {change}; its scores are not compared")
        length = len(self.data_sets.get("train", ()))
        # The epochs of an owner's sampler may be longer than the data.
        has_changed = entries["metadata"].get("samples", {}).get("train", 0) != length
        is_training = "train" in self.data_sets and not is_evaluation
        if is_training and has_changed and progress.samples > length:
            self.logger.warning(
                f"--resume {path}: it is {progress.samples} samples into an epoch, which has "
                f"{length} now; this epoch is trained from its beginning"
            )
            progress.samples = 0

    def _lock_folder(self) -> None:
        """Lock the folder, before any rank lists its files.

        Raises UserError if another run has locked it, the hosts of a sharded model don't share it,
        or the name of a checkpoint in it is that of something else.
        """
        self.logger.lock()
        if dist.get_rank() == 0:
            files.check_names(self.folder)
        dist.barrier(self._group)
        if self._is_sharded and not distributed.is_single_host():
            sharded.require_shared(self.folder, self._group)

    def start_epoch(self, meter: Meter) -> None:
        """Save the sums of `meter` from now on; restore those of an interrupted epoch into it."""
        self._meter = meter
        if self.state.progress.samples:
            meter.load_state_dicts(self._means)

    def end_step(self) -> int:
        """Save if it is time; return the signal that asks the job to stop, or 0.

        Call it after each optimizer step. The ranks agree through the CPU while the next step runs,
        so that nothing waits for a GPU: a signal is returned, and an interval in minutes has its
        effect, after the next step.
        """
        self._pin_memory()
        signal_number, is_time = self._agreement.result()
        if signal_number:
            return signal_number
        interval = self._interval_steps  # 0 without one
        if is_time or (interval and self.state.progress.step % interval == 0):
            self.save()
        # The clock of rank 0 decides: those of others may differ by a step.
        is_due = dist.get_rank() == 0 and time.monotonic() - self.saved_at >= self._interval_s
        self._agreement.submit(self.stop_signals.requested, is_due)
        return 0

    def until_stopped(
        self, batches: Iterable[T], idle: Callable[[], object] | None = None
    ) -> Iterator[T]:
        """Yield the batches of a validation; save and exit once the job is asked to stop.

        The ranks agree after each batch. Some may have fewer batches: they wait for the others, or
        call `idle` at each batch of theirs, to take part in the communication of a forward pass.
        """
        self._exit_if(self._agreement.result()[0])  # of the last step
        remaining = iter(batches)
        is_left = 1
        while is_left:
            batch = list(islice(remaining, 1))
            self._agreement.submit(self.stop_signals.requested, len(batch))
            yield from batch
            signal_number, is_left = self._agreement.result()
            if idle and is_left and not batch:
                idle()
            self._exit_if(signal_number)

    def save(self, results: dict[str, float] | None = None) -> None:
        """Save the run as it is now.

        Waits for the device, and until the checkpoint before this one is written. If that is of the
        same step and weights, as after a validation, its thread writes the new values later;
        nothing waits.
        Raises UserError if the tensors hold nan, and those of the save before did at another step.

        Args:
            results: of the validation of this state, which is ``best.pt`` if its metric is the
                best so far.
        """
        own = {"rng": get_rng_state(), "meter": self._sums()}
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(own, ranks if dist.get_rank() == 0 else None, group=self._group)
        self.saved_at = time.monotonic()
        self._saved_step = self.state.progress.step
        self.logger.lock_again()
        if dist.get_rank() != 0 and not self._is_sharded:
            return
        values = self._collect_values(results or {}) | {"ranks": ranks}
        entries = format.collect(self.state)
        has_changed = self._note_weights(entries)
        if has_changed or not self._writer.amend(values):
            self.wait()
            if has_changed:
                self._writer.written_step = -1
                self.logger.warning(
                    "the weights were changed since the last save, without a step: the checkpoint "
                    "has those that are validated, from which a resumed run goes on"
                )
            self._writer.start(format.to_cpu(entries) | values)
            if self._writer.nan_steps or self._writer.failures:
                self.wait()
                if self._writer.is_hopeless:  # nan stays, as in batch norm's statistics
                    raise self._writer.error()

    def _collect_values(self, results: dict[str, float]) -> dict[str, Any]:
        """Return the entries of a checkpoint about the progress, for `results` as in `save`.

        They are copies: the training continues, and changes them, while a thread writes.
        """
        progress = self.state.progress
        best = self.logger.monitored.best(results)
        if results:
            progress.weights = "ema" if best.name.endswith(AVERAGE) else "model"
        elif not self.state.ema:  # that of a run with an average was resumed
            progress.weights = "model"
        if names := format.trained_settings(self._fresh_groups, self.state.optimizer):
            self.metadata["trained_settings"] = names
        values = vars(progress) | {"metadata": self.metadata, "history": self.logger.rows}
        pending = progress.pending_row.items()  # an owner may have added tensors
        values["pending_row"] = {k: v.item() if isinstance(v, Tensor) else v for k, v in pending}
        if self.logger.run_id:
            values["run_id"] = self.logger.run_id
        values |= {"results": results, "best": best.score}  # CheckpointWriter compares it
        return format.to_cpu(values)

    def _note_weights(self, entries: dict[str, Any]) -> bool:
        """Store sums of the weights; return whether the last save of this step had other weights.

        An edit may set batch norm's statistics before a validation, for example. The sums are of
        bits, hide a change of order, and are compared within a step only: that waits for the GPU.
        """
        tensors = entries["model"] | {f"ema.{k}": v for k, v in entries.get("ema", {}).items()}
        if dist.get_rank() != 0:  # a validation makes whole ones those of rank 0, which saves them
            tensors = {name: one for name, one in tensors.items() if local_shard(one) is not one}
        sums = bit_sums(tensors)
        before, self._weights = self._weights, (self.state.progress.step, sums)
        has_changed = before[0] == self.state.progress.step and before[1] != sums
        return any(all_gather(has_changed, self._group)) if self._is_sharded else has_changed

    def _sums(self) -> Sums:
        """Return the sums of this rank's meter, which matter within an epoch."""
        if not self.state.progress.samples:
            return {}
        if self._meter is None:  # resumed, and not trained since
            self._meter = Meter(torch.device("cpu"), 0)
            self._meter.load_state_dicts(self._means)
        return self._meter.state_dict()

    def _exit_if(self, signal_number: int) -> None:
        if signal_number:
            self.save_and_exit(signal_number)

    def save_and_exit(self, signal_number: int) -> NoReturn:
        """Save, requeue the SLURM job after SIGUSR1, and exit with status 128 + signal."""
        step = self.state.progress.step
        self._wait_together()  # in `save`, rank 0 would wait alone
        has_failed = any(all_gather(self._writer.problem, self._group))
        if has_failed or self._saved_step != step:  # an epoch is saved before its validation
            self._writer.forget_failures()  # to exit with the status of the signal
            self.save()
            self._wait_together()
        if self._writer.problem:
            self.logger.warning(f"stopped after step {step}: {self._writer.problem}")
        else:
            self.logger.finish_tracking("KILLED")
            self.logger.info(f"stopped after step {step}; add --resume auto to continue")
        if signal_number == signal.SIGUSR1 and dist.get_rank() == 0:
            distributed.requeue(self.logger.info, self.logger.warning)
        self.stop_signals.exit_together(signal_number, self._group)

    def wait(self) -> None:
        """Wait until everything that was saved is on the disk, or could not be written."""
        self._writer.wait()

    def finish(self) -> None:
        """Wait on all ranks for the last write: a launcher ends a job 300 s after its ranks exit.

        Raises UserError if the run's last state could not be written, or not get its names.
        """
        self._wait_together()
        if self._writer.problem:
            raise self._writer.error()

    def _wait_together(self) -> None:
        """Wait as `wait` does, for all ranks and without a limit, at the end of the run."""
        self.watchdog.leave()
        next_line = time.monotonic() + LINE_S
        # Each exchange has a limit, and a write has none.
        while any(all_gather(self._writer.wait(POLL_S), self._group)):
            if time.monotonic() >= next_line:
                next_line += LINE_S
                self.logger.info(f"step-{self._saved_step} is still being written")

    def _find(self, choice: Path | None, required: bool) -> Source | None:
        """Return the checkpoint to resume from, which is the same on all ranks."""
        is_restart = distributed.is_restart() and not required
        if choice == AUTO and not required:
            log = self.logger.warning if is_restart else self.logger.info
            compatibility.log_changed_settings(self.folder, self.settings, log)
        elif is_restart:
            self._is_searched = compatibility.was_begun(self.folder, self.settings)
            begun = all_gather(self._is_searched, self._group)
            is_restart = self.logger.is_restart = any(begun)
            if is_restart and not begun[0]:
                self._require_free()  # of an older run, whose checkpoints the first save removes
        first = AUTO if is_restart else choice
        given: list[Path] = []
        discarded = compatibility.read_discarded(self.folder) if choice else []
        if choice == AUTO and not has_saved_since(self.folder, discarded):
            discarded = []  # they may be all that there is
        if is_restart and choice not in (AUTO, None):
            # The run may have gone back to an earlier one of its own, such as best-of-step-50.pt.
            given = [choice] if is_directly_in(choice, self.folder) else []
        warn = self.logger.warning
        source = find(self.folder, first, warn, self._group, self._is_searched, discarded, given)
        if source or required or (choice is None and not is_restart):
            return source
        if choice in (AUTO, None):
            self.logger.info(f"{self.folder} has no checkpoint: the run starts from the beginning")
            compatibility.warn_of_start(self.folder, self.logger.warning)
            return None
        return find(self.folder, choice, warn, self._group)

    def _require_free(self) -> None:
        """Raise UserError, on all ranks, if the folder of rank 0's host holds checkpoints.

        A best.pt may have been copied there for this run, and is kept otherwise.
        """
        own = files.numbered(self.folder) if dist.get_rank() == 0 else []
        if all_gather(own, self._group)[0]:
            raise UserError(
                f"{self.folder} on the host of rank 0 holds an older run: move it away, and start "
                "this one again with --resume auto"
            )

    def _load(self, source: Source, with_optimizer: bool) -> dict[str, Any]:
        """Return the entries of a checkpoint, which its host sends to all others."""
        warning = "" if is_directly_in(source.path, self.folder) else security_warning(source.path)
        if warning:
            self.logger.warning(f"--resume {source.path}: {warning}")
        folder = self._resolve(source.path)
        try:
            if folder and self._is_sharded:
                return self._load_shards(folder, with_optimizer)
            entries = format.load(folder) if folder else self._load_file(source)
            if self._is_sharded:
                self._distribute(source.path, entries, with_optimizer)
        except UserError as error:
            raise UserError(f"--resume {error}") from None
        return entries

    def _resolve(self, path: Path) -> Path | None:
        """Return the folder of a sharded checkpoint, by its own name, the same on all ranks.

        A link to it, such as best, may become one to another folder. None if it is a file.
        """
        names = all_gather(path.resolve().name if path.is_dir() else "", self._group)
        return path.resolve().with_name(names[0]) if names[0] else None

    def _load_file(self, source: Source) -> dict[str, Any]:
        """Return the entries of a checkpoint that is one file.

        Raises UserError if the processes of a host have read different ones, since another run
        replaces it.
        """
        path = source.path
        before = _identify_if_there(path)
        content = format.broadcast_file(path, source.rank, self._group)
        entries = format.load(path, content)
        found = all_gather({before, _identify_if_there(path)}, self._group)
        is_shared = dist.get_world_size() > 1 and distributed.is_single_host()
        if is_shared and len(set().union(*found)) > 1:
            raise UserError(f"{path}: it was replaced while it was read; start again")
        return entries

    def _load_shards(self, path: Path, with_optimizer: bool) -> dict[str, Any]:
        """Return the entries of a sharded checkpoint, with this rank's shards of its tensors."""
        entries = format.check(path, sharded.read_state(path, self._group))
        sharded.read_tensors(path, entries, self._templates(with_optimizer))
        step = entries["step"]
        if path.resolve() == self.folder.resolve() / f"step-{step}":
            self._writer.written_step = step  # a copy may have the name of another step
        return entries

    def _distribute(self, path: Path, entries: dict[str, Any], with_optimizer: bool) -> None:
        """Replace the tensors of a checkpoint that is one file by this rank's shards of them."""
        from engine.distributed.sharding import distribute_entries

        try:
            distribute_entries(entries, self._templates(with_optimizer))
        except ValueError as error:
            raise UserError(
                f"{path}: it does not fit this model ({error}); resume with the --arch and the "
                "classes that it was made with"
            ) from None

    def _templates(self, with_optimizer: bool) -> dict[str, Tensor]:
        optimizer = self.state.optimizer if with_optimizer else None
        return sharded.templates(format.collect(self.state), optimizer)

    def _pin_memory(self) -> None:
        """Allocate the pinned memory that saves copy to, once the optimizer has moments.

        That takes as long as some steps, and torch keeps the memory for the saves to come.
        """
        if self._has_pinned_memory or not self.state.optimizer.state:
            return
        self._has_pinned_memory = True
        validation.require_plain(self.state.optimizer.state_dict(), "the optimizer's state")
        if (self._is_sharded or dist.get_rank() == 0) and torch.cuda.is_initialized():
            format.to_cpu(format.collect(self.state))


def _identify_if_there(path: Path) -> File | None:
    with suppress(UnreadableError):
        return identify(path)
    return None
