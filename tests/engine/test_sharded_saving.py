"""Saves of sharded checkpoints that fail."""

import dataclasses
import errno
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from engine import UserError
from engine.checkpoint import files, manifest, tensor_storage, validation
from engine.checkpoint import format as checkpoint
from engine.checkpoint.pretrained import load_pretrained
from engine.checkpoint.selection import AUTO, find
from engine.diagnostics.checks import check_resume
from engine.diagnostics.preflight import OK
from processes import Processes
from root import small_disk
from sharding_helpers import needs_fsdp_on_cpu
from test_preflight_checks import settings
from test_sharded_fuzzing import manager_of, train_a_step
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

pytestmark = needs_fsdp_on_cpu

BUFFERS = ("mean", "var", "other.mean", "other.var")
SIZES = {"few": 480, "one": 170}  # KiB; a checkpoint takes about 110


@pytest.fixture(params=SIZES)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Mount a disk for a few checkpoints, or one."""
    folder = tmp_path / request.param
    with small_disk(folder, f"{SIZES[request.param]}k"):
        yield folder


def train_on(folder: str) -> tuple[list[str], list[str], list[str]]:
    """Return files, messages and errors of a run whose first step is the best."""
    manager = manager_of(Path(folder), keep=9)
    problems = []
    for _ in range(6):
        try:
            train_a_step(manager)
        except UserError as error:
            problems.append(str(error))
    dist.barrier()
    return sorted(one.name for one in Path(folder).iterdir()), list(manager.logger), problems


def save_buffers(folder: str) -> None:
    buffers = {name: torch.full((3,), float(dist.get_rank())) for name in BUFFERS}
    tensor_storage.save(Path(folder), buffers, dist.group.WORLD)


def test_tensors_that_are_not_sharded_are_those_of_rank_0(
    two_processes: Processes, tmp_path: Path
) -> None:
    """Without SyncBN, batch norm's statistics differ between ranks."""
    two_processes(save_buffers, str(tmp_path))
    saved = {name: torch.ones(3) for name in BUFFERS}
    dcp.load(saved, checkpoint_id=tmp_path, no_dist=True)
    assert all(not value.any() for value in saved.values())


def modes_of_a_checkpoint(folder: str) -> list[int]:
    """Save with a group's umask; return the modes of the folder while it is written and after."""
    os.umask(0o002)
    manager, modes = manager_of(Path(folder)), []
    save = tensor_storage.save

    def note_mode(temporary: Path, *rest: Any) -> None:
        modes.append(temporary.stat().st_mode & 0o7777)
        save(temporary, *rest)

    with patch.object(tensor_storage, "save", note_mode):
        train_a_step(manager)
    dist.barrier()
    return [*modes, next(Path(folder).glob("step-*")).stat().st_mode & 0o7777]


def test_nobody_else_can_put_links_into_a_checkpoint_that_is_written(
    two_processes: Processes, tmp_path: Path
) -> None:
    """Torch would follow them."""
    tmp_path.chmod(0o2775)
    assert two_processes(modes_of_a_checkpoint, str(tmp_path)) == [[0o2700, 0o2775]] * 2


def save_with_metadata_copied(folder: str) -> None:
    """Save as with torch 2.11, which sets the places of the chunks in a copy."""
    finish = dcp.FileSystemWriter.finish

    def finish_copy(self: dcp.FileSystemWriter, metadata: Metadata, results: list) -> None:
        finish(self, dataclasses.replace(metadata), results)

    with patch.object(dcp.FileSystemWriter, "finish", finish_copy):
        save_buffers(folder)


def test_the_index_needs_no_places_in_the_metadata(
    two_processes: Processes, tmp_path: Path
) -> None:
    two_processes(save_with_metadata_copied, str(tmp_path))
    sizes = {one.name: one.stat().st_size for one in tmp_path.iterdir()}
    assert tensor_storage.read_index(tmp_path, sizes).keys() == set(BUFFERS)


