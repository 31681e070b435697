"""Detection of what a busy or waiting training process cannot notice: hangs and signals.

Python runs signal handlers in the main thread, which may be waiting in a collective for minutes; so
threads do this work.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import torch.distributed as dist

from engine import log_line, print_error
from engine.distributed.peers import exit_process, peer_monitor
from engine.launch import LAUNCHER, REPEAT_S

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
RESTART_S = 2.0  # in which torchrun stops the processes of all hosts, to restart with another one
TURN_S = 1.0
LINGER_S = 1.0  # in which all processes that hang log where they are


class StopSignals(threading.Thread):
    """Receiver of the signals that ask the job to stop.

    The first signal sets `requested`; the caller saves and exits after the current step or batch
    of the validation. A second one, at least REPEAT_S later, ends the process at once.
    """

    def __init__(self) -> None:
        super().__init__(name="stop signals", daemon=True)
        self.requested = 0
        self.requested_at = 0.0
        self.received = threading.Event()
        self.rank = self.pipe = -1

    def start(self) -> None:
        """Start to receive signals; they no longer end the process by themselves."""
        self.rank = dist.get_rank()
        self.pipe, pipe_end = os.pipe()
        os.set_blocking(pipe_end, False)
        # Python's own handlers would wait until the main thread returns from a collective.
        signal.set_wakeup_fd(pipe_end, warn_on_full_buffer=False)
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # by nohup
                signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR1,))  # see launch.py
        super().start()
        # This thread receives them. Processes that the caller forks, such as a loader's workers,
        # start with them blocked: one that came before `ignore_stop_signals` would end them.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def exit_together(self, number: int, group: dist.ProcessGroup) -> NoReturn:
        """Exit with 128 + `number`, after all processes of `group` have come here.

        torchrun sends SIGTERM to restart the processes of an elastic job, on all hosts when one of
        them detects another. A launcher that has not done so yet would take the end of its
        processes for a failure, and one that has is not to exit.
        """
        if ":" in os.environ.get("NNODES", ""):
            self.received.wait(RESTART_S)
            if self.requested == signal.SIGTERM:
                os.environ.pop(LAUNCHER, None)
        dist.barrier(group)  # a launcher ends all others as soon as one exits
        exit_process(128 + number)

    def run(self) -> None:
        """Handle each signal when it comes."""
        while True:
            for number in os.read(self.pipe, 64):
                if number in SIGNALS:
                    self._receive(number)

    def _receive(self, number: int) -> None:
        monitor = peer_monitor()
        if monitor and monitor.is_ending:  # the launcher ends the job
            return
        now = time.monotonic()
        if not self.requested:
            self.requested, self.requested_at = number, now
            self.received.set()
            if self.rank == 0 and dist.is_initialized():  # else the run has just ended
                log_line(
                    f"{signal.Signals(number).name}: saves after this step, or batch of the "
                    "validation, and stops; another signal stops it at once"
                )
        elif now - self.requested_at > REPEAT_S:
            os._exit(128 + number)


class Watchdog(threading.Thread):
    """Limit on the time of each training step, and of each batch that is loaded or validated.

    A process that exceeds it logs where it is, with its stack, and exits. Time in which the whole
    process is paused, as by Ctrl-Z, does not count.

    Args:
        timeout_s: the limit; it holds between `enter` and the next `enter` or `leave`, once the
            thread is started.
    """

    def __init__(self, timeout_s: float) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.timeout_s = timeout_s
        self.place = ""
        self.entered_at = 0.0
        self.is_done = threading.Event()

    def enter(self, place: str) -> None:
        """Start measuring the time of `place`, such as "step 3"."""
        self.entered_at = time.monotonic()
        self.place = place

    def leave(self) -> None:
        """Stop measuring: there is no limit until the next `enter`."""
        self.place = ""

    def watch(self, batches: Iterable, name: str) -> Iterator:
        """Yield `batches`; the time of each starts before it is loaded."""
        self.enter(f"{name}, batch 1")
        for number, batch in enumerate(batches, 2):
            yield batch
            self.enter(f"{name}, batch {number}")
        self.leave()

    def run(self) -> None:
        """Compare the time with the limit once a second."""
        entered_at = seconds = 0.0
        while True:
            started = time.monotonic()
            if self.is_done.wait(TURN_S):
                return
            place = self.place  # first: `enter` sets it last
            if entered_at != self.entered_at:
                started = entered_at = self.entered_at
                seconds = 0.0
            seconds += min(time.monotonic() - started, 2 * TURN_S)
            if place and seconds > self.timeout_s:
                _exit_from(place, seconds)


@contextmanager
def time_limit(place: str, timeout_s: float) -> Iterator[None]:
    """Exit, as the watchdog does, if the body takes longer, such as on a disk that hangs."""
    watchdog = Watchdog(timeout_s)
    watchdog.enter(place)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.is_done.set()


def _exit_from(place: str, seconds: float) -> None:
    """Exit after logging for how long, and where in the code, the main thread is in `place`."""
    rank = os.environ.get("RANK", 0)
    hang = f"rank {rank} has been in {place} for {seconds:.0f} s, more than --timeout"
    # A thread, because the disk that hangs may be that of the lines of code.
    thread = threading.Thread(target=_log_position, args=(hang,), daemon=True)
    with suppress(RuntimeError):  # at the limit of threads
        thread.start()
        thread.join(LINGER_S / 2)
    if thread.is_alive() or thread.ident is None:
        print_error(f"{hang}; its position in the code takes long to read")
    time.sleep(LINGER_S)  # the others log where they are: one of them is the cause
    exit_process(1)


def _log_position(hang: str) -> None:
    # Documented despite its name; faulthandler's format would lack the lines of code.
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    print_error(f"{hang}; it is here:\n{''.join(traceback.format_stack(frame))}")


def ignore_stop_signals() -> None:
    """Ignore the signals in a data loader's worker: the launcher's reach it, too."""
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
