"""Preflight checks: ``./run.sh --check`` tests the host and the settings in CHECK_WAIT s.

python -m engine.diagnostics.preflight [torchrun's options] main.py --check [--json] [flags]

Child processes run the checks: one without torch (CHECKS), one for each rank (rank_checks.py) and
main.py (checks.py). Each writes results to a file as they come. So a child that crashes or hangs
(torch, driver, NCCL) loses the rest only; a check that may hang sends beforehand what that means.
"""

import json
import os
import platform
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from textwrap import shorten
from typing import NoReturn

from engine import EXIT_USAGE, UserError, end_with_parent, module_command, summarize
from engine.text import printable

Results = Iterator[tuple[str, str]]  # status and text; the last one counts
Report = dict[tuple[str, str], tuple[str, str]]  # the same, by child and check
Commands = dict[str, tuple[list[str], dict[str, str]]]  # with the environment, by child

MIB = 2**20
GIB = 2**30
OK = "ok"
WARNING = "warning"
ERROR = "error"
PENDING = "pending"  # until the check has its first result
SYMBOLS = {OK: "✓", WARNING: "!", ERROR: "✗"}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
RESULTS = "ENGINE_CHECK_RESULTS"  # environment variable with the path of a child's file for results
DEADLINE = "ENGINE_CHECK_DEADLINE"  # the same with the time.monotonic() at which it is stopped
HOST = "host"  # the child that needs no torch
RANK_0 = "rank 0"
MAIN = "main.py"
DRIVER_TIMEOUT_S = 7.0  # nvidia-smi takes seconds where the driver is not kept loaded
CHECK_WAIT_S = int(os.environ.get("CHECK_WAIT") or 20)
TIMEOUT_S = CHECK_WAIT_S - 3.0  # for the children; starting and stopping them takes the rest


# Checks that need no torch
def nvidia_smi(*arguments: str) -> str:
    """Return the output of nvidia-smi; none if it is missing. Raises UserError if it fails."""
    command = ["nvidia-smi", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_TIMEOUT_S)
    except (FileNotFoundError, PermissionError):  # such as a folder in PATH that is closed
        return ""
    except subprocess.TimeoutExpired:
        raise UserError("nvidia-smi does not answer: search dmesg for errors, and reboot") from None
    if done.returncode:
        reason = (done.stdout + done.stderr).split("\n")[0]
        fix = "reboot after an update of the driver, or reinstall it; in a container use --gpus all"
        raise UserError(f"nvidia-smi fails ({reason}): {fix}")
    return done.stdout


@lru_cache
def gpus() -> list[list[str]]:
    """Return the name and the driver version of each GPU that the driver lists."""
    table = nvidia_smi("--query-gpu=name,driver_version", "--format=csv,noheader")
    return [line.split(", ") for line in table.splitlines()]


def num_hosts() -> int:
    """Return the number of hosts of the job."""
    return int(os.environ.get("NNODES") or 1)


def num_processes() -> int:
    """Return the number of processes of the job, if all hosts have as many as this one."""
    return num_hosts() * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def check_python() -> Results:
    """Show the version of Python; run.sh requires 3.10."""
    yield OK, f"{platform.python_version()} at {sys.executable}"


def check_driver() -> Results:
    """List the GPUs and the version of their driver."""
    if gpus():
        counts = Counter(name for name, _ in gpus())
        names = ", ".join(f"{count} × {name}" for name, count in counts.items())
        yield OK, f"{gpus()[0][1]}, {names}"
    else:
        yield WARNING, "there is no NVIDIA GPU (nvidia-smi lists none): training runs on the CPU"


def check_links() -> Results:
    """Check the link between each pair of GPUs: NVLink, PCIe, or only the bus between CPUs."""
    if len(gpus()) < 2:
        return
    matrix = re.sub(r"\x1b\[\d*m", "", nvidia_smi("topo", "-m"))  # the header is underlined
    rows = [row.split() for row in matrix.splitlines() if re.match(r"GPU\d", row)]
    numbers = list(range(len(rows)))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if re.fullmatch(r"[\d,]+", visible):  # not UUIDs
        numbers = [number for number in numbers if str(number) in visible.split(",")]
    pairs = combinations(numbers, 2)
    links = {f"{rows[one][0]}–{rows[two][0]}": rows[one][1 + two] for one, two in pairs}
    if not links:
        return
    names = ", ".join(sorted(set(links.values())))
    if slow := [pair for pair, link in links.items() if link in ("NODE", "SYS")]:
        fix = "choose closer GPUs with CUDA_VISIBLE_DEVICES"
        yield WARNING, f"{summarize(slow)} have slow links, through the CPUs ({names}): {fix}"
    else:
        yield OK, f"{names} between the GPUs (terms of nvidia-smi topo -m)"


