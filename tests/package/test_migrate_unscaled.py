"""``apex-native migrate``: gradients are unscaled where Apex does it, if one step always follows.

Any code may then read or change them before the step. Elsewhere, such code is a reason to leave.
"""

import re
from textwrap import indent

import pytest
from migrated_scripts import COMMAND, losses, migrate
from parameters import mostly_slow

pytest.importorskip("libcst")
pytestmark = pytest.mark.xdist_group("package")

ELSEWHERE = """\
import torch
from torch import nn

def tensors(given):
    given = given.parameters() if isinstance(given, nn.Module) else given
    for each in getattr(given, "param_groups", given):
        each = each[1] if isinstance(each, tuple) else each
        yield from each["params"] if isinstance(each, dict) else [each]

def noise(given):
    for p in tensors(given):
        p.grad.add_(0.5)

def print_norm(given):
    print(sum(p.grad.norm().item() for p in tensors(given)))

class Clipper:
    def __init__(self, given):
        self.given = [*tensors(given)]

    def clip(self, run=None):
        nn.utils.clip_grad_norm_(self.given, 0.1)

    __call__ = filter = step = run = clip

class Net(nn.Linear):
    def limit_gradients(self):
        noise(self)

class Base:
    def __init__(self, model):
        self.model = model

    def change(self):
        noise(self.model)
"""
START = """\
from functools import partial
from operator import attrgetter

import torch
from torch import nn
from apex import amp
import elsewhere
from elsewhere import Base, Clipper, Net, noise, print_norm

torch.manual_seed(0)
x = torch.randn(8, 8)
model, other = Net(8, 8), nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
"""
# The gradients of the third step are infinite.
BACKWARD = """\
    loss = model(x / (n != 2)).square().mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
"""
STEP = "    optimizer.step()\n    optimizer.zero_grad()\n"
ACCUMULATED = f"    if n % 2:\n{indent(STEP, '    ')}"
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 0.1)"
MINE = f"class Mine:\n    def NAME(self, given=None):\n        {CLIP}\n\nmine = Mine()\n"
GIVEN = "noise is given the parameters before the step"
OBJECT = "is a method of an object that has the parameters"
# Code in front of a loop, code between a backward pass and its step, and the reason to leave it if
# the step has a condition more.
BETWEEN = {
    "names of parameters": ("", "noise(model.named_parameters())", GIVEN),
    "inherited method": ("", "self.change()", "self.change may have the parameters"),
    "callback": ("callback = Clipper(model)\n", "callback(self)", "callback"),
    "list of parameters": (
        "params, more = [], []\nfor name, p in model.named_parameters():\n"
        + "    params.append(p)\nmore += params\n",
        "noise(more)",
        GIVEN,
    ),
    "optimizer": ("", "noise(optimizer)", GIVEN),
    "groups of the optimizer": ("", "noise(optimizer.param_groups)", GIVEN),
    "object with the parameters": (
        "clipper = elsewhere.Clipper(model.parameters())\n",
        "clipper.clip()",
        f"clipper.clip {OBJECT}",
    ),
    "object with a list of parameters": (
        "weights = [*model.parameters()]\nclipper = Clipper(weights)\n",
        "clipper.clip()",
        f"clipper.clip {OBJECT}",
    ),
    "called object with the optimizer": (
        "clipper = Clipper(optimizer)\n",
        "clipper()",
        "clipper has the parameters, and may read their gradients",
    ),
    "method with the name of a builtin function": (
        "clipper: Clipper = Clipper(optimizer)\n",
        "clipper.filter()",
        f"clipper.filter {OBJECT}",
    ),
    "method with the name of one of this file": (
        "class Image:\n    def clip(self):\n        return self\n\nclipper = Clipper(optimizer)\n",
        "clipper.clip()",
        f"clipper.clip {OBJECT}",
    ),
    "method that logs gradients": (
        "optimizer.log_grad_norm = partial(print_norm, optimizer)\n",
        "optimizer.log_grad_norm()",
        "optimizer.log_grad_norm",
    ),
    "object that clips and has the model": (
        "clipper = Clipper(model)\n",
        "clipper.run()",
        f"clipper.run {OBJECT}",
    ),
    "new object that clips and has the model": (
        "",
        "Clipper(model).run()",
        "Clipper(model).run may have",
    ),
    "function that clips and has the model": (
        "elsewhere.normalize_grads = elsewhere.noise\n",
        "elsewhere.normalize_grads(model)",
        "normalize_grads is given the parameters",
    ),
    "parameters and their number": (
        "params, num = [*model.parameters()], sum(p.numel() for p in model.parameters())\n",
        "noise(params)",
        GIVEN,
    ),
    "large parameters": (
        "params = [p for p in model.parameters() if p.dim() + p.numel() > 9]\n",
        "noise(params)",
        GIVEN,
    ),
    "gradients that are dropped": (
        "",
        "if n == 3:\n        optimizer.zero_grad()",
        "gradients may be zeroed before optimizer.step()",
    ),
    "function of another name": (
        MINE.replace("NAME", "after"),
        "getattr(Mine(), 'after')()",
        "are clipped",
    ),
    "function of a helper": (
        "def limit():\n    noise(model.parameters())\n",
        "limit()",
        GIVEN,
    ),
    "function by its name": (
        "",
        "getattr(elsewhere, 'noise')(model)",
        "getattr(elsewhere, 'noise') is given the parameters",
    ),
    "gradients by their name": (
        "",
        "print(sum(map(torch.norm, map(attrgetter('grad'), model.parameters()))).item())",
        "attrgetter('grad') is read",
    ),
    "method of the base class": ("", "super().change()", "super().change may have the parameters"),
    "method of the model": ("", "model.limit_gradients()", "model.limit_gradients may have"),
    "one of several optimizers": (
        "elsewhere.clip_all = lambda given: [noise(each) for each in given]\n",
        "elsewhere.clip_all([optimizer])",
        "clip_all may have the parameters",
    ),
    "gradients of a parameter": ("", "print(model.weight.grad.norm().item())", "grad is read"),
    "function that has the model": ("", "noise(model)", GIVEN),
    "plain backward pass": ("", "model.weight.square().sum().backward()", "is not scaled"),
    "backward of autograd": (
        "from torch.autograd import backward as run\n",
        "run(model(x).sum())",
        "run(model(x).sum()) is not scaled",
    ),
    "clipping object of the file": (MINE.replace("NAME", "__call__"), "mine()", "are clipped"),
    "step of an object of the file": (MINE.replace("NAME", "step"), "mine.step(0)", "are clipped"),
    "alias": (
        "from torch.nn.utils import clip_grad_norm_ as limit\nall = [*model.parameters()]\n",
        "limit(all, 1.0)",
        "limit is given the parameters before the step",
    ),
    "function that clips, as a value": (
        "limit = nn.utils.clip_grad_norm_\ngroups = [[*model.parameters()]]\nfirst = groups[0]\n",
        "limit(first, 0.1)",
        "a function that is passed on reads gradients",
    ),
    "lambda": (f"limit = lambda: {CLIP}\n", "limit()", "a lambda or a function that is passed on"),
    "getattr": (
        "",
        'print(getattr(model.weight, "grad").norm().item())',
        'getattr(model.weight, "grad") is read',
    ),
    "nested function": ("", f"def limit():\n        {CLIP}\n    limit()", "are clipped"),
    "property": (
        MINE.replace("def NAME", "@property\n    def norm").replace(", given=None", ""),
        "mine.norm",
        "are clipped",
    ),
    "clipping in a branch": ("", f"if n % 2:\n        {CLIP}", "are clipped"),
}


