"""Fully sharded data parallelism (torch's FSDP2): a model of which each process holds a shard."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from apex_native.amp.casting import half_type
from engine import UserError
from engine.blocks import batch_norms, find_blocks
from engine.distributed import all_gather, broadcast_values, extra_state

HALF_LEVELS = ("O4", "O5")  # which compute in bfloat16


@dataclass(frozen=True)
class Sharding:
    """Way in which a run shards its models.

    Args:
        device: that computes.
        opt_level: O0 computes in fp32; O4 and O5 gather weights and compute in bfloat16, or in
            fp32 on a CPU without instructions for it, as amp does. The sharded parameters and
            their gradients are fp32 at each level.
        reshard_after_forward: free the gathered weights of a block after its forward pass, and
            gather them again for its backward pass.
        cpu_offload: keep the shards of weights, gradients and optimizer in the CPU's memory.
        compress_gradients: sum gradients in bfloat16.
    """

    device: torch.device
    opt_level: str
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    compress_gradients: bool = False

    @torch.no_grad()
    def apply(self, model: nn.Module, class_names: Sequence[str] = ()) -> str:
        """Shard `model` in place, with the weights that rank 0 has; return a message.

        A block is gathered as one unit, and what is outside of the blocks as another. The whole
        model is never on a device: one parameter at a time is.

        Args:
            model: on the CPU of rank 0; on the meta device, without memory, of the others.
            class_names: of its blocks; see `find_blocks`.

        Raises UserError if modules share a parameter, which the meta device would separate, a
        parameter has no dimension to shard, or this torch cannot shard on the CPU.
        """
        if self.device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
            raise UserError(
                f"ddp fsdp: torch {torch.__version__} cannot shard on the CPU; use a GPU, or a "
                "newer torch, such as 2.9"
            )
        if len([*model.parameters()]) < len([*model.named_parameters(remove_duplicate=False)]):
            raise UserError(
                "--arch: modules of this model share a parameter, which FSDP can't load; choose "
                "another model, or generate the project with ddp torch"
            )
        if scalar := next((name for name, one in model.named_parameters() if not one.dim()), None):
            raise UserError(
                f"--arch: the parameter {scalar} has no dimensions, so FSDP can't shard it; give "
                "it the shape (1,)"
            )
        blocks = find_blocks(model, class_names)
        parameters = dict(model.named_parameters())
        buffers = dict(model.named_buffers(remove_duplicate=False))
        extra = {} if dist.get_rank() else extra_state(model.state_dict())  # from --weights, say
        model.to("meta")
        self._shard(model, blocks)
        model.to_empty(device="cpu" if self.cpu_offload else self.device)
        for name, parameter in model.named_parameters():
            _copy_shard(parameter, self._on_device(parameters[name]))
        placed: dict[int, Tensor] = {}  # modules that share a buffer do so afterwards, too
        for name, buffer in buffers.items():
            value = placed.setdefault(id(buffer), broadcast_values(self._on_device(buffer)))
            prefix, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(prefix), own_name, value)
        for name, value in all_gather(extra, dist.group.WORLD)[0].items():
            model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
        total = sum(parameter.numel() for parameter in model.parameters())
        return f"FSDP: {total:,} parameters in {len(blocks)} blocks, over {dist.get_world_size()}"

    def _shard(self, model: nn.Module, blocks: list[nn.Module]) -> None:
        """Call fully_shard on the batch norms, the blocks and the model, from the inside out."""
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        pinned = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        offload = pinned if self.cpu_offload else OffloadPolicy()
        options: dict[str, Any] = {"mesh": mesh, "offload_policy": offload}
        reduce_dtype = torch.bfloat16 if self.compress_gradients else torch.float32
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        outermost = policy
        if self.opt_level in HALF_LEVELS:
            keep = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
            for norm in batch_norms(model):  # torch's take no bfloat16 weights on all devices
                fully_shard(norm, mp_policy=keep, **options)
            half = half_type(torch.bfloat16, self.device)
            output_dtype = torch.float32 if self.opt_level == "O5" else None
            policy = MixedPrecisionPolicy(half, reduce_dtype)
            outermost = MixedPrecisionPolicy(half, reduce_dtype, output_dtype)
        options["reshard_after_forward"] = self.reshard_after_forward
        for block in blocks:
            fully_shard(block, mp_policy=policy, **options)
        del options["reshard_after_forward"]  # torch's default: the outermost is needed at once
        fully_shard(model, mp_policy=outermost, **options)

    def _on_device(self, value: Tensor) -> Tensor:
        """Return the tensor on the device, with any content if it is on the meta device."""
        if value.is_meta:
            return torch.empty_like(value, device=self.device)
        return value.detach().to(self.device)


def compile_sharded(model: nn.Module) -> None:
    """Compile a sharded model in place, each block by itself: weights are gathered in between.

    Blocks of a class share their forward's code, of which torch compiles up to 8 forms, and runs
    others uncompiled. A block may have one for training and one for validation, twice as many if
    the last batch is smaller, and these for each of some --image-size.
    """
    sharded: list[Any] = [one for one in model.modules() if isinstance(one, FSDPModule)]
    for module in sharded:
        if type(module).forward.__module__.startswith("torch.nn."):
            # FSDP's hooks split what is compiled, and torch compiles no frame of its own code.
            module.forward = partial(_call, module.forward)
    config, forms = torch._dynamo.config, 16 * len(sharded)  # torch.compiler.config is newer
    with suppress(AttributeError):  # of other versions of torch, which warn of the limit
        config.recompile_limit = max(config.recompile_limit, forms)
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, forms)
    model.compile(dynamic=False)  # or the forms of unlike blocks become one, of any shape


def _call(function: Callable, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _copy_shard(own: Any, whole: Tensor) -> None:
    """Copy this process's shard of rank 0's `whole` into `own`."""
    sharded: Any = distribute_tensor(whole, own.device_mesh, own.placements)
    own.to_local().copy_(sharded.to_local())


@torch.no_grad()
def distribute_like(own: Tensor, whole: Tensor) -> Tensor:
    """Return this process's shard of `whole`, sharded as `own` is; `whole` itself if it is not.

    The type stays that of `whole`, which is checked later.

    Raises ValueError if their shapes differ.
    """
    if not isinstance(own, DTensor):
        return whole
    if own.shape != whole.shape:
        raise ValueError(f"a tensor is {tuple(whole.shape)}, not {tuple(own.shape)}")
    result = torch.empty_like(own, dtype=whole.dtype)
    _copy_shard(result, whole.to(own.device_mesh.device_type))
    return result


def distribute_entries(entries: dict[str, Any], own: Mapping[str, Tensor]) -> None:
    """Replace the whole tensors in a checkpoint's entries by this process's shards.

    Another script's prefix of the weights, and its optimizer if that does not fit, are removed.

    Args:
        entries: of a checkpoint; all processes have the same.
        own: tensors by the names of `engine.checkpoint.sharded.templates`.

    Raises ValueError if shapes differ.
    """
    if not any(name.startswith("model.module.") for name in own):
        consume_prefix_in_state_dict_if_present(entries["model"], "module.")
    for part in ("model", "ema"):
        for name, value in entries.get(part, {}).items():
            if f"{part}.{name}" in own:
                entries[part][name] = distribute_like(own[f"{part}.{name}"], value)
    try:
        _distribute_moments(entries["optimizer"].get("state", {}), own)
    except ValueError:
        if not entries["origin"]:
            raise
        entries["optimizer"] = {}


def _distribute_moments(moments: dict[int, dict[str, Any]], own: Mapping[str, Tensor]) -> None:
    for index, state in moments.items():
        parameter = own.get(f"optimizer.{index}")
        for name, value in state.items() if isinstance(state, dict) else ():
            if parameter is not None and isinstance(value, Tensor) and value.dim():
                state[name] = distribute_like(parameter, value)
