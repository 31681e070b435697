"""``./run.sh --check``: looks at the machine and the settings for at most 20 s, and trains nothing.

python -m engine.doctor [torchrun's options] main.py --check [--json] [flags of main.py]

Processes do the looking: one for what needs no torch (CHECKS, below), one for each rank, which
exchange a tensor, and main.py, which knows its flags (both in engine/examine.py). They tell what
they find as they go. So one that crashes or hangs, in torch, a driver or NCCL, costs no more than
its own lines, and a line told before what may hang says what it means if it did.
"""

from __future__ import annotations  # so that a Python too old is told so by a line, too

import json
import os
import platform
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import lru_cache
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, BinaryIO

from engine.errors import BAD_USAGE, UserError, first_few

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Results = Iterator[tuple[str, str]]  # a mark and a text; the last one counts
    Found = dict[tuple[str, str], tuple[str, str]]  # the same, by who looked and at what

OK, WARNING, WRONG = "✓", "!", "✗"
STATUS = {OK: "ok", WARNING: "warning", WRONG: "error"}
BEGUN = "?"  # stands until the first line of a check
PIPE = "CHECK_PIPE"  # in the environment: the file descriptor for what a process tells
MACHINE, RANK_0, MAIN = "machine", "rank 0", "main.py"
OLDEST_PYTHON = (3, 10)
DRIVER_S = 7.0  # for nvidia-smi, which takes seconds where the driver is not kept loaded
LIMIT_S = 17.0  # for the processes; starting and ending takes the rest of the 20 s


# What needs no torch


def nvidia_smi(*arguments: str) -> str | None:
    """What nvidia-smi prints; None where there is none. Raises UserError if it fails."""
    command = ["nvidia-smi", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_S)
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired:
        raise UserError(
            "nvidia-smi does not answer: look for the GPU's errors in dmesg, and reboot"
        ) from None
    if done.returncode:
        lines = (done.stdout + done.stderr).split("\n")
        raise UserError(
            f"nvidia-smi fails ({lines[0]}): reboot if the driver was just updated, else install "
            "it again; start a container with --gpus all"
        )
    return done.stdout


@lru_cache
def gpus() -> list[list[str]] | None:
    """The name of each GPU that the driver knows and the driver's version; None without one."""
    table = nvidia_smi("--query-gpu=name,driver_version", "--format=csv,noheader")
    return None if table is None else [line.split(", ") for line in table.splitlines()]


def python() -> Results:
    """Whether this Python is new enough."""
    version = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < OLDEST_PYTHON:
        yield WRONG, f"{version} is too old: use 3.10 or later (PYTHON=python3.12 ./run.sh)"
    else:
        yield OK, version


def driver() -> Results:
    """The driver and the GPUs that it knows."""
    if gpus():
        names = [name for name, _ in gpus()]
        kinds = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
        yield OK, f"{gpus()[0][1]}, {kinds}"
    else:
        yield WARNING, "there is no NVIDIA GPU (nvidia-smi finds none): training runs on the CPU"


def links() -> Results:
    """What lies between each two GPUs: NVLink, PCIe, or the bus between two CPUs."""
    if len(gpus() or ()) < 2:
        return
    matrix = re.sub(r"\x1b\[\d*m", "", nvidia_smi("topo", "-m"))  # its head is underlined
    rows = [row.split() for row in matrix.splitlines() if re.match(r"GPU\d", row)]
    kinds = {
        f"{rows[one][0]}–{rows[two][0]}": rows[one][1 + two]
        for two in range(len(rows))
        for one in range(two)
    }
    names = ", ".join(sorted(set(kinds.values())))
    far = [pair for pair, kind in kinds.items() if kind in ("NODE", "SYS")]
    if far:
        yield (
            WARNING,
            f"{first_few(far)} are linked through the CPUs alone ({names}): gradients take longer; "
            "choose nearer ones with CUDA_VISIBLE_DEVICES",
        )
    else:
        yield OK, f"{names} between the GPUs, in the words of nvidia-smi topo -m"