def check_open_files() -> Results:
    """Check the limit of open files: each tensor from a data loader's worker is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1024:
        fix = "ulimit -n 4096" if soft < hard or hard < 0 else "have the hard limit raised"
        yield WARNING, f"the limit of {soft} is too low for data loader workers: {fix}"
    else:
        yield OK, f"the limit is {soft}"


def check_rendezvous() -> Results:
    """Check that, with several hosts, MASTER_ADDR is known, and an address of the first one."""
    if num_hosts() == 1:
        return
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ.get("MASTER_PORT") or 29500)
    try:
        address = socket.gethostbyname(host)
        if os.environ["NODE_RANK"] == "0":
            with socket.socket() as server:
                server.bind((address, 0))  # not MASTER_PORT: rank 0 may already listen there
    except socket.gaierror as error:
        raise UserError(f"MASTER_ADDR={host} is unknown ({error}): use an IP address") from None
    except OSError as error:
        problem = f"NODE_RANK=0 can't listen at MASTER_ADDR={host} ({error.strerror})"
        raise UserError(f"{problem}: use an address of this host") from None
    yield OK, f"{num_hosts()} hosts, at {host}, port {port}"


CHECKS = {
    "Python": check_python,
    "driver": check_driver,
    "links": check_links,
    "open files": check_open_files,
    "rendezvous": check_rendezvous,
}


# In a child process
def run_checks(checks: dict[str, Callable[[], Results]]) -> bool:
    """Run each check and send its results; return whether none is an error."""
    succeeded = True
    for name, check in checks.items():
        send(name, PENDING, "the check did not finish")
        result = (PENDING, "")  # nothing to show
        try:
            for result in check():
                send(name, *result)
        except UserError as error:
            result = (ERROR, str(error))
        except Exception as error:
            result = (ERROR, f"the check failed with {type(error).__name__}: {error}")
        send(name, *result)
        succeeded = succeeded and result[0] != ERROR
    return succeeded


def send(name: str, status: str, text: str) -> None:
    """Write a result to the file that the parent process reads."""
    with Path(os.environ[RESULTS]).open("a") as file:
        file.write(json.dumps([name, status, shorten(text, 600)]) + "\n")


# In the parent process
def make_commands(script: str, num_ranks: int, flags: list[str]) -> Commands:
    """Return the command line and the environment of each child."""
    paths = [str(Path(script).resolve().parent), os.environ.get("PYTHONPATH", "")]
    launcher = ("RANK", "LOCAL_RANK", "TORCHELASTIC_")  # a launcher may have started this process
    environment = {name: v for name, v in os.environ.items() if not name.startswith(launcher)}
    environment.update(
        PYTHONPATH=os.pathsep.join(filter(None, paths)),
        NCCL_DEBUG="WARN",
        LOCAL_WORLD_SIZE=str(num_ranks),
        **{DEADLINE: str(time.monotonic() + TIMEOUT_S)},
    )
    commands = {HOST: (module_command("engine.diagnostics.preflight"), environment)}
    group = {"WORLD_SIZE": str(num_ranks * num_hosts())}
    group["MASTER_PORT"] = os.environ.get("MASTER_PORT") or "29500"
    if num_hosts() == 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            group.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    first_rank = num_ranks * int(os.environ.get("NODE_RANK") or 0)
    for local_rank in range(num_ranks):
        ranks = {"RANK": str(first_rank + local_rank), "LOCAL_RANK": str(local_rank)}
        command = module_command("engine.diagnostics.rank_checks")
        commands[f"rank {local_rank}"] = (command, environment | group | ranks)
    commands[MAIN] = ([sys.executable, script, *flags], environment)
    return commands


class Child:
    """Child process that runs checks."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        self.name = name
        # Not the other ranks: they may wait forever for a rank 0 that failed.
        self.is_awaited = name in (HOST, RANK_0, MAIN)
        self.status: int | None = None  # None: it did not exit in time
        self.results = tempfile.NamedTemporaryFile("r")  # noqa: SIM115, read after the process
        self.log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115, the same
        self.process = subprocess.Popen(
            command,
            env=environment | {RESULTS: self.results.name},
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,  # main.py imports torch for seconds; no threads run here
        )

    def stop(self) -> None:
        """Store the exit status, and kill the process and its children if it still runs."""
        self.status = self.process.poll()
        if self.status is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def read_results(self) -> dict[str, tuple[str, str]]:
        """Return the last status and text of each check."""
        lines = map(json.loads, self.results)
        return {check: (status, text) for check, status, text in lines}

    def failure(self, has_sent: bool) -> tuple[str, str]:
        """Return the check and the text that describe why this child failed."""
        status = self.status
        self.log.seek(0)
        lines = [line for line in self.log if line.strip()]
        warnings = [line for line in lines if "NCCL WARN" in line]
        message = shorten((warnings or lines or ["no output"])[-1], 300)
        if status and (has_sent or status == -signal.SIGKILL):  # which torch did not cause
            how = f"with status {status}" if status > 0 else f"by {signal.Signals(-status).name}"
            return self.name, f"this process was ended {how} ({message})"
        check, fix = {
            HOST: (HOST, "look at engine/diagnostics/preflight.py"),
            MAIN: ("flags", "correct that, or install what main.py imports (pip install -e .)"),
        }.get(self.name, ("torch", "install it (pip install -e .), or reinstall it"))
        if status is None:
            fix = "try again, the first time is slowest, or set CHECK_WAIT to more seconds"
            return check, f"no answer within {CHECK_WAIT_S} s: {fix}"
        if status == EXIT_USAGE:
            return check, message.replace("error: ", "", 1)
        return check, f"it can't be imported ({message}): {fix}"


