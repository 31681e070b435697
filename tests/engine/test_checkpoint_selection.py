"""Choice of the newest checkpoint, and removal of those that are not kept."""

import contextlib
import errno
import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from engine import UserError, link
from engine.checkpoint import files, inspection, manifest, selection, validation
from engine.checkpoint import format as checkpoint
from engine.checkpoint.archive import UnreadableError
from engine.checkpoint.selection import AUTO, find

ENTRIES = {
    "model": {"weight": torch.zeros(2000)},
    "optimizer": {"state": {}, "param_groups": []},
    "amp": {},
    "epoch": 0,
    "samples": 0,
    "best": 0.0,
    "ranks": [],
}


def saved(folder: Path, step: int, age: float = 0.0, name: str | None = None) -> Path:
    """Write the checkpoint of a step, as if that had been `age` seconds before the year 2030."""
    path = folder / (name or f"step-{step}.pt")
    checkpoint.write(path, ENTRIES | {"step": step})
    os.utime(path, (1.9e9 - age,) * 2)
    return path


def damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(2000)
        file.write(b"altered")


def chosen(folder: Path) -> tuple[str, list[str]]:
    """Return the name of the newest checkpoint, and those of the damaged ones."""
    messages = []
    source = find(folder, AUTO, messages.append)
    return source.path.name, [Path(message.split(": ")[0]).name for message in messages]


def test_highest_step_is_the_newest_whatever_the_clock_says(tmp_path: Path) -> None:
    for step, age in ((9, 30.0), (10, 99.0), (2, 0.0)):  # set back before step 10
        saved(tmp_path, step, age)
    assert chosen(tmp_path) == ("step-10.pt", [])
    link(tmp_path / "step-9.pt", tmp_path / "last.pt")  # killed before it was linked anew
    assert chosen(tmp_path) == ("step-10.pt", [])
    link(tmp_path / "step-10.pt", tmp_path / "last.pt")
    assert chosen(tmp_path) == ("last.pt", [])


def test_the_newest_valid_checkpoint_is_selected(tmp_path: Path) -> None:
    for step in (4, 20, 30):
        link(saved(tmp_path, step), tmp_path / "last.pt")
    link(tmp_path / "step-4.pt", tmp_path / "best.pt")
    for step in (30, 20):
        damage(tmp_path / f"step-{step}.pt")  # and so last.pt
    assert chosen(tmp_path) == ("step-4.pt", ["last.pt", "step-20.pt"])
    (tmp_path / "step-4.pt").unlink()
    assert chosen(tmp_path) == ("best.pt", ["last.pt", "step-20.pt"])
    (tmp_path / "best.pt").write_bytes(b"")
    with pytest.raises(UserError, match="no checkpoint in"):
        find(tmp_path, AUTO, mock.Mock())
    assert find(tmp_path / "elsewhere", AUTO, mock.Mock()) is None


@pytest.mark.parametrize("name", ["last.pt", "best.pt"])
def test_a_name_without_a_numbered_file_has_the_step_that_it_holds(
    tmp_path: Path, name: str
) -> None:
    """A copy, or the only name that was not deleted."""
    saved(tmp_path, 7, name=name)
    for step, expected in ((6, name), (8, "step-8.pt")):
        saved(tmp_path, step)
        assert chosen(tmp_path) == (expected, [])


def test_last_is_read_if_its_copy_is_damaged(tmp_path: Path) -> None:
    """On a file system without hard links."""
    for step in (6, 7):
        shutil.copyfile(saved(tmp_path, step), tmp_path / "last.pt")
    damage(tmp_path / "step-7.pt")
    assert chosen(tmp_path) == ("last.pt", [])


def test_pruning_keeps_the_highest_steps(tmp_path: Path) -> None:
    for age, step in enumerate((50, 7, 60, 8)):
        (tmp_path / f"step-{step}.pt").touch()
        os.utime(tmp_path / f"step-{step}.pt", (100 - age, 100 - age))
    (tmp_path / "step-by-step.pt").touch()
    files.prune(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"step-60.pt", "step-50.pt"} | {
        "step-by-step.pt"
    }


