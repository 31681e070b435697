"""``apex-native migrate``: forward passes that no autocast would reach are left, with a reason."""

import re
from textwrap import indent

import pytest
from migrated_scripts import losses, migrate

pytest.importorskip("libcst")
pytestmark = pytest.mark.xdist_group("package")

START = """\
import argparse
import torch
from apex import amp

parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)
x, y = torch.randn(64, 16), torch.randint(0, 4, (64,))
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = torch.nn.CrossEntropyLoss()
"""
INITIALIZE = 'model, optimizer = amp.initialize(model, optimizer, opt_level="O4", verbosity=0)\n'
STEP = """\
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print(loss.item())
"""
LOOP = "for step in range(3):\n    optimizer.zero_grad()\n"
UPDATE = f"def update(out, y):\n    loss = criterion(model[1:](out), y)\n{STEP}"
NO_FORWARD = "no forward pass of the model is among the statements that compute the loss"

# Bodies of scripts that train with other losses if the forward pass is outside of autocast.
CONVERTED = {
    "annotated": INITIALIZE
    + f"{LOOP}    out: torch.Tensor = model(x)\n    loss = criterion(out, y)\n{STEP}",
    "comments": INITIALIZE
    + f"{LOOP}    # loss.backward() is below\n    out = model(x)  # optimizer.step() too\n"
    + f"    # optimizer.zero_grad() was above\n    loss = criterion(out, y)\n{STEP}",
    "list": INITIALIZE
    + LOOP
    + "    parts = []\n    for part in range(2):\n"
    + "        parts.append(criterion(model(x[part::2]), y[part::2]))\n    loss = sum(parts)\n"
    + STEP,
    "assignment in an expression": INITIALIZE
    + f"{LOOP}    if (out := model(x)) is not None:\n        pass\n"
    + f"    loss = criterion(out, y)\n{STEP}",
    "function given the model": INITIALIZE
    + "def compute(net):\n    return criterion(net(x), y)\n"
    + f"{LOOP}    loss = compute(model)\n{STEP}",
    "wrapped": INITIALIZE
    + f"net = torch.nn.Sequential(model)\n{LOOP}    loss = criterion(net(x), y)\n{STEP}",
    "copy of the model": INITIALIZE
    + "from copy import deepcopy\nclass Agent:\n    def __init__(self):\n"
    + "        self.old = deepcopy(model)\n\n    def train(self):\n        optimizer.zero_grad()\n"
    + f"        loss = criterion(model(x) + self.old(x), y)\n{indent(STEP, '    ')}\n"
    + "agent = Agent()\nfor step in range(3):\n    agent.train()\n",
    "module that trains itself": "class Net(torch.nn.Module):\n    def __init__(self):\n"
    + "        super().__init__()\n        self.net, self.optimizer = "
    + 'amp.initialize(model, optimizer, opt_level="O4")\n\n'
    + "    def forward(self, x):\n        return self.net(x)\n\n    def train_step(self):\n"
    + "        self.optimizer.zero_grad()\n        loss = criterion(self(x), y)\n"
    + indent(STEP.replace("optimizer", "self.optimizer"), "    ")
    + "\nnet = Net()\nfor step in range(3):\n    net.train_step()\n",
    "weights that change": INITIALIZE
    + f"{LOOP}    out = model(x)\n    model[0].weight.data.mul_(0.5)\n"
    + f"    loss = criterion(out + model(x), y)\n{STEP}",
}
LEFT = {
    "outer loop": (
        INITIALIZE
        + f"{LOOP}    out = model(x)\n    for weight in (0.5, 0.5):\n"
        + "        loss = criterion(out, y) * weight\n"
        + "        with amp.scale_loss(loss, optimizer) as scaled_loss:\n"
        + "            scaled_loss.backward(retain_graph=True)\n    optimizer.step()\n",
        NO_FORWARD,
    ),
    "other function": (
        INITIALIZE
        + "def forward(x):\n    args.out = model(x)\n"
        + f"{LOOP}    forward(x)\n    loss = criterion(args.out, y)\n{STEP}",
        NO_FORWARD,
    ),
    "caller": (
        INITIALIZE
        + "def backward(loss):\n    loss = loss.mean()\n"
        + "    with amp.scale_loss(loss, optimizer) as scaled_loss:\n"
        + "        scaled_loss.backward()\n"
        + f"{LOOP}    loss = criterion(model(x), y)\n    backward(loss)\n    optimizer.step()\n",
        NO_FORWARD,
    ),
    "None in place of the model and of the loss function": (
        f"{INITIALIZE}def reset(run):\n    run.model = None\n    run.criterion = None\n"
        + f"def train(out):\n    loss = criterion(out, y)\n{STEP}for step in range(3):\n"
        + "    optimizer.zero_grad()\n    train(predict(x))\n",
        NO_FORWARD,
    ),
    "generator": (
        INITIALIZE
        + "def outputs():\n    for _ in range(3):\n        yield model(x)\n"
        + "for out in outputs():\n    optimizer.zero_grad()\n"
        + f"    loss = criterion(out, y)\n{STEP}",
        NO_FORWARD,
    ),
    "method called step": (
        INITIALIZE
        + "class Task:\n    def step(self, x, y):\n        return criterion(model(x), y)\n"
        + f"task = Task()\n{LOOP}    loss = task.step(x, y)\n{STEP}",
        NO_FORWARD,
    ),
    "same line": (
        INITIALIZE
        + "for step in range(3):\n    optimizer.zero_grad(); out = model(x)\n"
        + f"    loss = criterion(out, y)\n{STEP}",
        NO_FORWARD,
    ),
    "output of an outer loop": (
        INITIALIZE
        + f"{LOOP}    features = model[0](x)\n    for weight in (0.5, 0.5):\n"
        + "        loss = criterion(model[1:](features), y) * weight\n"
        + "        with amp.scale_loss(loss, optimizer) as scaled_loss:\n"
        + "            scaled_loss.backward(retain_graph=True)\n    optimizer.step()\n",
        "model[0] is called outside of autocast",
    ),
    "output that a hook keeps": (
        INITIALIZE
        + "kept = {}\ndef keep(module, inputs, output):\n    kept['out'] = output\n"
        + "model[0].register_forward_hook(keep)\n"
        + f"{LOOP}    model[0](x)\n    loss = criterion(model[1:](kept['out']), y)\n{STEP}",
        "model[0] is called outside of autocast",
    ),
    "output as an argument": (
        INITIALIZE
        + "def update(features):\n    loss = criterion(model[1:](features), y)\n"
        + f"{STEP}{LOOP}    features = model[0](x)\n    update(features)\n",
        "model[0] is called outside of autocast",
    ),
    "statement with a step": (
        INITIALIZE
        + f"{LOOP}    if step:\n        optimizer.zero_grad()\n        out = model[0](x)\n"
        + f"    loss = criterion(model[1:](out), y)\n{STEP}",
        "model[0] is called outside of autocast",
    ),
    "method called step beside another": (
        INITIALIZE
        + f"{LOOP}    loss = criterion(model(x), y)\n    for n in range(2):\n"
        + f"        loss = loss + model.step(x)\n{STEP}",
        "model.step is called outside of autocast",
    ),
    "argument of the function that has the loss": (
        f"{INITIALIZE}{UPDATE}{LOOP}    update(model[0](x), y)\n",
        "model[0] is called outside of autocast",
    ),
    "argument of a method that has the loss": (
        f"{INITIALIZE}class Agent:\n"
        + indent(UPDATE.replace("update(", "update(self, "), "    ")
        + f"agent = Agent()\n{LOOP}    agent.update(model[0](x), y)\n",
        "model[0] is called outside of autocast",
    ),
    "argument that is computed from an output": (
        f"{INITIALIZE}{UPDATE}{LOOP}    features = model[0](x)\n    pair = (features, y)\n"
        + "    update(*pair)\n",
        "model[0] is called outside of autocast",
    ),
    "loss function that autocast refuses": (
        INITIALIZE + f"{LOOP}    loss = torch.nn.BCELoss()(model(x).sigmoid(), x[:, :4])\n{STEP}",
        "autocast refuses BCELoss",
    ),
    "threads of DataParallel, which cast to another type": (
        INITIALIZE
        + f"net = torch.nn.DataParallel(model)\n{LOOP}    loss = criterion(net(x), y)\n{STEP}",
        "DataParallel's threads cast to float16",
    ),
    "output of a function": (
        f"{INITIALIZE}def encode(x):\n    return model[0](x)\n{UPDATE}{LOOP}    out = encode(x)\n"
        + "    update(out, y)\n",
        "encode is called outside of autocast",
    ),
    "output of a function in an outer loop": (
        f"{INITIALIZE}def encode(x):\n    return model[0](x)\n{LOOP}    out = encode(x)\n"
        + "    for weight in (0.5, 0.5):\n        loss = weight * criterion(model[1:](out), y)\n"
        + indent(STEP, "    "),
        "encode is called outside of autocast",
    ),
    "items of a generator": (
        f"{INITIALIZE}def outputs():\n    for _ in range(3):\n        yield model[0](x)\n"
        + f"for out in outputs():\n    loss = criterion(model[1:](out), y)\n{STEP}",
        "outputs is called outside of autocast",
    ),
    "item of a dictionary": (
        f"{INITIALIZE}def run(batch):\n    batch['out'] = model(x)\nbatch = {{}}\n{LOOP}"
        + f"    run(batch)\n    loss = criterion(batch['out'], y) + model(x).mean()\n{STEP}",
        "model is called outside of autocast",
    ),
    "buffer": (
        f"{INITIALIZE}buffer = torch.zeros(64, 4)\n{LOOP}    buffer.detach_().copy_(model(x))\n"
        + f"    loss = criterion(buffer, y) + model(x).mean()\n{STEP}",
        "model is called outside of autocast",
    ),
    "global output": (
        f"{INITIALIZE}def run():\n    global out\n    out = model(x)\n"
        + f"{LOOP}    run()\n    loss = criterion(out, y) + model(x).mean()\n{STEP}",
        "model is called outside of autocast",
    ),
    "nonlocal output": (
        f"{INITIALIZE}def main():\n    out = None\n    def run():\n        nonlocal out\n"
        + "        out = model(x)\n"
        + indent(f"{LOOP}    run()\n    loss = criterion(out, y) + model(x).mean()\n{STEP}", "    ")
        + "main()\n",
        "model is called outside of autocast",
    ),
    "item of a global dictionary": (
        f"{INITIALIZE}bank = {{}}\ndef build():\n    bank['out'] = model(x)\n"
        + f"{LOOP}    build()\n    loss = criterion(bank['out'], y) + model(x).mean()\n{STEP}",
        "model is called outside of autocast",
    ),
    "memory that two functions are given": (
        f"{INITIALIZE}def collect(memory):\n    out = model(x)\n    memory.append(out)\n"
        + "def update(memory):\n    old = torch.stack(memory)\n"
        + f"    loss = criterion(model(x) - old[-1], y)\n{STEP}"
        + f"memory = []\n{LOOP}    collect(memory)\n    update(memory)\n",
        "model is called outside of autocast",
    ),
    "memory of a class": (
        f"{INITIALIZE}memory = Memory()\n{LOOP}    out = model(x)\n    memory.push(out, y)\n"
        + "    for _ in range(2):\n        old, y = memory.sample()\n"
        + f"        loss = criterion(model(x) - old, y)\n{indent(STEP, '    ')}",
        "model is called outside of autocast",
    ),
    "output of the step before": (
        f"{INITIALIZE}out = x\n{LOOP}    loss = criterion(model(out), y)\n{STEP}"
        + "    out = model[:2](x) @ torch.randn(64, 16)\n",
        "model[:2] is called outside of autocast",
    ),
    "hook": (
        f"{INITIALIZE}kept = {{}}\n{LOOP}    model(x)\n"
        + f"    loss = criterion(kept['out'], y) + model(x).mean()\n{STEP}",
        "model is called outside of autocast",
    ),
    "method that calls another of its name": (
        f"""{INITIALIZE}
class Trainer:
    net = model

    def forward(self):
        self.out = self.net(x)

    def backward(self):
        loss = criterion(self.out, y) + self.net.forward(x).mean()
{indent(STEP, "    ")}""",
        "self.net is called outside of autocast",
    ),
    **{
        f"penalty, {name}": (
            f"{setup}{INITIALIZE}{LOOP}    run(args)\n"
            + f"    loss = criterion(args.out, y) + 0.1 * penalty(model)\n{STEP}",
            NO_FORWARD,
        )
        for name, setup in {
            "imported": "from elsewhere import penalty, run\n",
            "imported, with data": "from elsewhere import run, weight, penalty_of\n"
            "def penalty(net):\n    return penalty_of(net, weight)\n",
            "defined": "from elsewhere import run\ndef penalty(net):\n"
            "    return sum(p.square().sum() for p in net.parameters())\n",
        }.items()
    },
    "decorator": (
        "@amp.float_function\ndef compute(out):\n    return criterion(out, y)\n"
        + f"{INITIALIZE}{LOOP}    loss = compute(model(x))\n{STEP}",
        "amp.float_function has no equivalent here",
    ),
    "other method with two outputs": (
        """
class Trainer:
    def __init__(self):
        self.net, self.other = amp.initialize([model, model], opt_level="O4", verbosity=0)

    def forward(self):
        self.mask, self.fake = self.net(x)

    def backward(self):
        loss = self.other(self.fake @ torch.randn(4, 16)).sum()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
""",
        "self.net is called outside of autocast",
    ),
    "other method": (
        """
class Trainer:
    def __init__(self):
        self.net, self.other = amp.initialize([model, model], opt_level="O4", verbosity=0)

    def forward(self):
        self.fake = self.net(x)

    def backward(self):
        loss = self.other(self.fake @ torch.randn(4, 16)).sum()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
""",
        "self.net is called outside of autocast",
    ),
    "return": (
        "def prepare(model, optimizer):\n    if not args.fp16:\n        return model, None\n    "
        + INITIALIZE
        + "    return model, optimizer\nmodel, optimizer = prepare(model, optimizer)\n"
        + f"{LOOP}    loss = criterion(model(x), y)\n{STEP}",
        "a return is in front of amp.initialize",
    ),
    "conditional call": (
        "def prepare():\n    global model, optimizer\n    "
        + INITIALIZE
        + f"if args.fp16:\n    prepare()\n{LOOP}    loss = criterion(model(x), y)\n{STEP}",
        "prepare, which initializes amp, is called conditionally",
    ),
    "match": (
        "match args.fp16:\n    case True:\n        "
        + INITIALIZE
        + f"{LOOP}    loss = criterion(model(x), y)\n{STEP}",
        "amp.initialize is in a loop, a match, a try or a class",
    ),
    "global name": (
        "def prepare():\n    global model, optimizer, amp\n    from apex import amp\n    "
        + INITIALIZE
        + f"prepare()\n{LOOP}    loss = criterion(model(x), y)\n{STEP}",
        "amp is imported as a global name",
    ),
}


