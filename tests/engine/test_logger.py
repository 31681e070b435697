"""engine.monitoring.logger: console, metrics.csv and TensorBoard events."""

import contextlib
import csv
import errno
import fcntl
import gc
import io
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from apex_native import log_rank_zero
from engine import UserError
from engine.checkpoint.format import Progress
from engine.data.skipping import RECORD
from engine.launch import RESTART
from engine.monitoring import console, curves, lock, run_files
from engine.monitoring.curves import BackgroundProcess
from engine.monitoring.logger import Logger
from engine.monitoring.metric import MonitoredMetric
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_curves import METRIC, row
from tqdm import tqdm

ACCURACY = MonitoredMetric(METRIC)


def open_logger(output, progress=None, resume=None, flag=None):
    """Return a logger; `flag` is the value of --resume, `resume` the checkpoint that it found."""
    logger = Logger(output, 0, ACCURACY)
    logger.open({"lr": 0.1, "resume": flag}, resume, progress or Progress())
    return logger


@pytest.fixture
def no_curves(monkeypatch):
    """Draw no curves, which takes a process some seconds."""
    monkeypatch.setattr(BackgroundProcess, "start", lambda self: None)


@pytest.fixture
def logger(tmp_path, clock):
    """Logger of a run in a folder of its own."""
    return open_logger(tmp_path / "run")


@pytest.fixture
def meter(logger, clock):
    """Meter of the run, after a step of one second."""
    meter = logger.start_epoch(torch.device("cpu"), 10)
    meter.update(torch.tensor(4.0))
    clock[0] += 1.0
    return meter


def test_config_names_the_checkpoints_that_a_run_has_discarded(tmp_path, clock):
    logger = Logger(tmp_path, 0, ACCURACY)
    logger.discarded = [17]
    logger.open({"lr": 0.1}, None, Progress())
    assert json.loads((tmp_path / "config.json").read_text())["DISCARDED"] == [17]


def test_open_creates_parent_folders(tmp_path):
    output = tmp_path / "one" / "two"
    open_logger(output)
    assert (output / "metrics.csv").exists()


@pytest.mark.parametrize("flag", [None, Path("auto")])
def test_config_that_is_not_of_a_run_is_kept(tmp_path, flag):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"config\.json is not that of a run: move it away"):
        open_logger(tmp_path, flag=flag)
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["config.json"]
    assert (tmp_path / "config.json").read_text() == "{}"


def test_sharded_checkpoint_under_another_name_is_kept(tmp_path):
    (tmp_path / "best").mkdir()
    with pytest.raises(UserError, match="already holds a run: add --resume auto"):
        open_logger(tmp_path)


@pytest.mark.usefixtures("no_curves")
def test_folder_that_was_removed_is_locked_again_unless_it_is_another_runs(logger):
    (logger.output / ".lock").unlink()
    logger.lock_again()
    assert (logger.output / ".lock").exists()
    shutil.rmtree(logger.output)
    logger.lock_again()
    assert [one.name for one in logger.output.iterdir()] == [".lock"]
    shutil.rmtree(logger.output)
    logger.output.mkdir()
    (logger.output / RECORD).touch()  # by a data-loading process
    logger.lock_again()
    shutil.rmtree(logger.output)
    logger.output.mkdir()
    (logger.output / "config.json").touch()
    with pytest.raises(UserError, match="was replaced while this run wrote to it"):
        logger.lock_again()
    assert [one.name for one in logger.output.iterdir()] == ["config.json"]


