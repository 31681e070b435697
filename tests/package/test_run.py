"""Scripts on the installed package: by the command, the module, the import, and ``--fill``."""

import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("package")

PRINT_MODULES = """
import apex
from apex import amp
from apex.optimizers import FusedLAMB
print(amp.initialize.__module__, FusedLAMB.__module__)
"""


COMMAND = ("-c", "from apex_native.extras.command import main; main()")


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--version"], 0, "apex-native "),
        (["--help"], 0, "usage: apex-native run"),
        ([], 2, "usage: apex-native run"),
        (["fix", "script.py"], 2, "no command 'fix'"),
        (["run"], 2, "usage: python -m apex_native [--fill] SCRIPT.py"),
        (["run", "--help"], 0, "usage: apex-native run"),
        (["migrate", "--help"], 0, "usage: apex-native migrate"),
        (["run", "missing.py"], 2, "no file missing.py\nusage: python -m apex_native"),
        (["run", "-m", "missing"], 2, "no module missing\n"),
        (["run", "-m", "missing.part"], 2, "no module missing.part\n"),
        (["run", "-m", "json.missing"], 2, "no module json.missing\n"),
        (["run", "-m", "email"], 2, "no module email.__main__\n"),
    ],
)
def test_command_line(run, arguments, status, text):
    done = run(*COMMAND, *arguments)
    assert done.returncode == status
    assert text in (done.stdout if status == 0 else done.stderr)


def test_command_runs_scripts_with_their_arguments(run, tmp_path):
    (tmp_path / "script.py").write_text(PRINT_MODULES + "import sys; print(sys.argv[1:])")
    done = run(*COMMAND, "run", "script.py", "--lr", "1")
    expected = "apex_native.amp.frontend apex_native.optimizers.layerwise\n['--lr', '1']\n"
    assert done.stdout == expected, done.stderr


def test_installed_command_finds_a_module_in_the_current_folder(run, tmp_path):
    """The first folder in sys.path is that of the command, and not the current one."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "train.py").write_text("import sys; print(*sys.path[:2])")
    command = f"import sys; sys.path[0] = sys.prefix; {COMMAND[1]}"
    done = run("-c", command, "run", "-m", "tools.train")
    assert done.returncode == 0, done.stderr
    spawned, current = done.stdout.split()
    assert (Path(spawned).name, current) == ("_spawned", str(tmp_path))


@pytest.mark.slow
def test_torchrun_runs_the_module(run, tmp_path):
    (tmp_path / "script.py").write_text(PRINT_MODULES)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
    done = run(*torchrun, "-m", "apex_native", "script.py")
    assert "apex_native.amp.frontend" in done.stdout, done.stderr


AS_APEX = """
import apex_native.as_apex
import torch.multiprocessing as mp

def work(rank):
    from apex import amp
    print(amp.__name__, flush=True)

if __name__ == "__main__":
    mp.spawn(work)
    import apex.pyprof
"""


@pytest.mark.slow
def test_import_of_as_apex_does_the_same(run, tmp_path):
    (tmp_path / "script.py").write_text(AS_APEX)
    done = run("script.py")
    assert done.stdout == "apex_native.amp\n", done.stderr
    assert done.stderr.splitlines()[-1].endswith("does not have apex.pyprof; use torch.profiler")


def test_modules_of_the_package_are_not_names_of_apex(run, tmp_path):
    (tmp_path / "script.py").write_text(
        "import importlib.util\n"
        "for name in ('extras', 'as_apex', 'compat'):\n"
        "    assert importlib.util.find_spec(f'apex.{name}') is None, name\n"
    )
    done = run("-m", "apex_native", "script.py")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def fake_apex(tmp_path):
    """Write an Apex of 2026: without amp, parallel and fp16_utils, with one old optimizer gone."""
    files = {
        "__init__.py": "from . import optimizers, normalization",
        "optimizers/__init__.py": "from .fused_adam import FusedAdam\n"
        "class FusedSGD: pass\nclass FusedLAMB: pass\nclass FusedAdagrad: pass",
        "optimizers/fused_adam.py": "class FusedAdam: pass",
        "normalization/__init__.py": "class FusedLayerNorm: pass",
        "contrib/__init__.py": "",
        "contrib/peer_memory/__init__.py": "class PeerMemoryPool: pass",
    }
    for name, text in files.items():
        path = tmp_path / "site" / "apex" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for kernels in ("amp_C", "fused_layer_norm_cuda"):
        (tmp_path / "site" / f"{kernels}.py").touch()
    return tmp_path / "site"


FILLED = """
from apex import amp
from apex.contrib.peer_memory import PeerMemoryPool
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedAdam, FusedNovoGrad
from apex.parallel import DistributedDataParallel
import apex
assert apex.amp is amp and apex.optimizers.FusedAdam is FusedAdam

