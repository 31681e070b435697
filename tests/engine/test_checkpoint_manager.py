"""CheckpointManager: saving, resuming, the newest checkpoint of several hosts, failed writes."""

import contextlib
import errno
import json
import math
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from apex_native import amp
from engine import UserError, backend, distributed, link
from engine.checkpoint import (
    CheckpointManager,
    TrainingState,
    compatibility,
    files,
    selection,
    sharded,
    validation,
)
from engine.checkpoint import format as checkpoint
from engine.checkpoint.writer import CheckpointWriter
from engine.data import mix_seeds, seed_everything
from engine.distributed import watchdog
from engine.distributed.watchdog import StopSignals
from engine.launch import LAUNCH_ID
from engine.monitoring.meter import Meter
from engine.monitoring.metric import MonitoredMetric
from engine.optim import Ema
from parameters import mostly_slow
from processes import Processes
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

NATIVE = backend.load_backend("native", "O1")
ACCURACY = MonitoredMetric("val_accuracy")


class Messages(list):
    """Logger that keeps its messages."""

    def __init__(self, metric: MonitoredMetric = ACCURACY) -> None:
        super().__init__()
        self.monitored = metric
        self.rows: list[dict[str, float]] = []
        self.run_id = ""
        self.discarded: list[int] = []

    def info(self, message: str) -> None:
        self.append(message)

    def finish_tracking(self, status: str) -> None:
        """Do nothing."""

    def lock(self) -> None:
        """Do nothing: a test has the folder for itself."""

    lock_again = lock

    def warning(self, message: str) -> None:
        self.append(f"warning: {message}")


def draws() -> list[float]:
    return [random.random(), np.random.random(), torch.rand(()).item()]


def meter_on(device: str = "cpu") -> Meter:
    return Meter(torch.device(device), 1)


class Reduction(IntEnum):
    MEAN = 1


def manager_of(
    folder: str | Path,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **changed: object,
) -> CheckpointManager:
    model = model or nn.Linear(3, 3)
    optimizer = optimizer or torch.optim.SGD(model.parameters())
    values = {
        "folder": Path(folder),
        "keep": 2,
        "save_every": None,
        "timeout_s": 60.0,
        "state": TrainingState(model, optimizer, NATIVE),
        "metadata": {"arch": "linear"},
        "data_sets": {},
        "settings": {},
        "logger": Messages(),
        "stop_signals": StopSignals(),  # not started: the signals of a test are its own
        "watchdog": watchdog.Watchdog(60.0),
    }
    return CheckpointManager(**values | changed)


def save_and_finish(manager: CheckpointManager, results: dict[str, float] | None = None) -> None:
    """Save on all ranks, and wait until the files are written."""
    manager.save(results)
    manager.finish()
    dist.barrier()


def finish_slowly(folder: str, is_stopped: bool) -> tuple[bool, list, set[str]]:
    """Return whether the last checkpoint is there when this rank has finished.

    Returns the statuses with which it exits, and the messages, too.
    """
    manager = manager_of(folder, timeout_s=-58.0, watchdog=watchdog.Watchdog(1.0))  # 2 s, with 60
    manager.watchdog.enter("step 1")
    manager.watchdog.start()
    write = checkpoint.write
    leave = mock.Mock(side_effect=SystemExit)

    def write_slowly(path: Path, entries: dict) -> None:
        time.sleep(3.5)
        write(path, entries)

    with (
        mock.patch.object(checkpoint, "write", write_slowly),
        mock.patch.object(watchdog, "exit_process", leave),
        mock.patch.multiple("engine.checkpoint.manager", POLL_S=0.5, LINE_S=2.0),
        pytest.raises(SystemExit) if is_stopped else contextlib.nullcontext(),
    ):
        manager.save()
        if is_stopped:
            manager.state.progress.step += 1
            manager.save_and_exit(15)
        manager.finish()
    manager.watchdog.is_done.set()
    is_there = Path(folder, f"step-{int(is_stopped)}.pt").exists()
    return is_there, [call.args[0] for call in leave.mock_calls], set(manager.logger)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_all_ranks_wait_for_the_last_checkpoint(
    two_processes: Processes, tmp_path: Path, is_stopped: bool
) -> None:
    """Else torchrun ends the job 300 s after those of the other hosts, or --timeout does."""
    for is_there, statuses, messages in two_processes(finish_slowly, str(tmp_path), is_stopped):
        assert is_there
        assert statuses == [143] * is_stopped
        assert "step-0 is still being written" in messages


def resumed_after_a_slow_lock(folder: str) -> Path | None:
    """Resume in a restart in which rank 0 waits for the lock for longer than --timeout."""

    def lock_slowly(_: Messages) -> None:
        time.sleep(0.0 if dist.get_rank() else 3.5)

    with (
        mock.patch.dict(os.environ, {"TORCHELASTIC_RESTART_COUNT": "1"}),
        mock.patch.object(Messages, "lock", lock_slowly),
    ):
        manager = manager_of(folder, timeout_s=-58.0)  # 2 s, with the 60 that are added
        return manager.resume(Path("auto"), 1)


def test_ranks_wait_for_the_lock_of_a_lost_host(two_processes: Processes, tmp_path: Path) -> None:
    assert two_processes(resumed_after_a_slow_lock, str(tmp_path)) == [None, None]


def saved_and_resumed(folder: str) -> tuple[list, list, float]:
    """Return what each rank draws next, before and after a resume, and its mean loss after it."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    manager = manager_of(folder, model, optimizer, save_every="2")
    progress = manager.state.progress
    seed_everything(mix_seeds(0, dist.get_rank()))
    meter = meter_on()
    manager.start_epoch(meter)
    for _ in range(4):
        meter.update(torch.tensor(dist.get_rank() + 0.5))
        progress.step += 1
        progress.samples += 8
        draws()
        assert manager.end_step() == 0
    manager.finish()
    dist.barrier()
    expected = draws()
    seed_everything(99)

    again = manager_of(folder, model, optimizer, save_every="2")
    again.resume(Path("auto"), 10)
    assert vars(again.state.progress) == {
        "epoch": 0,
        "step": 4,
        "samples": 32,
        "best": -float("inf"),
        "weights": "model",
        "scores": [],
        "pending_row": {},
    }
    meter = meter_on()
    again.start_epoch(meter)
    return expected, draws(), meter.results()["train_loss"]


def test_each_rank_resumes_its_own_random_numbers_and_losses(
    two_processes: Processes, tmp_path: Path
) -> None:
    ranks = two_processes(saved_and_resumed, str(tmp_path))
    for expected, resumed, loss in ranks:
        assert resumed == expected
        assert loss == 1.0
    assert ranks[0][0] != ranks[1][0]
    assert {path.name for path in tmp_path.iterdir()} == {"step-2.pt", "step-4.pt", "last.pt"}


@pytest.mark.parametrize("metadata", [{"model_options": {"image": "gray"}}, {"classes": ["a", 1]}])
def test_metadata_that_could_not_be_resumed_is_an_error_at_the_start(
    tmp_path: Path, metadata: dict
) -> None:
    with pytest.raises(UserError, match="invalid classes, fingerprints or model_options"):
        manager_of(tmp_path, metadata=metadata)


@pytest.mark.gpu
def test_saving_allocates_pinned_memory_only_once(tmp_path: Path) -> None:
    """Allocating it takes as long as some steps; that of the first step is used again."""
    if not hasattr(torch.cuda, "host_memory_stats"):
        pytest.skip("torch 2.6 does not count pinned memory")
    processes = Processes("nccl", 1)
    try:
        [(first, later)] = processes(pinned_blocks, str(tmp_path))
    finally:
        processes.stop()
    assert later == first > 0


def pinned_blocks(folder: str) -> tuple[int, int]:
    """Return the number of pinned blocks after the first step, and after the last save."""
    model = nn.Sequential(nn.Linear(300, 500), nn.Linear(500, 3)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    # Records of a dynamic scale are in such memory, too; on a busy GPU, more than one at a time.
    options = {"opt_level": "O2", "loss_scale": 128.0, "verbosity": 0}
    model, optimizer = amp.initialize(model, optimizer, **options)
    manager = manager_of(folder, model, optimizer, save_every="2")
    manager.start_epoch(meter_on("cuda"))
    counts = []
    for _ in range(7):
        counts.append(torch.cuda.host_memory_stats()["num_host_alloc"])
        loss = 1e-3 * model(torch.randn(4, 300).cuda()).sum()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        manager.state.progress.step += 1
        manager.end_step()
        manager.wait()
    return counts[1], counts[-1]


def run_ids_after_resumptions(folder: str, other: str) -> list[str]:
    """Return the trackers' run ids of runs that resume a checkpoint here and in another folder."""
    manager = manager_of(folder)
    manager.logger.run_id = "a" * 16
    save_and_finish(manager)
    ids = []
    for output in (folder, other):
        again = manager_of(output)
        again.resume(Path(folder, "last.pt"), 10)
        ids.append(again.logger.run_id)
    return ids


def test_run_in_another_folder_is_another_run_of_the_trackers(
    two_processes: Processes, tmp_path: Path
) -> None:
    """Also if it logs to a tracker only once it is resumed itself."""
    folders = str(tmp_path), str(tmp_path / "b")
    assert two_processes(run_ids_after_resumptions, *folders) == [["a" * 16, ""]] * 2


def best_after_a_resume(folder: str, other: str) -> list[float]:
    """Return the best metric after a resume in the same folder and in another one."""
    bests = []
    for output in (folder, folder, other):
        manager = manager_of(output)
        if not bests:
            manager.save({"val_accuracy": 0.75})
            manager.finish()
            dist.barrier()
        else:
            manager.resume(Path(folder, "last.pt"), 10)
        bests.append(manager.state.progress.best)
    return bests


def test_a_run_that_resumes_in_another_folder_has_a_best_of_its_own(
    two_processes: Processes, tmp_path: Path
) -> None:
    folders = [tmp_path / "there", tmp_path / "here"]
    for folder in folders:
        folder.mkdir()
    bests, _ = two_processes(best_after_a_resume, *map(str, folders))
    assert bests == [0.75, 0.75, -float("inf")]


def resume_in_another_folder(folder: str) -> tuple[float, list[float], set[str]]:
    """Return the best score, the scores and the files there, which are those of another run."""
    there, here = (Path(folder, name) for name in ("there", "here"))
    for output, step in ((there, 1), (here, 5)):
        manager = manager_of(str(output))
        manager.state.progress.step = step
        manager.state.progress.scores = [0.5]
        manager.save({"val_accuracy": 0.5})
        manager.finish()
    dist.barrier()
    again = manager_of(str(here))
    again.resume(there / "last.pt", 10)
    dist.barrier()
    progress = again.state.progress
    return progress.best, progress.scores, {path.name for path in here.glob("*.pt")}


def test_another_folders_checkpoint_has_no_scores_and_renames_nothing(
    two_processes: Processes, tmp_path: Path
) -> None:
    """The logger refuses the run later, if the folder has one."""
    for name in ("there", "here"):
        (tmp_path / name).mkdir()
    files = {"best.pt", "last.pt", "step-5.pt"}
    expected = [(-float("inf"), [], files)] * 2
    assert two_processes(resume_in_another_folder, str(tmp_path)) == expected


def go_back(folder: str) -> tuple[float, str, list[str]]:
    """Return the best score of a run that goes back, what it is resumed from, and the warnings."""
    manager = manager_of(folder)
    for step, accuracy in ((1, 0.5), (5, 0.9)):
        manager.state.progress.step = step
        manager.save({"val_accuracy": accuracy})
    manager.finish()
    dist.barrier()
    back = manager_of(folder)
    back.resume(Path(folder, "step-1.pt"), 10)
    best = back.state.progress.best
    back.state.progress.step = 2
    back.save()
    back.finish()
    dist.barrier()
    source = manager_of(folder).resume(Path("auto"), 10)
    warnings = [text for text in back.logger if text.startswith("warning")]
    return best, source.resolve().name, warnings


def test_a_run_that_went_back_is_not_resumed_from_the_best_of_the_steps_it_discarded(
    two_processes: Processes, tmp_path: Path
) -> None:
    for best, resumed, [removed, warning] in two_processes(go_back, str(tmp_path)):
        assert best == -float("inf")
        assert resumed == "last.pt"
        assert (
            "the first save, also that of a stop, removes the checkpoints after step 1" in removed
        )
        assert "best.pt, of step 5, is not compared: it will be renamed to best-of-st" in warning
    names = {path.name for path in tmp_path.glob("*.pt")}
    assert names == {"step-1.pt", "step-2.pt", "last.pt", "best-of-step-5.pt"}
    assert checkpoint.load(tmp_path / "best-of-step-5.pt")["best"] == 0.9
    assert checkpoint.load(tmp_path / "last.pt")["step"] == 2


def save_steps(folder: str, keep: int, metrics: tuple[float, ...]) -> None:
    """Save the steps of a run from 1 on, of which each was validated with the metric given."""
    manager = manager_of(folder, keep=keep)
    progress = manager.state.progress
    for step, accuracy in enumerate(metrics, 1):
        progress.step = step
        progress.scores.append(accuracy)
        manager.save({"val_accuracy": accuracy})
    manager.finish()
    dist.barrier()


def resume_a_link(here: str, there: str) -> list[str]:
    """Return the files of a run that resumes a link to another run's newest checkpoint."""
    if dist.get_rank() == 0:
        Path(there).mkdir()
    save_steps(there, 2, (0.5, 0.9))
    if dist.get_rank() == 0:
        Path(there, "best.pt").unlink()
        Path(there, "best.pt").write_text("mine")
        Path(here).mkdir()
        Path(here, "last.pt").symlink_to(Path(there, "step-2.pt"))
        Path(here, "mine.pt.tmp").mkdir()
    dist.barrier()
    manager = manager_of(here)
    assert manager.resume(Path("auto"), 10) == Path(here, "last.pt")
    manager.state.progress.step = 3
    save_and_finish(manager, {"val_accuracy": 0.1})
    return sorted(path.name for path in Path(here).iterdir())