@pytest.mark.usefixtures("no_curves")
def test_folder_that_was_removed_is_locked_once_the_disk_answers_again(logger, monkeypatch):
    shutil.rmtree(logger.output)
    opened = os.open

    def fail(path, *arguments):
        if str(path).endswith(".lock"):
            raise OSError(116, "Stale")
        return opened(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        logger.log_epoch(row(1))
    logger.lock_again()
    assert logger.folder_lock._is_locked(logger.output / ".lock")


@pytest.mark.usefixtures("no_curves")
def test_folder_that_does_not_answer_for_a_moment_costs_a_warning(logger, monkeypatch, capsys):
    """Such as a network's disk; the lock is held all the same."""
    with monkeypatch.context() as patch:
        patch.setattr(
            logger.folder_lock, "_is_locked", mock.Mock(side_effect=OSError(116, "Stale"))
        )
        logger.lock_again()
        logger.log_epoch(row(1))
    logger.log_epoch(row(2))
    assert (logger.output / "metrics.csv").read_text().count("\n") == 3
    assert capsys.readouterr().out.count(f"warning: {logger.output} does not answer (Stale)") == 1


@pytest.mark.usefixtures("no_curves")
@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_config_that_can_not_be_read_for_a_moment_costs_a_warning(
    logger, monkeypatch, capsys, number
):
    exists = Path.exists

    def fail(path):
        if path.name == "config.json":
            raise OSError(number, "no answer")
        return exists(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", fail)
        logger.log_epoch(row(1))
    assert "warning: config.json may be missing (no answer)" in capsys.readouterr().out


@pytest.mark.usefixtures("no_curves")
def test_folder_that_was_removed_is_a_whole_run_again(logger):
    config = (logger.output / "config.json").read_text()
    logger.log_epoch(row(1))
    shutil.rmtree(logger.output)
    logger.log_epoch(row(2))
    assert (logger.output / "config.json").read_text() == config
    assert (logger.output / "metrics.csv").read_text().count("\n") == 3


@pytest.mark.usefixtures("no_curves")
def test_table_without_a_step_in_its_epoch_has_all_columns(logger):
    """Resumed on more processes, an epoch may have too few samples left for a step."""
    logger.log_epoch(row(1, images_per_second=0.0))
    [found] = run_files.read_run(logger.output).rows
    assert found == {name: value for name, value in row(1).items() if name != "images_per_second"}


def test_picture_of_an_evaluation_takes_no_lock(logger, monkeypatch):
    """A training may be running in the folder of the checkpoint."""
    logger.folder_lock.file.close()
    logger.folder_lock.file = None
    monkeypatch.setattr(logger.folder_lock, "acquire", pytest.fail)
    written = []
    logger.log_image(1, lambda: written.append(1) or logger.output / "samples.txt")
    assert written


def test_folder_that_was_removed_before_a_picture_is_locked_again(logger):
    """The picture makes the folder anew, which must not look like another run's."""
    logger.lock_again()
    shutil.rmtree(logger.output)

    def write() -> Path:
        (logger.output / "validation").mkdir(parents=True)
        return logger.output / "validation" / "samples.txt"

    logger.log_image(1, write)
    logger.lock_again()
    assert {one.name for one in logger.output.iterdir()} == {".lock", "validation"}


@pytest.mark.usefixtures("no_curves")
@pytest.mark.parametrize("kind", [Path, str, None])
def test_validation_that_writes_no_picture_ends_no_events(logger, tmp_path, capsys, kind):
    text = tmp_path / "epoch_001.txt"
    text.write_text("0.5 for 0.7")
    logger.log_image(10, lambda: kind and kind(text))
    logger.log_epoch(row(1))
    logger.close()
    assert "warning" not in capsys.readouterr().out
    assert events(logger.output)["epoch/val_loss"] == [10]


@pytest.mark.usefixtures("no_curves")
def test_resume_auto_restarts_a_run_without_a_checkpoint(logger):
    """Its row is written before the checkpoint."""
    logger.log_epoch(row(1))
    logger.folder_lock.file.close()
    with pytest.raises(UserError, match="already holds a run: add --resume auto"):
        open_logger(logger.output)
    again = open_logger(logger.output, flag=Path("auto"))
    assert not epochs_in_table(logger.output)
    again.folder_lock.file.close()
    incomplete = logger.output / "step-1.tmp"
    incomplete.mkdir()
    open_logger(logger.output).folder_lock.file.close()
    for create in (incomplete.with_suffix(".pt").touch, incomplete.with_suffix("").mkdir):
        create()
        with pytest.raises(UserError, match="already holds a run"):
            open_logger(logger.output)
        incomplete.with_suffix(".pt").unlink(missing_ok=True)


@pytest.mark.parametrize("target", ["last.pt", "step-7.pt"])
def test_resume_auto_is_not_advised_where_it_is_given(tmp_path, target):
    """The only checkpoint is a link, which leads to itself or to a file that is missing."""
    (tmp_path / "last.pt").symlink_to(target)
    with pytest.raises(UserError, match="its checkpoints are elsewhere, or can't be read"):
        open_logger(tmp_path, flag=Path("auto"))


def epochs_in_table(output):
    with (output / "metrics.csv").open() as file:
        return [int(row["epoch"]) for row in csv.DictReader(file)]


def events(output):
    """Return the steps of each curve and image that TensorBoard shows."""
    found = EventAccumulator(str(output)).Reload()
    tags = found.Tags()
    steps = {tag: [event.step for event in found.Scalars(tag)] for tag in tags["scalars"]}
    return steps | {tag: [event.step for event in found.Images(tag)] for tag in tags["images"]}


@pytest.mark.gpu
def test_log_step_waits_only_for_the_previous_record(clock, tmp_path):
    logger = open_logger(tmp_path)
    gpu = torch.device("cuda")
    meter = logger.start_epoch(gpu, 10)
    scale = torch.full((), 8.0, device=gpu)
    for step in range(1, 31):
        meter.update(torch.full((), float(step), device=gpu))
        if step % 10 == 0:
            torch.cuda._sleep(10**9)  # half a second
            done = torch.cuda.Event()
            done.record()
            torch.cuda.set_sync_debug_mode("error")
            try:
                record = logger.log_step(logger.progress_bar((), ""), meter, step, 0.1, scale)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert step == 10 or not done.query()  # the first one has kernels and memory prepared
            scale *= 2
            seen = None
            if record is not None:
                seen = record.step, record.train_loss, record.nonfinite_losses, record.loss_scale
            assert seen == {10: None, 20: (10, 5.5, 0, 8), 30: (20, 15.5, 0, 16)}[step]
    assert meter.read().step == 30
    logger.log_epoch(row(1, step=30) | meter.results())
    assert events(tmp_path)["step/train_loss"] == [10, 20, 30]


@pytest.mark.parametrize(
    ("rank", "is_terminal", "is_shown"), [(0, True, True), (0, False, False), (1, True, False)]
)
def test_progress_bars_are_shown_on_a_terminal(
    tmp_path, monkeypatch, capsys, rank, is_terminal, is_shown
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    logger = Logger(tmp_path, rank, ACCURACY)
    assert list(logger.progress_bar(range(3), "epoch 1")) == [0, 1, 2]
    with logger.phase("reading the data", 60):
        pass
    said = capsys.readouterr().err
    assert ("epoch 1" in said) == ("reading the data: 00:00" in said) == is_shown
    assert is_shown or not said


@pytest.mark.parametrize("rank", [0, 1])
def test_slow_phase_is_logged_without_a_terminal(tmp_path, monkeypatch, capsys, rank):
    monkeypatch.setattr(console, "FIRST_LINE_S", 0.3)
    monkeypatch.setattr(console, "LINE_S", 0.5)
    logger = Logger(tmp_path, rank, ACCURACY)
    with logger.phase("building the model", 60):
        time.sleep(1.0)
    with logger.phase("reading the data", 60):
        pass
    seconds = [] if rank else [0, 1]
    expected = [f"building the model: {s} s; the limit is 60 s, see --timeout" for s in seconds]
    assert capsys.readouterr().out.splitlines() == expected


def test_console_works_without_standard_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    logger = Logger(tmp_path, 0, ACCURACY)
    with logger.phase("reading the data", 60):
        logger.info("read")
    assert list(logger.progress_bar(range(3), "epoch 1")) == [0, 1, 2]
    assert "read\n" in capsys.readouterr().out


@pytest.mark.slow
def test_run_writes_events_and_curves(logger, meter, capsys, tmp_path):
    picture = tmp_path / "validation" / "epoch_001.png"
    picture.parent.mkdir()
    Image.new("RGB", (4, 3), "red").save(picture)
    logger.log_step(logger.progress_bar((), "epoch"), meter, 5, lr=0.1, loss_scale=1.0)
    logger.log_epoch(row(1))
    logger.log_image(10, lambda: picture)
    logger.log_epoch(row(2, loss_scale=32768.0))
    logger.close()
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("best val_accuracy 0.7500 in epoch 2, took 0:00:")
    assert last.endswith(
        f"500 images/s; checkpoints, metrics.csv and curves.png are in {logger.output}"
    )
    found = events(logger.output)
    assert {tag for tag, steps in found.items() if steps == [10, 20]} == {
        f"epoch/{name}" for name in list(row(1))[2:]
    }
    assert found["validation"] == [10]
    names = ("train_loss", "lr", "loss_scale", "images_per_second")
    assert {tag for tag, steps in found.items() if steps == [5]} == {f"step/{n}" for n in names}
    with Image.open(logger.output / "curves.png") as image:
        assert image.format == "PNG"
    assert not list(logger.output.glob("*.tmp"))


@pytest.mark.parametrize("is_trained", [True, False])
def test_curves_that_a_killed_run_left_undone_are_drawn(tmp_path, monkeypatch, is_trained):
    """Also if nothing is left to train."""
    monkeypatch.setattr(BackgroundProcess, "start", lambda self: None)
    if is_trained:
        open_logger(tmp_path).log_epoch(row(1))
    resumed = Logger(tmp_path, 0, ACCURACY)
    resumed.open(None, tmp_path / "last.pt", Progress(epoch=1, step=10))
    drawn = []
    monkeypatch.setattr(BackgroundProcess, "start", lambda self: drawn.append(self))
    resumed.close()
    assert len(drawn) == is_trained


@pytest.mark.usefixtures("no_curves")
def test_all_metrics_are_recorded(logger, capsys):
    """The console's table fits 80 columns whatever there is, and further metrics are below it."""
    logger.log_epoch(row(1, loss_scale=2.0**24, step=123456, lr=1.2345e-5))
    further = {f"val_top{k}": k / 100 for k in range(2, 12)}
    logger.log_epoch(row(2, **further, grad_norm=torch.tensor(12345.0)))
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert "grad_norm=12345" in said
    assert "val_top11=0.11" in said
    with (logger.output / "metrics.csv").open() as file:
        first, second = csv.DictReader(file)
    assert (first["val_top5"], second["val_top5"], second["grad_norm"]) == ("", "0.05", "12345.0")
    assert events(logger.output)["epoch/val_top5"] == [20]
    curves.main([str(logger.output)])


@pytest.mark.usefixtures("no_curves")
@pytest.mark.parametrize("name", ["val_loss", "val_mean_absolute_percentage_error"])
def test_table_fits_a_metric_of_any_name(tmp_path, capsys, name):
    logger = Logger(tmp_path, 0, MonitoredMetric(name, "min"))
    logger.open({}, None, Progress())
    for epoch, value in enumerate((0.5, 0.25, 0.75), 1):
        logger.log_epoch(row(epoch) | {name: value})
    said = capsys.readouterr().out.splitlines()
    assert max(map(len, said)) <= 80
    logger.close()
    assert capsys.readouterr().out.startswith(f"best {name} 0.2500 in epoch 2, took")


@pytest.mark.usefixtures("no_curves")
def test_name_of_a_metric_is_no_formula(logger):
    logger.log_epoch(row(1) | {"=1+1": 2.0})
    header, values = (logger.output / "metrics.csv").read_text().splitlines()
    assert header.split(",")[-1] == "'=1+1" and values.split(",")[-1] == "2.0"
    assert run_files.read_rows(logger.output / "metrics.csv")[0]["=1+1"] == "2.0"


@pytest.mark.usefixtures("no_curves")
def test_names_of_metrics_do_not_depend_on_the_locale(logger, monkeypatch):
    def open_in_locale(path, mode="r", buffering=-1, encoding="ascii", **options):
        return open(path, mode, buffering, None if "b" in mode else encoding, **options)

    monkeypatch.setattr(Path, "open", open_in_locale)
    logger.log_epoch(row(1) | {"größe": 2.0})
    assert run_files.read_rows(logger.output / "metrics.csv")[0]["größe"] == "2.0"


@pytest.mark.usefixtures("no_curves")
def test_row_of_an_unfinished_epoch_is_replaced(logger):
    """--steps ended a run within the epoch, and the resumed run validates both."""
    logger.log_epoch(row(1, step=3))
    logger.log_epoch(row(1))
    assert epochs_in_table(logger.output) == [1]


@pytest.mark.usefixtures("no_curves")
@pytest.mark.parametrize(("throughput", "text"), [(0.0375, "0.0375"), (12345.6, "12346")])
def test_throughput_is_logged_with_four_digits(logger, capsys, throughput, text):
    """Large models on few processors train less than an image a second."""
    logger.log_epoch(row(1, images_per_second=throughput))
    logger.close()
    assert f", {text} images/s; " in capsys.readouterr().out


@pytest.mark.usefixtures("no_curves")
def test_epoch_without_a_step_has_no_throughput(logger, capsys):
    """A resumed run had only its validation left."""
    logger.log_epoch(row(1, images_per_second=0.0))
    logger.log_epoch(row(2, images_per_second=100.0))
    logger.close()
    assert "100 images/s" in capsys.readouterr().out
    cells = [one["images_per_second"] for one in run_files.read_rows(logger.output / "metrics.csv")]
    assert cells == ["", "100.0"]


@pytest.mark.usefixtures("no_curves")
def test_epoch_that_is_validated_again_has_one_point(tmp_path):
    """The run was killed after it had logged epoch 2, before the checkpoint said so."""
    first = open_logger(tmp_path)
    for epoch in (1, 2):
        first.log_epoch(row(epoch))
    first.folder_lock.file.close()
    again = Logger(tmp_path, 0, ACCURACY)
    again.rows = first.rows[:1]
    again.open({"resume": Path("auto")}, tmp_path / "step-20.pt", Progress(epoch=2, step=20))
    for epoch in (2, 3):
        again.log_epoch(row(epoch))
    assert events(tmp_path)["epoch/val_loss"] == [10, 20, 30]


@pytest.mark.parametrize(("log_every", "lines"), [(None, [3, 6]), (2, [2, 4, 6, 8])])
def test_progress_lines_without_a_terminal(tmp_path, monkeypatch, capsys, log_every, lines):
    """One a minute, or every --log-every steps."""
    now = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    logger = Logger(tmp_path, 0, ACCURACY, log_every)
    bar = logger.progress_bar(range(8), "epoch 1/2")
    for step in bar:
        now[0] += 20.0
        bar.set_postfix_str(f"step {step + 1}, loss 0.5", refresh=False)
    said = capsys.readouterr()
    assert not said.err
    found = [line.split(",")[:3] for line in said.out.splitlines()]
    assert found == [[f"epoch 1/2: {n}/8", f" step {n}", " loss 0.5"] for n in lines]
    assert said.out.splitlines()[-1].endswith("left")


def test_progress_lines_of_slow_steps_are_not_more(tmp_path, monkeypatch, capsys):
    """Tqdm's monitor shows each step of a bar that was silent for longer than maxinterval."""
    monkeypatch.setattr(tqdm, "monitor", None)
    monkeypatch.setattr(tqdm, "monitor_interval", 0.01)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    clock = itertools.count()
    monkeypatch.setattr("tqdm.std.time", lambda: float(next(clock)))  # not of the monitor
    for _ in Logger(tmp_path, 0, ACCURACY, log_every=4).progress_bar(range(8), "epoch 1/2"):
        time.sleep(0.1)
    tqdm.monitor.exit()
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_evaluation_is_written_as_json(tmp_path, capsys):
    logger = Logger(tmp_path / "new", 0, ACCURACY)
    logger.log_evaluation({METRIC: 0.5, "val_iou": float("nan")}, checkpoint="best.pt", data="x")
    path = tmp_path / "new" / "eval.json"
    assert json.loads(path.read_text()) == {
        "metrics": {METRIC: 0.5, "val_iou": None},
        "checkpoint": "best.pt",
        "data": "x",
    }
    assert capsys.readouterr().out == f"{path}: val_accuracy 0.5000 val_iou nan\n"


def test_evaluation_is_printed_although_it_cannot_be_written(tmp_path, capsys):
    logger = Logger(tmp_path / "new", 0, ACCURACY)
    logger.check_folder()
    assert not list(logger.output.iterdir())
    with disk_space(tmp_path, -tmp_path.stat().st_size):
        with pytest.raises(UserError, match="can't be written .*choose another folder"):
            logger.check_folder()
        with pytest.raises(UserError, match="can't be written"):
            logger.log_evaluation({METRIC: 0.5})
    assert "val_accuracy 0.5000" in capsys.readouterr().out


@pytest.mark.usefixtures("no_curves")
def test_epoch_without_a_validation_has_empty_cells(logger, capsys):
    """The table has the metric's column from the start, which the curves need."""
    training = {name: value for name, value in row(1).items() if not name.startswith("val_")}
    logger.log_epoch(training)
    curves.main([str(logger.output)])
    logger.log_epoch(row(2))
    with (logger.output / "metrics.csv").open() as file:
        first, second = csv.DictReader(file)
    assert (first[METRIC], first["val_loss"], second[METRIC]) == ("", "", "0.75")
    unvalidated, _, validated = capsys.readouterr().out.splitlines()
    assert len(unvalidated) == len(validated)
    assert len(unvalidated.split()) == len(validated.split()) - 2
    again = open_logger(logger.output, Progress(epoch=2, step=20), logger.output / "last.pt")
    assert again.rows == logger.rows


@pytest.mark.usefixtures("no_curves")
@pytest.mark.parametrize(
    ("best", "origin"), [(0.75, "within an epoch"), (0.5, ""), (0.25, "another validation")]
)
def test_summary_has_the_score_of_another_best_checkpoint(logger, capsys, best, origin):
    """The row of an epoch that was resumed is gone; the best row may have no checkpoint here."""
    logger.log_epoch(row(1))
    logger.close(best)
    said = "best val_accuracy 0.5000 in epoch 1, "
    said += f"best.pt has {best:.4f} from {origin}, " if origin else ""
    assert f"{said}took" in capsys.readouterr().out


@pytest.mark.usefixtures("no_curves")
def test_resumed_run_repeats_no_rows_or_events(logger, meter):
    for epoch in (1, 2):
        logger.log_epoch(row(epoch))
    logger.log_step(logger.progress_bar((), "epoch"), meter, 25, lr=0.1, loss_scale=1.0)
    again = open_logger(logger.output, Progress(epoch=1, step=15), logger.output / "last.pt")
    again.log_epoch(row(2))
    assert epochs_in_table(logger.output) == [1, 2]
    found = events(logger.output)
    assert found["epoch/val_loss"] == [10, 20]
    assert found["step/lr"] == []


@pytest.mark.usefixtures("no_curves")
def test_row_of_an_epoch_in_which_steps_ended_is_kept(logger):
    for epoch in (1, 2):
        logger.log_epoch(row(epoch))
    last = logger.output / "last.pt"
    open_logger(logger.output, Progress(epoch=1, step=20), last).folder_lock.file.close()
    assert epochs_in_table(logger.output) == [1, 2]
    open_logger(logger.output, Progress(epoch=1, step=18), last)  # an earlier checkpoint
    assert epochs_in_table(logger.output) == [1]


@pytest.mark.usefixtures("no_curves")
def test_rows_of_the_checkpoint_complete_the_table(tmp_path, clock):
    """A row that did not fit on the disk, or all of them where rank 0 has moved to another host."""
    first = open_logger(tmp_path / "first")
    for epoch in (1, 2, 3):
        first.log_epoch(row(epoch))
    table = (first.output / "metrics.csv").read_text()
    history = first.rows[:2]
    lines = table.splitlines(keepends=True)
    (first.output / "metrics.csv").write_text("".join([lines[0], lines[2], lines[3]]))
    first.folder_lock.file.close()
    for output in (first.output, tmp_path / "other host"):
        again = Logger(output, 0, ACCURACY)
        again.rows = [dict(one) for one in history]  # as the checkpoint manager restores them
        again.open({"resume": Path("auto")}, output / "last.pt", Progress(epoch=2, step=20))
        assert (output / "metrics.csv").read_text() == "".join(lines[:3])
        again.log_epoch(row(3))
        assert (output / "metrics.csv").read_text() == table
        assert (output / "config.json").exists()
        assert events(output)["epoch/val_loss"] == [10, 20, 30]


@pytest.mark.usefixtures("no_curves")
def test_events_are_complete_when_rank_0_returns_to_a_host_with_its_own_disk(tmp_path, meter):
    """It logged epoch 2 before the host was lost; another host trained that epoch again, and 3."""
    first, progress = open_logger(tmp_path / "host 0"), Progress(epoch=1, step=15)
    for epoch in (1, 2):
        first.log_epoch(row(epoch))
    first.folder_lock.file.close()
    other = Logger(tmp_path / "host 1", 0, ACCURACY)
    other.rows = first.rows[:1]
    other.open({"resume": Path("auto")}, other.output / "step-15.pt", progress)
    other.log_epoch(row(2, val_loss=0.25))
    other.log_epoch(row(3))
    for _ in range(2):  # the second time, nothing is missing
        again = Logger(first.output, 0, ACCURACY)
        again.rows = other.rows
        progress = Progress(epoch=3, step=35)
        again.open({"resume": Path("auto")}, first.output / "step-35.pt", progress)
        again.folder_lock.file.close()
        assert events(first.output)["epoch/val_loss"] == [10, 20, 30]
    again.log_step(again.progress_bar((), "epoch"), meter, 40, lr=0.1, loss_scale=1.0)
    shown = EventAccumulator(str(first.output)).Reload().Scalars("epoch/val_loss")
    assert [event.value for event in shown] == [row["val_loss"] for row in other.rows]


@pytest.mark.usefixtures("no_curves")
def test_rows_of_an_old_checkpoint_are_those_of_the_table(logger):
    for epoch in (1, 2, 3):
        logger.log_epoch(row(epoch))
    again = open_logger(logger.output, Progress(epoch=2, step=20), logger.output / "last.pt")
    assert again.rows == logger.rows[:2]


def test_final_curves_show_all_rows(logger, tmp_path):
    """Each drawing is replaced with a process that ends when the test says so."""
    start, is_done = subprocess.Popen, tmp_path / "done"
    command = ["sh", "-c", f"until [ -e '{is_done}' ]; do sleep 0.1; done"]
    with mock.patch.object(subprocess, "Popen") as started:
        started.side_effect = lambda _, **options: start(command, **options)
        for epoch in range(1, 6):
            logger.log_epoch(row(epoch))
        assert started.call_count == 1
        is_done.touch()
        logger.close()
        assert started.call_count == 2


@pytest.mark.parametrize("is_there", [True, False])
def test_full_disk_or_missing_packages_are_warnings(tmp_path, monkeypatch, capsys, is_there):
    if not is_there:
        monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
        (tmp_path / "matplotlib.py").write_text("raise ImportError('no matplotlib')")
    logger = open_logger(tmp_path / "run")
    with Path("/dev/full").open("wb", buffering=0) as full:
        if is_there:
            logger.events.file = full
            (logger.output / "metrics.csv").unlink()
            (logger.output / "metrics.csv").mkdir()
        for epoch in (1, 2):
            logger.log_epoch(row(epoch))
            logger.curves.wait(curves.TIMEOUT_S)
        logger.close()
    warnings = [line for line in capsys.readouterr().out.splitlines() if "warning: " in line]
    expected = ["events", "curves.png", "metrics.csv"] if is_there else ["events", "curves.png"]
    assert len(warnings) == len(expected)
    for name in expected:
        assert sum(f" {name}" in line for line in warnings) >= 1, warnings


@contextmanager
def disk_space(path, size):
    """Limit the size of files, so that writing fails once `path` has grown by `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("no_curves")
def test_row_lost_to_a_full_disk_is_written_later(logger, capsys):
    logger.events = None
    logger.log_epoch(row(1))
    with disk_space(logger.output / "metrics.csv", 10):
        logger.log_epoch(row(2))
    assert "warning: rows are missing in metrics.csv (File too large)" in capsys.readouterr().out
    assert epochs_in_table(logger.output) == [1]
    logger.log_epoch(row(3))
    assert epochs_in_table(logger.output) == [1, 2, 3]


@pytest.mark.usefixtures("no_curves")
def test_events_of_epochs_lost_to_a_full_disk_are_written_later(logger, meter, tmp_path, capsys):
    (path,) = logger.output.glob("events.*")
    picture = tmp_path / "epoch_001.png"
    Image.new("RGB", (4, 3), "red").save(picture)
    logger.log_epoch(row(1))
    size = path.stat().st_size
    with disk_space(path, 10):
        logger.log_step(logger.progress_bar((), "epoch"), meter, 15, lr=0.1, loss_scale=1.0)
        logger.log_image(15, lambda: picture)
        logger.log_epoch(row(2))
        assert path.stat().st_size == size  # nothing torn
    assert capsys.readouterr().out.count("warning: TensorBoard events are missing") == 1
    logger.log_epoch(row(3))
    with disk_space(path, 10):
        logger.log_epoch(row(4))
    logger.close()
    shown = EventAccumulator(str(path.parent)).Reload().Scalars("epoch/lr")
    assert [point.step for point in shown] == [10, 20, 30, 40]


def test_run_continues_if_stdout_can_not_be_written(tmp_path, monkeypatch):
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(full, write_through=True))
        with pytest.raises(OSError, match="No space left"):
            print("a line")
        log_rank_zero("a line")
        Logger(tmp_path, 0, ACCURACY).info("a line")


@pytest.mark.parametrize(
    "table",
    [
        pytest.param(b"epoch;step\n1;10\n", id="semicolons"),
        pytest.param(b"epoch;lr\n1;0,1\n", id="decimal_commas"),
        pytest.param("epoch,step\n1,10\n".encode("utf-16"), id="utf_16"),
        pytest.param(b"epoch,step\n1\n", id="short_row"),
        pytest.param(b"epoch,step\n1,10,11\n", id="long_row"),
        pytest.param(b"epoch,step\n-1,0\n", id="negative"),
        pytest.param(b"epoch,step\n1,99999999999999999999\n", id="huge"),
        pytest.param(b"epoch,step,a\x1b\n1,10,1\n", id="name_with_a_control_character"),
    ],
)
def test_metrics_in_another_format_are_an_error_and_kept(logger, table):
    logger.folder_lock.file.close()
    (logger.output / "metrics.csv").write_bytes(table)
    with pytest.raises(
        UserError, match=r"metrics\.csv is not in the format of this program: move it away"
    ):
        open_logger(logger.output, Progress(epoch=1, step=10), logger.output / "last.pt")
    assert (logger.output / "metrics.csv").read_bytes() == table


def test_folder_that_can_not_be_listed_is_not_taken_for_a_free_one(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "iterdir", fail)
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))  # as since Python 3.13
    with pytest.raises(UserError, match="can't be written .Stale file handle"):
        open_logger(tmp_path)


HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print(flush=True)
time.sleep(60)
"""


def test_output_folder_is_locked(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        try:
            with pytest.raises(UserError, match="another run is writing to .*: wait until it ends"):
                open_logger(tmp_path)
        finally:
            other.kill()
    logger = open_logger(tmp_path)  # the killed process has left no lock
    gc.collect()  # closes the file of the logger that failed, if it still is open
    command[2] = HOLDER.replace("LOCK_EX", "LOCK_EX | fcntl.LOCK_NB")
    assert subprocess.run(command, capture_output=True).returncode
    assert logger.folder_lock.file


def lock_of_another_process(folder):
    """Return the status of another process that locks the folder for a moment; 0 if it can."""
    script = HOLDER.replace("LOCK_EX", "LOCK_EX | fcntl.LOCK_NB").replace("60", "0")
    command = [sys.executable, "-c", script, str(folder / ".lock")]
    return subprocess.run(command, capture_output=True).returncode


def test_lost_lock_is_taken_again_at_the_next_save(logger, tmp_path):
    """A copy of the folder by the same process closes another descriptor of the locked file."""
    shutil.copytree(logger.output, tmp_path / "backup")
    assert lock_of_another_process(logger.output) == 0
    logger.lock_again()
    assert lock_of_another_process(logger.output) == 1
    shutil.copytree(logger.output, tmp_path / "another")
    command = [sys.executable, "-c", HOLDER, str(logger.output / ".lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        try:
            with pytest.raises(UserError, match="another run is writing to"):
                logger.lock_again()
        finally:
            other.kill()


@pytest.mark.parametrize(("lease_s", "error"), [(30.0, None), (0.3, UserError)])
def test_restart_waits_for_the_lock_of_a_lost_host(tmp_path, monkeypatch, capsys, lease_s, error):
    """The server of a shared disk keeps it for minutes."""
    monkeypatch.setenv(RESTART, "a process failed")
    monkeypatch.setattr(lock, "LEASE_S", lease_s)
    monkeypatch.setattr(lock, "PAUSE_S", 0.1)
    command = [sys.executable, "-c", HOLDER, str(tmp_path / ".lock")]
    logger = Logger(tmp_path, 0, ACCURACY)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        timer = threading.Timer(0.5 if error is None else 5.0, other.kill)
        timer.start()
        with pytest.raises(error) if error else contextlib.nullcontext():
            logger.lock()
        timer.cancel()
        other.kill()
    assert bool(logger.folder_lock.file) == (error is None)
    assert capsys.readouterr().out.count("is locked by another run, or by a lost host") == 1


def test_lock_is_taken_of_the_file_at_that_path(tmp_path, monkeypatch):
    """The folder is replaced between opening the file and locking it, and again afterwards."""
    output = tmp_path / "run"
    output.mkdir()
    logger = Logger(output, 0, ACCURACY)
    lockf = fcntl.lockf
    moves = iter([True, False, False, False])

    def locking_late(file, flags):
        if next(moves):
            output.rename(tmp_path / "moved")
            output.mkdir()
        lockf(file, flags)

    monkeypatch.setattr(fcntl, "lockf", locking_late)
    logger.lock()
    assert os.path.samestat(os.fstat(logger.folder_lock.file.fileno()), (output / ".lock").stat())
    logger.lock()  # of the same file
    shutil.rmtree(output)
    logger.open({}, None, Progress())
    assert os.path.samestat(os.fstat(logger.folder_lock.file.fileno()), (output / ".lock").stat())
    assert next(moves, None) is None


def test_folder_that_can_not_be_locked_is_an_error(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(UserError, match=r"/run/\.lock can't be written .* for --output"):
        Logger(tmp_path / "run", 0, ACCURACY).lock()


def test_lock_follows_no_link_and_waits_for_no_reader(tmp_path):
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / "link").mkdir()
    (tmp_path / "link/.lock").symlink_to(target)
    with pytest.raises(UserError, match=r"/link/\.lock can't be written .* for --output"):
        Logger(tmp_path / "link", 0, ACCURACY).lock()
    assert target.read_text() == "precious"
    (tmp_path / "fifo").mkdir()
    os.mkfifo(tmp_path / "fifo/.lock")
    Logger(tmp_path / "fifo", 0, ACCURACY).lock()


@pytest.mark.parametrize("name", ["x" * 300, "loop"])
def test_impossible_output_is_an_error(tmp_path, name):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UserError, match="can't be written"):
        open_logger(tmp_path / name)


def test_huge_metrics_are_an_error(logger, monkeypatch):
    """Such as a sparse file, whose only line takes all memory."""
    logger.folder_lock.file.close()
    monkeypatch.setattr(run_files, "MAX_TABLE_BYTES", 50)
    with pytest.raises(UserError, match=r"it has \d+ bytes, more than 50"):
        open_logger(logger.output, Progress(epoch=1, step=10), logger.output / "last.pt")


def test_metrics_in_a_fifo_are_an_error(logger):
    logger.folder_lock.file.close()
    table = logger.output / "metrics.csv"
    table.unlink()
    os.mkfifo(table)
    with pytest.raises(UserError, match="it is not a regular file"):
        open_logger(logger.output, Progress(epoch=1, step=10), logger.output / "last.pt")


def test_lock_creates_no_folder(tmp_path):
    Logger(tmp_path / "run", 0, ACCURACY).lock()
    Logger(tmp_path, 1, ACCURACY).lock()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_curves")
def test_an_epoch_is_not_logged_in_another_folder_of_the_name(logger):
    logger.output.rename(logger.output.with_name("moved"))
    logger.output.mkdir()
    table = logger.output / "metrics.csv"
    table.write_text("the user's")
    with pytest.raises(UserError, match="was replaced while this run wrote to it"):
        logger.log_epoch(row(1))
    assert table.read_text() == "the user's"


def test_link_to_another_runs_checkpoint_is_not_one_of_this_run(tmp_path):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "step-4.pt").touch()
    link = tmp_path / "here" / "start.pt"
    link.symlink_to("../there/step-4.pt")
    with pytest.raises(UserError, match="already holds a run"):
        open_logger(tmp_path / "here", resume=link)


@pytest.mark.parametrize(("flag", "is_own"), [("auto", True), ("elsewhere/last.pt", False)])
def test_folder_that_a_run_has_moved_to_is_its_own(tmp_path, flag, is_own):
    """The best checkpoint is copied to the host of rank 0, whose --output may have another name."""
    (tmp_path / "best.pt").touch()
    logger = Logger(tmp_path, 0, ACCURACY)
    logger.has_moved = True
    config = {"resume": Path(flag)}
    with nullcontext() if is_own else pytest.raises(UserError, match="already holds a run"):
        logger.open(config, Path("elsewhere/last.pt"), Progress(epoch=1, step=7))


@pytest.mark.parametrize("is_logged_first", [False, True])
def test_loop_and_task_use_different_names(logger, is_logged_first):
    meter = logger.start_epoch(torch.device("cpu"), 10)
    if is_logged_first:  # as in a resumed run, which begins without a validation
        meter.log(val_top5=0.5)
        with pytest.raises(UserError, match=r"meter\.log\(val_top5=.* in the loop and Metrics"):
            logger.agree_on({METRIC: 0.5, "val_top5": 0.75})
    else:
        logger.agree_on({METRIC: 0.5, "val_top5": 0.75})
        meter = logger.start_epoch(torch.device("cpu"), 10)
        meter.log(top5=0.5)
        with pytest.raises(UserError, match="val_top5=.*: it is a column of metrics.csv"):
            meter.log(val_top5=0.5)


def warnings_of_results(results):
    """Return what each process warns of its own one of `results`."""
    logger, warnings = Logger(None, 0, ACCURACY), []
    logger.warning = warnings.append
    logger.agree_on(results[dist.get_rank()])
    return warnings


def agreed_results():
    return Logger(None, 1, ACCURACY).agree_on({METRIC: float(dist.get_rank()), "val_loss": 0.5})


def test_all_processes_have_the_results_of_rank_0(two_processes):
    """Or --patience would end some of them alone."""
    assert two_processes(agreed_results) == [{METRIC: 0.0, "val_loss": 0.5}] * 2


def test_metric_of_a_part_of_the_samples_is_a_warning(two_processes):
    same = {METRIC: 0.5, "val_loss": float("nan"), "val_top5": 0.75}
    assert two_processes(warnings_of_results, [same, same | {"val_loss": 0.5}])[1] != []
    assert two_processes(warnings_of_results, [same, same]) == [[], []]
    said = two_processes(warnings_of_results, [same, same | {"val_top5": 0.8}])
    ((warning,), _) = two_processes(warnings_of_results, [same, same | {"val_recall": 0.5}])
    assert warning.startswith("val_recall is not that of all samples") and "(nan, 0.5)" in warning
    for (warning,) in said:
        assert warning.startswith("val_top5 is not that of all samples, but differs between")
        assert "(0.75, 0.8)" in warning and "dist.all_reduce" in warning
