"""``apex-native migrate``: the migrated script alone computes what the original does."""

import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from fresh import ROOT
from migrated_scripts import COMMAND, losses, migrate

pytest.importorskip("libcst", reason="needs libcst, which the extra `migrate` installs")

pytestmark = pytest.mark.xdist_group("package")

STILL_USED = "what this imports from Apex may be used in a way that migrate does not rewrite"
START = """\
import torch
from torch import nn
from apex import amp
from apex.normalization import FusedLayerNorm, FusedRMSNorm
from apex.optimizers import FusedAdam, FusedSGD

torch.manual_seed(0)
x, y = torch.randn(64, 8), torch.randint(3, (64,))
model = nn.Sequential(nn.Linear(8, 16), FusedLayerNorm(16), nn.ReLU(), nn.Linear(16, 3))
criterion = nn.CrossEntropyLoss()
"""
TRAIN = """
model, optimizer = amp.initialize(model, optimizer, opt_level="LEVEL")
for step in range(5):
    optimizer.zero_grad()
    # the forward pass
    output = model(x)
    loss = criterion(output, y)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)  # as usual
    optimizer.step()
    print(loss.item())
"""
CLIP = "    nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)"
ACCUMULATE = """
model, optimizer = amp.initialize(model, optimizer, opt_level="LEVEL")
for step in range(8):
    if True:
        output = model(x[step::8])
    loss = criterion(output, y[step::8])
    with amp.scale_loss(loss / 2, optimizer) as scaled_loss:
        scaled_loss.backward()
    if step % 2:
        optimizer.step()
        optimizer.zero_grad()
    print(loss.item())
torch.save({"amp": amp.state_dict()}, "last.pt")
amp.load_state_dict(torch.load("last.pt")["amp"])
"""
OPTIMIZERS = (
    "FusedAdam(model.parameters(), lr=0.01)",
    "FusedAdam(model.parameters(), 0.01, adam_w_mode=False, weight_decay=0.1)",
    "FusedAdam(model.parameters(), lr=0.01, weight_decay=0.1, set_grad_none=True)",
    "FusedSGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True)",
)


def compare(run, tmp_path, script, tolerance):
    """Run the original and the migrated script, and return the latter's source code."""
    path = tmp_path / "script.py"
    path.write_text(script)
    expected = losses(run(*COMMAND, "run", "script.py"))
    done = run(*COMMAND, "migrate", "script.py", "--write")
    assert done.returncode == 0, done.stderr
    migrated = path.read_text()
    assert "apex" not in migrated
    assert losses(run("script.py")) == pytest.approx(expected, rel=tolerance, abs=0)
    return migrated


def test_models_and_optimizers_can_be_keywords(run, tmp_path):
    train = TRAIN.replace("model, optimizer, opt_", "optimizers=optimizer, models=model, opt_")
    train = train.replace("    print(", "    next(amp.master_params(optimizer))\n    print(")
    assert "models=model" in train and "next(" in train
    optimizer = f"optimizer = {OPTIMIZERS[0]}"
    compare(run, tmp_path, START + optimizer + train.replace("LEVEL", "O0"), 0)


@pytest.mark.parametrize("train", [TRAIN, ACCUMULATE], ids=["clipping", "accumulation"])
@pytest.mark.parametrize(
    "optimizer",
    [*OPTIMIZERS[:1], *(pytest.param(one, marks=pytest.mark.slow) for one in OPTIMIZERS[1:])],
)
def test_losses_are_equal_at_o0(run, tmp_path, optimizer, train):
    compare(run, tmp_path, f"{START}optimizer = {optimizer}{train}".replace("LEVEL", "O0"), 0)


@pytest.mark.parametrize("train", [TRAIN, ACCUMULATE], ids=["clipping", "accumulation"])
def test_losses_are_equal_within_rounding_at_o4(run, tmp_path, train):
    script = f"{START}optimizer = {OPTIMIZERS[0]}{train}".replace("LEVEL", "O4")
    migrated = compare(run, tmp_path, script, 2e-2)
    assert re.search(r"with torch.autocast\(.*bfloat16.*\):\n( .*\n)*        loss = crit", migrated)


@pytest.mark.gpu
@pytest.mark.parametrize("train", [TRAIN, ACCUMULATE], ids=["clipping", "accumulation"])
def test_losses_are_equal_within_rounding_at_o1(run_on_gpu, tmp_path, train):
    script = f"{START}x, y = x.cuda(), y.cuda()\n"
    script = f"{script}model.cuda()\noptimizer = {OPTIMIZERS[0]}{train}".replace("LEVEL", "O1")
    compare(run_on_gpu, tmp_path, script, 2e-2)


