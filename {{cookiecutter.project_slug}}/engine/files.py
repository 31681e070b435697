"""Files that are there whole, or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SUFFIX = ".tmp"  # of what was being written when a process was killed


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path beside `path` to write to, which takes its place once the body is done.

    It is on the disk before it is renamed, and renamed on the disk before this returns. If the
    body fails, `path` is as it was and nothing is left beside it.
    """
    temporary = path.with_name(path.name + SUFFIX)
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        _flush(temporary)
        temporary.replace(path)
        with suppress(OSError):  # some shared file systems can't flush a folder
            _flush(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def link(path: Path, other: Path) -> None:
    """Gives the file at `path` the name `other` too, without a second copy on the disk."""
    with replacing(other) as temporary:
        try:
            temporary.hardlink_to(path)
        except OSError:  # a file system without links
            shutil.copyfile(path, temporary)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
