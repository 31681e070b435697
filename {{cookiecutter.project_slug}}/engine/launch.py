"""torchrun with clear messages and exit statuses, for run.sh.

python -m engine.launch [torchrun's options] main.py [flags of main.py]

Calls torchrun's own entry point, after serving the store by which its processes find each other: on
a single host only on the loopback interface, on several at MASTER_ADDR.
"""

import contextlib
import logging
import os
import re
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import NoReturn

from engine import EXIT_USAGE, UserError, end_with_parent, print_error

LAUNCHER = "ENGINE_LAUNCH_PID"  # environment variable with the process id of the launcher
LAUNCH_ID = "ENGINE_LAUNCH_ID"  # the same with an id that all launchers of a job share
IN_RANK = "ENGINE_IN_RANK"  # the same, set in processes that a training process starts
RESTART = "ENGINE_RESTART"  # the same with the reason, in processes that replace others
USAGE_SIGNAL = signal.SIGUSR2  # makes the launcher exit with EXIT_USAGE
STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, USAGE_SIGNAL}
SIGNALS = STOP_SIGNALS | {signal.SIGUSR1, signal.SIGCHLD}
REPEAT_S = 1.0  # a cluster signals launcher and processes, and the launcher forwards its own
POLL_S = 0.2
ANNOUNCE_S = 2.0  # for the launchers of other hosts to read of a failure
End = signal.struct_siginfo | os.waitid_result  # how a process ended: of SIGCHLD, or of waitid
KILL_S = 5.0  # for the end of processes after SIGKILL, such as those that write


def main() -> None:
    """Run torchrun; exit with 0, the first failing process's status, or 128 + its signal."""
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ.pop(IN_RANK, None)
    os.environ[LAUNCH_ID] = secrets.token_hex(8)
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]  # torchrun reads the options that run.sh does not set from these
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, a failed process would exit with 0
    signals = SignalThread()
    signals.start()
    status, message = _run(os.environ.get("NNODES") or "1", signals)
    if status and signals.is_stopping:
        signals.join()  # exits
    if message:
        print_error(message)
    sys.stdout.flush()
    sys.stderr.flush()
    # Python's finalization aborts the process if a daemon thread, torchrun's or ours, uses a store.
    os._exit(status)


def _run(nodes: str, signals: "SignalThread") -> tuple[int, str]:
    """Return the exit status, and an error message unless a process has logged one."""
    # torch reads the level when it is imported. The launcher reports errors itself; the processes'
    # errors are logged.
    level = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")
    if level == "ERROR":
        os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    # Imported here, for seconds, in which signals have their effect already.
    import torch.distributed as dist
    from torch.distributed import run
    from torch.distributed.elastic import rendezvous
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from engine.distributed.network import (
        ELSEWHERE,
        HAS_FAILED,
        RESUME,
        announce_failure,
        join_hosts,
        serve_locally,
    )

    os.environ["TORCH_CPP_LOG_LEVEL"] = level
    logging.disable(logging.ERROR)  # processes that fail log the cause themselves
    try:
        server, job, options = serve_locally() if nodes == "1" else join_hosts(nodes)
        signals.on_failure = partial(announce_failure, job)
        sys.addaudithook(signals.delay_restart)
        run.main([*options, *sys.argv[1:]])
    except UserError as error:
        return EXIT_USAGE, str(error)
    except ChildFailedError as error:
        signals.on_failure()
        time.sleep(ANNOUNCE_S if job else 0)
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode, ""
        return 128 - failure.exitcode, f"rank {rank} was ended by {_name_signal(-failure.exitcode)}"
    except rendezvous.RendezvousTimeoutError:
        wait = f"{os.environ.get('NODE_WAIT') or 600} s (NODE_WAIT)"
        return 1, f"fewer than NNODES={nodes} hosts joined within {wait}: {RESUME}"
    except rendezvous.RendezvousClosedError:
        return 1, ELSEWHERE
    except (rendezvous.RendezvousError, dist.DistError) as error:
        if HAS_FAILED.is_set():  # that host served the store
            return 1, ELSEWHERE
        reason = str(error.__cause__ or error).splitlines()[0]
        where = os.environ.get("MASTER_ADDR")
        return 1, f"the store at MASTER_ADDR={where} does not answer ({reason}): {RESUME}"
    except Exception:  # such as no memory for a process
        signals.on_failure()
        traceback.print_exc()
        return 1, ""
    return 0, ""