def test_a_link_to_another_runs_checkpoint_changes_nothing_there(
    two_processes: Processes, tmp_path: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    names = two_processes(resume_a_link, str(here), str(there))[0]
    assert names == ["best.pt", "last.pt", "mine.pt.tmp", "step-3.pt"]
    assert (there / "best.pt").read_text() == "mine"
    assert checkpoint.load(there / "step-2.pt")["step"] == 2
    assert not (here / "last.pt").is_symlink()


def test_best_folder_elsewhere_is_not_moved(tmp_path: Path) -> None:
    """A link in a run leads to the user's own checkpoint."""
    run, mine = tmp_path / "run", tmp_path / "mine" / "step-2"
    run.mkdir()
    mine.mkdir(parents=True)
    (run / "best").symlink_to(mine)
    files.Rewind(step=1, best_step=2).keep_best(run)
    assert mine.is_dir() and not mine.is_symlink()
    assert (run / "best").resolve() == (run / "best-of-step-2").resolve() == mine


def test_small_model_of_many_classes_is_saved(two_processes: Processes, tmp_path: Path) -> None:
    """Such as a regression on --dummy data, whose classes are DUMMY_CLASSES."""
    assert two_processes(save_many_classes, str(tmp_path)) == [""] * 2


def save_many_classes(folder: str) -> str:
    manager = manager_of(folder, metadata={"classes": [str(one) for one in range(1000)]})
    manager.save()
    manager.finish()
    return manager._writer.problem


def scores_of_a_slow_write(folder: str) -> list[float]:
    """Return the scores in a checkpoint that is written after the next validation."""
    manager = manager_of(folder)
    progress = manager.state.progress
    progress.scores.append(0.5)
    write = checkpoint.write

    def write_later(path: Path, entries: dict) -> None:
        while len(progress.scores) < 2:
            time.sleep(0.01)
        write(path, entries)

    with mock.patch.object(checkpoint, "write", write_later):
        manager.save({"val_accuracy": 0.5})
        progress.scores.append(0.9)
        manager.finish()
    dist.barrier()
    return checkpoint.load(Path(folder, "last.pt"))["scores"]


def test_a_checkpoint_has_the_scores_of_its_step(two_processes: Processes, tmp_path: Path) -> None:
    assert two_processes(scores_of_a_slow_write, str(tmp_path)) == [[0.5]] * 2


def go_back_in_vain(folder: str) -> tuple[float, int, set[str], int]:
    """Return what a run resumes after another one has gone back, and ended without a save.

    These are the best score and the step, then the files and the step of best.pt.
    """
    save_steps(folder, 9, (0.5, 0.9, 0.8))
    manager_of(folder).resume(Path(folder, "step-1.pt"), 10)
    dist.barrier()
    again = manager_of(folder)
    again.resume(Path("auto"), 10)
    names = {path.name for path in Path(folder).iterdir()}
    best = checkpoint.load(Path(folder, "best.pt"))
    return again.state.progress.best, again.state.progress.step, names, best["step"]


def test_a_run_that_goes_back_changes_nothing_before_its_first_save(
    two_processes: Processes, tmp_path: Path
) -> None:
    names = {"step-1.pt", "step-2.pt", "step-3.pt", "last.pt", "best.pt"}
    assert two_processes(go_back_in_vain, str(tmp_path)) == [(0.9, 3, names, 2)] * 2


def go_back_to_the_best(folder: str) -> tuple[float, int, set[str]]:
    """Return the best score, the step of best.pt, and the files after the first save."""
    save_steps(folder, 9, (0.5, 0.9, 0.8))
    manager = manager_of(folder, keep=9)
    manager.resume(Path(folder, "step-1.pt"), 10)
    manager.state.progress.step = 2
    save_and_finish(manager)
    names = {path.name for path in Path(folder).iterdir()}
    best = checkpoint.load(Path(folder, "best.pt"))
    return manager.state.progress.best, best["step"], names


def test_the_checkpoint_that_a_run_goes_back_to_can_be_the_best(
    two_processes: Processes, tmp_path: Path
) -> None:
    names = {"step-1.pt", "step-2.pt", "last.pt", "best.pt", "best-of-step-2.pt"}
    assert two_processes(go_back_to_the_best, str(tmp_path)) == [(0.5, 1, names)] * 2
    assert checkpoint.load(tmp_path / "best-of-step-2.pt")["best"] == 0.9


def resume_before_the_damaged_best(folder: str) -> tuple[float, float, str]:
    """Return the best score of the resumed run, that of best.pt afterwards, and the warning."""
    save_steps(folder, 2, (0.8, 0.5, 0.9))
    if dist.get_rank() == 0:
        os.truncate(Path(folder, "step-3.pt"), 100)  # which is last.pt and best.pt, too
    dist.barrier()
    again = manager_of(folder)
    again.resume(Path("auto"), 10)
    resumed = again.state.progress.best
    again.state.progress.step = 3
    again.save({"val_accuracy": 0.7})
    again.finish()
    dist.barrier()
    return resumed, checkpoint.load(Path(folder, "best.pt"))["best"], again.logger[-1]


def test_a_best_checkpoint_that_is_damaged_is_replaced(
    two_processes: Processes, tmp_path: Path
) -> None:
    for resumed, best, warning in two_processes(resume_before_the_damaged_best, str(tmp_path)):
        assert (resumed, best) == (-float("inf"), 0.7)
        assert warning.endswith("best.pt can't be read: the next validation replaces it")


def save_a_row_of_tensors(folder: str) -> dict[str, float]:
    manager = manager_of(folder)
    row = {"epoch": 1, "step": 1, "images_per_second": 8.0, "norm": torch.tensor(2.0)}
    manager.state.progress.pending_row = row
    save_and_finish(manager)
    return checkpoint.load(Path(folder, "last.pt"))["pending_row"]


def test_an_owner_may_add_tensors_to_the_row_of_an_epoch(
    two_processes: Processes, tmp_path: Path
) -> None:
    for row in two_processes(save_a_row_of_tensors, str(tmp_path)):
        assert row == {"epoch": 1, "step": 1, "images_per_second": 8.0, "norm": 2.0}


def resume_after_an_own_validation(folder: str) -> tuple[float, list[float], int]:
    """Return the best score, all scores and the step of best.pt.

    A validation within an epoch was worse, and only `save` got its results.
    """
    save_steps(folder, 9, (0.9,))
    manager = manager_of(folder)
    manager.resume(Path("auto"), 10)
    manager.state.progress.step += 1
    manager.state.progress.samples = 8
    manager._means = [{"train_loss": (1.0, 1)}]
    save_and_finish(manager, {"val_accuracy": 0.5})
    again = manager_of(folder)
    again.resume(Path("auto"), 10)
    dist.barrier()
    progress = again.state.progress
    return progress.best, progress.scores, checkpoint.load(Path(folder, "best.pt"))["step"]


def test_an_own_validation_in_an_epoch_is_best_only_if_it_is(
    two_processes: Processes, tmp_path: Path
) -> None:
    for found in two_processes(resume_after_an_own_validation, str(tmp_path)):
        assert found == (0.9, [0.9], 1)


def resume_after_a_kill(
    folder: str, metrics: list[float], is_removed: bool
) -> tuple[float, float, int]:
    """Return the best score of a resumed run, and the score and the step of its best.pt.

    The run was killed when the last checkpoint was written, and was not best.pt yet. The best.pt
    before it may have been removed.
    """
    manager = manager_of(folder)
    alias, progress = files.alias, manager.state.progress
    for step, accuracy in enumerate(metrics, 1):
        is_last = step == len(metrics)
        kept = mock.Mock() if is_last else alias
        if is_last and is_removed and dist.get_rank() == 0:
            Path(folder, "best.pt").unlink()
        progress.step = step
        progress.scores.append(-math.inf if math.isnan(accuracy) else accuracy)
        with mock.patch.object(files, "alias", kept):
            manager.save({"val_accuracy": accuracy})
            manager.wait()
    dist.barrier()
    again = manager_of(folder)
    again.resume(Path("auto"), 10)
    dist.barrier()
    path = Path(folder, "best.pt")
    best = checkpoint.load(path) if path.exists() else {}
    return again.state.progress.best, best.get("best"), best.get("step")


@pytest.mark.parametrize(
    ("metrics", "is_removed", "expected"),
    [
        ([0.5], False, (0.5, 0.5, 1)),
        ([0.5, 0.9], False, (0.9, 0.9, 2)),
        ([0.5, 0.5], False, (0.5, 0.5, 1)),
        ([0.9, 0.5], True, (0.5, 0.5, 2)),
        ([math.nan], False, (-math.inf, None, None)),
    ],
    ids=["first", "better", "equal", "removed", "nan"],
)
def test_a_kill_before_the_best_checkpoint_has_its_name_loses_nothing(
    two_processes: Processes,
    tmp_path: Path,
    metrics: list[float],
    is_removed: bool,
    expected: tuple,
) -> None:
    found = two_processes(resume_after_a_kill, str(tmp_path), metrics, is_removed)
    assert found == [expected] * 2


def two_layers(frozen: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return two equal layers, one of them frozen and the other trained for a step by Adam."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[frozen].requires_grad_(False)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def resume_with_another_freeze(folder: str) -> tuple[list[str], str]:
    """Return the frozen parameters that are saved, and the error message of the resume."""
    manager = manager_of(folder, *two_layers(frozen=0))
    save_and_finish(manager)
    with pytest.raises(UserError) as error:
        manager_of(folder, *two_layers(frozen=1)).resume(Path(folder, "last.pt"), 10)
    return manager.metadata["frozen"], str(error.value)


def test_moments_are_not_those_of_other_parameters(
    two_processes: Processes, tmp_path: Path
) -> None:
    for frozen, message in two_processes(resume_with_another_freeze, str(tmp_path)):
        assert frozen == ["0.weight", "0.bias"]
        assert (
            "another --freeze (frozen only there: 0.bias, 0.weight; frozen only here: 1.b"
            in message
        )


def evaluate_other_groups(folder: str) -> bool:
    """Return whether an evaluation has the weights of a run whose optimizer has other groups."""
    model, optimizer = two_layers(frozen=0)
    manager = manager_of(folder, model, optimizer)
    save_and_finish(manager)
    other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    groups = torch.optim.AdamW([{"params": [one]} for one in other.parameters()])
    manager_of(folder, other, groups).resume(Path(folder, "last.pt"), 10, required=True)
    return all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


def test_evaluation_needs_no_flags_of_the_optimizer(
    two_processes: Processes, tmp_path: Path
) -> None:
    assert two_processes(evaluate_other_groups, str(tmp_path)) == [True, True]


class Adaptive(torch.optim.SGD):
    """SGD that keeps a step size of its own in its groups, as Prodigy and schedule-free ones do."""

    def __init__(self, parameters: Iterable, weight_decay: float) -> None:
        super().__init__(parameters, weight_decay=weight_decay)
        self.param_groups[0]["d"] = 1e-6


def resumed_settings(folder: str) -> list[tuple[float, float]]:
    """Return the step size and the weight decay after each of two resumptions."""
    model, settings = nn.Linear(3, 3), []
    for step, weight_decay in enumerate((0.1, 0.2, 0.3)):
        optimizer = Adaptive(model.parameters(), weight_decay)
        manager = manager_of(folder, model, optimizer)
        manager.resume(Path("auto"), 10)
        (group,) = optimizer.param_groups
        settings.append((group["d"], group["weight_decay"]))
        group["d"] = group["d"] if step else 0.5
        manager.state.progress.step = step
        manager.save()
        manager.finish()
        dist.barrier()
    return settings


def test_settings_that_training_has_changed_are_resumed(
    two_processes: Processes, tmp_path: Path
) -> None:
    """The others are those of the flags."""
    expected = [(1e-6, 0.1), (0.5, 0.2), (0.5, 0.3)]
    assert two_processes(resumed_settings, str(tmp_path)) == [expected] * 2


class Stateful(torch.optim.SGD):
    """SGD with a state wherever optimizers of other packages have one."""

    def __init__(self, parameters: Iterable, total: int = 0) -> None:
        super().__init__(parameters)
        self.total = total
        self.param_groups[0] |= {"gamma": None, "history": [1.0]}

    def state_dict(self) -> dict:
        return super().state_dict() | {"total": self.total}

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        self.total = state_dict["total"]


def resumed_state(folder: str, sharded: bool) -> list[object]:
    """Return the state of an optimizer after two resumptions."""
    found: list[object] = []
    for step in range(3):
        model = nn.Linear(3, 3)
        optimizer = Stateful(model.parameters())
        if sharded:
            model.set_requires_gradient_sync = None  # type: ignore[assignment]  # as FSDP's method
        manager = manager_of(folder, model, optimizer)
        manager.resume(Path("auto"), 10)
        (group,) = optimizer.param_groups
        state = optimizer.state
        if not step:
            optimizer.total = 5
            state["k"] = torch.tensor(7)
            state[model.weight] = {"count": 3, "mean": torch.ones(3, 3)}
            group |= {"updates": 9, "gamma": torch.tensor([1.0, 2.0])}
            group["history"].append(2.0)
        parts = [group["updates"], group["gamma"].tolist(), group["history"], optimizer.total]
        own = state[model.weight]
        found.append([*parts, state["k"].item(), own["count"], own["mean"].tolist()])
        manager.state.progress.step = step
        manager.save()
        manager.finish()
        dist.barrier()
    return found


@pytest.mark.parametrize("sharded", [False, True])
def test_all_state_of_an_optimizer_is_resumed(
    two_processes: Processes, tmp_path: Path, sharded: bool
) -> None:
    """Also what training has added to its groups, and what is not of a parameter."""
    expected = [9, [1.0, 2.0], [1.0, 2.0], 5, 7, 3, [[1.0] * 3] * 3]
    assert two_processes(resumed_state, str(tmp_path), sharded) == [[expected] * 3] * 2


def validated_and_resumed(folder: str, sharded: bool) -> list[float]:
    """Return what a checkpoint has of a model that an edit changes before its validation."""
    biases = []
    for _ in range(2):
        model = nn.Linear(3, 3)
        if sharded:
            model.set_requires_gradient_sync = None  # type: ignore[assignment]  # as FSDP's method
        manager = manager_of(folder, model)
        manager.resume(Path("auto"), 10)
        biases.append(model.bias[0].item())
        write = checkpoint.write

        def write_slowly(path: Path, entries: dict, write: Callable = write) -> None:
            time.sleep(0.5)
            write(path, entries)

        with mock.patch.object(checkpoint, "write", write_slowly):
            if not biases[1:]:
                manager.save()
            with torch.no_grad():
                model.bias.fill_(len(biases))
            manager.save({"val_accuracy": 0.5})
            manager.finish()
        if dist.get_rank() == 0:
            assert any(
                "weights were changed since the last save" in said for said in manager.logger
            )
        dist.barrier()
    manager_of(folder, model).resume(Path("auto"), 10)
    return [*biases[1:], model.bias[0].item()]


@pytest.mark.parametrize("sharded", [False, True])
def test_checkpoint_has_the_model_that_was_validated(
    two_processes: Processes, tmp_path: Path, sharded: bool
) -> None:
    """An edit may set batch norm's statistics before a validation, also of a resumed run."""
    assert two_processes(validated_and_resumed, str(tmp_path), sharded) == [[1.0, 2.0]] * 2


def resume_without_added_group(folder: str) -> tuple[int, str]:
    """Return the number of groups in a checkpoint, and the error of a resume without one of them.

    A resume that has added the group succeeds.
    """
    model, optimizer = two_layers(frozen=0)
    manager = manager_of(folder, model, optimizer)
    optimizer.add_param_group({"params": model[0].requires_grad_(True).parameters()})
    save_and_finish(manager)
    again = manager_of(folder, *two_layers(frozen=0))
    with pytest.raises(UserError) as error:
        again.resume(Path("auto"), 10)
    optimizer = again.state.optimizer
    optimizer.add_param_group({"params": again.state.model[0].parameters()})
    again.resume(Path("auto"), 10)
    return len(optimizer.state_dict()["param_groups"]), str(error.value)


def test_groups_that_training_has_added_are_saved(two_processes: Processes, tmp_path: Path) -> None:
    for count, message in two_processes(resume_without_added_group, str(tmp_path)):
        assert count == 2
        assert "it has 2 parameter groups and not 1" in message


def resumed_with_other_metric(folder: str, saved: dict, own: dict) -> tuple:
    """Return the best score and the scores after a resume, the warnings, and what best.pt is of."""
    manager = manager_of(folder, metadata=saved)
    manager.state.progress.scores = [0.75]
    save_and_finish(manager, {"val_accuracy": 0.75})
    logger = Messages(MonitoredMetric(own["metric"], own["metric_mode"]))
    again = manager_of(folder, metadata=own, logger=logger)
    again.resume(Path("auto"), 10)
    progress = again.state.progress
    resumed = progress.best, list(progress.scores)
    progress.step += 1
    again.save({own["metric"]: 2.0})
    again.finish()
    dist.barrier()
    best = torch.load(Path(folder, "best.pt"), weights_only=True)["results"]
    return *resumed, [text for text in logger if text.startswith("warning")], best


@pytest.mark.parametrize(
    ("saved", "own"),
    [("val_accuracy max", "val_loss min"), ("a max", "b max"), ("a max", "a min")],
)
def test_scores_of_another_metric_are_not_compared(
    two_processes: Processes, tmp_path: Path, saved: str, own: str
) -> None:
    metadata = [
        dict(zip(("metric", "metric_mode"), one.split(), strict=True)) for one in (saved, own)
    ]
    ranks = two_processes(resumed_with_other_metric, str(tmp_path), *metadata)
    for rank, (best, scores, [warning, *others], results) in enumerate(ranks):
        assert [", of step 0, is not compared" in one for one in others] == [True] * (rank == 0)
        assert (best, scores) == (-float("inf"), [])
        assert f"the metric was {saved} and is {own} now" in warning
        assert results == {own.split()[0]: 2.0}


@pytest.mark.parametrize(
    ("image", "flip_tta", "changed"),
    [
        ({"size": 32}, False, ""),
        ({"size": 32, "eval_size": 32}, False, ""),
        ({"size": 32, "eval_size": 40}, False, "size 40 and not 32"),
        (
            {"size": 24, "crop_fraction": 1.0},
            False,
            "size 24 and not 32, crop_fraction 1.0 and not 0.875",
        ),
        ({"size": 32}, True, "--flip-tta True and not False"),
        (None, False, "size 224 and not 32"),  # the default size
    ],
)
def test_scores_of_another_validation_are_not_compared(
    two_processes: Processes, tmp_path: Path, image: dict | None, flip_tta: bool, changed: str
) -> None:
    saved, own = (
        {"metric": "val_accuracy", "metric_mode": "max", "flip_tta": flip}
        | {"model_options": {"image": one} if one else {}}
        for one, flip in (({"size": 32}, False), (image, flip_tta))
    )
    for best, scores, warnings, _ in two_processes(
        resumed_with_other_metric, str(tmp_path), saved, own
    ):
        assert (best, scores) == ((-float("inf"), []) if changed else (0.75, [0.75]))
        said = f"the validation has {changed} now; its scores are not compared"
        assert any(said in warning for warning in warnings) == bool(changed)


def resumed_twice(folder: str, flips: tuple[bool, bool], results: dict, is_killed: bool) -> float:
    """Change the validation, stop before it (or as it is saved), and resume; return the best score.

    Then save a validation with a score of 0.5.
    """
    manager = manager_of(folder, keep=1, metadata={"flip_tta": False})
    manager.state.progress.scores = [0.75]
    manager.save({"val_accuracy": 0.75})
    manager.finish()
    best = 0.0
    for step, flip in enumerate(flips, 1):
        dist.barrier()
        manager = manager_of(folder, keep=1, metadata={"flip_tta": flip})
        manager.resume(Path("auto"), 10)
        progress = manager.state.progress
        best = progress.best
        progress.step = step
        if step == 2 or results:
            progress.scores.append(0.5)
        killed = mock.patch.object(files, "alias", side_effect=OSError)
        with killed if step == 1 and is_killed else contextlib.nullcontext():
            manager.save({"val_accuracy": 0.5} if step == 2 else results)
            manager.wait()
    dist.barrier()
    return best


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize(
    ("results", "is_killed"),
    [({}, False), ({"val_accuracy": 0.5}, False), ({"val_accuracy": 0.5}, True)],
)
def test_best_checkpoint_of_another_validation_is_kept(
    two_processes: Processes, tmp_path: Path, is_back: bool, results: dict, is_killed: bool
) -> None:
    """Whenever the run stopped; and its score counts again with the flags that it had."""
    is_restored = is_back and not (results and not is_killed)
    flips = (True, not is_back)
    before, *_ = two_processes(resumed_twice, str(tmp_path), flips, results, is_killed)
    expected = 0.75 if is_restored else 0.5 if results and not is_back else -float("inf")
    assert before == expected
    name = "best.pt" if is_restored else "best-of-step-0.pt"
    assert checkpoint.load(tmp_path / name)["best"] == 0.75
    if not is_restored:
        assert checkpoint.load(tmp_path / "best.pt")["best"] == 0.5
    assert (tmp_path / "best-of-step-0.pt").exists() != is_restored


def resumed_beside_a_best_of_another_script(folder: str) -> None:
    manager = manager_of(folder)
    manager.save()
    manager.finish()
    best = Path(folder, "best.pt")
    if dist.get_rank() == 0:
        torch.save({"state_dict": manager.state.model.state_dict(), "optimizer": {}}, best)
    dist.barrier()
    manager = manager_of(folder)
    manager.resume(Path("auto"), 10)
    manager.state.progress.scores.append(0.5)
    manager.save({"val_accuracy": 0.5})
    manager.finish()


def test_a_best_checkpoint_of_another_script_is_kept(
    two_processes: Processes, tmp_path: Path
) -> None:
    """It has neither a step nor a score."""
    two_processes(resumed_beside_a_best_of_another_script, str(tmp_path))
    assert torch.load(tmp_path / "best-of-step-0.pt").keys() == {"state_dict", "optimizer"}
    assert checkpoint.load(tmp_path / "best.pt")["best"] == 0.5


@pytest.mark.parametrize("saved", [{}, {"metric": "val_accuracy"}])
def test_old_checkpoints_are_of_the_same_metric(
    two_processes: Processes, tmp_path: Path, saved: dict
) -> None:
    own = {"metric": "val_accuracy", "metric_mode": "max"}
    ranks = two_processes(resumed_with_other_metric, str(tmp_path), saved, own)
    assert [rank[:3] for rank in ranks] == [(0.75, [0.75], [])] * 2


def warned_of_old_torch(folder: str, output: str) -> list[bool]:
    """Return whether resuming warns, in the folder of the checkpoint and in another one."""
    found = []
    for own in (folder, output):
        manager = manager_of(own)
        if own == folder:
            manager.save()
            manager.finish()
            last = Path(folder, "last.pt")
            if dist.get_rank() == 0:  # in the format of torch before 1.6, which is not checked
                entries = torch.load(last, weights_only=True)
                torch.save(entries, last, _use_new_zipfile_serialization=False)
            dist.barrier()
        with mock.patch.object(torch, "__version__", "2.9.1"):
            manager.resume(Path(folder, "last.pt"), 10)
        found.append(any("CVE-2026-24747" in message for message in manager.logger))
    return found


def test_old_torch_warns_of_checkpoints_from_another_folder(
    two_processes: Processes, tmp_path: Path
) -> None:
    folders = [tmp_path / "there", tmp_path / "here"]
    for folder in folders:
        folder.mkdir()
    assert two_processes(warned_of_old_torch, *map(str, folders)) == [[False, True]] * 2


def best_after_a_failed_write(folder: str) -> tuple[float, float, list[str], str]:
    manager = manager_of(folder, save_every="1m")
    failing = mock.Mock(side_effect=OSError(errno.ENOSPC, "full"))
    for step, metric in enumerate((0.5, 0.9, 0.8), 1):
        manager.state.progress.step = step
        write = failing if metric == 0.9 else checkpoint.write
        with mock.patch.object(checkpoint, "write", write):
            manager.save({"val_accuracy": metric})
            manager.wait()
        is_error = metric == 0.9 and dist.get_rank() == 0
        error = pytest.raises(UserError, match="step-2.pt could not be written")
        with error if is_error else contextlib.nullcontext():
            manager.finish()
    manager.finish()
    dist.barrier()
    best = torch.load(Path(folder, "best.pt"), weights_only=True)
    del best["metadata"]["files"]
    return best["best"], manager.state.progress.best, manager.logger, str(best["metadata"])


def test_best_is_the_best_checkpoint_on_the_disk(two_processes: Processes, tmp_path: Path) -> None:
    (saved, known, said, metadata), _ = two_processes(best_after_a_failed_write, str(tmp_path))
    assert saved == known == 0.8
    assert len(said) == 1 and "step-2.pt could not be written (full)" in said[0]
    assert metadata == (
        "{'arch': 'linear', 'by_shard': False, 'samples': {}, 'fingerprints': {}, "
        "'optimizer': 'SGD'}"
    )


def best_after_a_failed_link(folder: str, name: str, loses_best: bool) -> tuple[int, list[str]]:
    """Return the step of best.pt after an error as the best step's checkpoint gets a name."""
    manager = manager_of(folder, keep=1)

    def fail_once(path: Path, other: Path) -> None:
        if (path.name, other.name) == ("step-2.pt", name) and not failures:
            failures.append(other)
            raise OSError(errno.EIO, "broken")
        link(path, other)

    failures, link = list[Path](), files.link
    with mock.patch.object(files, "link", fail_once):
        for step, metric in enumerate((0.1, 0.9, 0.5, 0.4), 1):
            manager.state.progress.step = step
            manager.save({"val_accuracy": metric})
            manager.wait()
            if loses_best and failures and step == 2:
                Path(folder, "step-2.pt").unlink()
    manager.finish()
    dist.barrier()
    assert {path.name for path in files.numbered(Path(folder))} == {"step-4.pt"}
    return torch.load(Path(folder, "best.pt"), weights_only=True)["step"], manager.logger


@pytest.mark.parametrize(
    ("name", "loses_best", "step"),
    [("best.pt", False, 2), ("last.pt", False, 2), ("best.pt", True, 3)],
)
def test_best_checkpoint_gets_its_name_later_after_an_error(
    two_processes: Processes, tmp_path: Path, name: str, loses_best: bool, step: int
) -> None:
    (found, said), _ = two_processes(best_after_a_failed_link, str(tmp_path), name, loses_best)
    assert found == step
    assert "step-2.pt was written, but files can't be renamed or removed (broken)" in said[0]
    assert len(said) == 1 + loses_best


def best_after_the_folder_was_removed(folder: str) -> tuple[float, int, list[str]]:
    manager = manager_of(folder)
    for step, metric in enumerate((0.9, 0.5, 0.4), 1):
        manager.state.progress.step = step
        manager.save()
        manager.wait()
        manager.state.progress.scores.append(metric)
        manager.save({"val_accuracy": metric})
        manager.finish()
        dist.barrier()
        if metric == 0.9 and dist.get_rank() == 0:
            shutil.rmtree(folder)
            Path(folder).mkdir()
        dist.barrier()
    best = torch.load(Path(folder, "best.pt"), weights_only=True)
    return manager.state.progress.best, best["step"], manager.logger


def test_best_is_replaced_after_the_folder_was_removed(
    two_processes: Processes, tmp_path: Path
) -> None:
    (score, step, said), _ = two_processes(best_after_the_folder_was_removed, str(tmp_path))
    assert (score, step) == (0.5, 2)
    (message,) = said
    assert message.endswith("/best.pt was removed: the next validation replaces it")


def best_that_was_removed_during_a_write(folder: str) -> tuple[int, float]:
    """Return step and score of best.pt, which is removed while a validation's save waits."""
    manager = manager_of(folder)
    is_removed = threading.Event()

    def slow_write(path: Path, entries: dict, *_: object) -> None:
        is_removed.wait(20)
        checkpoint.write(path, entries)

    def save(step: int, results: dict[str, float] | None = None) -> None:
        manager.state.progress.step = step
        manager.save(results)

    save(1, {"val_accuracy": 0.9})
    manager.wait()
    with mock.patch.object(files, "write_or_make_room", slow_write):
        save(2)
        save(2, {"val_accuracy": 0.5})
        if dist.get_rank() == 0:
            Path(folder, "best.pt").unlink()
        threading.Timer(0.5, is_removed.set).start()
        save(3)
        manager.finish()
    dist.barrier()
    best = torch.load(Path(folder, "best.pt"), weights_only=True)
    return best["step"], best["best"]


def test_save_that_waits_while_best_is_removed_does_not_replace_it(
    two_processes: Processes, tmp_path: Path
) -> None:
    assert two_processes(best_that_was_removed_during_a_write, str(tmp_path)) == [(2, 0.5)] * 2


def saved_without_an_answer_of_the_disk(folder: str) -> tuple[float, list[str]]:
    manager = manager_of(folder)
    manager.save({"val_accuracy": 0.9})
    manager.wait()
    manager.state.progress.step = 1
    best_of = mock.Mock(wraps=files.best_of, side_effect=[OSError(errno.ESTALE, ""), mock.DEFAULT])
    with mock.patch.object(files, "best_of", best_of):
        manager.save({"val_accuracy": 0.5})
        manager.finish()
    dist.barrier()
    assert Path(folder, "step-1.pt").exists()
    return torch.load(Path(folder, "best.pt"), weights_only=True)["best"], manager.logger


def test_disk_that_does_not_answer_about_best_costs_no_save(
    two_processes: Processes, tmp_path: Path
) -> None:
    assert two_processes(saved_without_an_answer_of_the_disk, str(tmp_path)) == [(0.9, [])] * 2


def test_disk_that_does_not_answer_is_not_taken_for_no_best(tmp_path, monkeypatch) -> None:
    """Since Python 3.14, Path.exists raises no errors of the disk."""
    monkeypatch.setattr(Path, "exists", lambda self: False)
    assert files.best_of(tmp_path) is None
    monkeypatch.setattr(Path, "stat", mock.Mock(side_effect=OSError(errno.ESTALE, "stale")))
    with pytest.raises(OSError, match=str(errno.ESTALE)):
        files.best_of(tmp_path)


def results_during_a_write(folder: str) -> tuple[float, float, list[bool], bool]:
    """Train on after a validation that ended before its epoch's checkpoint was written."""
    model = nn.Linear(3, 3)
    manager = manager_of(folder, model)
    writes, go_on = [], threading.Event()

    def slow_write(path: Path, entries: dict, *_: object) -> None:
        writes.append(go_on.wait(20))
        checkpoint.write(path, entries)

    with mock.patch.object(files, "write_or_make_room", slow_write):
        manager.save()
        trained = model.weight.sum().item()
        manager.save({"val_accuracy": 0.7})  # returns, though the first is not written
        was_written = Path(folder, "step-0.pt").exists()
        nn.init.zeros_(model.weight)
        go_on.set()
        manager.finish()
    dist.barrier()
    best = torch.load(Path(folder, "best.pt"), weights_only=True)
    assert best["best"] == manager.state.progress.best == 0.7 or dist.get_rank()
    return trained, best["model"]["weight"].sum().item(), writes, was_written


def test_results_of_a_validation_do_not_wait_for_the_checkpoint_before(
    two_processes: Processes, tmp_path: Path
) -> None:
    (trained, saved, writes, was_written), _ = two_processes(results_during_a_write, str(tmp_path))
    assert saved == trained
    assert writes == [True, True] and not was_written


def saved_beyond_the_limit(folder: str) -> list[str]:
    manager = manager_of(folder)
    for step in (validation.MAX_COUNT - 1, validation.MAX_COUNT):
        manager.state.progress.step = step
        manager.save()
        manager.wait()
    dist.barrier()
    return list(manager.logger)


def test_what_could_not_be_resumed_is_not_written(two_processes: Processes, tmp_path: Path) -> None:
    (message,), _ = two_processes(saved_beyond_the_limit, str(tmp_path))
    assert f"step-{2**53}.pt could not be written" in message
    assert "its epoch and step are no counts" in message
    assert checkpoint.load(tmp_path / "last.pt")["step"] == 2**53 - 1


class Disk:
    """Full disk, on which `size` checkpoints have room; best.pt takes none if it is a link."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size

    def write(self, path: Path, entries: dict, write: Callable = checkpoint.write) -> None:
        files = {file.stat().st_ino for file in self.folder.glob("*.pt")}
        if len(files) >= self.size:
            raise OSError(errno.ENOSPC, "full")
        write(path, entries)


def kept_on_a_small_disk(folder: str, size: int, metrics: list[float]) -> tuple[list, list]:
    """Return the files after saves with these metrics, and the messages."""
    manager = manager_of(folder, keep=3)
    with mock.patch.object(checkpoint, "write", Disk(Path(folder), size).write):
        for step, metric in enumerate(metrics, 1):
            manager.state.progress.step = step
            manager.save({"val_accuracy": metric})
            manager.wait()
    dist.barrier()
    return sorted(path.name for path in Path(folder).glob("*.pt")), list(manager.logger)


@pytest.mark.parametrize(
    ("size", "kept", "removed"),
    [
        (9, ["best.pt", "last.pt", "step-2.pt", "step-3.pt", "step-4.pt"], []),
        (3, ["best.pt", "last.pt", "step-1.pt", "step-3.pt", "step-4.pt"], [2]),  # 1 is best.pt
        (2, ["best.pt", "last.pt", "step-1.pt", "step-2.pt"], []),  # the newest is not removed
    ],
)
def test_a_full_disk_costs_the_oldest_checkpoint(
    two_processes: Processes, tmp_path: Path, size: int, kept: list[str], removed: list[int]
) -> None:
    metrics = [0.9, 0.5, 0.6, 0.7]
    (names, said), _ = two_processes(kept_on_a_small_disk, str(tmp_path), size, metrics)
    assert names == kept
    messages = [message for message in said if "removed" in message]
    assert [f"removed {tmp_path}/step-{step}.pt" in messages[0] for step in removed] == [
        True for _ in removed
    ]
    assert any("could not be written (full)" in message for message in said) == (size == 2)
    assert checkpoint.load(tmp_path / "best.pt")["step"] == 1


def history_of_a_resumed_run(folder: str) -> tuple[list[dict[str, float]], str]:
    manager = manager_of(folder)
    manager.logger.rows = [{"epoch": 1, "step": 10, "val_loss": 0.5}]
    manager.logger.run_id = "0123456789abcdef" if dist.get_rank() == 0 else ""
    manager.save()
    manager.finish()
    manager.logger.rows.append({"epoch": 2, "step": 20, "val_loss": 0.25})
    dist.barrier()
    again = manager_of(folder)
    again.resume(Path("auto"), 10)
    return again.logger.rows, again.logger.run_id


def test_metrics_are_resumed_on_all_ranks(two_processes: Processes, tmp_path: Path) -> None:
    """Any of them may be rank 0 of the next run."""
    for rows, run_id in two_processes(history_of_a_resumed_run, str(tmp_path)):
        assert run_id == "0123456789abcdef"
        assert rows == [{"epoch": 1, "step": 10, "val_loss": 0.5}]


def steps_of_saves(folder: str) -> list[str]:
    """Return the checkpoints after ten steps of a quarter of a minute each, one a minute."""
    manager = manager_of(folder, save_every="1m", keep=9)
    meter = meter_on()
    manager.start_epoch(meter)
    for _ in range(10):
        meter.update(torch.tensor(1.0))
        manager.state.progress.step += 1
        manager.saved_at -= 15
        manager.end_step()
    manager.finish()
    dist.barrier()
    return sorted(path.name for path in Path(folder).glob("step-*.pt"))


def test_checkpoints_can_be_saved_by_the_clock(two_processes: Processes, tmp_path: Path) -> None:
    """All ranks agree on it after the next step."""
    names, _ = two_processes(steps_of_saves, str(tmp_path))
    assert names == ["step-10.pt", "step-5.pt"]


def steps_until_the_signal(folder: str) -> tuple[list[int], list[int], list[str]]:
    """Return what `end_step` returns if rank 1 receives a signal in step 2, and how it exits."""
    manager = manager_of(folder)
    manager.start_epoch(meter_on())
    returned = []
    for step in range(1, 4):
        manager.state.progress.step = step
        manager.stop_signals.requested = 15 if dist.get_rank() == 1 and step >= 2 else 0
        returned.append(manager.end_step())
    leave = mock.Mock(side_effect=SystemExit)
    with mock.patch.object(watchdog, "exit_process", leave), pytest.raises(SystemExit):
        manager.save_and_exit(returned[-1])
    return returned, list(leave.call_args.args), list(manager.logger)


def test_all_ranks_stop_after_the_same_step(two_processes: Processes, tmp_path: Path) -> None:
    (first, *ended), (second, *others) = two_processes(steps_until_the_signal, str(tmp_path))
    assert first == second == [0, 0, 15]
    assert ended == [[143], ["stopped after step 3; add --resume auto to continue"]]
    assert others[0] == [143]
    assert checkpoint.load(tmp_path / "last.pt")["step"] == 3


def validated(folder: str, lengths: tuple[int, int], signal_at: int) -> tuple[list, list, int]:
    """Return the batches until rank 1 receives a signal, how it exits, and the number of saves.

    Args:
        lengths: numbers of batches of the two ranks.
        signal_at: number of the batch, or -1 for none.
    """
    manager = manager_of(folder)
    manager.state.progress.step = 7
    manager.save()
    seen = []
    leave = mock.Mock(side_effect=SystemExit)
    with (
        mock.patch.object(watchdog, "exit_process", leave),
        mock.patch.object(manager, "save") as save,
        contextlib.suppress(SystemExit),
    ):
        for batch in manager.until_stopped(range(lengths[dist.get_rank()])):
            seen.append(batch)
            if dist.get_rank() == 1 and batch == signal_at:
                manager.stop_signals.requested = 15
    exits = [call.args[0] for call in leave.call_args_list]
    return seen, exits, save.call_count


@pytest.mark.parametrize("lengths", [(3, 3), (4, 3), (3, 4), (0, 1)])
def test_ranks_may_validate_different_numbers_of_batches(
    two_processes: Processes, tmp_path: Path, lengths: tuple[int, int]
) -> None:
    found = two_processes(validated, str(tmp_path), lengths, -1)
    assert found == [(list(range(length)), [], 0) for length in lengths]


def test_a_signal_stops_the_validation_of_all_ranks(
    two_processes: Processes, tmp_path: Path
) -> None:
    """After the next batch; the epoch is saved before its validation, and not once more."""
    found = two_processes(validated, str(tmp_path), (9, 9), 2)
    assert found == [([0, 1, 2, 3], [143], 0)] * 2
    assert checkpoint.load(tmp_path / "last.pt")["step"] == 7


def stopped_after_failed_writes(folder: str, failures: int) -> list[str]:
    """Return the messages of a run that is stopped in a validation after writes have failed."""
    manager = manager_of(folder)
    errors = iter([OSError(errno.ENOSPC, "disk is full")] * failures)
    write = checkpoint.write

    def write_or_fail(path: Path, entries: dict) -> None:
        if error := next(errors, None):
            raise error
        write(path, entries)

    manager.state.progress.step = 7
    with (
        mock.patch.object(checkpoint, "write", write_or_fail),
        mock.patch.object(watchdog, "exit_process", side_effect=SystemExit),
        pytest.raises(SystemExit),
    ):
        manager.save()
        manager.save_and_exit(15)
    return list(manager.logger)


@pytest.mark.parametrize("failures", [1, 2])
def test_run_that_is_stopped_after_a_failed_write_saves_again(
    two_processes: Processes, tmp_path: Path, failures: int
) -> None:
    said, _ = two_processes(stopped_after_failed_writes, str(tmp_path), failures)
    assert (tmp_path / "step-7.pt").exists() == (failures == 1)
    expected = "stopped after step 7; add --resume auto to continue"
    if failures == 2:
        expected = f"warning: stopped after step 7: {tmp_path}/step-7.pt could not be written ("
    assert said[-1].startswith(expected)


def error_of(call: Callable, *args: object) -> str:
    """Return the message of rank 0's UserError, or "" if there is none."""
    try:
        call(*args)
    except UserError as error:
        return distributed.all_gather(str(error), dist.group.WORLD)[0]
    return distributed.all_gather("", dist.group.WORLD)[0]


def saved_with_nan(folder: str, steps: set[int]) -> tuple[str, int]:
    """Return the error of saves with nan at `steps`, and the number of warnings."""
    model = nn.BatchNorm1d(3)
    manager = manager_of(folder, model)
    error = ""
    for step in range(1, 5):
        manager.state.progress.step = step
        model.running_mean.fill_(math.nan if step in steps else 0.0)
        error = error_of(manager.save) or error_of(manager.save, {"val_accuracy": 0.5})
        if error:
            break
    return error or error_of(manager.finish), len(set(manager.logger))


@pytest.mark.parametrize(
    ("steps", "last_good", "refused"),
    [
        pytest.param({2}, 4, 0, id="once"),
        pytest.param({1, 3}, 4, 0, id="twice"),
        pytest.param({2, 3}, 1, 3, id="in-a-row"),
        pytest.param({1, 2}, 0, 2, id="without-a-checkpoint"),
        pytest.param({4}, 3, 4, id="at-the-end"),
    ],
)
def test_nan_in_two_saves_in_a_row_ends_the_run(
    two_processes: Processes, tmp_path: Path, steps: set[int], last_good: int, refused: int
) -> None:
    """Saves before and after a validation are of the same tensors."""
    (error, warnings), _ = two_processes(saved_with_nan, str(tmp_path), steps)
    assert warnings == (2 if steps == {1, 3} else 1)
    reason = f"{tmp_path}/step-{refused}.pt could not be written (model.running_mean is not finite)"
    good = f"resume from {tmp_path}/step-{last_good}.pt, the last good checkpoint"
    assert error.startswith(reason if refused else "") and bool(error) == bool(refused)
    assert error.endswith((good if last_good else "start again") if refused else "")
    assert (tmp_path / "last.pt").exists() == bool(last_good)


def stopped_with_nan(folder: str) -> tuple[int, str]:
    """Return the status and the last message of a run that a signal stops after such a save."""
    model = nn.BatchNorm1d(3)
    manager = manager_of(folder, model)
    model.running_mean.fill_(math.nan)
    manager.save()
    manager.state.progress.step = 1
    leave = mock.Mock(side_effect=SystemExit)
    with mock.patch.object(watchdog, "exit_process", leave), pytest.raises(SystemExit):
        manager.save_and_exit(15)
    return leave.call_args.args[0], manager.logger[-1]


def test_signal_after_a_save_with_nan_keeps_its_status(
    two_processes: Processes, tmp_path: Path
) -> None:
    problem = f"{tmp_path}/step-1.pt could not be written (model.running_mean is not finite)"
    expected = (143, f"warning: stopped after step 1: {problem}")
    (found, (status, _)) = two_processes(stopped_with_nan, str(tmp_path))
    assert (found, status) == (expected, 143)


def save_twice_what_cannot_be_saved(folder: str) -> tuple[str, list[str]]:
    """Return the error of the second save, and the messages."""
    manager = manager_of(folder)
    manager.state.optimizer.state["k"] = torch.eye(2).to_sparse()
    manager.save()
    manager.wait()
    dist.barrier()
    try:
        manager.save()
    except UserError as error:
        return str(error), list(manager.logger)
    return "", list(manager.logger)


def test_a_run_that_cannot_save_ends_at_its_second_save(
    two_processes: Processes, tmp_path: Path
) -> None:
    """Not after all of its epochs, with nothing that was saved."""
    problem = f"{tmp_path}/step-0.pt could not be written ('k' in 'state' in 'optimizer' in "
    ((error, said), _) = two_processes(save_twice_what_cannot_be_saved, str(tmp_path))
    assert error.startswith(problem) and error.endswith(": fix that, and start again")
    assert "is a sparse tensor, which a checkpoint can't hold" in error
    assert said[-1].startswith(f"warning: {problem}")
    assert said[-1].endswith("; if the next one fails, too, it ends")


def save_after_failures(folder: str, number: int, text: str) -> tuple[list[str], bool]:
    """Return the messages of `number` saves that fail, and whether one after them succeeds."""
    manager = manager_of(folder)
    write, errors = files.write_or_make_room, [RuntimeError(text)] * number

    def write_or_fail(*args: object) -> None:
        if errors:
            raise errors.pop()
        write(*args)

    with mock.patch.object(files, "write_or_make_room", write_or_fail):
        for _ in range(number + 1):
            manager.save()
            manager.wait()
            dist.barrier()
    return list(manager.logger), Path(folder, "last.pt").exists()


@pytest.mark.parametrize(
    ("number", "text"),
    [(1, "a bug"), (3, "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")],
)
def test_a_first_save_that_fails_is_tried_again(
    two_processes: Processes, tmp_path: Path, number: int, text: str
) -> None:
    """Also when memory is short, for which torch has no MemoryError."""
    ((said, succeeded), _) = two_processes(save_after_failures, str(tmp_path), number, text)
    assert succeeded
    assert len(said) == number


def better_weights(folder: str) -> tuple[int, str, dict]:
    """Return the step, the weights and the results of best.pt, where lower is better."""
    manager = manager_of(folder, logger=Messages(MonitoredMetric("mae", "min")))
    results = ({"mae": 3.0, "mae_ema": 5.0}, {"mae": 4.0, "mae_ema": 2.0}, {"mae": float("nan")})
    for step, row in enumerate(results, 1):
        manager.state.progress.step = step
        manager.save(row)
    manager.finish()
    dist.barrier()
    best = torch.load(Path(folder, "best.pt"), weights_only=True)
    return best["step"], best["weights"], best["results"]


def test_best_is_the_lowest_of_the_model_and_its_average(
    two_processes: Processes, tmp_path: Path
) -> None:
    found = two_processes(better_weights, str(tmp_path))
    assert found == [(2, "ema", {"mae": 4.0, "mae_ema": 2.0})] * 2


def test_incomplete_files_of_a_killed_process_are_removed(
    two_processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "step-1.pt.tmp").write_bytes(b"half")
    two_processes(saved_once, str(tmp_path), 3)
    assert {path.name for path in tmp_path.iterdir()} == {"step-3.pt", "last.pt"}


def test_incomplete_folder_that_cannot_be_removed_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    incomplete = tmp_path / "step-1-removed.tmp"
    incomplete.mkdir()
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    sharded.remove(incomplete)
    assert [*tmp_path.iterdir()] == [incomplete]
    warnings: list[str] = []
    progress = checkpoint.Progress()
    writer = CheckpointWriter(tmp_path, 3, progress, warnings.append, None, mock.Mock())
    for _ in range(2):
        writer._prepare()
    assert warnings == [f"{incomplete} can't be removed: remove it, to free its space"]


def newest_after_an_early_step(folder: str) -> tuple[list[str], int]:
    """Return the files after a save of a run that resumed from step 10, and the step resumed."""
    manager = manager_of(folder)
    manager.resume(Path(folder, "step-10.pt"), 10)
    manager.state.progress.step = 12
    save_and_finish(manager)
    again = manager_of(folder)
    again.resume(Path("auto"), 10)
    return sorted(path.name for path in Path(folder).glob("*.pt")), again.state.progress.step


def test_a_run_that_resumes_from_an_early_step_removes_later_ones(
    two_processes: Processes, tmp_path: Path
) -> None:
    """Or they would be the newest of all."""
    for step in (10, 20, 30):
        prepared(tmp_path, {step: 0.0})
        link(tmp_path / f"step-{step}.pt", tmp_path / "last.pt")
    for names, step in two_processes(newest_after_an_early_step, str(tmp_path)):
        assert (names, step) == (["last.pt", "step-10.pt", "step-12.pt"], 12)


def files_after_writes(folder: str, errors: list[OSError | None]) -> list[list[str]]:
    """Return the files after each save of a run that resumed from step 10."""
    manager = manager_of(folder)
    manager.resume(Path(folder, "step-10.pt"), 10)
    found = []
    for step, error in enumerate(errors, 12):
        manager.state.progress.step = step
        write = mock.Mock(side_effect=error) if error else Disk(Path(folder), 2).write
        with mock.patch.object(checkpoint, "write", write):
            manager.save()
            manager.wait()
        found.append(sorted(path.name for path in Path(folder).iterdir()))
        if error and dist.get_rank() == 0:
            with pytest.raises(UserError, match="fix that, and start again with the same --resume"):
                manager.finish()
        elif error:
            manager.finish()
    dist.barrier()
    return found


def test_later_checkpoints_are_kept_until_a_new_one_is_complete(
    two_processes: Processes, tmp_path: Path
) -> None:
    """They are removed before, rather than the one that was resumed, if the disk is full."""
    prepared(tmp_path, {10: 0.0, 20: 0.0})
    link(tmp_path / "step-20.pt", tmp_path / "last.pt")
    errors = [OSError(errno.EIO, "failed"), None]
    found, _ = two_processes(files_after_writes, str(tmp_path), errors)
    assert found[0] == ["last.pt", "step-10.pt", "step-20.pt"]
    assert found[1] == ["last.pt", "step-10.pt", "step-13.pt"]


def test_full_disk_keeps_the_resumed_checkpoint(two_processes: Processes, tmp_path: Path) -> None:
    """Rather than a later one, also if that is of the step that is written."""
    prepared(tmp_path, {10: 0.0, 12: 0.0})
    found, _ = two_processes(files_after_writes, str(tmp_path), [None])
    assert found == [["last.pt", "step-10.pt", "step-12.pt"]]


def saved_once(folder: str, step: int) -> None:
    manager = manager_of(folder)
    manager.state.progress.step = step
    save_and_finish(manager)


@pytest.mark.parametrize(
    "change",
    mostly_slow(
        [
            {"meter": 5},
            {"meter": {"a": ("many", 1)}},
            {"meter": {"a": (1.0, -1)}},
            {"meter": {"a\nb": (1.0, 1)}},
            {"meter": {"step": (1.0, 1)}},
            {"rng": 5},
            {"rng": {"python": 2**70}},
        ],
        fast=3,
    ),
)
def test_an_altered_state_of_a_process_is_rejected(
    two_processes: Processes, tmp_path: Path, change: dict
) -> None:
    with pytest.raises(
        AssertionError, match="--resume .* the state of its processes .*use another one"
    ):
        two_processes(resumed_with, str(tmp_path), change)


def resumed_with(folder: str, change: dict) -> None:
    saved_once(folder, 1)
    path = Path(folder, "last.pt")
    state = torch.load(path, weights_only=True)
    state["ranks"] = [rank | change for rank in state["ranks"]]
    own = path.with_name(f"{dist.get_rank()}.pt")
    torch.save(state, own)
    manager_of(folder).resume(own, 10)


def resumed_average(folder: str, has_average: bool) -> tuple[float, list[str]]:
    """Return a value of the resumed average, and the messages."""
    model = nn.Linear(3, 3)
    manager = manager_of(folder, model)
    if has_average:
        manager.state.ema = Ema(model, 0.9)
        manager.state.ema.module.bias.fill_(7.0)
    with torch.no_grad():
        model.bias.fill_(5.0)
    save_and_finish(manager)
    again = manager_of(folder)
    again.state.ema = Ema(again.state.model, 0.9)
    again.resume(Path("auto"), 10)
    return again.state.ema.module.bias[0].item(), again.logger


def test_the_average_of_the_weights_is_resumed(two_processes: Processes, tmp_path: Path) -> None:
    """Or it starts with the weights of a run that had none."""
    for has_average, expected in ((True, 7.0), (False, 5.0)):
        for value, [said] in two_processes(resumed_average, str(tmp_path), has_average):
            assert value == expected
            assert ("it has no average of the weights" in said) == (not has_average)


def warnings_of_an_evaluation(folder: str, better: str) -> list[str]:
    """Return the warnings of an evaluation without --ema of a run that had an average."""
    model = nn.Linear(3, 3)
    manager = manager_of(folder, model)
    manager.state.ema = Ema(model, 0.9)
    manager.state.progress.weights = better
    save_and_finish(manager)
    again = manager_of(folder)
    again.resume(Path(folder, "last.pt"), 10, required=True)
    return [text for text in again.logger if text.startswith("warning")]


def test_evaluation_without_the_better_average_is_a_warning(
    two_processes: Processes, tmp_path: Path
) -> None:
    assert two_processes(warnings_of_an_evaluation, str(tmp_path), "model") == [[]] * 2
    for [warning] in two_processes(warnings_of_an_evaluation, str(tmp_path), "ema"):
        assert warning.endswith("is the better one; add --ema to validate that, too")


def evaluate_without_average(folder: str) -> None:
    manager = manager_of(folder)
    save_and_finish(manager)
    again = manager_of(folder)
    again.state.ema = Ema(again.state.model, 0.9)
    with pytest.raises(
        UserError, match=r"--ema: .*last\.pt has no average of the weights; leave it out"
    ):
        again.resume(Path(folder, "last.pt"), 10, required=True)


def test_evaluation_of_an_average_needs_one(two_processes: Processes, tmp_path: Path) -> None:
    two_processes(evaluate_without_average, str(tmp_path))


def save_numbers_of_numpy(folder: str) -> dict:
    """Return the entries of a checkpoint, read again."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=np.sqrt(0.01))
    metadata = {"classes": [*np.array(["a", "b"])], "model_options": {"depth": np.int64(2)}}
    manager = manager_of(folder, model, optimizer, metadata=metadata)
    manager.logger.rows = [{"epoch": 1, "step": 1, "train_loss": np.float32(0.5)}]
    save_and_finish(manager, {"val_accuracy": np.float64(0.5)})
    return checkpoint.load(Path(folder, "last.pt"))


def test_numbers_of_numpy_are_saved_as_pythons(two_processes: Processes, tmp_path: Path) -> None:
    """The number of a learning rate or a metric may be one; no file with them could be read."""
    for entries in two_processes(save_numbers_of_numpy, str(tmp_path)):
        assert entries["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.1)
        assert entries["metadata"]["classes"] == ["a", "b"]
        assert entries["metadata"]["model_options"] == {"depth": 2}
        assert (entries["best"], entries["results"]) == (0.5, {"val_accuracy": 0.5})


def refuse_options(folder: str) -> None:
    for value in (Path(folder), object(), b"1", Reduction.MEAN):
        message = f"'options' in .* is a {type(value).__name__}, which a checkpoint can't hold"
        with pytest.raises(UserError, match=message):
            manager_of(folder, metadata={"model_options": {"options": [value]}})


class WithState(nn.Linear):
    def get_extra_state(self) -> object:
        return {"history": np.zeros(2)}

    def set_extra_state(self, state: object) -> None: ...


class WithoutArguments(nn.Linear):
    def state_dict(self) -> dict:  # type: ignore[override]
        return super().state_dict()


class Lookahead(torch.optim.SGD):
    def state_dict(self) -> dict:
        saved = super().state_dict()
        return {"fast_state": saved["state"], "param_groups": saved["param_groups"]}


def refuse_states(folder: str) -> None:
    sparse = nn.Linear(2, 2)
    sparse.register_buffer("edges", torch.eye(2).to_sparse())
    models = {
        "'edges' in 'model' in the checkpoint is a sparse": sparse,
        "ndarray": WithState(2, 2),
        "must take the arguments of nn.Module's": WithoutArguments(2, 2),
    }
    for message, model in models.items():
        with pytest.raises(UserError, match=message):
            manager_of(folder, model)
    model = nn.Linear(2, 2)
    with pytest.raises(UserError, match=r"the state_dict\(\) of Lookahead has no state"):
        manager_of(folder, model, Lookahead(model.parameters()))
    sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(UserError, match="of ZeroRedundancyOptimizer fails .*consolidat"):
        manager_of(folder, model, sharded)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    manager = manager_of(folder, model, optimizer)
    manager.start_epoch(meter_on())
    optimizer.state[model.weight]["projector"] = np.zeros(2)
    manager.state.progress.step += 1
    with pytest.raises(UserError, match="'projector' in 0 in 'state' in the optimizer's state is"):
        manager.end_step()


def test_states_that_can_not_be_saved_are_refused_at_the_start(
    two_processes: Processes, tmp_path: Path
) -> None:
    two_processes(refuse_states, str(tmp_path))


def test_options_that_can_not_be_saved_are_refused_at_the_start(
    two_processes: Processes, tmp_path: Path
) -> None:
    two_processes(refuse_options, str(tmp_path))


# What is resumed


class Labels(list):
    def reorder_classes(self, classes: list[str]) -> None:
        self[:] = [classes.index("ab"[label]) for label in self]


def resumed_on_other_data(folder: str, is_evaluation: bool) -> tuple[list, dict, list[str]]:
    """Return the labels, the metadata and the messages of a run with other data and opt_level."""
    there = {"train": range(9), "val": range(4)}
    metadata = {"classes": ["b", "a"], "opt_level": "O1", "model_options": {"image": {"size": 32}}}
    manager = manager_of(folder, metadata=metadata, data_sets=there)
    save_and_finish(manager)
    here = {"train": Labels([0, 1, 0]), "val": Labels([1, 0, 0, 1])}
    again = manager_of(folder, metadata={"classes": ["a", "b"], "opt_level": "O2"}, data_sets=here)
    again.resume(Path(folder, "last.pt"), 10, required=is_evaluation)
    return [*here["train"], *here["val"]], again.metadata, list(again.logger)


@pytest.mark.parametrize("is_evaluation", [False, True])
def test_resume_compares_classes_samples_and_opt_level(
    two_processes: Processes, tmp_path: Path, is_evaluation: bool
) -> None:
    for labels, metadata, said in two_processes(
        resumed_on_other_data, str(tmp_path), is_evaluation
    ):
        assert labels == [1, 0, 1, 0, 1, 1, 0]
        assert "engine/checkpoint/manager.py" in metadata.pop("files")
        assert metadata == {
            "classes": ["b", "a"],  # those of the next checkpoint, too
            "opt_level": "O2",
            "by_shard": False,
            "samples": {"train": 3, "val": 4},
            "fingerprints": {"train": {}, "val": {}},
            "optimizer": "SGD",
        }
        assert said[-1].endswith(
            ", with the labels of the data in its order of the classes, saved at O1"
        )
        changes = "the data has changed (train: 9 samples there, 3 here)"
        assert sum(changes in message for message in said) == (not is_evaluation)
        images = "it was trained with other images (size 32 there and 224 here)"
        assert sum(images in message for message in said) == 1


def resumed_in_an_epoch(folder: str, samples: int) -> tuple[int, list[str]]:
    """Return the position and the messages of a run that was 8 samples into an epoch of 5."""
    manager = manager_of(folder, data_sets={"train": range(5)})
    manager.state.progress.samples = 8
    manager._means = [{"train_loss": (1.0, 1)}]
    save_and_finish(manager)
    again = manager_of(folder, data_sets={"train": range(samples)})
    again.resume(Path(folder, "last.pt"), 10)
    return again.state.progress.samples, list(again.logger)


def test_epoch_of_a_sampler_may_be_longer_than_the_data(
    two_processes: Processes, tmp_path: Path
) -> None:
    """As that of one that reads the samples of rare classes more often."""
    [(position, said), _] = two_processes(resumed_in_an_epoch, str(tmp_path), 5)
    assert position == 8 and "warning" not in said[0]
    [(position, said), _] = two_processes(resumed_in_an_epoch, str(tmp_path), 6)
    assert position == 0 and any("8 samples into an epoch, which has 6 now" in one for one in said)


class LabelledSamples(list):
    def __init__(self, labels: list[int]) -> None:
        super().__init__(labels)
        self.labels = labels


def resumed_with_other_labels(folder: str, samples: int, is_evaluation: bool) -> tuple:
    """Return the messages of a run whose labels are others, and what it knows of its data."""
    there = {name: LabelledSamples([0, 1, 0, 1]) for name in ("train", "val")}
    manager = manager_of(folder, data_sets=there)
    manager.state.progress.samples = samples
    manager.state.progress.scores = [0.5]
    manager._means = [{"train_loss": (1.0, 1)}]
    save_and_finish(manager, {"val_accuracy": 0.5})
    here = {name: LabelledSamples([1, 0, 0, 1]) for name in ("train", "val")}
    again = manager_of(folder, data_sets=here)
    again.resume(Path(folder, "last.pt"), 10, required=is_evaluation)
    progress = again.state.progress
    return list(again.logger), again.has_same_val_data, (progress.best, progress.scores)


OTHER_DATA = "the data has changed (train: other labels, val: other labels"


@pytest.mark.parametrize(
    ("samples", "is_evaluation", "expected"),
    [
        (0, False, f"{OTHER_DATA})"),
        (2, False, f"{OTHER_DATA}; the rest of its epoch may repeat or leave out samples)"),
        (5, True, "this is other data than it was validated on in training (other labels)"),
    ],
)
def test_data_with_other_labels_is_a_warning(
    two_processes: Processes, tmp_path: Path, samples: int, is_evaluation: bool, expected: str
) -> None:
    """As MNIST and Fashion-MNIST, which have the same sizes and class names."""
    ranks = two_processes(resumed_with_other_labels, str(tmp_path), samples, is_evaluation)
    for rank, (said, is_same, scores) in enumerate(ranks):
        assert said[0] == f"warning: --resume {tmp_path / 'last.pt'}: {expected}"
        assert is_same is False
        if is_evaluation:
            assert (len(said), scores) == (2, (0.5, [0.5]))
        else:  # rank 0 logs one about best.pt, too
            assert (len(said), scores) == (4 - rank, (-float("inf"), []))
            assert "the validation data has changed; its scores are not compared" in said[1]


def resumed_after_an_edit(folder: str, is_evaluation: bool) -> list[str]:
    """Return the messages of a run whose task.py is another than that of its checkpoint."""
    digests = "engine.distributed.consistency.file_digests"
    before = {"engine/a.py": "0", "main.py": "0", "task.py": "1", "removed.py": "2"}
    with mock.patch(digests, return_value=before):
        save_and_finish(manager_of(folder))
    after = {"added.py": "4", "engine/a.py": "1", "main.py": "0", "task.py": "3"}
    with mock.patch(digests, return_value=after):
        again = manager_of(folder)
        again.resume(Path(folder, "last.pt"), 10, required=is_evaluation)
    return list(again.logger)


@pytest.mark.parametrize("is_evaluation", [False, True])
def test_resuming_with_edited_files_is_a_warning(
    two_processes: Processes, tmp_path: Path, is_evaluation: bool
) -> None:
    """As a job that is restarted while the user prepares the next experiment.

    An evaluation may be by another engine; its model and data are those of task.py.
    """
    path, changed = tmp_path / "last.pt", "task.py" if is_evaluation else "task.py, engine/a.py"
    warning = f"warning: --resume {path}: files differ from those that saved it: {changed}"
    for said in two_processes(resumed_after_an_edit, str(tmp_path), is_evaluation):
        assert said.count(warning) == 1
        assert len(said) == 2


def resumed_while_it_is_replaced(folder: str) -> str:
    """Return the error of resuming a file that becomes another one when rank 0 has read it."""
    manager = manager_of(folder)
    save_and_finish(manager)
    path, other, load = Path(folder, "last.pt"), Path(folder, "other.pt"), checkpoint.load

    def load_and_replace(*arguments: object) -> dict:
        entries = load(*arguments)
        if dist.get_rank() == 0:
            shutil.copyfile(path, other)
            other.replace(path)
        return entries

    again = manager_of(folder)
    with mock.patch.object(checkpoint, "load", load_and_replace), pytest.raises(UserError) as error:
        again.resume(path, 10)
    return str(error.value)


def test_all_ranks_read_the_same_file(two_processes: Processes, tmp_path: Path) -> None:
    """Not the best.pt of another run before and after its next validation."""
    for error in two_processes(resumed_while_it_is_replaced, str(tmp_path)):
        assert "last.pt: it was replaced while it was read; start again" in error


def resumed_with_seed(
    folder: str, samples: int, seed: int, is_evaluation: bool = False, known: bool = False
) -> list[str]:
    """Return the messages of a run that resumes a checkpoint of seed 1 with another one.

    Args:
        known: whether the validation data has a fingerprint.
    """
    manager = manager_of(folder, metadata={"seed": 1})
    manager.state.progress.samples = samples
    manager._means = [{"train_loss": (1.0, 1)}]
    save_and_finish(manager)
    again = manager_of(folder, metadata={"seed": seed})
    is_same = mock.patch.object(compatibility, "is_same_val_data", return_value=True)
    with is_same if known else contextlib.nullcontext():
        again.resume(Path(folder, "last.pt"), 10, required=is_evaluation)
    return [line for line in again.logger if "--seed" in line]


@pytest.mark.parametrize(
    ("seed", "known", "is_warned"), [(1, False, False), (2, False, True), (2, True, False)]
)
def test_another_seed_in_an_evaluation_is_a_warning_if_the_data_is_not_known(
    two_processes: Processes, tmp_path: Path, seed: int, known: bool, is_warned: bool
) -> None:
    """A validation set that is split off at random would be another one."""
    said = two_processes(resumed_with_seed, str(tmp_path), 0, seed, True, known)[0]
    assert ["this is another split" in line for line in said] == [True] * is_warned


@pytest.mark.parametrize(
    ("samples", "seed", "is_warned"), [(0, 1, False), (0, 2, True), (2, 1, False), (2, 2, True)]
)
def test_another_seed_is_a_warning(
    two_processes: Processes, tmp_path: Path, samples: int, seed: int, is_warned: bool
) -> None:
    warnings = two_processes(resumed_with_seed, str(tmp_path), samples, seed)[0]
    assert len(warnings) == is_warned
    assert ("may repeat or leave out samples" in "".join(warnings)) == (is_warned and samples > 0)


def resume_to(folder: str, choice: Path) -> None:
    manager_of(folder).resume(choice, 10)


@pytest.mark.parametrize("choice", ["auto", "step-2.pt"])
def test_checkpoints_of_another_script_are_not_replaced(
    two_processes: Processes, tmp_path: Path, choice: str
) -> None:
    """The first save would remove those of higher numbers, such as all of a run without a step."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters())
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    for step in (1, 2):
        torch.save(saved, tmp_path / f"step-{step}.pt")
    path = Path(choice) if choice == "auto" else tmp_path / choice
    with pytest.raises(AssertionError, match="step-2.pt: another script wrote .* another --output"):
        two_processes(resume_to, str(tmp_path), path)
    two_processes(resume_to, str(tmp_path / "other"), tmp_path / "step-2.pt")


class NamedLabels(list):
    classes: list[str]

    def reorder_classes(self, classes: list[str]) -> None:
        self[:] = [classes.index(self.classes[label]) for label in self]
        self.classes = classes


def saved_classes_used(folder: str, choice: Path | None, own: str, damage: bool) -> tuple:
    """Return the labels and the messages of an evaluation of data with the classes `own`."""
    manager = manager_of(folder, metadata={"classes": ["red", "green", "blue"]})
    manager.save()
    manager.finish()
    if damage and dist.get_rank() == 0:
        Path(folder, "last.pt").unlink()  # which is another name of a file
        Path(folder, "last.pt").write_bytes(b"damaged")
    dist.barrier()
    data_set, logger = NamedLabels(range(len(own.split()))), Messages()
    data_set.classes = own.split()
    data_sets = {"train": data_set, "val": data_set}
    with mock.patch("torch.distributed.new_group", wraps=dist.new_group) as create:
        compatibility.use_saved_classes(data_sets, Path(folder), choice, logger, timeout_s=7200)
    assert all(call.kwargs["timeout"] == timedelta(seconds=7260) for call in create.mock_calls)
    return [*data_set], [*logger]


def test_evaluation_uses_the_classes_of_the_checkpoint(
    two_processes: Processes, tmp_path: Path
) -> None:
    path = tmp_path / "last.pt"
    for choice in (Path("auto"), path):
        found = two_processes(saved_classes_used, str(tmp_path), choice, "blue red", False)
        for labels, said in found:
            assert labels == [2, 0]
            assert said == [f"evaluating with the 3 classes of {path}; the data has no green"]
    with pytest.raises(AssertionError, match="only in the checkpoint: .*; only in the data: grey"):
        two_processes(saved_classes_used, str(tmp_path), path, "blue grey", False)


def test_missing_checkpoints_and_classes_are_left_to_the_resume(
    two_processes: Processes, tmp_path: Path
) -> None:
    last = tmp_path / "last.pt"
    for choice, own, is_damaged in (
        (None, "blue red", False),
        (tmp_path / "no.pt", "blue red", False),
        (last, "", False),
        (last, "blue red", True),
    ):
        found = two_processes(saved_classes_used, str(tmp_path), choice, own, is_damaged)
        assert found == [([*range(len(own.split()))], [])] * 2


SETTINGS = {"lr": 0.1, "steps": 5, "workers": 4}
SLURM_JOB, SLURM_COUNT = "SLURM_JOB_ID", "SLURM_RESTART_COUNT"


def resumed_after_restart(folder: str, choice: Path | None, **changed: object) -> tuple:
    """Return the path and the messages of a process that replaces a failed one."""
    manager = manager_of(folder, settings=SETTINGS | changed)
    with mock.patch.dict(os.environ, {"TORCHELASTIC_RESTART_COUNT": "1"}):
        path = manager.resume(choice, 10)
    return path, list(manager.logger)


@pytest.mark.parametrize("choice", [None, Path("auto"), Path("other.pt")])
def test_a_restart_resumes_the_newest_checkpoint(
    two_processes: Processes, tmp_path: Path, choice: Path | None
) -> None:
    two_processes(saved_once, str(tmp_path), 3)
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    host_changes = {"workers": 2, "steps": 9}  # which may differ
    for path, _ in two_processes(resumed_after_restart, str(tmp_path), choice, **host_changes):
        assert path == tmp_path / "last.pt"


def test_a_restart_without_a_checkpoint_starts_over(
    two_processes: Processes, tmp_path: Path
) -> None:
    for choice in (None, Path("auto")):
        for path, [said] in two_processes(resumed_after_restart, str(tmp_path), choice):
            assert path is None
            assert said == f"{tmp_path} has no checkpoint: the run starts from the beginning"


def test_a_restart_without_a_checkpoint_names_files_that_were_edited(
    two_processes: Processes, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SETTINGS | {"FILES": {"task.py": "0", "removed.py": "1"}}))
    warning = f"warning: {config}: files differ from those that saved it: task.py"
    for choice in (None, Path("auto")):
        for _, said in two_processes(resumed_after_restart, str(tmp_path), choice):
            assert said[1:] == [warning]


def discarded_by_going_back(folder: str) -> list[int]:
    """Return what identifies the checkpoints that a run discards which goes back to step 1."""
    manager = manager_of(folder)
    manager.resume(Path(folder, "step-1.pt"), 10)
    return manager.logger.discarded


def test_a_restart_does_not_resume_what_the_user_went_back_from(
    two_processes: Processes, tmp_path: Path
) -> None:
    """A process may fail before the first save, which removes it."""
    for step in (1, 2):
        two_processes(saved_once, str(tmp_path), step)
    (tmp_path / "last.pt").unlink()
    shutil.copyfile(tmp_path / "step-2.pt", tmp_path / "last.pt")  # as without hard links
    discarded, others = two_processes(discarded_by_going_back, str(tmp_path))
    assert (len(discarded), others) == (2, [])
    earlier = tmp_path / "step-1.pt"
    for found, expected in ((discarded, earlier), ([], tmp_path / "last.pt")):
        (tmp_path / "config.json").write_text(json.dumps(SETTINGS | {"DISCARDED": found}))
        for path, _ in two_processes(resumed_after_restart, str(tmp_path), earlier):
            assert path == expected
    two_processes(saved_once, str(tmp_path), 2)  # again, by the run that went back
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS | {"DISCARDED": discarded}))
    for path, _ in two_processes(resumed_after_restart, str(tmp_path), earlier):
        assert path == tmp_path / "last.pt"


