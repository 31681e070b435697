"""engine.report and engine.curves: what a run counts, shows and leaves behind."""

import csv
import io
import json
import math
import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from apex_native._say import say
from engine import curves, report
from engine.checkpoint import Progress
from engine.errors import UserError

METRIC = "val_accuracy"


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """Time that a test moves on, and a group of one process."""
    now = [0.0]
    monkeypatch.setattr(report.time, "perf_counter", lambda: now[0])
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield now
    dist.destroy_process_group()


def test_the_warm_up_is_timed_apart(clock, tmp_path):
    run = report.Report(tmp_path, 0, "val_accuracy")
    first, second = (run.meter(torch.device("cpu"), 10) for _ in range(2))
    assert (first.warm_up, second.warm_up) == (report.WARM_UP, 0)
    for step in range(report.WARM_UP + 4):
        clock[0] += 100.0 if step < report.WARM_UP else 2.0
        first.add(torch.tensor(float(step)))
    assert first.warm_up_s == 100.0 * report.WARM_UP
    results = first.results()
    assert results["images_per_second"] == 5.0
    assert results["train_loss"] == 3.0


def test_a_run_that_ends_in_its_warm_up_counts_all_its_steps(clock):
    for steps in (2, 3):
        clock[0] = 0.0
        meter = report.Meter(torch.device("cpu"), 10, warm_up=3)
        for _ in range(steps):
            clock[0] += 5.0
            meter.add(torch.ones(()))
        assert meter.results()["images_per_second"] == 2.0


def test_a_late_log_has_the_numbers_of_its_own_step(clock, monkeypatch):
    """Shown when the next one comes, the state is saved, or it is asked for."""
    monkeypatch.setattr(report.Meter, "is_late", True)
    shown = []
    meter = report.Meter(torch.device("cpu"), 10, 3, shown.append)
    scale = torch.full((), 8.0)
    for step in range(1, 8):
        clock[0] += 5.0 if step <= 3 else 1.0
        meter.add(torch.full((), float(step)))
        if step in (2, 5, 6, 7):
            meter.note(step, 0.1, scale)
            scale *= 2
        if step == 5:
            assert meter.state() == (15.0, 5)
    assert [log[:3] for log in shown] == [(2, 0.1, 1.5), (5, 0.1, 4.0), (6, 0.1, 6.0)]
    assert meter.read()[:3] == (7, 0.1, 7.0)
    assert [log.loss_scale for log in shown] == [8.0, 16.0, 32.0, 64.0]
    assert [log.images_per_second for log in shown] == [2.0, 10.0, 10.0, 10.0]


def test_a_log_is_of_the_steps_since_the_last_one(clock):
    meter = report.Meter(torch.device("cpu"), 10)
    meter.load([(100.0, 5)])  # of a run that was stopped
    for losses in ([1.0, 2.0], [7.0]):
        clock[0] += 1.0
        for loss in losses:
            meter.add(torch.tensor(loss))
        log = meter.note(10, 0.1, 8.0)
        assert log[:3] == (10, 0.1, sum(losses) / len(losses))
        assert log[4:] == (8.0, 10 * meter.steps / clock[0])
    assert meter.results()["train_loss"] == 110.0 / 8


def row(epoch, **values):
    return {
        "epoch": epoch,
        "step": 10 * epoch,
        "train_loss": 2.0 / epoch,
        "val_loss": 3.0 / epoch,
        METRIC: 1 - 0.5**epoch,
        "lr": 0.1,
        "loss_scale": 65536.0,
        "images_per_second": 500.0,
    } | values


def opened(output, progress=None, resume=None, asked=None):
    run = report.Report(output, 0, METRIC)
    run.open({"lr": 0.1, "resume": asked}, resume, progress or Progress())
    return run


@pytest.fixture
def undrawn(monkeypatch):
    """No curves, which are drawn by a process of seconds."""
    monkeypatch.setattr(report.Report, "_draw", lambda self: None)


@pytest.fixture
def run(tmp_path, clock):
    """The report of a run in a folder of its own."""
    run = opened(tmp_path / "run")
    run.meter(torch.device("cpu"), 10).add(torch.tensor(4.0))
    clock[0] += 1.0
    return run


def test_a_folder_is_made_with_its_parents(tmp_path):
    output = tmp_path / "one" / "two"
    opened(output)
    assert (output / "metrics.csv").exists()


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_died_before_its_first_checkpoint_begins_again_if_asked(run):
    """Its row is written before the checkpoint."""
    run.row(row(1))
    run.lock.close()
    with pytest.raises(UserError, match="already holds a run: add --resume auto"):
        opened(run.output)
    again = opened(run.output, asked=Path("auto"))
    assert not finite_rows(run.output)
    again.lock.close()
    (run.output / "step-1.pt").touch()
    with pytest.raises(UserError, match="already holds a run"):
        opened(run.output)


