"""Time that a call of the logger takes for each tracker, while the tracker works or does not.

    python benchmarks/trackers.py
    python benchmarks/trackers.py --calls 10000

A call adds the four numbers of a logging step. MLflow's address is a port at which nothing listens
("down"), or one that accepts connections and never answers ("hangs"); MLFLOW_TRACKING_URI, if it is
set, is measured too. Prints the median and the 99th percentile.
"""

import argparse
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path

import torch.distributed as dist
from flags import whole_number
from loader import project_datasets  # noqa: F401  # makes `engine` importable

from engine.monitoring.events import EventWriter  # isort: skip
from engine.monitoring.tracking import Tracking  # isort: skip

VALUES = {"train_loss": 0.5, "lr": 1e-3, "loss_scale": 65536.0, "images_per_second": 2500.0}


def measure(add: Callable[[int], None], calls: int, pause_s: float) -> tuple[float, float]:
    """Return the median and the 99th percentile of the time of a call, in microseconds."""
    times = []
    for step in range(calls):
        started = time.perf_counter()
        add(step)
        times.append(1e6 * (time.perf_counter() - started))
        time.sleep(pause_s)
    return statistics.median(times), statistics.quantiles(times, n=100)[98]


def measure_mlflow(address: str, args: argparse.Namespace, folder: Path) -> tuple[float, float]:
    """Return the times with MLflow at `address`, once its process has started."""
    os.environ["MLFLOW_TRACKING_URI"] = address
    folder.mkdir()
    tracking = Tracking(folder, ["mlflow"], print, print)
    tracking.start("", True, 0, {})
    time.sleep(args.wait_s)  # its process imports MLflow, on another core
    times = measure(
        lambda step: tracking.add_scalars("step", VALUES, step), args.calls, args.pause_ms / 1000
    )
    with redirect_stdout(None):
        tracking.finish("FINISHED")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=whole_number, default=1000)
    parser.add_argument("--pause-ms", type=float, default=2.0, help="between two calls")
    parser.add_argument("--wait-s", type=float, default=15.0, help="for MLflow's process to start")
    args = parser.parse_args()
    given = os.environ.get("MLFLOW_TRACKING_URI")
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as server:
        folder = Path(name)
        store = f"file://{folder / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        with socket.create_server(("127.0.0.1", 0)) as free:
            closed = f"http://127.0.0.1:{free.getsockname()[1]}"
        print("| tracker | median, µs | 99th percentile, µs |\n|---|---|---|")
        events = EventWriter(folder, 0)
        median, high = measure(
            lambda step: events.add_scalars("step", VALUES, step), args.calls, args.pause_ms / 1000
        )
        print(f"| TensorBoard | {median:.0f} | {high:.0f} |", flush=True)
        addresses = {"down": closed, "hangs": f"http://127.0.0.1:{server.getsockname()[1]}"}
        addresses |= {"works": given} if given else {}
        for state, address in addresses.items() if find_spec("mlflow") else ():
            median, high = measure_mlflow(address, args, folder / state)
            print(f"| MLflow, {state} | {median:.0f} | {high:.0f} |", flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
