"""engine.monitoring.curves: plots of runs."""

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from engine.monitoring import curves
from engine.monitoring.run_files import read_run
from matplotlib.figure import Figure
from PIL import Image

METRIC = "val_accuracy"


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


@pytest.fixture
def write_run(tmp_path):
    """Write the files of a run of that name: its flags and its rows."""

    def write_run(name, rows, **flags):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(flags))
        with (folder / "metrics.csv").open("w") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        return folder

    return write_run


BAD = {"train_loss": math.nan, "val_loss": math.inf, METRIC: math.nan}


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([row(1)], id="one"),
        pytest.param([row(1), row(2, **BAD), row(3)], id="nan"),
        pytest.param([row(1, **BAD)], id="nothing_but_nan"),
        pytest.param([row(e, lr=0.1**e, loss_scale=2.0**e) for e in range(40, 90)], id="long"),
        pytest.param([row(1) | {r"$\frac{$": 1.0, r"$\frac{$_ema": 1.0}], id="no_formula"),
    ],
)
def test_draws_any_rows(write_run, rows):
    folder = write_run("run", rows)
    curves.main([str(folder)])
    with Image.open(folder / "curves.png") as image:
        assert min(image.size) > 500


def test_draws_a_run_whose_folder_is_not_named_in_utf_8(write_run):
    folder = write_run("run\udcff", [row(1)])
    curves.main([str(folder)])
    assert (folder / "curves.png").exists()
    assert read_run(folder).name == str(folder).replace("\udcff", r"\udcff")


def test_draws_runs_with_any_settings(write_run, tmp_path):
    runs = [write_run(str(n), [row(1)], note="\ud800" * 200_000 * n) for n in range(2)]
    assert len(curves.make_labels([read_run(run) for run in runs])[1]) > 200_000
    curves.main([*map(str, runs), "--output", str(tmp_path / "both.png")])
    with Image.open(tmp_path / "both.png") as image:
        assert image.height < 2000


@pytest.mark.parametrize("mode", ["max", "min"])
def test_best_is_of_the_model_or_its_average(write_run, mode):
    rows = [row(epoch, f1=value, f1_ema=0.5) for epoch, value in enumerate((0.4, 0.9, 0.1), 1)]
    run = read_run(write_run("run", rows, METRIC="f1", METRIC_MODE=mode))
    expected = {"max": "best f1 0.9000 in epoch 2", "min": "best f1 0.1000 in epoch 3"}
    assert run.describe_best() == expected[mode]
    rows = [row(1, f1=math.nan, f1_ema=0.25)]
    run = read_run(write_run("average", rows, METRIC="f1", METRIC_MODE=mode))
    assert run.describe_best() == "best f1_ema 0.2500 in epoch 1"


def test_further_metrics_have_plots_of_their_own(write_run, tmp_path, monkeypatch):
    """An average is in the plot of its model, and a run may lack a metric of another."""
    titles = []
    plot = curves._plot
    monkeypatch.setattr(curves, "_plot", lambda *call: titles.append(call[3]) or plot(*call))
    further = {"top5": 0.9, "top5_ema": 0.8, f"{METRIC}_ema": 0.5, "grad_norm": 2.0, "M": 1.0}
    rows = [row(1) | dict.fromkeys(further, ""), row(2, **further)]
    runs = [write_run("a", rows), write_run("b", [row(1), row(2)])]
    curves.main([*map(str, runs), "--output", str(tmp_path / "compare.png")])
    assert titles[1] == [METRIC, f"{METRIC}_ema"]
    assert [title[0] for title in titles[4:]] == ["top5", "grad_norm", "M"]


def test_epochs_without_a_validation_are_left_out(write_run, monkeypatch):
    """The lines connect the others, and nothing is marked as not finite."""
    drawn = {}
    plot = curves._plot

    def recording_plot(axes, title, *arguments):
        lines = plot(axes, title, *arguments)
        drawn[axes.get_title()] = list(lines[-1].get_xdata())
        return lines

    monkeypatch.setattr(curves, "_plot", recording_plot)
    rows = [row(epoch) for epoch in range(1, 6)]
    for epoch in (1, 3):
        rows[epoch - 1] |= {METRIC: "", "val_loss": ""}
    folder = write_run("run", rows)
    curves.main([str(folder)])
    assert drawn[METRIC] == [2, 4, 5]
    assert drawn["loss"] == [1, 2, 3, 4, 5]
    assert read_run(folder).describe_best() == f"best {METRIC} 0.9688 in epoch 5"
    curves.main([str(write_run("none", rows[:1]))])
    assert read_run(folder.with_name("none")).describe_best() == f"no {METRIC}"


def test_labels_name_the_flags_that_differ(write_run, tmp_path):
    common = {"epochs": 9, "seed": 0}
    runs = [
        write_run("a", [row(1), row(2)], **common, lr=0.1, compile=True, output="a", freeze=None),
        write_run("b", [row(1)], **common, lr=0.2, compile=False, output="b", freeze=["x", "y"]),
    ]
    first, second = curves.make_labels([read_run(folder) for folder in runs])
    assert first == f"{runs[0]}: --lr 0.1, --compile, best val_accuracy 0.7500 in epoch 2"
    flags = "--lr 0.2, --no-compile, --freeze x y"
    assert second == f"{runs[1]}: {flags}, best val_accuracy 0.5000 in epoch 1"
    curves.main([*map(str, runs), "--output", str(tmp_path / "both.pdf")])
    assert (tmp_path / "both.pdf").read_bytes().startswith(b"%PDF")