def finite_rows(output):
    with (output / "metrics.csv").open() as file:
        return [int(row["epoch"]) for row in csv.DictReader(file)]


def events(output):
    """The steps of each curve and picture in TensorBoard."""
    found = EventAccumulator(str(output)).Reload()
    tags = found.Tags()
    steps = {tag: [event.step for event in found.Scalars(tag)] for tag in tags["scalars"]}
    return steps | {tag: [event.step for event in found.Images(tag)] for tag in tags["images"]}


@pytest.mark.gpu
def test_a_log_waits_for_nothing_but_the_one_before(clock, tmp_path):
    run = opened(tmp_path)
    gpu = torch.device("cuda")
    meter, scale = run.meter(gpu, 10), torch.full((), 8.0, device=gpu)
    for step in range(1, 31):
        meter.add(torch.full((), float(step), device=gpu))
        if step % 10 == 0:
            torch.cuda._sleep(10**9)  # half a second
            done = torch.cuda.Event()
            done.record()
            torch.cuda.set_sync_debug_mode("error")
            try:
                log = run.step(run.bar((), ""), step, 0.1, scale)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert step == 10 or not done.query()  # the first one has kernels and memory prepared
            scale *= 2
            seen = None if log is None else (log.step, log.train_loss, log.bad, log.loss_scale)
            assert seen == {10: None, 20: (10, 5.5, 0, 8), 30: (20, 15.5, 0, 16)}[step]
    assert meter.read().step == 30
    run.row(row(1, step=30) | meter.results())
    assert events(tmp_path)["step/train_loss"] == [10, 20, 30]


@pytest.mark.parametrize(
    ("rank", "is_terminal", "is_shown"), [(0, True, True), (0, False, False), (1, True, False)]
)
def test_bars_are_for_terminals(tmp_path, monkeypatch, capsys, rank, is_terminal, is_shown):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    run = report.Report(tmp_path, rank, METRIC)
    assert list(run.bar(range(3), "epoch 1")) == [0, 1, 2]
    with run.clock("reading the data"):
        pass
    said = capsys.readouterr().err
    assert ("epoch 1" in said) == ("reading the data: 00:00" in said) == is_shown
    assert is_shown or not said


def test_a_run_leaves_events_and_curves(run, capsys, tmp_path):
    picture = tmp_path / "validation" / "epoch_001.png"
    picture.parent.mkdir()
    Image.new("RGB", (4, 3), "red").save(picture)
    run.step(run.bar((), "epoch"), 5, lr=0.1, loss_scale=1.0)
    run.row(row(1))
    run.picture(10, lambda folder: folder / "epoch_001.png", picture.parent)
    run.row(row(2, loss_scale=32768.0))
    run.close()
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("best val_accuracy 0.7500 in epoch 2, took 0:00:")
    assert last.endswith(
        f"500 images/s; checkpoints, metrics.csv and curves.png are in {run.output}"
    )
    found = events(run.output)
    assert {tag for tag, steps in found.items() if steps == [10, 20]} == {
        f"epoch/{name}" for name in run.columns[2:]
    }
    assert found["validation"] == [10]
    names = ("train_loss", "lr", "loss_scale", "images_per_second")
    assert {tag for tag, steps in found.items() if steps == [5]} == {f"step/{n}" for n in names}
    with Image.open(run.output / "curves.png") as image:
        assert image.format == "PNG"
    assert not list(run.output.glob("*.tmp"))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("best", [0.5, 0.75])
def test_the_last_line_has_a_best_of_within_an_epoch(run, capsys, best):
    """A run that ended there went on, without the row of that."""
    run.row(row(1))
    run.close(best)
    said = "best val_accuracy 0.5000 in epoch 1, "
    said += "best.pt has 0.7500, of within an epoch, " if best > 0.5 else ""
    assert f"{said}took" in capsys.readouterr().out


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_goes_on_repeats_nothing(run):
    for epoch in (1, 2):
        run.row(row(epoch))
    run.step(run.bar((), "epoch"), 25, lr=0.1, loss_scale=1.0)
    again = opened(run.output, Progress(epoch=1, step=15), run.output / "last.pt")
    again.row(row(2))
    assert finite_rows(run.output) == [1, 2]
    found = events(run.output)
    assert found["epoch/val_loss"] == [10, 20]
    assert found["step/lr"] == []


