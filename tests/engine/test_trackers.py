"""engine.monitoring.tracking and .trackers: a run's points in real trackers."""

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock

import pytest
from engine.checkpoint.format import Progress
from engine.monitoring import trackers, tracking
from engine.monitoring.curves import BackgroundProcess
from engine.monitoring.logger import Logger
from engine.monitoring.metric import MonitoredMetric
from engine.monitoring.trackers import FOLDER, QUEUE, read_state
from engine.monitoring.tracking import Tracking
from fresh import TEMPLATE
from mlflow_server import mlflow_server
from PIL import Image
from ports import free_port
from test_curves import METRIC, row

pytestmark = pytest.mark.xdist_group("trackers")


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory):
    """Client of a server of MLflow."""
    mlflow = pytest.importorskip("mlflow")
    port = free_port()
    with mlflow_server(tmp_path_factory.mktemp("mlflow"), port):
        yield mlflow.MlflowClient(f"http://127.0.0.1:{port}")


@pytest.fixture
def tracked(mlflow, tmp_path, monkeypatch, clock):
    """Name of the experiment of this test, where its runs are."""
    monkeypatch.setattr(BackgroundProcess, "start", lambda self: None)
    monkeypatch.setattr(tracking, "EXIT_S", 90.0)  # a process imports MLflow on a busy machine
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow.tracking_uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", tmp_path.name)
    return tmp_path.name


def the_run(mlflow, experiment):
    """Return the only run of an experiment."""
    (run,) = mlflow.search_runs([mlflow.get_experiment_by_name(experiment).experiment_id])
    return run


def history(mlflow, run, key):
    return [metric.step for metric in mlflow.get_metric_history(run.info.run_id, key)]


def open_logger(output, step=0, run_id="", checkpoint=None, trackers=("tensorboard", "mlflow")):
    logger = Logger(output, 0, MonitoredMetric(METRIC), trackers=trackers)
    logger.run_id = run_id
    config = {"lr": 0.1 if not step else 0.2, "seed": None, "data": None}
    progress = Progress(epoch=step // 10, step=step)
    logger.open(config, checkpoint, progress, config | {"seed": 0})
    return logger


def log_step(logger, step):
    logger._write_event(lambda events: events.add_scalars("step", {"lr": 0.1}, step))


@pytest.mark.slow
def test_mlflow_has_all_of_a_resumed_run(mlflow, tracked, tmp_path):
    output = tmp_path / "run"
    first = open_logger(output)
    for step in range(1, 10):
        log_step(first, step)
    first.log_epoch(row(1) | {"val_é(1)": 1.0, "val_nan": float("nan")})
    picture = output / "validation" / "epoch_001.png"
    picture.parent.mkdir()
    Image.new("RGB", (4, 3), "red").save(picture)
    first.log_image(10, lambda: picture)
    for step in (11, 12):
        log_step(first, step)
    first.finish_tracking("KILLED")
    run = the_run(mlflow, tracked)
    assert (run.info.status, run.data.tags["run_id"]) == ("KILLED", first.run_id)
    first.folder_lock.file.close()

    again = open_logger(output, 10, first.run_id, output / "last.pt")
    for step in (11, 12, 13):
        log_step(again, step)
    again.log_epoch(row(2))
    Image.new("RGB", (4, 3), "red").save(output / "curves.png")
    again.close()
    run = the_run(mlflow, tracked)
    assert run.info.status == "FINISHED"
    assert history(mlflow, run, "step/lr") == [*range(1, 10), 11, 12, 13]
    assert history(mlflow, run, "epoch/val_loss") == [10, 20]
    assert history(mlflow, run, f"epoch/val_é_1_ {zlib.crc32('val_é(1)'.encode()):08x}") == [10]
    assert run.data.params == {"lr": "0.1", "seed": "0"}
    assert run.data.tags["lr from step 10"] == "0.2"
    assert run.data.tags["processes"] == "1"
    artifacts = {one.path for one in mlflow.list_artifacts(run.info.run_id, "validation")}
    artifacts |= {one.path for one in mlflow.list_artifacts(run.info.run_id)}
    assert artifacts == {"validation", "validation/epoch_001.png", "curves.png"}


@pytest.mark.slow
def test_delivery_ignores_modules_of_the_current_folder(mlflow, tracked, tmp_path, monkeypatch):
    (tmp_path / "engine.py").write_text("raise SystemExit('a stray module')\n")
    monkeypatch.chdir(tmp_path)
    logger = open_logger(tmp_path / "run")
    log_step(logger, 1)
    logger.close()
    assert history(mlflow, the_run(mlflow, tracked), "step/lr") == [1]


@pytest.mark.slow
def test_mlflow_has_each_metric_of_a_class_whatever_its_name(mlflow, tracked, tmp_path):
    """Names may differ only in characters that it refuses, or be no paths to it."""
    names = ("<5 mm", ">5 mm", "no//ne", "..", ".", "a/b", "/", "end/", "é: x.y-z_")
    values = {name: float(index) for index, name in enumerate(names)}
    logger = open_logger(tmp_path / "run")
    logger.log_epoch(row(1) | values)
    logger.close()
    metrics = the_run(mlflow, tracked).data.metrics
    found = [value for key, value in metrics.items() if key.removeprefix("epoch/") not in row(1)]
    assert sorted(found) == sorted(values.values())
    assert metrics["epoch/a/b"] == values["a/b"]
    assert metrics["epoch/é: x.y-z_"] == values["é: x.y-z_"]


@pytest.mark.slow
def test_password_in_the_address_is_kept_nowhere(mlflow, tracked, tmp_path, monkeypatch):
    uri = mlflow.tracking_uri.replace("://", "://bob:s3cr3t-w0rd@")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    logger = open_logger(tmp_path / "run")
    log_step(logger, 1)
    logger.close()
    assert the_run(mlflow, tracked).info.status == "FINISHED"
    assert "://…@" in (tmp_path / "run" / "trackers" / "mlflow.log").read_text()  # MLflow prints it
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if b"s3cr3t-w0rd" in path.read_bytes()]


