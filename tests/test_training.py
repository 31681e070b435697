"""The default project from answers to accuracy, and started in every way that people start it."""

import copy
import re
import subprocess
import sys
from collections import OrderedDict

import pytest
import torch
from running import SCREENED, best_accuracy, metrics, run

pytestmark = pytest.mark.xdist_group("train")
SHORT = ("--arch", "shufflenet_v2_x0_5", "--steps", 3)


@pytest.fixture(scope="module")
def project(bake):
    return bake()


def test_the_default_run_reaches_the_accuracy(project, tmp_path):
    done = run(project, "--output", tmp_path)
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


@pytest.mark.slow
def test_a_compiled_model_trains_and_saves_as_any_other(project, tmp_path):
    flags = ("--arch", "squeezenet1_1", "--batch-size", 16, "--output", tmp_path)
    done = run(project, *flags, "--steps", 5, "--compile", nproc=0)
    assert done.returncode == 0, done.stderr
    assert "not counted in images_per_second" in done.stdout
    keys = torch.load(tmp_path / "last.pt", weights_only=True)["model"].keys()
    assert "features.0.weight" in keys
    done = run(project, *flags, "--steps", 7, "--resume", "auto", nproc=0)
    assert done.returncode == 0, done.stderr


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
    hits = metrics(tmp_path)[-1]["val_accuracy"] * 10  # of ten validation images
    assert hits == pytest.approx(round(hits))


@pytest.mark.slow
def test_a_run_with_loading_processes_resumes_exactly(project, image_folder, tmp_path):
    small = (*SHORT[:2], "--data", image_folder, "--batch-size", 4, "--workers", 1, "--epochs", 2)
    for steps in ((6,), (3, 6)):  # at once, and with a stop after the first epoch
        for stop in steps:
            flags = ("--steps", stop, "--resume", "auto", "--output", tmp_path / str(steps))
            assert run(project, *small, *flags).returncode == 0
    (whole, resumed) = (metrics(tmp_path / str(steps)) for steps in ((6,), (3, 6)))
    for one, two in zip(whole, resumed, strict=True):
        del one["images_per_second"], two["images_per_second"]
        assert one == two


def test_a_run_goes_on_with_another_number_of_processes(project, tmp_path):
    flags = (*SHORT[:2], "--output", tmp_path, "--resume", "auto")
    assert run(project, *flags, "--epochs", 1, nproc=1).returncode == 0
    assert run(project, *flags, "--epochs", 2, nproc=2).returncode == 0
    assert [(row["epoch"], row["step"]) for row in metrics(tmp_path)] == [(1, 44), (2, 44)]


def test_a_restarted_process_goes_on_by_itself(project, tmp_path):
    flags = (*SHORT[:2], "--output", tmp_path, "--epochs", 2)
    assert run(project, *flags, "--steps", 22).returncode == 0
    assert run(project, *flags, TORCHELASTIC_RESTART_COUNT="1", nproc=0).returncode == 0
    assert [row["epoch"] for row in metrics(tmp_path)] == [1, 2]


def test_the_settings_of_a_resumed_run_are_its_own(project, tmp_path):
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


@pytest.fixture(scope="module", params=[True, False], ids=["FusedAdam", "SGD"])
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


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_checkpoint_of_another_script_goes_on_as_one_of_this_project(epochs, tmp_path, prefix):
    project, first, second = epochs
    old = tmp_path / "old.pt"
    torch.save(in_apexs_form(copy.deepcopy(first), prefix), old)
    done = run_on_cpu(project, *EPOCHS, "--steps", 4, "--resume", old, "--output", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert (
        f"resumed {old} after 1.00 epochs, a checkpoint of another script: "
        "its weights, optimizer, loss scale, epoch\n"
    ) in done.stdout
    state = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    torch.testing.assert_close(state["model"], second["model"], rtol=0, atol=0)
    torch.testing.assert_close(
        state["optimizer"]["state"], second["optimizer"]["state"], rtol=0, atol=0
    )
    for name in ("amp", "epoch", "step"):
        assert state[name] == second[name]


def test_what_another_script_did_not_save_is_said(epochs, tmp_path):
    project, first, _ = epochs
    old = tmp_path / "old.pt"
    torch.save({name: first[name] for name in ("model", "optimizer")}, old)
    done = run_on_cpu(project, *EPOCHS, "--resume", old, "--eval-only")
    assert done.returncode == 0, done.stderr
    assert (
        f"resumed {old} after 0.00 epochs, a checkpoint of another script: "
        "its weights, optimizer; it has no loss scale and no epoch\n"
    ) in done.stdout


def test_the_readme_names_all_that_main_asks_of_the_task(project):
    asked = set(re.findall(r"\btask\.(\w+)", (project / "main.py").read_text()))
    readme = (project / "README.md").read_text()
    block = readme.split("```python")[1].split("```")[0]
    assert set(re.findall(r"^(?:def )?(\w+)", block, re.MULTILINE)) == asked


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