@pytest.mark.parametrize(
    "found",
    ['["x"]', "[null]", "[1e999]", "3", "[" * 10**5],
    ids=["text", "null", "infinity", "number", "nested"],
)
def test_altered_list_of_discarded_checkpoints_is_none(tmp_path: Path, found: str) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"DISCARDED": [17]}')
    assert compatibility.read_discarded(tmp_path) == [17]
    config.write_text('{"DISCARDED": ' + found + "}")
    assert compatibility.read_discarded(tmp_path) == []


def resumed_by_auto(folder: str) -> str:
    path = manager_of(folder).resume(Path("auto"), 10)
    return Path(path).resolve().name


def test_auto_does_not_resume_what_a_run_that_has_saved_went_back_from(
    two_processes: Processes, tmp_path: Path
) -> None:
    """A kill during the first save leaves some of it."""
    for step in (1, 9):
        two_processes(saved_once, str(tmp_path), step)
    (tmp_path / "last.pt").unlink()
    discarded, _ = two_processes(discarded_by_going_back, str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS | {"DISCARDED": discarded}))
    assert two_processes(resumed_by_auto, str(tmp_path)) == ["step-9.pt"] * 2  # nothing is saved
    shutil.copyfile(tmp_path / "step-1.pt", tmp_path / "step-2.pt")
    assert two_processes(resumed_by_auto, str(tmp_path)) == ["step-2.pt"] * 2