def test_optimizer_that_is_created_in_the_call_of_initialize(tmp_path):
    train = TRAIN.replace("LEVEL", "O0").replace("(model, optimizer,", f"(model, {OPTIMIZERS[0]},")
    code, _ = migrate(tmp_path, START + train)
    assert "model, optimizer = model, torch.optim.AdamW(model.parameters(), lr=0.01" in code


def test_o1_gets_a_scaler(tmp_path):
    script = f"{START}optimizer = {OPTIMIZERS[0]}{TRAIN}".replace("LEVEL", "O1")
    code, report = migrate(tmp_path, script)
    place = code.index("scaler.unscale_(optimizer)\n    nn.utils.clip_grad_norm_(")
    assert place > code.index("scaler.scale(loss).backward()") > code.index("torch.float16")
    assert "    scaler.step(optimizer)\n    scaler.update()\n" in code
    assert "apex" not in code
    assert "script.py:18: changed: scale_loss → scaler.scale(loss)" in report


def test_several_optimizers_of_a_loss_matter_at_o1_alone(tmp_path):
    script = f"{START}optimizer = {OPTIMIZERS[0]}{TRAIN}".replace("(loss, opt", "(loss, [opt")
    script = script.replace("optimizer) as", "optimizer]) as")
    for level in ("O0", "O4"):
        assert "apex" not in migrate(tmp_path, script.replace("LEVEL", level))[0]
    report = migrate(tmp_path, script.replace("LEVEL", "O1"), status=1)[1]
    assert "amp.scale_loss has several optimizers" in report


CHOOSES_GPU = """
def train(model, optimizer):
    optimizer.zero_grad()
    loss = model(x).sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()

def main():
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer)
    train(model, optimizer)
"""


def test_main_guard_is_no_condition(tmp_path):
    script = CHOOSES_GPU.replace("def main():", 'if __name__ == "__main__":')
    code, _ = migrate(tmp_path, START + script)
    assert '    scaler = torch.amp.GradScaler("cuda")\n    train(model' in code
    both = script.replace(' == "__main__":', ' == "__main__" and amp_is_wanted:')
    assert "enabled=" in migrate(tmp_path, START + both)[0]


def test_scaler_is_created_where_amp_is_initialized(tmp_path):
    """It initializes CUDA, after which a script can no longer choose its GPU."""
    code, _ = migrate(tmp_path, START + CHOOSES_GPU)
    created = '    global scaler\n    scaler = torch.amp.GradScaler("cuda")\n    train(model'
    assert created in code and code.count("GradScaler") == 1
    assert "scaler.scale(loss).backward()" in code


def test_use_of_amp_before_it_is_initialized_is_left(tmp_path):
    script = CHOOSES_GPU.replace("    amp.init", "    print(amp.state_dict())\n    amp.init")
    code, report = migrate(tmp_path, START + script, status=1)
    assert "amp or its optimizer is used before amp.initialize" in report
    assert "GradScaler" not in code


CALLS = [
    (
        "from apex.parallel import DistributedDataParallel as D\nm = D(m, delay_allreduce=True)",
        "m = torch.nn.parallel.DistributedDataParallel(m, broadcast_buffers=False, "
        "find_unused_parameters=True)",
    ),
    (
        "import apex\nm = apex.parallel.convert_syncbn_model(m)",
        "m = torch.nn.SyncBatchNorm.convert_sync_batchnorm(m)",
    ),
    (
        "from apex.normalization import FusedRMSNorm\nm = FusedRMSNorm(8)",
        "m = torch.nn.RMSNorm(8, eps=1e-5)",
    ),
    (
        "try:\n    from apex.optimizers import FusedAdam\nexcept ImportError:\n"
        "    raise ImportError('install apex')\nm = FusedAdam(p)",
        "m = torch.optim.AdamW(p, weight_decay=0.0, fused=True)",
    ),
    (
        "from apex.optimizers import FusedAdam\nm = FusedAdam(p, betas=(0, b[1]))",
        "m = torch.optim.AdamW(p, betas=(0.0, b[1]), weight_decay=0.0, fused=True)",
    ),
    (
        "from apex.optimizers import FusedAdam\nm = FusedAdam()",  # an error in both
        "m = torch.optim.AdamW(weight_decay=0.0, fused=True)",
    ),
    (
        "from apex.parallel import convert_syncbn_model\nm = convert_syncbn_model(m).cuda()",
        "m = torch.nn.SyncBatchNorm.convert_sync_batchnorm(m).cuda()",
    ),
]


@pytest.mark.parametrize(("script", "line"), CALLS)
def test_call_and_import(tmp_path, script, line):
    assert migrate(tmp_path, script + "\n")[0] == f"import torch\n\n{line}\n"


