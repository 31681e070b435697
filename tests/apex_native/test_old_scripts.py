"""``python -m apex_native`` runs scripts that were written for Apex."""

import colorsys
import inspect
import py_compile
import re
import sys
import zipfile

import pytest
import torch
import torch.distributed as dist
from apex_native import amp, normalization, optimizers, parallel
from apex_native import compat as fp16_utils
from fresh import TEMPLATE
from in_fork import run_python
from torch import nn
from torch.optim.optimizer import required

PROJECT = TEMPLATE

OLD_SCRIPT = """
import argparse
import time
import torch
import torch.distributed as dist
import apex
from apex import amp
from apex.fp16_utils import *
from apex.multi_tensor_apply import multi_tensor_applier
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedAdam, FusedLAMB
from apex.parallel import DistributedDataParallel as DDP, convert_syncbn_model
from apex.parallel.LARC import LARC
import helper

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", default=-1, type=int)
parser.add_argument("--opt-level", default="O1")
args = parser.parse_args()
dist.init_process_group("gloo", init_method="env://")
torch.manual_seed(args.local_rank)
model = convert_syncbn_model(torch.nn.Sequential(torch.nn.Linear(4, 8), FusedLayerNorm(8),
                                                 torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)))
optimizer = LARC(FusedAdam(model.parameters(), lr=0.01))
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, verbosity=0)
model = DDP(model, delay_allreduce=True)
losses = []
for _ in range(20):
    x = torch.randn(16, 4)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
    losses.append(to_python_float(loss))
assert losses[-1] < losses[0]
assert apex.amp is amp and helper.amp is amp and not multi_tensor_applier.available
time.sleep(0.2)  # gloo's threads, still at the last gradients, must not outlive the interpreter
print(f"rank {args.local_rank} done")
destroy = dist.destroy_process_group
dist.destroy_process_group = lambda: (destroy(), print(f"rank {args.local_rank} closed"))
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Run ``python -m apex_native`` in tmp_path, or a launcher of it.

    Options are variables of its environment.
    """
    monkeypatch.chdir(tmp_path)

    def start(*arguments, launcher=(), **variables):
        command = [*launcher, *(["-m"] if launcher else []), "apex_native", *arguments]
        return run_python(tmp_path, "-m", *command, path=[PROJECT], **variables)

    return start


CHANGING_FOLDER = """
import os, sys
print(sys.argv, __file__ == os.path.abspath(sys.argv[0]), sys.modules["__main__"].__file__)
os.makedirs("elsewhere")
os.chdir("elsewhere")
import sibling
from apex import amp
print(os.path.exists(__file__), sibling.__file__)
"""


@pytest.mark.parametrize("name", ["old.py", "old"])
def test_script_that_changes_its_folder_imports_a_sibling(start, tmp_path, name):
    folder = tmp_path / "sub"
    folder.mkdir()
    (folder / "sibling.py").touch()
    (folder / name).write_text(CHANGING_FOLDER)
    done = start(f"sub/{name}", "--flag")
    assert done.returncode == 0, done.stderr
    expected = f"['sub/{name}', '--flag'] True {folder / name}"
    assert done.stdout.splitlines() == [expected, f"True {folder / 'sibling.py'}"]


def test_functions_of_amp_are_also_those_of_its_module_amp(start, tmp_path):
    """Editors complete the import so, and public scripts have it."""
    (tmp_path / "old.py").write_text(
        "from apex.amp import amp, initialize\nprint(amp.initialize is initialize)\n"
    )
    assert start("old.py").stdout == "True\n"


FINDING = """
import colorsys, sys
from importlib.machinery import PathFinder
print(colorsys.__file__, sys.path[0], PathFinder.find_spec("apex").origin, sep="\\n")
"""


@pytest.mark.parametrize("has_apex", [False, True])
def test_script_finds_modules_as_in_plain_python(start, tmp_path, has_apex):
    """Python looks in its folder, not in the working directory; processes find our `apex` first."""
    folder = tmp_path / "sub"
    (folder / "apex").mkdir(parents=True)
    (folder / "old.py").write_text(FINDING)
    (tmp_path / "colorsys.py").write_text("raise ImportError")
    if has_apex:
        (folder / "apex" / "__init__.py").touch()
    done = start("sub/old.py")
    assert done.returncode == 0, done.stderr
    spawned = PROJECT / "apex_native" / "_spawned"
    first = spawned if has_apex else folder
    assert done.stdout.splitlines() == [colorsys.__file__, str(first), str(spawned / "apex.py")]


