"""``apex-native migrate`` on scripts that use amp only if a flag or an import allows it."""

import pytest
from migrated_scripts import COMMAND, losses, migrate
from parameters import mostly_slow

pytest.importorskip("libcst", reason="needs libcst, which the extra `migrate` installs")

pytestmark = pytest.mark.xdist_group("package")

START = """\
import argparse
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--fp16_opt_level", default="O1")
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
x, y = torch.randn(48, 8, device=device), torch.randint(3, (48,), device=device)
"""
LOCAL_IMPORT = """
def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if args.fp16:
        try:
            from apex import amp
        except ImportError:
            raise ImportError("install apex")
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.fp16_opt_level)
    for step in range(12):
        loss = nn.functional.cross_entropy(model(x[step::12]), y[step::12])
        if step >= 0:
            loss = loss / 2
        if args.fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        if step % 2:
            if args.fp16:
                nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        print(loss.item())

train(nn.Linear(8, 3).to(device))
"""
NONE = """
try:
    from apex import amp
    has_apex = True
except ImportError:
    amp = None
    has_apex = False

def train_one_epoch(model, optimizer, use_amp):
    for step in range(6):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[step::6]), y[step::6])
        if use_amp:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        print(loss.item())

def main(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if amp is not None and args.fp16:
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.fp16_opt_level)
    elif not has_apex:
        raise ValueError("no apex")
    train_one_epoch(model, optimizer, args.fp16 and has_apex)
    if args.fp16:
        torch.save(amp.state_dict(), "amp.pt")

main(nn.Linear(8, 3).to(device))
"""
TRAINER = """
from apex import amp

class Trainer:
    def __init__(self, model, use_amp):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        self.amp = use_amp
        if self.amp:
            self.model, self.optimizer = amp.initialize(
                self.model, self.optimizer, opt_level=args.fp16_opt_level
            )

    def step(self, x, y):
        loss = nn.functional.cross_entropy(self.model(x), y)
        if self.amp:
            with amp.scale_loss(loss, self.optimizer) as scaled_loss:
                scaled_loss.backward()
            nn.utils.clip_grad_norm_(amp.master_params(self.optimizer), 0.1)
            self.optimizer.step()
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

trainer = Trainer(nn.Linear(8, 3).to(device), args.fp16)
for step in range(6):
    print(trainer.step(x[step::6], y[step::6]))
"""
TWO_OPTIMIZERS = """
from apex import amp

G, D = nn.Linear(8, 8).to(device), nn.Linear(8, 1).to(device)
optimizer_g = torch.optim.SGD(G.parameters(), lr=0.1)
optimizer_d = torch.optim.SGD(D.parameters(), lr=0.1)
if args.fp16:
    [G, D], [optimizer_g, optimizer_d] = amp.initialize(
        [G, D], [optimizer_g, optimizer_d], opt_level=args.fp16_opt_level, num_losses=2
    )
for step in range(6):
    optimizer_d.zero_grad()
    fake = G(x[step::6])
    loss_d = D(fake.detach()).pow(2).mean() - D(x[step::6]).mean()
    if args.fp16:
        with amp.scale_loss(loss_d, optimizer_d, loss_id=0) as scaled_loss:
            scaled_loss.backward()
    else:
        loss_d.backward()
    nn.utils.clip_grad_norm_(D.parameters(), 0.1)
    optimizer_d.step()
    optimizer_g.zero_grad()
    loss_g = -D(fake).mean()
    if args.fp16:
        with amp.scale_loss(loss_g, optimizer_g, loss_id=1) as scaled_loss:
            scaled_loss.backward()
    else:
        loss_g.backward()
    optimizer_g.step()
    print(loss_d.item())
    print(loss_g.item())
"""
ENABLED = """
from apex import amp

model = nn.Linear(8, 3).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer = amp.initialize(model, optimizer, enabled=args.fp16, loss_scale="dynamic")
for step in range(6):
    with torch.set_grad_enabled(step < 5):
        loss = nn.functional.cross_entropy(model(x[step::6]), y[step::6])
        if step < 5:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            model.zero_grad()
    print(loss.item())
"""
INVERTED = """
from apex import amp

def train(model, optimizer):
    for step in range(6):
        first = nn.functional.cross_entropy(model(x[step::6]), y[step::6])
        second = model(x[step::6]).pow(2).mean()
        loss = first + second
        if not args.fp16:
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
        model.zero_grad()
        print(loss.item())

def main(model, ema):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if args.fp16:
        assert amp is not None, "no apex"
        (model), optimizer = amp.initialize(model, optimizer, opt_level=args.fp16_opt_level)
        amp._amp_state.loss_scalers[0]._loss_scale = 2**10
        if ema:
            ema, optimizer_ema = amp.initialize(
                ema, torch.optim.SGD(ema.parameters(), lr=0.0), opt_level=args.fp16_opt_level
            )
    train(model, optimizer)

main(nn.Linear(8, 3).to(device), nn.Linear(8, 3).to(device))
"""
ONE_LINE = """
from apex import amp

def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=args.fp16_opt_level, enabled=args.fp16
    )
    for step in range(6):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[step::6]), y[step::6])
        with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()  # one line
        optimizer.step()
        print(loss.item())

train(nn.Linear(8, 3).to(device))
"""
ALL_IN_ONE = """
from apex import amp

model = nn.Linear(8, 3).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
if args.fp16:
    model, optimizer = amp.initialize(model, optimizer)
    for step in range(6):
        loss = model(x).pow(2).mean()
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    torch.save(amp.state_dict(), "amp.pt")
"""
SCRIPTS = {
    "local import": LOCAL_IMPORT,
    "amp is None": NONE,
    "trainer": TRAINER,
    "two optimizers": TWO_OPTIMIZERS,
    "enabled": ENABLED,
    "inverted condition": INVERTED,
    "one line": ONE_LINE,
}


