"""Kill training runs at random, resume them, and compare each with an undisturbed run bit by bit.

    python benchmarks/chaos.py --kills 1000
    python benchmarks/chaos.py --kills 5 --seed 3
    python benchmarks/chaos.py --kills 100 --ddp fsdp

A run is the generated project's main.py: two epochs on the digits, --deterministic, a checkpoint
every two steps, on one or two CPU processes, with or without a loading worker. It is killed at a
random time in a random way, started again with --resume auto, and so on until it ends by itself.
Then last.pt and metrics.csv must equal those of a run that nothing happened to. After each kill,
all of its processes must have ended within IN_TIME seconds.

Ways of killing: see KINDS. A share of the attempts (--launched) starts run.sh, which imports torch;
the others are forks of a process that has imported it, one for each rank. Prints a table by kind
and writes one row for each kill to --output. Exits with status 1 at the first run that differs, and
for processes that are left.
"""

import argparse
import csv
import multiprocessing
import os
import platform
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch
from cookiecutter.main import cookiecutter
from flags import file_name, whole_number

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))
from fresh import copy_template  # noqa: E402
from running import SCREENED, assert_same_run, become_script, consolidate  # noqa: E402

FLAGS = ("--arch", "mobilenet_v3_small", "--batch-size", "64", "--epochs", "2")
FLAGS += ("--opt-level", "O0", "--deterministic", "--save-every", "2")
IN_TIME = 40.0  # seconds in which the processes of a killed run have ended; to import torch is slow
LIMIT = 300.0  # seconds for an attempt that is not killed
KINDS = {
    "all": "SIGKILL to all processes, as when the machine fails",
    "one": "SIGKILL to one process, and what torchrun then does with the other",
    "stop": "SIGTERM to all, which save and exit",
    "stop, kill": "SIGTERM to all, and SIGKILL up to a second later",
    "saving": "SIGKILL to all while a checkpoint is being written",
    "launcher": "SIGKILL to run.sh's launcher; the processes must end by themselves",
}


class Kill(NamedTuple):
    """A row of the output."""

    run: int
    kind: str
    processes: int
    workers: int
    launched: bool
    seconds: float  # from the start of the attempt to the kill
    exit_seconds: float  # until all processes had ended