def build(setup, line, step):
    """Return a script with a loop that trains, of a method if the line has `self`."""
    loop = f"for n in range(6):\n{BACKWARD}    {line}\n{step}    print(loss.item())\n"
    loop += "print(model.weight.square().sum().item())\n"
    if "self." in line or "(self)" in line or "super()" in line:
        loop = (
            f"class Run(Base):\n    def train(self):\n{indent(loop, ' ' * 8)}Run(model).train()\n"
        )
    return f"{START}{setup}{loop}"


@pytest.mark.parametrize("name", mostly_slow(BETWEEN, fast=3))
def test_weights_are_equal_if_gradients_change_before_the_step(run, tmp_path, name):
    script = build(*BETWEEN[name][:2], STEP)
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    (tmp_path / "script.py").write_text(script)
    expected = losses(run(*COMMAND, "run", "script.py"))
    code, _ = migrate(tmp_path, script)
    assert ".unscale_(optimizer)" in code
    # On a CPU, GradScaler for CUDA is disabled. This one scales by powers of 2, which is exact.
    (tmp_path / "script.py").write_text(code.replace('GradScaler("cuda"', 'GradScaler("cpu"'))
    found = losses(run("script.py"))
    assert found == pytest.approx(expected, rel=2e-2, nan_ok=True)  # the first run is in half


