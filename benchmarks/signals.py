"""Send signals to launchers at random times, and check that each of them ends.

    python benchmarks/signals.py --signals 50000

A launcher is engine.launch, as run.sh starts it, in a fork of a process that has imported torch.
It starts a worker that stops at SIGTERM after a random time, or ignores all signals but SIGKILL.
It gets SIGUSR1, SIGCHLD, SIGWINCH and SIGCONT, and then, from a random moment on, signals that stop
it, until it has ended. It must end within LIMIT seconds, with 128 + one of the signals, and so must
its worker.

A signal that arrives while one of its kind is pending is merged with it by the kernel; those that
are counted were sent to a launcher that had not ended. Prints the counts by signal and the longest
time from the first stop signal to the exit.
"""

import argparse
import contextlib
import multiprocessing
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import torch
from flags import whole_number

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent / "{{cookiecutter.project_slug}}"
sys.dont_write_bytecode = True  # cookiecutter would take the caches for a part of the template
STOP_WAIT = 2  # seconds that the launcher gives its worker
LIMIT = STOP_WAIT + 8.0
LEFT_S = 10.0  # for a worker to be ended by SIGKILL, or to start and miss its launcher
HARMLESS = (signal.SIGUSR1, signal.SIGCHLD, signal.SIGWINCH, signal.SIGCONT)
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
WORKER = """\
import os, random, signal, sys, time
def stop(number, _):
    time.sleep(random.random() * 0.2)
    os._exit(128 + number)
handler = signal.SIG_IGN if random.random() < 0.05 else stop
if os.getppid() != int(os.environ["ENGINE_LAUNCH_PID"]):  # as main.py looks for its launcher
    sys.exit("the launcher is gone")
for number in (1, 2, 3, 15):
    signal.signal(number, handler)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
time.sleep(600)
"""


def launch(folder: Path) -> None:
    """Turn this process into a launcher of one worker."""
    for number in (*HARMLESS, *STOPPING):  # multiprocessing would turn a SIGINT into status 1
        signal.signal(number, signal.SIG_DFL)
    os.setsid()  # tells `disturb` that signals may come
    os.chdir(folder)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"STOP_WAIT": str(STOP_WAIT), "PYTHONPATH": str(PROJECT)}
    sys.path.insert(0, str(PROJECT))
    sys.argv = ["launch", "--nproc-per-node=1", "--max-restarts=0", str(folder / "worker.py")]
    from engine import launch

    launch.main()


def disturb(seed: str, folder: Path) -> tuple[Counter, float]:
    """Start a launcher and end it by signals; return what was sent, and how long the end took.

    Raises AssertionError if it does not end in time, its status is wrong, or its worker is left.
    """
    chosen = random.Random(seed)
    process = multiprocessing.get_context("forkserver").Process(target=launch, args=(folder,))
    process.start()
    assert process.pid is not None
    while process.is_alive() and os.getsid(process.pid) != process.pid:
        time.sleep(0.001)
    sent: Counter = Counter()
    stops_at = time.monotonic() + chosen.uniform(0.1, 1.5)
    while time.monotonic() < stops_at + LIMIT:
        is_stopping = time.monotonic() >= stops_at
        number = chosen.choice(STOPPING if is_stopping else HARMLESS)
        if not process.is_alive():
            break
        with contextlib.suppress(ProcessLookupError):
            # Before it has blocked them, signals have their default effect on any program.
            if is_stopping or blocks_signals(process.pid):
                os.kill(process.pid, number)
                sent[number.name] += 1
        time.sleep(chosen.expovariate(1 / 0.01))
    seconds = time.monotonic() - stops_at
    text = (folder / "log").read_text(errors="replace")[-2000:] if (folder / "log").exists() else ""
    try:
        assert not process.is_alive(), f"seed {seed}: a launcher hangs; {text}"
        expected = {128 + number for number in STOPPING} | {-number for number in STOPPING}
        assert process.exitcode in expected, f"seed {seed}: status {process.exitcode}; {text}"
        left, deadline = session(process.pid), time.monotonic() + LEFT_S
        while left and time.monotonic() < deadline:
            time.sleep(0.02)
            left = session(process.pid)
        states = [Path(f"/proc/{pid}/status").read_text()[:300] for pid in left]
        assert not left, f"seed {seed}: processes are left: {states}; {text}"
    finally:
        for pid in session(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return sent, seconds


def blocks_signals(pid: int) -> bool:
    """Return whether a launcher has begun to handle signals."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigBlk:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def session(launcher: int) -> list[int]:
    """Return the launcher and its workers, which name it in their environment, if they live."""
    found = []
    mark = f"ENGINE_LAUNCH_PID={launcher}\0".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            is_ours = folder.name == str(launcher) or mark in (folder / "environ").read_bytes()
            if is_ours and state != "Z":
                found.append(int(folder.name))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--signals", type=whole_number, default=50_000)
    parser.add_argument("--jobs", type=whole_number, default=4, help="launchers at once")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.run"])
    total: Counter = Counter()
    launches, longest = 0, 0.0
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(args.jobs) as pool:
        while total.total() < args.signals:
            folders = []
            for number in range(launches, launches + args.jobs):
                folder = Path(name, str(number))
                folder.mkdir()
                (folder / "worker.py").write_text(WORKER)
                folders.append((f"{args.seed}/{number}", folder))
            for sent, seconds in pool.map(lambda pair: disturb(*pair), folders):
                total += sent
                launches += 1
                longest = max(longest, seconds)
            if launches % (25 * args.jobs) == 0:
                print(f"{total.total()} signals to {launches} launchers", flush=True)
    print(f"\n{date.today()}, {os.cpu_count()} cores, Python {platform.python_version()}, ", end="")
    print(f"torch {torch.__version__}\n")
    print(", ".join(f"{name} {count}" for name, count in sorted(total.items())))
    print(
        f"{total.total()} signals to {launches} launchers: each ended with the status of a signal, "
        f"at most {longest:.1f} s after the first one that stops it, and left no process."
    )


if __name__ == "__main__":
    main()