def test_full_disk_costs_the_oldest_checkpoints(two_processes: Processes, disk: Path) -> None:
    (files, messages, problems), (_, _, others) = two_processes(train_on, str(disk))
    assert problems == others
    if disk.name == "few":
        assert not problems
        removed = [message for message in messages if "the disk is full: removed" in message]
        assert f"{disk}/step-2 to write" in removed[0]
        assert {"best", "last", "step-1", "step-5", "step-6"} <= set(files)  # step-1 is the best
    else:
        assert "step-2 could not be written (No space left on device)" in problems[0]
        assert len(problems) == 5
        assert files == ["best", "last", "step-1"]  # nothing incomplete


def update_on_a_full_disk(folder: str) -> tuple[list[str], list[str]]:
    """Return the files and the messages of rank 0, which updates the newest of three checkpoints.

    As with a full disk, torch.save raises a RuntimeError on closing the first file.
    """
    said: list[str] = []
    save = torch.save
    errors = iter([OSError(errno.ENOSPC, "No space left on device")])

    def save_or_fail(content: object, file: object) -> None:
        for error in errors:
            try:
                raise error
            except OSError:
                raise RuntimeError("unexpected pos 64 vs 0") from None
        save(content, file)

    if dist.get_rank() == 0:
        for step in (1, 2, 3):
            path = Path(folder, f"step-{step}")
            path.mkdir()
            manifest.write(path, "0" * 16, {manifest.INDEX: [0, 0]})
        with patch.object(torch, "save", save_or_fail):
            entries = {"step": 3, "model": {}, "optimizer": {"param_groups": []}}
            files.write_or_make_room(path, entries, said.append)
    dist.barrier()
    return sorted(one.name for one in Path(folder).iterdir()), said


def test_full_disk_after_a_validation_costs_the_oldest_checkpoint(
    two_processes: Processes, tmp_path: Path
) -> None:
    (names, [said]), _ = two_processes(update_on_a_full_disk, str(tmp_path))
    assert names == ["step-2", "step-3"] and "removed" in said
    assert torch.load(tmp_path / "step-3" / "state.pt", weights_only=True)["step"] == 3


def fail_to_write(folder: str) -> str:
    """Return the problem of a rank when another one cannot write."""
    manager = manager_of(Path(folder))
    if dist.get_rank() == 1:
        tensor_storage._Writer.write_data = fail
    with pytest.raises(UserError) as caught:
        train_a_step(manager)
    return str(caught.value)


def save_beyond_the_limit(folder: str) -> str:
    """Return the problem of a rank with a step that is no count."""
    manager = manager_of(Path(folder))
    manager.state.progress.step = validation.MAX_COUNT - 1
    with pytest.raises(UserError) as caught:
        train_a_step(manager)
    return str(caught.value)


def test_what_could_not_be_resumed_is_not_written(two_processes: Processes, tmp_path: Path) -> None:
    for problem in two_processes(save_beyond_the_limit, str(tmp_path)):
        assert "could not be written" in problem and "epoch and step are no counts" in problem
    assert not list(tmp_path.iterdir())


def save_nan_twice(folder: str, dtype: torch.dtype) -> tuple[str, list[str]]:
    """Return the error and the warnings of a rank of a resumed run; only rank 1 holds nan."""
    train_a_step(manager_of(Path(folder)))
    manager = manager_of(Path(folder))
    manager.resume(AUTO, 1)
    value = float("nan") if dist.get_rank() == 1 else 0.0
    manager.state.model[1].register_buffer("mean", torch.full((2,), value, dtype=dtype))
    manager.state.progress.step = 2
    manager.save()
    manager.state.progress.step = 3
    with pytest.raises(UserError) as caught:
        manager.save()
    return str(caught.value), [text for text in manager.logger if text.startswith("warning")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float8_e4m3fn])
def test_nan_in_two_saves_in_a_row_ends_the_run_on_all_ranks(
    two_processes: Processes, tmp_path: Path, dtype: torch.dtype
) -> None:
    for error, warnings in two_processes(save_nan_twice, str(tmp_path), dtype):
        assert "step-3 could not be written (model.1.mean is not finite)" in error
        assert error.endswith(f"resume from {tmp_path}/step-1, the last good checkpoint")
        assert len(warnings) == 1 and "step-2 could not be written (model.1.mean" in warnings[0]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["best", "last", "step-1"]


def fail(*_: object) -> None:
    raise PermissionError(13, "Permission denied")


