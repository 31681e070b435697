"""Delivery of a run's points to its trackers.

python -m engine.monitoring.deliver OUTPUT                    send what the trackers missed
python -m engine.monitoring.deliver OUTPUT --tracker mlflow   send a run to another tracker, too

With --follow, which a run uses, it sends new points until the run has ended.
"""

import argparse
import fcntl
import json
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from itertools import groupby
from pathlib import Path
from threading import Thread
from typing import Any

from engine import EXIT_USAGE, MAX_BYTES, SUFFIX, UserError, regular_only
from engine.monitoring import trackers
from engine.text import printable, redact_addresses

POLL_S = 0.5
MAX_DELAY_S = 60.0  # between attempts
GRACE_S = 10.0  # after the end of the run that is followed
MAX_POINTS = 200  # in a call of a tracker
MAX_PROBLEM = 200  # characters
PNG = b"\x89PNG\r\n\x1a\n"  # how the images of a run begin
MAX_IMAGE_FAILURES = 3  # before an image is skipped
SECRET = re.compile("KEY|TOKEN|PASSWORD|SECRET")  # in the name of an environment variable
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # a run saves, then ends

Record = Mapping[str, Any]
FIELDS: dict[str, dict[str, Any]] = {  # of each kind of record
    "start": {"start": dict},
    "values": {"values": dict, "group": str, "step": int, "time": (int, float)},
    "image": {"image": str, "group": str, "step": int},
    "finish": {"finish": str},
}


class Delivery:
    """Delivery of the records in a run's queue to one tracker, each once.

    The state file has the position in the queue up to which they are delivered, and the last step
    of each group of points: a resumed run repeats the steps after its checkpoint. `is_open` is
    true from the connection until the tracker has confirmed, at the end, that it has stored them.
    """

    def __init__(self, output: Path, name: str) -> None:
        self.output = output
        self.name = name
        self.queue = output / trackers.FOLDER / trackers.QUEUE
        self.state_path = output / trackers.FOLDER / trackers.STATE.format(name)
        self.run_id = read_start(self.queue)["run_id"]
        self.state: dict[str, Any] = {"run_id": self.run_id, "offset": 0, "steps": {}}
        self.state |= {"is_sending": False, "is_open": False, "problem": ""}
        state = trackers.read_state(output, name)
        self.state |= state if state.get("run_id") == self.run_id else {}
        if not self._is_line_end(self.state["offset"]):  # a crash of the host has cost lines
            self.state |= {"offset": 0, "is_sending": True}  # asks the tracker for its steps
        self.tracker: trackers.Tracker | None = None
        self._image_failures = 0

    def _is_line_end(self, offset: int) -> bool:
        """Return whether a position in the queue is its start, or that behind a line."""
        with self.queue.open("rb") as file:
            file.seek(max(0, offset - 1))
            return offset == 0 or file.read(1) == b"\n"

    def send(self) -> int:
        """Send all records that are not delivered; return their number."""
        if self.tracker is None and self.state["is_open"] and self.name in trackers.BUFFERED:
            self._repeat_buffered()
        records = self._read()
        if not records:
            return 0
        self.tracker = self.tracker or self._connect()
        self.state["problem"] = ""
        for _, group in groupby(_replace_resumed(records), lambda one: _kind(one[1])):
            part = list(group)
            for first in range(0, len(part), MAX_POINTS):
                self._send_part(part[first : first + MAX_POINTS])
        self._store(offset=records[-1][0])
        return len(records)

    def close(self) -> None:
        """End the run as failed, unless it has ended by itself."""
        if self.tracker and not self.is_finished():
            self.tracker.finish("FAILED")
            self._store(is_open=False)

    def fail(self, error: Exception) -> None:
        """Store what is wrong, without keys; the next attempt connects again."""
        self.tracker = None
        self._store(problem=_describe(error))

    def is_finished(self) -> bool:
        """Return whether the last record in the queue is the end of a run."""
        with self.queue.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 200))
            lines = file.read().splitlines()
        return bool(lines) and lines[-1].startswith(b'{"finish"')

    def _read(self) -> list[tuple[int, Record]]:
        """Return the records that are not delivered, each with the position of its end."""
        records: list[tuple[int, Record]] = []
        if read_start(self.queue)["run_id"] != self.run_id:
            raise UserError(f"{self.queue} has the points of another run now")
        with self.queue.open("rb") as file:
            end = file.seek(self.state["offset"])
            for line in trackers.complete_lines(file):
                end += len(line)
                records.append((end, _parse(line)))
        return records

    def _repeat_buffered(self) -> None:
        """Move back to the first record that the tracker may have lost when its process ended."""
        limit = self.state["offset"] - trackers.BUFFERED[self.name]
        position, start = 0, 0
        steps: dict[str, int] = {}
        steps_at_start: dict[str, int] = {}
        with self.queue.open("rb") as file:
            for line in trackers.complete_lines(file):
                position += len(line)
                if position > self.state["offset"]:
                    break
                record = _parse(line)
                if group := record.get("group"):
                    steps[group] = max(record["step"], steps.get(group, -1))
                if position <= limit or "finish" in record:
                    start, steps_at_start = position, dict(steps)
        self._store(offset=start, steps=steps_at_start, is_open=False)

    def _connect(self) -> trackers.Tracker:
        """Return the tracker with this run; ask it for the last steps if some may be delivered."""
        tracker = trackers.ADAPTERS[self.name](self.output)
        tracker.start(read_start(self.queue, self.state["offset"]))
        self.state["is_open"] = True
        if self.state["is_sending"] or not self.state["offset"]:
            self._store(steps=self.state["steps"] | tracker.last_steps())
        return tracker

    def _send_part(self, part: Sequence[tuple[int, Record]]) -> None:
        """Send consecutive records of one kind, and store that they are delivered."""
        assert self.tracker
        steps = dict(self.state["steps"])
        new = []
        for _, record in part:
            group = record.get("group", "")
            if not group or record["step"] > steps.get(group, -1):
                new.append(record)
            if group:
                steps[group] = max(record["step"], steps.get(group, -1))
        self._store(is_sending=True)
        kind = _kind(part[0][1])
        if not kind:
            self.state["problem"] = f"{self.queue} has damaged lines, which were left out"
        elif kind != "values":
            for record in new:
                self._send_other(self.tracker, kind, record)
        elif new:
            self.tracker.log(new)
        self._store(offset=part[-1][0], steps=steps, is_sending=False)

    def _send_other(self, tracker: trackers.Tracker, kind: str, record: Record) -> None:
        if kind == "image":
            self._send_image(tracker, record)
        elif kind == "start":
            tracker.start(record["start"])
            self.state["is_open"] = True
        elif kind == "finish":
            tracker.finish(record["finish"])
            self.state["is_open"] = False

    def _send_image(self, tracker: trackers.Tracker, record: Record) -> None:
        """Send an image; skip one that is refused, as by a server without a store for files."""
        path = self.output / record["image"]
        if not path.exists():  # removed since
            return
        if not _is_image_of_run(path, self.output):
            self.state["problem"] = f"{printable(path)} is not an image in the folder of the run"
            return
        try:
            tracker.image(record["group"], path, record["step"])
            self._image_failures = 0
        except Exception as error:  # of the tracker's package
            self._image_failures += 1
            if self._image_failures < MAX_IMAGE_FAILURES:
                raise
            self.state["problem"] = f"{path} is refused, {_describe(error)}"

    def _store(self, **changes: object) -> None:
        """Change the state. Not flushed to the disk: without it, the tracker is asked."""
        self.state |= changes
        temporary = self.state_path.with_suffix(SUFFIX)
        with suppress(OSError):  # a full disk
            temporary.unlink(missing_ok=True)
            with temporary.open("x") as file:  # does not follow a link to another file
                json.dump(self.state, file)
            temporary.replace(self.state_path)