@pytest.mark.parametrize("name", mostly_slow(SCRIPTS, fast=3))
def test_losses_are_equal_with_a_scaler(run, tmp_path, name):
    (tmp_path / "script.py").write_text(START + SCRIPTS[name])
    plain = losses(run(*COMMAND, "run", "script.py"))
    code, _ = migrate(tmp_path, START + SCRIPTS[name], "--opt-level", "O1")
    assert "import amp" not in code
    assert 'torch.autocast("cuda", torch.float16, enabled=' in code
    assert losses(run("script.py")) == plain
    # On a CPU, GradScaler for CUDA is disabled. This one scales by powers of 2, which is exact.
    (tmp_path / "script.py").write_text(code.replace('GradScaler("cuda"', 'GradScaler("cpu"'))
    assert losses(run("script.py", "--fp16")) == plain


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCRIPTS)
def test_losses_are_equal_within_rounding_at_o1_on_a_gpu(run_on_gpu, tmp_path, name):
    script = START.replace('"cuda" if torch.cuda.is_available() else "cpu"', '"cuda"')
    assert script != START
    (tmp_path / "script.py").write_text(script + SCRIPTS[name])
    expected = losses(run_on_gpu(*COMMAND, "run", "script.py", "--fp16"))
    migrate(tmp_path, script + SCRIPTS[name], "--opt-level", "O1")
    assert losses(run_on_gpu("script.py", "--fp16")) == pytest.approx(expected, rel=2e-2, abs=2e-3)


@pytest.mark.parametrize(
    "name", mostly_slow(name for name in SCRIPTS if name not in ("enabled", "one line"))
)
def test_losses_are_equal_at_o4(run, tmp_path, name):
    script = START.replace('default="O1"', 'default="O4"') + SCRIPTS[name]
    (tmp_path / "script.py").write_text(script)
    plain = losses(run(*COMMAND, "run", "script.py"))
    mixed = losses(run(*COMMAND, "run", "script.py", "--fp16"))
    code, _ = migrate(tmp_path, script, "--opt-level", "O4")
    assert "import amp" not in code
    assert losses(run("script.py")) == plain
    assert losses(run("script.py", "--fp16")) == pytest.approx(mixed, rel=2e-2, abs=2e-3)


