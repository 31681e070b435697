"""benchmarks/step.py and loader.py on the CPU, so few and small that only their workings show."""

import csv
import itertools
import re
import subprocess
import sys
from statistics import median

import pytest
from fresh import ROOT
from PIL import Image
from running import SCREENED

pytestmark = pytest.mark.xdist_group("short")
BENCHMARKS = ROOT / "benchmarks"
TRAINS = """
import torch
weight = torch.zeros(2, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range({steps}):
    weight.sum().backward()
    optimizer.step()
raise RuntimeError("no more")
"""


@pytest.fixture
def compete(tmp_path):
    """Runs step.py; gives the process, its table by contestant, and the seconds of every turn."""

    def compete(*names, rounds=2, starts=1):
        small = ("--arch", "shufflenet_v2_x0_5", "--image-size", 32, "--batch-size", 4)
        short = ("--warmup", 1, "--block", 2, "--rounds", rounds, "--starts", starts)
        flags = ("--device", "cpu", *small, *short, "--output", tmp_path / "step.csv")
        flags += ("--contestants", ",".join(map(str, names)))
        done = subprocess.run(
            [sys.executable, BENCHMARKS / "step.py", *map(str, flags)],
            env=SCREENED,
            capture_output=True,
            text=True,
            timeout=120,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
        head, _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)
        table = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
        turns = {}
        with (tmp_path / "step.csv").open() as file:
            for row in csv.DictReader(file):
                turns.setdefault(row["contestant"], []).append(float(row["seconds"]))
        return done, table, turns

    return compete


@pytest.mark.weekly
def test_the_project_and_torch_take_turns(compete):
    done, table, turns = compete("project-O0", "torch-fp32", "apex-O1")
    assert done.returncode == 0, done.stderr
    assert "apex-O1 is left out: " in done.stderr
    assert list(table) == list(turns) == ["project-O0", "torch-fp32"]
    for name, row in table.items():
        own, torchs = turns[name], turns["torch-fp32"]
        assert len(own) == 2
        assert float(row["ms/step"]) == pytest.approx(median(own) * 1e3, abs=0.01)
        ends = [float(end) for end in row["min – max"].split(" – ")]
        assert ends == pytest.approx([min(own) * 1e3, max(own) * 1e3], abs=0.01)
        assert float(row["images/s"]) == pytest.approx(4 / median(own), abs=1)
        assert float(row["ratio"]) == pytest.approx(median(own) / median(torchs), abs=0.001)
        assert row["to"] == "torch-fp32"
        assert row["peak GiB"] == "–"  # of a CPU


@pytest.mark.weekly
def test_the_others_go_on_when_a_contestant_ends(compete, tmp_path):
    scripts = tmp_path / "early.py", tmp_path / "late.py", tmp_path / "never.py"
    for script, steps in zip(scripts, (0, 7, 10**9), strict=True):
        script.write_text(TRAINS.format(steps=steps))
    done, table, turns = compete(*scripts, rounds=3)
    assert done.returncode == 1
    for name in ("early", "late"):
        assert f"{name} ended with status 1; its last words:\n    Traceback" in done.stderr
    assert done.stderr.count("RuntimeError: no more") == 2
    assert {name: len(of) for name, of in turns.items()} == {"late": 1, "never": 3}
    assert list(table) == ["never"]
    assert table["never"]["ratio"] == "–"


@pytest.mark.weekly
def test_what_trains_nothing_is_not_timed(compete, tmp_path):
    broken, whole = tmp_path / "broken.py", tmp_path / "whole.py"
    whole.write_text(TRAINS.format(steps=10**9))
    broken.write_text(
        whole.read_text().replace(
            "optimizer.step()", "weight.data.fill_(float('nan')); optimizer.step()"
        )
    )
    done, table, turns = compete(broken, whole)
    assert done.returncode == 1
    assert "FloatingPointError: the weights are not finite" in done.stderr
    assert list(table) == list(turns) == ["whole"]


@pytest.mark.weekly
def test_all_are_started_anew(compete, tmp_path):
    scripts, log = (tmp_path / "one.py", tmp_path / "other.py"), tmp_path / "starts"
    for script in scripts:
        says = f"open({str(log)!r}, 'a').write('{script.stem} ')\n"
        script.write_text(says + TRAINS.format(steps=10**9))
    done, table, turns = compete(*scripts, starts=2)
    assert done.returncode == 0, done.stderr
    assert sorted(log.read_text().split()) == ["one", "one", "other", "other"]
    assert {name: len(of) for name, of in turns.items()} == {"one": 4, "other": 4}
    assert list(table) == ["one", "other"]


