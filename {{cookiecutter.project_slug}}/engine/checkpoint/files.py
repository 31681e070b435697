"""Files of a run's checkpoints: their names, and the removal of those that are not kept.

The checkpoint of a step is ``step-<step>.pt``, or a folder ``step-<step>`` if it is sharded. The
newest one is ``last.pt``, too, and that of the best metric ``best.pt``.
"""

import itertools
import math
import os
import re
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from engine import FULL_DISK, PAUSES_S, SUFFIX, UserError, exists, is_directly_in, link, replacing
from engine.checkpoint import format, manifest, sharded
from engine.checkpoint.archive import UnreadableError, reason_of
from engine.distributed import all_gather

T = TypeVar("T")
LAST, BEST = "last.pt", "best.pt"
LAST_FOLDER, BEST_FOLDER = "last", "best"  # of a sharded one
NUMBERED = re.compile(r"step-\d+(\.pt)?")


def write_or_make_room(
    path: Path,
    entries: dict[str, Any],
    warn: Callable[[str], None],
    rewind: "Rewind | None" = None,
    writers: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint; on a full disk, remove the oldest ones and retry.

    Args:
        rewind: of a run that has not saved yet: later ones make room first, even of this step.
        writers: group of all ranks, which call this together, for a sharded checkpoint. Without it,
            rank 0 replaces the entries of one other than tensors.
    """
    step = rewind.step if rewind else step_of(path)
    while True:
        try:
            if writers:
                sharded.write(path, entries, writers)
            elif not path.suffix:
                sharded.update(path, entries)
            else:
                format.write(path, entries)
            return
        except OSError as error:
            if not (error.errno in FULL_DISK and _make_room(path, step, warn, writers)):
                raise


def _make_room(
    path: Path, step: int, warn: Callable[[str], None], writers: dist.ProcessGroup | None
) -> bool:
    """Remove the oldest checkpoint to write `path`; return whether there is one on rank 0.

    Checkpoints after `step`, which `path` replaces, are removed before the oldest. The newest of
    the others stays. The best one does, too: to remove another name of a file makes no room.
    """
    is_removed = False
    if dist.get_rank() == 0:
        with suppress(OSError, UnreadableError):  # the other ranks are waiting for this one
            found = sorted(numbered(path.parent), key=lambda one: step_of(one) > step)
            if removable := [one for one in found[1:] if not _is_kept(one)]:
                oldest = removable[-1]
                _remove_last(oldest)
                remove(oldest)
                warn(f"the disk is full: removed {oldest} to write {path}")
                is_removed = True
    return all_gather(is_removed, writers)[0]


def _is_kept(path: Path) -> bool:
    """Return whether a numbered checkpoint is also best.pt, or has a name that a user gave it."""
    if path.is_dir():
        return _is_same(path.with_name(BEST_FOLDER), path)
    return path.stat().st_nlink > 1 + _is_same(path.with_name(LAST), path)


def _is_same(name: Path, path: Path) -> bool:
    return exists(name) and name.samefile(path)


def best_of(folder: Path) -> Path | None:
    """Return the path of the checkpoint of the best metric, of either kind, if there is one.

    Raises OSError if the disk does not answer.
    """
    paths = (folder / BEST, folder / BEST_FOLDER)
    return next((path for path in paths if status_of(path)), None)


def load_best(path: Path) -> dict[str, Any]:
    """Return the entries of best.pt; an infinite step if it is damaged, in its tensors too."""
    try:
        return format.load_state(path)
    except UnreadableError:  # by the system, just now: it may be whole
        raise
    except UserError:
        return {"step": math.inf, "best": -math.inf, "metadata": {}}


def identify_best(folder: Path) -> tuple[float, int] | None:
    """Return the score and the step of best.pt in `folder`; None if there is no valid one."""
    with suppress(UserError):
        entries = format.load(folder / BEST)
        return entries["best"], entries["step"] or 0
    return None


def replace_best(folder: Path, content: memoryview, step: int | None) -> Path | None:
    """Write best.pt; return the new path of the one that was there, if it has a `step`."""
    best = folder / BEST
    aside = None if step is None else _name_aside(best, step)
    if aside:
        link(best, aside)
    with replacing(best) as temporary:
        temporary.write_bytes(content)
    return aside


def prune(folder: Path, keep: int) -> None:
    """Remove the numbered checkpoints in `folder` except for the `keep` of the highest steps."""
    for path in numbered(folder)[keep:]:
        if path.is_file() or not _is_kept(path):  # a file that is best.pt keeps its content
            remove(path)


def remove(path: Path) -> None:
    """Remove a checkpoint, which is a file or a folder."""
    if path.is_dir():
        sharded.remove(path)
    else:
        path.unlink(missing_ok=True)


def alias(path: Path, name: str) -> None:
    """Give a numbered checkpoint the additional name `name`, such as last.pt.

    A folder gets a symbolic link without the suffix, such as last. The name of the other kind, a
    file or a folder, is removed.
    """
    file = path.with_name(name)
    folder = file.with_suffix("")
    if path.is_dir():
        if not _is_same(folder, path):
            _require_own(folder)
            _link_folder(path, folder)
        file.unlink(missing_ok=True)
    else:
        if not _is_same(file, path):
            link(path, file)
        _remove_name(folder)


def _link_folder(path: Path, name: Path) -> None:
    """Make `name` a symbolic link to the folder at `path`, which has the same parent folder."""
    temporary = name.with_name(f"{name.name}.pt{SUFFIX}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(path.name, target_is_directory=True)
    if not name.is_symlink():  # which is replaced at once: another process may be reading there
        _remove_name(name)
    os.replace(temporary, name)


def _remove_name(name: Path) -> None:
    """Remove a link to a folder, or the folder that `remove_later` gave the name to."""
    if name.is_symlink():
        name.unlink()
    elif manifest.exists(name):
        remove(name)


def check_names(folder: Path) -> None:
    """Raise UserError if something else has the name of a checkpoint of either kind."""
    for name in (LAST, LAST_FOLDER, BEST, BEST_FOLDER):
        read_patiently(_require_own, folder / name)


def _require_own(name: Path) -> None:
    is_own = name.is_symlink() or (name.is_file() if name.suffix else manifest.exists(name))
    if exists(name) and not is_own:
        raise UserError(
            f"{name} is no checkpoint, but a run has one of this name: move it away, or add "
            "--output with another folder"
        )


@dataclass
class Rewind:
    """Replacement, by the first save of a run, of the checkpoints after the one it resumed from.

    The user chose that one, or later ones are damaged. Until the first save is complete, the later
    ones may be all that there is, and keep their names.
    """

    step: int  # of the checkpoint that the run was resumed from
    has_later: bool = False  # there are numbered checkpoints of later steps
    best_step: float = -1.0  # of best.pt if that is later or not compared; infinity if damaged
    best: Path | None = None  # what is best.pt after the first save, if another one than now

    @classmethod
    def to(cls, step: int, folder: Path, is_newest: bool) -> "Rewind":
        """Return the rewind of a run that was resumed from `step`.

        Args:
            is_newest: the checkpoint is the newest valid one, so that `folder` is searched for
                later ones that are damaged only.

        Raises UnreadableError if the system can't list or read them.
        """
        rewind = cls(step, any(step_of(path) > step for path in numbered(folder)))
        best = read_patiently(best_of, folder)
        if best and (rewind.has_later or not is_newest):
            found = load_best(best)["step"] or -1
            rewind.best_step = found if found > step else -1
        return rewind

    def describe(self, folder: Path) -> str:
        """Return a message about a best.pt that is renamed or replaced, if it is."""
        best = best_of(folder)
        if not best or self.best_step < 0:
            return ""
        if self.best_step == math.inf:
            return f"{best} can't be read: the next validation replaces it"
        name = _name_aside(best, self.best_step).name
        return f"{best}, of step {self.best_step}, is not compared: it will be renamed to {name}"

    def keep_best(self, folder: Path) -> None:
        """Give a later best.pt a name that no save replaces. Call it before the first save."""
        best = best_of(folder)
        if not best or not 0 <= self.best_step < math.inf:
            return
        aside = _name_aside(best, self.best_step)
        if best.is_file():
            if not aside.exists():
                link(best, aside)
        elif best.resolve() != aside.resolve():
            is_own = is_directly_in(best, folder)
            (best.resolve() if is_own else best).rename(aside)  # a link to elsewhere stays one
            _link_folder(aside, best)

    def finish(self, folder: Path, saved: Path) -> None:
        """Remove what is later. Call it when the first save, to the path `saved`, is complete."""
        self.keep_best(folder)
        remove_later(folder, self.step, saved)
        if self.best and exists(self.best):
            alias(self.best, BEST)
        elif 0 <= self.best_step < math.inf:
            (folder / BEST).unlink(missing_ok=True)
            _remove_name(folder / BEST_FOLDER)


def remove_later(folder: Path, step: int, saved: Path | None = None) -> None:
    """Remove the numbered checkpoints of steps after `step`, of which last.pt may be another name.

    The best checkpoint is renamed instead.

    Args:
        saved: path of one that stays.
    """
    best = folder / BEST_FOLDER
    for path in numbered(folder):
        if step_of(path) <= step or path == saved:
            continue
        _remove_last(path)
        if best.is_symlink() and _is_same(best, path):
            best.unlink()
            path.rename(_name_aside(path, step_of(path)))
        else:
            remove(path)


def _name_aside(path: Path, step: float) -> Path:
    """Return a name for the best checkpoint, of `step`, that is its own or free.

    A run can go back more than once.
    """
    ends = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    names = (path.with_name(f"best-of-step-{step}{end}{path.suffix}") for end in ends)
    return next(name for name in names if not os.path.lexists(name) or _is_same(name, path))


def _remove_last(path: Path) -> None:
    """Remove the name last.pt if that is another name of `path`."""
    for last in (path.with_name(LAST), path.with_name(LAST_FOLDER)):
        if _is_same(last, path):
            last.unlink()


def read_patiently(read: Callable[[Path], T], path: Path) -> T:
    """Return what `read` does with `path`; try again if the system can't read it.

    Raises UnreadableError if the last attempt fails, too.
    """
    for pause in PAUSES_S:
        with suppress(OSError, UnreadableError):
            return read(path)
        time.sleep(pause)
    try:
        return read(path)
    except OSError as error:
        raise UnreadableError(f"{path}: it can't be read ({error.strerror})") from None


def numbered(folder: Path) -> list[Path]:
    """Return the checkpoints that have a step in their name, the highest step first.

    Raises UnreadableError if the system can't list them: they may be there.
    """
    return read_patiently(_list_numbered, folder)


def _list_numbered(folder: Path) -> list[Path]:
    """List as `numbered` does. Raises OSError, which Path.glob hides since Python 3.13."""
    paths: list[Path] = []
    with suppress(FileNotFoundError, NotADirectoryError):
        paths = [one for one in folder.iterdir() if NUMBERED.fullmatch(one.name)]
    return sorted(filter(_is_checkpoint, paths), key=step_of, reverse=True)


def _is_checkpoint(path: Path) -> bool:
    status = status_of(path)
    if status is None:
        return False
    return stat.S_ISREG(status.st_mode) if path.suffix else sharded.is_checkpoint(path)


def status_of(path: Path) -> os.stat_result | None:
    """Return the status of a file or folder; None if there is none, or only a link to itself.

    Raises OSError if the disk does not answer.
    """
    try:
        return path.stat()
    except OSError as error:
        if reason_of(error):
            raise
        return None


def step_of(path: Path) -> int:
    """Return the step in the name of a numbered checkpoint."""
    return int(path.stem.removeprefix("step-"))