class SignalThread(threading.Thread):
    """Receiver of the launcher's signals; it forwards them to the processes of this host.

    The signals are blocked in all threads, so that torchrun's handlers are never called: they raise
    an exception wherever the main thread is, possibly in a lock that it never releases then. The
    processes start with the signals blocked, and unblock them when they can handle them.

    Attributes:
        is_stopping: the thread is ending the processes, and ends the launcher after them.
        known: processes of the training, but for those whose end has been handled.
        on_failure: called before the launcher exits because its processes have failed or stopped.
    """

    def __init__(self) -> None:
        super().__init__(name="signals", daemon=True)
        self.is_stopping = False
        self.known: set[int] = set()
        self.on_failure: Callable[[], object] = lambda: None
        # nohup ignores SIGHUP; torchrun would handle it.
        self.is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def run(self) -> None:
        """Handle signals, SIGUSR1 only once there are processes."""
        num_processes = int(re.findall(r"--nproc-per-node=(\d+)", " ".join(sys.argv))[0])
        is_single_host = os.environ.get("NNODES", "1") in ("", "1")
        must_save, is_first_failure = False, True
        others: set[int] = set()  # such as what a training process left to this one, as PID 1
        while True:
            received = signal.sigtimedwait(SIGNALS, POLL_S)
            number = received.si_signo if received else 0
            children = _children()
            _reap_orphans(children)
            processes = _processes(children)
            ended = {process for process in self.known if not _is_running(process)}
            known = (self.known | processes) - ended
            if number in STOP_SIGNALS and not (number == signal.SIGHUP and self.is_nohup):
                self._end_processes(number, known)
            must_save = must_save or number == signal.SIGUSR1
            if must_save and processes:
                _send(signal.SIGUSR1, processes)
                must_save = False
            # SIGCHLD is one signal for several processes; torchrun may have noticed their ends.
            ends: list[End] = [end for end in map(_end_of, ended) if end]
            if received and number == signal.SIGCHLD and received.si_pid not in others:
                ends.append(received)
            others = {*children} - known
            failure = next(filter(None, map(_describe_failure, ends)), "")
            # Someone's signal to one process, before it could save. On several hosts, it may be
            # torchrun's, for a restart; on one, torchrun ends processes only after a failure.
            is_only_one = is_first_failure and len(processes) == num_processes - 1
            stopped = [*filter(_was_stopped, ends)]
            if stopped and is_only_one and is_single_host:
                self._end_processes(stopped[0].si_status, known)
            if failure and is_first_failure:
                is_first_failure = False
                os.environ[RESTART] = failure
            elif len(processes) == num_processes:
                is_first_failure = True
                os.environ[RESTART] = "a host has joined or left"
            self.known = known

    def delay_restart(self, event: str, _: object) -> None:
        """Wait, as an audit hook, before torchrun starts a process in place of one that has ended.

        torchrun may notice an end first, but only this thread can tell whether the job is to end.
        """
        while event == "subprocess.Popen" and (
            self.is_stopping or not all(map(_is_running, self.known))
        ):
            time.sleep(0.01)

    def _end_processes(self, number: int, processes: set[int]) -> NoReturn:
        """End the processes, within STOP_WAIT seconds or at the next signal, and then this one."""
        self.is_stopping = True
        if number != USAGE_SIGNAL:  # which comes from a process, after which all end
            for process in processes:
                _send(signal.SIGKILL if _is_starting(process) else number, {process})
        limit, started = int(os.environ.get("STOP_WAIT") or 30), time.monotonic()
        while any(map(_is_running, processes)):
            received = signal.sigtimedwait(STOP_SIGNALS, 0.05)
            seconds = time.monotonic() - started
            if received and received.si_pid not in processes and seconds > REPEAT_S:
                break
            if seconds > limit:
                print_error(f"processes are killed that have not ended in {limit} s (STOP_WAIT)")
                break
        if processes:
            self.on_failure()
        kill_processes(processes)  # and others that torchrun has started since the signal
        os._exit(EXIT_USAGE if number == USAGE_SIGNAL else 128 + number)


def _children() -> dict[int, list[bytes]]:
    """Return what follows the name in /proc/PID/stat, for each child: [0] state, [3] session."""
    threads = os.listdir("/proc/self/task")
    children = map(int, b"".join(_read(f"self/task/{one}/children") for one in threads).split())
    return {child: _read(f"{child}/stat").rpartition(b")")[2].split() for child in children}


