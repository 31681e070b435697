"""Estimate of the memory of weights, gradients and optimizer, for ``./run.sh --check``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from engine.blocks import find_blocks
from engine.diagnostics.preflight import OK, WARNING, num_hosts
from engine.optim import build_on_meta

if TYPE_CHECKING:
    from engine.diagnostics.preflight import Results

GIB = 2**30
CASTS_WEIGHTS = ("O2", "O3", "O5")
HAS_MASTERS = ("O2", "O5")


@dataclass(frozen=True)
class MemoryPlan:
    """Settings of main.py that the memory of a process depends on, besides its activations.

    Args:
        ddp: "apex", "torch", "dataparallel" or "fsdp".
        opt_level: O0 to O5.
        moments: fp32 values of the optimizer for each parameter: 2 of Adam, 1 of SGD.
        has_ema: whether there is an average of the weights.
        cpu_offload: whether FSDP keeps the shards in the CPU's memory.
        blocks: names of the classes of blocks; see `find_blocks`.
    """

    ddp: str
    opt_level: str
    moments: int
    has_ema: bool = False
    cpu_offload: bool = False
    blocks: Sequence[str] = ()


def persistent_bytes(plan: MemoryPlan) -> int:
    """Return the bytes for each parameter of weights, gradients, optimizer and average.

    FSDP divides them by the number of processes; DDP's buckets hold another copy of gradients.
    """
    is_half = plan.ddp != "fsdp" and plan.opt_level in CASTS_WEIGHTS
    weight = 2 if is_half else 4
    total = 2 * weight + 4 * (plan.moments + plan.has_ema)
    if plan.ddp in ("apex", "torch"):
        total += weight
    if is_half and plan.opt_level in HAS_MASTERS:
        total += 8  # fp32 weights and their gradients
    return total


def estimate_bytes(model: nn.Module, plan: MemoryPlan, processes: int) -> int:
    """Return the bytes that a GPU holds, without activations and the libraries' own memory.

    With FSDP, the gathered weights and gradients of two blocks and of what is outside of the
    blocks are added: one is computed while the next one is gathered.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    if plan.ddp != "fsdp":
        return total * persistent_bytes(plan)
    blocks = find_blocks(model, plan.blocks)
    sizes = sorted((sum(p.numel() for p in block.parameters()) for block in blocks), reverse=True)
    gathered = total - sum(sizes) + sum(sizes[:2])
    in_use = gathered * 2 * (4 if plan.opt_level == "O0" else 2)
    return in_use + (0 if plan.cpu_offload else -(-total // processes) * persistent_bytes(plan))


def check_memory(plan: MemoryPlan, build_model: Callable[[], nn.Module]) -> Results:
    """Estimate the memory of weights, gradients and optimizer, and compare it with the GPU's."""
    model = build_on_meta(build_model)
    processes = num_hosts() * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    size = estimate_bytes(model, plan, processes)
    count = sum(parameter.numel() for parameter in model.parameters())
    text = f"{count:,} parameters need {size / GIB:.2f} GiB for each process, plus activations"
    if not torch.cuda.is_available():
        yield OK, text
        return
    available = torch.cuda.get_device_properties(0).total_memory
    text += f"; the GPU has {available / GIB:.0f} GiB"
    if size < 0.9 * available:
        yield OK, text
    elif plan.ddp == "fsdp":
        yield WARNING, f"{text}: use more GPUs, or --cpu-offload"
    else:
        yield WARNING, f"{text}: generate the project with ddp fsdp, which shards them"