def test_a_restart_resumes_the_checkpoint_that_the_user_went_back_to(
    two_processes: Processes, tmp_path: Path
) -> None:
    """Its name may be one that --resume auto does not find."""
    for step in (2, 5, 9):
        two_processes(saved_once, str(tmp_path), step)
        shutil.copyfile(tmp_path / f"step-{step}.pt", tmp_path / f"best-of-step-{step}.pt")
    choice = tmp_path / "best-of-step-5.pt"
    (tmp_path / "best-of-step-2.pt").rename(tmp_path / "best.pt")
    (tmp_path / "step-5.pt").unlink()
    discarded = [(tmp_path / "step-9.pt").stat().st_mtime_ns]
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS | {"DISCARDED": discarded}))
    for path, _ in two_processes(resumed_after_restart, str(tmp_path), choice):
        assert path == choice


def test_a_restart_resumes_its_own_run_and_not_the_one_that_it_started_from(
    two_processes: Processes, tmp_path: Path
) -> None:
    folder, other = tmp_path / "b", tmp_path / "a"
    for run, step in ((folder, 3), (other, 9)):
        run.mkdir()
        two_processes(saved_once, str(run), step)
    (folder / "config.json").write_text(json.dumps(SETTINGS))
    for path, _ in two_processes(resumed_after_restart, str(folder), other / "last.pt"):
        assert path == folder / "last.pt"


