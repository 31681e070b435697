"""Sees what a busy or waiting training process can't: signals, hangs, a lost launcher."""

import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator

import torch.distributed as dist

LAUNCHER = "ENGINE_LAUNCH_PID"  # the variable in which engine.launch hands on its number
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SAME_S = 1.0  # a cluster signals launcher and processes, and the launcher passes its own on


def leave_with_the_launcher(parent: int) -> None:
    """Ends this process when `parent`, its launcher, is gone: another run may take its place."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def is_gone(process: int) -> bool:
    """Whether there is no process of that number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it is another user's
        pass
    return False


class Watch(threading.Thread):
    """A thread beside the training. The first signal asks it to stop, a second ends it at once.

    Args:
        timeout_s: a step that takes longer, or a batch to be loaded or validated, ends the process,
            which says where it was.
    """

    asked: int = 0  # the signal that asked this process to stop
    place: str = ""  # what it is doing now; if nothing, there is no limit of time
    began: float = 0.0

    def __init__(self, timeout_s: float) -> None:
        super().__init__(name="watch", daemon=True)
        self.timeout_s = timeout_s
        self.asked_at = 0.0

    def start(self) -> None:
        """Begins to watch; signals no longer end the process by themselves."""
        self.pipe, entrance = os.pipe()
        os.set_blocking(entrance, False)
        # Python's own handlers wait until the main thread is back from what it waits for.
        signal.set_wakeup_fd(entrance, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR1,))  # see launch.py
        super().start()
        # This thread has them. What the caller's forks, such as a loader's worker, begins without:
        # it would be ended by one that comes before it can ignore them.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def run(self) -> None:
        """Looks at each signal when it comes, and at the rest once a second."""
        while True:
            came, _, _ = select.select([self.pipe], [], [], 1.0)
            for number in os.read(self.pipe, 64) if came else ():
                if number in SIGNALS:
                    self._note(number)
            place, seconds = Watch.place, time.monotonic() - Watch.began
            if place and seconds > self.timeout_s:
                self._tell(place, seconds)

    def _note(self, number: int) -> None:
        now = time.monotonic()
        if not Watch.asked:
            Watch.asked, self.asked_at = number, now
            if dist.get_rank() == 0:
                name = signal.Signals(number).name
                print(
                    f"{name}: saves after this step and stops; another signal stops it at once",
                    file=sys.stderr,
                    flush=True,
                )
        elif now - self.asked_at > SAME_S:
            os._exit(128 + number)

    def _tell(self, place: str, seconds: float) -> None:
        frame = sys._current_frames()[threading.main_thread().ident]
        stack = "".join(traceback.format_stack(frame))
        print(
            f"error: rank {dist.get_rank()} has been in {place} for {seconds:.0f} s, more than "
            f"--timeout; it is here:\n{stack}",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(1.0)  # in which the others say where they are: one of them is the cause
        os._exit(1)


def begin(place: str) -> None:
    """This process is in `place` now, such as "step 3"; in none, there is no limit of time."""
    Watch.began, Watch.place = time.monotonic(), place


def watched(batches: Iterable, name: str) -> Iterator:
    """Yields `batches`; the time of each begins before it is loaded."""
    begin(f"{name}, batch 1")
    for number, batch in enumerate(batches, 2):
        yield batch
        begin(f"{name}, batch {number}")
    begin("")


def leave_signals_to_the_training(worker: int) -> None:
    """For a data loader's process: a launcher's signal reaches it too, and is not for it."""
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