LEFT = [
    (
        "from apex.optimizers import FusedLAMB\no = FusedLAMB(p)",
        "torch has no optimizers.FusedLAMB",
    ),
    (
        "from apex.optimizers import FusedAdam\no = FusedAdam(p, bias_correction=False)",
        "no equivalent of its argument bias_correction",
    ),
    (
        "from apex.optimizers import FusedAdam\no = FusedAdam(p, set_grad_none=False)",
        "no equivalent of its argument set_grad_none",
    ),
    ("from apex.optimizers import FusedAdam\no = FusedAdam(p, **options)", "unpacked"),
    *(
        (f"import apex\nm = apex.{name}(8)", f"migrate does not convert {name}; use {other}, or")
        for name, other in {
            "parallel.SyncBatchNorm": "torch.nn.SyncBatchNorm",
            "optimizers.FusedAdagrad": "torch.optim.Adagrad",
            "contrib.xentropy.SoftmaxCrossEntropyLoss.apply": "torch.nn.functional.cross_entropy",
        }.items()
    ),
    ("import apex\nm = apex.RNN.LSTM(8)", "migrate does not convert RNN.LSTM"),
    *(
        (
            f"from apex.optimizers import {name}\nimport torch\n{cast}\no = {name}(p)",
            "torch's moments of half parameters are not fp32",
        )
        for name in ("FusedAdam", "FusedSGD")
        for cast in (
            "m.half()",
            "m = m.cuda().bfloat16()",
            "m.to(device, torch.float16)",
            "m.to(dtype=torch.bfloat16)",
            "m.type(torch.half)",
            "m.type(torch.cuda.HalfTensor)",
            "m = network_to_half(m)",
            "t = torch.bfloat16\nm = m.to(device, dtype=t)",
            "m = Net(torch_dtype='float16')",
            "def build(dtype=torch.bfloat16):\n    return Net(dtype)",
            "torch.set_default_dtype(torch.half)",
            "from torch import bfloat16\nm = Net(bfloat16)",
            "m.type('torch.cuda.HalfTensor')",
            "from torch import half\nm.to(half)",
            "m.to(getattr(torch, 'half'))",
            "torch.set_default_tensor_type('torch.cuda.HalfTensor')",
            "import torch as th\nm = Net(th.half)",
        )
    ),
    (
        "from apex import amp\nm, o = amp.initialize(m, o, opt_level='O0')\n"
        "amp._amp_state.loss_scalers[0]._loss_scale = scale",
        "amp._amp_state has no equivalent here",
    ),
    (
        "from apex.parallel import DistributedDataParallel as D\n"
        "m = D(m, gradient_predivide_factor=2)",
        "no equivalent of its argument gradient_predivide_factor",
    ),
    (
        "from apex.parallel import DistributedDataParallel as D\nm = D(m)\nm.disable_allreduce()",
        "torch's has no disable_allreduce() and enable_allreduce(), but no_sync()",
    ),
    ("from apex import amp\nm, o = amp.initialize(m, o, opt_level='O2')", "O2, O3 and O5"),
    ("from apex import amp\nm, o = amp.initialize(m, o, opt_level=args.level)", "args.level"),
    (
        "from apex import amp\nif fp16:\n    if train:\n        m, o = amp.initialize(m, o)",
        "more than one condition",
    ),
    *(
        (
            f"from apex import amp\nm, o = amp.initialize(m, o, opt_level='{level}')",
            "amp.scale_loss is not in this file",
        )
        for level in ("O1", "O4")
    ),
    *(
        (
            f"from apex import amp\nm, o = amp.initialize(m, o, opt_level='O0')\n{line}",
            f"{name} is passed as a value",
        )
        for name, line in {
            "amp.scale_loss": "scale = amp.scale_loss if args.fp16 else plain",
            "amp.master_params": "clip = partial(clip_grad_norm_, amp.master_params)",
            "amp.__dict__": "has_state = 'state_dict' in amp.__dict__",
        }.items()
    ),
    *(
        (
            f"from apex import amp\nm, o = amp.initialize(m, o, opt_level='O0')\n{line}",
            "has no equivalent here",
        )
        for line in (
            "o._lazy_init_maybe_master_weights()",
            "is_patched = hasattr(o, '_amp_stash')",
            "amp._amp_state.verbosity = 0",
        )
    ),
    (
        "from apex import amp\nwith amp.scale_loss(loss, o) as s:\n    s.backward()",
        "not in this file",
    ),
    (
        "from apex import amp\nclass C:\n    m, o = amp.initialize(m, o, opt_level='O0')",
        "amp.initialize is in a loop, a match, a try or a class",
    ),
    ("from apex.optimizers import *\no = FusedAdam(p)", STILL_USED),
    ("from apex.fp16_utils import *\nx = to_python_float(loss)", STILL_USED),
    ("import apex\nOPTIMIZERS = {'adam': apex.optimizers.FusedAdam}", STILL_USED),
    ("import apex\nversion = apex.__version__", STILL_USED),
    ("from apex.parallel import (\n    LARC as L,\n)\nclass Mine(L):\n    pass", STILL_USED),
]