def test_level_of_a_flag_is_asked_for(tmp_path):
    code, report = migrate(tmp_path, START + LOCAL_IMPORT, status=1)
    assert "GradScaler" not in code
    assert "give --opt-level" in report
    report = migrate(tmp_path, START + LOCAL_IMPORT, "--opt-level", "O1")[1]
    assert "args.fp16_opt_level is not read: the level is O1" in report


def test_branches_are_merged_if_they_become_equal(tmp_path):
    code, _ = migrate(tmp_path, START + LOCAL_IMPORT, "--opt-level", "O1")
    assert "            loss = loss / 2\n        scaler.scale(loss).backward()\n" in code
    assert "scaler.unscale_(optimizer)\n            if args.fp16:\n" in code


def test_static_loss_scale_is_replaced_on_request(tmp_path):
    script = START + ENABLED.replace('"dynamic"', "128.0")
    report = migrate(tmp_path, script, status=1)[1]
    assert "loss_scale is 128.0; --loss-scale dynamic" in report
    assert "GradScaler" in migrate(tmp_path, script, "--loss-scale", "dynamic")[0]


@pytest.mark.parametrize("written", ['"O1" if args.fp16 else "O0"', 'f"O{args.level}"', "LEVEL"])
def test_expression_in_place_of_which_the_option_stands_is_reported(tmp_path, written):
    script = f"from apex import amp\nm, o = amp.initialize(m, o, opt_level={written})\n"
    _, report = migrate(tmp_path, script, "--opt-level", "O0")
    assert f"{written} is not read: the level is O0" in report
    _, report = migrate(tmp_path, script, status=1)
    assert f"opt_level is {written}, known only when the script runs" in report


def test_second_name_for_the_scaler(tmp_path):
    code, _ = migrate(tmp_path, f"{START}scaler = None{ENABLED}")
    assert "\ngrad_scaler.update()\n" in code.replace("            ", "")
    assert "enabled=grad_scaler.is_enabled()" in code


LEFT = [
    (NONE, "has_apex = True", 'has_apex = find("apex.amp")', "this may find no Apex"),
    *(
        (NONE, "has_apex = True", f"has_apex = {question}", "this may find no Apex")
        for question in (
            '"apex" in sys.modules',
            '"amp" in globals()',
            'any(name == "apex" for name in sys.modules)',
            'hasattr(sys.modules[__name__], "amp")',
        )
    ),
    (ENABLED, "for step in", "print(amp)\ncall(amp)\nfor step in", "amp is passed as a value"),
    (ENABLED, "for step in", "f(amp if x else None)\nfor step in", "amp is passed as a value"),
    (ENABLED, "for step in", "def f(amp=amp): ...\nfor step in", "amp is passed as a value"),
    (INVERTED, "        amp._amp", "    if ema:\n        amp._amp", "_amp_state is set elsewhere"),
    (
        LOCAL_IMPORT,
        "            optimizer.step()\n",
        "            optimizer.step()\n            optimizer.step()\n",
        "GradScaler needs one optimizer.step()",
    ),
    (
        LOCAL_IMPORT,
        "        if step % 2:\n",
        "        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n        if step % 2:\n",
        "gradients are clipped where GradScaler keeps them scaled",
    ),
    (ENABLED, "model.zero_grad()", "print(model.weight.grad)", "gradients may not be zeroed"),
    (ENABLED, "optimizer.step()", "optimizer.step(None)", "not a statement of its own"),
    (
        TRAINER,
        "        if self.amp:\n            self.model",
        "        if True:\n            self.model",
        "amp.initialize lacks the condition self.amp",
    ),
    (
        LOCAL_IMPORT,
        "    if args.fp16:\n        try",
        "    if not args.fp16:\n        pass\n    else:\n        try",
        "amp.initialize is in an else or an elif",
    ),
    (ALL_IN_ONE, "    torch.save", "torch.save", "used outside of the condition"),
    (
        ALL_IN_ONE,
        '        optimizer.step()\n    torch.save(amp.state_dict(), "amp.pt")\n',
        "optimizer.step()\n",
        "used outside of the condition of",
    ),
    (ALL_IN_ONE, "    torch.save", "else:\n    torch.save", "outside of the condition of"),
    (
        ALL_IN_ONE,
        "        optimizer.step()",
        "        update()\n\n\ndef update():\n    optimizer.step()\n\n\nif args.save:",
        "used outside of the condition of amp",
    ),
    (
        ONE_LINE,
        "opt_level=args.fp16_opt_level, enabled=args.fp16",
        "**dict(opt_level=args.fp16_opt_level)",
        "its arguments are unpacked from a variable",
    ),
    (
        ONE_LINE,
        "scaled_loss.backward()",
        "scaled_loss.backward(); nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        "shares its statement",
    ),
]