def work(_=0):
    for one in (FusedLayerNorm, FusedAdam, FusedNovoGrad, DistributedDataParallel, amp.initialize):
        print(one.__module__, flush=True)

if __name__ == "__main__":
    work()
    import torch.multiprocessing as mp
    mp.spawn(work)
"""


@pytest.mark.slow
def test_fill_adds_what_an_installed_apex_lacks(run, tmp_path, fake_apex):
    (tmp_path / "script.py").write_text(FILLED)
    done = run("-m", "apex_native", "--fill", "script.py", path=[fake_apex])
    assert done.returncode == 0, done.stderr
    first, *modules = done.stdout.splitlines()
    used = [
        "apex.normalization",
        "apex.optimizers.fused_adam",
        "apex_native.optimizers.layerwise",
        "apex_native.parallel.distributed",
        "apex_native.amp.frontend",
    ]
    assert [line for line in modules if not line.startswith("apex_native --fill")] == used * 2
    has, adds = first.removeprefix("apex_native --fill: the installed Apex has ").split(
        "; apex_native adds "
    )
    assert has == "amp_C, apex.normalization, apex.optimizers"
    assert {"apex.amp", "apex.fp16_utils", "apex.parallel"} <= set(adds.split(", "))
    assert "apex.optimizers.FusedNovoGrad" in adds.split(", ")
    assert "apex.optimizers.FusedAdam" not in adds.split(", ")


def test_fill_replaces_calls_whose_kernels_are_missing(run, tmp_path, fake_apex):
    (fake_apex / "amp_C.py").unlink()
    (tmp_path / "script.py").write_text("from apex.optimizers import FusedLAMB; print(FusedLAMB)")
    done = run("-m", "apex_native", "--fill", "script.py", path=[fake_apex])
    assert done.stdout.endswith("<class 'apex_native.optimizers.layerwise.FusedLAMB'>\n")


def test_fill_keeps_amp_as_a_whole(run, tmp_path, fake_apex):
    """An Apex that has amp.initialize gets nothing of another amp, whose state is another."""
    (fake_apex / "apex" / "amp.py").write_text("def initialize(): pass")
    (tmp_path / "script.py").write_text("from apex import amp; print(hasattr(amp, 'scale_loss'))")
    done = run("-m", "apex_native", "--fill", "script.py", path=[fake_apex])
    assert done.stdout.endswith("False\n"), done.stderr


def test_fill_without_an_apex_exits(run, tmp_path):
    (tmp_path / "script.py").write_text("print('ran')")
    done = run("-m", "apex_native", "--fill", "script.py")
    assert done.returncode == 1
    assert done.stderr == (
        "--fill: no Apex is installed; without --fill, apex_native serves alone.\n"
    )


def test_compiled_code_of_another_user_is_not_used(run, tmp_path):
    """Nor is torch's default, which torch may set when it is imported."""
    code = (
        "import os; from apex_native.extras.compiled import _compiled; _compiled(lambda x: x); "
        "print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    )
    default = tmp_path / "torchinductor_name"
    variables = {"TMPDIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(default)}
    usual = Path(run("-c", code, **variables).stdout.strip())
    assert usual.parent == tmp_path and usual != default
    assert usual.stat().st_mode & 0o777 == 0o700
    assert run("-c", code, **variables).stdout.strip() == str(usual)
    usual.rmdir()
    usual.touch()
    assert Path(run("-c", code, **variables).stdout.strip()) not in (usual, Path("."))
    usual.unlink()
    usual.symlink_to("/")  # another user's, or through a link that another user can change
    if os.getuid() == 0:
        os.chown(usual, 65534, 65534, follow_symlinks=False)
    assert Path(run("-c", code, **variables).stdout.strip()) not in (usual, Path("/"))


EDITED_LISTS = """
import torch
from torch.nn import functional as F
from apex import amp
amp.lists.functional_overrides.FP32_FUNCS.remove("softmax")
amp.lists.functional_overrides.FP16_FUNCS.append("softmax")
amp.lists.functional_overrides.FP32_FUNCS.remove("softmin")
amp.lists.functional_overrides.FP32_FUNCS.append("relu")
amp.initialize(torch.nn.Linear(2, 2), opt_level="O1", verbosity=0)
half = amp.half_type(torch.float16, torch.device("cpu"))
ones = torch.ones(2, 2)
single = F.relu(ones.to(half)), F.softmin(ones, 1)
print([one.dtype == torch.float32 for one in single])
print([one.dtype == half for one in (F.softmax(ones, 1), F.softmin(ones.to(half), 1))])
"""


def test_scripts_can_edit_the_lists_of_functions_that_are_cast(run, tmp_path):
    """As NVIDIA's Tacotron 2 does for softmax."""
    (tmp_path / "script.py").write_text(EDITED_LISTS)
    done = run(*COMMAND, "run", "script.py")
    assert done.stdout == "[True, True]\n[True, True]\n", done.stderr
