"""The default project from answers to accuracy, and started in every way that people start it."""

import subprocess
import sys
import time

import pytest
import torch
from running import SCREENED, best_accuracy, metrics, run

pytestmark = pytest.mark.xdist_group("train")
SHORT = ("--arch", "shufflenet_v2_x0_5", "--steps", 3)


@pytest.fixture(scope="module")
def project(bake):
    return bake()


def test_the_default_run_reaches_the_accuracy(project, tmp_path):
    started = time.monotonic()
    done = run(project, "--output", tmp_path)
    took = time.monotonic() - started
    assert done.returncode == 0, done.stderr
    assert best_accuracy(tmp_path) >= 0.97
    rows = metrics(tmp_path)
    assert [row["epoch"] for row in rows] == list(range(1, len(rows) + 1))
    # The end says the best accuracy and where the files are.
    assert f"{best_accuracy(tmp_path):.4f}" in done.stdout.splitlines()[-1]
    assert str(tmp_path) in done.stdout.splitlines()[-1]
    assert {"last.pt", "best.pt", "metrics.csv", "config.json"} <= {
        path.name for path in tmp_path.iterdir()
    }
    print(f"{took:.0f} s in all")


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O4", "O5"])
@pytest.mark.slow
def test_every_level_reaches_the_accuracy(project, tmp_path, level):
    done = run(project, "--opt-level", level, "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    assert best_accuracy(tmp_path) >= 0.97


@pytest.mark.slow
def test_sgd_with_torchs_ddp_reaches_the_accuracy(bake, tmp_path):
    done = run(bake(fused_adam=False, ddp="torch", sync_bn=False), "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    assert best_accuracy(tmp_path) >= 0.97


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param([], id="python"),
        pytest.param(["torch.distributed.run", "--nproc-per-node=2"], id="torchrun"),
        pytest.param(["torch.distributed.launch", "--nproc-per-node=2"], id="launch"),
    ],
)
def test_the_usual_launchers_start_it(project, tmp_path, launcher):
    start = ["-m", *launcher[:1], "--standalone", *launcher[1:]] if launcher else []
    done = subprocess.run(
        [sys.executable, *start, "main.py", *map(str, SHORT), "--output", str(tmp_path)],
        cwd=project,
        env=SCREENED,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert ("2 processes" if launcher else "1 process ") in done.stdout
    assert metrics(tmp_path)[-1]["step"] == 3


@pytest.mark.parametrize("flag", ["--local-rank=0", "--local_rank=0"])
def test_both_spellings_of_local_rank_are_taken(project, tmp_path, flag):
    done = run(project, flag, *SHORT, "--output", tmp_path, nproc=0)
    assert done.returncode == 0, done.stderr


def test_a_folder_of_images_trains(project, image_folder, tmp_path):
    done = run(
        project, *SHORT, "--data", image_folder, "--batch-size", 4, "--output", tmp_path, nproc=2
    )
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path)[-1]["val_accuracy"] <= 1


def test_dummy_trains_without_data(project, tmp_path):
    (project / "data" / "digits.npz").rename(tmp_path / "digits.npz")
    try:
        done = run(project, "--dummy", *SHORT, "--batch-size", 2, "--output", tmp_path, nproc=0)
    finally:
        (tmp_path / "digits.npz").rename(project / "data" / "digits.npz")
    assert done.returncode == 0, done.stderr


def test_a_checkpoint_can_be_validated_and_moved_to_plain_torch(project, tmp_path):
    assert run(project, *SHORT, "--output", tmp_path).returncode == 0
    done = run(project, *SHORT, "--eval-only", "--resume", tmp_path / "last.pt", nproc=0)
    last = metrics(tmp_path)[-1]
    assert f"val_accuracy {last['val_accuracy']:.4f}" in done.stdout
    from torchvision.models import shufflenet_v2_x0_5

    state = torch.load(tmp_path / "last.pt", weights_only=True)
    shufflenet_v2_x0_5(num_classes=10).load_state_dict(state["model"])


@pytest.mark.slow
def test_the_projects_own_tests_pass(project):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"], cwd=project, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
