"""Library behind the training loop. It is independent of task.py."""

import ctypes
import errno
import getpass
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, FileIO, TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import Any

VERSION = "1.0.0"
PROJECT = Path(__file__).resolve().parents[1]
EXIT_USAGE = 2  # exit status of the program after a UserError
PR_SET_PDEATHSIG = 1  # of Linux's prctl
MAX_BYTES = 2**26  # of a text file, but for tables
MAX_TABLE_BYTES = 2**30
OUTPUT_FIX = "choose another folder for --output, or correct its permissions"
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
# Errors of a file that is gone, torn or of another kind. After others, such as EIO, it may be
# intact: reading it later, or as another user, may succeed.
DAMAGE = (None, 0, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL)
PAUSES_S = (1.0, 4.0)  # before reading again, such as after a disk's server has failed
SUFFIX = ".tmp"  # of a file that `replacing` has not completed
# A program that runs a module, without the current folder in the module search.
RUN_MODULE = """import sys; sys.path[:] = filter(None, sys.path); import runpy
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)"""

# Jupyter sets it for the programs that it starts, whose environment may lack that module.
if os.environ.get("MPLBACKEND", "").startswith("module://") and "ipykernel" not in sys.modules:
    os.environ["MPLBACKEND"] = "agg"


class UserError(Exception):
    """A mistake that the user can fix. Its message says what is wrong and how to fix it.

    The program prints the message without a traceback and exits with `status`.
    """

    status = EXIT_USAGE


class PeerError(UserError):
    """Another process of the job is missing: unlike after a mistake, the job may be restarted."""

    status = 1


class OutageError(UserError):
    """The disk or server of the data does not answer: the job may be restarted."""

    status = 1


def log_line(text: str) -> None:
    """Print a line on standard error, unless that fails, as on a full disk: a run goes on."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def print_error(message: str) -> None:
    """Print an error message as `log_line` does: the exit status remains."""
    log_line(f"error: {message}")


def module_command(name: str) -> list[str]:
    """Return the command of a module that ignores files of the current folder, such as a torch.py.

    Python 3.10 has neither -P nor PYTHONSAFEPATH.
    """
    return [sys.executable, "-c", RUN_MODULE, name]


def start_module(name: str, *arguments: str, **options: Any) -> subprocess.Popen:
    """Start a module with this process's module search path, and further options of Popen."""
    path = os.pathsep.join(map(os.path.abspath, sys.path))  # "" in a notebook
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.Popen([*module_command(name), *arguments], env=environment, **options)


def is_directly_in(path: Path, folder: Path) -> bool:
    """Return whether a file is in a folder itself, and no link to one elsewhere."""
    return path.resolve().parent == folder.resolve()


def exists(path: Path) -> bool:
    """Return whether there is a file or a folder at `path`.

    Raises OSError if the disk does not answer; Path.exists is False then since Python 3.14.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        path.stat()
        return True
    return False


def prepare_tracing() -> None:
    """Protect compiled code. Raises UserError if torch can't trace in a folder of this name."""
    folder = Path(__file__).parent.parent
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"rename the folder {folder}: torch can't compile or export where a name is not UTF-8"
        ) from None
    protect_compiled_code()


def protect_compiled_code() -> None:
    """Give torch's compiled code, which it loads and unpickles, folders that are the user's own.

    torch takes one in /tmp, whoever has made it, and may let others write to it. Its headers are
    there wherever its cache is. Raises UserError if a folder, or a file in the one in /tmp, is
    another user's.
    """
    try:
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())  # as torch does
    except (KeyError, OSError):  # the system does not know the user
        user = f"uid_{os.getuid()}"
    default = Path(tempfile.gettempdir(), f"torchinductor_{user}")
    fix = "set TMPDIR to a folder of yours; torch names the one in it after LOGNAME or USER"
    _require_own(default, fix, is_private=True)
    cache = Path(os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(default)))
    _require_own(cache, "set TORCHINDUCTOR_CACHE_DIR to a folder of yours")
    found = ((folder, name) for folder, *names in os.walk(default) for name in chain(*names))
    for path in (os.path.join(*place) for place in found):
        with suppress(FileNotFoundError):  # another run compiles
            if os.lstat(path).st_uid != os.getuid():
                raise UserError(f"{path} belongs to another user: remove {default}, or {fix}")


