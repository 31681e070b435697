"""``apex-native migrate``: GradScaler's methods are called in the order it requires, or not at all.

Gradients are read, clipped and stepped unscaled, and a step always follows its backward pass.
"""

import re
from textwrap import indent

import pytest
from migrated_scripts import COMMAND, losses, migrate

pytest.importorskip("libcst")
pytestmark = pytest.mark.xdist_group("package")

START = """\
import torch
from torch import nn
from apex import amp
from elsewhere import noise

x = torch.randn(8, 8)
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
"""
BACKWARD = """\
    loss = model(x).square().mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
"""
CLIP = "    nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
STEP = "    optimizer.step()\n    optimizer.zero_grad()\n"
LOOP = "for n in range(8):\n"
SKIP = "    if n % 4 == 1:\n        JUMP\n"
BACK = f"def backward():\n{BACKWARD}\n"
HELPERS = f"{BACK}def update():\n{STEP}\n"
SHIFT = "    for p in model.parameters():\n        p.grad.add_(0.5)\n"
CLIPPED = "gradients are clipped where GradScaler keeps them scaled"
OTHER = """\
other = nn.Linear(8, 8)
second = torch.optim.SGD(other.parameters(), lr=0.1)
other, second = amp.initialize(other, second, opt_level="O1")
"""
OTHER_BACKWARD = BACKWARD.replace("model", "other").replace("optimizer", "second")
OTHER_STEP = STEP.replace("optimizer", "second")
BOTH = """\
def backward(model, opt):
    loss = model(x).square().mean()
    with amp.scale_loss(loss, opt) as scaled_loss:
        scaled_loss.backward()

def update(opt):
    opt.step()
    opt.zero_grad()

"""
IN_TURN = """\
    backward(model, optimizer)
    backward(other, second)
    update(optimizer)
    update(second)
"""
NOT_ZEROED = "gradients may not be zeroed between one optimizer.step() and the next"
APART = "optimizer.step() is in another function than its backward pass"
ALONE = "the block of amp.scale_loss is not scaled_loss.backward() alone"
NO_CONDITION = "optimizer.step() lacks the condition of its backward pass"
SEVERAL = "opt may be several optimizers"
CAUGHT = "an exception at optimizer.step() may be caught"
LEFT = {
    "functions": (
        f"{HELPERS}def clip():\n{CLIP}\n{LOOP}    backward()\n    clip()\n    update()\n",
        APART,
    ),
    "function of another file": (
        f"{BACK}{LOOP}    backward()\n    noise(model.parameters())\n    if n % 2:\n"
        + indent(STEP, "    "),
        "noise is given the parameters before the step",
    ),
    "method of the optimizer": (
        f"{LOOP}{BACKWARD}    optimizer.first_step()\n{BACKWARD}{STEP}",
        "optimizer.first_step is a method of an object that has the parameters",
    ),
    "two losses": (f"{LOOP}{BACKWARD}{CLIP}{BACKWARD}{STEP}", CLIPPED),
    "continue": (
        f"{LOOP}{BACKWARD}{CLIP}{SKIP.replace('JUMP', 'continue')}{STEP}",
        CLIPPED,
    ),
    "break": (f"{LOOP}{BACKWARD}{CLIP}{SKIP.replace('JUMP', 'break')}{STEP}", CLIPPED),
    "return": (
        f"def train(n):\n{BACKWARD}{CLIP}{SKIP.replace('JUMP', 'return')}{STEP}",
        CLIPPED,
    ),
    "step first": (
        f"{LOOP}    if n:\n        optimizer.step()\n{BACKWARD}",
        "optimizer.step() is in front of its backward pass",
    ),
    "conditional loss": (
        LOOP
        + "    loss = model(x).square().mean()\n    if loss > 0:\n"
        + "        with amp.scale_loss(loss, optimizer) as scaled_loss:\n"
        + f"            scaled_loss.backward()\n{STEP}",
        NO_CONDITION,
    ),
    "condition with a comment": (
        LOOP
        + "    loss = model(x).square().mean()\n    if n % 2:\n"
        + "        with amp.scale_loss(loss, optimizer) as scaled_loss:\n"
        + "            scaled_loss.backward()\n"
        + f"    else:\n        pass  # no backward pass\n{STEP}",
        NO_CONDITION,
    ),
    "conditional call": (
        f"{BACK}{LOOP}    if n:\n        backward()\n{STEP}",
        NO_CONDITION,
    ),
    "repeated step": (
        f"{LOOP}{BACKWARD}    for _ in range(2):\n        optimizer.step()\n",
        "optimizer.step() is in a loop without its backward pass",
    ),
    "loops over optimizers": (
        "optimizers = [optimizer]\nfor i in range(1):\n"
        + BACKWARD.replace("optimizer)", "optimizers[i])")
        + "for i in range(1):\n    optimizers[i].step()\n",
        "optimizers[i].step() is in a loop without its backward pass",
    ),
    "optimizer of a loop": (
        f"optimizers = [optimizer]\nfor optimizer in optimizers:\n{BACKWARD}"
        "for optimizer in optimizers:\n    optimizer.step()\n",
        "optimizer.step() is in a loop without its backward pass",
    ),
    "helpers for two optimizers": (
        f"{OTHER}{BOTH}{LOOP}{IN_TURN}",
        "opt.step() is in another function than its backward pass",
    ),
    "accumulation of two optimizers": (
        f"{OTHER}def train(n, model, opt):\n{BACKWARD.replace('optimizer', 'opt')}"
        f"    if n % 2:\n        opt.step()\n        opt.zero_grad()\n\n{LOOP}"
        "    train(n, model, optimizer)\n"
        "    train(n, other, second)\n",
        SEVERAL,
    ),
    "return between steps of two optimizers": (
        f"{OTHER}def train(n, model, opt):\n{BACKWARD.replace('optimizer', 'opt')}"
        f"    if n % 2:\n        return\n    opt.step()\n    opt.zero_grad()\n\n{LOOP}"
        "    train(n, model, optimizer)\n    train(n, other, second)\n",
        SEVERAL,
    ),
    "functions that call each other": (
        f"def prepare():\n    amp.initialize(model, other)\n    again()\n\n"
        f"def again():\n    prepare()\n\n{LOOP}{BACKWARD}    if n % 2:\n{indent(STEP, '    ')}",
        "amp.initialize is called in more than one place",
    ),
    "step by another name": (
        f"def train(opt):\n{BACKWARD}    if x.any():\n{indent(STEP, '    ')}\n".replace(
            "optimizer", "opt"
        )
        + f"{LOOP}    train(optimizer)\noptimizer.step()\n",
        "optimizer.step may be the step of an optimizer whose gradients are scaled",
    ),
    "step of an attribute": (
        f"run.optimizer = optimizer\n{LOOP}{BACKWARD}{STEP}run.optimizer.step()\n",
        "run.optimizer.step may be the step of an optimizer whose gradients are scaled",
    ),
    "step as a value": (
        f"update = optimizer.step\n{LOOP}{BACKWARD}{STEP}    update()\n",
        "optimizer.step may be the step of an optimizer whose gradients are scaled",
    ),
    "gradients of several steps": (
        f"{LOOP}{BACKWARD}    optimizer.step()\n    if n % 4:\n        optimizer.zero_grad()\n",
        NOT_ZEROED,
    ),
    "gradients of some of the steps that a condition allows": (
        f"{LOOP}{BACKWARD}    if n % 2:\n        optimizer.step()\n        if n % 4 == 1:\n"
        + "            optimizer.zero_grad()\n",
        NOT_ZEROED,
    ),
    "gradients in front of a backward pass": (
        f"{LOOP}    for p in model.parameters():\n        if p.grad is not None:\n"
        f"            p.grad.add_(n)\n{BACKWARD}    if n % 2:\n" + indent(STEP, "    "),
        "p.grad is read",
    ),
    "registered function": (
        f"@register\ndef after():\n    model(x).sum().backward()\n\n{LOOP}{BACKWARD}{STEP}",
        "model(x).sum().backward() is not scaled",
    ),
    "function while gradients accumulate": (
        f"{LOOP}{BACKWARD}    if n % 2:\n{indent(STEP, '    ')}    noise(optimizer)\n",
        "noise is given the parameters before the step",
    ),
    "function in front of a loss": (
        f"{LOOP}    noise(optimizer)\n{BACKWARD}    if n % 2:\n{indent(STEP, '    ')}",
        "noise is given the parameters before the step",
    ),
    "backward pass of another function": (
        f"{BACK}def penalty():\n    model.weight.square().sum().backward()\n\n"
        + f"{LOOP}    backward()\n    penalty()\n{STEP}",
        "model.weight.square().sum().backward() is not scaled",
    ),
    "backward pass of a function that is passed on": (
        "def regularize(model):\n    model.weight.square().sum().backward()\n\n"
        + f"{LOOP}{BACKWARD}    list(map(regularize, [model]))\n{STEP}",
        "model.weight.square().sum().backward() is not scaled",
    ),
    "gradients of an epoch": (
        "for _ in range(2):\n    optimizer.zero_grad()\n"
        + indent(f"{LOOP}{BACKWARD}    optimizer.step()\n", "    "),
        NOT_ZEROED,
    ),
    "caught exception of a function that is called elsewhere": (
        "def train():\n    try:\n"
        + indent(f"{BACKWARD}{CLIP}{SKIP.replace('JUMP', 'raise ValueError')}{STEP}", "    ")
        + "    except ValueError:\n        print(1)\n",
        CAUGHT,
    ),
    "exception around the step of one of two optimizers": (
        f"{OTHER}def train(model, opt):\n{BACKWARD.replace('optimizer', 'opt')}    try:\n"
        f"        opt.step()\n    except RuntimeError:\n        pass\n    opt.zero_grad()\n\n"
        f"{LOOP}    train(model, optimizer)\n    train(other, second)\n",
        CAUGHT.replace("optimizer", "opt"),
    ),
    "optimizers of several objects": (
        "other = copy(run)\namp.initialize(\n"
        "    [run.net, other.net], [run.optimizer, other.optimizer]\n)\n"
        + BOTH.replace("opt", "run.optimizer")
        .replace("(model, run.optimizer", "(run, model")
        .replace("update(run.optimizer", "update(run")
        + f"{LOOP}    backward(run, model)\n    backward(other, model)\n    update(run)\n",
        "run.optimizer.step() is in another function than its backward pass",
    ),
    "exception that a loop catches": (
        f"def train():\n{BACKWARD}{CLIP}{STEP}\n{LOOP}    try:\n        train()\n"
        "    except RuntimeError:\n        print(n)\n",
        CAUGHT,
    ),
    "exception that a with statement suppresses": (
        f"def train():\n{BACKWARD}{CLIP}{STEP}\n{LOOP}    with suppress(RuntimeError):\n"
        "        train()\n",
        CAUGHT,
    ),
    "exception in front of the step": (
        f"{LOOP}    try:\n"
        + "".join(f"    {line}\n" for line in BACKWARD.splitlines())
        + f"    except RuntimeError:\n        print(n)\n{STEP}",
        "an exception at optimizer.backward() may be caught",
    ),
    **{
        f"{jump} in front of the losses of a step": (
            f"{LOOP}    for _ in range(2):\n        if n == 3:\n            {jump}\n"
            + indent(BACKWARD, "    ")
            + STEP,
            NO_CONDITION,
        )
        for jump in ("continue", "break")
    },
    "return in front of the loss of a helper": (
        BACK.replace("():", "():\n    if x.any():\n        return", 1)
        + f"{LOOP}    backward()\n{STEP}",
        NO_CONDITION,
    ),
    "case of a match": (
        f"{LOOP}    match n % 2:\n        case 0:\n{indent(BACKWARD, '        ')}{STEP}",
        NO_CONDITION,
    ),
    "step in finally": (
        f"{LOOP}    try:\n        if n == 3:\n            continue\n{indent(BACKWARD, '    ')}"
        + f"    finally:\n{indent(STEP, '    ')}",
        NO_CONDITION,
    ),
    "gradients that a helper drops": (
        f"def backward():\n{BACKWARD}    if loss > 9:\n        optimizer.zero_grad()\n\n"
        + f"{LOOP}    backward()\n{STEP}",
        "gradients may be zeroed before optimizer.step()",
    ),
    **{
        f"decorator {name} that may catch an exception": (
            f"@{name}(2)\ndef train(n):\n{BACKWARD}{CLIP}{STEP}\n{LOOP}    train(n)\n",
            CAUGHT,
        )
        for name in ("retry", "backoff.on_exception")
    },
    "decorator of the file that catches an exception": (
        "def safe(function):\n    def call(*args):\n        try:\n            function(*args)\n"
        + "        except RuntimeError:\n            pass\n    return call\n\n"
        + f"@safe\ndef train(n):\n{BACKWARD}{CLIP}{STEP}\n{LOOP}    train(n)\n",
        CAUGHT,
    ),
    "jump in front of the losses of a step, in a condition with both": (
        "if x.sum() < 99:\n"
        + indent(
            f"{LOOP}    for _ in range(2):\n        if n == 3:\n            continue\n", "    "
        )
        + indent(indent(BACKWARD, "    ") + STEP, "    "),
        NO_CONDITION,
    ),
    "context manager that catches an exception": (
        "class Safe:\n    def __exit__(self, *error):\n        return True\n\n"
        + f"{LOOP}    with Safe():\n{indent(BACKWARD + CLIP + STEP, '    ')}",
        CAUGHT,
    ),
    "loss of a helper after gradients are clipped": (
        f"{BACK}{LOOP}{BACKWARD}{CLIP}    backward()\n{STEP}",
        CLIPPED,
    ),
    "clipping in front of the losses of a step": (
        f"{LOOP}    for _ in range(2):\n{indent(CLIP + BACKWARD, '    ')}{STEP}",
        CLIPPED,
    ),
    "jump between a step and its zero_grad": (
        f"{LOOP}{BACKWARD}    optimizer.step()\n{SKIP.replace('JUMP', 'continue')}"
        + "    optimizer.zero_grad()\n",
        NOT_ZEROED,
    ),
    "end of an epoch between a step and its zero_grad": (
        f"for epoch in range(2):\n{indent(LOOP + BACKWARD, '    ')}        optimizer.step()\n"
        + indent(f"{SKIP.replace('JUMP', 'break')}    optimizer.zero_grad()\n", "    "),
        NOT_ZEROED,
    ),
    "end between a step and its zero_grad": (
        f"{LOOP}{BACKWARD}    optimizer.step()\n{SKIP.replace('JUMP', 'break')}"
        + "    optimizer.zero_grad()\n",
        NOT_ZEROED,
    ),
    "gradients of some of the steps, under another condition": (
        f"{LOOP}    if n > 2:\n        optimizer.zero_grad()\n{BACKWARD}    if n % 2:\n"
        + "        optimizer.step()\n",
        NOT_ZEROED,
    ),
    "step in the block of its loss": (
        f"{LOOP}{BACKWARD}        optimizer.step()\n    optimizer.zero_grad()\n",
        ALONE,
    ),
    "step of a function in the block of the loss": (
        f"def update():\n{STEP}\n{LOOP}{BACKWARD}        update()\n",
        APART,
    ),
    "zero_grad of the model of another optimizer": (
        f"{OTHER}def reset():\n    other.zero_grad()\n\n{LOOP}{BACKWARD}    optimizer.step()\n"
        + "    if n % 2:\n        optimizer.zero_grad()\n"
        + f"    reset()\n{OTHER_BACKWARD}{OTHER_STEP}",
        NOT_ZEROED,
    ),
    "function that zeroes gradients under a condition": (
        "def reset(n):\n    if n % 2:\n        optimizer.zero_grad()\n\n"
        + f"{LOOP}{BACKWARD}    optimizer.step()\n    reset(n)\n",
        NOT_ZEROED,
    ),
    "function that is called by another one under a condition, and zeroes gradients": (
        "def reset():\n    optimizer.zero_grad()\n\ndef finish(n):\n    if n % 2:\n"
        + f"        reset()\n\n{LOOP}{BACKWARD}    optimizer.step()\n    finish(n)\n",
        NOT_ZEROED,
    ),
    "function that zeroes gradients and is not called": (
        f"def reset():\n    optimizer.zero_grad()\n\n{LOOP}{BACKWARD}    optimizer.step()\n",
        NOT_ZEROED,
    ),
    "gradients of the input that are zeroed": (
        f"{LOOP}{BACKWARD}    optimizer.step()\n    x.grad.zero_()\n",
        NOT_ZEROED,
    ),
    "helper that passes the model on": (
        f"def change():\n    noise(model)\n\n{LOOP}{BACKWARD}    change()\n    if n % 2:\n"
        + indent(STEP, "    "),
        "noise is given the parameters before the step",
    ),
    "context manager of another file": (
        "from elsewhere import guard\n"
        + f"{LOOP}    with guard():\n{indent(BACKWARD + STEP, '    ')}",
        CAUGHT,
    ),
    "function that zeroes gradients": (
        "def reset():\n    for p in model.parameters():\n"
        + f"        p.grad = None\n\n{LOOP}    reset()\n{BACKWARD}    optimizer.step()\n",
        NOT_ZEROED,
    ),
    "zero_grad in both branches": (
        f"{LOOP}{BACKWARD}    optimizer.step()\n    if n % 2:\n"
        + "        optimizer.zero_grad(True)\n    else:\n        optimizer.zero_grad()\n",
        NOT_ZEROED,
    ),
    "condition that implies the other": (
        f"is_training = True\n{LOOP}    if is_training:\n"
        + "".join(f"    {line}\n" for line in BACKWARD.splitlines())
        + "    if is_training and n % 4 == 0:\n        optimizer.step()\n"
        + "    if n % 4 == 0:\n        optimizer.zero_grad()\n",
        NOT_ZEROED,
    ),
    "clipping beside the step": (
        f"{BACK}def update():\n{CLIP}{STEP}{LOOP}    backward()\n",
        APART,
    ),
    "helpers for one optimizer": (
        BOTH + f"{LOOP}    backward(model, optimizer)\n    update(optimizer)\n",
        "opt.step() is in another function than its backward pass",
    ),
    "exception after which the step is left out": (
        f"{LOOP}    try:\n"
        + "".join(f"    {line}\n" for line in BACKWARD.splitlines())
        + f"    except RuntimeError:\n        continue\n{STEP}",
        "an exception at optimizer.backward() may be caught",
    ),
    "gradients that are dropped with a step, or unscaled": (
        LOOP
        + f"{BACKWARD}    if loss > 9:\n        optimizer.zero_grad()\n        continue\n"
        + f"{CLIP}    if n > 9:\n        optimizer.zero_grad()\n{STEP}",
        "gradients may be zeroed before optimizer.step()",
    ),
    "zero_grad of each epoch in front of the function of the steps": (
        "def train():\n"
        + indent(f"{LOOP}{BACKWARD}    optimizer.step()\n", "    ")
        + "for _ in range(2):\n    optimizer.zero_grad()\n    train()\n",
        NOT_ZEROED,
    ),
    "zero_grad in the function of the steps, once": (
        "def train():\n    optimizer.zero_grad()\n"
        + indent(f"{LOOP}{BACKWARD}    optimizer.step()\n", "    ")
        + "for _ in range(2):\n    train()\n",
        NOT_ZEROED,
    ),
    "zero_grad of a model that has not all parameters": (
        "groups = [{'params': model.parameters()}, {'params': other.parameters()}]\n"
        + f"optimizer = torch.optim.SGD(groups, lr=0.1)\n{LOOP}{BACKWARD}    optimizer.step()\n"
        + "    model.zero_grad()\n",
        NOT_ZEROED,
    ),
    "zero_grad of a model in front of another group of parameters": (
        f"optimizer.add_param_group({{'params': [x]}})\n{LOOP}{BACKWARD}    optimizer.step()\n"
        + "    model.zero_grad()\n",
        NOT_ZEROED,
    ),
    "loss of another optimizer behind zero_grad": (
        f"{OTHER}{LOOP}    optimizer.zero_grad()\n    second.zero_grad()\n{BACKWARD}"
        + f"    optimizer.step()\n{OTHER_BACKWARD}    second.step()\n",
        "the loss of optimizer may come between second.zero_grad() and its step()",
    ),
    "zero_grad of two optimizers behind their steps": (
        f"{OTHER}{LOOP}{BACKWARD}{STEP}{OTHER_BACKWARD}{OTHER_STEP}",
        "the loss of second may come between optimizer.zero_grad() and its step()",
    ),
    "condition in the block of the loss": (
        LOOP + BACKWARD.replace("scaled_loss.b", "if n:\n            scaled_loss.b") + STEP,
        ALONE,
    ),
    "function in the block of the loss": (
        f"def finish(loss):\n    loss.backward()\n    optimizer.zero_grad()\n\n{LOOP}"
        + BACKWARD.replace("scaled_loss.backward()", "finish(scaled_loss)")
        + STEP,
        ALONE,
    ),
    "clipping in the block of the loss": (f"{LOOP}{BACKWARD}    {CLIP}{STEP}", ALONE),
    "generator": (
        "def train():\n" + indent(f"{LOOP}{BACKWARD}    yield loss\n{STEP}", "    "),
        "is in a generator",
    ),
    "backward pass of a part of an expression": (
        f"{BACK}{LOOP}    n and backward()\n{STEP}",
        APART,
    ),
    "helper that is passed on": (f"{BACK}{LOOP}    backward()\n{STEP}register(backward)\n", APART),
    **{
        f"{manager} that may catch an exception": (
            f"{LOOP}    with {manager}:\n{indent(BACKWARD + STEP, '    ')}",
            CAUGHT,
        )
        for manager in ("logger.catch()", "ignore_errors(log=True)", "suppress(RuntimeError)")
    },
    "exception of the step": (
        f"{LOOP}{BACKWARD}    try:\n        optimizer.step()\n    except RuntimeError:\n"
        + "        pass\n    optimizer.zero_grad()\n",
        CAUGHT,
    ),
}
CONVERTED = {
    "context managers that catch nothing": "for _ in range(2):\n    with tqdm(total=8) as bar:\n"
    + indent(f"{LOOP}    with no_sync():\n{indent(BACKWARD + CLIP + STEP, '    ')}", "        "),
    "break of another loop": f"{LOOP}{BACKWARD}{CLIP}    for _ in x:\n        break\n{STEP}",
    "return after the step": f"def train(n):\n{BACKWARD}{CLIP}{STEP}    return\n",
    "one loop over optimizers": "optimizers = [optimizer]\nfor i in range(1):\n"
    + BACKWARD.replace("optimizer)", "optimizers[i])")
    + "    optimizers[i].step()\n    optimizers[i].zero_grad()\n",
    "names and learning rate": "for n, p in model.named_parameters():\n    print(n)\n"
    + f"{LOOP}{BACKWARD}    noise(n, lr=optimizer.param_groups[0]['lr'])\n{STEP}",
    "shared condition": f"{LOOP}    if n:\n"
    + "".join(f"    {line}\n" for line in f"{BACKWARD}{STEP}".splitlines()),
    "exception that ends the script": f"def train():\n{LOOP}{BACKWARD}{CLIP}{STEP}\n".replace(
        "\n    ", "\n        "
    ).replace("for", "    for")
    + "for n in range(2):\n    try:\n        train()\n    except RuntimeError:\n        raise\n"
    + "try:\n    train()\nexcept KeyboardInterrupt:\n    print(n)\n",
    "other methods": f"logging.getLogger('apex').info('a b'.split())\n{LOOP}{BACKWARD}{STEP}"
    + "(env\n .step(1)\n .step(2))\n",
    "exception of one's own": f"def train(n):\n{BACKWARD}{CLIP}"
    + f"{SKIP.replace('JUMP', 'raise ValueError')}{STEP}\n{LOOP}    train(n)\n",
    "call of a method with the name of a function": "def train():\n    model.train()\n"
    + f"{BACKWARD}{CLIP}{STEP}\n{LOOP}    train()\n    try:\n        model.train()\n"
    + "    except RuntimeError:\n        pass\n",
    "steps of a profiler and a timer": "with profile() as prof:\n"
    + indent(f"{LOOP}{BACKWARD}{STEP}    prof.step()\n    TIMER.step()\n", "    "),
    "optimizer of another name": "def train(opt):\n"
    + indent(f"{LOOP}{BACKWARD}", "    ").replace("optimizer", "opt")
    + "        if n % 2:\n            opt.step()\n            opt.zero_grad()\n\n"
    + "optimizer = get_optimizer(model)\ntrain(optimizer)\n",
    "unused parameters": f"{LOOP}{BACKWARD}    for p in model.parameters():\n"
    + f"        if p.grad is None:\n            print(n)\n{STEP}",
    "scheduler": f"{BACK}def epoch():\n"
    + indent(f"{LOOP}    backward()\n{STEP}", "    ")
    + "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n"
    "for _ in range(2):\n    epoch()\n    scheduler.step()\n",
    "step in the caller": f"{BACK}{LOOP}    backward()\n{SHIFT}{STEP}",
    "training mode": "def train(loader):\n    model.train()\n    for n in loader:\n"
    + "".join(f"    {line}\n" for line in f"{BACKWARD}{STEP}".splitlines())
    + "        if n % 9 == 0:\n            model.eval()\n            model.train()\n",
    "schedules, which have the optimizer": "schedule = StepLR(optimizer, 1)\n"
    + "plan = elsewhere.WarmupCosine(optimizer)\n"
    + f"policy = elsewhere.Policy(optimizer)\n{LOOP}{BACKWARD}    schedule.step()\n"
    + "    plan.adjust()\n    policy.step(n)\n    policy.load_state_dict(policy.state_dict())\n"
    + f"    optimizer.update_learning_rate()\n    optimizer.synchronize()\n{STEP}",
    "objects that have the optimizer, and ordinary methods": "log = Logger(optimizer)\n"
    + f"ema = Average(model.parameters())\n{LOOP}{BACKWARD}    log.write(n)\n    ema.store()\n"
    + "    log.on_backward_end()\n    optimizer.consolidate()\n    log.batch_step()\n"
    + f"    optimizer.get_lr()\n    optimizer.print_groups()\n    ema.restore()\n{STEP}",
    "number of parameters": "num = sum(p.numel() for p in model.parameters())\n"
    + f"meter = Meter(num)\n{LOOP}{BACKWARD}    meter.add(loss.item())\n{STEP}",
    "sum of numbers of parameters": "num = 0\nfor p in model.parameters():\n"
    + f"    num = num + p.numel()\nnum = torch.tensor(num / 1e6)\n{LOOP}{BACKWARD}    noise(num)\n"
    + STEP,
    "penalty of a model's gradients": f"{LOOP}{BACKWARD}    gradient_penalty(model)\n{STEP}",
    "step of another optimizer": f"{OTHER}ema = Average(model.parameters())\n{LOOP}"
    + f"    optimizer.zero_grad()\n{BACKWARD}    optimizer.step()\n    ema.apply_shadow()\n"
    + f"    second.zero_grad()\n{OTHER_BACKWARD}    second.step()\n",
    "penalty that has the parameters": "penalty = elsewhere.penalty(model.parameters())\n"
    + f"{LOOP}{BACKWARD}    noise(1)\n    print(penalty.item())\n{STEP}",
    "class of this file that has the parameters": "class Meter:\n    def __init__(self, params):\n"
    + "        self.params = params\n\n    def __call__(self):\n        print(self.params)\n\n"
    + f"meter = Meter(model.parameters())\n{LOOP}{BACKWARD}    meter()\n{STEP}",
    "a loss of some steps": f"{LOOP}{BACKWARD}    if n % 4 == 0:\n"
    + "".join(f"    {line}\n" for line in BACKWARD.splitlines())
    + STEP,
    "meter": f"def update(n):\n{BACKWARD}{STEP}\ndef validate():\n    meter.update(model(x))\n\n"
    f"{LOOP}    update(n)\n",
    "size of a layer": f"classes = model.weight.size(0)\n{LOOP}{BACKWARD}{STEP}",
    "norm in parentheses": LOOP
    + BACKWARD
    + f"    size = 1 if(nn.utils.clip_grad_norm_(model.parameters(), 0.1))else 0\n{STEP}",
    "penalty": LOOP
    + BACKWARD.replace(
        ".mean()\n", ".mean()\n    for p in model.parameters():\n        loss += p.abs().sum()\n"
    )
    + f"    noise(loss.item())\n{STEP}",
    "builder of another file": f"noise(model.parameters())\n{BACK}{LOOP}    backward()\n{STEP}",
    "decorator that catches nothing": "@hydra.main(config_path='conf')\ndef main(config):\n"
    + indent(f"{LOOP}{BACKWARD}{CLIP}{STEP}\n", "    ")
    + "for _ in range(2):\n    main()\n",
    "decorator of the file that catches nothing": "def timer(call):\n    return call\n\n"
    + f"@timer\n@torch.no_grad()\ndef train(n):\n{BACKWARD}{CLIP}{STEP}\n{LOOP}    train(n)\n",
    "jump to the next step": f"{LOOP}    if x.sum() > 99:\n        continue\n{BACKWARD}{STEP}",
}