@pytest.mark.parametrize("module", ["apex.amp", "apex.amp._amp_state"])
def test_initial_scale_is_kept(tmp_path, module):
    script = INVERTED.replace("\n", f"\nfrom {module} import _amp_state\n", 1)
    for code in (INVERTED, script.replace("amp._amp_state.l", "_amp_state.l")):
        code, _ = migrate(tmp_path, START + code, "--opt-level", "O1")
        assert 'GradScaler("cuda", init_scale=2**10, enabled=args.fp16)' in code
        assert "_amp_state" not in code


@pytest.mark.parametrize("line", ["@dataclass(slots=True)\nclass", "class"])
def test_class_with_slots_has_a_global_scaler(tmp_path, line):
    slots = "" if "slots" in line else "\n    __slots__ = ('model', 'amp', 'optimizer')"
    script = TRAINER.replace("class Trainer:", f"{line} Trainer:{slots}")
    code, _ = migrate(tmp_path, START + script, "--opt-level", "O1")
    assert "global scaler\n" in code and "self.scaler" not in code


def test_scaler_is_created_in_the_block_of_all_its_uses(tmp_path):
    code, _ = migrate(tmp_path, START + ALL_IN_ONE, "--opt-level", "O1")
    assert "\n    scaler = torch.amp.GradScaler(" in code
    assert '\n    torch.save(scaler.state_dict(), "amp.pt")' in code


def test_scaler_is_used_where_the_same_condition_is_tested_again(tmp_path):
    test = next(line for line in ALL_IN_ONE.splitlines() if line.startswith("if "))
    script = START + ALL_IN_ONE.replace("    torch.save", f"{test}\n    torch.save")
    code, _ = migrate(tmp_path, script, "--opt-level", "O1")
    assert f'{test}\n    torch.save(scaler.state_dict(), "amp.pt")' in code


@pytest.mark.parametrize(("script", "old", "new", "why"), LEFT, ids=[case[3] for case in LEFT])
def test_unsure_case_is_left(tmp_path, script, old, new, why):
    script = START + script.replace(old, new)
    code, report = migrate(tmp_path, script, "--opt-level", "O1", status=1)
    assert why in report
    assert "torch.amp.GradScaler" not in code