def test_failure_of_one_rank_is_reported_by_all(tmp_path: Path) -> None:
    processes = Processes("gloo")
    try:
        for problem in processes(fail_to_write, str(tmp_path)):
            assert "step-1 could not be written (Permission denied)" in problem
    finally:
        processes.stop()
    assert not list(tmp_path.iterdir())


def write_slowly(folder: str) -> list[str]:
    """Return a rank's messages of two saves; in the first, a write takes longer than the limit."""
    manager = manager_of(Path(folder), timeout_s=-57.0)  # 3 s, with the 60 that are added
    save = tensor_storage.save

    def save_slowly(*args: Any) -> None:
        time.sleep(4.0 * dist.get_rank())
        save(*args)

    with patch.object(tensor_storage, "save", save_slowly):
        train_a_step(manager)
    train_a_step(manager)
    return list(manager.logger)


def removals_of_a_replaced_checkpoint(folder: str) -> list[bool]:
    """Return whether a checkpoint was there whenever a folder was removed for its new weights."""
    manager = manager_of(Path(folder))
    train_a_step(manager)
    manager.finish()
    found, remove = [], shutil.rmtree

    def record(path: Path, **options: Any) -> None:
        if Path(path).is_dir():
            found.append(Path(folder, "step-1").is_dir())
        remove(path, **options)

    with torch.no_grad():
        next(manager.state.model.parameters()).zero_()
    with patch.object(shutil, "rmtree", record):
        manager.save()
        manager.finish()
    return found


def test_checkpoint_is_there_until_another_replaces_it(
    two_processes: Processes, tmp_path: Path
) -> None:
    """A kill while its folder is removed, which may take long, loses nothing."""
    assert two_processes(removals_of_a_replaced_checkpoint, str(tmp_path)) == [[True], []]
    assert {one.name for one in tmp_path.iterdir()} == {"best", "last", "step-1"}


def amend_while_a_rank_is_behind(folder: str) -> list[str]:
    """Return a rank's messages; rank 0 still writes what rank 1 has written when it is amended."""
    manager = manager_of(Path(folder))
    prune = files.prune

    def prune_slowly(*args: Any) -> None:
        time.sleep(2.0)
        prune(*args)

    with patch.object(files, "prune", prune_slowly):
        manager.save()
        manager.save()
        time.sleep(1.0)
        manager.save()
    train_a_step(manager)
    return list(manager.logger)


def test_all_ranks_write_each_amendment(two_processes: Processes, tmp_path: Path) -> None:
    """Or the writers of two ranks would be at different checkpoints for ever."""
    assert two_processes(amend_while_a_rank_is_behind, str(tmp_path)) == [[], []]
    assert {one.name for one in tmp_path.iterdir()} == {"best", "last", "step-0", "step-1"}


def test_slow_write_of_one_rank_is_no_failure(two_processes: Processes, tmp_path: Path) -> None:
    assert two_processes(write_slowly, str(tmp_path)) == [[], []]
    assert {one.name for one in tmp_path.iterdir()} == {"best", "last", "step-1", "step-2"}


def test_check_reads_no_tensors(
    two_processes: Processes, run_check: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They may not fit into the memory of one process."""
    two_processes(train_on, str(tmp_path))
    monkeypatch.setattr(tensor_storage, "load", fail)
    expected = (OK, f"{tmp_path}/step-6, after 0 epochs, 6 steps")
    for choice in (AUTO, tmp_path / "step-6"):
        assert run_check(check_resume, settings(output=tmp_path, resume=choice)) == expected


@contextmanager
def on_one_host() -> Iterator[None]:
    """Set the variables of the launcher for two ranks of a host."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LOCAL_WORLD_SIZE", "2")
        patched.setenv("LOCAL_RANK", str(dist.get_rank()))
        yield


def resume_and_list_checked_files(folder: str) -> list[str]:
    """Return the files whose checksums this rank computes when it resumes."""
    manager = manager_of(Path(folder))
    train_a_step(manager)
    with on_one_host(), patch.object(manifest, "describe", wraps=manifest.describe) as describe:
        manager_of(Path(folder)).resume(Path(folder, "step-1"), 1)
    return [call.args[0].name for call in describe.call_args_list]