@pytest.mark.parametrize("name", LEFT)
def test_order_that_is_not_certain_is_left(tmp_path, name):
    script, why = LEFT[name]
    code, report = migrate(tmp_path, START + script, status=1)
    assert why in report
    assert "amp.scale_loss(" in code and "GradScaler" not in re.sub("#.*", "", code)


@pytest.mark.parametrize("name", LEFT)
def test_blanks_and_comments_change_nothing(tmp_path, name):
    comment = "  # loss.backward() optimizer.step() model.parameters()\n"
    script = re.sub(r"(?<=\w)\(\)", " ( )", LEFT[name][0]).replace("\n", comment)
    assert LEFT[name][1] in migrate(tmp_path, START + script, status=1)[1].replace(" ( )", "()")


@pytest.mark.parametrize("name", CONVERTED)
def test_order_that_is_certain_is_converted(tmp_path, name):
    assert "0 left" in migrate(tmp_path, START + CONVERTED[name])[1]


TRAINER = """\
class Trainer:
    def __init__(self):
        self.G, self.D = nn.Linear(8, 8), nn.Linear(8, 8)
        self.optimizer_G = torch.optim.SGD(self.G.parameters(), lr=0.1)
        self.optimizer_D = torch.optim.SGD(self.D.parameters(), lr=0.1)
        [self.G, self.D], [self.optimizer_G, self.optimizer_D] = amp.initialize(
            [self.G, self.D], [self.optimizer_G, self.optimizer_D], opt_level="O1"
        )

    def backward_G(self):
        loss = self.D(self.G(x)).mean()
        with amp.scale_loss(loss, self.optimizer_G) as scaled_loss:
            scaled_loss.backward()

    def optimize_parameters(self):
        self.optimizer_G.zero_grad()
        self.backward_G()
        self.optimizer_G.step()
        self.optimizer_D.zero_grad()
        loss = self.D(self.G(x).detach()).mean()
        with amp.scale_loss(loss, self.optimizer_D) as scaled_loss:
            scaled_loss.backward()
        self.optimizer_D.step()

"""