def test_report_says_that_zero_grad_drops_gradients(tmp_path):
    script = "from apex.optimizers import FusedSGD\no = FusedSGD(p, lr=0.1)\n"
    assert "2: changed: zero_grad() drops the gradients" in migrate(tmp_path, script)[1]


def test_import_that_is_still_used_beside_calls_that_are_rewritten(tmp_path):
    script = (
        "from apex.optimizers import FusedAdam, FusedSGD\n"
        "o = FusedSGD(p, lr=0.1)\nprint(FusedAdam)\n"
    )
    code, report = migrate(tmp_path, script, status=1)
    assert "from apex.optimizers import FusedAdam\n" in code and "FusedSGD(" not in code
    assert f"1: left: {STILL_USED}" in report


def test_keyword_of_the_name_is_no_use_of_an_import(tmp_path):
    code, report = migrate(tmp_path, "from apex import amp\nt = Trainer(amp=True)\n")
    assert code == "t = Trainer(amp=True)\n"
    assert "1 changed, 0 left" in report


@pytest.mark.parametrize(
    "line",
    [
        '__all__ = ["FusedAdam", "f"]',
        '__all__ += ["FusedAdam"]',
        "optimizer = eval(args.optimizer)(model.parameters())",
        "optimizer = globals()[args.optimizer](model.parameters())",
    ],
)
def test_imports_that_a_text_may_name_stay(tmp_path, line):
    script = f"from apex import amp\nfrom apex.optimizers import FusedAdam\n{line}\n"
    code, report = migrate(tmp_path, script, status=1)
    assert "from apex.optimizers import FusedAdam\n" in code and "import amp" not in code
    assert f"2: left: {STILL_USED}" in report


def test_imports_alone_are_removed(tmp_path):
    script = "from apex.fp16_utils import *\nfrom apex.parallel import LARC, Reducer\nx = 1\n"
    code, report = migrate(tmp_path, script)
    assert code == "x = 1\n"
    assert "1: changed: import removed: nothing uses it" in report
    assert (
        "2: changed: import removed: nothing uses it" in report and ": 2 changed, 0 left" in report
    )


@pytest.mark.parametrize(
    "line",
    [
        "with torch.autocast('cuda', dtype=torch.bfloat16):\n    y = m(x)",
        "from torch.cuda.amp import autocast\nwith autocast(dtype=torch.float16):\n    y = m(x)",
        "with torch.autocast('cuda', dtype=torch.half):\n    y = m(x)",
        "images = images.astype(np.float16)",
        "images = images.astype('float16')",
        "half = len(images) // 2",
    ],
)
def test_fused_adam_is_converted_where_half_types_are_not_of_parameters(tmp_path, line):
    script = f"from apex.optimizers import FusedAdam\n{line}\no = FusedAdam(p)\n"
    code, report = migrate(tmp_path, script)
    assert "torch.optim.AdamW(p, " in code
    assert "keep Apex's class if another file makes them half" in report


@pytest.mark.parametrize(
    ("arguments", "is_kept"),
    [
        ("opt_level='O3'", True),
        ("opt_level=args.level", True),
        ("**options", True),
        ("True, 'O3'", True),
        ("opt_level='O2', master_weights=False", True),
        ("opt_level='O0', cast_model_type=torch.float16", True),
        ("opt_level='O2', master_weights=True", False),
        ("opt_level='O5'", False),
        ("opt_level='O1', loss_scale=128", False),
    ],
)
def test_fused_adam_is_kept_where_amp_is_left_at_a_level_of_half_parameters(
    tmp_path, arguments, is_kept
):
    script = "from apex import amp\nfrom apex.optimizers import FusedAdam\no = FusedAdam(p)\n"
    code, report = migrate(
        tmp_path, f"{script}m, o = amp.initialize(m, o, {arguments})\n", status=1
    )
    assert ("optimizers.FusedAdam: amp, which is left, may cast" in report) == is_kept
    assert ("o = FusedAdam(p)" in code) == is_kept


@pytest.mark.parametrize(("script", "why"), LEFT)
def test_unsure_case_is_left_below_a_comment(tmp_path, script, why):
    code, report = migrate(tmp_path, script + "\n", status=1)
    comments = [line for line in code.splitlines() if "# apex-native migrate: " in line]
    assert len(comments) == 1
    assert why in comments[0]
    assert why in report
    kept = [line for line in code.splitlines() if line not in comments]
    assert "\n".join(kept) == script
    assert migrate(tmp_path, code, status=1)[0] == code  # a second time, nothing changes