def _processes(children: dict[int, list[bytes]]) -> set[int]:
    """Return those of the children that torchrun has started, as processes of the training.

    Orphans of these, which a launcher with PID 1 adopts, are in one of their sessions or have
    IN_RANK. A process that is being started has no command line yet.
    """
    leaders = [child for child, stat in children.items() if stat[3:4] == [b"%d" % child]]
    running = [child for child in leaders if children[child][0] != b"Z"]
    environs = {one: _read(f"{one}/cmdline") and b"\0" + _read(f"{one}/environ") for one in running}
    ranks = {one for one, text in environs.items() if not text or b"\0LOCAL_RANK=" in text}
    return {child for child in ranks if f"\0{IN_RANK}=".encode() not in environs[child]}


def _reap_orphans(children: dict[int, list[bytes]]) -> None:
    """Remove ended processes that training processes have left to this one, as PID 1.

    They are in the session of a training process, which torchrun starts in one of its own.
    """
    for child, stat in children.items():
        if stat[:1] == [b"Z"] and int(stat[3]) not in (child, os.getsid(0)):
            os.waitpid(child, os.WNOHANG)


def running_processes(known: Collection[int] = ()) -> set[int]:
    """Return the processes that torchrun has started on this host, and of `known`, that run."""
    return set(filter(_is_running, {*known, *_processes(_children())}))


def kill_processes(known: Collection[int] = ()) -> None:
    """Kill the processes that torchrun has started on this host.

    Waits for their end, but not for long: those that write hold their locks until then.
    """
    running = running_processes(known)
    _send(signal.SIGKILL, running)
    deadline = time.monotonic() + KILL_S
    while any(map(_is_running, running)) and time.monotonic() < deadline:
        time.sleep(0.05)
    _send(signal.SIGKILL, _processes(_children()))  # torchrun may have been starting them


def end_with_launcher() -> None:
    """Exit when the launcher does, now or later; do nothing in a process without one."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    end_with_parent()
    state = _read(f"{os.environ.get(LAUNCHER, 'self')}/stat").rpartition(b")")[2].split()[:1]
    if state in ([], [b"Z"]):  # ended meanwhile; unless killed, it has logged why
        os._exit(1)


def _is_running(process: int) -> bool:
    """Return whether a child has threads left: while one of them writes, it holds its locks."""
    with contextlib.suppress(ChildProcessError):  # torchrun has noticed its end
        return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    return False


def _end_of(process: int) -> os.waitid_result | None:
    """Return how a child has ended; None if it runs, or torchrun has noticed its end."""
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return None


def _read(name: str) -> bytes:
    """Return the content of a file about a process or thread; nothing if it has ended."""
    with contextlib.suppress(OSError):
        return Path("/proc", name).read_bytes()
    return b""


def _send(number: int, processes: set[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def _is_starting(process: int) -> bool:
    """Return whether a process has not unblocked SIGTERM yet; it may handle it in a thread."""
    masks = dict(re.findall(rb"^Sig(Blk|Cgt):\s+(\w+)$", _read(f"{process}/status"), re.MULTILINE))
    unhandled = int(masks.get(b"Blk", "0"), 16) & ~int(masks.get(b"Cgt", "0"), 16)
    return bool(unhandled >> (signal.SIGTERM - 1) & 1)


def _was_stopped(end: End) -> bool:
    """Return whether a process was ended by a signal to stop."""
    return end.si_code == os.CLD_KILLED and end.si_status in (signal.SIGTERM, signal.SIGHUP)


def _describe_failure(end: End) -> str:
    """Return how a process failed; an empty string if it did not fail."""
    status = end.si_status  # or signal
    if status in (0, signal.SIGTERM, 128 + signal.SIGTERM):  # torchrun stops processes by SIGTERM
        return ""
    if end.si_code == os.CLD_EXITED:
        return f"process {end.si_pid} exited with status {status}"
    return f"process {end.si_pid} was ended by {_name_signal(status)}"


def _name_signal(number: int) -> str:
    is_named = number in {*signal.Signals}  # real-time signals are not
    return signal.Signals(number).name if is_named else f"signal {number}"


if __name__ == "__main__":
    main()
