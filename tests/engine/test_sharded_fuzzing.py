"""Altered sharded checkpoints: each one is resumed and trains on, or is one clear error."""

import contextlib
import io
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from apex_native import amp
from apex_native.optimizers import FusedAdam
from engine import UserError, backend
from engine.checkpoint import (
    CheckpointManager,
    TrainingState,
    files,
    format,
    manifest,
    sharded,
    tensor_storage,
)
from engine.checkpoint.consolidate import consolidate
from engine.distributed.sharding import Sharding
from engine.distributed.watchdog import StopSignals, Watchdog
from engine.monitoring.meter import Meter
from engine.optim import Ema
from hypothesis import strategies as st
from library_fixtures import begin_afresh
from parameters import mostly_slow
from sharding_helpers import needs_fsdp_on_cpu
from test_checkpoint_fuzzing import (
    EXAMPLES,
    altered,
    changes,
    check,
    fractions,
    hostile_values,
    process_group,  # noqa: F401
)
from test_checkpoint_manager import Messages
from torch import nn

pytestmark = needs_fsdp_on_cpu

NATIVE = backend.load_backend("native", "O0")


def manager_of(folder: Path, keep: int = 2, timeout_s: float = 60.0) -> CheckpointManager:
    """Return the manager of a run with FSDP, and all that a checkpoint can hold."""
    begin_afresh()
    sharding = Sharding(torch.device("cpu"), "O0")
    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        ema = Ema(model, 0.9)
    for module in (model, ema.module):
        sharding.apply(module)
    optimizer = FusedAdam(model.parameters())
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O0", cast_model_type=False, verbosity=0
    )
    return CheckpointManager(
        folder=folder,
        keep=keep,
        save_every=None,
        timeout_s=timeout_s,
        state=TrainingState(model, optimizer, NATIVE, ema),
        metadata={"metric": "m", "arch": "a", "data": "", "classes": ["b", "c"], "opt_level": "O0"},
        data_sets={},
        settings={},
        logger=Messages(),
        stop_signals=StopSignals(),
        watchdog=Watchdog(60.0),
    )


def train_a_step(manager: CheckpointManager, accuracy: float = 0.5) -> None:
    """Train, and save as a run does."""
    state = manager.state
    meter = Meter(torch.device("cpu"), 1)
    manager.start_epoch(meter)
    meter.update(torch.tensor(1.0))
    state.model(torch.ones(4, 3)).square().mean().backward()
    state.optimizer.step()
    state.ema.update(NATIVE.fp32_state_dict(state.model, state.optimizer), state.progress.step)
    state.progress.samples += 1
    state.progress.step += 1
    manager.save({"val_accuracy": accuracy})
    manager.finish()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the checkpoints of two steps."""
    folder = tmp_path_factory.mktemp("whole")
    manager = manager_of(folder)
    train_a_step(manager)
    train_a_step(manager)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """Return a copy of a checkpoint."""
    return shutil.copytree(whole / "step-2", tmp_path / "step-2")


@pytest.fixture(autouse=True)
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the numbers of elements of the tensors that are allocated to read into."""
    found = []

    def empty(entry: tensor_storage.Entry, like: Any, own: Callable = sharded._empty) -> Any:
        found.append(torch.Size(entry.shape).numel())
        return own(entry, like)

    monkeypatch.setattr(sharded, "_empty", empty)
    return found


def complete(folder: Path) -> None:
    """Write sizes and checksums of the files as they are into the manifest."""
    content = json.loads((folder / "manifest.json").read_text())
    for name in content["files"]:
        with contextlib.suppress(OSError):
            content["files"][name] = manifest.describe(folder / name)
    (folder / "manifest.json").write_text(json.dumps(content))


def assert_resumed_or_refused(folder: Path, allocated: list[int]) -> None:
    allocated.clear()
    with contextlib.suppress(UserError):
        manager = manager_of(folder.parent / "run")
        manager.resume(folder, 10)
        train_a_step(manager)
        tensors = manager.state.model.state_dict().values()
        assert not any(backend.local_shard(tensor).isnan().any() for tensor in tensors)
    with contextlib.suppress(UserError):
        format.load(folder)
    assert sum(allocated) < 1000  # 108 of both reads


