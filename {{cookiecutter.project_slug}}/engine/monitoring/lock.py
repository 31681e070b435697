"""Lock of a run's folder, so that two runs do not write to it."""

import fcntl
import itertools
import os
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from engine import UserError, distributed
from engine.data.skipping import RECORD

LEASE_S = 330.0  # for which the server of a disk may keep the lock of a host that is lost
PAUSE_S = 3.0


def wait_limit() -> float:
    """Return how long to wait for the lock, in seconds: in a restart, that of a lost host may last.

    The same in all processes.
    """
    return LEASE_S if distributed.is_restart() else 0.0


class FolderLock:
    """Lock of `folder` until this process exits; child processes do not hold it.

    Args:
        folder: that may not exist yet.
        warning: called with a message if its file system has no locks.
    """

    def __init__(self, folder: Path, warning: Callable[[str], None]) -> None:
        self.folder = folder
        self.file: FileIO | None = None
        self._directory = -1  # descriptor of the folder that was locked
        self._warning = warning

    def acquire(self) -> None:
        """Lock the folder, if there is one; create it again if it was removed since it was locked.

        Raises UserError if another run holds the lock, or the folder was replaced.
        """
        path = self.folder / ".lock"
        if self.file and self._is_locked(path):
            # The lock ends if this process closes any descriptor of the file, as a copy of the
            # folder does, or if the disk's server forgets it.
            self._lock(self.file)
            return
        if self.file:
            self._check_replaced()
        # A link would lead to another file, and to open a FIFO could take for ever.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        while self.folder.exists() and not self._is_locked(path):
            file = os.fdopen(os.open(path, flags, 0o666), "wb", 0)
            try:
                self._lock(file)
            except UserError:
                file.close()  # closed later, it would end a lock that this process has got by then
                raise
            self.file = file

        if self.file and self._directory < 0:
            self._directory = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)

    def _lock(self, file: FileIO) -> None:
        """Lock the file. Raises UserError if another run holds the lock.

        A process that replaces a lost one waits for its lock.
        """
        try:
            self._retry_lock(file, wait_limit() if self.file is None else 0.0)
        except (BlockingIOError, PermissionError):
            fix = "wait until it ends, or add --output with another folder"
            raise UserError(f"another run is writing to {self.folder}: {fix}") from None
        except OSError as error:  # a file system without locks
            problem = f"{self.folder} can't be locked ({error.strerror})"
            self._warning(f"{problem}: start no other run there")

    def _retry_lock(self, file: FileIO, wait_s: float) -> None:
        """Lock the file; retry for `wait_s` seconds if another process holds the lock."""
        for attempt in itertools.count():
            try:
                return fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                if attempt * PAUSE_S >= wait_s:
                    raise
            if attempt == 0:
                problem = f"{self.folder} is locked by another run, or by a lost host"
                self._warning(f"{problem}: waiting for at most {wait_s:.0f} s")
            time.sleep(PAUSE_S)

    def _check_replaced(self) -> None:
        """Raise UserError if the folder that was locked is another one now, with files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        is_same = os.path.samestat(os.fstat(self._directory), self.folder.stat())
        if not is_same and any(one.name != RECORD for one in self.folder.iterdir()):
            raise UserError(f"{self.folder} was replaced while this run wrote to it: it has ended")
        directory = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        os.close(self._directory)
        self._directory = directory

    def _is_locked(self, path: Path) -> bool:
        """Return whether the file that was locked is at `path`, and not one that replaced it."""
        if self.file is None:
            return False
        try:
            return os.path.samestat(os.fstat(self.file.fileno()), path.stat())
        except FileNotFoundError:
            return False