def test_labels_name_only_flags_that_change_results(write_run):
    """Neither files and processes, nor a flag that is off and that an older version lacks."""
    flags = {"workers": 1, "save_every": "500", "keep": 2, "timeout": 60, "eval_only": False}
    runs = [
        write_run("old", [row(1)], output="a", **flags),
        write_run("new", [row(1)], **dict.fromkeys(flags, 9), skip_broken=0, patience=3),
    ]
    first, second = curves.make_labels([read_run(folder) for folder in runs])
    assert first == f"{runs[0]}: best val_accuracy 0.5000 in epoch 1"
    assert second == f"{runs[1]}: --patience 3, best val_accuracy 0.5000 in epoch 1"


def test_names_with_special_characters_of_matplotlib(write_run, tmp_path, monkeypatch):
    for name in ("_old", "a$x^{2$", "b"):
        write_run(name, [row(1)])
    monkeypatch.chdir(tmp_path)
    legend = mock.Mock(wraps=Figure.legend)
    monkeypatch.setattr(Figure, "legend", lambda *args, **kwargs: legend(*args, **kwargs))
    curves.main(["_old", "a$x^{2$", "b"])
    _, handles, names = legend.call_args.args
    assert [handle.get_color() for handle in handles] == list(curves.COLOURS[:3])
    assert [name.split(":")[0] for name in names] == ["./_old", r"a\$x^{2\$", "b"]


def test_invalid_folder_is_a_one_line_error(write_run, tmp_path, capsys):
    fine = write_run("fine", [row(1)])
    other = write_run(
        "other", [{name: v for name, v in row(1).items() if name != METRIC} | {"f1": 1}]
    )
    (tmp_path / "empty").mkdir()
    (write_run("begun", [row(1)]) / "metrics.csv").write_text("epoch,step\n")
    (write_run("flagless", [row(1)]) / "config.json").unlink()
    broken = write_run("broken", [row(1, lr="high")])
    listed = write_run("listed", [row(1)])
    (listed / "config.json").write_text("[1]")
    incomplete = write_run("incomplete", [row(1), row(2)])
    with (incomplete / "metrics.csv").open("a") as table:
        table.write("3,33\n")
    foreign = write_run("foreign", [{"a": 1}])
    nested = write_run("nested", [row(1)])
    (nested / "config.json").write_text("[" * 100_000)
    wide = write_run("wide", [row(1) | {str(n): 1 for n in range(5000)}])
    with (wide / "metrics.csv").open("a") as file:
        file.write("1,1\n" * 2000)
    huge = write_run("huge", [row(1, lr=1e308), row(2, lr=-1e308)])
    for arguments, words in (
        ([wide], "wide does not hold the files of a run (metrics.csv is too large)"),
        ([huge], "curves.png can't be written ("),
        ([nested], "nested does not hold the files of a run (maximum recursion"),
        (["missing"], "missing/metrics.csv: No such file or directory; name the folder of a run"),
        ([tmp_path / "empty"], "empty/metrics.csv: No such file or directory; name"),
        ([tmp_path / "flagless"], "flagless/config.json: No such file or directory; name"),
        ([tmp_path / "begun"], "has no rows yet"),
        ([broken], "could not convert string to float: 'high'"),
        ([incomplete], "line 4 of "),
        ([write_run("nan", [row(math.nan)])], "metrics.csv is incomplete: remove it"),
        ([foreign], "metrics.csv is not the table of a run, which has the columns epoch, step, "),
        ([fine, other], "val_accuracy (max) and f1 (max) can't be compared"),
        ([fine, "--output", tmp_path / "x.doc"], "can't write .doc"),
        ([fine, "--output", tmp_path / "none" / "x.png"], "none/x.png can't be written (No such"),
        ([listed], "config.json holds no settings"),
    ):
        with pytest.raises(SystemExit) as end:
            curves.main([str(argument) for argument in arguments])
        assert end.value.code == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.startswith("error: ")
        assert len(error.splitlines()) == 1


def test_command_line_compares_two_runs(write_run, tmp_path):
    for name in ("a", "b"):
        write_run(name, [row(1)])
    done = subprocess.run(
        [sys.executable, "-m", "engine.monitoring.curves", "a", "b"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(curves.__file__).parents[2])},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "compare.png\n")
    assert (tmp_path / "compare.png").exists()


def test_drawing_ignores_modules_of_the_current_folder(write_run, tmp_path, monkeypatch):
    folder = write_run("run", [row(1)])
    for name in ("engine", "csv", "runpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stray module')\n")
    monkeypatch.chdir(tmp_path)
    problems = []
    process = curves.BackgroundProcess(folder, problems.append)
    process.start()
    process.finish()
    assert problems == []
    assert (folder / "curves.png").is_file()


def test_backend_of_a_notebook_in_another_environment_is_not_used(write_run):
    """Jupyter's kernel sets it for the programs that a notebook starts."""
    folder = write_run("a", [row(1)])
    command = [sys.executable, "-m", "engine.monitoring.curves", folder]
    paths = {"PYTHONPATH": str(Path(curves.__file__).parents[2])}
    environment = os.environ | paths | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_import_needs_neither_torch_nor_matplotlib():
    code = "import sys, engine.monitoring.curves; print({'torch', 'matplotlib'} & set(sys.modules))"
    environment = os.environ | {"PYTHONPATH": str(Path(curves.__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert done.stdout == "set()\n"