def edit_json(path: Path, edit: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(edit(content) or content))


# Choice of an alteration


def replace_bytes(path: Path, place: float, number: int, other: Path) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << number % 8
    path.write_bytes(content)


def truncate(path: Path, place: float, number: int, other: Path) -> None:
    path.write_bytes(path.read_bytes()[: int(place * path.stat().st_size)])


def remove(path: Path, place: float, number: int, other: Path) -> None:
    path.unlink()


def exchange(path: Path, place: float, number: int, other: Path) -> None:
    """Exchange a file with another one of the folder."""
    paths = sorted(path.parent.iterdir())
    chosen = paths[number % len(paths)]
    content = path.read_bytes()
    path.write_bytes(chosen.read_bytes())
    chosen.write_bytes(content)


def copy(path: Path, place: float, number: int, other: Path) -> None:
    shutil.copyfile(other / path.name, path)


def link_to(path: Path, place: float, number: int, other: Path) -> None:
    path.unlink()
    path.symlink_to(["/dev/zero", other / path.name, path.name, "/nonexistent"][number % 4])


def make_special(path: Path, place: float, number: int, other: Path) -> None:
    path.unlink()
    (path.mkdir, lambda: os.mkfifo(path))[number % 2]()


FILES = ["index.json", "manifest.json", "state.pt", "__0_0.distcp", ".metadata"]
ACTIONS = [replace_bytes, replace_bytes, truncate, remove, exchange, copy, link_to, make_special]
alterations = st.tuples(
    st.sampled_from(FILES),
    st.sampled_from(ACTIONS),
    fractions,
    st.integers(0, 10**6),
    st.booleans(),
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("examples", EXAMPLES)
def test_altered_files_are_resumed_or_refused(
    whole: Path, tmp_path: Path, allocated: list[int], examples: int
) -> None:
    folder = tmp_path / "step-2"

    def test(alteration: tuple) -> None:
        name, action, place, number, is_consistent = alteration
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole / "step-2", folder)
        action(folder / name, place, number, whole / "step-1")
        if is_consistent and name != "manifest.json":
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                complete(folder)
        assert_resumed_or_refused(folder, allocated)

    check(examples, alterations, test)


VALUES: list[Any] = [None, True, -1, 0, 1, 3, 0.5, 2**40, 10**30, math.nan, "", [], {}, [1], [[1]]]
VALUES += ["../state.pt", "/dev/zero", "state.pt", "__0_0.distcp", "int8", "float64", "qint8", "\0"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("name", ["index.json", "manifest.json"])
def test_altered_json_is_resumed_or_refused(
    whole: Path, tmp_path: Path, allocated: list[int], name: str, examples: int, monkeypatch: Any
) -> None:
    folder = tmp_path / "step-2"
    monkeypatch.setattr("test_checkpoint_fuzzing.hostile_values", lambda: VALUES)

    def test(edits: list) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole / "step-2", folder)
        edits = [(place, key, number % len(VALUES), kind) for place, key, number, kind in edits]
        edit_json(folder / name, lambda content: altered(content, edits))
        if name == "index.json":
            complete(folder)
        assert_resumed_or_refused(folder, allocated)

    check(examples, changes, test)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("examples", EXAMPLES)
def test_altered_values_are_resumed_or_refused(
    whole: Path, tmp_path: Path, allocated: list[int], examples: int
) -> None:
    folder = tmp_path / "step-2"
    entries = torch.load(whole / "step-2" / "state.pt", weights_only=True)

    def test(edits: list) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole / "step-2", folder)
        torch.save(altered(entries, edits) | {"manifest": entries["manifest"]}, folder / "state.pt")
        assert_resumed_or_refused(folder, allocated)

    check(examples, changes, test)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", mostly_slow(range(len(hostile_values())), fast=12))
def test_altered_chunks_are_resumed_or_refused(
    folder: Path, allocated: list[int], number: int
) -> None:
    """Values in the place of the rows of a weight."""
    content = io.BytesIO()
    torch.save(hostile_values()[number], content)
    place_chunk(folder, content.getvalue())
    assert_resumed_or_refused(folder, allocated)