def collect(commands: Commands, timeout_s: float = TIMEOUT_S) -> Report:
    """Run the children for at most `timeout_s` and return their results and failures."""
    deadline = time.monotonic() + timeout_s
    children: list[Child] = []
    try:
        for name, (command, environment) in commands.items():
            children.append(Child(name, command, environment))
        awaited = [child.process for child in children if child.is_awaited]
        while time.monotonic() < deadline and any(child.poll() is None for child in awaited):
            time.sleep(0.05)
    finally:
        for child in children:
            child.stop()
    report: Report = {}
    is_torch_broken = False  # the other children then fail for the same reason
    for child in children:
        results = child.read_results()
        for check, (status, text) in results.items():
            if status != PENDING:
                report[child.name, check] = (status, text)
            elif text and child.is_awaited:
                report[child.name, check] = (ERROR, text)
        has_failed = child.status or (child.is_awaited and not results)
        if has_failed and not is_torch_broken:
            check, text = child.failure(bool(results))
            report[child.name, check] = (ERROR, text)
            is_torch_broken = check == "torch"
    return report


def _exit(number: int, _: object) -> NoReturn:
    for other in SIGNALS:  # another one would interrupt the end of the children
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> None:
    """Print each result, or all of them as JSON; exit with status 1 if one is an error."""
    if RESULTS in os.environ:
        run_checks(CHECKS)
        return
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup ignores SIGHUP
            signal.signal(number, _exit)  # which ends the children
    script = next(text for text in sys.argv[1:] if not text.startswith("-"))
    flags = sys.argv[sys.argv.index(script) + 1 :]
    num_ranks = next(int(text.split("=")[1]) for text in sys.argv if "nproc-per-node=" in text)
    report = collect(make_commands(script, num_ranks, flags))
    # The same result of several children is printed once.
    results = list(dict.fromkeys((check, *result) for (_, check), result in report.items()))
    has_error = any(status == ERROR for _, status, _ in results)
    if "--json" in flags:
        checks = [{"name": n, "status": status, "text": text} for n, status, text in results]
        print(json.dumps({"ok": not has_error, "checks": checks}, indent=2))
    else:
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a TextIOWrapper
        for name, status, text in results:
            is_printable = SYMBOLS[status].encode(sys.stdout.encoding, "ignore")
            print(f"{SYMBOLS[status] if is_printable else status} {name:14}{printable(text)}")
    sys.exit(has_error)


if __name__ == "__main__":
    main()