def test_later_checkpoints_are_removed(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        link(saved(tmp_path, step), tmp_path / "last.pt")
    files.remove_later(tmp_path, 30)
    assert len(list(tmp_path.iterdir())) == 4
    files.remove_later(tmp_path, 15)
    assert [path.name for path in tmp_path.iterdir()] == ["step-10.pt"]
    link(tmp_path / "step-10.pt", tmp_path / "last.pt")
    files.remove_later(tmp_path, 15)
    assert len(list(tmp_path.iterdir())) == 2


def sharded_folder(path: Path, content: str) -> None:
    """Write a folder with a valid manifest, and `content` in place of a state."""
    path.mkdir()
    (path / "state.pt").write_text(content)
    manifest = {"version": 1, "id": content, "files": {"index.json": [0, 0]}}
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_best_checkpoints_of_one_step_are_all_kept(tmp_path: Path) -> None:
    """The run went back to an earlier step twice."""
    for content in ("first", "second", "third"):
        sharded_folder(tmp_path / "step-20", content)
        files.alias(tmp_path / "step-20", "best.pt")
        files.remove_later(tmp_path, 10)
    names = ("best-of-step-20", "best-of-step-20-2", "best-of-step-20-3")
    found = [(tmp_path / name / "state.pt").read_text() for name in names]
    assert found == ["first", "second", "third"]
    for _ in range(2):
        link(saved(tmp_path, 20), tmp_path / "best.pt")
        rewind = files.Rewind.to(10, tmp_path, is_newest=False)
        for _ in range(2):  # the first save failed
            rewind.keep_best(tmp_path)
        rewind.finish(tmp_path, tmp_path / "step-12.pt")
    assert {path.name for path in tmp_path.glob("best*.pt")} == {
        "best-of-step-20.pt",
        "best-of-step-20-2.pt",
    }


def test_folder_of_a_run_in_place_of_a_checkpoint_is_an_error_that_names_one(
    tmp_path: Path,
) -> None:
    saved(tmp_path, 1, name="best.pt")
    with pytest.raises(UserError, match=r"or no checkpoint; name a file in it, such as best\.pt"):
        checkpoint.load(tmp_path)


def test_step_of_a_folder_is_read(tmp_path: Path) -> None:
    """A copy of the best one has no number in its name, and need not be the newest."""
    sharded_folder(tmp_path / "best", "")
    torch.save({"step": 10}, tmp_path / "best" / "state.pt")
    assert checkpoint.read_step(tmp_path / "best") == 10


def test_best_folder_outlives_its_step(tmp_path: Path) -> None:
    for step in (10, 20):
        sharded_folder(tmp_path / f"step-{step}", str(step))
        files.alias(tmp_path / f"step-{step}", "last.pt")
    files.alias(tmp_path / "step-20", "best.pt")
    files.remove_later(tmp_path, 15)  # as after --resume step-10
    assert {path.name for path in tmp_path.iterdir()} == {"step-10", "best-of-step-20"}
    assert (tmp_path / "best-of-step-20" / "state.pt").read_text() == "20"
    files.alias(tmp_path / "step-10", "best.pt")  # a better one
    assert (tmp_path / "best").is_symlink()
    assert (tmp_path / "best" / "state.pt").read_text() == "10"


@pytest.mark.parametrize("name", ["last", "best"])
def test_folders_of_the_user_are_kept(tmp_path: Path, name: str) -> None:
    (tmp_path / name / "photos").mkdir(parents=True)
    (tmp_path / name / "manifest.json").write_text('{"name": "photos"}')
    with pytest.raises(UserError, match=f"{name} is no checkpoint, but a run has one of this name"):
        files.check_names(tmp_path)
    files.alias(saved(tmp_path, 1), f"{name}.pt")
    assert (tmp_path / name / "photos").is_dir() and (tmp_path / f"{name}.pt").exists()


def test_file_of_the_user_is_kept(tmp_path: Path) -> None:
    (tmp_path / "best").write_text("precious")
    with pytest.raises(UserError, match="best is no checkpoint"):
        files.check_names(tmp_path)
    files.alias(saved(tmp_path, 1), "best.pt")
    assert (tmp_path / "best").read_text() == "precious"


@pytest.mark.parametrize("name", ["last.pt", "best.pt"])
def test_folder_with_the_name_of_a_file_is_an_error(tmp_path: Path, name: str) -> None:
    saved(tmp_path, 1)
    files.check_names(tmp_path)
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=f"{name} is no checkpoint, but a run has one"):
        files.check_names(tmp_path)


@pytest.mark.parametrize("name", ["last.pt", "best"])
@pytest.mark.parametrize("is_hidden", [False, True])
def test_name_that_the_system_can_not_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_hidden: bool
) -> None:
    """Since Python 3.14, pathlib takes the file for missing."""
    usual = Path.stat

    def fail(path: Path, **options: Any) -> os.stat_result:
        if path.name == name:
            raise OSError(errno.EIO, "I/O error")
        return usual(path, **options)

    for method in ("exists", "is_file", "is_symlink") if is_hidden else ():
        monkeypatch.setattr(Path, method, suppressing(getattr(Path, method)))
    monkeypatch.setattr(Path, "stat", fail)
    monkeypatch.setattr(files, "PAUSES_S", (0.0,))
    with pytest.raises(UnreadableError, match=rf"{name}: it can't be read \(I/O error\)"):
        files.check_names(tmp_path)


