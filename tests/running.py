"""Running a generated project as its owner does."""

import contextlib
import csv
import json
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from ports import free_port
from processes import fork_server

SCREENED = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
"""The environment of a run that sees no GPU."""


def run(
    project: Path, *flags: object, nproc: int = 2, timeout: float = 300, **variables: str
) -> subprocess.CompletedProcess:
    """Run ``./run.sh`` with the tests' own Python; its output is text.

    With ``nproc=0`` it is ``python main.py``: one process, and no launcher to start first.
    """
    variables = os.environ | {"PYTHON": sys.executable, "NPROC": str(nproc)} | variables
    if not nproc:
        return run_script(project, "main.py", *flags, variables=variables, timeout=timeout)
    return subprocess.run(
        [str(project / "run.sh"), *map(str, flags)],
        cwd=project,
        env=variables,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_two(
    project: Path, *flags: object, timeout: float = 300, **variables: str
) -> subprocess.CompletedProcess:
    """Run ``python main.py`` twice, as the two processes of a run that is started by hand."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables = SCREENED | address | variables
    variables |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [variables | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    return run_script(project, "main.py", *flags, variables=ranks, timeout=timeout)


def run_script(
    project: Path,
    script: str | Path,
    *flags: object,
    variables: dict[str, str] | Sequence[dict[str, str]],
    timeout: float = 300,
) -> subprocess.CompletedProcess:
    """Run ``python script`` in the project, in a fork of a process that has torch.

    To import it takes seconds, which here are spent once for all. Of several `variables`, each is
    the environment of a process of its own. If one of them fails, the others are ended, as
    torchrun ends them.
    """
    context = fork_server()
    command = [str(script), *map(str, flags)]
    environments = [variables] if isinstance(variables, dict) else variables
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, stream) for stream in ("stdout", "stderr")]
        processes = [
            context.Process(target=become_script, args=(project, command, dict(one), said))
            for one in environments
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        while any(process.is_alive() for process in processes):
            wait([one.sentinel for one in processes if one.is_alive()], 1)
            is_late = time.monotonic() > deadline
            if is_late or any(process.exitcode for process in processes):
                for process in processes:
                    process.kill()
            if is_late:
                raise subprocess.TimeoutExpired(command, timeout)
        texts = (path.read_text() for path in said)
        statuses = [process.exitcode for process in processes]  # less than 0 of those ended here
        status = max(statuses) or min(statuses)
        return subprocess.CompletedProcess(command, status, *texts)


def become_script(
    project: Path, command: list[str], variables: dict[str, str], said: list[Path]
) -> None:
    """Turn this process into one that ``python`` has started."""
    multiprocessing.set_start_method(None, force=True)  # the loader's workers start as anywhere
    for number, path in enumerate(said, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update({"PYTHONHASHSEED": "0"} | variables)  # or it would start Python again
    os.chdir(project)
    sys.path.insert(0, str(project))
    sys.argv = command
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:  # as engine.data.loading does at exit: multiprocessing's children run no atexit
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise an error
        for child in multiprocessing.active_children():  # would wait for ever for loaders' workers
            if child.daemon:
                child.kill()


def predict(project: Path, checkpoint: Path, images: Path, *flags: object) -> list[dict]:
    """Run inference with predict.py on the CPU; return the entries of ``--json``."""
    flags = (checkpoint, images, *flags, "--json")
    done = run_script(project, "predict.py", *flags, variables=SCREENED)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def predicted_accuracy(
    project: Path, checkpoint: Path, folder: Path, names: Sequence[str]
) -> float:
    """Return the accuracy of predict.py on files of the digits of the validation set."""
    folder.mkdir()
    file = np.load(project / "data" / "digits.npz")
    labels = {}
    for image, label in zip(file["images"][::5], file["labels"][::5], strict=True):
        path = folder / f"{len(labels):03}.png"
        Image.fromarray((image * (255 / 16)).round().astype(np.uint8)).save(path)
        labels[str(path)] = names[label]
    lines = predict(project, checkpoint, folder, "--top", 1)
    assert [line["file"] for line in lines] == sorted(labels)
    return sum(line["found"][0][0] == labels[line["file"]] for line in lines) / len(lines)


def metrics(output: Path) -> list[dict[str, float]]:
    """Return the rows of a run's metrics.csv, without empty cells."""
    with (output / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [{name: float(cell) for name, cell in row.items() if cell} for row in rows]


def best(output: Path, metric: str) -> float:
    """Return the best value of that metric in a run."""
    return max(row[metric] for row in metrics(output))


def best_accuracy(output: Path) -> float:
    """Return the best val_accuracy of a run."""
    return best(output, "val_accuracy")


class Run:
    """``./run.sh`` in the background, of two processes; `flags` have an ``--output``.

    `prefix` is a command that starts it elsewhere.
    """

    def __init__(
        self, project: Path, *flags: object, prefix: Sequence[str] = (), **variables: str
    ) -> None:
        self.output = Path(flags[flags.index("--output") + 1])
        self.log = self.output.with_name(f"{self.output.name}.log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*prefix, str(project / "run.sh"), *map(str, flags)],
                env=os.environ | {"PYTHON": sys.executable, "NPROC": "2"} | variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.wait_until(lambda: not self.ranks())

    def wait_until(self, holds: Callable[[], bool], seconds: float = 180.0) -> None:
        """Wait for a condition; to start a run took more than a minute on a busy machine."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def wait_for(self, pattern: str) -> None:
        """Wait until the log has the pattern, or the run is over."""
        self.wait_until(lambda: re.search(pattern, self.said) or self.process.poll() is not None)

    @property
    def said(self) -> str:
        return self.log.read_text()

    def ranks(self) -> dict[int, int]:
        """Return the processes that train, by rank."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (folder / "cmdline").read_bytes().decode().split("\0")
                variables = (folder / "environ").read_bytes().decode().split("\0")
                is_ours = str(self.output) in words and "-c" not in words[:3]
                of_rank = [entry[5:] for entry in variables if entry.startswith("RANK=")]
                if is_ours and of_rank:
                    found.setdefault(int(of_rank[0]), int(folder.name))
        return found

    def end(self, seconds: float = 120) -> tuple[int, float]:
        """Return the exit status, and how long it took."""
        began = time.monotonic()
        return self.process.wait(seconds), time.monotonic() - began


def flat(value: dict | list | tuple, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield the entries of nested containers, with their paths."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, entry in entries:
        if isinstance(entry, dict | list | tuple):
            yield from flat(entry, f"{name}/{key}")
        else:
            yield f"{name}/{key}", entry


def consolidate(project: Path, output: Path) -> None:
    """Make the file last.pt of the folder that a run with FSDP has written."""
    if (output / "last").is_dir():
        command = [sys.executable, "-m", "engine.checkpoint.consolidate"]
        whole = output / "whole.pt"  # the run would remove a last.pt, so that is refused
        command += [str(output / "last"), str(whole)]
        subprocess.run(command, cwd=project, env=SCREENED, check=True, stdout=subprocess.DEVNULL)
        whole.rename(output / "last.pt")


def assert_same_run(output: Path, whole: Path) -> None:
    """Assert that weights, moments, random numbers and metrics of two runs are identical."""
    ours, theirs = (
        dict(flat(torch.load(folder / "last.pt", weights_only=True))) for folder in (output, whole)
    )
    ours.pop("/optimizer/param_groups/0/differentiable", None)  # torch adds it when it loads
    # In the history of metrics; an epoch that is resumed after its last step has none.
    differing = {name for name in ours | theirs if name.endswith("/images_per_second")}
    assert ours.keys() ^ theirs.keys() <= differing
    for name, value in theirs.items():
        if name in differing:
            continue
        same = torch.equal(ours[name], value) if torch.is_tensor(value) else ours[name] == value
        assert same, name
    rows = [
        [
            {name: row[name] for name in row if name != "images_per_second"}
            for row in metrics(folder)
        ]
        for folder in (output, whole)
    ]
    assert rows[0] == rows[1]