@pytest.mark.slow
def test_old_script_runs_unchanged_under_torchrun(start, tmp_path):
    (tmp_path / "helper.py").write_text("from apex import amp")
    (tmp_path / "old_script.py").write_text(OLD_SCRIPT)
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = start("old_script.py", "--opt-level", "O2", launcher=torchrun)
    assert done.returncode == 0, done.stderr
    for event in ("done", "closed"):  # the process group that it left open
        assert [done.stdout.count(f"rank {rank} {event}") for rank in range(2)] == [1, 1]


@pytest.mark.parametrize("failed", [False, True])
def test_process_group_is_closed_unless_the_script_failed(monkeypatch, failed):
    from apex_native.__main__ import destroy_process_group  # not in the processes that run it

    if failed:
        monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    destroy_process_group()
    assert dist.is_initialized() == failed
    if failed:
        dist.destroy_process_group()


MISSING = {
    "import amp_C": "use torch's _foreach functions",
    "import apex.RNN": "use torch.nn.LSTM",
    "import apex; apex.RNN.LSTM(2, 3)": "use torch.nn.LSTM",
    "import apex; apex.mlp.MLP([2, 3])": "use torch.nn.Sequential",
    "from apex import pyprof": "use torch.profiler",
    "from apex import (\n    amp,\n    pyprof,\n)": "use torch.profiler",
    "from apex.contrib import xentropy": "use torch.nn.functional.cross_entropy",
    "from apex.contrib.clip_grad import (\n    clip_grad_norm_,\n)": "use torch.nn.utils.clip_grad",
    "from apex.contrib.optimizers import FP16_Optimizer": 'initialize with opt_level="O2"',
    "from apex.fp16_utils import FP16_Optimizer": 'initialize with opt_level="O2"',
    "from apex.fp16_utils.loss_scaler import DynamicLossScaler": "use apex.amp.initialize",
    "from apex.normalization import manual_rms_norm": "use torch.nn.functional.layer_norm or rms",
}
UNCHANGED = {
    "from apex.contrib.peer_memory import PeerMemoryPool": "No module named 'apex.contrib'",
    "import apex; apex.amp.scale": "module 'apex_native.amp' has no attribute 'scale'",
    "import torch; torch.mlp": "module 'torch' has no attribute 'mlp'",
}
EXPLAINING = """
import runpy
import sys
from apex_native.__main__ import explain

for path in sys.argv[1:]:
    try:
        runpy.run_path(path)
    except (ImportError, AttributeError) as error:
        explain(error)
        print(error)
"""


def test_errors_about_missing_names_state_the_equivalent(start, tmp_path):
    (tmp_path / "old_script.py").write_text(EXPLAINING)
    cases = MISSING | UNCHANGED
    paths = [tmp_path / f"{index}.py" for index in range(len(cases))]
    for path, code in zip(paths, cases, strict=True):
        path.write_text(code)
    done = start("old_script.py", *map(str, paths))
    assert done.returncode == 0, done.stderr
    for (code, expected), error in zip(cases.items(), done.stdout.splitlines(), strict=True):
        assert error == expected if code in UNCHANGED else expected in error, code


PACKAGED = (
    "import amp_C",
    "import apex; apex.amp.init()",
    "from apex.contrib.optimizers import FP16_Optimizer",
    "from apex.normalization.fused_layer_norm import fused_layer_norm_affine",
    "from apex.parallel.distributed import flat_dist_call",
)


def test_errors_about_names_of_the_package_say_how_to_install_it(start, tmp_path):
    (tmp_path / "old_script.py").write_text(EXPLAINING)
    paths = [tmp_path / f"{index}.py" for index in range(len(PACKAGED) + 1)]
    for path, code in zip(paths, (*PACKAGED, "import apex.RNN"), strict=True):
        path.write_text(code)
    done = start("old_script.py", *map(str, paths))
    assert done.returncode == 0, done.stderr
    *packaged, other = done.stdout.splitlines()
    assert len(packaged) == len(PACKAGED)
    assert all("pip install git+https://" in error for error in packaged)
    assert "pip install" not in other


