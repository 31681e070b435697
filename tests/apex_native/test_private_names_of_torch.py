"""Private names of torch that apex_native uses, because torch has no public ones for them."""

import ast
import re

import pytest
import torch
import torch.distributed as dist
from fresh import TEMPLATE
from torch import nn
from torch.autograd import Variable

# The object that has the name, and what the name is for.
PRIVATE = {
    "_BatchNorm": nn.modules.batchnorm,  # the class of all batch norms, others' too
    "_amp_foreach_non_finite_check_and_unscale_": torch,  # the kernel of GradScaler.unscale_
    "_amp_update_scale_": torch,  # the kernel of GradScaler.update
    "_execution_engine": Variable,  # a callback at the end of a backward pass
    "_is_mkldnn_bf16_supported": torch.ops.mkldnn,
    "_is_view": torch.Tensor,
    "_resolve_process_group": dist.distributed_c10d,  # a group by its name, in an operator
    "_set_params_and_buffers_to_ignore_for_model": nn.parallel.DistributedDataParallel,
    "_step_supports_amp_scaling": torch.optim.AdamW([nn.Parameter(torch.ones(1))], fused=True),
    "_symmetric_memory": None,  # needs Triton; tested with SyncBatchNorm's kernels
    "_values": torch.Tensor,  # of uncoalesced sparse tensors
    "_version": torch.Tensor,
}
# Attributes that it gives to optimizers and parameters, its folder, and a documented one.
OWN = {
    *("_amp_stash", "_amp_master", "_amp_version", "_amp_values"),
    *("_lazy_init_maybe_master_weights", "_spawned", "_fields"),
}


@pytest.mark.parametrize("name", [name for name, owner in PRIVATE.items() if owner is not None])
def test_private_names_of_torch_exist(name):
    assert hasattr(PRIVATE[name], name)


def test_private_names_of_torch_are_listed():
    used, defined = set(), set(OWN)
    for path in (TEMPLATE / "apex_native").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.alias):
                (used if isinstance(node, ast.alias) else defined).add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute):
                name = node.id if isinstance(node, ast.Name) else node.attr
                (defined if isinstance(node.ctx, ast.Store) else used).add(name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                used.add(node.value)  # of getattr()
    private = {name for name in used if re.fullmatch("_[a-zA-Z]\\w*", name)}
    documented = {name for name in private if name.startswith("_foreach_")}
    found = private - documented - (defined - PRIVATE.keys())
    assert sorted(found) == sorted(PRIVATE)