def test_a_restart_in_the_folder_of_another_run_is_an_error(
    two_processes: Processes, tmp_path: Path
) -> None:
    two_processes(saved_once, str(tmp_path), 3)
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    with pytest.raises(AssertionError, match="holds a run with lr 0.1 and not 0.2: add"):
        two_processes(resumed_after_restart, str(tmp_path), None, lr=0.2)
    for path, said in two_processes(resumed_after_restart, str(tmp_path), Path("auto"), lr=0.2):
        assert path == tmp_path / "last.pt"
        assert said[0] == f"warning: the run in {tmp_path} was started with lr 0.1 and not 0.2"
    (tmp_path / "config.json").write_text("damaged")
    for path, said in two_processes(resumed_after_restart, str(tmp_path), Path("auto"), lr=0.2):
        assert path == tmp_path / "last.pt"
        assert len(said) == 1


def resumed_in_launch(folder: str, variables: dict[str, str], by_rank: bool = False) -> tuple:
    """Return what `resumed_after_restart` does, and whether the logger continues a run."""
    if by_rank:  # each host has its own disk
        folder = f"{folder}/{dist.get_rank()}"
    manager = manager_of(folder, settings=SETTINGS)
    variables = {"TORCHELASTIC_RESTART_COUNT": "1"} | variables
    with mock.patch.dict(os.environ, variables):
        path = manager.resume(None, 10)
    return path, manager.logger.is_restart