def test_objects_of_a_class_have_scalers_of_their_own(tmp_path):
    start = START.partition("model = ")[0]
    code, _ = migrate(tmp_path, f"{start}{TRAINER}trainers = [Trainer(), Trainer()]\n")
    assert '\n        self.scaler_optimizer_G = torch.amp.GradScaler("cuda")\n' in code
    assert "        self.scaler_optimizer_G.step(self.optimizer_G)\n" in code
    assert "global" not in code


def test_objects_of_a_factory_would_share_a_scaler(tmp_path):
    """Their steps are in a lambda, which runs after another object is made."""
    script = f"""{START.partition("model = ")[0]}
def make():
    optimizer = SGD()
    amp.initialize(model, optimizer)
    return lambda: step(optimizer)

def step(optimizer):
{BACKWARD}    if x.any():
        optimizer.step()
        optimizer.zero_grad()

one, two = make(), make()
"""
    report = migrate(tmp_path, script, status=1)[1]
    assert "optimizer may be several optimizers" in report


def test_scalers_of_a_name_and_an_attribute_are_two(tmp_path):
    script = TRAINER.replace("self.optimizer_D", "optimizer").replace("optimizer_G", "optimizer")
    script = f"{START.partition('model = ')[0]}{script}"
    names = re.findall(r"(\S+) = torch.amp.GradScaler", migrate(tmp_path, script)[0])
    assert len(set(names)) == 2


