"""Commands of the generated READMEs, run unchanged except for fewer steps.

tests/clusters has the commands for several machines, SLURM, Kubernetes and Docker, tests/training
those for the owner's data, and test_commands.py those of the documentation.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torchvision
from PIL import Image
from running import SCREENED

pytestmark = [pytest.mark.weekly, pytest.mark.xdist_group("train")]
# Without a GPU these end with an error message. --compile takes minutes; tests/training has it.
FOR_GPUS = ("--decode gpu", "--cuda-graphs")
ELSEWHERE = ("--compile", "--tracker tensorboard mlflow")  # MLflow is not installed
NO_TRAINING = (
    *("--help", "--check", "--print-config", "--eval-only", "--resume auto"),
    *("predict.py", "engine.monitoring.curves", "engine.data.verify"),
)
WEIGHTS = {"classification": "resnet18", "segmentation": "lraspp_mobilenet_v3_large"}


def commands(project: Path) -> list[str]:
    """Return the commands for this folder in the README's backticks and code blocks."""
    text = (project / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"`([^`\n]+)`", text) + re.findall(r"^    (\S[^#\n]*)", text, re.MULTILINE)
    is_command = re.compile(
        r"([A-Z_]+=\S+ )*(\./run\.sh|python -m engine[.\w]+|python predict\.py)( |$)"
    )
    unique = {command.strip() for command in found if is_command.match(command)}
    return sorted(command for command in unique if "NNODES=" not in command)


def trains(line: str) -> bool:
    """Return whether a command trains a run, for which `failures` selects a folder of its own."""
    return "./run.sh" in line and not any(word in line for word in NO_TRAINING)


def execute(project: Path, command: str, **variables: str) -> subprocess.CompletedProcess:
    folder = os.path.dirname(sys.executable)
    env = SCREENED | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"} | variables
    return subprocess.run(
        ["sh", "-euc", command], cwd=project, env=env, capture_output=True, text=True, timeout=300
    )


def save_old_checkpoint(source: Path, path: Path) -> None:
    """Save a checkpoint in the form that Apex's documentation shows."""
    state = torch.load(source, weights_only=True)
    model = {f"module.{name}": value for name, value in state["model"].items()}
    torch.save({"model": model, "optimizer": state["optimizer"], "amp": state["amp"]}, path)


@pytest.fixture(scope="module")
def project(bake):
    """The default project after the README's first three commands."""
    project = bake()
    text = (project / "README.md").read_text(encoding="utf-8")
    lines = re.search(r"## Run it\n\n((?:    .*\n)+)", text)[1]
    assert lines.split("\n")[-2].strip() == "./run.sh"
    # The dependencies, gigabytes, are installed already.
    variables = {"PIP_NO_DEPS": "1", "PYTHONPATH": sysconfig.get_path("purelib"), "PYTHON": ""}
    done = execute(project, lines.replace("./run.sh", "./run.sh --epochs 2"), **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "best val_accuracy 0." in done.stdout
    return project


def failures(project: Path, lines: list[str], images: Path, hub: Path) -> list[str]:
    """Return the output of the commands that fail; run one on each core at a time."""

    def failure(number: int, line: str) -> str | None:
        output = f"runs/{number}"
        command = re.sub(r"\b(DIR|FILES_OR_FOLDERS|IMAGENET)\b", str(images), line)
        if "--epochs" in line:
            command += " --epochs 3 --output runs/a"
        if "--check" in line and "--data" in line:
            command += " --batch-size 4"  # of 24 images
        if trains(line):
            small = " --batch-size 4" if "--data" in line or "deeplab" in line else ""
            command += f"{small} --steps 1 --output {output}"
        done = execute(project, command, NPROC="1", TORCH_HOME=str(hub))
        if any(flag in line for flag in FOR_GPUS):
            fine = done.returncode == 2 and "this run is on the CPU" in done.stderr
        else:
            fine = done.returncode == 0 and not (
                trains(line) and not (project / output / "last.pt").exists()
            )
        return None if fine else f"{command}\n{done.stdout}{done.stderr}"

    lines = [line for line in lines if not any(flag in line for flag in ELSEWHERE)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return [output for output in pool.map(failure, range(len(lines)), lines) if output]


def test_readme_commands_work(project, image_folder, tmp_path):
    (run,) = (project / "runs").iterdir()
    for name in ("a", "b"):
        shutil.copytree(run, run.with_name(name))
    hub = fill_hub(tmp_path, "classification")
    lines = commands(project)
    assert len(lines) > 15
    assert not failures(project, lines, image_folder, hub)
    assert (project / "compare.png").exists()


@pytest.mark.parametrize("task", ["segmentation"])  # contrastive has no others
def test_readme_commands_of_other_tasks_work(bake, tmp_path, task):
    other = bake(task=task)
    lines = [line for line in commands(other) if "--weights" in line]
    assert len(lines) == 1
    lines = [f"{line} --arch {WEIGHTS[task]}" for line in lines]  # faster than the default
    data = tmp_path / "data"
    for split in ("training", "validation"):
        for kind, mode in (("images", "RGB"), ("annotations", "L")):
            (data / kind / split).mkdir(parents=True)
            for number in range(4):
                image = Image.new(mode, (64, 64), number % 2)
                image.save(data / kind / split / f"{number}.png")
    (data / "classes.txt").write_text("background\nleaf\n")
    assert not failures(other, lines, data, fill_hub(tmp_path, task))


def fill_hub(folder: Path, task: str) -> Path:
    """Return a TORCH_HOME that holds a file for the weights named DEFAULT."""
    arch = WEIGHTS.get(task, "resnet18")
    weights = torchvision.models.get_model_weights(arch).DEFAULT
    options = {"weights_backbone": None} if task == "segmentation" else {}
    model = torchvision.models.get_model(arch, **options)
    path = folder / "hub" / "checkpoints" / weights.url.rpartition("/")[2]
    path.parent.mkdir(parents=True)
    torch.save(model.state_dict(), path)
    return folder


def test_tensorboard_command_shows_the_run(project, tmp_path):
    text = (project / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall("`(tensorboard [^`]*)`", text)
    folder = os.path.dirname(sys.executable)
    with (tmp_path / "log").open("w+") as log:
        board = subprocess.Popen(
            [f"{folder}/{command.split()[0]}", *command.split()[1:], "--port=0"],
            cwd=project,
            stdout=log,
            stderr=log,
        )
        try:
            deadline = time.monotonic() + 60
            while not (address := re.search(r"http://\S+", Path(log.name).read_text())):
                assert time.monotonic() < deadline, Path(log.name).read_text()
                time.sleep(0.2)
            with urllib.request.urlopen(f"{address[0]}data/plugin/scalars/tags") as answer:
                tags = answer.read().decode()
        finally:
            board.kill()
            board.wait()
    assert "epoch/val_accuracy" in tags