@pytest.mark.parametrize(
    ("imports", "is_added"),
    [
        ("import torch\n", False),
        ("import torch.nn as nn\nimport torch.optim\n", False),
        ("import torch.nn as nn\n", True),
        ("if True:\n    import torch\n", True),
        ("print(torch)\nimport torch\n", True),
    ],
)
def test_import_of_torch_stays_below_what_comes_before_it(tmp_path, imports, is_added):
    """Such as a number of threads in the environment."""
    before = 'import os\nos.environ["OMP_NUM_THREADS"] = "1"\n'
    apex = "from apex.parallel import convert_syncbn_model\nm = convert_syncbn_model(m)\n"
    code, _ = migrate(tmp_path, before + imports + apex)
    assert "m = torch.nn.SyncBatchNorm.convert_sync_batchnorm(m)" in code
    assert code.startswith(before + imports) != is_added


def test_comments_are_those_of_the_latest_migration(tmp_path):
    script = """# of the script
import torch
from apex import amp
from apex.optimizers import FusedAdam

optimizer = FusedAdam(model.parameters())
# of the line
model, optimizer = amp.initialize(model, optimizer, opt_level=level)
"""
    code, _ = migrate(tmp_path, script, status=1)
    assert code.count("\n# apex-native migrate: ") == 2
    code, _ = migrate(tmp_path, code, "--opt-level", "O0")
    assert "apex" not in code
    assert code.startswith("# of the script\nimport torch\n")


def test_scaled_loss_that_is_used_later_is_left(tmp_path):
    train = TRAIN.replace("LEVEL", "O1").replace("print(loss.item())", "print(scaled_loss.item())")
    code, report = migrate(tmp_path, f"{START}optimizer = {OPTIMIZERS[0]}{train}", status=1)
    assert "scaled_loss is used outside" in report
    assert "with amp.scale_loss(loss, optimizer)" in code
    assert "GradScaler" not in re.sub("#.*", "", code)


@pytest.mark.parametrize(
    "lines",
    [
        "norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    log.info('%s', norm)",
        "norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()\n    log.info(norm)",
        "norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))\n    log.info(norm)",
        "math.isnan(nn.utils.clip_grad_norm_(model.parameters(), 1.0))",
    ],
)
def test_norm_of_clipped_gradients_is_no_parameter(tmp_path, lines):
    script = f"{START}optimizer = {OPTIMIZERS[0]}{TRAIN.replace(CLIP, '    ' + lines)}"
    code, _ = migrate(tmp_path, script.replace("LEVEL", "O1"))
    unscaled = code.index("    scaler.unscale_(optimizer)\n")
    assert code.index("scaler.scale(loss).backward()") < unscaled < code.index("clip_grad_norm_")


def test_clipping_in_a_loop_without_the_step_is_left(tmp_path):
    loop = """
for step in range(5):
    optimizer.zero_grad()
    for part in range(2):
        loss = criterion(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
"""
    start = TRAIN.replace("LEVEL", "O1").partition("for step")[0]
    script = f"{START}optimizer = {OPTIMIZERS[0]}{start}{loop}"
    code, report = migrate(tmp_path, script, status=1)
    assert "gradients are clipped where GradScaler keeps them scaled" in report
    assert "GradScaler" not in re.sub("#.*", "", code)


SHARED = "amp.initialize shares its line with another statement"
LARGER = "amp.initialize is part of a larger expression"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{}; n = 1", SHARED),
        ("if True: {}", SHARED),
        ("{} if amp else (model, optimizer)", LARGER),
        ("{}[:2] if amp else (model, optimizer)", LARGER),
        ("pair = {}", "amp.initialize is assigned to several targets"),
    ],
)
def test_initialize_in_a_line_with_others_is_left_as_a_whole(tmp_path, line, reason):
    call = 'model, optimizer = amp.initialize(model, optimizer, opt_level="O1")'
    train = TRAIN.replace("LEVEL", "O1").replace(call, line.format(call))
    code, report = migrate(tmp_path, f"{START}optimizer = {OPTIMIZERS[0]}{train}", status=1)
    assert reason in report
    assert "with amp.scale_loss(loss, optimizer)" in code and "GradScaler" not in code


def test_autograd_in_a_forward_pass_is_no_reason(tmp_path):
    model = (
        "class Energy(nn.Module):\n    def forward(self, x):\n        x = x.requires_grad_()\n"
        "        return torch.autograd.grad(x.square().sum(), x, create_graph=True)[0]\n"
    )
    script = f"{START}{model}optimizer = {OPTIMIZERS[0]}{TRAIN.replace('LEVEL', 'O1')}"
    assert "GradScaler" in migrate(tmp_path, script, status=0)[0]