def resumed_automatically(folder: str) -> tuple:
    """Return the path and the messages of a run with --resume auto."""
    changed = {"lr": 0.2, "resume": "auto", "data": "new", "output": "new"}
    manager = manager_of(folder, settings=SETTINGS | changed)
    return manager.resume(Path("auto"), 10), list(manager.logger)


def test_automatic_resumption_logs_changed_settings(
    two_processes: Processes, tmp_path: Path
) -> None:
    """Forgotten flags have their defaults."""
    two_processes(saved_once, str(tmp_path), 3)
    settings = SETTINGS | {"resume": None, "data": "old", "output": "old"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    for _, said in two_processes(resumed_automatically, str(tmp_path)):
        changed = "data old and not new, lr 0.1 and not 0.2"
        assert said[0] == f"the run in {tmp_path} was started with {changed}"


def test_automatic_resumption_logs_that_there_is_no_checkpoint(
    two_processes: Processes, tmp_path: Path
) -> None:
    """The folder may be the wrong one."""
    said = [f"{tmp_path} has no checkpoint: the run starts from the beginning"]
    assert two_processes(resumed_automatically, str(tmp_path)) == [(None, said)] * 2
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS | {"resume": "other/best.pt"}))
    for path, messages in two_processes(resumed_automatically, str(tmp_path)):
        assert path is None and said[0] in messages
        assert f"warning: the run in {tmp_path} was started with --resume other" in messages[-1]