def read_start(queue: Path, offset: int = 0) -> dict[str, Any]:
    """Return the last start of the run before a position in the queue, or else the first one.

    Raises UserError if it is altered, such as one with trackers that become paths of other files.
    """
    with open(queue, "rb", opener=regular_only) as file:
        starts = [file.readline(MAX_BYTES)]
        for line in trackers.complete_lines(file):
            if file.tell() > offset:
                break
            if line.startswith(b'{"start"'):
                starts.append(line)
    for line in reversed(starts):  # a crash of the host may have damaged the last ones
        with suppress(ValueError, TypeError, LookupError, RecursionError):
            found = dict(json.loads(line)["start"])
            texts = [found.get("folder", ""), *found.get("replaced", [])]
            are_texts = all(isinstance(text, str) for text in texts)
            are_known = all(name in trackers.NAMES for name in found["trackers"])
            if are_texts and are_known and trackers.is_run_id(found["run_id"]):
                return found
    raise UserError(f"{queue} is altered: it does not begin with the start of a run")


def _parse(line: bytes) -> Record:
    """Return the record in a line; an empty one if a crash of the host has damaged the line."""
    with suppress(ValueError, TypeError, LookupError, RecursionError):
        record = dict(json.loads(line))
        fields = FIELDS[_kind(record)].items()
        if all(isinstance(record[name], kind) for name, kind in fields):
            return record
    return {}


def _is_image_of_run(path: Path, output: Path) -> bool:
    """Return whether a path is a PNG file below `output`, of a size that an image has."""
    if path.is_symlink() or not path.resolve().is_relative_to(output.resolve()):
        return False
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
        return False
    with path.open("rb") as file:  # a tracker's PIL would run Ghostscript for an EPS file
        return file.read(len(PNG)) == PNG