def test_processes_of_a_host_share_the_check_of_a_checkpoint(
    two_processes: Processes, tmp_path: Path
) -> None:
    first, second = two_processes(resume_and_list_checked_files, str(tmp_path))
    files = [*json.loads((tmp_path / "step-1" / "manifest.json").read_text())["files"]]
    assert (first[:2], second) == (files[::2], files[1::2])  # then rank 0 looks at the best one


def resume_with_a_damaged_file(folder: str, name: str) -> str:
    manager = manager_of(Path(folder))
    train_a_step(manager)
    path = Path(folder, "step-1", name)
    if dist.get_rank() == 0:
        with path.open("r+b") as file:
            byte = file.read(1)
            file.seek(0)
            file.write(bytes([byte[0] ^ 1]))
    dist.barrier()
    with on_one_host(), pytest.raises(UserError) as error:
        manager_of(Path(folder)).resume(Path(folder, "step-1"), 1)
    return str(error.value)


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", "index.json"])
def test_damaged_file_of_a_checkpoint_is_an_error_on_each_rank(
    two_processes: Processes, tmp_path: Path, name: str
) -> None:
    for error in two_processes(resume_with_a_damaged_file, str(tmp_path), name):
        assert f"its {name} is torn or altered" in error


def resume_on_separate_disks(folder: str) -> tuple[str, str]:
    """Return the errors of a rank on a host of its own: at the start, and of --resume."""
    own = Path(folder) / str(dist.get_rank())
    own.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        patch.chdir(own)  # the same path on both hosts is another folder
        with pytest.raises(UserError) as at_start:
            manager_of(Path("run")).resume(None, 1)
        shared = manager_of(Path(folder) / "0" / "run")
        assert shared.resume(None, 1) is None
        train_a_step(shared)
        with pytest.raises(UserError) as at_resume:
            find(Path("run"), AUTO, print, dist.group.WORLD)
    return str(at_start.value), str(at_resume.value)


def test_folder_that_hosts_do_not_share_is_an_error(
    two_processes: Processes, tmp_path: Path
) -> None:
    for at_start, at_resume in two_processes(resume_on_separate_disks, str(tmp_path)):
        assert "rank 1, on " in at_start and "needs a disk that all hosts share" in at_start
        assert "on a disk that all hosts share, and rank 1 has none there" in at_resume
    assert {one.name for one in (tmp_path / "0" / "run").iterdir()} == {"best", "last", "step-1"}


def tensors_of(rank: int) -> dict[str, torch.Tensor]:
    return {"model.scalar": torch.tensor(3.0), "model.empty": torch.zeros(0, 4)}


def save_and_load(folder: str) -> list[list[float]]:
    tensors = tensors_of(dist.get_rank())
    tensor_storage.save(Path(folder), tensors, dist.group.WORLD)
    sizes = {one.name: one.stat().st_size for one in Path(folder).iterdir()}
    index = tensor_storage.read_index(Path(folder), sizes)
    found = {name: torch.empty_like(value) for name, value in tensors.items()}
    tensor_storage.load(Path(folder), index, found, alone=False)
    return [value.flatten().tolist() for value in found.values()]


def go_back_to_the_first(folder: str, keep: int) -> tuple[list[str], list[float], list[str]]:
    """Return the files after a run went back, the best scores there, and the run's messages."""
    manager = manager_of(Path(folder), keep)
    for accuracy in (0.5, 0.9):
        train_a_step(manager, accuracy)
    back = manager_of(Path(folder), keep)
    back.resume(Path(folder, "step-1"), 1)
    train_a_step(back, 0.6)  # which is step 2 again
    dist.barrier()
    names = sorted(one.name for one in Path(folder).iterdir())
    bests = [checkpoint.load(Path(folder, name))["best"] for name in ("best", "best-of-step-2")]
    return names, bests, list(back.logger)


@pytest.mark.parametrize("keep", [2, 9])
def test_the_best_folder_is_kept_by_a_run_that_went_back(
    two_processes: Processes, tmp_path: Path, keep: int
) -> None:
    names = ["best", "best-of-step-2", "last", "step-1", "step-2"]
    for found, bests, messages in two_processes(go_back_to_the_first, str(tmp_path), keep):
        assert found == names
        assert bests == [0.6, 0.9]
        assert any("it will be renamed to best-of-step-2" in one for one in messages)