@pytest.fixture
def step(monkeypatch):
    """The module."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import step

    return step


@pytest.mark.parametrize(
    ("name", "references"),
    [
        ("project", ["torch-fp16", "torch-fp16"]),
        ("project-syncbn-adam-O5", ["torch-adam-syncbn-bf16", "torch-adam-bf16"]),
        ("apex-torchddp-O0", ["torch-fp32", "torch-fp32"]),
        ("torch-compile-fp16", ["torch-fp16"]),
        ("fabric-adam-bf16", ["torch-adam-bf16", "torch-adam-bf16"]),
    ],
)
def test_a_contestant_is_held_against_its_like(step, name, references):
    assert step.read_name(name, "sgd").references() == references


@pytest.mark.parametrize("name", ["jax", "apex-O4", "project-fp16", "fabric-syncbn", "none.py"])
def test_a_name_that_is_none_is_refused(step, name):
    with pytest.raises(ValueError, match=re.escape(name.split("-")[0])):
        step.read_name(name, "sgd")


@pytest.mark.weekly
@pytest.mark.parametrize("program", ["step.py", "scaling.py"])
def test_turns_beyond_main_pys_first_epoch_are_refused(tmp_path, program):
    """Its validation and its save would be timed."""
    flags = ("--contestants", "project-O1", "--rounds", "8", "--output", tmp_path / "turns.csv")
    done = subprocess.run(
        [sys.executable, BENCHMARKS / program, *flags],
        env=SCREENED | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "main.py validates and saves after 100 steps, and this would be 106" in done.stderr


def test_the_numbers_of_the_project_are_still_these(step):
    project = ROOT / "{{cookiecutter.project_slug}}"
    for default in (
        '"--momentum", type=cli.non_negative_float, default=0.9,',
        '"--weight-decay", type=cli.non_negative_float, default=1e-4,',
    ):
        assert f"add({default}" in (project / "main.py").read_text()  # as in peers/common.py
    assert f"\nDUMMY_STEPS = {step.PROJECT_EPOCH} " in (project / "main.py").read_text()
    files = {"classification": "task.py", "segmentation": "template_task_segmentation.py"}
    for task, line in step.IN_TASK_PY.items():
        assert (project / files[task]).read_text().count(line) == 1


@pytest.mark.weekly
def test_scaling_runs_each_contestant_in_each_place(tmp_path):
    script, output = tmp_path / "trains.py", tmp_path / "scaling.csv"
    script.write_text(TRAINS.format(steps=1000))
    flags = ("--contestants", script, "--gpus", "1,2", "--batch-sizes", "4,8", "--rounds", 2)
    short = ("--image-sizes", "32,64", "--warmup", 1, "--block", 2, "--output", output)
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "scaling.py", *map(str, (*flags, *short))],
        env=SCREENED | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| t")]
    rows = [[cell.strip() for cell in line] for line in lines]
    assert [tuple(row[:4]) for row in rows] == [
        ("trains", *place) for place in itertools.product("48", ("32²", "64²"), "12")
    ]
    for alone, together in zip(rows[::2], rows[1::2], strict=True):
        assert alone[6] == "1.000"
        assert float(together[6]) == pytest.approx(int(together[5]) / 2 / int(alone[5]), rel=0.01)
    with output.open() as file:
        assert len(list(csv.DictReader(file))) == 16


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("flags", "loaders"),
    [
        ((), ["usual (PIL)", "--decode cpu"]),
        (("--train",), ["synthetic", "usual (PIL)", "--decode cpu", "packed, --decode cpu"]),
    ],
    ids=["alone", "training"],
)
def test_loaders_take_turns(tmp_path, flags, loaders):
    pytest.importorskip("sklearn")
    small = ("--arch", "shufflenet_v2_x0_5", "--images", 16, "--batch-size", 4, "--workers", 1)
    short = ("--warmup", 1, "--block", 1, "--rounds", 1, "--output", tmp_path / "loader.csv")
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "loader.py", *flags, *map(str, (*small, *short))],
        env=SCREENED,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [name.removeprefix("| ") for name, *_ in rows[1:]] == loaders
    assert all(int(images_per_second) > 0 for _, images_per_second, *_ in rows[1:])


@pytest.mark.weekly
def test_packing_is_timed_beside_encoding():
    pytest.importorskip("sklearn")
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "pack.py", "--images", "16", "--rounds", "1"],
        env=SCREENED,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    rates = re.findall(
        r"^\| (encode|pack) \| (\d+) \| \S+ \| \d\.\d\d \|$", done.stdout, re.MULTILINE
    )
    assert [name for name, _ in rates] == ["encode", "pack"]
    assert all(int(rate) > 0 for _, rate in rates)


@pytest.mark.weekly
def test_the_demo_is_timed_beside_torch_by_hand():
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "demo.py", "--rounds", "1", "--epochs", "1"],
        env=SCREENED,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    number = r"([\d.]+) \(.*\)"
    found = re.findall(rf"^\| (\S+).* \| {number} \| {number} \|$", done.stdout, re.MULTILINE)
    assert [name for name, *_ in found] == ["./run.sh", "torch", "torch"]
    assert all(1 < float(start) < 150 and 1 < float(rest) < 150 for _, start, rest in found)


def test_the_picture_is_of_the_figures_in_the_tables(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import pictures

    results = (BENCHMARKS / "RESULTS.md").read_text(encoding="utf-8")
    for file, name, _ in pictures.STEP + pictures.SMALL_STEP + pictures.SYNCED:
        assert re.search(rf"\b{median(pictures.turns(file, name)):.2f}\b", results), name
    for file, name, _ in pictures.LOADERS:
        speed = median(pictures.BATCH / ms * 1e3 for ms in pictures.turns(file, name))
        assert f"| {speed:,.0f} |" in results, name
    monkeypatch.setattr(sys, "argv", ["pictures.py", "--output", str(tmp_path / "speed.png")])
    pictures.main()
    with Image.open(tmp_path / "speed.png") as drawn, Image.open(BENCHMARKS / "speed.png") as kept:
        assert drawn.size == kept.size
        assert len(drawn.convert("RGB").getcolors(1 << 20)) > 100