@pytest.mark.slow
def test_run_on_another_host_continues_without_the_queue(mlflow, tracked, tmp_path):
    """The checkpoint has the run's id and its rows; MLflow knows which of them it has."""
    first = open_logger(tmp_path / "run")
    log_step(first, 9)
    first.log_epoch(row(1))
    log_step(first, 11)
    first.finish_tracking("KILLED")
    output = tmp_path / "other" / "run"
    again = Logger(output, 0, MonitoredMetric(METRIC), trackers=["mlflow"])
    again.run_id, again.rows = first.run_id, first.rows
    again.open({}, output / "last.pt", Progress(epoch=1, step=10))
    for step in (11, 12):
        log_step(again, step)
    again.log_epoch(row(2))
    again.close()
    run = the_run(mlflow, tracked)
    assert history(mlflow, run, "step/lr") == [9, 11, 12]
    assert history(mlflow, run, "epoch/val_loss") == [10, 20]


@pytest.mark.slow
def test_checkpoint_of_another_folder_starts_a_run_of_its_own(mlflow, tracked, tmp_path):
    first = open_logger(tmp_path / "first")
    first.log_epoch(row(1))
    first.close()
    second = Logger(tmp_path / "second", 0, MonitoredMetric(METRIC), trackers=["mlflow"])
    second.run_id, second.rows = first.run_id, first.rows
    second.open({}, tmp_path / "first" / "last.pt", Progress(epoch=1, step=10))
    second.close()
    experiment = mlflow.get_experiment_by_name(tracked)
    runs = mlflow.search_runs([experiment.experiment_id])
    assert {run.info.run_name for run in runs} == {"first", "second"}
    assert [history(mlflow, run, "epoch/lr") for run in runs] == [[10], [10]]


@pytest.mark.slow
def test_tracker_that_is_down_gets_everything_later(mlflow, tracked, tmp_path, monkeypatch, capsys):
    """First it is down; then it comes back while the run lasts."""
    port = free_port()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    logger = open_logger(tmp_path / "run")
    longest = 0.0
    for step in range(1, 6):
        started = time.perf_counter_ns()
        log_step(logger, step)
        longest = max(longest, (time.perf_counter_ns() - started) / 1e9)
    assert longest < 0.1
    wait_until(lambda: read_state(logger.output, "mlflow").get("problem"))
    for epoch in (1, 2):
        logger.log_epoch(row(epoch))
    warnings = [one for one in capsys.readouterr().out.splitlines() if "warning:" in one]
    assert len(warnings) == 1
    assert "--tracker mlflow: " in warnings[0]
    with mlflow_server(tmp_path / "server", port):
        wait_until(lambda: not logger.tracking._left("mlflow"))
        logger.close()
        client = type(mlflow)(f"http://127.0.0.1:{port}")
        run = the_run(client, tracked)
        assert history(client, run, "step/lr") == list(range(1, 6))
        assert run.info.status == "FINISHED"
    assert "not delivered" not in capsys.readouterr().out