def test_loss_of_several_lines_is_computed_under_autocast(tmp_path):
    step = STEP.replace("loss, opt", "\n        criterion (out, y) +\n        0, opt")
    code, _ = migrate(tmp_path, f"{START}{INITIALIZE}{LOOP}    out = model(x)\n{step}")
    compile(code, "script.py", "exec")
    assert re.search(r"autocast\(.*\):\n +scaled_loss = \(\s*criterion \(out, y\) \+\n +0\)", code)


def test_matrix_product_is_under_autocast(tmp_path):
    script = "    out = x @ model[0].weight.t()\n    loss = criterion(model[1:](out), y)\n"
    code, _ = migrate(tmp_path, f"{START}{INITIALIZE}{LOOP}{script}{STEP}")
    assert "out = x @ model[0]" in code.partition("torch.autocast(")[2]
    computed = STEP.replace("loss, opt", "(out @ out.T).sum(), opt")
    code, _ = migrate(tmp_path, f"{START}{INITIALIZE}{LOOP}    out = model(x)\n{computed}")
    assert re.search(r"autocast\(.*\):\n +scaled_loss = \(out @", code)


@pytest.mark.parametrize("name", CONVERTED)
def test_forward_pass_is_under_autocast(run, tmp_path, name):
    (tmp_path / "script.py").write_text(START + CONVERTED[name])
    before = losses(run("-m", "apex_native", "script.py"))
    code, _ = migrate(tmp_path, START + CONVERTED[name])
    inside = code.partition("torch.autocast(")[2].partition("loss.backward")[0]
    assert re.search(r"(model|net|self)\(x|compute\(model", inside)
    assert losses(run("script.py")) == pytest.approx(before, rel=1e-4) and len(before) == 3