@pytest.mark.parametrize("is_folder", [False, True])
def test_file_or_folder_that_the_user_makes_during_a_run_is_kept(
    tmp_path: Path, is_folder: bool
) -> None:
    for step in (1, 2):
        sharded_folder(tmp_path / f"step-{step}", str(step))
    best = tmp_path / "best"
    content = best / "photo" if is_folder else best
    content.parent.mkdir(exist_ok=True)
    content.write_text("precious")
    with pytest.raises(UserError, match="best is no checkpoint, .*: move it away"):
        files.alias(tmp_path / "step-1", "best.pt")
    assert content.read_text() == "precious"
    # As are folders with the name of a step; those of checkpoints, also damaged ones, are not.
    for name in ("step-0/photo", "step-9/manifest.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("precious")
    (tmp_path / "step-1" / "manifest.json").write_text("torn")
    (tmp_path / "step-1" / "index.json").touch()
    files.prune(tmp_path, 1)
    files.remove_later(tmp_path, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"best", "step-0", "step-9"}
    assert (tmp_path / "step-9" / "manifest.json").read_text() == "precious"


def test_names_of_sharded_checkpoints_are_free(tmp_path: Path) -> None:
    sharded_folder(tmp_path / "step-1", "")
    files.alias(tmp_path / "step-1", "last.pt")
    sharded_folder(tmp_path / "best", "")
    files.check_names(tmp_path)


def test_files_that_never_end_are_skipped(tmp_path: Path) -> None:
    saved(tmp_path, 4)
    os.mkfifo(tmp_path / "last.pt")
    (tmp_path / "best.pt").symlink_to(tmp_path / "best.pt")
    assert chosen(tmp_path) == ("step-4.pt", ["last.pt"])


def test_a_compressed_last_checkpoint_is_not_unpacked(tmp_path: Path) -> None:
    saved(tmp_path, 4)
    last = saved(tmp_path, 5, name="last.pt")
    with zipfile.ZipFile(last) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(last, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    with mock.patch.object(torch, "load", wraps=torch.load) as load:
        assert chosen(tmp_path) == ("step-4.pt", ["last.pt"])
    assert all(Path(call.args[0].name) == tmp_path / "step-4.pt" for call in load.mock_calls)


def test_a_folder_with_the_name_of_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step-1.pt").mkdir()
    for step in (2, 3):
        saved(tmp_path, step)
    files.prune(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1.pt", "step-3.pt"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESHUTDOWN])
def test_newest_checkpoint_that_the_system_can_not_read_is_an_error(
    tmp_path: Path, number: int
) -> None:
    """It may be whole, and would be replaced by the run that resumes the one before it."""
    saved(tmp_path, 10)
    last = saved(tmp_path, 20)
    usual = Path.open

    def fail_to_open(path: Path, *args: object, **options: object) -> object:
        if path == last:
            raise OSError(number, os.strerror(number))
        return usual(path, *args, **options)

    with (
        mock.patch.object(Path, "open", fail_to_open),
        mock.patch.object(files, "PAUSES_S", (0.0,)),
        pytest.raises(UserError, match=rf"step-20.pt: it can't be read \({os.strerror(number)}\)"),
    ):
        find(tmp_path, AUTO, print)
    assert find(tmp_path, AUTO, print).path == last


def suppressing(method: Callable[[Path], bool]) -> Callable[[Path], bool]:
    """Return a method of paths that is False where it raises OSError."""

    def suppressed(path: Path) -> bool:
        with contextlib.suppress(OSError):
            return method(path)
        return False

    return suppressed


@pytest.mark.parametrize("failing", ["iterdir", "stat"])
@pytest.mark.parametrize("is_short", [False, True])
@pytest.mark.parametrize(
    "search",
    [
        lambda folder: find(folder, AUTO, print).rank == 0,
        lambda folder: len(selection.times_after(folder, 10)) == 2,
        lambda folder: files.Rewind.to(10, folder, is_newest=False).best_step == 30,
    ],
    ids=["newest", "times_after", "Rewind"],
)
def test_folder_that_the_system_can_not_list_is_an_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing: str,
    is_short: bool,
    search: Callable[[Path], bool],
) -> None:
    """Since Python 3.13, pathlib takes it for empty, and since 3.14 a file for missing."""
    saved(tmp_path, 20)
    saved(tmp_path, 30, name="best.pt")
    attempts = []
    usual = getattr(Path, failing)

    def fail(path: Path, **options: Any) -> Any:
        if path.is_relative_to(tmp_path) and not (attempts and is_short):
            attempts.append(path)
            raise OSError(errno.ESTALE, "Stale file handle")
        return usual(path, **options)

    for name in ("exists", "is_file", "is_dir"):
        monkeypatch.setattr(Path, name, suppressing(getattr(Path, name)))
    monkeypatch.setattr(Path, failing, fail)
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
    monkeypatch.setattr(files, "PAUSES_S", (0.0,))
    if is_short:
        assert search(tmp_path)
    else:
        with pytest.raises(UnreadableError, match=r"can't be read \(Stale file handle\)"):
            search(tmp_path)
    assert attempts


def test_best_that_is_a_link_to_itself_is_none(tmp_path: Path) -> None:
    (tmp_path / "best.pt").symlink_to("best.pt")
    assert files.best_of(tmp_path) is None


def test_folder_in_the_place_of_a_file_is_damage(tmp_path: Path) -> None:
    """Nobody can ever read it, so `--resume auto` uses the checkpoint before."""
    saved(tmp_path, 10)
    (tmp_path / "last.pt" / "state.pt").mkdir(parents=True)
    assert chosen(tmp_path) == ("step-10.pt", ["last.pt"])


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EKEYEXPIRED, "Key has expired")])
@pytest.mark.parametrize("is_seeking", [False, True])
def test_failure_in_the_middle_of_a_file_says_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, is_seeking: bool
) -> None:
    """Such as a lack of memory, or of a disk: then zipfile calls the file no ZIP archive."""

    class File(io.FileIO):
        def seek(self, position: int, whence: int = 0) -> int:
            if whence == 2:
                raise error
            return super().seek(position, whence)

    for step in (10, 20):
        saved(tmp_path, step)
    if is_seeking:
        monkeypatch.setattr(Path, "open", lambda path, _: File(path))
    else:
        monkeypatch.setattr(torch, "load", mock.Mock(side_effect=error))
    monkeypatch.setattr(files, "PAUSES_S", ())
    with pytest.raises(UserError, match=r"step-20.pt: it can't be read"):
        find(tmp_path, AUTO, print)