def wait_until(condition, seconds=90.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


class Refusal(BaseHTTPRequestHandler):
    """Server that accepts no key."""

    def do_GET(self):
        self.send_response(401)
        self.end_headers()
        self.wfile.write(f"wrong key: {self.headers['Authorization']}".encode())

    do_POST = do_GET

    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_wrong_key_is_reported_and_kept_nowhere(mlflow, tracked, tmp_path, monkeypatch, capsys):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusal)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "s3cr3t-t0ken")
    monkeypatch.setattr(tracking, "EXIT_S", 2.0)
    output = tmp_path / "run"
    logger = open_logger(output)
    log_step(logger, 1)
    wait_until(lambda: read_state(logger.output, "mlflow").get("problem"))
    logger.log_epoch(row(1))
    started = time.monotonic()
    logger.close()
    assert time.monotonic() - started < 12
    server.shutdown()
    said = capsys.readouterr().out
    assert "401" in said
    command = f"python -m engine.monitoring.deliver {output}"
    assert "mlflow: 5 records are not delivered (" in said
    assert command in said
    files = [path for path in output.rglob("*") if path.is_file()]
    assert not [path for path in files if b"s3cr3t-t0ken" in path.read_bytes()]
    assert "s3cr3t-t0ken" not in said

    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow.tracking_uri)
    done = subprocess.run(
        [sys.executable, *command.split()[1:]],
        cwd=Path(tracking.__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "mlflow: 5 records delivered" in done.stdout
    run = the_run(mlflow, tracked)
    assert history(mlflow, run, "step/lr") == [1]
    assert run.info.status == "FINISHED"


@pytest.fixture
def idle(monkeypatch):
    """Trackers without processes: the points stay in the queue."""
    monkeypatch.setattr(Tracking, "_start_process", lambda self, name: None)


def queue_of(output):
    with (output / FOLDER / QUEUE).open() as file:
        return [json.loads(line) for line in file]


@pytest.mark.usefixtures("idle", "clock")
def test_without_other_trackers_there_is_no_queue(tmp_path):
    logger = open_logger(tmp_path, trackers=["tensorboard"])
    assert logger.run_id == ""
    assert not (tmp_path / FOLDER).exists()
    assert any(tmp_path.glob("events.out.*"))


@pytest.mark.usefixtures("idle", "clock")
def test_without_tensorboard_there_are_no_events(tmp_path):
    open_logger(tmp_path, trackers=["mlflow"])
    assert not any(tmp_path.glob("events.out.*"))


@pytest.mark.usefixtures("idle", "clock")
def test_run_without_a_checkpoint_is_continued_by_resume_auto_only(tmp_path):
    """It was killed within a line."""
    ids = []
    for flag in (None, Path("auto"), None):
        logger = Logger(tmp_path, 0, MonitoredMetric(METRIC), trackers=["mlflow"])
        logger.open({"resume": flag}, None, Progress())
        log_step(logger, 5)
        ids.append(logger.run_id)
        with (tmp_path / FOLDER / QUEUE).open("a") as file:
            file.write('{"group": "st')
        logger.folder_lock.file.close()
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.usefixtures("idle", "clock")
def test_queue_that_cannot_be_read_keeps_its_points(tmp_path, monkeypatch, capsys):
    logger = open_logger(tmp_path, trackers=["mlflow"])
    log_step(logger, 5)
    logger.folder_lock.file.close()
    records = queue_of(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(tracking, "read_start", mock.Mock(side_effect=OSError(5, "I/O error")))
        logger = open_logger(tmp_path, 5, "", tmp_path / "last.pt", ["mlflow"])
    assert "nothing is logged to the trackers (I/O error)" in capsys.readouterr().out
    assert queue_of(tmp_path) == records


@pytest.mark.usefixtures("clock")
def test_folder_of_the_trackers_is_removed_during_the_run(tmp_path, capsys):
    logger = open_logger(tmp_path, trackers=["mlflow"])
    (process,) = logger.tracking._processes.values()
    process.kill()
    process.wait()
    shutil.rmtree(tmp_path / FOLDER)
    for step in (1, 2):
        logger.tracking.check()
        log_step(logger, step)
    error = capsys.readouterr().out
    assert error.count("warning") == 1
    assert "mlflow: its process can't be started (No such file or directory)" in error


def resumed_id(output, run_id):
    """Return the id of a run that resumes from a checkpoint in `output` with the id `run_id`."""
    logger = open_logger(output, 10, run_id, output / "last.pt", ["mlflow"])
    logger.folder_lock.file.close()
    return logger.run_id


@pytest.mark.usefixtures("idle", "clock")
def test_copied_folder_is_a_run_of_its_own(tmp_path, capsys):
    first, copy, another = (tmp_path / name for name in ("first", "copy", "another"))
    logger = open_logger(first, trackers=["mlflow"])
    log_step(logger, 5)
    logger.folder_lock.file.close()
    shutil.copytree(first, copy)
    copy_id = resumed_id(copy, logger.run_id)
    assert copy_id != logger.run_id
    assert f"{copy} is a copy of {first}: a new run" in capsys.readouterr().out
    assert [next(iter(record)) for record in queue_of(copy)] == ["start"]
    assert resumed_id(copy, logger.run_id) == copy_id  # killed before its first checkpoint
    shutil.copytree(copy, another)
    another_id = resumed_id(another, logger.run_id)
    assert another_id not in (copy_id, logger.run_id)
    assert resumed_id(another, copy_id) == resumed_id(another, another_id) == another_id
    assert resumed_id(first, logger.run_id) == logger.run_id


@pytest.mark.usefixtures("idle", "clock")
def test_folder_that_was_moved_or_has_two_paths_continues_its_run(tmp_path):
    first, mounted, moved = (tmp_path / name for name in ("first", "mounted", "moved"))
    logger = open_logger(first, trackers=["mlflow"])
    logger.folder_lock.file.close()
    (mounted / FOLDER).mkdir(parents=True)
    (mounted / FOLDER / QUEUE).hardlink_to(first / FOLDER / QUEUE)
    assert resumed_id(mounted, logger.run_id) == logger.run_id
    shutil.rmtree(mounted)
    assert resumed_id(first, logger.run_id) == logger.run_id
    first.rename(moved)
    assert resumed_id(moved, logger.run_id) == logger.run_id


@pytest.mark.usefixtures("idle", "clock")
def test_torn_line_is_removed(tmp_path):
    for _ in range(2):
        logger = open_logger(tmp_path, 10, "0123456789abcdef", tmp_path / "last.pt", ["mlflow"])
        log_step(logger, 11)
        path = tmp_path / FOLDER / QUEUE
        text = path.read_text()
        path.write_text(text + '{"group": "st')
        logger.folder_lock.file.close()
    path.write_text(text)
    kinds = [next(iter(record)) for record in queue_of(tmp_path)]
    assert kinds == ["start", "group", "start", "group"]


@pytest.mark.usefixtures("idle", "clock")
def test_epochs_that_were_trained_without_a_tracker_are_queued_later(tmp_path, monkeypatch):
    """Delivery leaves out those that the tracker has."""
    monkeypatch.setattr(BackgroundProcess, "start", lambda self: None)
    monkeypatch.setattr(Tracking, "check", lambda self: None)
    run_id, checkpoint = "", None
    for epoch, names in ((1, ["mlflow"]), (2, ["tensorboard"]), (3, ["mlflow"])):
        logger = open_logger(tmp_path, 10 * (epoch - 1), run_id, checkpoint, names)
        logger.log_epoch(row(epoch))
        logger._write_rows()
        run_id, checkpoint = logger.run_id, tmp_path / "last.pt"
        logger.folder_lock.file.close()
    points = [record["step"] for record in queue_of(tmp_path) if record.get("group") == "epoch"]
    assert points == [10, 10, 20, 30]


def test_queue_that_is_a_fifo_blocks_nothing(tmp_path):
    os.mkfifo(tmp_path / "queue.jsonl")
    descriptor = os.open(tmp_path / "queue.jsonl", os.O_RDWR)  # else a failure would never end
    os.write(descriptor, b'{"start": {"run_id": "0123456789abcdef"}}\n')
    assert tracking._queued_start(tmp_path / "queue.jsonl") == {}
    os.close(descriptor)


def test_git_changes_include_new_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "PROJECT", tmp_path)
    monkeypatch.setattr(tracking.dist, "get_world_size", lambda: 1)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=b"]

    def changes() -> str | None:
        return tracking._environment().get("git_changes")

    assert changes() is None  # no repository
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    assert changes() == "no"
    (tmp_path / "model.py").touch()
    assert changes() == "yes"
    (tmp_path / ".git" / "index").write_bytes(b"broken")
    assert changes() == "unknown"


@pytest.mark.usefixtures("idle", "clock")
def test_environment_variables_are_not_logged(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t")
    open_logger(tmp_path, trackers=["mlflow"])
    assert not [path for path in tmp_path.rglob("*.*") if b"s3cr3t" in path.read_bytes()]
    (record,) = queue_of(tmp_path)
    assert {"python", "torch", "platform", "git_commit"} <= record["start"]["environment"].keys()
    assert record["start"]["parameters"] == {"lr": "0.1", "seed": "0"}


@pytest.mark.usefixtures("idle", "clock")
def test_points_of_epochs_lost_to_a_full_disk_are_queued_later(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(BackgroundProcess, "start", lambda self: None)
    monkeypatch.setattr(Tracking, "check", lambda self: None)
    logger = open_logger(tmp_path, trackers=["mlflow"])
    queue = logger.tracking._queue
    with Path("/dev/full").open("wb", buffering=0) as full:
        logger.tracking._queue = full
        log_step(logger, 1)
        logger.log_epoch(row(1))
    said = capsys.readouterr().out
    assert said.count("warning: points of the trackers are missing (No space left") == 1
    logger.tracking._queue = queue
    logger.log_epoch(row(2))
    points = [record for record in queue_of(tmp_path) if record.get("group") == "epoch"]
    assert [record["step"] for record in points] == [10, 20]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("name", ["", QUEUE, "mlflow.log"])
def test_links_are_not_followed(tmp_path, monkeypatch, capsys, name):
    """They may lead out of a folder that someone else has made."""
    monkeypatch.setattr(tracking, "_environment", dict)
    monkeypatch.setattr(subprocess, "Popen", mock.Mock())
    target = tmp_path / "target"
    target.mkdir()
    file = target / QUEUE
    file.write_text("precious")
    folder = tmp_path / "run" / FOLDER
    (folder if name else folder.parent).mkdir(parents=True)
    (folder / name if name else folder).symlink_to(file if name else target)
    logger = open_logger(folder.parent, trackers=["mlflow"])
    assert logger.tracking is None
    assert "warning: nothing is logged to the trackers (" in capsys.readouterr().out
    assert file.read_text() == "precious"


def run_with(tracker, output):
    """Log, resume and finish a run; steps after 10 are logged twice."""
    first = open_logger(output, trackers=[tracker])
    for step in (5, 9):
        log_step(first, step)
    first.log_epoch(row(1))
    picture = output / "validation" / "epoch_001.png"
    picture.parent.mkdir()
    Image.new("RGB", (4, 3), "red").save(picture)
    first.log_image(10, lambda: picture)
    log_step(first, 11)
    first.finish_tracking("KILLED")
    first.folder_lock.file.close()
    again = open_logger(output, 10, first.run_id, output / "last.pt", [tracker])
    for step in (11, 12):
        log_step(again, step)
    again.log_epoch(row(2))
    again.close()
    return first.run_id


def wandb_records(data):
    """Yield the records of an offline run, in the format of LevelDB's log after seven bytes."""
    position, record = 7, b""
    while position < len(data):
        if -position % 32768 < 7:  # no room for a head in this block
            position += -position % 32768
            continue
        size, kind = struct.unpack_from("<HB", data, position + 4)
        record += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def read_wandb(output):
    """Return the rows of a run's offline files, and the ids, projects and names that they have."""
    wandb_internal_pb2 = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    rows, runs = [], set()
    for path in sorted((output / FOLDER / "wandb").glob("offline-run-*/*.wandb")):
        for data in wandb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.HasField("run"):
                runs.add((record.run.run_id, record.run.project, record.run.display_name))
            items = record.history.item if record.HasField("history") else ()
            rows.append({"/".join(one.nested_key) or one.key: one.value_json for one in items})
    return rows, runs


@pytest.mark.slow
def test_wandb_has_all_points_after_its_process_is_killed(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    queue = tmp_path / FOLDER / QUEUE
    queue.parent.mkdir()
    start = {"run_id": "0123456789abcdef", "step": 0, "trackers": ["wandb"], "project": "p"}
    start |= {"name": "run", "parameters": {}, "environment": {}}
    points = [
        {"group": "step", "step": step, "time": 0.0, "values": {"loss": 1.0}} for step in range(99)
    ]
    queue.write_text("".join(json.dumps(one) + "\n" for one in ({"start": start}, *points)))
    send = """
        import os, signal, sys
        from pathlib import Path
        from engine.monitoring.deliver import Delivery

        delivery = Delivery(Path(sys.argv[1]), "wandb")
        delivery.send()
        if sys.argv[2:]:
            delivery.close()
            sys.exit()
        for thread in os.listdir("/proc/self/task"):
            for child in Path(f"/proc/self/task/{thread}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(send), str(tmp_path)]
    assert subprocess.run(command, cwd=TEMPLATE).returncode == -signal.SIGKILL
    assert subprocess.run([*command, "close"], cwd=TEMPLATE).returncode == 0
    steps = {int(one["global_step"]) for one in read_wandb(tmp_path)[0] if "step/loss" in one}
    assert steps == set(range(99))


@pytest.mark.usefixtures("clock")
def test_wandb_offline_has_each_step_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tracking, "EXIT_S", 90.0)
    monkeypatch.setattr(BackgroundProcess, "start", lambda self: None)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t" * 7)
    output = tmp_path / "run"
    run_id = run_with("wandb", output)
    assert "not delivered" not in capsys.readouterr().out
    rows, runs = read_wandb(output)
    assert runs == {(run_id, tracking.PROJECT.name, "run")}
    steps = [int(one["global_step"]) for one in rows if "step/lr" in one]
    assert steps == [5, 9, 11, 12]
    assert [int(one["global_step"]) for one in rows if "epoch/val_loss" in one] == [10, 20]
    images = [one for one in rows if any(name.startswith("validation/") for name in one)]
    assert [int(one["global_step"]) for one in images] == [10]
    files = [path for path in output.rglob("*") if path.is_file()]
    assert not [path for path in files if b"s3cr3t" in path.read_bytes()]


@pytest.mark.usefixtures("clock")
def test_wandb_that_is_down_is_reported(tmp_path, monkeypatch, capsys):
    pytest.importorskip("wandb")
    monkeypatch.setattr(tracking, "EXIT_S", 3.0)
    monkeypatch.setattr(BackgroundProcess, "start", lambda self: None)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t" * 7)
    logger = open_logger(tmp_path / "run", trackers=["wandb"])
    log_step(logger, 1)
    started = time.monotonic()
    logger.close()
    assert time.monotonic() - started < 8
    assert "wandb: 3 records are not delivered" in capsys.readouterr().out
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if b"s3cr3t" in path.read_bytes()]


@pytest.mark.usefixtures("clock")
def test_trackio_has_each_step_once(tmp_path, monkeypatch, capsys):
    pytest.importorskip("trackio")
    import sqlite3

    monkeypatch.setattr(tracking, "EXIT_S", 90.0)
    monkeypatch.setattr(BackgroundProcess, "start", lambda self: None)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    run_id = run_with("trackio", tmp_path / "run")
    assert "not delivered" not in capsys.readouterr().out
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        table = connection.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
        (config,) = connection.execute("SELECT config FROM configs").fetchone()
    assert {name for name, _, _ in table} == {f"run-{run_id[:8]}"}
    rows = [(step, json.loads(metrics)) for _, step, metrics in table]
    assert [step for step, one in rows if "step/lr" in one] == [5, 9, 11, 12]
    assert [step for step, one in rows if "epoch/val_loss" in one] == [10, 20]
    assert [step for step, one in rows if "validation" in one] == [10]
    assert json.loads(config)["seed"] == "0"


@pytest.mark.slow
def test_process_that_is_killed_is_started_again(mlflow, tracked, tmp_path):
    """Such as by a lack of memory."""
    logger = open_logger(tmp_path / "run")
    log_step(logger, 1)
    wait_until(lambda: not logger.tracking._left("mlflow"))
    process = logger.tracking._processes["mlflow"]
    process.kill()
    process.wait()
    log_step(logger, 2)
    logger.log_epoch(row(1))
    assert logger.tracking._processes["mlflow"] is not process
    logger.close()
    run = the_run(mlflow, tracked)
    assert history(mlflow, run, "step/lr") == [1, 2]
    assert run.info.status == "FINISHED"


HANGING = """
import os, socket, sys, torch, torch.distributed as dist
from pathlib import Path
from engine.monitoring.tracking import Tracking
output = Path(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{output}/store", rank=0, world_size=1)
tracking = Tracking(output, ["mlflow"], print, print)
tracking.start("", True, 0, {})
print(tracking._processes["mlflow"].pid, flush=True)
input()
os._exit(1)
"""


@pytest.mark.slow
def test_process_ends_soon_after_its_run_although_the_tracker_hangs(tmp_path):
    pytest.importorskip("mlflow")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        variables = os.environ | {"MLFLOW_TRACKING_URI": address}
        variables["PYTHONPATH"] = str(tracking.PROJECT)
        command = [sys.executable, "-c", HANGING, str(tmp_path)]
        with subprocess.Popen(
            command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as run:
            pid = int(run.stdout.readline())
            server.accept()  # it has connected, and waits for an answer
            run.stdin.close()
        started = time.monotonic()
        wait_until(lambda: not is_running(pid), seconds=60)
        assert time.monotonic() - started < 15


@pytest.mark.parametrize("name", ["wandb", ".wandb"])
def test_wandb_follows_no_link_out_of_the_folder(tmp_path, name):
    pytest.importorskip("wandb")
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / name).symlink_to(tmp_path)
    with pytest.raises(OSError, match="wandb is a link"):
        trackers.ADAPTERS["wandb"](tmp_path)


@pytest.mark.slow
def test_wandb_reads_settings_in_the_folder_of_the_project_only(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name in ("project", "current"):
        settings = tmp_path / name / "wandb" / "settings"
        settings.parent.mkdir(parents=True)
        settings.write_text(f"[default]\nbase_url = http://{name}.example\n")
    current = tmp_path / "current"
    monkeypatch.chdir(current)
    monkeypatch.setattr(trackers, "PROJECT", tmp_path / "project")
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", "elsewhere")
    wandb.teardown()  # of the settings that another test has read
    tracker = trackers.Wandb(Path("run"))
    start = {"run_id": "0123456789abcdef", "name": "run", "project": "p"}
    tracker.start(start | {"parameters": {}, "environment": {}})
    settings = tracker.run.settings
    base_url = settings.base_url
    assert settings.disable_git  # of a repository in the run's folder, git would run commands
    tracker.finish("FINISHED")
    wandb.teardown()
    assert base_url == "http://project.example"
    assert Path.cwd() == current
    assert list(current.glob("run/trackers/wandb/offline-run-*"))


def is_running(pid):
    """Return whether a process has not ended. Its parent may not have waited for it."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.slow
@pytest.mark.usefixtures("clock")
def test_wandb_rejects_a_wrong_key(tmp_path, monkeypatch, capsys):
    pytest.importorskip("wandb")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusal)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(tracking, "EXIT_S", 3.0)
    monkeypatch.setattr(BackgroundProcess, "start", lambda self: None)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t" * 7)
    logger = open_logger(tmp_path / "run", trackers=["wandb"])
    log_step(logger, 1)
    wait_until(lambda: read_state(logger.output, "wandb").get("problem"))
    assert "in use" not in read_state(logger.output, "wandb")["problem"]
    logger.log_epoch(row(1))
    time.sleep(10)  # for another attempt
    logger.close()
    server.shutdown()
    state = json.loads((tmp_path / "run" / FOLDER / "wandb.json").read_text())
    assert "in use" not in state["problem"]
    said = capsys.readouterr().out
    assert said.count("warning: --tracker wandb: ") == 1
    assert "wandb: 5 records are not delivered (" in said
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if b"s3cr3t" in path.read_bytes()]
