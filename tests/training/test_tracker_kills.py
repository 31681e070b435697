"""Runs that are killed and resumed are one run in the tracker, with each step once."""

import multiprocessing
import os
import random
import signal

import pytest
from mlflow_server import free_port, mlflow_server
from running import SCREENED, _be, metrics

pytestmark = pytest.mark.xdist_group("trackers")
FLAGS = ("--arch", "mobilenet_v3_small", "--batch-size", "64", "--opt-level", "O0")
FLAGS += ("--log-every", "1", "--save-every", "3", "--resume", "auto", "--tracker", "mlflow")
STEPS_PER_EPOCH = 22


def in_session(*arguments):
    """Run main.py in a session of its own, with which its processes are killed."""
    os.setsid()
    _be(*arguments)


def start(project, output, epochs, variables):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torchvision"])
    command = ["main.py", *FLAGS, "--epochs", str(epochs), "--output", str(output)]
    process = context.Process(
        target=in_session, args=(project, command, variables, [output.with_suffix(".log")] * 2)
    )
    process.start()
    return process


@pytest.mark.parametrize("kills", [4, pytest.param(30, marks=pytest.mark.weekly)])
def test_random_kills_leave_one_run_with_each_step_once(bake, tmp_path, kills):
    """Either all processes are killed, or the one that delivers the points survives a while."""
    mlflow = pytest.importorskip("mlflow")
    chosen = random.Random(kills)
    project, output, port = bake(), tmp_path / "run", free_port()
    address = f"http://127.0.0.1:{port}"
    variables = SCREENED | {"MLFLOW_TRACKING_URI": address, "OMP_NUM_THREADS": "1"}
    with mlflow_server(tmp_path / "mlflow", port):
        epochs, killed = 2, 0
        while killed < kills:
            process = start(project, output, epochs, variables)
            process.join(chosen.uniform(3, 12))
            if process.is_alive():
                kill = chosen.choice([os.kill, os.killpg])
                kill(process.pid, signal.SIGKILL)
                killed += 1
            elif process.exitcode == 0:
                epochs += 2
            else:
                pytest.fail(output.with_suffix(".log").read_text()[-3000:])
            process.join()
        process = start(project, output, epochs, variables)
        process.join(600)
        assert process.exitcode == 0, output.with_suffix(".log").read_text()[-3000:]
        log = output.with_suffix(".log").read_text()
        assert "not delivered" not in log.splitlines()[-3:]
        client = mlflow.MlflowClient(address)
        ids = [one.experiment_id for one in client.search_experiments()]
        (run,) = client.search_runs(ids)
        assert run.info.status == "FINISHED"
        for name in ("step/lr", "step/train_loss", "step/images_per_second"):
            history = client.get_metric_history(run.info.run_id, name)
            assert [one.step for one in history] == list(range(1, epochs * STEPS_PER_EPOCH + 1))
        history = client.get_metric_history(run.info.run_id, "epoch/val_accuracy")
        assert [one.step for one in history] == [int(row["step"]) for row in metrics(output)]
        values = [row["val_accuracy"] for row in metrics(output)]
        assert [one.value for one in history] == pytest.approx(values)