def _require_own(path: Path, fix: str, is_private: bool = False) -> None:
    """Make a folder for compiled code, or check its owner; close it to others if `is_private`."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        owners = {path.stat().st_uid, path.lstat().st_uid}  # a link can be changed later
        if is_private and owners == {os.getuid()} and path.stat().st_mode & 0o077:
            path.chmod(0o700)
    except OSError as error:
        problem = f"{path}, for compiled code, can't be made ({error.strerror})"
        raise UserError(f"{problem}: {fix}") from None
    if owners != {os.getuid()}:
        raise UserError(f"{path}, for compiled code, belongs to another user: {fix}")


def summarize(names: list[str]) -> str:
    """Return the first three of `names` and the number of those that follow."""
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace the file at `path` atomically.

    Yields a path to write to, of a temporary file in the same folder, which is moved to `path` when
    the body is done. If the body fails, `path` is unchanged and the temporary file is removed.
    """
    temporary = path.with_name(path.name + SUFFIX)
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        # Not its name: whoever else can write to the folder may put a link in its place.
        yield Path(f"/proc/self/fd/{descriptor}")
        if not os.path.samestat(os.fstat(descriptor), temporary.lstat()):
            raise OSError(0, f"{temporary} was replaced by something else")
        move(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def move(path: Path, other: Path) -> None:
    """Flush the file at `path` to the disk, rename it to `other` there, and flush the folder."""
    _flush(path)
    path.replace(other)
    flush_folder(other.parent)


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, where its file system can do that."""
    with suppress(OSError):  # some shared ones cannot
        _flush(folder)


@contextmanager
def writing(place: object, fix: str) -> Iterator[None]:
    """Turn an OSError of the body into a UserError that names the file, or else `place`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{error.filename or place} can't be written ({reason}); {fix}") from None


def link(path: Path, other: Path) -> None:
    """Give the file at `path` the name `other` too: a hard link, or a copy where there are none."""
    temporary = other.with_name(other.name + SUFFIX)
    temporary.unlink(missing_ok=True)
    try:
        temporary.hardlink_to(path)
    except OSError:
        with replacing(other) as copy:
            shutil.copyfile(path, copy)
    else:
        try:
            move(temporary, other)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def regular_only(path: str, flags: int) -> int:
    """Open a file, as `opener` of `open`, in a folder that someone else may have filled.

    Raises OSError for a link, which would lead to another file, and for a FIFO or a device.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(0, "it is not a regular file")


def open_regular(path: str | os.PathLike, max_bytes: int = 2**63) -> FileIO:
    """Open a regular file of at most `max_bytes`, or a link to one, for reading.

    Raises OSError if it is another kind of file: reading a FIFO or a device may never end.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, "it is not a regular file", os.fspath(path))
    if status.st_size > max_bytes:
        raise OSError(0, f"it has {status.st_size} bytes, more than {max_bytes}", os.fspath(path))
    return FileIO(path)


def read_text(path: Path, max_bytes: int = MAX_BYTES, errors: str = "strict") -> str:
    """Return the text of a regular file in UTF-8, without a byte order mark; `errors` as in `open`.

    Raises OSError if it is another kind of file or has more than `max_bytes`, which may be a sparse
    file that takes no space on the disk; and ValueError if it is not UTF-8.
    """
    with TextIOWrapper(BufferedReader(open_regular(path, max_bytes)), "utf-8-sig", errors) as file:
        return file.read(max_bytes)  # some files have a size of 0 and no end


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends.

    A process that is stopped, or blocked by a file system, could not do that itself. Python has no
    function for it.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
