"""Estimate of the memory of weights, gradients and optimizer, for ``./run.sh --check``."""

from argparse import Namespace
from collections.abc import Callable, Sequence

import torch
from torch import nn

from apex_native.amp.frontend import OPT_LEVELS
from engine.blocks import find_blocks
from engine.diagnostics.preflight import GIB, OK, WARNING, Results, num_processes
from engine.optim import build_on_meta, freeze


def persistent_bytes(args: Namespace, ddp: str) -> int:
    """Return the bytes for each parameter of weights, gradients, optimizer and average.

    FSDP divides them by the number of processes. DDP's buckets hold the gradients, or copies of
    those that torch's DDP, --accumulate and --cuda-graphs keep apart.
    """
    level = OPT_LEVELS[args.opt_level]
    is_half = ddp != "fsdp" and level.cast_model_type in (torch.float16, torch.bfloat16)
    moments = 1 if hasattr(args, "momentum") else 2  # of SGD, of Adam
    is_copied = ddp == "torch" or (ddp == "apex" and (args.accumulate > 1 or args.cuda_graphs))
    total = (2 + is_copied) * (2 if is_half else 4) + 4 * (moments + bool(args.ema))
    if is_half and level.master_weights:
        total += 8  # fp32 weights and their gradients
    return total


def estimate_bytes(
    model: nn.Module, args: Namespace, ddp: str, blocks: Sequence[str], processes: int
) -> int:
    """Return the bytes that a GPU holds, without activations and the libraries' own memory.

    With FSDP, the gathered weights and gradients of two blocks and of what is outside of the
    blocks are added: one is computed while the next one is gathered.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    if ddp != "fsdp":
        return total * persistent_bytes(args, ddp)
    found = find_blocks(model, blocks)
    sizes = sorted((sum(p.numel() for p in block.parameters()) for block in found), reverse=True)
    gathered = total - sum(sizes) + sum(sizes[:2])
    in_use = gathered * 2 * (4 if args.opt_level == "O0" else 2)
    shard = 0 if args.cpu_offload else -(-total // processes)
    return in_use + shard * persistent_bytes(args, ddp)


def check_memory(
    args: Namespace, ddp: str, blocks: Sequence[str], build_model: Callable[[], nn.Module]
) -> Results:
    """Estimate the memory of weights, gradients and optimizer, and compare it with the GPU's."""
    model = build_on_meta(build_model)
    if args.freeze:
        freeze(model, args.freeze)  # which raises UserError for an unknown name
    size = estimate_bytes(model, args, ddp, blocks, num_processes())
    count = sum(parameter.numel() for parameter in model.parameters())
    text = f"{count:,} parameters need {size / GIB:.2f} GiB for each process, plus activations"
    if not torch.cuda.is_available():
        yield OK, text
        return
    available = torch.cuda.get_device_properties(0).total_memory
    text += f"; the GPU has {available / GIB:.0f} GiB"
    if size < 0.9 * available:
        yield OK, text
    elif ddp == "fsdp":
        yield WARNING, f"{text}: use more GPUs, or --cpu-offload"
    else:
        yield WARNING, f"{text}: generate the project with ddp fsdp, which shards them"