class Attempt:
    """Processes that train, and all that they have started."""

    starting = threading.Lock()

    def __init__(self, project: Path, output: Path, processes: int, workers: int) -> None:
        self.flags = [*FLAGS, "--workers", str(workers), "--output", str(output)]
        self.flags += ["--resume", "auto"] if (output / "metrics.csv").exists() else []
        self.log = output.with_suffix(".log")
        self.mark = f"CHAOS={output}"
        self.started = time.monotonic()

    def pids(self) -> set[int]:
        """Return the processes of this attempt that have not ended."""
        found = set()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, IndexError):
                # After the name in brackets: state, parent, group, session.
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                is_ours = int(session) in self.sessions
                is_ours = is_ours or self.mark.encode() in (folder / "environ").read_bytes()
                if is_ours and state != "Z":
                    found.add(int(folder.name))
        return found

    def send(self, number: int) -> None:
        """Send a signal to the processes that a user's or a cluster's signal would reach."""
        for pid in self.targets():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill_all(self) -> None:
        """End everything, at once."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Forked(Attempt):
    """The ranks as forks of a process that has imported torch."""

    def __init__(self, project: Path, output: Path, processes: int, workers: int) -> None:
        super().__init__(project, output, processes, workers)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        variables = SCREENED | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
        variables |= {"MASTER_PORT": port, "WORLD_SIZE": str(processes)}
        variables |= {"LOCAL_WORLD_SIZE": str(processes)} if processes > 1 else {}
        context = multiprocessing.get_context("forkserver")
        self.ranks = []
        for rank in range(processes):
            own = variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            arguments = (project, ["main.py", *self.flags], own, [self.log] * 2)
            self.ranks.append(context.Process(target=be_in_session, args=arguments))
        with self.starting:
            for process in self.ranks:
                process.start()
        self.sessions = {process.pid for process in self.ranks}

    def targets(self) -> list[int]:
        return [process.pid for process in self.ranks if process.pid]

    def kill_one(self, chosen: random.Random) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(chosen.choice(self.targets()), signal.SIGKILL)
        self.send(signal.SIGTERM)  # as torchrun ends the others

    def status(self) -> int | None:
        """Return the exit status once all have ended."""
        if any(process.is_alive() for process in self.ranks):
            return None
        return max((process.exitcode or 0 for process in self.ranks), key=abs)


class Launched(Attempt):
    """run.sh, whose launcher starts the ranks."""

    def __init__(self, project: Path, output: Path, processes: int, workers: int) -> None:
        super().__init__(project, output, processes, workers)
        name, _, value = self.mark.partition("=")
        variables = SCREENED | {"NPROC": str(processes), "OMP_NUM_THREADS": "1", name: value}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [str(project / "run.sh"), *self.flags],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.sessions = {self.process.pid}

    def targets(self) -> list[int]:
        return [self.process.pid]

    def kill_one(self, chosen: random.Random) -> None:
        others = sorted(self.pids() - {self.process.pid})
        with suppress(ProcessLookupError):
            os.kill(chosen.choice(others or [self.process.pid]), signal.SIGKILL)

    def status(self) -> int | None:
        return self.process.poll()


def be_in_session(*arguments: object) -> None:
    """Run main.py in a session of its own, by which its processes are found."""
    os.setsid()
    become_script(*arguments)


def run_with_kills(number: int, seed: int, args: argparse.Namespace, folder: Path) -> list[Kill]:
    """Kill and resume one run until it has ended by itself; return the kills.

    Raises AssertionError if it differs from the undisturbed run, or processes are left.
    """
    chosen = random.Random(f"{seed}/{number}")
    processes, workers = chosen.choice([1, 2]), chosen.choice([0, 1])
    project, output = folder / "project", folder / f"run{number}"
    kills: list[Kill] = []
    while True:
        is_launched = chosen.random() < args.launched
        kinds = set(KINDS) - ({"launcher"} if not is_launched else set())
        kinds -= {"one"} if processes == 1 and not is_launched else set()
        kind = chosen.choice(sorted(kinds))
        delay = chosen.uniform(0, 15 if is_launched else 7)
        attempt = (Launched if is_launched else Forked)(project, output, processes, workers)
        try:
            status = wait_for(attempt, delay, output if kind == "saving" else None)
            if status is None:
                seconds = time.monotonic() - attempt.started
                exit_seconds = kill(attempt, kind, chosen)
                status = attempt.status() if kind == "stop" else None
                kills.append(
                    Kill(number, kind, processes, workers, is_launched, seconds, exit_seconds)
                )
        finally:
            attempt.kill_all()
        if status == 0:
            break
        # A signal before the first step's end finds nothing to save, and has its default effect.
        assert status is None or abs(status) in (15, 128 + 15), attempt.log.read_text()[-3000:]
    consolidate(project, output)
    assert_same_run(output, folder / f"whole{processes}")
    shutil.rmtree(output)
    return kills


def wait_for(attempt: Attempt, seconds: float, saves_in: Path | None) -> int | None:
    """Wait some seconds, and for a save if asked; return the status if the attempt has ended."""
    status = None
    while status is None and time.monotonic() < attempt.started + seconds:
        time.sleep(0.01)
        status = attempt.status()
    while status is None and saves_in and not is_saving(saves_in):
        time.sleep(0.0005)
        status = attempt.status()
        assert time.monotonic() < attempt.started + LIMIT, "a run without a save"
    return status


def is_saving(output: Path) -> bool:
    """Return whether there is a temporary file or folder beside the checkpoints."""
    with suppress(OSError):
        names = os.listdir(output)
        return any(
            ".pt" in name
            and not name.endswith(".pt")
            or name.startswith("step-")
            and name.endswith(".tmp")
            for name in names
        )
    return False


def kill(attempt: Attempt, kind: str, chosen: random.Random) -> float:
    """Kill an attempt; return after how many seconds all of its processes had ended."""
    if kind == "one":
        attempt.kill_one(chosen)
    elif kind == "launcher":
        attempt.send(signal.SIGKILL)
    elif kind.startswith("stop"):
        attempt.send(signal.SIGTERM)
        if kind == "stop, kill":
            time.sleep(chosen.uniform(0, 1))
            attempt.kill_all()
    else:
        attempt.kill_all()
    started = time.monotonic()
    while attempt.status() is None or attempt.pids():
        if kind in ("all", "saving", "stop, kill"):
            attempt.kill_all()  # those that were being started, too
        if time.monotonic() > started + IN_TIME:
            left = [Path(f"/proc/{pid}/status").read_text()[:200] for pid in attempt.pids()]
            log = attempt.log.read_text(errors="replace")[-3000:]
            raise AssertionError(f"{kind}: after {IN_TIME} s, {left} are left; {log}")
        time.sleep(0.02)
    return time.monotonic() - started


def generate(folder: Path, ddp: str) -> Path:
    """Generate the default project, except for `ddp`, in `folder`."""
    template = folder / "template"
    template.mkdir()
    copy_template(template)
    answers = {"ddp": ddp}
    if ddp == "fsdp":
        answers |= {"opt_level": "O0", "sync_bn": False}
    made = cookiecutter(
        str(template),
        no_input=True,
        default_config=True,
        output_dir=str(folder),
        extra_context=answers,
    )
    return Path(made).rename(folder / "project")


def undisturbed(folder: Path, processes: int) -> None:
    """Train the run that the others are compared with."""
    attempt = Forked(folder / "project", folder / f"whole{processes}", processes, 0)
    try:
        status = wait_for(attempt, LIMIT, None)
    finally:
        attempt.kill_all()
    assert status == 0, attempt.log.read_text()
    consolidate(folder / "project", folder / f"whole{processes}")


def summarize(kills: list[Kill]) -> str:
    """Return a table of the kills by kind."""
    lines = ["| kill | forked | by run.sh | longest exit, s |", "|---|---|---|---|"]
    for kind, meaning in KINDS.items():
        counts = Counter(one.launched for one in kills if one.kind == kind)
        longest = max((one.exit_seconds for one in kills if one.kind == kind), default=0)
        lines.append(f"| {meaning} | {counts[False]} | {counts[True]} | {longest:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=whole_number, default=1000)
    parser.add_argument("--jobs", type=whole_number, default=2, help="runs at once")
    parser.add_argument("--launched", type=float, default=0.1, help="share of attempts by run.sh")
    parser.add_argument("--ddp", choices=("apex", "torch", "fsdp"), default="apex")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=file_name, default=HERE / "chaos.csv")
    args = parser.parse_args()
    # Also of the server: its forks keep the number of threads of the time when it imported torch.
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torchvision", "tensorboard.summary"])
    kills: list[Kill] = []
    runs = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        generate(folder, args.ddp)
        for processes in (1, 2):
            undisturbed(folder, processes)
        with ThreadPoolExecutor(args.jobs) as pool, args.output.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(Kill._fields)
            pending = {
                pool.submit(run_with_kills, number, args.seed, args, folder)
                for number in range(args.jobs)
            }
            number = args.jobs
            while pending:
                done = next(as_completed(pending))
                pending.remove(done)
                kills += done.result()
                runs += 1
                writer.writerows(done.result())
                file.flush()
                print(f"{runs} runs equal the undisturbed one, {len(kills)} kills", flush=True)
                if len(kills) < args.kills:
                    pending.add(pool.submit(run_with_kills, number, args.seed, args, folder))
                    number += 1
    print(f"\n{date.today()}, {os.cpu_count()} cores, Python {platform.python_version()}, ", end="")
    print(f"torch {torch.__version__}\n\n{summarize(kills)}\n")
    print(f"{len(kills)} kills in {runs} runs: each is bit-identical, and no process is left.")


if __name__ == "__main__":
    main()
