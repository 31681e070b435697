"""Images per second and memory of a large ViT: DDP, FSDP, FSDP with activation checkpointing.

    torchrun --nproc-per-node=4 benchmarks/fsdp.py [--arch vit_h_14] [--batch-size 32]
    torchrun --nproc-per-node=2 benchmarks/fsdp.py --device cpu --batch-size 1 --rounds 2 \
        --steps 1 --arch timm:vit_tiny_patch16_224      # tries itself

Each variant trains on one synthetic batch for each GPU, in bfloat16 (O4) with FusedAdam, in the
order in which main.py sets it up. "by hand" is the same with torch alone: fully_shard, autocast,
AdamW(fused=True), torch.utils.checkpoint. "accelerate" is Accelerate's FSDP2, if it is installed.
Variants that do the same take turns of --steps steps, --rounds times: the pace of the CPUs varies
by more than they differ. Prints a table and writes fsdp.csv, with medians of the turns.
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


def ours(arch: str, device: torch.device, sharded: bool, recompute: bool) -> Step:
    """Return the training step of main.py, with DDP or FSDP."""
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
        model = DistributedDataParallel(model, retain_allreduce_buffers=True)

    def step(images: Tensor, labels: Tensor) -> None:
        loss = F.cross_entropy(model(images), labels)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_hand(arch: str, device: torch.device, recompute: bool) -> Step:
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
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def with_accelerate(arch: str, device: torch.device, recompute: bool) -> Step:
    """Return a training step with Accelerate's FSDP2."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    model = build_model(arch, "cpu")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[type(find_blocks(model)[0]).__name__],
        activation_checkpointing=recompute,
    )
    is_cpu = device.type == "cpu"
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin, cpu=is_cpu)
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


VARIANTS: dict[str, Callable[[str, torch.device], Step]] = {
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


def measure(variants: list[str], args: argparse.Namespace) -> dict[str, tuple[list[float], float]]:
    """Return images per second of all processes in each turn, and the peak memory in GiB.

    Both are nan for all variants if the memory of a device is exceeded.
    """
    device = torch.device(args.device)
    images = torch.randn(args.batch_size, 3, 224, 224, device=device)
    labels = torch.randint(1000, (args.batch_size,), device=device)
    steps: dict[str, Step] = {}
    has_casts: dict[str, bool] = {}  # amp switches them on for the process
    memory: dict[str, float] = {}
    speeds: dict[str, list[float]] = {name: [] for name in variants}
    images_per_turn = args.steps * args.batch_size * dist.get_world_size()
    try:
        for name in variants:
            amp.initialize(nn.Identity(), enabled=False)  # ends the casts of the one before
            before = allocated(device)
            steps[name] = VARIANTS[name](args.arch, device)
            for _ in range(WARM_UP):
                steps[name](images, labels)
            memory[name] = (allocated(device, peak=True) - before) / 2**30
            has_casts[name] = torch.is_autocast_enabled(device.type)
        for turn in range(args.rounds):
            for name in variants if turn % 2 else variants[::-1]:
                torch.set_autocast_enabled(device.type, has_casts[name])
                dist.barrier()
                start = time.perf_counter()
                for _ in range(args.steps):
                    steps[name](images, labels)
                wait_for(device)
                speeds[name].append(images_per_turn / (time.perf_counter() - start))
    except torch.OutOfMemoryError:  # on all ranks, whose work is the same
        return dict.fromkeys(variants, ([float("nan")] * args.rounds, float("nan")))
    finally:
        steps.clear()
        gc.collect()
    return {name: (speeds[name], memory[name]) for name in variants}


def wait_for(device: torch.device) -> None:
    """Wait until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def allocated(device: torch.device, peak: bool = False) -> int:
    """Return the bytes of the device's tensors, now or at the most since the last call for now."""
    if device.type == "cpu":
        return 0
    wait_for(device)
    if peak:
        return torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


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
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    if args.device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    results: dict[str, tuple[list[float], float]] = {}
    for kind in dict.fromkeys(map(kind_of, args.variants)):
        results |= measure([name for name in args.variants if kind_of(name) == kind], args)
    if dist.get_rank() == 0:
        write(results, args)
    dist.destroy_process_group()


def kind_of(variant: str) -> str:
    """Return what a variant does, whoever does it."""
    return variant.replace(" by hand", "").replace(" in Accelerate", "")


def relative_speed(results: dict[str, tuple[list[float], float]], variant: str) -> float:
    """Return the median over the turns of the speed relative to the one by hand; nan without it."""
    hand = kind_of(variant).replace("FSDP", "FSDP by hand")
    if hand not in results:
        return float("nan")
    pairs = zip(results[variant][0], results[hand][0], strict=True)
    return median(own / other for own, other in pairs)


def write(results: dict[str, tuple[list[float], float]], args: argparse.Namespace) -> None:
    """Print the results, and write them to a CSV file."""
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    device = f"{dist.get_world_size()} x {name}"
    print(f"{args.arch}, batch {args.batch_size} per GPU, {device}, torch {torch.__version__}")
    head = ("date", "device", "arch", "batch", "variant", "images_per_s", "gib", "to_by_hand")
    with args.output.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        for variant, (speeds, memory) in results.items():
            speed, ratio = median(speeds), relative_speed(results, variant)
            print(
                f"{variant:34} {speed:9.1f} images/s {memory:7.2f} GiB {ratio:6.3f} of by hand, "
                f"turns {' '.join(f'{one:.0f}' for one in speeds)}"
            )
            row = (date.today(), device, args.arch, args.batch_size, variant)
            writer.writerow((*row, f"{speed:.1f}", f"{memory:.2f}", f"{ratio:.3f}"))


if __name__ == "__main__":
    main()
