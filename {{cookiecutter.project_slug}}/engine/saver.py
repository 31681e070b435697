"""Saves a run as it goes, and ends it where a signal asks for that."""

import json
import math
import os
import re
import signal
import subprocess
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from textwrap import shorten
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from engine import checkpoint, cli, distributed, rng, watch
from engine.errors import UserError
from engine.files import SUFFIX, link
from engine.report import CONFIG, Meter
from engine.training import Ema
from engine.watch import Watch


class Saver:
    """Holds how far a run is, and keeps it on the disk.

    Rank 0 copies all that a resume needs to its memory; a thread of it writes that to
    ``step-<step>.pt``, whole or not at all, while the training goes on.

    Args:
        args: with ``output``, the folder for ``last.pt``, ``best.pt`` and the newest ``keep``
            checkpoints; ``save_every``, steps ("500") or minutes ("10m"); ``timeout``, seconds in
            which a step must be done; and ``arch`` and ``data``, which are saved too.
        model, optimizer, amp: what is saved.
        say: prints a line on rank 0.
        ema: saved too, if any.
        about: what else a checkpoint is to say of its model, in plain types.
    """

    def __init__(
        self,
        args: Namespace,
        model: nn.Module,
        optimizer: Optimizer,
        amp: object,
        say: Callable[[str], None],
        ema: Ema | None = None,
        about: dict[str, object] | None = None,
    ) -> None:
        self.parts, self.ema, self.say = (model, optimizer, amp), ema, say
        self.about = {"arch": args.arch, "data": str(args.data or "")} | (about or {})
        self.settings = cli.settings(args)
        self.folder, self.keep, every = args.output, args.keep, args.save_every
        self.progress = checkpoint.Progress()
        self.meter: Meter | None = None
        self.watch = Watch(args.timeout)
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=args.timeout + 60))
        self.asked = distributed.Agreement(self.group, 2)
        number = int(every.removesuffix("m")) if every else 0
        in_minutes = bool(every) and every.endswith("m")
        self.every_steps = 0 if in_minutes else number
        self.every_s = 60.0 * number if in_minutes else math.inf
        self.saved_at = time.monotonic()
        self.writer: threading.Thread | None = None
        self.is_pinned = False
        self.problem = ""
        self.losses: list[tuple[float, int]] = []

    def resume(
        self, choice: Path | None, steps_per_epoch: int, required: bool = False
    ) -> Path | None:
        """Goes on from `choice`, as `checkpoint.find` takes it; returns the checkpoint, if any.

        Raises UserError if there is none and it is `required`, for --eval-only.
        """
        if required and choice != Path("auto"):
            path = choice  # a restart goes on with the newest, but validates what it was told to
        else:
            if distributed.is_restart() and choice != Path("auto"):
                self._require_own_folder()
            path = checkpoint.find(choice, self.folder, self.say)
        if path:
            self.say(self._resume(path, steps_per_epoch))
        elif required:
            raise UserError("--eval-only needs --resume with a checkpoint")
        return path

    def _require_own_folder(self) -> None:
        """Raises UserError if a run of other flags has left its checkpoints in the folder."""
        written = self.folder / CONFIG
        if dist.get_rank() != 0 or not written.exists():
            return
        theirs, ours = json.loads(written.read_text()), json.loads(cli.as_json(self.settings))
        for name in sorted(
            (ours.keys() & theirs.keys()).difference(distributed.MAY_DIFFER, {"steps"})
        ):
            if theirs[name] != ours[name]:
                raise UserError(
                    f"{self.folder} holds another run, of {name} {theirs[name]} and not "
                    f"{ours[name]}: add --resume auto to go on with it, or --output with another "
                    "folder"
                )

    def _resume(self, path: Path, steps_per_epoch: int) -> str:
        """Goes on from `path`; returns what there is to say of it."""
        content = checkpoint.hand_out(path, self.group)
        state = checkpoint.restore(path, *self.parts, content=content)
        for name in vars(self.progress):
            setattr(self.progress, name, state[name])
        if not (self.folder / checkpoint.BEST).exists():  # of this folder, the next one is
            self.progress.best = -math.inf
        if self.progress.step is None:  # in another script's
            self.progress.step = self.progress.epoch * steps_per_epoch
        words = f"resumed {path} after {self.progress.epoch} epochs, {self.progress.step} steps"
        try:
            words += self._resume_ranks(state["ranks"])
            words += self._resume_ema(state.get("ema"))
        except Exception as error:  # altered numbers raise anything
            reason = shorten(" ".join(str(error).split()), 160)
            raise UserError(
                f"--resume {path}: the state of its processes, or its average of the weights, is "
                f"altered ({reason}); use another one"
            ) from None
        return words + state["origin"]

    def _resume_ema(self, average: dict | None) -> str:
        """Goes on with the average of the weights; returns what there is to say of it."""
        if self.ema is None:
            return ", without its average of the weights (--ema)" if average else ""
        model, optimizer, _ = self.parts
        self.ema.module.load_state_dict(average or checkpoint.weights(model, optimizer))
        return "" if average else "; it has no average of the weights, which begins here"

    def _resume_ranks(self, ranks: list[dict]) -> str:
        """Goes on with what each process had of its own; returns what there is to say of it."""
        rank = dist.get_rank()
        if len(ranks) == dist.get_world_size():
            rng.restore(ranks[rank]["rng"])
            self.losses = _losses(ranks[rank : rank + 1])
            return ""
        rng.seed(rng.mixed(torch.initial_seed(), self.progress.step))
        self.losses = _losses(ranks) if rank == 0 else []
        if not ranks:  # another script's
            return ""
        return f", not bit by bit as its {len(ranks)} processes would have gone on"

    def steps(self, batches: Iterable, meter: Meter) -> Iterator:
        """Yields `batches`; after the step on each, saves if it is time and stops if asked to."""
        self.meter = meter
        if self.progress.samples:
            meter.load(self.losses)
        if not self.watch.is_alive():
            self._start()
        for batch in batches:
            watch.begin(f"step {self.progress.step + 1}")
            yield batch
            self._pin_memory()
            self._after_step()

    def save(self, result: float = -math.inf) -> None:
        """Saves the run as it is now, as ``best.pt`` too if `result` is the best one.

        Waits for the device, and while the one before is being written. Every process calls it,
        because each has random numbers of its own.
        """
        own = {"rng": rng.state(), "losses": self.meter.state() if self.meter else (0.0, 0)}
        ranks = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(own, ranks, group=self.group)
        self.saved_at = time.monotonic()
        if ranks is None:
            return
        self.wait()
        best = self.progress.best
        self.progress.best = max(best, result)  # a result may be nan
        state = self._copy() | vars(self.progress) | {"ranks": ranks, "about": self.about}
        copied = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None
        self.writer = threading.Thread(target=self._write, args=(state, copied, best))
        self.writer.daemon = True
        self.writer.start()

    def _copy(self) -> dict[str, object]:
        """What is saved of the parts and the average, as `checkpoint.in_memory` copies it."""
        state = checkpoint.collect(*self.parts)
        if self.ema:
            state["ema"] = dict(self.ema.module.state_dict())
        return checkpoint.in_memory(state)

    def _pin_memory(self) -> None:
        """After the first step that made moments: has torch pin the memory that saves copy to.

        That takes as long as some steps, and torch keeps the memory for the saves to come.
        """
        _, optimizer, _ = self.parts
        if not self.is_pinned and optimizer.state:
            self.is_pinned = True
            if dist.get_rank() == 0 and torch.cuda.is_initialized():
                self._copy()

    def wait(self) -> None:
        """Returns when all that was saved is on the disk, or could not be written."""
        if self.writer:
            self.writer.join()

    def finish(self) -> None:
        """As `wait`, at the end. Raises UserError if the run's last state could not be written."""
        self.wait()
        if self.problem:
            raise UserError(f"{self.problem}: mend that, and add --resume auto")

    def _start(self) -> None:
        self.watch.start()
        if dist.get_rank() == 0:
            for left in self.folder.glob("*.pt" + SUFFIX):  # by a process that was killed
                left.unlink(missing_ok=True)

    def _after_step(self) -> None:
        number, is_time = self.asked.answer()
        by_steps = self.every_steps and self.progress.step % self.every_steps == 0
        if number:
            self._stop(number)
        if by_steps or is_time:
            self.save()
        # Only rank 0's clock counts: others may differ by a step.
        due = dist.get_rank() == 0 and time.monotonic() - self.saved_at >= self.every_s
        self.asked.ask(Watch.asked, due)

    def _stop(self, number: int) -> NoReturn:
        self.save()
        self.wait()
        if not self.problem:
            self.say(f"stopped after step {self.progress.step}; --resume auto goes on from there")
        if number == signal.SIGUSR1 and dist.get_rank() == 0 and "SLURM_JOB_ID" in os.environ:
            requeue(slurm_job(), self.say)
        dist.barrier(self.group)  # the launcher ends all others as soon as one leaves
        distributed.leave(128 + number)

    def _write(
        self, state: dict[str, object], copied: torch.cuda.Event | None, best: float
    ) -> None:
        """Writes `state`, which is the best one if it has another best result than `best`."""
        path = self.folder / f"step-{state['step']}.pt"
        try:
            if copied:
                copied.synchronize()
            checkpoint.write(path, state)
            link(path, self.folder / checkpoint.LAST)
            if state["best"] > best:
                link(path, self.folder / checkpoint.BEST)
            checkpoint.prune(self.folder, self.keep)
            self.problem = ""
        except (OSError, RuntimeError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            self.problem = f"{path} could not be written ({reason})"
            self.progress.best = best  # of those on the disk
            self.say(
                f"warning: {self.problem}; the run goes on, the checkpoints before it are kept"
            )


def _losses(ranks: list[dict]) -> list[tuple[float, int]]:
    """What the processes of a checkpoint had lost. Raises an error for anything else."""
    pairs = [one["losses"] for one in ranks]
    return [(float(loss_sum), int(count)) for loss_sum, count in pairs]


def slurm_job() -> str:
    """This process's job of SLURM; the bare number of an array's last one would mean them all."""
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ["SLURM_JOB_ID"]


def requeue(job: str, say: Callable[[str], None]) -> None:
    """Asks SLURM to start `job` again."""
    if not re.fullmatch(r"[0-9]+(_[0-9]+)?", job):
        return
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, timeout=20)
        say(f"SLURM starts job {job} again")
    except (OSError, subprocess.SubprocessError) as error:
        say(f"warning: scontrol requeue {job} failed ({error})")