def _describe(error: Exception) -> str:
    """Return an error of a tracker in one line, without keys. The log has it as a whole."""
    print(printable(redact(f"{type(error).__name__}: {error}")), flush=True)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return redact(lines[0])[:MAX_PROBLEM]


def _kind(record: Record) -> str:
    return next((kind for kind in FIELDS if kind in record), "")


def _replace_resumed(records: list[tuple[int, Record]]) -> list[tuple[int, Record]]:
    """Return `records` without the points that a resumed run replaces."""
    kept: list[tuple[int, Record]] = []
    for end, record in records:
        if "start" in record:
            last = record["start"]["step"]
            kept = [one for one in kept if one[1].get("step", 0) <= last]
        kept.append((end, record))
    return kept


def redact(text: str) -> str:
    """Return `text` without the keys in environment variables, and the passwords in addresses."""
    secrets = [value for name, value in os.environ.items() if SECRET.search(name.upper())]
    for value in sorted(secrets, key=len, reverse=True):  # one may begin with another
        if len(value) > 3:
            text = text.replace(value, "…")
    text = re.sub(r"\b(Basic|Bearer) [\w+/=.~-]+", r"\1 …", text)  # as HTTP sends them
    return redact_addresses(text)


class RedactedStream(TextIOWrapper):
    """Stream without secrets: the packages of trackers print addresses, passwords included."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream.buffer, stream.encoding, "replace", line_buffering=True)

    def write(self, text: str) -> int:
        return super().write(redact(text))


def follow(delivery: Delivery, parent: int) -> None:
    """Send the records of the run with the process id `parent` until it has ended."""
    delay = POLL_S
    while True:
        is_last = os.getppid() != parent or delivery.is_finished()
        try:
            delivery.send()
            if is_last:
                delivery.close()
                return
            delay = POLL_S
        except UserError:
            return
        except Exception as error:  # of the tracker's package
            delivery.fail(error)
            delay = min(2 * delay, MAX_DELAY_S)
        for _ in range(round(delay / POLL_S)):
            time.sleep(POLL_S)
            if os.getppid() != parent or delivery.is_finished():
                break


def end_after(parent: int) -> None:
    """End this process soon after its parent, even if a call of the tracker hangs."""
    while os.getppid() == parent:
        time.sleep(POLL_S)
    time.sleep(GRACE_S)
    os._exit(0)


@contextmanager
def _locked(path: Path, wait: bool) -> Iterator[None]:
    """Hold the lock of a tracker: two processes would send the same points twice."""
    with open(path, "w", opener=regular_only) as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except (BlockingIOError, PermissionError):
            raise UserError("the run is still being delivered: wait until it ends") from None
        except OSError:  # a file system without locks
            pass
        yield


def _deliver(output: Path, name: str) -> bool:
    """Send what a tracker has missed; return whether that has succeeded."""
    delivery = Delivery(output, name)
    try:
        print(f"{name}: {delivery.send()} records delivered")
        delivery.close()
    except UserError:
        raise
    except Exception as error:  # of the tracker's package
        delivery.fail(error)
        print(f"error: {name}: {printable(delivery.state['problem'])}", file=sys.stderr)
        return False
    return True


def _run(args: argparse.Namespace) -> bool:
    """Deliver the points that the flags name; return whether all are delivered."""
    folder = args.output / trackers.FOLDER
    if args.follow:
        with _locked(folder / f"{args.tracker}.lock", wait=True):
            follow(Delivery(args.output, args.tracker), args.follow)
        return True
    results = []
    for name in [args.tracker] if args.tracker else read_start(folder / trackers.QUEUE)["trackers"]:
        with _locked(folder / f"{name}.lock", wait=False):
            results.append(_deliver(args.output, name))
    return all(results)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. Exit with status 2 after a user error, 1 if something is left."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.monitoring.deliver",
        description="Send the points of a run that its trackers have missed.",
    )
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="the run's --output folder")
    parser.add_argument("--tracker", choices=trackers.ADAPTERS, help="default: those of the run")
    parser.add_argument("--follow", type=int, metavar="PID", help="run until this parent has ended")
    args = parser.parse_args(arguments)
    if args.follow is not None and not args.tracker:
        parser.error("--follow needs --tracker")
    if args.follow:
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        Thread(target=end_after, args=(args.follow,), daemon=True).start()
    try:
        is_done = _run(args)
    except UserError as error:
        problem = str(error)
    except (FileNotFoundError, NotADirectoryError):
        problem = f"{args.output} has no points: name the --output folder of a run with --tracker"
    except OSError as error:
        problem = f"{error.filename or args.output} can't be used ({error.strerror})"
    else:
        sys.exit(0 if is_done else 1)
    parser.exit(EXIT_USAGE, f"error: {printable(problem)}\n")


if __name__ == "__main__":
    sys.stdout, sys.stderr = RedactedStream(sys.stdout), RedactedStream(sys.stderr)
    main()