def test_fill_needs_the_package(start, tmp_path):
    (tmp_path / "old_script.py").write_text("print('ran')")
    done = start("--fill", "old_script.py")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "--fill needs the installable package: pip install git+https://" in done.stderr


def test_uncaught_error_about_a_missing_name_states_the_equivalent(start, tmp_path):
    (tmp_path / "old_script.py").write_text("import apex.mlp")
    done = start("old_script.py")
    assert done.returncode == 1
    assert "does not have apex.mlp; use torch.nn.Seq" in done.stderr.splitlines()[-1]


def test_apex_is_found_and_missing_modules_of_it_are_not(start, tmp_path):
    (tmp_path / "old_script.py").write_text(
        "import importlib.metadata, importlib.util\n"
        "assert importlib.metadata.version('apex') == '0.1'\n"  # transformers asks both
        "for name in ('apex.contrib', 'apex.fp16_utils.loss_scaler', 'amp_C', 'apex.compat'):\n"
        "    assert importlib.util.find_spec(name) is None, name\n"
        "assert importlib.util.find_spec('apex.optimizers.fused_adam')\n"
    )
    done = start("old_script.py")
    assert done.returncode == 0, done.stderr


# fmt: off
SIGNATURES = [
    (amp.initialize, lambda models, optimizers=None, enabled=True, opt_level="O1",
        cast_model_type=None, patch_torch_functions=None, keep_batchnorm_fp32=None,
        master_weights=None, loss_scale=None, cast_model_outputs=None, num_losses=1, verbosity=1,
        min_loss_scale=None, max_loss_scale=2.0**24: None),
    (amp.scale_loss, lambda loss, optimizers, loss_id=0, model=None, delay_unscale=False,
        delay_overflow_check=False: None),
    (parallel.DistributedDataParallel, lambda module, message_size=10000000,
        delay_allreduce=False, shared_param=None, allreduce_trigger_params=None,
        retain_allreduce_buffers=False, allreduce_always_fp32=False, num_allreduce_streams=1,
        allreduce_communicators=None, gradient_average=True, gradient_predivide_factor=1.0,
        gradient_average_split_factor=None, prof=False: None),
    (parallel.convert_syncbn_model, lambda module, process_group=None, channel_last=False: None),
    (parallel.create_syncbn_process_group, lambda group_size: None),
    (parallel.SyncBatchNorm, lambda num_features, eps=1e-5, momentum=0.1, affine=True,
        track_running_stats=True, process_group=None, channel_last=False, fuse_relu=False: None),
    (parallel.LARC.LARC, lambda optimizer, trust_coefficient=0.02, clip=True, eps=1e-8: None),
    (optimizers.FusedAdam, lambda params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999),
        eps=1e-8, adam_w_mode=True, weight_decay=0.0, amsgrad=False, set_grad_none=True,
        capturable=False, master_weights=False: None),
    (optimizers.FusedSGD, lambda params, lr=required, momentum=0.0, dampening=0.0,
        weight_decay=0.0, nesterov=False, wd_after_momentum=False, materialize_master_grads=True,
        set_grad_none=False: None),
    (normalization.FusedLayerNorm, lambda normalized_shape, eps=1e-5, elementwise_affine=True,
        memory_efficient=False: None),
    (normalization.FusedRMSNorm, lambda normalized_shape, eps=1e-5, elementwise_affine=True,
        memory_efficient=False: None),
]
# fmt: on


@pytest.mark.parametrize(("call", "apexs"), SIGNATURES, ids=[c.__name__ for c, _ in SIGNATURES])
def test_signatures_equal_apex(call, apexs):
    ours, theirs = (
        [
            (parameter.name, parameter.default)
            for parameter in inspect.signature(one).parameters.values()
        ]
        for one in (call, apexs)
    )
    assert ours == theirs


SPAWNING = """
import torch.multiprocessing as mp
from apex.normalization.fused_layer_norm import FusedLayerNorm

def work(rank):
    from apex import amp
    print(amp.__name__, FusedLayerNorm(2).eps, flush=True)

if __name__ == "__main__":
    mp.spawn(work)
"""