# Single alterations


def place_chunk(folder: Path, content: bytes) -> None:
    """Put other bytes in the place of the rows of a weight."""
    with (folder / "__0_0.distcp").open("ab") as file:
        start = file.tell()
        file.write(content)
    edit_json(
        folder / "index.json",
        lambda index: index["model.0.weight"][2][0].__setitem__(slice(2, 4), [start, len(content)]),
    )
    complete(folder)


def test_values_that_are_not_finite_are_refused(folder: Path) -> None:
    content = io.BytesIO()
    torch.save(torch.full((4, 3), torch.nan), content)
    place_chunk(folder, content.getvalue())
    with pytest.raises(UserError, match=r"model.0.weight is not finite"):
        manager_of(folder.parent / "run").resume(folder, 10)


HUGE = {
    "shape": (lambda one: one.__setitem__(0, [2**40, 3]), "is torn or altered"),
    "rows": (lambda one: (one.__setitem__(0, [2**40, 3]), one[2][0].__setitem__(0, 2**40)), "torn"),
    "missing rows": (lambda one: one[2].clear(), "is torn or altered"),
    "size of nothing": (
        lambda one: (one.__setitem__(0, [0, 2**70]), one[2].clear()),
        "index.json is torn or altered",
    ),
    "dimensions": (lambda one: one.__setitem__(0, [4, 3, *[1] * 63]), "is torn or altered"),
    "unknown type": (lambda one: one.__setitem__(1, "Tensor"), "is torn or altered"),
    "other shape": (lambda one: one.__setitem__(0, [4, 2]), "is .4, 2. there and .4, 3. here"),
    "parent": (lambda one: one[2][0].__setitem__(1, "../step-2/__0_0.distcp"), "torn or altered"),
    "absolute": (lambda one: one[2][0].__setitem__(1, "/dev/zero"), "torn or altered"),
}


@pytest.mark.parametrize("name", HUGE)
def test_altered_index_is_refused_before_memory_is_allocated(
    folder: Path, allocated: list[int], name: str
) -> None:
    edit, message = HUGE[name]
    edit_json(folder / "index.json", lambda index: edit(index["model.0.weight"]) and None)
    complete(folder)
    with pytest.raises(UserError, match=message):
        manager_of(folder.parent / "run").resume(folder, 10)
    assert not allocated


def test_tensor_of_another_type_than_in_the_index_is_refused(folder: Path) -> None:
    edit_json(folder / "index.json", lambda index: index["model.0.weight"].__setitem__(1, "int32"))
    complete(folder)
    with pytest.raises(UserError, match=r"model.0.weight is altered"):
        format.load(folder)


@pytest.mark.parametrize("name", ["model.0.weight", "ema.0.weight", "optimizer.0.exp_avg"])
@pytest.mark.parametrize("is_folder", [True, False])
def test_tensor_of_another_type_than_the_model_is_refused(
    folder: Path, tmp_path: Path, name: str, is_folder: bool
) -> None:
    entries = format.load(folder)
    part, _, key = name.partition(".")
    values = entries["optimizer"]["state"][0] if part == "optimizer" else entries[part]
    key = key.removeprefix("0.") if part == "optimizer" else key
    values[key] = values[key].to(torch.complex64)
    path = tmp_path / ("step-3" if is_folder else "step-3.pt")
    sharded.write(path, entries, dist.group.WORLD) if is_folder else format.write(path, entries)
    with pytest.raises(UserError, match=r"is torch.complex64, not torch.float32"):
        manager_of(tmp_path / "run").resume(path, 10)


def test_average_that_is_not_asked_for_is_reported_and_not_read(
    folder: Path, tmp_path: Path, allocated: list[int]
) -> None:
    manager_of(tmp_path / "run").resume(folder, 10, required=True)
    num_tensors = len(allocated)
    allocated.clear()
    manager = manager_of(tmp_path / "run")
    in_average = len(manager.state.ema.module.state_dict())
    manager.state.ema = None
    manager.resume(folder, 10, required=True)
    assert "without its average of the weights: add --ema for it" in manager.logger[-1]
    assert len(allocated) == num_tensors - in_average


