"""The default project on GPUs: every opt_level, on apex_native and on real Apex, on one and two."""

import importlib

import pytest
import torch
from running import best_accuracy, run

pytestmark = pytest.mark.gpu


def has_apex() -> bool:
    try:
        return callable(importlib.import_module("apex.amp").initialize) and bool(
            importlib.import_module("amp_C")
        )
    except Exception:
        return False


GPUS = torch.cuda.device_count()
on_one = pytest.param(1, id="1gpu", marks=pytest.mark.skipif(GPUS < 1, reason="needs a GPU"))
on_two = pytest.param(2, id="2gpus", marks=pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"))
needs_apex = pytest.mark.skipif(not has_apex(), reason="needs NVIDIA Apex with amp and amp_C")


@pytest.fixture(scope="module")
def project(bake):
    """Apex's DDP, FusedAdam and SyncBN."""
    return bake()


def trains(project, tmp_path, backend, level, gpus):
    done = run(
        project,
        "--backend",
        backend,
        "--opt-level",
        level,
        "--output",
        tmp_path / "run",
        nproc=gpus,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("real Apex" if backend == "apex" else "apex_native") in done.stdout
    assert f"{gpus} process" in done.stdout
    assert best_accuracy(tmp_path / "run") >= 0.97


@pytest.mark.parametrize("gpus", [on_one, on_two])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_apex_native_reaches_the_accuracy(project, tmp_path, level, gpus):
    trains(project, tmp_path, "native", level, gpus)


@pytest.mark.apex
@needs_apex
@pytest.mark.parametrize("gpus", [on_one, on_two])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_real_apex_reaches_the_accuracy(project, tmp_path, level, gpus):
    trains(project, tmp_path, "apex", level, gpus)


@pytest.mark.parametrize("gpus", [on_two])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_sgd_with_torchs_ddp_reaches_the_accuracy(bake, tmp_path, level, gpus):
    project = bake(fused_adam=False, ddp="torch", sync_bn=False)
    trains(project, tmp_path, "native", level, gpus)


def test_more_processes_than_gpus_is_refused(project, tmp_path):
    if GPUS < 1:
        pytest.skip("needs a GPU")
    done = run(project, "--output", tmp_path / "run", nproc=GPUS + 1)
    assert done.returncode == 2
    assert f"{GPUS + 1} processes were started on a machine with {GPUS} GPU" in done.stderr
    assert done.stderr.count("error:") == 1
    assert "Traceback" not in done.stderr
