"""Runs that are killed and resumed are one run in the tracker, with each step once."""

import contextlib
import math
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from mlflow_server import mlflow_server
from ports import free_port
from processes import fork_server
from running import SCREENED, become_script, metrics
from transformer import with_transformer

pytestmark = pytest.mark.xdist_group("trackers")
FLAGS = ("--arch", "mobilenet_v3_small", "--opt-level", "O0")
FLAGS += ("--log-every", "1", "--save-every", "3", "--resume", "auto", "--tracker", "mlflow")
STEPS_PER_EPOCH = 22


def in_session(*arguments):
    """Run main.py in a session of its own, with which its processes are killed."""
    os.setsid()
    become_script(*arguments)


class Ranks:
    """Processes of a run, each in a session of its own."""

    def __init__(self, project, output, epochs, variables, flags, world_size):
        context = fork_server()
        command = ["main.py", *FLAGS, *flags, "--epochs", str(epochs), "--output", str(output)]
        variables = variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        variables |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        self.processes = []
        for rank in map(str, range(world_size)):
            own = variables | {"RANK": rank, "LOCAL_RANK": rank}
            arguments = (project, command, own, [output.with_suffix(".log")] * 2)
            self.processes.append(context.Process(target=in_session, args=arguments))
            self.processes[-1].start()

    def join(self, seconds=None):
        """Wait; return the exit statuses, of which None is that of a process that runs."""
        deadline = time.monotonic() + (seconds or math.inf)
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()) if seconds else None)
        return [process.exitcode for process in self.processes]

    def kill(self, kill):
        """Kill all processes by `kill`, which is os.kill or os.killpg."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                kill(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("ddp", "kills"),
    [
        pytest.param("apex", 4, marks=pytest.mark.slow),
        pytest.param("apex", 30, marks=pytest.mark.weekly),
        pytest.param("fsdp", 4, marks=pytest.mark.weekly),
    ],
)
def test_random_kills_leave_one_run_with_each_step_once(bake, tmp_path, ddp, kills):
    """Either all processes are killed, or the one that delivers the points survives a while.

    With FSDP, two processes train.
    """
    mlflow = pytest.importorskip("mlflow")
    chosen = random.Random(kills)
    output, port = tmp_path / "run", free_port()
    flags, world_size = ("--batch-size", "64"), 1
    project = bake()
    if ddp == "fsdp":
        generated = bake(ddp=ddp, opt_level="O0", sync_bn=False)
        project = with_transformer(generated, tmp_path / "project")
        flags, world_size = ("--batch-size", "32"), 2
    address = f"http://127.0.0.1:{port}"
    variables = SCREENED | {"MLFLOW_TRACKING_URI": address, "OMP_NUM_THREADS": "1"}
    with mlflow_server(tmp_path / "mlflow", port):
        epochs, killed = 2, 0
        while killed < kills:
            ranks = Ranks(project, output, epochs, variables, flags, world_size)
            statuses = ranks.join(chosen.uniform(3, 12 * world_size))
            if None in statuses:
                ranks.kill(chosen.choice([os.kill, os.killpg]))
                killed += 1
            elif set(statuses) == {0}:
                epochs += 2
            else:
                pytest.fail(output.with_suffix(".log").read_text()[-3000:])
            ranks.join()
        ranks = Ranks(project, output, epochs, variables, flags, world_size)
        assert set(ranks.join(600)) == {0}, output.with_suffix(".log").read_text()[-3000:]
        # The last run waits ten seconds for its points, which a busy machine may not deliver.
        command = [sys.executable, "-m", "engine.monitoring.deliver", str(output)]
        subprocess.run(command, cwd=project, env=os.environ | variables, check=True, timeout=120)
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
