"""The default project from answers to accuracy, and started in every way that people start it."""

import ast
import copy
import csv
import json
import re
import shutil
import subprocess
import sys
from collections import OrderedDict

import numpy as np
import pytest
import torch
from fresh import ROOT
from PIL import Image
from running import (
    SCREENED,
    best,
    best_accuracy,
    metrics,
    predict,
    predicted_accuracy,
    run,
    run_script,
    run_two,
)

pytestmark = pytest.mark.xdist_group("train")
SHORT = ("--arch", "shufflenet_v2_x0_5", "--steps", 3)
LIGHT = ("--arch", "squeezenet1_1", "--batch-size", 64)  # for whole epochs
IN_SHORT = {
    "segmentation": (("--epochs", 5, "--lr", 3e-3), "val_miou", 0.8),
    "contrastive": (("--epochs", 3, "--text-lr", 5e-4), "val_recall_at_1", 0.9),
}
"""For each task, flags with which it learns in few epochs, and what it reaches."""


@pytest.fixture(scope="module")
def project(bake):
    return bake()


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("flags", "goal"),
    [pytest.param((), 0.97, id="default"), pytest.param(("--epochs", 3), 0.9, id="short")],
)
def test_training_reaches_the_accuracy(project, tmp_path, flags, goal):
    done = run(project, "--output", tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    assert best_accuracy(tmp_path) >= goal
    rows = metrics(tmp_path)
    assert [row["epoch"] for row in rows] == list(range(1, len(rows) + 1))
    # The end says the best accuracy and where the files are.
    assert f"{best_accuracy(tmp_path):.4f}" in done.stdout.splitlines()[-1]
    assert str(tmp_path) in done.stdout.splitlines()[-1]
    assert {"last.pt", "best.pt", "metrics.csv", "config.json", "curves.png"} <= {
        path.name for path in tmp_path.iterdir()
    }
    assert len(list((tmp_path / "validation").glob("epoch_*.png"))) == len(rows)
    found = predicted_accuracy(project, tmp_path / "best.pt", tmp_path / "png", "0123456789")
    assert found == pytest.approx(best_accuracy(tmp_path), abs=0.01)


WRITE_CANVASES = """
import sys, task
from pathlib import Path
from fresh import ROOT
from PIL import Image
for kind in ("images", "masks"):
    Path(sys.argv[1], kind).mkdir(parents=True)
canvases = task.Digits(train=False)
for number in range(len(canvases)):
    image, mask = canvases[number]
    Image.fromarray(image[0].numpy()).save(Path(sys.argv[1], "images", f"{number}.png"))
    Image.fromarray(mask.numpy()).save(Path(sys.argv[1], "masks", f"{number}.png"))
"""


@pytest.mark.weekly
def test_segmentation_training_reaches_the_goal(bake, tmp_path):
    project, (flags, metric, goal) = bake(task="segmentation"), IN_SHORT["segmentation"]
    done = run_two(project, *flags, "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    assert best(tmp_path, metric) >= goal
    shown = {path.name for path in (tmp_path / "validation").iterdir()}
    assert shown == {f"epoch_{epoch:03}.{kind}" for epoch in range(1, 6) for kind in ("csv", "png")}
    with (tmp_path / "validation" / "epoch_005.csv").open() as file:
        ious = [float(row["iou"]) for row in csv.DictReader(file)]
    assert len(ious) == 11
    assert sum(ious) / 11 == pytest.approx(metrics(tmp_path)[-1][metric])
    # predict.py makes the same masks of files.
    truth, masks = tmp_path / "truth", tmp_path / "predicted" / "masks"
    (tmp_path / "write.py").write_text(WRITE_CANVASES)
    assert run_script(project, tmp_path / "write.py", truth, variables=SCREENED).returncode == 0
    predict(project, tmp_path / "best.pt", truth / "images", "--output", masks.parent)
    confusion = np.zeros((11, 11))
    for path in (truth / "masks").iterdir():
        pair = (np.array(Image.open(file)) for file in (path, masks / path.name))
        np.add.at(confusion, tuple(pair), 1)
    hits = confusion.diagonal()
    iou = np.mean(hits / (confusion.sum(0) + confusion.sum(1) - hits))
    assert iou == pytest.approx(best(tmp_path, metric), abs=0.01)  # which was in half
    # --eval-only shows what it validates.
    flags = ("--eval-only", "--resume", tmp_path / "last.pt", "--output", tmp_path / "eval")
    done = run(project, *flags, nproc=0)
    assert done.returncode == 0, done.stderr
    shown, last = tmp_path / "eval" / "validation", tmp_path / "validation" / "epoch_005"
    assert {path.name for path in shown.iterdir()} == {"eval_only.csv", "eval_only.png"}
    with Image.open(shown / "eval_only.png") as one, Image.open(last.with_suffix(".png")) as two:
        assert one.tobytes() == two.tobytes()


@pytest.mark.weekly
def test_contrastive_training_reaches_the_goal(bake, tmp_path):
    project = bake(task="contrastive")
    flags, metric, goal = IN_SHORT["contrastive"]
    flags += ("--output", tmp_path)
    done = run_two(project, *flags)
    assert done.returncode == 0, done.stderr
    assert best(tmp_path, metric) >= goal
    state = torch.load(tmp_path / "last.pt", weights_only=True)
    parts = {name.partition(".")[0] for name in state["model"]}
    assert parts == {"image_encoder", "text_encoder"}
    image_lr, text_lr = (group["lr"] for group in state["optimizer"]["param_groups"])
    assert text_lr == pytest.approx(image_lr / 2)  # --lr is twice this --text-lr
    last = metrics(tmp_path)[-1]
    done = run(project, *flags, "--eval-only", "--resume", tmp_path / "last.pt", nproc=0)
    assert f"{metric} {last[metric]:.4f}" in done.stdout
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    found = predicted_accuracy(project, tmp_path / "best.pt", tmp_path / "png", names)
    assert found == pytest.approx(best(tmp_path, metric), abs=0.01)


@pytest.mark.weekly
def test_dataparallel_runs_in_one_process(bake, tmp_path):
    project = bake(ddp="dataparallel", sync_bn=False)
    variables = {name: value for name, value in SCREENED.items() if name != "NPROC"}
    flags = (*map(str, SHORT), "--output", tmp_path)
    done = subprocess.run(
        [project / "run.sh", *flags], env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 process on the CPU")
    done = run_two(project, *flags)
    assert done.returncode == 2
    assert "DataParallel is one process for all GPUs, not 2: use NPROC=1" in done.stderr
    done = run(project, *flags, "--check", nproc=0)
    assert done.returncode == 0, done.stdout  # with other flags than the other projects have


@pytest.mark.weekly
@pytest.mark.parametrize("task", IN_SHORT)
def test_other_tasks_reach_the_goal_at_o2(bake, tmp_path, task):
    flags, metric, goal = IN_SHORT[task]
    done = run(bake(task=task), *flags, "--opt-level", "O2", "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    assert best(tmp_path, metric) >= goal


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("task", "answers"),
    [
        ("segmentation", {"fused_adam": False, "ddp": "torch"}),
        ("contrastive", {"ddp": "dataparallel", "sync_bn": False}),
    ],
)
def test_other_tasks_reach_the_goal(bake, tmp_path, task, answers):
    nproc = 1 if answers["ddp"] == "dataparallel" else 2
    done = run(bake(task=task, **answers), "--output", tmp_path, nproc=nproc)
    assert done.returncode == 0, done.stderr
    _, metric, goal = IN_SHORT[task]
    assert best(tmp_path, metric) >= goal


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])  # O4 and O5 are O1 and O2 on most CPUs
@pytest.mark.weekly
def test_every_opt_level_reaches_the_accuracy(project, tmp_path, level):
    done = run_two(project, "--opt-level", level, "--epochs", 3, "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    assert best_accuracy(tmp_path) >= 0.85


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.weekly
def test_ema_of_every_opt_level_predicts(project, tmp_path, level):
    flags = ("--opt-level", level, "--ema", 0.9, "--epochs", 1, "--warmup-epochs", 0)
    done = run(project, *flags, "--output", tmp_path, nproc=0)
    assert done.returncode == 0, done.stderr
    found = predicted_accuracy(project, tmp_path / "best.pt", tmp_path / "png", "0123456789")
    assert found == pytest.approx(best_accuracy(tmp_path), abs=0.01)


@pytest.mark.weekly
def test_sgd_with_torchs_ddp_reaches_the_accuracy(bake, tmp_path):
    done = run(bake(fused_adam=False, ddp="torch", sync_bn=False), "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    assert best_accuracy(tmp_path) >= 0.97


@pytest.mark.weekly
def test_compiled_model_trains_and_saves(project, tmp_path):
    flags = ("--arch", "squeezenet1_1", "--batch-size", 16, "--output", tmp_path)
    done = run(project, *flags, "--steps", 5, "--compile", nproc=0)
    assert done.returncode == 0, done.stderr
    assert "not counted in images/s" in done.stdout
    keys = torch.load(tmp_path / "last.pt", weights_only=True)["model"].keys()
    assert "features.0.weight" in keys
    done = run(project, *flags, "--steps", 7, "--resume", "auto", nproc=0)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "launcher",
    [
        # And --local_rank by hand; that of launch has no underscore.
        pytest.param([], id="python", marks=pytest.mark.slow),
        pytest.param(
            ["torch.distributed.run", "--nproc-per-node=2"], id="torchrun", marks=pytest.mark.slow
        ),
        pytest.param(
            ["torch.distributed.launch", "--nproc-per-node=2"],
            id="launch",
            marks=pytest.mark.weekly,
        ),
    ],
)
def test_common_launchers(project, tmp_path, launcher):
    start = ["-m", *launcher[:1], "--standalone", *launcher[1:]] if launcher else []
    flags = [*map(str, SHORT), "--output", str(tmp_path), *([] if launcher else ["--local_rank=0"])]
    done = subprocess.run(
        [sys.executable, *start, "main.py", *flags],
        cwd=project,
        env=SCREENED,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert ("2 processes" if launcher else "1 process ") in done.stdout
    assert metrics(tmp_path)[-1]["step"] == 3


@pytest.mark.slow
def test_training_on_a_folder_of_images(project, image_folder, tmp_path):
    flags = (*SHORT, "--data", image_folder, "--batch-size", 4, "--output", tmp_path)
    done = run_two(project, *flags)
    assert done.returncode == 0, done.stderr
    accuracy = metrics(tmp_path)[-1]["val_accuracy"]
    assert 10 * accuracy == pytest.approx(round(10 * accuracy))  # of ten validation images
    # --eval-only needs no training data.
    shutil.rmtree(image_folder / "train")
    flags = ("--eval-only", "--resume", tmp_path / "last.pt", "--output", tmp_path / "eval")
    done = run(project, *SHORT, "--data", image_folder, "--workers", 0, *flags, nproc=0)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "eval" / "eval.json").read_text())
    assert found["metrics"]["val_accuracy"] == pytest.approx(accuracy)
    assert found["data"] == str(image_folder)


@pytest.mark.weekly
def test_resume_with_loader_workers_is_exact(project, image_folder, tmp_path):
    small = (*SHORT[:2], "--data", image_folder, "--batch-size", 4, "--workers", 1, "--epochs", 2)
    for steps in ((6,), (3, 6)):  # at once, and with a stop after the first epoch
        for stop in steps:
            flags = ("--steps", stop, "--resume", "auto", "--output", tmp_path / str(steps))
            assert run(project, *small, *flags).returncode == 0
    (whole, resumed) = (metrics(tmp_path / str(steps)) for steps in ((6,), (3, 6)))
    for one, two in zip(whole, resumed, strict=True):
        del one["images_per_second"], two["images_per_second"]
        assert one == two


@pytest.mark.slow
def test_resume_with_another_number_of_processes(project, tmp_path):
    flags = (*LIGHT, "--output", tmp_path, "--resume", "auto", "--schedule", "none")
    flags += ("--lr", 0.001, "--scale-lr", 64, "--warmup-epochs", 0)
    assert run_two(project, *flags, "--epochs", 1).returncode == 0
    done = run(project, *flags, "--epochs", 2, nproc=0)
    assert done.returncode == 0, done.stderr
    rows = [(row["epoch"], row["step"], row["lr"]) for row in metrics(tmp_path)]
    assert rows == [(1, 11, 0.002), (2, 33, 0.001)]
    assert "2 processes saved it; the learning rate scales with them\n" in done.stdout


@pytest.mark.slow
def test_restarted_process_resumes_automatically(project, tmp_path):
    flags = (*LIGHT, "--output", tmp_path, "--epochs", 2)
    assert run_two(project, *flags, "--steps", 11).returncode == 0
    assert run(project, *flags, TORCHELASTIC_RESTART_COUNT="1", nproc=0).returncode == 0
    assert [row["epoch"] for row in metrics(tmp_path)] == [1, 2]
    # But it leaves a run of other flags alone, and validates what it is told to.
    other = run(project, *flags, "--lr", 0.5, TORCHELASTIC_RESTART_COUNT="1", nproc=0)
    assert other.returncode == 2
    assert "holds a run with lr 0.001 and not 0.5: " in other.stderr
    given = ("--eval-only", "--resume", tmp_path / "step-11.pt")
    done = run(project, *flags, *given, TORCHELASTIC_RESTART_COUNT="1", nproc=0)
    assert f"resumed {tmp_path / 'step-11.pt'} after 1 epochs" in done.stdout


WITH_PARTS = """

class WithParts(nn.Module):
    def __init__(self, arch, num_classes, build_model=build_model):
        super().__init__()
        self.module, self.head = build_model(arch, 20), nn.Linear(20, num_classes)
        self.spare = nn.Linear(2, 2)

    def forward(self, images):
        return self.head(self.module(images))


build_model = WithParts
"""
"""A model with a part called module, as DDP has one, and a part that nothing uses."""


@pytest.mark.slow
def test_submodule_named_module_and_unused_parameters(bake, tmp_path):
    project = bake()
    with (project / "task.py").open("a") as file:
        file.write(WITH_PARTS)
    done = run(project, *SHORT, "--output", tmp_path / "one", nproc=0)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("warning: no gradient reaches spare.weight, spare.bias") == 1
    saved = torch.load(tmp_path / "one" / "last.pt", weights_only=True)["model"]
    assert saved.keys() >= {"module.conv1.0.weight", "head.weight", "spare.bias"}
    flags = ("--resume", tmp_path / "one" / "last.pt", "--output", tmp_path / "two")
    done = run_two(project, *SHORT[:2], *flags)
    assert done.returncode == 2
    assert "resumed" in done.stdout
    assert "error: no gradient reaches spare.weight, spare.bias" in done.stderr


TWICE = """
import sys
sys.path.insert(0, "")  # as in a notebook
import main
main.main()
main.main()
"""


@pytest.mark.slow
def test_second_run_of_a_process_is_an_error(project, tmp_path):
    """Such as in a notebook, where the curves are drawn, too."""
    (tmp_path / "twice.py").write_text(TWICE)
    flags = (*SHORT, "--output", tmp_path / "run")
    done = run_script(project, tmp_path / "twice.py", *flags, variables=SCREENED)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "UserError: this process has trained before: start each run as a process of its" in last
    assert (tmp_path / "run" / "curves.png").exists()


@pytest.mark.slow
def test_resumed_run_uses_its_own_flags(project, tmp_path):
    assert run(project, *SHORT, "--output", tmp_path / "a", nproc=0).returncode == 0
    flags = ("--resume", tmp_path / "a" / "last.pt", "--weight-decay", "0.5")
    flags = (*SHORT[:2], *flags, "--steps", 4, "--output", tmp_path / "b")
    assert run(project, *flags, nproc=0).returncode == 0
    state = torch.load(tmp_path / "b" / "last.pt", weights_only=True)
    assert state["optimizer"]["param_groups"][0]["weight_decay"] == 0.5


# A checkpoint of another script

EPOCHS = (*SHORT[:2], "--batch-size", 512, "--epochs", 3)  # of two steps each


def in_apexs_form(state, prefix=""):
    """What a script for real Apex would have saved in the place of `state`."""
    for moments in state["optimizer"]["state"].values():
        moments.pop("step", None)  # FusedAdam has one for each group
    weights = OrderedDict((prefix + name, tensor) for name, tensor in state["model"].items())
    parts = {name: state[name] for name in ("epoch", "optimizer", "amp")}
    return {"arch": "shufflenet", "best_acc1": torch.tensor(10.0), "model": weights, **parts}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(True, id="FusedAdam"),
        pytest.param(False, id="SGD", marks=pytest.mark.slow),
    ],
)
def epochs(request, bake, tmp_path_factory):
    """A project, its checkpoint after one epoch, and the one to which that leads after two."""
    project, folder = bake(fused_adam=request.param), tmp_path_factory.mktemp("epochs")
    first, second = folder / "first", folder / "second"
    assert run_on_cpu(project, *EPOCHS, "--steps", 2, "--output", first).returncode == 0
    flags = ("--steps", 4, "--resume", first / "last.pt", "--output", second)
    assert run_on_cpu(project, *EPOCHS, *flags).returncode == 0
    return project, *(torch.load(path / "last.pt", weights_only=True) for path in (first, second))