def test_allocator_without_memory_says_nothing_of_the_file(tmp_path: Path) -> None:
    saved(tmp_path, 20)
    load = torch.load

    def allocate(*args: Any, **options: Any) -> Any:
        torch.empty(2**50)
        return load(*args, **options)

    with (
        mock.patch.object(torch, "load", allocate),
        pytest.raises(UnreadableError, match=r"step-20.pt: it can't be read \(.*memory"),
    ):
        checkpoint.load(tmp_path / "step-20.pt")


@pytest.mark.parametrize(
    "altered",
    [
        {"metadata": {"arch": "a" * (validation.MAX_TEXT + 1)}},
        {"results": {"val_accuracy": torch.zeros(2)}},
        {"results": torch.zeros(2)},
    ],
)
def test_values_that_no_run_writes_are_an_error(tmp_path: Path, altered: dict) -> None:
    checkpoint.write(tmp_path / "a.pt", ENTRIES | {"step": 1} | altered)
    with pytest.raises(UserError, match="altered; use another one"):
        checkpoint.load(tmp_path / "a.pt")


def test_checkpoint_is_read_again_after_an_error_of_the_system(tmp_path: Path) -> None:
    path = saved(tmp_path, 10)
    error = UnreadableError("stale")
    with (
        mock.patch.object(selection, "load_state", side_effect=[error, {}]) as load,
        mock.patch.object(files, "PAUSES_S", (0.0,)),
    ):
        assert find(tmp_path, AUTO, print).path == path
    assert load.call_count == 2


def test_file_of_another_size_than_in_the_manifest_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "x.distcp").write_bytes(b"")
    os.truncate(tmp_path / "x.distcp", 2**40)
    manifest.write(tmp_path, "id", {"x.distcp": [10, 1], manifest.INDEX: [2, 0]})
    with (
        mock.patch.object(manifest, "describe", side_effect=AssertionError),
        pytest.raises(UserError, match="its x.distcp is torn or altered"),
    ):
        manifest.validate(tmp_path)


def test_pickle_of_too_many_containers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "MAX_CONTAINERS", 100)
    for number, is_valid in ((99, True), (100, False)):
        pickled = io.BytesIO(b"\x80\x02](" + b"}" * number + b"e.")  # in a list, which is one more
        with contextlib.nullcontext() if is_valid else pytest.raises(RecursionError):
            inspection.check_tuples(pickled)
