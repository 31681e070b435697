"""benchmarks/roofline.py: what it counts, and on the CPU that it runs."""

import csv
import re
import subprocess
import sys

import pytest
import torch
import torchvision
from fresh import ROOT
from running import SCREENED
from torch import nn

pytestmark = pytest.mark.xdist_group("short")
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def roofline(monkeypatch):
    """The module."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import roofline

    return roofline


def test_the_operations_of_resnet50_are_those_that_torchvision_states(roofline):
    with torch.device("meta"):
        model, images = torchvision.models.resnet50(), torch.empty(2, 3, 224, 224)
    operations = sum(call.operations for call in roofline.count(lambda: model(images)))
    stated = torchvision.models.ResNet50_Weights.IMAGENET1K_V2.meta["_ops"]  # 10⁹ times × and +
    assert operations / 2 == pytest.approx(2 * stated * 1e9, rel=0.01)


def test_a_backward_pass_costs_as_much_again_for_weights_and_for_inputs(roofline):
    layers = nn.Sequential(nn.Linear(30, 20, bias=False), nn.Linear(20, 10, bias=False))
    calls = roofline.count(lambda: layers(torch.ones(4, 30)).sum().backward())
    forward = 2 * 4 * (30 * 20 + 20 * 10)
    assert sum(call.operations for call in calls) == 2 * forward + 2 * 4 * 20 * 10


@pytest.mark.parametrize(
    ("operator", "tensors"),
    [
        (lambda x: x.relu(), 2),
        (lambda x: x.relu_(), 2),
        (lambda x: x + x, 3),
        (lambda x: x.view(10, 100), 0),
        (lambda x: x.t().reshape(-1), 0),
        (lambda x: torch.empty_like(x), 0),
    ],
)
def test_bytes_are_those_that_an_operator_takes_and_gives(roofline, operator, tensors):
    x = torch.ones(1, 1000)
    assert sum(call.bytes for call in roofline.count(lambda: operator(x))) == tensors * 4000


def test_the_longer_of_an_operators_two_times_is_its_roof(roofline):
    call = roofline.Counted("mm", operations=600, bytes=50)
    assert call.at_the_roof(100.0, 10.0) == 6.0
    assert call.at_the_roof(100.0, 5.0) == 10.0


@pytest.mark.weekly
def test_it_runs_on_the_cpu(tmp_path):
    small = ("--arch", "shufflenet_v2_x0_5", "--image-size", 32, "--batch-size", 4)
    flags = ("--device", "cpu", "--precision", "fp32", "--block", 1, "--rounds", 2)
    output = tmp_path / "roofline.csv"
    done = subprocess.run(
        [
            sys.executable,
            BENCHMARKS / "roofline.py",
            *map(str, (*small, *flags)),
            "--output",
            output,
        ],
        env=SCREENED,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    with output.open() as file:
        calls = list(csv.DictReader(file))
    roof = sum(float(call["seconds_at_the_roof"]) for call in calls)
    own = float(re.search(r"GB, ([\d.]+) ms", done.stdout)[1]) / 1e3
    said = re.search(r"at the roof: ([\d.]+) ms, a share of ([\d.]+)", done.stdout)
    assert float(said[1]) / 1e3 == pytest.approx(roof, abs=1e-4)
    assert float(said[2]) == pytest.approx(roof / own, abs=0.01)
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if "| " in line][1:]
    assert sum(int(row[1]) for row in rows) == len(calls)
    assert {"convolution", "convolution_backward"} <= {row[0] for row in rows}
    assert [float(row[4]) for row in rows] == sorted((float(row[4]) for row in rows), reverse=True)