def run_on_cpu(project, *flags):
    """One process that computes the same each time."""
    return run(project, *flags, nproc=0, CUDA_VISIBLE_DEVICES="")


@pytest.mark.slow
def test_checkpoint_of_another_script_resumes(epochs, tmp_path):
    project, first, second = epochs
    old, is_adam = tmp_path / "old.pt", "betas" in first["optimizer"]["param_groups"][0]
    prefix = "module." if is_adam else ""  # as old scripts with and without DDP's
    torch.save(in_apexs_form(copy.deepcopy(first), prefix), old)
    done = run_on_cpu(project, *EPOCHS, "--steps", 4, "--resume", old, "--output", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert (
        f"resumed {old} after 1 epochs, 2 steps, a checkpoint of another script: "
        "its weights, optimizer, loss scale, epoch\n"
    ) in done.stdout
    state = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    torch.testing.assert_close(state["model"], second["model"], rtol=0, atol=0)
    torch.testing.assert_close(
        state["optimizer"]["state"], second["optimizer"]["state"], rtol=0, atol=0
    )
    for name in ("amp", "epoch", "step"):
        assert state[name] == second[name]


@pytest.mark.slow
def test_missing_state_of_another_script_is_logged(epochs, tmp_path):
    project, first, _ = epochs
    old = tmp_path / "old.pt"
    torch.save({name: first[name] for name in ("model", "optimizer")}, old)
    done = run_on_cpu(project, *EPOCHS, "--resume", old, "--eval-only")
    assert done.returncode == 0, done.stderr
    assert (
        f"resumed {old} after 0 epochs, 0 steps, a checkpoint of another script: "
        "its weights, optimizer; it has no loss scale and no epoch\n"
    ) in done.stdout


@pytest.mark.parametrize("task", ["classification", "segmentation", "contrastive"])
def test_task_contract_is_documented(bake, task):
    project = bake(task=task)
    scripts = "".join((project / name).read_text() for name in ("main.py", "predict.py"))
    asked = set(re.findall(r"\btask\.(?!py\b)(\w+)", scripts))
    page = (ROOT / "docs" / "reference" / "task.md").read_text(encoding="utf-8")
    block = page.split("```python")[-1].split("```")[0]
    (other,) = re.findall(r"In contrastive projects, it is `(build_model\(.*\))`", page)
    if task == "contrastive":
        block = re.sub(r"build_model\(.*?\)", other, block)
    assert set(re.findall(r"^(?:def |class )?(\w+)", block, re.MULTILINE)) == asked
    described, there = signatures(block), signatures((project / "task.py").read_text())
    assert {"criterion", "show", "Metrics.__init__", "Predictor.__call__"} <= described.keys()
    for name in described.keys() & there.keys():
        count = len(described[name])
        assert described[name] == there[name][:count], name
        assert all(has_default for _, has_default in there[name][count:]), name


def signatures(source):
    """The parameters of functions and methods: {name: [(parameter, whether it has a default)]}."""
    found = {}
    for node in ast.parse(source).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for function in inside:
            if isinstance(function, ast.FunctionDef):
                names = [argument.arg for argument in function.args.args]
                first_default = len(names) - len(function.args.defaults)
                pairs = [(name, index >= first_default) for index, name in enumerate(names)]
                found[prefix + function.name] = pairs
    return found


@pytest.mark.slow
def test_dummy_data_needs_no_files(project, tmp_path):
    (project / "data" / "digits.npz").rename(tmp_path / "digits.npz")
    try:
        done = run(project, "--dummy", *SHORT, "--batch-size", 2, "--output", tmp_path, nproc=0)
    finally:
        (tmp_path / "digits.npz").rename(project / "data" / "digits.npz")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_report_of_a_run_and_of_a_checkpoint(project, tmp_path):
    """Both are of the whole validation set, in one process and in two."""
    assert run_two(project, *SHORT, "--report", "--output", tmp_path / "run").returncode == 0
    flags = ("--eval-only", "--report", "--resume", tmp_path / "run" / "last.pt")
    done = run(project, *SHORT, *flags, "--output", tmp_path / "eval", nproc=0)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "eval" / "eval.json").read_text())["metrics"]
    last = metrics(tmp_path / "run")[-1]
    labels = np.load(project / "data" / "digits.npz")["labels"][::5]
    for folder, results in (("run", last), ("eval", found)):
        assert results["val_top5_accuracy"] > results["val_accuracy"]
        with (tmp_path / folder / "class_report.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [row["class"] for row in rows] == list("0123456789")
        assert [int(row["samples"]) for row in rows] == np.bincount(labels).tolist()
        correct = sum(int(row["correct"]) for row in rows)
        assert correct / len(labels) == pytest.approx(results["val_accuracy"])
        with Image.open(tmp_path / folder / "confusion_matrix.png") as picture:
            assert min(picture.size) > 500
        assert (tmp_path / folder / "confusion_matrix.csv").exists()


@pytest.mark.slow
def test_checkpoint_can_be_evaluated_and_loaded_into_plain_torch(project, tmp_path):
    assert run_two(project, *SHORT, "--output", tmp_path).returncode == 0
    done = run(project, *SHORT, "--eval-only", "--resume", tmp_path / "last.pt", nproc=0)
    last = metrics(tmp_path)[-1]
    assert f"val_accuracy {last['val_accuracy']:.4f}" in done.stdout
    # It writes to the checkpoint's folder.
    found = json.loads((tmp_path / "eval.json").read_text())
    assert found["checkpoint"] == str(tmp_path / "last.pt")
    assert found["metrics"] == pytest.approx(
        {name: last[name] for name in found["metrics"]}, rel=0.01
    )
    assert (tmp_path / "validation" / "eval_only.png").exists()
    from torchvision.models import shufflenet_v2_x0_5

    state = torch.load(tmp_path / "last.pt", weights_only=True)
    shufflenet_v2_x0_5(num_classes=10).load_state_dict(state["model"])