@pytest.mark.parametrize(
    ("launch", "variables", "is_continued"),
    [
        ({LAUNCH_ID: "ours"}, {LAUNCH_ID: "ours"}, True),
        ({LAUNCH_ID: "theirs"}, {LAUNCH_ID: "ours"}, False),
        ({}, {LAUNCH_ID: "ours"}, False),
        # A requeued job of SLURM has another launcher; a job may start several launchers.
        ({SLURM_JOB: "7"}, {LAUNCH_ID: "ours", SLURM_JOB: "7", SLURM_COUNT: "1"}, True),
        ({SLURM_JOB: "6"}, {LAUNCH_ID: "ours", SLURM_JOB: "7", SLURM_COUNT: "1"}, False),
        ({SLURM_JOB: "7"}, {LAUNCH_ID: "ours", SLURM_JOB: "7"}, False),
    ],
    ids=["own", "older", "unknown", "requeued", "other job", "same job"],
)
def test_a_restart_continues_only_what_its_launch_began(
    two_processes: Processes,
    tmp_path: Path,
    launch: dict[str, str],
    variables: dict[str, str],
    is_continued: bool,
) -> None:
    two_processes(saved_once, str(tmp_path), 3)
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS | {"LAUNCH": launch}))
    expected = (tmp_path / "last.pt" if is_continued else None, is_continued)
    assert two_processes(resumed_in_launch, str(tmp_path), variables) == [expected] * 2


def begin_on_two_hosts(folder: Path, *launches: str) -> None:
    """Write config.json of a run that each launch began on a host with a folder of its own."""
    for rank, launch in enumerate(launches):
        (folder / str(rank)).mkdir()
        config = SETTINGS | {"LAUNCH": {LAUNCH_ID: launch}}
        (folder / str(rank) / "config.json").write_text(json.dumps(config))


def test_a_restart_continues_the_run_of_another_host(
    two_processes: Processes, tmp_path: Path
) -> None:
    begin_on_two_hosts(tmp_path, "older", "ours")  # rank 0 was on the other host
    prepared(tmp_path / "1", {2: 0.0})
    found = two_processes(resumed_in_launch, str(tmp_path), {LAUNCH_ID: "ours"}, True)
    assert [path.name for path, _ in found] == ["step-2.pt"] * 2
    assert all(is_continued for _, is_continued in found)


def test_a_restart_ignores_the_older_run_on_another_host(
    two_processes: Processes, tmp_path: Path
) -> None:
    begin_on_two_hosts(tmp_path, "ours", "older")
    prepared(tmp_path / "0", {2: 0.0})
    prepared(tmp_path / "1", {9: 0.0})
    found = two_processes(resumed_in_launch, str(tmp_path), {LAUNCH_ID: "ours"}, True)
    assert [path.name for path, _ in found] == ["step-2.pt"] * 2


def best_after_a_restart(folder: str) -> float:
    """Return the best score of a run that is restarted on hosts with folders of their own."""
    manager = manager_of(f"{folder}/{dist.get_rank()}", settings=SETTINGS)
    variables = {"TORCHELASTIC_RESTART_COUNT": "1", LAUNCH_ID: "ours"}
    with mock.patch.dict(os.environ, variables):
        on_two_hosts(manager.resume, None, 10)
    return manager.state.progress.best


@pytest.mark.parametrize("is_copy", [True, False])
def test_a_restart_takes_best_from_its_own_run_alone(
    two_processes: Processes, tmp_path: Path, is_copy: bool
) -> None:
    """Rank 0's host has no config.json yet: its best.pt is a copy, or that of an older run."""
    config = SETTINGS | {"LAUNCH": {LAUNCH_ID: "ours"}}
    prepared(tmp_path / "0", {5: 0.0}, best=0.6)
    prepared(tmp_path / "1", {6: 0.0, 9: 0.0}, best=0.6)
    (tmp_path / "1" / "config.json").write_text(json.dumps(config))
    (tmp_path / "0" / "step-5.pt").rename(tmp_path / "0" / "best.pt")
    (tmp_path / "1" / "step-6.pt").rename(tmp_path / "1" / "best.pt")
    if is_copy:
        shutil.copy(tmp_path / "1" / "best.pt", tmp_path / "0" / "best.pt")
    else:
        (tmp_path / "1" / "best.pt").unlink()
    best = 0.6 if is_copy else -math.inf
    assert two_processes(best_after_a_restart, str(tmp_path))[0] == best


def test_a_restart_does_not_replace_the_older_run_on_the_host_of_rank_0(
    two_processes: Processes, tmp_path: Path
) -> None:
    begin_on_two_hosts(tmp_path, "older", "ours")
    prepared(tmp_path / "0", {9: 0.0})
    prepared(tmp_path / "1", {2: 0.0})
    with pytest.raises(AssertionError, match="on the host of rank 0 holds an older run: move it"):
        two_processes(resumed_in_launch, str(tmp_path), {LAUNCH_ID: "ours"}, True)


@pytest.mark.parametrize(
    "content", ["{", "[1]", "1", "[" * 100_000], ids=["torn", "list", "number", "nested"]
)
def test_a_restart_with_a_damaged_config_is_an_error(
    two_processes: Processes, tmp_path: Path, content: str
) -> None:
    two_processes(saved_once, str(tmp_path), 3)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(AssertionError, match=r"config\.json can't be read .*: add --resume auto"):
        two_processes(resumed_after_restart, str(tmp_path), None)