@pytest.mark.parametrize(
    "as_module",
    [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.weekly)],
)
def test_spawned_processes_import_apex(start, tmp_path, as_module):
    (tmp_path / "spawning.py").write_text(SPAWNING)
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise ImportError")
    done = start(*(["-m", "spawning"] if as_module else ["spawning.py"]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["apex_native.amp", "1e-05"]


OTHER_SPELLINGS = """# -*- coding: latin-1 -*-
# caf\xe9
import argparse
import apex.normalization.fused_layer_norm as norms
from apex.amp._amp_state import _amp_state, master_params
from apex.fp16_utils import clip_grad_norm
from apex.amp.scaler import LossScaler
from apex.optimizers.fused_adagrad import FusedAdagrad
from apex.optimizers.fused_adam import FusedAdam
from apex.optimizers.fused_lamb import FusedLAMB
from apex.optimizers.fused_novograd import FusedNovoGrad
from apex.optimizers.fused_sgd import FusedSGD
from apex.parallel import optimized_sync_batchnorm
from apex.parallel.distributed import DistributedDataParallel, Reducer
from apex.parallel.sync_batchnorm import SyncBatchNorm
import apex

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
assert norms is apex.normalization.fused_layer_norm
print(f"local rank {parser.parse_args().local_rank}")
"""


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["old.py"], id="torchrun"),
        pytest.param(["-m", "old"], id="module"),
        pytest.param(["-m", "package"], id="package"),
        pytest.param(["old.py", "--local_rank=1"], id="given"),
        pytest.param(["--local-rank=1", "old.py"], id="launch"),
    ],
)
def test_script_gets_the_local_rank(start, tmp_path, arguments):
    """Of the arguments that launchers pass, or from the variable that they set."""
    (tmp_path / "old.py").write_bytes(OTHER_SPELLINGS.encode("latin-1"))
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "__main__.py").write_bytes(OTHER_SPELLINGS.encode("latin-1"))
    is_given = any("=1" in argument for argument in arguments)
    done = start(*arguments, **({} if is_given else {"LOCAL_RANK": "1"}))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "local rank 1\n"


OPTIONS = """
import argparse
from . import cycle
parser = argparse.ArgumentParser()
parser.add_argument(  # as torch.distributed.launch passes it (until torch 1.9)
    "--local_rank", type=int, default=-1)
"""