@pytest.mark.parametrize("kind", ["fitting", "of other parameters", "empty"])
def test_checkpoint_of_a_script_with_ddp_is_resumed(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    """As without FSDP, an optimizer that does not fit is left out."""
    saved = format.load(folder)
    weights, optimizer = saved["model"], saved["optimizer"]
    if kind == "of other parameters":
        optimizer["state"] = dict(enumerate(reversed(optimizer["state"].values())))
    content = {
        "model": {f"module.{name}": value for name, value in weights.items()},
        "optimizer": {} if kind == "empty" else optimizer,
        "amp": saved["amp"],
    }
    torch.save(content, tmp_path / "old.pt")
    manager = manager_of(tmp_path / "run")
    assert manager.resume(tmp_path / "old.pt", 1)
    found = NATIVE.fp32_state_dict(manager.state.model, manager.state.optimizer)
    for name, value in weights.items():
        torch.testing.assert_close(backend.local_shard(found[name]), value, rtol=0, atol=0)
    assert bool(manager.state.optimizer.state) == (kind == "fitting")
    assert any("no fitting optimizer" in one for one in manager.logger) == (kind != "fitting")
    train_a_step(manager)


@pytest.mark.parametrize("name", ["last.pt", "best.pt", "step-2.pt"])
def test_conversion_to_a_name_of_the_run_is_an_error(
    whole: Path, tmp_path: Path, name: str
) -> None:
    """Its next save would remove the file."""
    run = shutil.copytree(whole, tmp_path / "run", symlinks=True)
    with pytest.raises(UserError, match=f"{name}: the run there removes .*; name another file"):
        consolidate(run / "last", run / name)
    assert not (run / name).exists()
    consolidate(run / "last", tmp_path / name)


def test_conversion_warns_where_torch_is_old(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    consolidate(folder, tmp_path / "new.pt")
    assert "CVE" not in capsys.readouterr().err
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    consolidate(folder, tmp_path / "old.pt")
    assert "torch 2.9.1 can be made to crash, or worse" in capsys.readouterr().err


def test_chunk_that_serves_many_tensors_is_refused(folder: Path, allocated: list[int]) -> None:
    def repeat(index: dict) -> None:
        index.update({f"model.extra{number}": index["model.0.weight"] for number in range(999)})

    edit_json(folder / "index.json", repeat)
    complete(folder)
    with pytest.raises(UserError, match=r"index.json is torn or altered"):
        format.load(folder)
    assert not allocated


@pytest.mark.parametrize("name", ["optimizer.x.exp_avg", "ranks.0", "metadata.arch", "optimizer"])
def test_tensor_in_the_place_of_another_entry_is_refused(folder: Path, name: str) -> None:
    edit_json(
        folder / "index.json", lambda index: index.update({name: index.pop("model.0.weight")})
    )
    complete(folder)
    with pytest.raises(UserError, match="its tensors can't be read"):
        format.load(folder)


@pytest.mark.parametrize("name", FILES[:4])
def test_link_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(UserError, match=r"no regular file|no valid manifest"):
        format.load(folder)


def test_index_of_torch_is_not_read(folder: Path) -> None:
    """It is a pickle, which runs code."""
    (folder / ".metadata").write_bytes(b"cbuiltins\nexit\n(tR.")
    entries = format.load(folder)
    assert entries["step"] == 2 and entries["model"]["0.weight"].shape == (4, 3)


def test_index_of_gigabytes_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_storage, "MAX_TABLE_BYTES", 10)
    with pytest.raises(UserError, match=r"index.json is torn or altered"):
        format.load(folder)


def test_link_to_a_checkpoint_is_removed_alone(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "step-3"
    link.symlink_to(folder)
    files.remove(link)
    assert not link.is_symlink() and (folder / "state.pt").exists()
    assert not list(tmp_path.glob("*.tmp"))


def test_model_with_a_module_called_optimizer_is_sharded_like_others() -> None:
    entries = {"model": {"optimizer.weight": torch.ones(2)}}
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)])
    assert sharded.templates(entries, optimizer).keys() == {"model.optimizer.weight", "optimizer.0"}
    assert dist.get_world_size() == 1