def test_helper_that_does_not_train_is_no_reason(tmp_path):
    """A function of an evaluation, which reads gradients, leaves the training step as it is."""
    helper = "def show(model):\n    print(model[0].weight.grad)\ndef main():\n    show(model)\n"
    script = f"{START}{helper}optimizer = {OPTIMIZERS[0]}{TRAIN.replace('LEVEL', 'O1')}"
    assert "GradScaler" in migrate(tmp_path, script, status=0)[0]


def test_scaled_loss_may_have_the_name_of_the_loss(run, tmp_path):
    train = TRAIN.replace("LEVEL", "O0").replace("as scaled_loss", "as loss")
    train = train.replace("scaled_loss.backward", "loss.backward")
    compare(run, tmp_path, f"{START}optimizer = {OPTIMIZERS[0]}{train}", 0)


def test_loss_of_the_name_of_the_scaled_loss_is_logged_without_the_scale(tmp_path):
    train = TRAIN.replace("LEVEL", "O1").replace("scaled_loss", "loss")
    code, report = migrate(tmp_path, f"{START}optimizer = {OPTIMIZERS[0]}{train}")
    assert "    scaler.scale(loss).backward()\n" in code and "print(loss.item())" in code
    assert "changed: loss is not scaled after the backward pass" in report


@pytest.mark.parametrize("level", ["O0", "O4"])
def test_dynamic_scale_without_a_scaler_is_reported(tmp_path, level):
    train = TRAIN.replace('"LEVEL"', f'"{level}", loss_scale="dynamic"')
    report = migrate(tmp_path, f"{START}optimizer = {OPTIMIZERS[0]}{train}")[1]
    assert "changed: steps with inf or nan in their gradients are no longer skipped" in report


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_missing_casts_are_reported(tmp_path, level):
    train = TRAIN.replace("LEVEL", level)
    report = migrate(tmp_path, f"{START}optimizer = {OPTIMIZERS[0]}{train}")[1]
    message = "its inputs and its outputs are no longer cast to float32"
    assert (message in report) == (level == "O0")
    assert ("may be half after the loss" in report) == (level != "O0")


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
@pytest.mark.parametrize("base", ["torch.autograd.Function", "nn.Module"])
def test_backward_passes_without_casts_are_reported(tmp_path, level, base):
    train = TRAIN.replace("LEVEL", level)
    own = f"class Own({base}):\n    pass\n\n\n"
    report = migrate(tmp_path, f"{START}{own}optimizer = {OPTIMIZERS[0]}{train}")[1]
    assert ("torch.amp.custom_fwd" in report) == (level != "O0" and "Function" in base)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_casts_without_gradients_are_not_reused(tmp_path, level):
    no_grad = "    with torch.no_grad():\n        y = model(x).argmax(1)\n    output ="
    train = TRAIN.replace("LEVEL", level).replace("    output =", no_grad)
    code, _ = migrate(tmp_path, f"{START}optimizer = {OPTIMIZERS[0]}{train}")
    assert re.search(r"float16, cache_enabled=False\):\n *with torch.no_grad", code)


def test_level_can_be_given(run, tmp_path):
    level = "args.opt_level, keep_batchnorm_fp32=None"
    script = f"{START}optimizer = {OPTIMIZERS[0]}{TRAIN}".replace('"LEVEL"', level)
    (tmp_path / "script.py").write_text(script)
    done = run(*COMMAND, "migrate", "script.py", "--opt-level", "O4", "--write")
    assert done.returncode == 0, done.stderr
    assert "torch.bfloat16" in (tmp_path / "script.py").read_text()


HELPER = """\
from apex import amp

def backward(loss, optimizer):
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()

def save(path):
    torch.save({"amp": amp.state_dict()}, path)
"""


def test_file_without_initialize_is_rewritten_at_o0(tmp_path):
    code, _ = migrate(tmp_path, HELPER, "--opt-level", "O0")
    assert "def backward(loss, optimizer):\n    loss.backward()\n" in code
    assert "apex" not in code
    for flags in ([], ["--opt-level", "O1"], ["--opt-level", "O4"]):
        report = migrate(tmp_path, HELPER, *flags, status=1)[1]
        assert "not in this file; --opt-level O0 converts it for that level" in report
    script = HELPER.replace("def save", "    print(scaled_loss)\n\ndef save")
    report = migrate(tmp_path, script, "--opt-level", "O0", status=1)[1]
    assert "scaled_loss is used outside of amp.scale_loss" in report


CASTS = """
import torch.nn.functional as F
amp.register_float_function(F, "cross_entropy")
model, optimizer = amp.initialize(model, optimizer, opt_level="LEVEL")
for step in range(5):
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    with amp.disable_casts():
        output = model(x)
        print(output.mean().item())
"""


