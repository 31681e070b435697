"""Choice of the checkpoint to resume from, among those of all hosts."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from engine import UserError
from engine.checkpoint import files, format
from engine.checkpoint.archive import UnreadableError
from engine.checkpoint.format import load_state
from engine.distributed import all_gather

AUTO = Path("auto")  # value of --resume for the newest checkpoint


class File(NamedTuple):
    """Identity of a file on a disk that hosts may share."""

    modified_ns: int
    inode: int
    size: int


class Source(NamedTuple):
    """Checkpoint to resume from."""

    path: Path
    rank: int  # the lowest one whose host has the file


def find(
    folder: Path,
    choice: Path | None,
    warn: Callable[[str], None],
    group: dist.ProcessGroup | None = None,
    is_searched: bool = True,
    discarded: Sequence[int] = (),
    further: Sequence[Path] = (),
) -> Source | None:
    """Return the checkpoint `choice`, or for AUTO the newest valid one; None if there is none.

    The newest is that of the highest step: times of writing depend on the hosts' clocks, and copies
    of a folder have others. On a shared disk the result has rank 0, and each file is read once.

    Args:
        folder: which AUTO searches on the hosts where `is_searched` is true.
        choice: it may not exist: reading it is an error.
        warn: called with a message for each invalid checkpoint.
        group: all ranks, which call this together and get the same result; None for one process.
        is_searched: on this rank's host; false if `folder` holds another run there.
        discarded: times of writing of those on this rank's host that AUTO leaves out.
        further: paths of checkpoints with other names, which AUTO finds, too.

    Raises UserError if AUTO finds checkpoints, but no valid one, or the system can't read one that
    may be the newest; or if a sharded checkpoint is not on all hosts.
    """
    if choice is None:
        return None
    if choice == AUTO:
        listed = _checkpoints(folder, further) if is_searched else ()
        kept = [one for one in listed if one[1].modified_ns not in discarded]
        source = _newest(folder, kept, warn, group)
    else:
        has_file = all_gather(choice.is_file() or choice.is_dir(), group)
        source = Source(choice, has_file.index(True) if any(has_file) else 0)
    if source:
        is_folder = all_gather(source.path.is_dir(), group)
        if any(is_folder) and not all(is_folder):
            raise UserError(
                f"--resume {source.path}: a sharded checkpoint must be on a disk that all hosts "
                f"share, and rank {is_folder.index(False)} has none there"
            )
    return source


def _newest(
    folder: Path,
    listed: Iterable[tuple[float, File, Path]],
    warn: Callable[[str], None],
    group: dist.ProcessGroup | None,
) -> Source | None:
    """Return the newest valid one of the checkpoints that all ranks have `listed` in `folder`."""
    rank = dist.get_rank(group) if group else 0
    own = [(step, file, Source(path, rank)) for step, file, path in listed]
    candidates = sorted(chain(*all_gather(own, group)), key=lambda one: one[0], reverse=True)
    sources: dict[File, Source] = {}
    for _, file, source in candidates:
        sources.setdefault(file, source)  # the first name, and the lowest rank, of a file
    for source in sources.values():
        problem: UserError | None = None
        if rank == source.rank:
            try:
                files.read_patiently(load_state, source.path)
            except UserError as error:
                problem = error
        problem = all_gather(problem, group)[source.rank]
        if problem is None:
            return source
        if isinstance(problem, UnreadableError):  # a run from the one before would remove this one
            raise UserError(f"--resume auto: {problem}; fix that, or move it away") from None
        warn(f"{problem}; trying the one before it")
    if sources:
        raise UserError(f"--resume auto: no checkpoint in {folder} is whole; use another folder")
    return None


def times_after(folder: Path, step: int) -> list[int]:
    """Return the times of writing, which identify them, of the checkpoints after `step`.

    A run that goes back to `step` discards them; its first save removes them.
    """
    return [file.modified_ns for found, file, _ in _checkpoints(folder) if found > step]


def has_saved_since(folder: Path, discarded: Sequence[int]) -> bool:
    """Return whether a checkpoint was written after those of the times `discarded`."""
    times = [file.modified_ns for _, file, _ in _checkpoints(folder)] if discarded else []
    return max(times, default=0) > max(discarded, default=0)


def _checkpoints(folder: Path, further: Sequence[Path] = ()) -> Iterator[tuple[float, File, Path]]:
    """Yield step, file and path of each checkpoint; raise UnreadableError if they may be there."""
    numbered = files.numbered(folder)
    steps = {identify(path): float(files.step_of(path)) for path in numbered}
    sharded = (folder / files.LAST_FOLDER, folder / files.BEST_FOLDER)
    for path in (folder / files.LAST, *numbered, folder / files.BEST, *sharded, *further):
        file = identify(path)
        if file and file not in steps:  # last.pt and best.pt are mostly names of numbered files
            steps[file] = files.read_patiently(format.read_step, path)
        if file:
            yield steps[file], file, path


def identify(path: Path) -> File | None:
    """Return the identity of the file or folder of this name; None if there is none.

    Raises UnreadableError if the system can't read its status.
    """
    status = files.read_patiently(files.status_of, path)
    return status and File(status.st_mtime_ns, status.st_ino, status.st_size)