def open_files() -> Results:
    """The limit of open files: each tensor that a loading process hands over is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1024:
        remedy = "ulimit -n 4096" if soft < hard or hard < 0 else "have the hard limit raised"
        yield WARNING, f"a process may open {soft}, and loading processes need many: {remedy}"
    else:
        yield OK, f"a process may open {soft}"


def rendezvous() -> Results:
    """Where several machines meet: an address that is known, and a port that is free."""
    if machines() == 1:
        return
    host, port = os.environ["MASTER_ADDR"], int(os.environ.get("MASTER_PORT") or 29500)
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise UserError(f"MASTER_ADDR={host} is no known host ({error}): give its IP") from None
    if os.environ["NODE_RANK"] == "0":
        try:
            with socket.socket() as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind((address, port))
        except OSError as error:
            raise UserError(
                f"NODE_RANK=0 can't listen at MASTER_ADDR={host}, MASTER_PORT={port} "
                f"({error.strerror}): give an address of this machine, and a free port"
            ) from None
    yield OK, f"{machines()} machines meet at {host}, port {port}"


def machines() -> int:
    return int(os.environ.get("NNODES") or 1)


CHECKS = {
    "Python": python,
    "driver": driver,
    "links": links,
    "open files": open_files,
    "rendezvous": rendezvous,
}


# What each process does


def look(checks: dict[str, Callable[[], Results]]) -> bool:
    """Tells what each check finds, a ✗ if it breaks; returns whether none was a ✗."""
    went_well = True
    for name, check in checks.items():
        tell(name, BEGUN, "it did not end")
        mark, text = BEGUN, ""
        try:
            for mark, text in check():
                tell(name, mark, text)
        except UserError as error:
            mark, text = WRONG, str(error)
            tell(name, mark, text)
        except Exception as error:
            mark, text = WRONG, f"it failed with {type(error).__name__}: {error}"
            tell(name, mark, text)
        if not text:
            tell(name, BEGUN, "")  # there is nothing to say
        went_well = went_well and mark != WRONG
    return went_well


def tell(name: str, mark: str, text: str) -> None:
    """Hands a line over, whole: so short, it can't be mixed with another process's."""
    line = json.dumps([os.environ["CHECK_WHO"], name, mark, shorten(text, 600)])
    os.write(int(os.environ[PIPE]), line.encode() + b"\n")


# What starts and ends them


def children(script: str, processes: int, flags: list[str]) -> dict[str, tuple[list[str], dict]]:
    """The command and the environment of each process, by its name."""
    path = [str(Path(script).resolve().parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    started = ("RANK", "LOCAL_RANK", "TORCHELASTIC_")  # by a launcher, as this may have been
    environment = {name: v for name, v in os.environ.items() if not name.startswith(started)}
    environment.update(
        PYTHONPATH=os.pathsep.join(path),
        PYTHONSAFEPATH="1",  # nothing from the folder that the user is in, such as a torch.py
        NCCL_DEBUG="WARN",
        LOCAL_WORLD_SIZE=str(processes),
    )
    found = {MACHINE: ([sys.executable, "-m", "engine.doctor"], environment)}
    if sys.version_info < OLDEST_PYTHON:
        return found
    if machines() == 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    else:
        meeting = {"MASTER_PORT": os.environ.get("MASTER_PORT") or "29500"}
    meeting["WORLD_SIZE"] = str(processes * machines())
    first = processes * int(os.environ.get("NODE_RANK") or 0)
    for local in range(processes):
        ranks = {"RANK": str(first + local), "LOCAL_RANK": str(local), **meeting}
        command = [sys.executable, "-m", "engine.examine"]
        found[f"rank {local}"] = command, {**environment, **ranks}
    found[MAIN] = [sys.executable, script, *flags], environment
    return found


def gather(children: dict[str, tuple[list[str], dict]], limit_s: float = LIMIT_S) -> Found:
    """What the processes tell, in `limit_s` s at most; those that are left then are ended."""
    logs = {who: tempfile.TemporaryFile() for who in children}  # noqa: SIM115, read at the end
    until = time.monotonic() + limit_s
    reading, writing = os.pipe()
    processes, told = {}, b""
    try:
        for who, (command, environment) in children.items():
            processes[who] = subprocess.Popen(
                command,
                env={**environment, "CHECK_WHO": who, PIPE: str(writing)},
                pass_fds=[writing],
                stdin=subprocess.DEVNULL,
                stdout=logs[who],
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # The other ranks can wait for rank 0 for ever, if that is what fails.
        awaited = [processes[who] for who in (MACHINE, RANK_0, MAIN) if who in processes]
        is_over = False
        while not is_over:
            is_over = time.monotonic() > until or all(p.poll() is not None for p in awaited)
            while select.select([reading], [], [], 0 if is_over else 0.1)[0]:
                told += os.read(reading, 65536)
        statuses = {who: process.poll() for who, process in processes.items()}
    finally:
        for process in processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        os.close(writing)
        os.close(reading)
    lines = [json.loads(line) for line in told.splitlines()]
    found = {(who, name): (mark, text) for who, name, mark, text in lines}
    for (who, name), (mark, text) in list(found.items()):
        if mark == BEGUN:
            del found[who, name]
            if text and processes[who] in awaited:
                found[who, name] = WRONG, text
    spoke = {who for who, *_ in lines}
    for who, process in processes.items():
        if statuses[who] or (process in awaited and who not in spoke):
            name, text = _end(who, statuses[who], who in spoke, _last_words(logs[who]))
            found[who, name] = WRONG, text
            if name == "torch":
                break  # what else failed, failed with it
    return {key: found[key] for who in children for key in found if key[0] == who}


def _end(who: str, status: int | None, spoke: bool, words: str) -> tuple[str, str]:
    """The name and the text of the line about a process that failed or, of no status, hung."""
    if spoke:
        how = f"with status {status}" if status > 0 else f"by {signal.Signals(-status).name}"
        return who, f"this process was ended {how} ({words})"
    name, remedy = {
        MACHINE: (MACHINE, "look at engine/doctor.py"),
        MAIN: ("flags", "mend what it says, or install what main.py imports (pip install -e .)"),
    }.get(who, ("torch", "install it (pip install -e .), again if it is there"))
    if status is None:
        return name, "no answer in time: try again; the first time takes longest on a slow disk"
    if status == BAD_USAGE:
        return name, words.replace("error: ", "", 1)
    return name, f"it can't be imported ({words}): {remedy}"


def _last_words(log: BinaryIO) -> str:
    """NCCL's last warning in what a process has printed, or else its last line."""
    log.seek(0)
    lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    warnings = [line for line in lines if "NCCL WARN" in line]
    return shorten((warnings or lines or ["without a word"])[-1], 300)


def main() -> None:
    """Prints a line for each check, or all of it as JSON; exits with 1 if one is a ✗."""
    if PIPE in os.environ:
        look(CHECKS)
        return
    at = next(index for index, text in enumerate(sys.argv[1:], 1) if text[0] != "-")
    options, script, flags = sys.argv[1:at], sys.argv[at], sys.argv[at + 1 :]
    processes = next(int(text.split("=")[1]) for text in options if "nproc-per-node=" in text)
    try:
        found = gather(children(script, processes, flags))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    # What several processes say alike is said once.
    lines = list(dict.fromkeys((name, *result) for (_, name), result in found.items()))
    wrong = sum(mark == WRONG for _, mark, _ in lines)
    sys.stdout.reconfigure(errors="replace")  # an old terminal may lack some letters
    if "--json" in flags:
        checks = [{"name": n, "status": STATUS[mark], "text": text} for n, mark, text in lines]
        print(json.dumps({"ok": not wrong, "checks": checks}, indent=2))
    else:
        for name, mark, text in lines:
            shown = mark.encode(sys.stdout.encoding, "ignore") and mark
            print(f"{shown or STATUS[mark]} {name:14}{text}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