def test_the_last_picture_is_of_all_rows(run, tmp_path):
    """In place of each, a process that is over when the test says so."""
    start, is_over = subprocess.Popen, tmp_path / "over"
    drawing = ["sh", "-c", f"until [ -e '{is_over}' ]; do sleep 0.1; done"]
    with mock.patch.object(subprocess, "Popen") as started:
        started.side_effect = lambda _, **options: start(drawing, **options)
        for epoch in range(1, 6):
            run.row(row(epoch))
        assert started.call_count == 1
        is_over.touch()
        run.close()
        assert started.call_count == 2


@pytest.mark.parametrize("is_there", [True, False])
def test_without_room_or_packages_a_run_goes_on(tmp_path, monkeypatch, capsys, is_there):
    if not is_there:
        monkeypatch.setitem(sys.modules, "engine.events", None)
        monkeypatch.setattr(report.sys, "path", [str(tmp_path), *sys.path])
        (tmp_path / "matplotlib.py").write_text("raise ImportError('no matplotlib')")
    run = opened(tmp_path / "run")
    with Path("/dev/full").open("wb", buffering=0) as full:
        if is_there:
            run.events.writer = RecordWriter(full)
            (run.output / "metrics.csv").unlink()
            (run.output / "metrics.csv").mkdir()
        for epoch in (1, 2):
            run.row(row(epoch))
            run._has_drawn(report.PATIENCE_S)
        run.close()
    warnings = [line for line in capsys.readouterr().out.splitlines() if "warning: " in line]
    expected = ["events", "curves.png", "metrics.csv"] if is_there else ["events", "curves.png"]
    assert len(warnings) == len(expected)
    for name in expected:
        assert sum(f" {name}" in line for line in warnings) >= 1, warnings


@contextmanager
def room(path, size):
    """A disk that is full once `path` has grown by `size`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("undrawn")
def test_a_row_without_room_is_there_once_there_is_some(run, capsys):
    run.events = None
    run.row(row(1))
    with room(run.output / "metrics.csv", 10):
        run.row(row(2))
    assert "warning: rows are missing in metrics.csv (File too large)" in capsys.readouterr().out
    assert finite_rows(run.output) == [1]
    run.row(row(3))
    assert finite_rows(run.output) == [1, 2, 3]


@pytest.mark.parametrize("kind", ["scalars", "picture"])
def test_nothing_is_added_behind_a_torn_event(run, tmp_path, capsys, kind):
    (path,) = run.output.glob("events.*")
    picture = tmp_path / "epoch_001.png"
    Image.new("RGB", (4, 3), "red").save(picture)
    with room(path, 10):
        if kind == "scalars":
            run.step(run.bar((), "epoch"), 5, lr=0.1, loss_scale=1.0)
        else:
            run.picture(5, lambda: picture)
    assert "warning: there are no more events for TensorBoard" in capsys.readouterr().out
    assert run.events is None


def test_a_run_goes_on_where_it_can_not_print(tmp_path, monkeypatch):
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(full, write_through=True))
        with pytest.raises(OSError, match="No space left"):
            print("a line")
        say("a line")
        report.Report(tmp_path, 0, METRIC).say("a line")


@pytest.mark.parametrize(
    "table",
    [
        pytest.param(b"epoch;step\n1;10\n", id="semicolons"),
        pytest.param(b"epoch;lr\n1;0,1\n", id="decimal_commas"),
        pytest.param("epoch,step\n1,10\n".encode("utf-16"), id="utf_16"),
    ],
)
def test_a_table_from_elsewhere_is_not_gone_on_with(run, table):
    run.lock.close()
    (run.output / "metrics.csv").write_bytes(table)
    with pytest.raises(UserError, match=r"metrics\.csv is not as a run wrote it: move it away"):
        opened(run.output, Progress(epoch=1, step=10), run.output / "last.pt")
    assert (run.output / "metrics.csv").read_bytes() == table


HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print(flush=True)
time.sleep(60)
"""


def test_a_folder_has_one_run_at_a_time(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        try:
            with pytest.raises(UserError, match="another run is at work in .*: wait for its end"):
                opened(tmp_path)
        finally:
            other.kill()
    run = opened(tmp_path)  # the one before has left nothing to go on with
    command[2] = HOLDER.replace("LOCK_EX", "LOCK_EX | fcntl.LOCK_NB")
    assert subprocess.run(command, capture_output=True).returncode
    assert run.lock


@pytest.fixture
def leave(tmp_path):
    """Writes what a run of that name leaves: its flags, and its rows."""

    def leave(name, rows, **flags):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(flags))
        with (folder / "metrics.csv").open("w") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        return folder

    return leave


