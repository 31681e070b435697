"""The default project on GPUs: every opt_level, on apex_native and on real Apex, on one and two."""

import importlib

import pytest
import torch
from running import best_accuracy, metrics, run

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


@pytest.mark.apex
@needs_apex
@pytest.mark.parametrize("gpus", [on_two])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_real_apex_with_torchs_ddp_reaches_the_accuracy(bake, tmp_path, level, gpus):
    trains(bake(ddp="torch"), tmp_path, "apex", level, gpus)


@pytest.mark.apex
@needs_apex
def test_channels_last_is_refused_on_apexs_ddp(project, tmp_path):
    done = run(project, "--backend", "apex", "--channels-last", "--output", tmp_path / "r", nproc=1)
    assert done.returncode == 2
    assert "error: --channels-last: real Apex's DDP mixes up its gradients" in done.stderr


@pytest.mark.apex
@needs_apex
def test_apexs_ddp_does_mix_up_channels_last_gradients(tmp_path):
    """The reason for that refusal. Should this fail, Apex has been mended: lift the refusal."""
    from apex.parallel import DistributedDataParallel

    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        images = torch.randn(2, 3, 8, 8, device="cuda")
        grads = []
        for memory_format in (torch.contiguous_format, torch.channels_last):
            torch.manual_seed(0)
            conv = torch.nn.Conv2d(3, 4, 3).cuda().to(memory_format=memory_format)
            DistributedDataParallel(conv)(images).square().sum().backward()
            grads.append(conv.weight.grad)
    finally:
        torch.distributed.destroy_process_group()
    assert not torch.allclose(*grads, rtol=1e-2, atol=1e-2)
    assert torch.allclose(grads[0].sum(), grads[1].sum(), rtol=1e-2)  # the same numbers, elsewhere


@pytest.mark.apex
@needs_apex
@pytest.mark.parametrize("gpus", [on_two])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(("first", "then"), [("apex", "native"), ("native", "apex")])
def test_a_checkpoint_goes_from_one_backend_to_the_other(
    project, tmp_path, first, then, level, gpus
):
    flags = ("--opt-level", level, "--epochs", 4)
    assert not run(
        project, *flags, "--backend", first, "--steps", 66, "--output", tmp_path, nproc=gpus
    ).returncode
    done = run(
        project, *flags, "--backend", then, "--resume", "auto", "--output", tmp_path, nproc=gpus
    )
    assert done.returncode == 0, done.stderr
    losses = [row["train_loss"] for row in metrics(tmp_path)]
    assert len(losses) == 4
    assert losses[3] < losses[2] * 1.2  # it goes on where the other stopped


def test_more_processes_than_gpus_is_refused(project, tmp_path):
    if GPUS < 1:
        pytest.skip("needs a GPU")
    done = run(project, "--output", tmp_path / "run", nproc=GPUS + 1)
    assert done.returncode == 2
    assert f"{GPUS + 1} processes were started on a machine with {GPUS} GPU" in done.stderr
    assert done.stderr.count("error:") == 1
    assert "Traceback" not in done.stderr
