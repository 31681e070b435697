"""engine.diagnostics.checks: preflight checks of main.py's settings."""

import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine import backend, distributed
from engine.checkpoint import format as checkpoint
from engine.checkpoint.format import Progress, TrainingState
from engine.diagnostics import checks
from engine.diagnostics.checks import check_apex, check_cpu, check_flags, check_output, check_resume
from engine.diagnostics.preflight import ERROR, OK, PENDING, WARNING

GIB = 2**30

DEFAULTS = {
    "data": None,
    "dummy": False,
    "skip_broken": 0,
    "workers": 1,
    "batch_size": 32,
    "output": Path("runs"),
    "resume": None,
    "eval_only": False,
    "opt_level": "O1",
    "backend": "auto",
}


def settings(**changed: object) -> Namespace:
    """Return the settings of a default run, with some changed."""
    return Namespace(**DEFAULTS | changed)


WHOLE = {
    "__init__.py": "",
    "amp.py": "def initialize(): pass\ndef scale_loss(): pass",
    "parallel.py": "class DistributedDataParallel: pass\ndef convert_syncbn_model(): pass",
    "optimizers.py": "class FusedAdam: pass",
}
"""Files of a package with every call of Apex."""


@pytest.mark.parametrize(
    ("package", "extensions", "gpu", "expected"),
    [
        ({}, [], False, (OK, "Apex is not installed")),
        ({"__init__.py": ""}, [], True, (WARNING, "not NVIDIA's Apex: pip uninstall apex")),
        ({"__init__.py": "import velruse"}, [], True, (WARNING, "or pip uninstall apex")),
        (WHOLE | {"amp.py": ""}, ["amp_C"], True, (OK, "no longer has amp.initialize, amp.scale_")),
        (WHOLE, [], True, (WARNING, "amp_C is missing); Apex here has amp.init")),
        (WHOLE, ["amp_C", "apex_C"], True, (WARNING, "but no syncbn: build Apex with")),
        (WHOLE, ["amp_C", "apex_C", "syncbn"], False, (OK, "Apex needs a GPU; Apex here has")),
        (WHOLE, ["amp_C", "apex_C", "syncbn"], True, (OK, "real Apex; Apex here has amp.init")),
    ],
    ids=["none", "unrelated", "broken", "new", "python_only", "slow", "no_gpu", "whole"],
)
def test_apex(run_check, monkeypatch, tmp_path, package, extensions, gpu, expected):
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]
    for name in backend.EXTENSIONS:
        sys.modules[name] = sys if name in extensions else None  # None: it can't be imported
    if not package:
        sys.modules["apex"] = None
    (tmp_path / "apex").mkdir()
    for name, text in package.items():
        (tmp_path / "apex" / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    found = run_check(check_apex, {"compiled": False}, settings())
    assert found[0] == expected[0] and expected[1] in found[1]
    if "real Apex" not in found[1]:
        found = run_check(check_apex, {"compiled": False}, settings(backend="apex"))
        assert found[0] == ERROR and "--backend native" in found[1]


@pytest.mark.parametrize(
    "case",
    [
        ((8, 8, 8), "max 100000", OK, "2 × (cores 8, threads 8, --workers 8)"),
        ((8, 8, 9), None, WARNING, "--workers 8"),
        ((8, 1, 0), None, WARNING, "OMP_NUM_THREADS"),
        ((1, 8, 0), None, WARNING, "OMP_NUM_THREADS"),
        ((8, 8, 8), "200000 100000", WARNING, "may use only 2 cores in all"),
    ],
    ids=["good", "workers", "one_thread", "many_threads", "container"],
)
def test_cpu(run_check, monkeypatch, tmp_path, case):
    (cores, threads, workers), limit, status, words = case
    monkeypatch.setattr(distributed, "cpu_cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(checks, "CPU_LIMIT", tmp_path / "cpu.max")
    if limit:
        (tmp_path / "cpu.max").write_text(f"{limit}\n")
    found = run_check(check_cpu, settings(workers=workers))
    assert found[0] == status and words in found[1]


@pytest.fixture
def free(monkeypatch) -> Callable:
    """Return a function that sets the free space of every disk."""

    def free(size: float) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=size))

    return free


@pytest.mark.parametrize(
    ("size", "status", "words"),
    [(99 * GIB, OK, "99.0 GiB"), (5 * GIB, WARNING, "little"), (GIB / 2, ERROR, "free space")],
)
def test_disk_space_for_the_output(run_check, tmp_path, free, size, status, words):
    free(size)
    found = run_check(check_output, settings(output=tmp_path / "new" / "run"))
    assert found[0] == status and words in found[1]
    assert not (tmp_path / "new").exists()


def test_unwritable_output_is_an_error(run_check):
    status, text = run_check(check_output, settings(output=Path("/proc/runs")))
    assert status == ERROR and "choose another folder for --output" in text


def test_output_with_a_run_is_a_warning(run_check, tmp_path):
    (tmp_path / "last.pt").touch()
    status, text = run_check(check_output, settings(output=tmp_path))
    assert status == WARNING and "--resume auto" in text
    resumed = settings(output=tmp_path, resume=Path("auto"))
    assert "holds a run" not in run_check(check_output, resumed)[1]


def test_batch_size_1_is_a_warning(run_check, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["main.py", "--check", "--batch-size=1"])
    status, text = run_check(check_flags, settings(batch_size=1))
    assert status == WARNING and text.startswith("--batch-size=1: batch norm")
    assert "at least 2" in text
    assert run_check(check_flags, settings(batch_size=2)) == (OK, "--batch-size=1")


def test_checkpoint_to_resume_from(run_check, tmp_path):
    assert run_check(check_resume, settings()) == (PENDING, "")
    auto = settings(output=tmp_path, resume=Path("auto"))
    result = run_check(check_resume, auto)
    assert result == (OK, f"{tmp_path} has no checkpoint: the run starts from the beginning")
    status, text = run_check(check_resume, settings(resume=tmp_path / "missing.pt"))
    assert status == ERROR and "there is no such file" in text
    model = torch.nn.Linear(2, 2)
    native = backend.load_backend("native", "O1")
    state = TrainingState(model, torch.optim.SGD(model.parameters()), native)
    entries = checkpoint.collect(state) | vars(Progress(epoch=3, step=40)) | {"ranks": []}
    checkpoint.write(tmp_path / "step-40.pt", entries)
    assert run_check(check_resume, auto) == (OK, f"{tmp_path}/step-40.pt, after 3 epochs, 40 steps")
    (tmp_path / "last.pt").write_bytes(b"torn")
    status, text = run_check(check_resume, auto)
    assert status == WARNING and "step-40.pt is used: " in text and "last.pt: it is torn" in text
    (tmp_path / "step-40.pt").unlink()
    status, text = run_check(check_resume, auto)
    assert status == ERROR and "no checkpoint in" in text


def test_checkpoint_of_another_script_in_the_output_is_an_error(run_check, tmp_path):
    path = tmp_path / "last.pt"
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters()).state_dict()
    torch.save({"model": model.state_dict(), "optimizer": optimizer, "epoch": 3}, path)
    status, text = run_check(check_resume, settings(output=tmp_path, resume=path))
    assert status == ERROR and "another script wrote it" in text
    for changed in ({"eval_only": True, "output": tmp_path}, {"output": tmp_path / "other"}):
        result = run_check(check_resume, settings(resume=path, **changed))
        assert result == (OK, f"{path}, after 3 epochs")


def test_cores_of_no_processes_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "0")
    assert distributed.cpu_cores() >= 1
