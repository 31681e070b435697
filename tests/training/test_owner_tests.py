"""The generated tests: green in a fresh project and after ordinary edits, red after errors."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fresh import ROOT
from PIL import Image
from running import SCREENED, run, run_script

pytestmark = pytest.mark.xdist_group("train")
TASKS = ("classification", "segmentation", "contrastive")
HERE = Path(__file__).parent


def run_tests(project: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run pytest as the owner does; check that it leaves no files in the project."""
    before = list_files(project)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=project,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert list_files(project) == before
    return done


def list_files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def failed_tests(done: subprocess.CompletedProcess) -> set[str]:
    return set(re.findall(r"^(?:FAILED|ERROR) tests/\w+\.py::(\w+)", done.stdout, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize(
    "task", ["classification", *(pytest.param(t, marks=pytest.mark.weekly) for t in TASKS[1:])]
)
def test_owner_tests_pass_in_a_fresh_project(shared_project, task):
    done = run_tests(shared_project(task=task))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "answers",
    [
        pytest.param({"ddp": "fsdp", "task": "segmentation", "opt_level": "O5"}, id="fsdp"),
        pytest.param({"backend": "apex"}, id="apex"),
        pytest.param(
            {"ddp": "dataparallel", "sync_bn": False}, id="dataparallel", marks=pytest.mark.weekly
        ),
        pytest.param(
            {"ddp": "torch", "fused_adam": False, "opt_level": "O2"},
            id="torch-sgd-O2",
            marks=pytest.mark.weekly,
        ),
    ],
)
def test_owner_tests_pass_with_other_answers(bake, answers):
    done = run_tests(bake(**answers))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_flags_that_main_refuses_are_reported(bake):
    project = bake()
    flags = 'FLAGS: tuple[str, ...] = ("--epochs", "0")\n'
    replace(project / "tests" / "test_task.py", ("FLAGS: tuple[str, ...] = ()\n", flags))
    done = run_tests(project, "tests/test_task.py", "-x")
    assert done.returncode == 1
    assert "Failed: FLAGS: argument --epochs: '0' is not a whole number" in done.stdout


def replace(path: Path, *pairs: tuple[str, str]) -> None:
    """Replace each text, which occurs once, in the file."""
    source = path.read_text(encoding="utf-8")
    for old, new in pairs:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    path.write_text(source, encoding="utf-8")


def turn_into_regression(project: Path) -> None:
    shutil.copy(HERE / "regression_task.py", project / "task.py")


AUXILIARY = '''

class WithAuxiliaryHead(nn.Module):
    """A backbone whose features go to two heads."""

    def __init__(self, backbone: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.main_head = nn.Linear(64, num_classes)
        self.auxiliary_head = nn.Linear(64, num_classes)

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        features = self.backbone(pixels).relu()
        return {"out": self.main_head(features), "aux": self.auxiliary_head(features)}
'''


def add_auxiliary_loss(project: Path) -> None:
    """Make the output a dict, whose second entry is for an auxiliary loss."""
    replace(
        project / "task.py",
        (
            "return torchvision.models.get_model(arch, weights=None, num_classes=num_classes)",
            "backbone = torchvision.models.get_model(arch, weights=None, num_classes=64)\n"
            "    return WithAuxiliaryHead(backbone, num_classes)",
        ),
        (
            'return F.cross_entropy(output, labels, reduction="none", '
            "label_smoothing=label_smoothing)\n",
            "both = [F.cross_entropy(output[name], labels, reduction='none') for name in output]\n"
            "        return both[0] + 0.4 * both[1]\n",
        ),
        (
            "        loss = criterion(output.float(), targets)",
            "        output = output['out']\n"
            "        loss = F.cross_entropy(output.float(), targets)",
        ),
        ("= model(inputs).float()", "= model(inputs)['out'].float()"),
        ("self.model(images.normalize(pixels)).", "self.model(images.normalize(pixels))['out']."),
    )
    with (project / "task.py").open("a", encoding="utf-8") as file:
        file.write(AUXILIARY)


def replace_model(project: Path, expression: str, imports: str = "") -> None:
    path = project / "task.py"
    source = path.read_text(encoding="utf-8")
    body = re.compile(r"(def build_model\(.*?-> nn\.Module:\n).*?(?=\n\n\n)", re.DOTALL)
    source, count = body.subn(rf"\1    return {expression}", source)
    assert count == 1
    path.write_text(source.replace("import torch\n", f"{imports}import torch\n", 1))


def use_timm(project: Path) -> None:
    pytest.importorskip("timm")
    replace_model(
        project, "timm.create_model('resnet10t', num_classes=num_classes)", "import timm\n"
    )


def use_plain_module(project: Path) -> None:
    replace_model(
        project,
        "nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),"
        " nn.Linear(64, num_classes))",
    )


@pytest.mark.slow
def test_a_model_with_a_3d_convolution_is_trained(bake, tmp_path):
    """Its weights have no channels_last layout."""
    project = bake()
    replace_model(
        project,
        "nn.Sequential(nn.Unflatten(1, (3, 1)), nn.Conv3d(3, 4, (1, 3, 3)),"
        " nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, num_classes))",
    )
    done = run(project, "--steps", 1, "--ema", 0.9, "--output", tmp_path / "run", nproc=0)
    assert done.returncode == 0, done.stderr


def use_own_data(project: Path) -> None:
    """Follow the tutorial own_data.md, with the array data of classification."""
    page = (ROOT / "docs" / "tutorials" / "own_data.md").read_text(encoding="utf-8")
    code = re.search(r"### Classification\n.*?```python\n(.*?)```", page, re.DOTALL)[1]
    flags = re.search(r"^FLAGS: .*\n", page, re.MULTILINE)[0]
    with (project / "task.py").open("a", encoding="utf-8") as file:
        file.write(f"\n\n{code}")  # its read_datasets replaces the one above
    replace(project / "tests" / "test_task.py", ("FLAGS: tuple[str, ...] = ()\n", flags))
    folder = project / "tests" / "data"
    folder.mkdir()
    random = np.random.default_rng(0)
    for name, count in ("train", 128), ("val", 16):
        images = random.integers(256, size=(count, 32, 32, 3), dtype=np.uint8)
        np.savez(folder / f"{name}.npz", images=images, labels=random.integers(2, size=count))


def select_lowest_loss(project: Path) -> None:
    replace(
        project / "task.py",
        ('METRIC = "val_accuracy"', 'METRIC = "val_loss"'),
        ('METRIC_MODE = "max"', 'METRIC_MODE = "min"'),
    )


@pytest.mark.weekly
@pytest.mark.parametrize(
    "edit",
    [
        turn_into_regression,
        add_auxiliary_loss,
        use_timm,
        use_plain_module,
        use_own_data,
        select_lowest_loss,
    ],
)
def test_owner_tests_pass_after_an_edit(bake, edit):
    project = bake()
    edit(project)
    done = run_tests(project)
    assert done.returncode == 0, done.stdout + done.stderr


def ignore_targets(project: Path) -> None:
    replace(
        project / "task.py",
        (
            "return F.cross_entropy(output, labels,",
            "return F.cross_entropy(output, labels * 0,",
        ),
    )


def keep_metrics_at_reset(project: Path) -> None:
    replace(project / "task.py", ("        self.totals.zero_()\n", "        pass\n"))


def augment_validation(project: Path) -> None:
    replace(project / "task.py", ("if train else v2.Identity()", "if True else v2.Identity()"))


def select_lowest_accuracy(project: Path) -> None:
    replace(project / "task.py", ('METRIC_MODE = "max"', 'METRIC_MODE = "min"'))


def misspell_metric(project: Path) -> None:
    replace(project / "task.py", ('METRIC = "val_accuracy"', 'METRIC = "val_acuracy"'))


def name_accuracy_loss(project: Path) -> None:
    select_lowest_loss(project)
    replace(project / "task.py", ('"val_accuracy": correct / count', '"val_loss": correct / count'))


def skip_the_step(project: Path) -> None:
    """Statistics of batch norm still change."""
    replace(project / "main.py", ("    run.optimizer.step()  #", "    #"))


def resume_nothing(project: Path) -> None:
    path = project / "main.py"
    source, count = re.subn(
        r"= [\w.]+\.resume\(.*\)\n", "= None\n", path.read_text(encoding="utf-8")
    )
    assert count == 1
    path.write_text(source, encoding="utf-8")


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("error", "file", "expected"),
    [
        (ignore_targets, "test_task", "test_loss_depends_on_the_targets"),
        (keep_metrics_at_reset, "test_task", "test_metrics_do_not_depend_on_the_batches"),
        (augment_validation, "test_task", "test_validation_samples_are_not_augmented"),
        (select_lowest_accuracy, "test_task", "test_training_on_one_batch_improves_the_metric"),
        (misspell_metric, "test_task", "test_metrics_do_not_depend_on_the_batches"),
        (name_accuracy_loss, "test_task", "test_training_on_one_batch_improves_the_metric"),
        (resume_nothing, "test_training", "test_resume_is_bit_identical"),
        (skip_the_step, "test_training", "test_training_changes_the_weights"),
    ],
)
def test_owner_tests_fail_after_an_error(bake, error, file, expected):
    project = bake()
    error(project)
    done = run_tests(project, f"tests/{file}.py")
    assert done.returncode == 1, done.stdout + done.stderr
    assert expected in failed_tests(done)