@pytest.mark.parametrize(
    ("count", "expected"), [("2", True), ("0", False), ("", False), ("x", False)]
)
def test_restarts_are_counted(monkeypatch: pytest.MonkeyPatch, count: str, expected: bool) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", count)
    assert distributed.is_restart() == expected


def found_in_a_locked_folder(folder: str, is_evaluation: bool) -> int:
    """Return the step that is resumed if the run before this one ends when its lock is taken."""
    manager = manager_of(folder)

    def saved_meanwhile() -> None:
        if dist.get_rank() == 0:
            prepared(Path(folder), {2: 0.0})

    with mock.patch.object(manager.logger, "lock", saved_meanwhile, create=True):
        manager.resume(Path("auto"), 10, required=is_evaluation)
    return manager.state.progress.step


def test_folder_is_locked_before_a_checkpoint_is_chosen(
    two_processes: Processes, tmp_path: Path
) -> None:
    """Validation reads a folder whose run may continue, and takes no lock."""
    prepared(tmp_path, {1: 0.0})
    assert two_processes(found_in_a_locked_folder, str(tmp_path), True) == [1, 1]
    assert two_processes(found_in_a_locked_folder, str(tmp_path), False) == [2, 2]


def error_at_the_start(folder: str) -> str:
    manager = manager_of(folder)
    if dist.get_rank() != 0:  # which waits for rank 0 in a run
        return ""
    with mock.patch.object(dist, "barrier"), pytest.raises(UserError) as caught:
        manager.resume(None, 10)
    return str(caught.value)


def test_folder_of_the_user_with_the_name_of_a_checkpoint_is_an_error(
    two_processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "best" / "photos").mkdir(parents=True)
    assert "best is no checkpoint" in two_processes(error_at_the_start, str(tmp_path))[0]


def resumed_to_validate(folder: str, choice: Path | None) -> str:
    with mock.patch.dict(os.environ, {"TORCHELASTIC_RESTART_COUNT": "1"}):
        return str(manager_of(folder).resume(choice, 10, required=True))


def test_eval_only_requires_a_checkpoint_and_uses_the_given_one(
    two_processes: Processes, tmp_path: Path
) -> None:
    for step in (3, 4):
        two_processes(saved_once, str(tmp_path), step)
    for choice, name in ((Path("auto"), "last.pt"), (tmp_path / "step-3.pt", "step-3.pt")):
        found = two_processes(resumed_to_validate, str(tmp_path), choice)
        assert found == [str(tmp_path / name)] * 2
    with pytest.raises(AssertionError, match="--eval-only needs --resume with a checkpoint"):
        two_processes(resumed_to_validate, str(tmp_path), None)


# Hosts with folders of their own. Each of the two processes takes the place of a host.


def on_two_hosts(function: Callable, *args: object) -> object:
    two_hosts = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    with mock.patch.dict(os.environ, two_hosts):
        return function(*args)


def prepared(folder: Path, steps: dict[int, float], best: float = 0.5) -> None:
    """Write a checkpoint for each step, at the given age in seconds, whose bias is the step."""
    folder.mkdir(exist_ok=True)
    now = time.time()
    for step, age in steps.items():
        model = nn.Linear(3, 3)
        nn.init.constant_(model.bias, step)
        state = TrainingState(model, torch.optim.SGD(model.parameters()), NATIVE)
        rest = {"epoch": 0, "step": step, "samples": 0, "best": best, "ranks": []}
        path = folder / f"step-{step}.pt"
        checkpoint.write(path, checkpoint.collect(state) | rest)
        os.utime(path, (now - age, now - age))


def resumed_bias(folders: list[Path], choice: Path) -> tuple[str, float, int, list[str], int]:
    """Return the path, the bias and the step resumed, the messages, and the reads of this rank."""
    rank = dist.get_rank()
    manager = manager_of(folders[rank])
    with mock.patch.object(selection, "load_state", wraps=checkpoint.load_state) as load:
        path = on_two_hosts(manager.resume, choice, 10)
    progress, bias = manager.state.progress, manager.state.model.bias[0].item()
    return str(path), bias, progress.step, list(manager.logger), load.call_count


@pytest.mark.parametrize(
    ("first", "second", "owner", "step"),
    [
        ({3: 5.0}, {}, 0, 3),
        ({}, {3: 5.0}, 1, 3),
        ({3: 5.0}, {2: 9.0}, 0, 3),
        ({2: 9.0}, {3: 5.0}, 1, 3),
        ({9: 9.0}, {2: 5.0}, 0, 9),  # whatever the clocks say
    ],
)
def test_the_newest_checkpoint_of_any_host_is_resumed_on_all(
    two_processes: Processes, tmp_path: Path, first: dict, second: dict, owner: int, step: int
) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    prepared(folders[0], first)
    prepared(folders[1], second)
    for path, bias, resumed, said, _ in two_processes(resumed_bias, folders, Path("auto")):
        assert path == str(folders[owner] / f"step-{step}.pt")
        assert bias == resumed == step
        moved = ["steps, from the host of rank 1" in text for text in said]
        assert any(moved) == (owner == 1)


def resumed_best(folders: list[Path]) -> tuple[float, list[str]]:
    """Return the best score after a resumption, and the messages."""
    manager = manager_of(folders[dist.get_rank()])
    on_two_hosts(manager.resume, Path("auto"), 10)
    dist.barrier()
    return manager.state.progress.best, list(manager.logger)


@pytest.mark.parametrize(
    ("own", "owners", "best", "files"),
    [
        ("missing", 0.6, 0.6, {"best.pt": 6}),
        (None, 0.6, 0.6, {"best.pt": 6}),
        (0.2, 0.6, 0.6, {"best.pt": 6, "best-of-step-5.pt": 5}),  # lost steps had it
        (0.6, 0.6, 0.6, {"best.pt": 6, "best-of-step-5.pt": 5}),
        ("torn", 0.6, 0.6, {"best.pt": 6}),
        (0.6, None, 0.6, {"best.pt": 5}),
        (0.2, None, -float("inf"), {"best.pt": 5}),
        (None, None, -float("inf"), {}),
    ],
)
def test_the_best_checkpoint_is_copied_to_the_host_that_rank_0_moved_to(
    two_processes: Processes,
    tmp_path: Path,
    own: float | str | None,
    owners: float | None,
    best: float,
    files: dict[str, int],
) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    if own != "missing":
        prepared(folders[0], {})
    prepared(folders[1], {9: 0.0}, best=0.6)
    for folder, step, score in ((folders[0], 5, own), (folders[1], 6, owners)):
        if score == "torn":
            (folder / "best.pt").write_bytes(b"torn")
        elif isinstance(score, float):
            prepared(folder, {step: 0.0}, score)
            (folder / f"step-{step}.pt").rename(folder / "best.pt")
    scores, said = zip(*two_processes(resumed_best, folders), strict=True)
    assert scores[0] == best
    found = {path.name: checkpoint.load(path)["step"] for path in folders[0].glob("best*")}
    assert found == files
    assert any("copied best.pt from the host of rank 1" in text for text in said[0]) == (
        6 in files.values()
    )
    assert any("no host has the best checkpoint" in text for text in said[0]) == (best < 0)


def best_on_another_host(folder: Path) -> list[Path]:
    """Return the folders of two hosts; the second one has a best.pt of step 6, and step 9."""
    folders = [folder / "0", folder / "1"]
    prepared(folders[0], {})
    prepared(folders[1], {6: 0.0, 9: 0.0}, best=0.6)
    (folders[1] / "step-6.pt").rename(folders[1] / "best.pt")
    return folders


def resumed_best_on_a_full_disk(folders: list[Path]) -> tuple[float, list[str]]:
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "no space"))
    with mock.patch.object(files, "replace_best", full):
        return resumed_best(folders)


def test_best_checkpoint_that_can_not_be_copied_is_forgotten_by_all(
    two_processes: Processes, tmp_path: Path
) -> None:
    folders = best_on_another_host(tmp_path)
    results = two_processes(resumed_best_on_a_full_disk, folders)
    assert [best for best, _ in results] == [-float("inf")] * 2
    assert any("best.pt can't be written (no space)" in text for text in results[0][1])


@pytest.mark.parametrize(("before", "step"), [(0.5, 9), (0.6, 6)], ids=["better", "equal"])
def test_the_resumed_checkpoint_is_the_best_one_of_another_host(
    two_processes: Processes, tmp_path: Path, before: float, step: int
) -> None:
    """Its process was killed before that got the name best.pt."""
    folders = best_on_another_host(tmp_path)
    path = folders[1] / "step-9.pt"
    entries = torch.load(path, weights_only=True)
    checkpoint.write(path, entries | {"scores": [before, 0.6], "results": {"val_accuracy": 0.6}})
    (best, said), _ = two_processes(resumed_best, folders)
    assert best == 0.6 and "copied best.pt from the host of rank 1" in said
    assert checkpoint.load(folders[0] / "best.pt")["step"] == step


def test_best_checkpoint_that_can_not_be_read_is_forgotten(
    two_processes: Processes, tmp_path: Path
) -> None:
    folders = best_on_another_host(tmp_path)
    (best, said), _ = two_processes(resumed_best_unread, folders)
    assert best == -float("inf") and "no host has the best checkpoint, of 0.6" in said[-1]


def resumed_best_unread(folders: list[Path]) -> tuple[float, list[str]]:
    """Return what `resumed_best` does if best.pt vanishes before it is read."""
    read = checkpoint.broadcast_file

    def broadcast_file(path: Path, *args: object) -> object:
        return None if path.name == "best.pt" else read(path, *args)

    with mock.patch.object(checkpoint, "broadcast_file", broadcast_file):
        return resumed_best(folders)


def test_an_invalid_checkpoint_on_another_host_is_skipped(
    two_processes: Processes, tmp_path: Path
) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    prepared(folders[0], {3: 9.0})
    prepared(folders[1], {4: 5.0})
    (folders[1] / "step-4.pt").write_bytes(b"torn")
    for path, bias, _, said, _ in two_processes(resumed_bias, folders, Path("auto")):
        assert (path, bias) == (str(folders[0] / "step-3.pt"), 3)
        assert said[0].startswith(f"warning: {folders[1] / 'step-4.pt'}: it is torn")
    (folders[0] / "step-3.pt").write_bytes(b"torn")
    with pytest.raises(AssertionError) as failed:
        two_processes(resumed_bias, folders, Path("auto"))
    assert str(failed.value).count("UserError: --resume auto: no checkpoint in") == 2


def test_a_shared_folder_is_read_once(two_processes: Processes, tmp_path: Path) -> None:
    prepared(tmp_path, {3: 9.0, 4: 5.0})
    (tmp_path / "step-4.pt").write_bytes(b"torn")
    ranks = two_processes(resumed_bias, [tmp_path, tmp_path], Path("auto"))
    assert [path for path, *_ in ranks] == [str(tmp_path / "step-3.pt")] * 2
    assert [reads for *_, reads in ranks] == [2, 0]


def test_a_given_checkpoint_may_be_on_any_host(two_processes: Processes, tmp_path: Path) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    prepared(folders[0], {})
    prepared(folders[1], {3: 5.0})
    path = folders[1] / "step-3.pt"
    # Each process sees its own host's files alone.
    for _, bias, *_ in two_processes(resumed_where_only_rank_1_has_it, folders, path):
        assert bias == 3


def resumed_where_only_rank_1_has_it(folders: list[Path], path: Path) -> tuple:
    if dist.get_rank() == 1:
        return resumed_bias(folders, path)
    with mock.patch.object(Path, "is_file", return_value=False):
        return resumed_bias(folders, path)


def test_no_checkpoint_on_any_host(two_processes: Processes, tmp_path: Path) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    for path, _, step, said, _ in two_processes(resumed_bias, folders, Path("auto")):
        assert (path, step) == ("None", 0)
        assert [line.partition(" has ")[2] for line in said] == [
            "no checkpoint: the run starts from the beginning"
        ]


def weights_without_an_average(folder: str) -> str:
    manager = manager_of(folder)
    manager.state.progress.weights = "ema"  # of a run with --ema, that is resumed without
    save_and_finish(manager)
    return torch.load(Path(folder, "last.pt"), weights_only=True)["weights"]


def test_better_weights_are_in_the_checkpoint(two_processes: Processes, tmp_path: Path) -> None:
    assert two_processes(weights_without_an_average, str(tmp_path)) == ["model"] * 2


def scores_of_a_resumed_epoch(folder: str) -> list[float]:
    """Return the scores after a run that --steps had ended within an epoch."""
    manager = manager_of(folder)
    progress = manager.state.progress
    progress.epoch, progress.samples, progress.step, progress.scores = 1, 8, 15, [0.5, 0.7]
    manager._means = [{"train_loss": (1.0, 1)}]
    save_and_finish(manager, {"val_accuracy": 0.7})
    again = manager_of(folder)
    again.resume(Path("auto"), 10)
    return again.state.progress.scores


def test_an_epoch_that_is_validated_again_counts_once(
    two_processes: Processes, tmp_path: Path
) -> None:
    """Or --patience would count the validation at the end of --steps, too."""
    assert two_processes(scores_of_a_resumed_epoch, str(tmp_path)) == [[0.5]] * 2


def save_after_an_error(folder: str) -> tuple[str, float]:
    """Return the problem of a write that fails in an unforeseen way, and the best score after."""
    manager = manager_of(folder)
    with mock.patch.object(files, "write_or_make_room", side_effect=MemoryError):
        manager.save()
        manager.wait()
    problem = manager._writer.problem
    save_and_finish(manager, {"val_accuracy": 0.7})
    return problem, torch.load(Path(folder, "best.pt"), weights_only=True)["best"]


def test_an_error_of_a_write_ends_no_later_one(two_processes: Processes, tmp_path: Path) -> None:
    (problem, best), _ = two_processes(save_after_an_error, str(tmp_path))
    assert "step-0.pt could not be written (MemoryError)" in problem and best == 0.7