@pytest.mark.parametrize(
    ("arguments", "lines", "rank"),
    [
        (["old.py"], "from tools.options import parser", 0),
        (
            ["old.py"],
            "try: pass\nfinally:\n    import tools.options\nparser = tools.options.parser",
            0,
        ),
        (
            ["old.py"],
            "from tools import (  # of argparse\n    options,\n)\nparser = options.parser",
            0,
        ),
        (["old.py"], "from tools.cycle import options\nparser = options.parser", 0),
        (["-m", "tools.old"], "from .options import parser", 0),
        (["-m", "tools.old"], "from tools.options import parser", 0),
        (
            ["old.py"],
            "import importlib\nparser = importlib.import_module('tools.options').parser",
            -1,
        ),
    ],
)
def test_script_gets_the_local_rank_of_an_imported_module(start, tmp_path, arguments, lines, rank):
    """Modules that import each other, or that cannot be parsed, are no obstacle."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "options.py").write_text(OPTIONS)
    (tmp_path / "tools" / "cycle.py").write_text("from . import options")
    (tmp_path / "python2.py").write_bytes(b"print 'caf\xe9'\n")
    script = f"{lines}\nif not parser:\n    import python2\nprint(parser.parse_args().local_rank)"
    for folder in (tmp_path, tmp_path / "tools"):
        (folder / "old.py").write_text(script)
    done = start(*arguments, LOCAL_RANK="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{rank}\n"
    passed = f"passed --local_rank: {tmp_path / 'tools' / 'options.py'} has it"
    assert done.stderr.startswith("apex_native: " + ("no --local_rank: nei" if rank else passed))


def test_modules_that_the_script_does_not_import_have_no_local_rank(start, tmp_path):
    """An unpacked Apex beside the script is none of them."""
    (tmp_path / "apex").mkdir()
    for name in ("apex/__init__.py", "apex/options.py", "apex.py", "other.py", "sys.txt"):
        (tmp_path / name).write_text('"--local_rank"')
    mentions = """["--local_rank=%d"], "".startswith('--local_rank'), "" == "--local_rank", 0"""
    (tmp_path / "launch.py").write_text(f"command = {mentions}, '--local_rank' in ''")
    script = "import apex, sys\nfrom apex import amp\nimport launch\nprint(sys.argv)"
    (tmp_path / "old.py").write_text(script)
    assert start("old.py", LOCAL_RANK="1").stdout == "['old.py']\n"


@pytest.mark.parametrize("arguments", [["old.pyc"], ["-m", "old"], ["old.zip"]])
def test_compiled_script_gets_the_local_rank(start, tmp_path, arguments):
    (tmp_path / "old.py").write_bytes(OTHER_SPELLINGS.encode("latin-1"))
    py_compile.compile(str(tmp_path / "old.py"), cfile=str(tmp_path / "old.pyc"))
    with zipfile.ZipFile(tmp_path / "old.zip", "w") as archive:
        archive.write(tmp_path / "old.py", "__main__.py")
    (tmp_path / "old.py").unlink()
    done = start(*arguments, LOCAL_RANK="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "local rank 1\n"


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("launcher", "arguments"),
    [
        (["torch.distributed.launch", "--nproc-per-node=2"], ["old.py"]),
        (["torch.distributed.run", "--nproc-per-node=2"], ["-m", "old"]),
    ],
    ids=["launch", "module"],
)
def test_every_launcher_passes_the_local_rank(start, tmp_path, launcher, arguments):
    (tmp_path / "old.py").write_bytes(OTHER_SPELLINGS.encode("latin-1"))
    done = start(*arguments, launcher=[launcher[0], "--standalone", *launcher[1:]])
    assert done.returncode == 0, done.stderr
    # torchrun's -u writes each piece that print is given: two processes' pieces may alternate.
    said = sorted(re.findall(r"local rank \d", done.stdout))
    assert said == ["local rank 0", "local rank 1"]


def test_usage_without_a_script(start):
    done = start("missing.py")
    assert done.returncode == 2
    assert done.stderr.startswith("no file missing.py\nusage: python -m apex_native")


@pytest.mark.parametrize("flat", [False, True])
def test_fp16_utils_master_params(flat):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).bfloat16()
    parameters, masters = fp16_utils.prep_param_lists(model, flat)
    assert len(masters) == (1 if flat else 4)
    optimizer = torch.optim.SGD(masters, lr=0.5)
    before = [parameter.detach().float() for parameter in parameters]
    model(torch.ones(4, 2, dtype=torch.bfloat16)).sum().backward()
    fp16_utils.model_grads_to_master_grads(parameters, masters, flat)
    optimizer.step()
    fp16_utils.master_params_to_model_params(parameters, masters, flat)
    for parameter, old in zip(parameters, before, strict=True):
        expected = (old - 0.5 * parameter.grad.float()).bfloat16()
        assert torch.equal(parameter.detach(), expected)


def test_fp16_utils_gradients_of_masters_are_copies():
    """The gradients of fp32 parameters are copied, too."""
    model = nn.Linear(2, 1)
    parameters, masters = fp16_utils.prep_param_lists(model)
    model(torch.ones(1, 2)).sum().backward()
    fp16_utils.model_grads_to_master_grads(parameters, masters)
    model.zero_grad(set_to_none=False)
    assert all((master.grad == 1).all() for master in masters)


def test_fp16_utils_keep_batch_norms_in_fp32():
    for convert in (
        lambda network: fp16_utils.network_to_half(network)[1],
        lambda network: fp16_utils.convert_network(network, torch.float16),
    ):
        norm = nn.BatchNorm1d(2)
        nn.init.constant_(norm.running_var, 1e5)  # inf in fp16
        converted = convert(nn.Sequential(nn.Linear(2, 2), norm))
        assert converted[0].weight.dtype == torch.float16
        assert converted[1].weight.dtype == torch.float32
        assert converted[1].running_var.tolist() == [1e5] * 2


def test_network_to_half_casts_batch_norms_of_half_networks_to_fp32():
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).half()
    converted = fp16_utils.network_to_half(network)[1]
    assert converted[0].weight.dtype == torch.float16
    assert converted[1].weight.dtype == converted[1].running_var.dtype == torch.float32