SHUFFLED = '''

class Shuffled(nn.Linear):
    """Linear layer of permuted inputs, whose order is in no checkpoint, as in public flows."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.order = np.random.permutation(sizes[0])
        print("order", *self.order)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs[:, self.order])
'''


def test_random_numbers_that_a_model_keeps_are_those_of_the_training_in_predict_py(bake, tmp_path):
    project = bake()
    layers = "nn.AdaptiveAvgPool2d(4), nn.Flatten(), Shuffled(48, num_classes)"
    replace_model(project, f"nn.Sequential({layers})", "import numpy as np\n")
    with (project / "task.py").open("a", encoding="utf-8") as file:
        file.write(SHUFFLED)
    first = "    spec = ImageSpec("  # of read_datasets, which may draw some, too
    replace(project / "task.py", (first, f"    np.random.rand()\n{first}"))
    flags = ("--steps", 1, "--seed", 7, "--output", tmp_path)
    trained = run(project, *flags, nproc=0).stdout
    picture = tmp_path / "a.png"
    Image.new("RGB", (8, 8)).save(picture)
    predicted = run_script(project, "predict.py", tmp_path / "best.pt", picture, variables=SCREENED)
    orders = [
        {line for line in text.splitlines() if line.startswith("order")}
        for text in (trained, predicted.stdout)
    ]
    assert len(orders[0]) == 1 and orders[0] == orders[1]


DRAWS = """
print("drawn", *{"bat", "cat", "dog", "eel"}, np.random.rand(), random.random(), torch.rand(1))
"""


def test_sets_and_random_numbers_at_the_import_of_task_py_are_the_same_in_all_programs(bake):
    project = bake()
    source = (project / "task.py").read_text(encoding="utf-8")
    source = source.replace(
        "import torch\n", "import random\n\nimport numpy as np\nimport torch\n", 1
    )
    (project / "task.py").write_text(source + DRAWS, encoding="utf-8")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    lines = set()
    for script in ("main.py", "predict.py"):
        command = [sys.executable, script, "--help"]
        done = subprocess.run(command, cwd=project, env=variables, capture_output=True, text=True)
        lines.add(re.search("^drawn.*", done.stdout, re.MULTILINE)[0])
    assert len(lines) == 1
