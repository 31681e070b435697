"""How near a training step comes to what the machine can do.

    python benchmarks/roofline.py [--arch resnet50] [--batch-size 256] [--precision fp16]

Measures the machine first: bytes a second of a large copy, operations a second of a large matrix
product. Then counts, in one eager step of torch by hand (that of peers/torch_plain.py), the
operations of each operator and the bytes that it takes and gives. At those rates no operator can be
faster than the longer of its two times, and no step of these operators than the sum of them: the
roof. Last comes the step's own time. It may be above the roof where bytes are still in a cache, and
with --compile, which joins operators and so saves bytes.

Prints what was counted and measured, and writes the operators to roofline.csv.
"""

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from flags import file_name, whole_number
from step import conditions
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
from common import (  # noqa: E402
    INIT_SCALE,
    build_batch,
    build_criterion,
    build_model,
    build_optimizer,
)

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
WARM_UP = 5
UNTOUCHED = ("empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view")
COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}
MATRIX = {"cuda": 8192, "cpu": 1024}


class Counted(NamedTuple):
    """One call of an operator."""

    name: str
    operations: int
    bytes: int

    def at_the_roof(self, operations: float, bytes_: float) -> float:
        """Seconds, at so many operations and bytes a second."""
        return max(self.operations / operations, self.bytes / bytes_)


class Counter(TorchDispatchMode):
    """Writes down the operators that run inside of it, except those that touch no element."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Counted] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        packet = operator.overloadpacket
        name = packet.__name__
        if not operator.is_view and name not in UNTOUCHED:
            formula = flop_registry.get(packet)
            operations = formula(*args, **kwargs, out_val=result) if formula else 0
            moved = sum(map(size, tree_leaves((args, kwargs, result))))
            self.calls.append(Counted(name, operations, moved))
        return result


def size(leaf: object) -> int:
    """Bytes of a tensor; nothing of anything else."""
    return leaf.numel() * leaf.element_size() if isinstance(leaf, Tensor) else 0


def count(run: Callable[[], object]) -> list[Counted]:
    with Counter() as counter:
        run()
    return counter.calls


def seconds(run: Callable[[], object], block: int, rounds: int, device: str) -> float:
    """Of one run: the median of `rounds` blocks."""

    def finish() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    for _ in range(WARM_UP):
        run()
    times = []
    for _ in range(rounds):
        finish()
        start = time.perf_counter()
        for _ in range(block):
            run()
        finish()
        times.append((time.perf_counter() - start) / block)
    return median(times)


def bytes_a_second(args: argparse.Namespace) -> float:
    """Of a copy, read and written."""
    source = torch.ones(COPY_BYTES[args.device] // 4, device=args.device)
    target = torch.empty_like(source)
    moved = 2 * size(source)
    return moved / seconds(lambda: target.copy_(source), args.block, args.rounds, args.device)


def operations_a_second(args: argparse.Namespace) -> float:
    """Of a product of two square matrices, in the step's precision."""
    side, dtype = MATRIX[args.device], DTYPES[args.precision]
    left, right = torch.randn(2, side, side, device=args.device).to(dtype)
    return 2 * side**3 / seconds(lambda: left @ right, args.block, args.rounds, args.device)


def build_step(args: argparse.Namespace) -> Callable[[], None]:
    """The step of peers/torch_plain.py, on one GPU."""
    model = build_model(args).to(args.device, memory_format=torch.channels_last)
    optimizer = build_optimizer(args, model.parameters())
    if args.compile:
        model.compile()
    dtype = DTYPES[args.precision]
    scaler = torch.amp.GradScaler(args.device, INIT_SCALE, enabled=dtype == torch.float16)
    criterion = build_criterion(args)
    images, targets = build_batch(args, torch.device(args.device))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(args.device, dtype, enabled=dtype != torch.float32):
            loss = criterion(model(images), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def totals(calls: list[Counted], operations: float, bytes_: float) -> tuple[float, Counted]:
    """Seconds at the roof, and the sums."""
    roof = sum(call.at_the_roof(operations, bytes_) for call in calls)
    sums = (sum(call.operations for call in calls), sum(call.bytes for call in calls))
    return roof, Counted("all", *sums)


def table(calls: Iterable[Counted], operations: float, bytes_: float) -> str:
    """The operators, in Markdown, those with the longest times at the roof first."""
    by_name: dict[str, list[Counted]] = {}
    for call in calls:
        by_name.setdefault(call.name, []).append(call)
    rows = []
    for name, group in by_name.items():
        roof, total = totals(group, operations, bytes_)
        cells = f"{total.operations / 1e9:.1f} | {total.bytes / 1e9:.2f} | {roof * 1e3:.2f}"
        rows.append((roof, f"| {name} | {len(group)} | {cells} |"))
    lines = [line for _, line in sorted(rows, reverse=True)]
    heads = "| operator | calls | Gop | GB | ms at the roof |\n|---|---|---|---|---|"
    return "\n".join([heads, *lines])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--arch", default="resnet50", help="one of torchvision's models")
    add("--batch-size", type=whole_number, default=256)
    add("--image-size", type=whole_number, default=224)
    add("--precision", choices=DTYPES, default="fp16")
    add("--optimizer", choices=("sgd", "adamw"), default="sgd")
    add("--compile", action="store_true", help="the step that is timed")
    add("--device", choices=("cuda", "cpu"), default=None, help="default: cuda if there is one")
    add("--block", type=whole_number, default=10, help="timed runs of a turn")
    add("--rounds", type=whole_number, default=7, help="turns of each")
    add("--output", type=file_name, default=HERE / "roofline.csv")
    args = parser.parse_args()
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return args


def main() -> None:
    args = parse_args()
    # A product of fp32 matrices is held against convolutions, so it is to have the same TF32.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.benchmark = True
    operations, bytes_ = operations_a_second(args), bytes_a_second(args)
    eager = build_step(argparse.Namespace(**vars(args) | {"compile": False}))
    eager()  # makes the optimizer's state, which is not part of a step
    calls = count(eager)
    del eager
    own = seconds(build_step(args), args.block, args.rounds, args.device)
    roof, total = totals(calls, operations, bytes_)

    with args.output.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*Counted._fields, "seconds_at_the_roof"])
        writer.writerows([*call, f"{call.at_the_roof(operations, bytes_):.9f}"] for call in calls)
    args.gpus = 1
    print(conditions(args))
    print(f"copy {bytes_ / 1e9:,.0f} GB/s, matrix product {operations / 1e12:,.2f} Top/s")
    print(
        f"a step: {total.operations / 1e12:.3f} Top, {total.bytes / 1e9:.2f} GB, {own * 1e3:.2f} ms"
    )
    print(f"at the roof: {roof * 1e3:.2f} ms, a share of {roof / own:.2f}", end="; ")
    shares = total.operations / operations / own, total.bytes / bytes_ / own
    print("of operations alone {:.2f}, of bytes alone {:.2f}\n".format(*shares))
    print(table(calls, operations, bytes_))


if __name__ == "__main__":
    main()