def test_casts_at_o0(run, tmp_path):
    script = f"{START}optimizer = {OPTIMIZERS[0]}{CASTS}"
    assert "register" not in compare(run, tmp_path, script.replace("LEVEL", "O0"), 0)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_disable_casts_disables_autocast(tmp_path, level):
    script = f"{START}optimizer = {OPTIMIZERS[0]}{CASTS}".replace("LEVEL", level)
    report = migrate(tmp_path, script, status=1)[1]
    assert "amp.register_float_function has no equivalent" in report
    lines = [line for line in script.splitlines(True) if "register" not in line]
    code, _ = migrate(tmp_path, "".join(lines))
    disabled = {
        "O1": '"cuda"',
        "O4": '"cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16',
    }
    assert f"    with torch.autocast({disabled[level]}, enabled=False" in code


def test_diff_leaves_the_file(run, tmp_path):
    (tmp_path / "script.py").write_text(CALLS[2][0] + "\n")
    done = run(*COMMAND, "migrate", "script.py")
    assert "+m = torch.nn.RMSNorm(8, eps=1e-5)\n" in done.stdout
    assert (tmp_path / "script.py").read_text() == CALLS[2][0] + "\n"


def test_diff_applies(run, tmp_path):
    """Only line feeds end the lines of a diff."""
    script = f"# form\ffeed\n# next\x85line\u2028\n{CALLS[2][0]}\n"
    (tmp_path / "script.py").write_text(script)
    done = run(*COMMAND, "migrate", "script.py")
    patch = ["patch", "-s", "-F0", "script.py"]
    subprocess.run(patch, input=done.stdout, text=True, check=True, cwd=tmp_path)
    assert "RMSNorm(8, eps=1e-5)" in (tmp_path / "script.py").read_text()


def test_write_keeps_the_mode(tmp_path):
    path = tmp_path / "script.py"
    path.touch(0o600)
    os.chmod(path, 0o751)
    migrate(tmp_path, CALLS[2][0] + "\n")
    assert path.stat().st_mode & 0o777 == 0o751
    assert [each.name for each in tmp_path.glob("*.py*")] == ["script.py"]


def test_note_on_an_expression_of_several_lines_is_one_comment(tmp_path):
    """As formatters lay it out."""
    before = AMP_AFTER_FORM_FEEDS.replace("\f", "")
    before = before.replace('"O1"', 'LEVELS.get(\n        args.precision,\n        "O1",\n    )')
    after, _ = migrate(tmp_path, before, status=1)
    assert 'amp.initialize: opt_level is LEVELS.get( args.precision, "O1", )' in after


AMP_AFTER_FORM_FEEDS = """
from apex import amp
import torch
model = torch.nn.Linear(2, 2).cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
model, opt = amp.initialize(model, opt, opt_level="O1")
for x in data:
\f    opt.zero_grad()
\f    loss = model(x).sum()
\f    with amp.scale_loss(loss, opt) as scaled:
\f        scaled.backward()
\f    opt.step()
"""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("print 1\n", "can't be parsed as Python 3"),
        ("x = 1\n", "does not import apex; nothing to migrate"),
        (
            "from apex_native import amp\n",
            "does not import apex (imports of apex_native are not converted); nothing to migrate",
        ),
        ("# coding: nonsense\nx = 1\n", "unknown encoding"),
        (f"x = {'(' * 50_000}1{')' * 50_000}\n", "too many nested parentheses"),
        (f"x = {'-' * 2000}1\n", "nested too deeply"),
        (f"x = {'-' * 100_000}1\n", "nested too deeply"),
        (f"x = {'+'.join('1' * 5000)}\n", "nested too deeply"),
        (AMP_AFTER_FORM_FEEDS, "the result would not be valid Python"),
        (None, "No such"),
    ],
    ids=[
        "python_2",
        "no_apex",
        "apex_native",
        "encoding",
        "parentheses",
        "signs",
        "many signs",
        "sum",
        "form feeds",
        "missing",
    ],
)
def test_nothing_to_migrate(run, tmp_path, content, message):
    if content is not None:
        (tmp_path / "script.py").write_text(content)
    done = run(*COMMAND, "migrate", "script.py", "--write")
    assert done.returncode == 2
    assert message in done.stderr
    assert content is None or (tmp_path / "script.py").read_text() == content


def test_notebook_is_refused(run, tmp_path):
    """Its JSON may be valid Python."""
    (tmp_path / "n.ipynb").write_text('{"cells": [{"source": ["from apex import amp"]}]}')
    done = run(*COMMAND, "migrate", "n.ipynb")
    assert done.returncode == 2
    assert "n.ipynb is a notebook: convert it to a script first (jupyter nbconv" in done.stderr