FLAG = """
try:
    from apex import amp
    use_amp = True
except ImportError:
    use_amp = False

def train(model, optimizer):
    if use_amp:
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    for step in range(6):
        loss = model(x).pow(2).mean()
        optimizer.zero_grad()
        if use_amp:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        optimizer.step()

train(model, optimizer)
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def train", "if not args.fp16:\n    use_amp = False\ndef train"),
        ("def train", "use_amp &= args.fp16\ndef train"),
        ("def train", "use_amp: bool = args.fp16\ndef train"),
        ("optimizer):", "optimizer, use_amp=False):"),
        ("use_amp = True", "use_amp = True\n    use_amp = args.fp16"),
    ],
)
def test_option_of_the_name_of_the_flag_for_an_import_is_kept(tmp_path, old, new):
    code, _ = migrate(tmp_path, START + FLAG.replace(old, new, 1), "--opt-level", "O1")
    assert 'GradScaler("cuda", enabled=bool(use_amp))' in code


@pytest.mark.parametrize("first", ["", "use_amp = False\n"])
def test_flag_for_an_import_alone_is_no_condition(tmp_path, first):
    code, _ = migrate(tmp_path, START + first + FLAG, "--opt-level", "O1")
    assert 'GradScaler("cuda")' in code


def test_statements_on_the_line_of_a_test_for_apex_are_kept(tmp_path):
    lines = 'if use_amp: print("Apex"); x += 1  # amp\nif not use_amp: y += 1\nelse: x += 2\n'
    code, _ = migrate(tmp_path, START + FLAG + lines, "--opt-level", "O1")
    assert code.endswith('\nprint("Apex"); x += 1  # amp\nx += 2\n')


def test_gradients_are_unscaled_for_clipping_after_a_branch_without_amp(tmp_path):
    backward, clip = (
        "            loss.backward()\n",
        "nn.utils.clip_grad_norm_(model.parameters(), 1)\n",
    )
    script = FLAG.replace(backward, f"{backward}            {clip}        {clip}")
    script = script.replace("def train", "use_amp &= args.fp16\ndef train")
    code, _ = migrate(tmp_path, START + script, "--opt-level", "O1")
    assert "backward()\n            scaler.unscale_(optimizer)\n        else:\n" in code
    assert code.count("unscale_") == 1


def test_branch_with_a_scaler_of_its_own_is_kept(tmp_path):
    clip = "            nn.utils.clip_grad_norm_(model.parameters(), 1)\n"
    step = f"{clip}            optimizer.step()\n"
    native = (
        "        elif args.native:\n            mine.scale(loss).backward()\n"
        "            mine.unscale_(optimizer)\n"
    )
    native += f"{clip}            mine.step(optimizer)\n        else:\n"
    script = FLAG.replace("        optimizer.step()\n", "").replace(
        "        else:\n", f"{step}{native}"
    )
    script = script.replace("            loss.backward()\n", f"            loss.backward()\n{step}")
    script = script.replace("def train", "use_amp &= args.fp16\ndef train")
    code, _ = migrate(tmp_path, START + script, "--opt-level", "O1")
    assert "scaler.unscale_(optimizer)\n" + clip in code and native in code


OPTION = """\
use_amp = False
if args.fp16:
    try:
        from apex import amp
        use_amp = True
    except ImportError:
        print("install apex")