@pytest.mark.parametrize("second", ["if", "elif"])
def test_gradients_are_unscaled_in_front_of_conditions_of_clipping(tmp_path, second):
    clips = f"    if n % 2:\n    {CLIP}    {second} n % 3:\n    {CLIP}"
    script = f"{LOOP}    with torch.enable_grad():\n{indent(BACKWARD + clips, '    ')}{STEP}"
    code, _ = migrate(tmp_path, START + script)
    assert "backward()\n        scaler.unscale_(optimizer)\n        if n % 2:\n" in code
    assert code.count("unscale_") == 1


def test_gradients_are_unscaled_in_each_branch_with_a_loss(tmp_path):
    one, other = indent(BACKWARD, "    "), indent(BACKWARD + CLIP, "    ")
    script = f"{START}{LOOP}    if n % 2:\n{one}    else:\n{other}{CLIP}{STEP}"
    code, _ = migrate(tmp_path, script)
    assert code.count("backward()\n        scaler.unscale_(optimizer)\n") == 2


def test_gradients_of_a_helper_are_unscaled_after_its_call(tmp_path):
    helper = f"def backward():\n{OTHER_BACKWARD}\n"
    clip = CLIP.replace("model", "other")
    first = f"    optimizer.zero_grad()\n{BACKWARD}{CLIP}    optimizer.step()\n"
    script = f"{OTHER}{helper}{LOOP}{first}"
    script += f"    second.zero_grad()\n    backward()\n{clip}    second.step()\n"
    code, _ = migrate(tmp_path, START + script)
    assert code.rindex("scaler_second.unscale_(second)") > code.rindex("backward()")
    assert code.count("scaler_second.unscale_") == 1