@pytest.mark.parametrize("magic", ["cell_magic('time', '', '", "line_magic('time', '"])
def test_code_in_a_text_of_a_converted_notebook_is_refused(run, tmp_path, magic):
    """Its steps would stay, on gradients that are still scaled."""
    script = f"from apex import amp\nget_ipython().run_{magic}optimizer.step()')\n"
    (tmp_path / "n.py").write_text(script)
    done = run(*COMMAND, "migrate", "n.py", "--write")
    assert done.returncode == 2
    assert "n.py: the code of a cell or line with %time is a string here" in done.stderr
    assert (tmp_path / "n.py").read_text() == script
    harmless = "get_ipython().run_line_magic('matplotlib', 'inline')\n"
    (tmp_path / "n.py").write_text(f"{harmless}# get_ipython().run_line_magic('time', 'f()')\n")
    assert "is a string here" not in run(*COMMAND, "migrate", "n.py").stderr


def test_name_of_the_script_is_escaped(run, tmp_path):
    (tmp_path / "a\x1b[2J.py").write_text("x = 1\n")
    done = run(*COMMAND, "migrate", "a\x1b[2J.py")
    assert (done.returncode, "\x1b" in done.stderr) == (2, False)
    assert "a\\x1b[2J.py does not import apex" in done.stderr


def test_literals_of_the_script_are_escaped(run, tmp_path):
    (tmp_path / "a.py").write_text(START + TRAIN.replace("LEVEL", "O1\x1b[2J"))
    done = run(*COMMAND, "migrate", "a.py")
    assert (done.returncode, "\x1b" in done.stderr) == (1, False)
    assert "O1\\x1b[2J" in done.stderr


def test_failed_write_leaves_the_file(run, tmp_path):
    name = "x" * 250 + ".py"  # too long for a temporary file's name beside it
    (tmp_path / name).write_text(CALLS[2][0] + "\n")
    done = run(*COMMAND, "migrate", name, "--write")
    assert done.returncode == 2
    assert done.stderr.endswith(f"cannot write {name}: File name too long; it is unchanged\n")
    assert (tmp_path / name).read_text() == CALLS[2][0] + "\n"


@pytest.mark.slow
def test_diff_into_a_closed_pipe(run, tmp_path):
    (tmp_path / "script.py").write_text(CALLS[2][0] + "\n")
    program = "import subprocess, sys; done = subprocess.Popen(sys.argv[1:], stdout=-1, stderr=-1)"
    program += "; done.stdout.close(); print(done.stderr.read().decode(), done.wait())"
    done = run("-c", program, sys.executable, *COMMAND, "migrate", "script.py")
    assert done.stdout == f" {-signal.SIGPIPE}\n"


def test_states_of_earlier_checkpoints_are_converted_as_documented():
    """Apex's FusedAdam counts its steps in the groups."""
    text = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(old = .*?)```", text, re.DOTALL)
    scaler, layer = torch.amp.GradScaler("cpu"), torch.nn.Linear(2, 1)
    state = {"exp_avg": torch.ones(1, 2), "exp_avg_sq": torch.ones(1, 2)}
    late = {"exp_avg": torch.ones(1), "exp_avg_sq": torch.ones(1), "step": torch.tensor(2.0)}
    group = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "step": 7}
    checkpoint = {  # at a static scale, Apex counts on
        "amp": {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 4003}},
        "optimizer": {"state": {0: state, 1: late}, "param_groups": [{**group, "params": [0, 1]}]},
    }
    exec(block, {"torch": torch, "scaler": scaler, "checkpoint": checkpoint})
    scaler.load_state_dict(checkpoint["amp"])
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (128.0, 3)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    optimizer.load_state_dict(checkpoint["optimizer"])
    scaler.scale(layer(torch.ones(2)).sum()).backward()
    scaler.step(optimizer)
    steps = [optimizer.state[one]["step"].item() for one in layer.parameters()]
    assert steps == [8, 3]  # of the bias, which apex_native counts by itself


def test_report_says_that_earlier_checkpoints_need_a_conversion(tmp_path):
    script = f"{START}optimizer = {OPTIMIZERS[0]}{ACCUMULATE}".replace("LEVEL", "O1")
    lines = [line for line in migrate(tmp_path, script)[1].splitlines() if "convert" in line]
    assert "states that Apex's FusedAdam saved lack torch's step" in lines[0]
    assert "GradScaler cannot load the state of amp in an earlier checkpoint" in lines[1]
    assert len(lines) == 2
    script = f"{START}optimizer = {OPTIMIZERS[0]}{TRAIN}".replace("LEVEL", "O1")
    assert "convert" not in migrate(tmp_path, script)[1]
