"""``python -m apex_native`` runs scripts that were written for Apex."""

import inspect
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import fork_server
from torch import nn

from apex_native import amp, fp16_utils, normalization, optimizers, parallel

PROJECT = Path(__file__).parent.parent

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
dist.destroy_process_group()
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Runs ``python -m apex_native`` in tmp_path, or a launcher of it.

    It is a fork of a process that has imported torch, and so saves seconds.
    """
    monkeypatch.chdir(tmp_path)

    def start(*arguments, launcher=()):
        command = [*launcher, *(["-m"] if launcher else []), "apex_native", *arguments]
        process = fork_server().Process(target=run, args=(tmp_path, command))
        process.start()
        process.join(120)
        process.kill()
        said = [(tmp_path / name).read_text() for name in ("stdout", "stderr")]
        return subprocess.CompletedProcess(command, process.exitcode, *said)

    return start


def run(folder, command):
    """What ``python -m`` does with the command; its output goes to files."""
    os.chdir(folder)
    multiprocessing.process.ORIGINAL_DIR = str(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ |= {"PYTHONPATH": str(PROJECT), "CUDA_VISIBLE_DEVICES": ""}
    sys.path.insert(0, str(folder))
    sys.argv = command
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def test_an_old_script_runs_unchanged_and_gets_its_local_rank(start, tmp_path):
    (tmp_path / "helper.py").write_text("from apex import amp")
    (tmp_path / "old_script.py").write_text(OLD_SCRIPT)
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = start("old_script.py", "--opt-level", "O2", launcher=torchrun)
    assert done.returncode == 0, done.stderr
    assert [done.stdout.count(f"rank {rank} done") for rank in range(2)] == [1, 1]


MISSING = {
    "import apex.RNN": "apex.",
    "from apex.optimizer import FusedAdam": "apex.optimizers",
    "from apex.contrib.optimizers import FP16_Optimizer": "apex.optimizers",
    "import amp_C": "torch's _foreach functions",
    "from apex.fp16_utils.loss_scaler import DynamicLossScaler": "apex.",
}


def test_a_module_that_is_not_there_is_named_with_the_nearest_one(start, tmp_path):
    (tmp_path / "old_script.py").write_text(
        "import sys\n"
        "for line in sys.argv[1:]:\n"
        "    try:\n"
        "        exec(line)\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
    )
    done = start("old_script.py", *MISSING)
    assert done.returncode == 0, done.stderr
    for (line, nearest), error in zip(MISSING.items(), done.stdout.splitlines(), strict=True):
        assert line.split()[1].split(".contrib.")[0] in error
        assert f"the nearest thing there is {nearest}" in error


@pytest.mark.parametrize(
    ("line", "nearest"),
    [
        ("from apex.fp16_utils import FP16_Optimizer", 'amp.initialize with opt_level="O2"'),
        ("from apex.optimizers import FusedAdamW", "FusedAdam"),
        ("import apex; apex.amp.scale_losses", "scale_loss"),
    ],
)
def test_a_missing_name_is_named_with_the_nearest_one(start, tmp_path, line, nearest):
    (tmp_path / "old_script.py").write_text(line)
    done = start("old_script.py")
    assert done.returncode == 1
    assert f"the nearest thing there is {nearest}" in done.stderr.strip().splitlines()[-1]


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
    (optimizers.FusedSGD, lambda params, lr, momentum=0.0, dampening=0.0, weight_decay=0.0,
        nesterov=False, wd_after_momentum=False, materialize_master_grads=True,
        set_grad_none=False: None),
    (normalization.FusedLayerNorm, lambda normalized_shape, eps=1e-5, elementwise_affine=True,
        memory_efficient=False: None),
    (normalization.FusedRMSNorm, lambda normalized_shape, eps=1e-5, elementwise_affine=True,
        memory_efficient=False: None),
]
# fmt: on


@pytest.mark.parametrize(("call", "apexs"), SIGNATURES, ids=[c.__name__ for c, _ in SIGNATURES])
def test_a_call_takes_apexs_arguments_in_apexs_order(call, apexs):
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


@pytest.mark.parametrize("as_module", [False, True])
def test_processes_that_a_script_spawns_have_apex_too(start, tmp_path, as_module):
    (tmp_path / "spawning.py").write_text(SPAWNING)
    done = start(*(["-m", "spawning"] if as_module else ["spawning.py"]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["apex_native.amp", "1e-05"]


OTHER_SPELLINGS = """# -*- coding: latin-1 -*-
# caf\xe9
import argparse
import apex.normalization.fused_layer_norm as norms
from apex.amp._amp_state import _amp_state, master_params
from apex.fp16_utils import clip_grad_norm
from apex.parallel import optimized_sync_batchnorm
import apex

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
assert norms is apex.normalization.fused_layer_norm
print("local rank", parser.parse_args().local_rank)
"""


@pytest.mark.parametrize(
    ("launcher", "arguments"),
    [
        (["torch.distributed.launch", "--nproc-per-node=2"], ["old.py"]),
        (["torch.distributed.run", "--nproc-per-node=2"], ["-m", "old"]),
    ],
    ids=["launch", "module"],
)
def test_every_launcher_gives_the_local_rank(start, tmp_path, launcher, arguments):
    (tmp_path / "old.py").write_bytes(OTHER_SPELLINGS.encode("latin-1"))
    done = start(*arguments, launcher=[launcher[0], "--standalone", *launcher[1:]])
    assert done.returncode == 0, done.stderr
    said = sorted(re.findall(r"local rank \d", done.stdout))  # mixed, perhaps, in one line
    assert said == ["local rank 0", "local rank 1"]


def test_without_a_script_it_says_how_it_is_used(start):
    done = start("missing.py")
    assert done.returncode == 1
    assert done.stderr.startswith("usage: python -m apex_native")


@pytest.mark.parametrize("flat", [False, True])
def test_masters_by_hand(flat):
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


def test_half_networks_keep_batch_norms_in_fp32():
    network = fp16_utils.network_to_half(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert network[1][0].weight.dtype == torch.float16
    assert network[1][1].weight.dtype == torch.float32
    converted = fp16_utils.convert_network(nn.Sequential(nn.Linear(2, 2)), torch.bfloat16)
    assert converted[0].weight.dtype == torch.bfloat16
