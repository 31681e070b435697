"""Checkpoints of version 0.9 resume, and train on to the weights that 0.9 itself arrived at."""

import json

import pytest
import torch
from make_checkpoints_0_9 import FOLDER, append_tiny_model, environment, results
from running import run_two
from torch import Tensor

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("train")]
RECORD = json.loads((FOLDER / "runs.json").read_text())
FAST = ("classification_O1", "classification_O2", "contrastive_O1")
TOLERANCE = 0.1
"""The largest relative error of the weights' change, in another environment than the fixtures'.

Other CPU kernels, float32 for bfloat16, and other dropout masks give 0.00 to 0.08. A resume without
the optimizer's moments gives 0.30 to 0.66; without Adam's step count, 0.18 to 0.25; at the start of
the epoch, 0.17 to 0.31; without the moving average (--ema), 0.32 to 0.46.
"""


def relative_error(
    actual: dict[str, Tensor], expected: dict[str, Tensor], start: dict[str, Tensor]
) -> float:
    """Return the norm of `actual` - `expected`, divided by that of `expected` - `start`."""
    names = [name for name in expected if expected[name].is_floating_point()]
    error = [(actual[name] - expected[name]).flatten() for name in names]
    change = [(expected[name] - start[name]).flatten() for name in names]
    return (torch.cat(error).norm() / torch.cat(change).norm()).item()


NAMES = [
    name if name in FAST else pytest.param(name, marks=pytest.mark.weekly)
    for name in RECORD["runs"]
]


@pytest.mark.parametrize("name", NAMES)
def test_resume_of_a_0_9_checkpoint_matches_0_9(bake, tmp_path, name):
    """Expect bit-identical results in the fixtures' environment, and close ones elsewhere."""
    answers, flags, expected = (
        RECORD["runs"][name][key] for key in ("answers", "flags", "expected")
    )
    checkpoint = FOLDER / f"{name}.pt"
    project = bake(**answers)
    append_tiny_model(project, answers)
    # Skip drawing the curves, which takes longer than the training; the run only logs a warning.
    (project / "matplotlib.py").write_text("raise ImportError('not needed here')\n")
    done = run_two(project, *flags, "--resume", checkpoint, "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    weights, others = results(tmp_path)
    expected_weights = torch.load(FOLDER / f"{name}.expected.pt", weights_only=True)
    if weights.pop("ema", None):  # 0.9 had no warm-up of its decay, and validated it alone
        del expected_weights["ema"]
        for row in (*others["metrics"], *expected["metrics"]):
            for column in [name for name in row if name.startswith("val_")]:
                del row[column]
    for scaler in (*others["amp"].values(), *expected["amp"].values()):
        if scaler["loss_scale"] == 1.0:  # static: 0.9 did not count its steps, as Apex does
            del scaler["unskipped"]
    for key in ("epoch", "step", "samples", "amp"):
        assert others[key] == expected[key], key
    if environment() == RECORD["environment"]:
        torch.testing.assert_close(weights, expected_weights, rtol=0, atol=0)
        assert others["metrics"] == expected["metrics"]
        return
    assert weights.keys() == expected_weights.keys()
    start = torch.load(checkpoint, weights_only=True)
    for part in weights:
        assert weights[part].keys() == expected_weights[part].keys()
        error = relative_error(weights[part], expected_weights[part], start[part])
        assert error < TOLERANCE, part