BAD = {"train_loss": math.nan, "val_loss": math.inf, METRIC: math.nan}


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([row(1)], id="one"),
        pytest.param([row(1), row(2, **BAD), row(3)], id="nan"),
        pytest.param([row(1, **BAD)], id="nothing_but_nan"),
        pytest.param([row(e, lr=0.1**e, loss_scale=2.0**e) for e in range(40, 90)], id="long"),
    ],
)
def test_any_rows_can_be_drawn(leave, rows):
    folder = leave("run", rows)
    curves.main([str(folder)])
    with Image.open(folder / "curves.png") as image:
        assert min(image.size) > 500


def test_a_comparison_names_the_flags_that_differ(leave, tmp_path):
    common = {"epochs": 9, "seed": 0}
    runs = [
        leave("a", [row(1), row(2)], **common, lr=0.1, compile=True, output="a", freeze=None),
        leave("b", [row(1)], **common, lr=0.2, compile=False, output="b", freeze=["x", "y"]),
    ]
    first, second = curves.labels([curves.read(folder) for folder in runs])
    assert first == f"{runs[0]}: --lr 0.1, --compile, best val_accuracy 0.7500 in epoch 2"
    flags = "--lr 0.2, --no-compile, --freeze x y"
    assert second == f"{runs[1]}: {flags}, best val_accuracy 0.5000 in epoch 1"
    curves.main([*map(str, runs), "--output", str(tmp_path / "both.pdf")])
    assert (tmp_path / "both.pdf").read_bytes().startswith(b"%PDF")


def test_names_that_matplotlib_would_read_in_its_own_way(leave, tmp_path, monkeypatch):
    for name in ("_old", "a$x^{2$", "b"):
        leave(name, [row(1)])
    monkeypatch.chdir(tmp_path)
    legend = mock.Mock(wraps=Figure.legend)
    monkeypatch.setattr(Figure, "legend", lambda *args, **kwargs: legend(*args, **kwargs))
    curves.main(["_old", "a$x^{2$", "b"])
    _, handles, names = legend.call_args.args
    assert [handle.get_color() for handle in handles] == list(curves.COLOURS[:3])
    assert [name.split(":")[0] for name in names] == ["./_old", r"a\$x^{2\$", "b"]


def test_what_is_no_run_is_answered_by_a_sentence(leave, tmp_path, capsys):
    fine = leave("fine", [row(1)])
    other = leave("other", [{name: v for name, v in row(1).items() if name != METRIC} | {"f1": 1}])
    (tmp_path / "empty").mkdir()
    (leave("begun", [row(1)]) / "metrics.csv").write_text("epoch,step\n")
    (leave("flagless", [row(1)]) / "config.json").unlink()
    broken = leave("broken", [row(1, lr="high")])
    listed = leave("listed", [row(1)])
    (listed / "config.json").write_text("[1]")
    torn = leave("torn", [row(1), row(2)])
    with (torn / "metrics.csv").open("a") as table:
        table.write("3,33\n")
    foreign = leave("foreign", [{"a": 1}])
    for arguments, words in (
        (["missing"], "there is no missing: name the folder of a run"),
        ([tmp_path / "empty"], "empty/metrics.csv: name"),
        ([tmp_path / "flagless"], "flagless/config.json: name"),
        ([tmp_path / "begun"], "has no rows yet"),
        ([broken], "could not convert string to float: 'high'"),
        ([torn], "line 4 of "),
        ([leave("nan", [row(math.nan)])], "metrics.csv is torn: remove it"),
        ([foreign], "metrics.csv is not a run's: that has epoch, step, "),
        ([fine, other], "val_accuracy and f1 can't be compared"),
        ([fine, "--output", tmp_path / "x.doc"], "writes no .doc"),
        ([fine, "--output", tmp_path / "none" / "x.png"], "none/x.png can't be written (No such"),
        ([listed], "config.json holds no flags"),
    ):
        with pytest.raises(SystemExit) as end:
            curves.main([str(argument) for argument in arguments])
        assert end.value.code == 2
        said = capsys.readouterr().err
        assert words in said
        assert said.startswith("error: ")
        assert len(said.splitlines()) == 1


def test_two_runs_are_compared_as_the_readme_says(leave, tmp_path):
    for name in ("a", "b"):
        leave(name, [row(1)])
    done = subprocess.run(
        [sys.executable, "-m", "engine.report", "a", "b"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(curves.__file__).parents[1])},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "compare.png\n")
    assert (tmp_path / "compare.png").exists()