"""


@pytest.mark.parametrize(
    "option",
    [
        OPTION,
        OPTION.replace("    try:", "    try:\n        import apex"),
        "use_amp = False\ntry:\n    if args.fp16:\n        from apex import amp\n"
        "        use_amp = True\nexcept ImportError:\n    pass\n",
        "use_amp = False\ntry:\n    from apex import amp\nexcept ImportError:\n    pass\nelse:\n"
        "    if args.fp16:\n        use_amp = True\n",
        "from elsewhere import is_apex_available\nuse_amp = False\nif is_apex_available():\n"
        "    from apex import amp\n    use_amp = args.fp16\n",
    ],
    ids=["try in if", "two imports", "if in try", "else", "function"],
)
def test_flag_for_an_import_under_an_option_is_kept(tmp_path, option):
    script = START + option + FLAG[FLAG.index("def train") :]
    code, _ = migrate(tmp_path, script, "--opt-level", "O1")
    assert 'GradScaler("cuda", enabled=bool(use_amp))' in code


def test_function_of_another_file_that_looks_for_apex_is_true(tmp_path):
    script = "from transformers.file_utils import is_apex_available\nhas_amp = False\n"
    script += "if is_apex_available():\n    from apex import amp\n    has_amp = True\n"
    script += "is_on = args.fp16 and is_apex_available()\nif not is_apex_available():\n    exit()\n"
    train = FLAG[FLAG.index("def train") :].replace("use_amp", "is_on")
    code, _ = migrate(tmp_path, START + script + train, "--opt-level", "O1")
    assert "has_amp = False\nhas_amp = True\nis_on = args.fp16 and True\n" in code
    assert "exit()" not in code


QUESTIONS = {
    "method": "class Task:\n    def has_apex(self):\n        return args.fp16\n\ntask = Task()\n",
    "function": "def has_apex():\n    return args.fp16\n",
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_function_of_the_file_that_may_return_an_option_is_kept(tmp_path, name):
    test = "task.has_apex()" if name == "method" else "has_apex()"
    train = FLAG[FLAG.index("def train") :].replace("use_amp", test)
    script = f"{START}from apex import amp\n{QUESTIONS[name]}{train}"
    code, _ = migrate(tmp_path, script, "--opt-level", "O1")
    assert f'GradScaler("cuda", enabled=bool({test}))' in code


@pytest.mark.parametrize(
    ("setup", "test"),
    [
        ("from elsewhere import has_apex_enabled", "has_apex_enabled()"),
        ("from elsewhere import *", "is_apex_available()"),
        ("task = make()", "task.has_apex()"),
    ],
)
def test_function_that_may_look_for_apex_is_left(tmp_path, setup, test):
    train = FLAG[FLAG.index("def train") :].replace("use_amp", test)
    script = f"{START}from apex import amp\n{setup}\n{train}"
    report = migrate(tmp_path, script, "--opt-level", "O1", status=1)[1]
    assert f"{test} may ask for Apex, or for an option" in report


def test_answer_of_a_function_that_looks_for_apex_is_reported(tmp_path):
    script = "from elsewhere import is_apex_available\nprint(is_apex_available())\n"
    script = f"from apex import amp\n{script}model, optimizer = amp.initialize(model, optimizer)\n"
    report = migrate(tmp_path, script, "--opt-level", "O0")[1]
    assert "3: changed: is_apex_available() → True" in report


def test_import_and_its_failure_under_an_option_are_converted(tmp_path):
    script = "if args.fp16:\n    try:\n        from apex import amp\n"
    script += "    except ImportError:\n        amp = None\n"
    train = FLAG[FLAG.index("def train") :].replace("use_amp", "args.fp16 and amp is not None")
    code, _ = migrate(tmp_path, f"{START}{script}{train}", "--opt-level", "O1")
    assert 'GradScaler("cuda", enabled=args.fp16)' in code


@pytest.mark.parametrize(
    "option",
    [
        "amp = None\nif args.fp16:\n    from apex import amp\n",
        "if args.fp16:\n    from apex import amp\nelse:\n    amp = None\n",
        "try:\n    from apex import amp\nexcept ImportError:\n    amp = None\n"
        "if not args.fp16:\n    amp = None\n",
    ],
)
@pytest.mark.parametrize("test", ["amp is not None", "amp"])
def test_import_under_an_option_that_is_tested_later_is_left(tmp_path, option, test):
    train = FLAG[FLAG.index("def train") :]
    script = START + option + train.replace("if use_amp:", f"if {test}:")
    report = migrate(tmp_path, script, "--opt-level", "O1", status=1)[1]
    assert "amp is tested in place of an option" in report
    script = START + option + train.replace("if use_amp:", f"if args.fp16 and {test}:")
    assert "0 left" in migrate(tmp_path, script, "--opt-level", "O1")[1]
