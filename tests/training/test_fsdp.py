"""Projects with ddp fsdp: training, checkpoints, resumption on other numbers of processes."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from running import SCREENED, Run, metrics, run, run_script
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformer import with_transformer

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("train")]
SHORT = ("--batch-size", 16, "--save-every", 2, "--keep", 9, "--clip-grad", 1.0)


@pytest.fixture(scope="module")
def sharded(bake, tmp_path_factory):
    project = bake(ddp="fsdp", opt_level="O0", sync_bn=False)
    return with_transformer(project, tmp_path_factory.mktemp("fsdp") / "project")


@pytest.fixture(scope="module")
def plain(bake, tmp_path_factory):
    project = bake(ddp="torch", opt_level="O0", sync_bn=False)
    return with_transformer(project, tmp_path_factory.mktemp("ddp") / "project")


def train(project, output, *flags, nproc=2, **variables):
    variables = {"CUDA_VISIBLE_DEVICES": ""} | variables
    done = run(project, *SHORT, "--output", output, *flags, nproc=nproc, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def load(project, path):
    """Return the entries of a checkpoint after its conversion into a file."""
    file = path.parent / f"{path.name}.whole.pt"
    command = [sys.executable, "-m", "engine.checkpoint.consolidate", str(path), str(file)]
    done = subprocess.run(command, cwd=project, env=SCREENED, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.load(file, weights_only=True)


@pytest.fixture(scope="module")
def trained(sharded, tmp_path_factory):
    """The folder of a run of six steps on two processes, with an average."""
    output = tmp_path_factory.mktemp("trained")
    train(sharded, output, "--steps", 6, "--deterministic", "--ema", 0.9)
    return output


@pytest.mark.weekly  # it compiles a ResNet's blocks by the C++ compiler, for five to ten minutes
def test_blocks_of_other_widths_are_compiled(bake, tmp_path):
    """With dynamic shapes, torch 2.15 can't compile the backward pass of a ResNet's."""
    project = bake(ddp="fsdp", opt_level="O0", sync_bn=False)
    flags = ("--compile", "--arch", "resnet18", "--steps", 1, "--batch-size", 8, "--workers", 0)
    done = run(project, *flags, "--output", tmp_path, nproc=2, timeout=900, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "recompile_limit" not in done.stderr


def test_a_model_that_the_meta_device_can_not_build_is_trained(bake, tmp_path):
    project = bake(ddp="fsdp", opt_level="O0", sync_bn=False)
    flags = ("--arch", "regnet_y_400mf", "--steps", 1, "--batch-size", 4, "--workers", 0)
    done = run(project, *flags, "--output", tmp_path, nproc=2, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr


def test_losses_and_metrics_equal_those_of_ddp(sharded, plain, tmp_path):
    flags = ("--steps", 30, "--accumulate", 2, "--lr", 3e-3, "--warmup-epochs", 0)
    for project, name in ((sharded, "sharded"), (plain, "plain")):
        train(project, tmp_path / name, *flags)
    found, expected = (metrics(tmp_path / name)[-1] for name in ("sharded", "plain"))
    for name in ("train_loss", "val_loss", "val_accuracy"):
        assert found[name] == pytest.approx(expected[name], abs=2e-3), name
    pictures = {path.name for path in (tmp_path / "sharded" / "validation").iterdir()}
    assert pictures == {"epoch_001.png", "epoch_002.png"}


def test_checkpoint_is_a_folder_with_a_manifest(trained):
    names = {path.name for path in (trained / "step-6").iterdir()}
    tensors = {".metadata", "index.json", "__0_0.distcp", "__1_0.distcp"}
    assert names == {"manifest.json", "state.pt"} | tensors
    assert (trained / "last").resolve() == (trained / "step-6").resolve()
    assert (trained / "best").resolve() == (trained / "step-6").resolve()
    assert not list(trained.glob("*.tmp")) and not list(trained.glob("*.pt"))


def test_converted_checkpoint_is_that_of_ddp(plain, trained, tmp_path):
    train(plain, tmp_path, "--steps", 2, "--ema", 0.9)
    expected = torch.load(tmp_path / "last.pt", weights_only=True)
    found = load(plain, trained / "last")
    assert found.keys() >= expected.keys()
    for part in ("model", "ema"):
        assert {name: value.shape for name, value in found[part].items()} == {
            name: value.shape for name, value in expected[part].items()
        }
    assert found["optimizer"]["state"].keys() == expected["optimizer"]["state"].keys()
    assert len(found["ranks"]) == 2 and found["results"]


def test_predict_reads_the_folder_and_the_file(sharded, trained):
    load(sharded, trained / "best")
    image = sharded / "data" / "example.png"
    outputs = []
    for checkpoint in (trained / "best", trained / "best.whole.pt"):
        done = run_script(sharded, "predict.py", checkpoint, image, "--json", variables=SCREENED)
        assert done.returncode == 0, done.stderr
        outputs.append(json.loads(done.stdout)["found"])
    assert outputs[0] == outputs[1] and len(outputs[0]) == 5


def test_resume_is_bit_identical(sharded, trained, tmp_path):
    flags = ("--deterministic", "--ema", 0.9)
    train(sharded, tmp_path, "--steps", 4, *flags)
    said = train(sharded, tmp_path, "--steps", 6, "--resume", "auto", *flags)
    assert re.search(r"resumed \S+step-4|resumed \S+last", said)
    assert_bit_identical(sharded, tmp_path, trained)


def assert_bit_identical(project, output, whole):
    found, expected = load(project, output / "last"), load(project, whole / "last")
    assert found["step"] == expected["step"]
    for part in ("model", "ema"):
        assert all(found[part][name].equal(expected[part][name]) for name in expected[part])
    for index, state in expected["optimizer"]["state"].items():
        assert all(found["optimizer"]["state"][index][k].equal(v) for k, v in state.items())


@pytest.mark.weekly
def test_resume_on_other_numbers_of_processes(sharded, tmp_path):
    train(sharded, tmp_path, "--steps", 2, nproc=4)
    said = train(sharded, tmp_path, "--steps", 4, "--resume", "auto", nproc=2)
    assert "not bit-identical: 4 processes saved it" in said
    said = train(sharded, tmp_path, "--steps", 6, "--resume", "auto", nproc=3)
    assert "not bit-identical: 2 processes saved it" in said
    files = {path.name for path in (tmp_path / "step-6").glob("*.distcp")}
    assert files == {"__0_0.distcp", "__1_0.distcp", "__2_0.distcp"}
    assert load(sharded, tmp_path / "last")["step"] == 6


@pytest.mark.weekly
def test_ddp_and_fsdp_continue_each_other(sharded, plain, tmp_path):
    train(plain, tmp_path / "whole", "--steps", 6, "--deterministic")
    output = tmp_path / "mixed"
    train(plain, output, "--steps", 2, "--deterministic")
    said = train(sharded, output, "--steps", 4, "--resume", "auto", "--deterministic")
    assert re.search(r"resumed \S+\.pt after", said)
    said = train(plain, output, "--steps", 6, "--resume", "auto", "--deterministic")
    assert re.search(r"resumed \S+(step-4|last) after", said)
    assert (output / "last.pt").exists() and not (output / "last").exists()
    expected = torch.load(tmp_path / "whole" / "last.pt", weights_only=True)["model"]
    found = torch.load(output / "last.pt", weights_only=True)["model"]
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-4)


@pytest.mark.weekly
@pytest.mark.parametrize("seed", range(3))
def test_kills_during_saves_are_bit_identical(sharded, trained, tmp_path, seed):
    """Each kill leaves the checkpoint before it, or the complete new one."""
    chance = random.Random(seed)
    flags = ("--deterministic", "--ema", 0.9, "--save-every", 1, "--resume", "auto")
    for least in (0, 2):  # steps that are saved before the kill
        with Run(
            sharded, *SHORT, "--output", tmp_path, "--steps", 6, *flags, CUDA_VISIBLE_DEVICES=""
        ) as victim:
            deadline = time.monotonic() + 200
            while (saving(tmp_path) or 0) <= least:
                assert victim.process.poll() is None and time.monotonic() < deadline, victim.said
                time.sleep(0.0005)
            time.sleep(chance.uniform(0, 0.1))
            os.killpg(victim.process.pid, signal.SIGKILL)
        complete = [path for path in tmp_path.glob("step-*") if path.suffix == ""]
        assert all((path / "manifest.json").exists() for path in complete)
    last = max(int(path.name[5:]) for path in complete)
    said = train(sharded, tmp_path, "--steps", 6, *flags)
    assert f", {last} steps" in said and "trying the one before" not in said
    assert not list(tmp_path.glob("*.tmp"))
    assert_bit_identical(sharded, tmp_path, trained)


def saving(output):
    """Return the step of which a checkpoint is being written."""
    names = [path.stem[5:] for path in output.glob("step-*.tmp")]  # or of one being removed
    return max((int(name) for name in names if name.isdecimal()), default=None)


def test_tensorboard_gets_the_losses_once(trained):
    """From rank 0, and those of all steps that are logged."""
    files = list(trained.glob("**/events.*"))
    events = EventAccumulator(str(files[0].parent)).Reload()
    assert len(files) == 1
    losses = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"] if "loss" in tag}
    assert losses
    for points in losses.values():
        steps = [point.step for point in points]
        assert len(steps) == len(set(steps))


@pytest.mark.weekly
def test_contrastive_task_resumes_bit_identically(bake, tmp_path):
    project = bake(task="contrastive", ddp="fsdp", opt_level="O0", sync_bn=False)
    flags = ("--deterministic", "--ema", 0.9)
    train(project, tmp_path / "whole", "--steps", 4, *flags)
    train(project, tmp_path / "resumed", "--steps", 2, *flags)
    train(project, tmp_path / "resumed", "--steps", 4, "--resume", "auto", *flags)
    assert_bit_identical(project, tmp_path / "resumed", tmp_path / "whole")
    parts = {name.partition(".")[0] for name in load(project, tmp_path / "whole" / "last")["model"]}
    assert parts == {"image_encoder", "text_encoder"}


@pytest.mark.slow
def test_contrastive_task_validates_in_bfloat16(bake, tmp_path):
    """Its picture is of the outputs of the whole model, which casts their inputs."""
    project = bake(task="contrastive", ddp="fsdp", opt_level="O5", sync_bn=False)
    train(project, tmp_path / "run", "--epochs", 1, "--steps", 2)
    assert (tmp_path / "run" / "validation" / "epoch_001.png").exists()


def copy_run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "corrupted shard": (lambda folder: flip(folder / "__1_0.distcp"), "__1_0.distcp is torn"),
    "missing shard": (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp can't be"),
    "missing manifest": (lambda folder: (folder / "manifest.json").unlink(), "no valid manifest"),
    "other manifest": (
        lambda folder: shutil.copy(folder.parent / "step-2" / "manifest.json", folder),
        "is torn or altered|that of another checkpoint",
    ),
    "other state": (
        lambda folder: shutil.copy(folder.parent / "step-2" / "state.pt", folder),
        "manifest.json is that of another checkpoint",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_an_error_and_auto_falls_back(sharded, trained, tmp_path, damage):
    harm, message = DAMAGES[damage]
    output = copy_run(trained, tmp_path)
    harm(output / "step-6")
    flags = ("--output", output, "--batch-size", 16, "--steps", 6, "--ema", 0.9)
    done = run_script(sharded, "main.py", *flags, "--resume", output / "step-6", variables=SCREENED)
    assert done.returncode == 2
    assert re.search(message, done.stderr) and "Traceback" not in done.stderr
    done = run_script(
        sharded, "main.py", *flags, "--resume", "auto", "--eval-only", variables=SCREENED
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert re.search(message, said) and "trying the one before it" in said
    assert re.search(r"resumed \S+step-4 after", said)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--opt-level", "O1"), "--opt-level O1: the loss scale of fp16"),
        (("--loss-scale", "128"), "bfloat16 needs no loss scale"),
        (("--channels-last",), "contiguous weights only"),
        (("--cuda-graphs",), "use --compile"),
        (("--cpu-offload", "--opt-level", "O4"), "use O5 for bf16"),
    ],
)
def test_flags_that_fsdp_cannot_serve_are_refused(sharded, flags, message):
    done = run_script(sharded, "main.py", *flags, variables=SCREENED)
    assert done.returncode == 2 and message in done.stderr