def versions_of_norms(folder: str) -> tuple[list[int], list[str]]:
    """Return versions and extra states of the norms of model and average in a resumed run."""
    versions, extra = [], []
    load = nn.BatchNorm1d._load_from_state_dict

    def record(norm: nn.Module, state: dict, prefix: str, metadata: dict, *rest: Any) -> None:
        versions.append(metadata.get("version"))
        load(norm, state, prefix, metadata, *rest)

    with (
        patch.object(nn.BatchNorm1d, "get_extra_state", lambda _: "extra"),
        patch.object(nn.BatchNorm1d, "set_extra_state", lambda _, state: extra.append(state)),
    ):
        train_a_step(manager_of(Path(folder)))
        again = manager_of(Path(folder))
        extra.clear()  # what the average, and other ranks, have taken from the model
        with patch.object(nn.BatchNorm1d, "_load_from_state_dict", record):
            again.resume(Path(folder, "last"), 1)
    return versions, extra


def test_versions_and_extra_state_of_modules_are_saved(
    two_processes: Processes, tmp_path: Path
) -> None:
    assert two_processes(versions_of_norms, str(tmp_path)) == [([2, 2], ["extra"] * 2)] * 2


def evaluate_other_order(folder: str) -> int:
    """Return how many moments an evaluation reads whose optimizer has another order."""
    train_a_step(manager_of(Path(folder)))
    other = manager_of(Path(folder))
    other.state.optimizer.param_groups[0]["params"].reverse()
    load = dcp.load
    with patch.object(
        dcp, "load", lambda state, *, storage_reader: load(state, storage_reader=storage_reader)
    ):
        other.resume(Path(folder, "last"), 1, required=True)  # torch 2.6 has no `no_dist`
    return len(other.state.optimizer.state)


def test_evaluation_and_pretrained_weights_need_no_optimizer(
    two_processes: Processes, tmp_path: Path
) -> None:
    assert two_processes(evaluate_other_order, str(tmp_path)) == [0, 0]
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    source = str(tmp_path / "step-1")
    said = load_pretrained(model, source, "a", ["b", "c"], Mock())
    assert said.startswith(f"weights of {source}")
    saved = checkpoint.load(tmp_path / "step-1")["model"]
    torch.testing.assert_close(dict(model.state_dict()), saved, rtol=0, atol=0)