@pytest.mark.parametrize(
    "lines",
    [
        "total = torch.add(model(x), 1)",
        "args.best = model(x).mean()",
        "best = {}\n    best[0] = model(x)",
    ],
)
def test_validation_elsewhere_is_no_obstacle(tmp_path, lines):
    script = f"{INITIALIZE}def validate():\n    {lines}\n{LOOP}    out = model(x)\n"
    script += f"    loss = torch.mean(criterion(out, y) / args.accumulation)\n{STEP}"
    code, _ = migrate(tmp_path, START + script)
    assert "torch.autocast(" in code


@pytest.mark.parametrize("name", LEFT)
def test_forward_pass_elsewhere_is_left(tmp_path, name):
    script, why = LEFT[name]
    code, report = migrate(tmp_path, START + script, status=1)
    assert why in report and "torch.autocast" not in code
    assert "amp.initialize(" in code and "amp.scale_loss(" in code


def test_names_of_arguments_and_attributes_are_no_scaled_loss(tmp_path):
    script = f"{START}{INITIALIZE}{LOOP}    loss = criterion(model(x), y)\n{STEP}".replace(
        "scaled_loss.backward()", "print(scaled_loss=scaled_loss, x=args.scaled_loss)"
    )
    code, _ = migrate(tmp_path, script)
    assert "scaled_loss = loss\n    print(scaled_loss=scaled_loss, x=args.scaled_loss)" in code