@pytest.mark.parametrize("name", BETWEEN)
def test_code_that_may_change_accumulated_gradients_is_left(tmp_path, name):
    setup, line, why = BETWEEN[name]
    code, report = migrate(tmp_path, build(setup, line, ACCUMULATED), status=1)
    assert why in report
    assert "amp.scale_loss(" in code and "GradScaler" not in re.sub("#.*", "", code)


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (STEP, "clipper.step may be the step of an optimizer whose gradients are scaled"),
        (ACCUMULATED, f"clipper.step {OBJECT}"),
    ],
)
def test_step_of_an_object_that_clips_is_left(tmp_path, step, why):
    code, report = migrate(
        tmp_path, build("clipper = Clipper(optimizer)\n", "clipper.step()", step), status=1
    )
    assert why in report
    assert "amp.scale_loss(" in code and "GradScaler" not in re.sub("#.*", "", code)


@pytest.mark.parametrize(
    "line",
    [
        "self.criterion(x)",
        "self.log(n)",
        "optimizer.zero_grad",
        "torch.clip(x, 0, 1)",
        "noise(n)",
        "elsewhere.adjust_learning_rate(optimizer, n)",
        "get_momentum(optimizer)",
    ],
)
def test_code_that_needs_no_gradients_is_no_reason(tmp_path, line):
    script = build("", f"{line}  # self.log", ACCUMULATED)
    script = script.replace("    def train", "    criterion = nn.MSELoss()\n\n    def train")
    script = script.replace("print(loss.item())", "save_checkpoint(model, optimizer)")
    assert "0 left" in migrate(tmp_path, script)[1]


def test_nothing_is_unscaled_in_front_of_a_step_that_is_next(tmp_path):
    code, _ = migrate(tmp_path, build("", "# the step", STEP))
    assert "scaler.scale(loss).backward()\n    # the step\n    scaler.step(optimizer)" in code


def test_any_code_may_follow_in_the_block_of_a_step_that_has_a_condition(tmp_path):
    step = ACCUMULATED.replace(
        "        optimizer.step", "        self.change()\n        optimizer.step"
    )
    code, _ = migrate(tmp_path, build("", "# self.", step))
    block = (
        "if n % 2:\n    scaler.unscale_(optimizer)\n    self.change()\n    scaler.step(optimizer)\n"
    )
    assert indent(block, " " * 12) in code


def test_loss_of_a_helper_of_a_helper_is_left(tmp_path):
    helpers = f"def extra():\n{BACKWARD.replace('n != 2', '1')}\ndef more():\n    extra()\n\n"
    report = migrate(tmp_path, build(helpers, "more()", STEP), status=1)[1]
    assert "optimizer.step() is in another function than its backward pass" in report


def test_training_after_another_loop_in_a_function_is_converted(tmp_path):
    loop = f"for n in range(6):\n{BACKWARD}{STEP}"
    warmup = f"def warmup():\n{indent(loop, '    ')}"
    script = f"{START}{warmup}def main():\n    warmup()\n{indent(loop, '    ')}main()\n"
    assert "0 left" in migrate(tmp_path, script)[1]
