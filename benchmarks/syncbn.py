"""What synced batch norms cost a training step: eager, compiled, as CUDA graphs.

    python benchmarks/syncbn.py [--gpus 2] [--batch-size 256] [--variants none native …]

ResNet-50 at O1, channels_last, in apex_native's DistributedDataParallel, on one synthetic batch for
each GPU: with plain batch norms (none), with apex_native's synced ones (native) and with torch's
(torch). All are in one process for each GPU and take turns, in another order each round; compiled-
and graphs- are main.py's --compile and --cuda-graphs. Prints a table and writes syncbn.csv.
"""

import argparse
import csv
import os
import platform
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchvision
from flags import file_name, whole_number
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "{{cookiecutter.project_slug}}"))
from apex_native import amp  # noqa: E402
from apex_native.parallel import DistributedDataParallel, convert_syncbn_model  # noqa: E402

NORMS = {
    "none": lambda model: model,
    "native": convert_syncbn_model,
    "torch": nn.SyncBatchNorm.convert_sync_batchnorm,
}
MODES = {"": None, "compiled-": "default", "graphs-": "reduce-overhead"}  # of torch.compile
VARIANTS = {prefix + norm: (prefix, norm) for prefix in MODES for norm in NORMS}
DEFAULT = [name for name, (prefix, norm) in VARIANTS.items() if not prefix or norm != "torch"]
WARM_UP = 4  # steps


def measure(rank: int, args: argparse.Namespace, store: str) -> None:
    """One of the processes; rank 0 prints and writes."""
    torch.cuda.set_device(rank)
    torch.backends.cudnn.benchmark = True
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=args.gpus)
    models = {}
    for variant in args.variants:
        torch.manual_seed(0)
        _, norm = VARIANTS[variant]
        model = NORMS[norm](torchvision.models.resnet50())
        models[variant] = model.cuda().to(memory_format=torch.channels_last)
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, fused=True)  # as main.py
        for m in models.values()
    ]
    amp.initialize(list(models.values()), optimizers, opt_level="O1", verbosity=0)
    optimizers = dict(zip(models, optimizers, strict=True))
    wrapped = {}
    for variant, model in models.items():
        mode = MODES[VARIANTS[variant][0]]
        if mode:
            model.compile(mode=mode)
        wrapped[variant] = DistributedDataParallel(model)
        if mode == "reduce-overhead":
            wrapped[variant].average_at_once()
    images = torch.randn(args.batch_size, 3, 224, 224, device="cuda")
    images = images.to(memory_format=torch.channels_last)
    targets = torch.randint(1000, (args.batch_size,), device="cuda")

    def step(variant: str) -> None:
        optimizer = optimizers[variant]
        loss = nn.functional.cross_entropy(wrapped[variant](images), targets)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    for variant in args.variants:
        started = time.perf_counter()
        for _ in range(WARM_UP):
            step(variant)
        torch.cuda.synchronize()
        if rank == 0:
            print(f"{variant}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    times = {variant: [] for variant in args.variants}
    for turn in range(args.rounds):
        for variant in args.variants[:: 1 if turn % 2 else -1]:
            step(variant)
            torch.cuda.synchronize()
            dist.barrier()
            started = time.perf_counter()
            for _ in range(args.block):
                step(variant)
            torch.cuda.synchronize()
            times[variant].append((time.perf_counter() - started) / args.block * 1e3)
    if rank == 0 and args.rounds:
        report(args, times)
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(0)  # NCCL's own end waits for compiled graphs that are never freed


def report(args: argparse.Namespace, times: dict[str, list[float]]) -> None:
    """The table, and syncbn.csv."""
    print(
        f"{date.today()}, {args.gpus} × {torch.cuda.get_device_name()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}, batch {args.batch_size} a GPU, "
        f"{args.rounds} turns of {args.block} steps\n\n"
        "| SyncBN | ms/step | spread | to none |\n|---|---|---|---|"
    )
    for variant, blocks in times.items():
        without = times.get(VARIANTS[variant][0] + "none")
        ratio = f"{median(blocks) / median(without):.3f}" if without else "–"
        spread = f"{min(blocks):.2f}–{max(blocks):.2f}"
        print(f"| {variant} | {median(blocks):.2f} | {spread} | {ratio} |", flush=True)
    with args.output.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["variant", "turn", "ms_per_step"])
        for variant, blocks in times.items():
            writer.writerows([variant, turn, f"{ms:.4f}"] for turn, ms in enumerate(blocks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--gpus", type=int, default=torch.cuda.device_count())
    add("--batch-size", type=whole_number, default=256, help="of each GPU")
    add("--variants", nargs="+", choices=VARIANTS, default=DEFAULT, help="see above")
    add("--rounds", type=int, default=6, help="turns of each; 0 only warms the compiler's cache")
    add("--block", type=whole_number, default=10, help="steps of a turn")
    add("--output", type=file_name, default=HERE / "syncbn.csv")
    args = parser.parse_args()
    if not 2 <= args.gpus <= torch.cuda.device_count():
        parser.error(f"it takes two GPUs or more; this machine has {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (args, f"file://{folder}/store"), args.gpus)


if __name__ == "__main__":
    main()
