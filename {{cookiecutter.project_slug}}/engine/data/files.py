"""Reading of data files, which may be damaged, hostile or gone: each error names the file."""

import errno
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from io import BufferedReader, BytesIO, FileIO
from typing import TypeVar

from engine import DAMAGE, PAUSES_S, OutageError, UserError, log_line, open_regular
from engine.data.remote import open_mirror
from engine.text import printable

MAX_BYTES = 2**30  # of a file that is read
MAX_OPEN_SHARDS = 128
# Errors that last. A disk that does not answer for a moment has others, depending on its kind.
LASTING = (*DAMAGE, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
# Errors of a damaged file, or of its disk.
AMBIGUOUS = (errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA, errno.EREMOTEIO)
# Part of a file of packed data (engine/data/shards.py): offset and length.
IN_SHARD = re.compile(r"(.*shard-\d{5,}\.tar)/(\d+)\+(\d+)")
# Message of torch's SIGCHLD handler, which raises it in the main thread if a worker is killed.
WORKER_END = re.compile(r"DataLoader worker \(pid")
T = TypeVar("T")


class FileError(UserError):
    """A file that can't be read. `path` is empty if a data loader's worker raised it."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(printable(message) if path else message)
        self.path = path


@contextmanager
def naming_errors(path: str | os.PathLike, kind: str) -> Iterator[None]:
    """Turn any exception of the body, other than UserError, into a FileError or an OutageError.

    Decoders raise exceptions of nearly all types for damaged files.

    Args:
        kind: what the body reads the file as, such as "an image".
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if WORKER_END.match(str(error)):
            raise
        name, reason = printable(_origin(path)), printable(_reason(error))
        if isinstance(error, OSError) and error.errno not in (*LASTING, *AMBIGUOUS):
            raise OutageError(f"{name} can't be read ({reason})") from None
        problem = f"{name} can't be read as {kind} ({reason})"
        raise FileError(f"{problem}; fix or remove it", name) from None


def _origin(path: str | os.PathLike) -> str:
    """Return a file's name for messages: with the URL for a part of a shard that is read by it."""
    name = os.fspath(path)
    if part := IN_SHARD.fullmatch(name):
        folder, shard = os.path.split(part[1])
        if mirror := open_mirror(folder, os.getpid()):
            return f"{mirror.store.url}/{shard}/{part[2]}+{part[3]}"
    return name


def _reason(error: Exception) -> str:
    """Return the first line of an exception's message, without the name of its source."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    line = re.sub(r" *<_io\.[^>]*>", "", line)  # PIL's name of the file
    return line.split(", ")[-1]  # torchvision's starts with its source


def open_file(path: str | os.PathLike) -> BufferedReader | BytesIO:
    """Open a regular file of at most MAX_BYTES for reading, or a part of a shard of packed data.

    Raises OSError if it is another kind of file.
    """
    if IN_SHARD.fullmatch(os.fspath(path)):
        return BytesIO(read_file(path))
    return BufferedReader(try_again(path, partial(open_regular, path, MAX_BYTES)))


def try_again(path: str | os.PathLike, read: Callable[[], T]) -> T:
    """Return what `read` returns; call it again if the disk did not answer."""
    for pause in PAUSES_S:
        try:
            return read()
        except OSError as error:
            if error.errno in LASTING:
                raise
            log_line(f"warning: {_origin(path)}: {error.strerror}; reading again in {pause:.0f} s")
        _open_shard.cache_clear()
        time.sleep(pause)
    return read()


def read_file(path: str | os.PathLike) -> bytearray:
    """Return the contents of a regular file. Raises OSError as `open_file` does."""
    return try_again(path, partial(_read_once, path))


def _read_once(path: str | os.PathLike) -> bytearray:
    if part := IN_SHARD.fullmatch(os.fspath(path)):
        return _read_part(part[1], int(part[2]), int(part[3]))
    with BufferedReader(open_regular(path, MAX_BYTES)) as file:
        # Not to its end: some files, such as /proc/self/pagemap, have a size of 0 and no end.
        data = bytearray(os.fstat(file.fileno()).st_size)
        del data[file.readinto(data) :]
        return data


def _read_part(path: str, offset: int, length: int) -> bytearray:
    if length > MAX_BYTES:
        raise OSError(0, f"it has {length} bytes, more than {MAX_BYTES}")
    folder, name = os.path.split(path)
    if mirror := open_mirror(folder, os.getpid()):
        return mirror.read(name, offset, length)
    data = bytearray(length)
    shard = _open_shard(path)  # kept: the cache may not have it, if two threads open it at once
    if os.preadv(shard.fileno(), [data], offset) != length:
        raise OSError(0, "its shard is too short")
    return data


@lru_cache(MAX_OPEN_SHARDS)  # to open a file of a network's file system takes long
def _open_shard(path: str) -> FileIO:
    """Return an open shard, closed when MAX_OPEN_SHARDS others have been used."""
    return open_regular(path)