FORMS = ("();", "( )", " ()", "(\n    )", "(  # update\n    )")


@pytest.mark.parametrize("form", FORMS)
def test_step_is_converted_in_any_layout(tmp_path, form):
    step = STEP.replace("step()", f"step{form}")
    code, report = migrate(tmp_path, f"{START}{LOOP}{BACKWARD}{step}")
    assert "0 left" in report
    assert "scaler.step(optimizer)" in code and "optimizer.step" not in code


TWO_OPTIMIZERS = """\
import torch
from torch import nn
from apex import amp

torch.manual_seed(0)
x = torch.randn(8, 8)
one, two = nn.Linear(8, 8), nn.Linear(8, 8)
first = torch.optim.SGD(one.parameters(), lr=0.5)
second = torch.optim.SGD(two.parameters(), lr=0.5)
[one, two], [first, second] = amp.initialize([one, two], [first, second], opt_level="O1")
for step in range(4):
    first.zero_grad()
    loss_one, loss_two = one(x).square().mean(), two(x).square().mean()
    with amp.scale_loss(loss_one, first) as scaled_loss:
        scaled_loss.backward()
    nn.utils.clip_grad_norm_(amp.master_params(first), 0.1)
    first.step()
    second.zero_grad()
    with amp.scale_loss(loss_two, second) as scaled_loss:
        scaled_loss.backward()
    nn.utils.clip_grad_norm_(amp.master_params(second), 0.1)
    second.step()
    print(loss_one.item())
    print(loss_two.item())
"""


def test_gradients_of_two_optimizers_are_clipped_unscaled(run, tmp_path):
    (tmp_path / "script.py").write_text(TWO_OPTIMIZERS)
    before = losses(run(*COMMAND, "run", "script.py"))
    code, _ = migrate(tmp_path, TWO_OPTIMIZERS)
    for name in ("first", "second"):
        assert f".backward()\n    scaler_{name}.unscale_({name})\n" in code
    # On a CPU, GradScaler for CUDA is disabled. This one scales by powers of 2, which is exact.
    (tmp_path / "script.py").write_text(code.replace('GradScaler("cuda"', 'GradScaler("cpu"'))
    assert losses(run("script.py")) == pytest.approx(before, rel=1e-2)  # the first run is in half
