"""Points of a run for its experiment trackers, such as MLflow.

The training only appends lines of JSON to a file, the queue, in its output folder. A process for
each tracker (engine.monitoring.deliver) reads them there and sends them, so that a tracker that is
down or slow cannot delay the training, and what it missed can be sent later.
"""

import json
import os
import platform
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import BufferedReader, FileIO
from pathlib import Path
from shlex import quote
from typing import Any

import torch
import torch.distributed as dist

from engine import DAMAGE, PROJECT, UserError, regular_only, start_module
from engine.monitoring.deliver import read_start
from engine.monitoring.events import append
from engine.monitoring.trackers import FOLDER, LOG, QUEUE, complete_lines, read_state

CHECK_EVERY_S = 60.0  # between looks at the state of the trackers
EXIT_S = 10.0  # for the trackers at the end of a run
GIT_S = 5.0


@dataclass
class Tracking:
    """Queue of the points for the trackers, and the processes that deliver them.

    Its methods have the names of EventWriter's. They raise OSError if the queue cannot be written.
    """

    output: Path
    names: list[str]  # of the trackers
    info: Callable[[str], None]
    warn: Callable[[str], None]

    run_id: str = field(default="", init=False)
    _queue: FileIO = field(init=False)
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict, init=False)
    _warned: set[str] = field(default_factory=set, init=False)
    _checked_at: float = field(default=0.0, init=False)

    def start(self, run_id: str, is_new: bool, step: int, parameters: Mapping[str, object]) -> None:
        """Open the queue and start the processes.

        Args:
            run_id: of the checkpoint that is resumed, or "".
            is_new: whether the points in the folder, if any, are those of another run.
            step: from which the run continues; its points replace those of later steps.
            parameters: flags of the run.
        """
        path = self.output / FOLDER / QUEUE
        path.parent.mkdir(exist_ok=True)
        if path.parent.is_symlink():
            raise OSError(0, f"{path.parent} is a link")
        queued = {} if is_new else _queued_start(path)
        queued_id = queued.get("run_id", "")
        replaced = list(queued.get("replaced", []))  # ids of the runs that this is a copy of
        if queued_id and _is_copy(path, queued):
            self.info(f"{self.output} is a copy of {queued['folder']}: a new run of the trackers")
            replaced.append(queued_id)
            queued_id = ""
        own_id = "" if run_id in replaced else run_id
        self.run_id = own_id or queued_id or uuid.uuid4().hex[:16]
        mode = "r+b" if queued_id == self.run_id else "w+b"
        self._queue = FileIO(path, mode, opener=regular_only)
        _remove_torn_line(self._queue)
        texts = {name: str(value) for name, value in parameters.items() if value is not None}
        start = {"run_id": self.run_id, "step": step, "name": self.output.name}
        start |= {"project": PROJECT.name, "trackers": self.names}
        start |= {"folder": str(self.output.resolve()), "replaced": replaced}
        self._append({"start": start | {"parameters": texts, "environment": _environment()}})
        for name in self.names:
            self._start_process(name)

    def add_scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Add a point to the curve of each value."""
        point = {"group": group, "step": step, "time": time.time(), "values": dict(values)}
        self._append(point)
        if time.monotonic() > self._checked_at + CHECK_EVERY_S:
            self.check()

    def add_image(self, tag: str, path: Path, step: int) -> None:
        """Add the image in a PNG file, which must be in the output folder."""
        name = str(path.relative_to(self.output))
        self._append({"group": tag, "step": step, "time": time.time(), "image": name})

    def check(self) -> None:
        """Warn of a tracker that does not accept points; restart a process that has died."""
        self._checked_at = time.monotonic()
        for name in self.names:
            problem = read_state(self.output, name).get("problem")
            if self._processes[name].poll() is not None:
                try:
                    self._start_process(name)
                except OSError as error:  # such as without the folder, or without memory
                    problem = f"its process can't be started ({error.strerror})"
            if problem and name not in self._warned:
                self._warned.add(name)
                kept = f"{self.output / FOLDER} keeps its points until they can be sent"
                self.warn(f"--tracker {name}: {problem}; {kept}")

    def finish(self, status: str) -> None:
        """End the run with an MLflow status; wait a limited time for the trackers.

        Logs the command that sends what is left.
        """
        self._append({"finish": status, "time": time.time()})
        deadline = time.monotonic() + EXIT_S
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for name, process in self._processes.items():
            if process.poll() is None:
                process.kill()
                process.wait()
            left, problem = self._left(name), read_state(self.output, name).get("problem")
            if left:
                reason = f" ({problem})" if problem else ""
                command = f"python -m engine.monitoring.deliver {quote(str(self.output))}"
                self.info(f"{name}: {left} records are not delivered{reason}; send them: {command}")

    def _append(self, record: Mapping[str, object]) -> None:
        append(self._queue, json.dumps(record).encode() + b"\n")

    def _left(self, name: str) -> int:
        """Return the number of records that are not delivered."""
        with (self.output / FOLDER / QUEUE).open("rb") as file:
            file.seek(read_state(self.output, name).get("offset", 0))
            return sum(1 for _ in complete_lines(file))

    def _start_process(self, name: str) -> None:
        with open(self.output / FOLDER / LOG.format(name), "wb", opener=regular_only) as log:
            self._processes[name] = start_module(
                "engine.monitoring.deliver",
                *(str(self.output), "--tracker", name, "--follow", str(os.getpid())),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )


def _queued_start(path: Path) -> dict[str, Any]:
    """Return the last start of the run whose points are in a queue; nothing if there is none.

    Raises OSError if the disk does not answer: the queue may have points to send.
    """
    try:
        return read_start(path, path.stat().st_size)
    except (OSError, UserError, ValueError) as error:
        if isinstance(error, OSError) and error.errno not in DAMAGE:
            raise
    return {}


def _is_copy(path: Path, queued: Mapping[str, Any]) -> bool:
    """Return whether a queue is a copy of one that is still there, in the folder of its start.

    It is none in a folder that was moved, or has another path in a container or mount point.
    """
    other = Path(queued.get("folder", ""), FOLDER, QUEUE)
    with suppress(OSError):
        is_other = os.path.exists(other) and path.stat().st_ino != other.stat().st_ino
        return is_other and _queued_start(other).get("run_id") == queued["run_id"]
    return False


def _remove_torn_line(queue: FileIO) -> None:
    """Remove a line that a killed process has not completed; move to the end."""
    reader = BufferedReader(queue)
    complete = sum(map(len, complete_lines(reader)))
    reader.detach()
    queue.truncate(complete)
    queue.seek(complete)


def _environment() -> dict[str, str]:
    """Return versions, hardware and git commit. Environment variables, which hold keys, are not."""
    facts = {"python": platform.python_version(), "torch": torch.__version__}
    facts |= {"platform": platform.platform(), "processes": str(dist.get_world_size())}
    if torch.cuda.is_available():
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    if commit := _git("rev-parse", "HEAD"):
        # New files, which the run may import, are changes, too.
        changes = _git("status", "--porcelain", "--untracked-files=normal", ".")
        answer = {None: "unknown", "": "no"}.get(changes, "yes")
        facts |= {"git_commit": commit, "git_changes": answer}
    return facts


def _git(*arguments: str) -> str | None:
    """Return the output of a git command in the project's folder; None if it fails."""
    command = ["git", "--no-optional-locks", "-C", str(PROJECT), *arguments]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, timeout=GIT_S, check=True)
        return done.stdout.decode(errors="replace").strip()
    return None