def test_checkpoint_is_read_as_a_whole_while_its_link_is_replaced(
    two_processes: Processes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run that goes on gives the names best and last to others."""
    two_processes(train_on, str(tmp_path))
    expected = [checkpoint.load(tmp_path / name)["model"] for name in ("step-1", "step-6")]
    assert any(not torch.equal(value, expected[1][name]) for name, value in expected[0].items())
    read_chunk = tensor_storage._Reader.read_chunk

    def replace_and_read(self: object, key: object) -> torch.Tensor:
        files.alias(tmp_path / "step-6", files.BEST)
        return read_chunk(self, key)

    files.alias(tmp_path / "step-1", files.BEST)
    monkeypatch.setattr(tensor_storage._Reader, "read_chunk", replace_and_read)
    found = checkpoint.load(tmp_path / "best")["model"]
    torch.testing.assert_close(found, expected[0], rtol=0, atol=0)


def test_link_always_names_a_checkpoint(
    two_processes: Processes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    two_processes(train_on, str(tmp_path))
    replace = os.replace

    def look_and_replace(path: Path, other: Path) -> None:
        assert (tmp_path / "best").exists()
        replace(path, other)

    monkeypatch.setattr(os, "replace", look_and_replace)
    for name in ("step-1", "step-6"):
        files.alias(tmp_path / name, files.BEST)
        assert (tmp_path / "best").resolve() == tmp_path / name


def save_over_another(folder: str) -> list[str]:
    """Return the messages of a run that saves where there is a damaged folder of that step."""
    manager = manager_of(Path(folder))
    if dist.get_rank() == 0:
        (Path(folder) / "step-1").mkdir(parents=True, exist_ok=True)
    dist.barrier()
    train_a_step(manager)
    return list(manager.logger)


def test_damaged_folder_of_the_same_step_is_replaced(
    two_processes: Processes, tmp_path: Path
) -> None:
    for messages in two_processes(save_over_another, str(tmp_path)):
        assert not [message for message in messages if "could not be written" in message]
    assert {one.name for one in tmp_path.iterdir()} >= {"last", "step-1"}
    manifest.validate(tmp_path / "step-1")


def test_folder_of_the_user_with_the_name_of_a_step_is_kept(
    two_processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "photo").touch()
    with pytest.raises(
        AssertionError, match=r"step-1 could not be written \(Directory not empty\)"
    ):
        two_processes(save_over_another, str(tmp_path))
    assert (tmp_path / "step-1" / "photo").exists()


def save_after_a_copy(folder: str) -> list[str]:
    """Return the messages of a run that resumes the copy of a checkpoint and saves that step."""
    manager = manager_of(Path(folder))
    assert manager.resume(AUTO, 1) == Path(folder) / "step-3"
    assert manager.state.progress.step == 1
    manager.save({"val_accuracy": 0.5})
    manager.finish()
    dist.barrier()
    return list(manager.logger)


def best_after_the_folder_was_removed(folder: str) -> tuple[str, float, list[str]]:
    """Return name and score of the best, removed between a save and its validation; messages."""
    manager = manager_of(Path(folder))
    for step, metric in enumerate((0.9, 0.5), 1):
        manager.state.progress.step = step
        manager.save()
        manager.wait()
        dist.barrier()
        if step == 2 and dist.get_rank() == 0:
            shutil.rmtree(folder)
            Path(folder).mkdir()
        dist.barrier()
        manager.save({"val_accuracy": metric})
        manager.finish()
    dist.barrier()
    best = (Path(folder) / "best").resolve()
    manifest.validate(best)
    return best.name, checkpoint.load(best)["best"], list(manager.logger)


def test_folder_removed_before_the_validation_is_written_again(
    two_processes: Processes, tmp_path: Path
) -> None:
    results = two_processes(best_after_the_folder_was_removed, str(tmp_path / "run"))
    assert [result[:2] for result in results] == [("step-2", 0.5)] * 2
    (message,) = results[0][2]
    assert message.endswith("/best was removed: the next validation replaces it")


def save_results_during_a_write(folder: str) -> tuple[float, list[float]]:
    """Return the best score on the disk, and the switch intervals during the writes of tensors."""
    manager = manager_of(Path(folder))
    go_on, intervals = threading.Event(), []
    usual, save = sys.getswitchinterval(), dcp.save

    def slow_save(*args: object, **options: object) -> object:
        intervals.append(sys.getswitchinterval() if go_on.wait(20) else None)
        return save(*args, **options)

    with patch.object(dcp, "save", slow_save):
        manager.save()
        manager.save({"val_accuracy": 0.7})  # returns, though no rank has written its tensors
        assert not manifest.exists(Path(folder) / "step-0")
        go_on.set()
        manager.finish()
    assert sys.getswitchinterval() == usual
    dist.barrier()
    return checkpoint.load(Path(folder) / "best")["best"], intervals


def test_results_of_a_validation_do_not_wait_for_the_shards(
    two_processes: Processes, tmp_path: Path
) -> None:
    for best, intervals in two_processes(save_results_during_a_write, str(tmp_path)):
        assert best == 0.7
        assert intervals == pytest.approx([tensor_storage.SWITCH_INTERVAL_S])


def test_copy_with_the_name_of_another_step_is_kept_until_its_step_is_written(
    two_processes: Processes, tmp_path: Path
) -> None:
    two_processes(save_over_another, str(tmp_path / "there"))
    shutil.copytree(tmp_path / "there" / "step-1", tmp_path / "here" / "step-3")
    for messages in two_processes(save_after_a_copy, str(tmp_path / "here")):
        assert not [message for message in messages if "warning" in message]
    assert {one.name for one in (tmp_path / "here").iterdir()} == {"best", "last", "step-1"}
    manifest.validate(tmp_path / "here" / "step-1")


def test_scalars_and_empty_tensors_are_saved(two_processes: Processes, tmp_path: Path) -> None:
    assert two_processes(save_and_load, str(tmp_path)) == [[[3.0], []]] * 2