# Blocks in which the scaled loss can't be replaced by the expression that it is made from.
BLOCKS = {
    "the loss changes": "(loss, optimizer) as s:\n        loss = loss / 100\n        s.backward()",
    "the name is deleted": "(loss, optimizer) as s:\n        s.backward()\n        del s",
    "the name is assigned": "(loss, optimizer) as s:\n        s = s * 2\n        s.backward()",
    "the name is in parentheses": "(loss, optimizer) as (s):\n        s.backward()",
    "an attribute": "(loss, optimizer) as args.s:\n        args.s.backward()",
    "a later call": "(loss, optimizer) as s:\n        f = lambda: s.backward()\n        f()",
    "evaluated once": "(losses.pop(), optimizer) as s:\n        s.item()\n        s.backward()",
    "computed": "(criterion(out, y), optimizer) as s:\n        s.backward()",
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("level", ["O0", "O4"])
def test_scaled_loss_is_what_it_was(run, tmp_path, name, level):
    script = (
        f"{START}{INITIALIZE}{LOOP}    out = model(x)\n    loss = criterion(out, y)\n"
        f"    losses = [loss]\n    with amp.scale_loss{BLOCKS[name]}\n"
        "    optimizer.step()\n    print(loss.item())\n"
    ).replace('"O4"', f'"{level}"')
    (tmp_path / "old.py").write_text(script)
    before = losses(run("-m", "apex_native", "old.py"))
    code, report = migrate(tmp_path, script)
    assert "0 left" in report and "apex" not in code
    assert losses(run("script.py")) == pytest.approx(before, rel=1e-3)
    in_autocast = "        s = criterion(out, y)\n" in code
    assert in_autocast == (name == "computed" and level != "O0")
