"""Adapters of experiment trackers, each to the same few calls.

Only the process that delivers the points imports a tracker's package.
"""

import json
import os
import posixpath
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from engine import MAX_BYTES, PROJECT, read_text

TENSORBOARD = "tensorboard"  # which has no adapter: see events.py
FOLDER = "trackers"  # in a run's output folder
QUEUE = "queue.jsonl"
STATE, LOG = "{}.json", "{}.log"  # of each tracker
# What every version of MLflow's server accepts.
MAX_TEXT = 500  # characters of a parameter
MAX_METRICS = 1000  # values in a request
WANDB_INIT_S = 30
WANDB_STEP = "global_step"  # name of the horizontal axis
# MLflow would retry a request for minutes: `deliver` retries all of them.
MLFLOW_OPTIONS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}


def read_state(output: Path, name: str) -> dict[str, Any]:
    """Return what the process of a tracker has written about it; nothing if it is damaged."""
    with suppress(OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        state = dict(json.loads(read_text(output / FOLDER / STATE.format(name))))
        values = [state["offset"], *state["steps"].values()]
        if all(type(value) is int and 0 <= value < 2**63 for value in values):
            return state
    return {}


def is_run_id(value: object) -> bool:
    """Return whether `value` is the id of a run, or "" for a run without one."""
    return isinstance(value, str) and re.fullmatch("([0-9a-f]{16})?", value) is not None


def complete_lines(queue: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a queue up to one that is being written, or was when a run was killed."""
    while (line := queue.readline(MAX_BYTES)).endswith(b"\n"):
        yield line


class Tracker:
    """Calls that `deliver` makes. Each returns when its data are stored, or raises an exception."""

    def start(self, run: Mapping[str, Any]) -> None:
        """Continue the run with the id ``run["run_id"]``, or create it; set its parameters."""

    def last_steps(self) -> dict[str, int]:
        """Return the last step of each group of points that the tracker has, if it lists them."""
        return {}

    def log(self, points: Sequence[Mapping[str, Any]]) -> None:
        """Add points to the curves."""

    def image(self, name: str, path: Path, step: int) -> None:
        """Add an image."""

    def finish(self, status: str) -> None:
        """End the run, which may be continued later, as FINISHED, FAILED or KILLED."""


class MLflow(Tracker):
    """MLflow's server, or its local store, by MLFLOW_TRACKING_URI."""

    def __init__(self, output: Path) -> None:
        for name, value in MLFLOW_OPTIONS.items():
            os.environ.setdefault(name, value)
        import mlflow
        from mlflow import entities

        self.client = mlflow.MlflowClient()
        self.entities = entities
        self.run_id = ""

    def start(self, run: Mapping[str, Any]) -> None:
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run["project"]
        found = self.client.get_experiment_by_name(experiment)
        experiment_id = found.experiment_id if found else self.client.create_experiment(experiment)
        # The server chooses ids; ours is a tag, so that a lost answer does not make a second run.
        query = f"tags.run_id = '{run['run_id']}'"
        runs = self.client.search_runs([experiment_id], query)
        tags = dict(run["environment"])
        if "git_commit" in tags:
            tags["mlflow.source.git.commit"] = tags["git_commit"]
        if runs:
            self.run_id = runs[0].info.run_id
            known = runs[0].data.params
            self.client.update_run(self.run_id, "RUNNING")
        else:
            first_tags = tags | {"run_id": run["run_id"]}
            created = self.client.create_run(experiment_id, tags=first_tags, run_name=run["name"])
            self.run_id = created.info.run_id
            known = {}
        parameters = {name: text[:MAX_TEXT] for name, text in run["parameters"].items()}
        for name in known.keys() & parameters.keys():
            if parameters[name] != known[name]:  # MLflow's parameters cannot be changed
                tags[f"{name} from step {run['step']}"] = parameters[name]
        self.client.log_batch(
            self.run_id,
            params=[
                self.entities.Param(name, text)
                for name, text in parameters.items()
                if name not in known
            ],
            tags=[self.entities.RunTag(name, text) for name, text in tags.items()],
        )

    def last_steps(self) -> dict[str, int]:
        last: dict[str, int] = {}
        for key in self.client.get_run(self.run_id).data.metrics:
            steps = [metric.step for metric in self.client.get_metric_history(self.run_id, key)]
            group = key.partition("/")[0]
            last[group] = max([last.get(group, -1), *steps])
        return last

    def log(self, points: Sequence[Mapping[str, Any]]) -> None:
        metrics = [
            self.entities.Metric(_accepted(key), value, round(1000 * point["time"]), point["step"])
            for point in points
            for key, value in _values(point).items()
        ]
        for first in range(0, len(metrics), MAX_METRICS):
            self.client.log_batch(self.run_id, metrics[first : first + MAX_METRICS])

    def image(self, name: str, path: Path, step: int) -> None:
        self.client.log_artifact(self.run_id, str(path), None if path.stem == name else name)

    def finish(self, status: str) -> None:
        self.client.set_terminated(self.run_id, status)


class Wandb(Tracker):
    """Weights & Biases. Its own process stores the points in the run's folder, and sends them."""

    def __init__(self, output: Path) -> None:
        import wandb

        self.wandb = wandb
        self.folder = output.absolute() / FOLDER
        for name in ("wandb", ".wandb"):  # W&B would write to the target of a link
            if (self.folder / name).is_symlink():
                raise OSError(0, f"{self.folder / name} is a link")
        self.run: Any = None

    def start(self, run: Mapping[str, Any]) -> None:
        if self.run is None:
            self.run = self._init(run)
            # Of its own steps, each has one point: those of a group and an epoch may be the same.
            self.run.define_metric("*", step_metric=WANDB_STEP)
        self.run.config.update(_config(run), allow_val_change=True)

    def _init(self, run: Mapping[str, Any]) -> Any:
        current = os.getcwd()
        os.chdir(PROJECT)  # W&B reads a settings file, with its server's address, in this folder
        # Without git, which would run commands of a repository in the run's folder.
        settings = self.wandb.Settings(
            silent=True, console="off", init_timeout=WANDB_INIT_S, disable_git=True
        )
        try:
            return self.wandb.init(
                project=os.environ.get("WANDB_PROJECT") or run["project"],
                id=run["run_id"],
                name=run["name"],
                resume="allow",
                dir=str(self.folder),
                settings=settings,
            )
        except Exception:
            self.wandb.teardown()  # its process would take the id for one in use
            raise
        finally:
            os.chdir(current)  # MLflow's local store is there

    def log(self, points: Sequence[Mapping[str, Any]]) -> None:
        for point in points:
            self.run.log({**_values(point), WANDB_STEP: point["step"]})

    def image(self, name: str, path: Path, step: int) -> None:
        self.run.log({name: self.wandb.Image(str(path)), WANDB_STEP: step})

    def finish(self, status: str) -> None:
        """End the run; wait until all is sent, unless WANDB_MODE is offline."""
        self.run.finish(exit_code=0 if status == "FINISHED" else 1)
        self.run = None


class Trackio(Tracker):
    """Trackio's local store, or the server or Space of TRACKIO_SERVER_URL or TRACKIO_SPACE_ID.

    It finds a run by its name, which therefore has the id in it.
    """

    def __init__(self, output: Path) -> None:
        import trackio

        self.trackio = trackio
        self.options: dict[str, Any] = {}

    def start(self, run: Mapping[str, Any]) -> None:
        """Set the run's name and parameters, with which its first point is stored."""
        name = f"{run['name']}-{run['run_id'][:8]}"
        self.options = {"project": run["project"], "name": name, "config": _config(run)}

    def log(self, points: Sequence[Mapping[str, Any]]) -> None:
        self._log([(_values(point), point["step"]) for point in points])

    def image(self, name: str, path: Path, step: int) -> None:
        self._log([({name: self.trackio.Image(str(path))}, step)])

    def _log(self, items: Sequence[tuple[Mapping[str, Any], int]]) -> None:
        """Log `items`; they are stored when the run ends, so each call continues and ends it."""
        run = self.trackio.init(
            **self.options, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False
        )
        for values, step in items:
            run.log(dict(values), step=step)
        run.finish()


ADAPTERS: dict[str, Callable[[Path], Tracker]] = {
    "mlflow": MLflow,
    "trackio": Trackio,
    "wandb": Wandb,
}
NAMES = (TENSORBOARD, *ADAPTERS)
# Bytes of the queue that a tracker's process may hold in its memory: W&B's writes blocks of 32 KiB.
BUFFERED = {"wandb": 2**16}


def _config(run: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters and the environment of a run in one dictionary."""
    return {**run["parameters"], **run["environment"]}


def _values(point: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of a point under the names that TensorBoard shows."""
    return {f"{point['group']}/{name}": value for name, value in point["values"].items()}


def _accepted(key: str) -> str:
    """Return the key of a value, if MLflow accepts it, else one with a checksum of its name."""
    group, _, name = key.partition("/")
    plain = re.sub(r"[^\w\-./: ]", "_", name)
    if posixpath.normpath(f"{group}/{plain}") != f"{group}/{plain}":  # it takes keys for paths
        plain = re.sub(r"[/.]", "_", plain)
    return key if plain == name else f"{group}/{plain} {zlib.crc32(name.encode()):08x}"
