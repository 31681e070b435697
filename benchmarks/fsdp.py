"""Images per second and memory of a large ViT: DDP, FSDP, FSDP with activation checkpointing.

    torchrun --nproc-per-node=4 benchmarks/fsdp.py [--arch vit_h_14] [--batch-size 32]

Each variant trains on one synthetic batch for each GPU, in bfloat16 (O4) with FusedAdam, in the
order in which main.py sets it up. "by hand" is the same with torch alone: fully_shard, autocast,
AdamW(fused=True), torch.utils.checkpoint. "accelerate" is Accelerate's FSDP2, if it is installed.
The variants run one after another, --rounds times. Prints a table and writes fsdp.csv.
"""

import argparse
import csv
import gc
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torchvision
from flags import whole_number
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "{{cookiecutter.project_slug}}"))
from apex_native import amp  # noqa: E402
from apex_native.optimizers import FusedAdam  # noqa: E402
from apex_native.parallel import DistributedDataParallel  # noqa: E402
from engine.blocks import checkpoint_activations, find_blocks  # noqa: E402
from engine.distributed.sharding import Sharding  # noqa: E402

WARM_UP = 3  # steps
Step = Callable[[Tensor, Tensor], None]


def build_model(arch: str, device: str | torch.device) -> nn.Module:
    """Return an untrained model of torchvision or, as timm:NAME, of timm, with 1,000 classes."""
    torch.manual_seed(0)
    with torch.device(device):
        if arch.startswith("timm:"):
            import timm

            return timm.create_model(arch.removeprefix("timm:"), num_classes=1000)
        return torchvision.models.get_model(arch, weights=None)


def ours(arch: str, sharded: bool, recompute: bool) -> Step:
    """Return the training step of main.py, with DDP or FSDP."""
    device = torch.device("cuda", torch.cuda.current_device())
    model = build_model(arch, "meta" if sharded and dist.get_rank() else "cpu")
    if recompute:
        checkpoint_activations(model)
    if sharded:
        Sharding(device, "O4").apply(model)
    else:
        model.to(device)
    optimizer = FusedAdam(model.parameters(), lr=1e-4, weight_decay=0.01)
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    if not sharded and dist.get_world_size() > 1:
        model = DistributedDataParallel(model)

    def step(images: Tensor, labels: Tensor) -> None:
        loss = F.cross_entropy(model(images), labels)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_hand(arch: str, recompute: bool) -> Step:
    """Return a training step with torch's FSDP2 and autocast alone."""
    model = build_model(arch, "cpu")
    blocks = find_blocks(model)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in blocks:
        if recompute:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(images: Tensor, labels: Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def with_accelerate(arch: str, recompute: bool) -> Step:
    """Return a training step with Accelerate's FSDP2."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    model = build_model(arch, "cpu")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[type(find_blocks(model)[0]).__name__],
        activation_checkpointing=recompute,
    )
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    # All accelerators of a process share the plugin of the first one.
    accelerator.state.fsdp_plugin.activation_checkpointing = recompute
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step(images: Tensor, labels: Tensor) -> None:
        with accelerator.autocast():
            loss = F.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


VARIANTS: dict[str, Callable[[str], Step]] = {
    "DDP": partial(ours, sharded=False, recompute=False),
    "DDP, checkpointed": partial(ours, sharded=False, recompute=True),
    "FSDP": partial(ours, sharded=True, recompute=False),
    "FSDP by hand": partial(by_hand, recompute=False),
    "FSDP, checkpointed": partial(ours, sharded=True, recompute=True),
    "FSDP by hand, checkpointed": partial(by_hand, recompute=True),
}
if find_spec("accelerate"):
    VARIANTS["FSDP in Accelerate"] = partial(with_accelerate, recompute=False)
    VARIANTS["FSDP in Accelerate, checkpointed"] = partial(with_accelerate, recompute=True)


def measure(variant: str, args: argparse.Namespace) -> tuple[float, float]:
    """Return images per second of all GPUs, and the peak memory in GiB; nan if it is exceeded."""
    amp.initialize(nn.Identity(), enabled=False)  # ends the casts of the variant before
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    images = torch.randn(args.batch_size, 3, 224, 224, device="cuda")
    labels = torch.randint(1000, (args.batch_size,), device="cuda")
    try:
        step = VARIANTS[variant](args.arch)
        for _ in range(WARM_UP):
            step(images, labels)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(args.steps):
            step(images, labels)
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:  # on all ranks, whose work is the same
        return float("nan"), float("nan")
    seconds = time.perf_counter() - start
    speed = args.steps * args.batch_size * dist.get_world_size() / seconds
    return speed, torch.cuda.max_memory_allocated() / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--arch", default="vit_h_14", help="of torchvision, or timm:NAME, for 224 pixels"
    )
    parser.add_argument("--batch-size", type=whole_number, default=32, help="per GPU")
    parser.add_argument("--steps", type=whole_number, default=10)
    parser.add_argument("--rounds", type=whole_number, default=3)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS])
    parser.add_argument("--output", type=Path, default=Path("fsdp.csv"))
    args = parser.parse_args()
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in args.variants}
    for _ in range(args.rounds):
        for variant in args.variants:
            results[variant].append(measure(variant, args))
    if dist.get_rank() == 0:
        write(results, args)
    dist.destroy_process_group()


def write(results: dict[str, list[tuple[float, float]]], args: argparse.Namespace) -> None:
    """Print the medians, and write them to a CSV file."""
    device = f"{dist.get_world_size()} x {torch.cuda.get_device_name()}"
    print(f"{args.arch}, batch {args.batch_size} per GPU, {device}, torch {torch.__version__}")
    with args.output.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("date", "device", "arch", "batch", "variant", "images_per_s", "gib"))
        for variant, measured in results.items():
            speed, memory = (median(values) for values in zip(*measured, strict=True))
            print(f"{variant:34} {speed:9.1f} images/s {memory:7.2f} GiB")
            row = (date.today(), device, args.arch, args.batch_size, variant)
            writer.writerow((*row, f"{speed:.1f}", f"{memory:.2f}"))


if __name__ == "__main__":
    main()
