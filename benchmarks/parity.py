"""Real Apex 25.05 and apex_native on the same data: losses, first gradients, loss scales.

    python benchmarks/parity.py        # needs Apex and two GPUs; --quick takes 20 steps
    python benchmarks/parity.py --device cpu --variants native native --steps 3   # tries itself

Trains ResNet-18 (as it is, and with SiLU) and a small transformer on the digits at O0 to O3, with
SGD and FusedAdam, in one process and in two (there in the backend's own DDP, with its SyncBN), from
the same weights, on the same batches. The first variant is what the others are compared with, the
last is judged; one in between is the band, a run that differs from the first in nothing but
rounding ("other": cuDNN's fastest algorithms, not its deterministic ones; for the transformer,
which has none of cuDNN's, cuBLASLt, and each batch back to front). Nowhere is there TF32 or
channels_last.

Writes parity.csv and parity.png and prints a table for RESULTS.md. Ends with status 1 if a run
failed, or if the gradient of the first step that was not skipped is off by more than its limit
and more than the band (but for SyncBN before a ReLU: see smooth_resnet18).
"""

import argparse
import csv
import importlib
import math
import multiprocessing
import sys
import tempfile
import time
import warnings
from argparse import Namespace
from collections import Counter, defaultdict
from datetime import timedelta
from itertools import product
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import resnet18

HERE = Path(__file__).resolve().parent
# Not this folder, whose syncbn.py would hide Apex's extension of that name.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != HERE]
sys.path.insert(0, str(HERE.parent / "{{cookiecutter.project_slug}}"))
sys.dont_write_bytecode = True  # cookiecutter would take the caches for a part of the template
from task import Digits  # noqa: E402

BATCH = 64
LEVELS = ("O0", "O1", "O2", "O3")
TRAINING_ORDER = ("O0", "O2", "O3", "O1")  # Apex's O1 patches torch for the rest of the process
CHANCE = 1.5  # between two distances that rounding alone makes
LIMITS = {"O0": 1e-5} | dict.fromkeys(("O1", "O2", "O3"), 1e-3)
# Half SyncBNs round otherwise than real Apex's, always by as much (0.0028 to 0.0037 from the
# measurement of 2026-11-21 on), while the band is 0.001 or 0.0025, as cuDNN's choice happens to be.
SYNCBN_LIMIT = 4e-3
OPTIMIZERS = {
    "SGD": {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4},
    "FusedAdam": {"lr": 1e-3, "weight_decay": 1e-2},
}
STYLES = (("#b0b0b0", 5.0), ("#e69f00", 2.2), ("#0072b2", 1.0))  # a colour and a width for each run
NAMES = {"apex": "real Apex", "apex-other": "real Apex, other algorithms", "native": "apex_native"}


class Block(nn.Module):
    """A transformer's layer, with attention spelled out in functions that Apex's O1 casts."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(N, tokens, width) → the same shape."""
        projected = self.project(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.shape[-1])
        mixed = torch.matmul(F.softmax(scores, dim=-1), value)
        x = x + self.merge(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Reads the 32 rows of an image; its channels are equal."""

    def __init__(self, width: int = 128, heads: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(32, width)
        self.position = nn.Parameter(0.02 * torch.randn(32, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, 32, 32) → (N, 10)."""
        rows = self.embed(images[:, 0]) + self.position
        return self.head(self.blocks(rows).mean(dim=1))


def smooth_resnet18() -> nn.Module:
    """ResNet-18 with SiLU for ReLU.

    A single ReLU whose input rounding moves over 0 changes the gradient of all layers below it by
    1e-3 and more, however near everything else is. SyncBNs that round differently do that.
    """
    model = resnet18(num_classes=10)
    for module in model.modules():
        if hasattr(module, "relu"):
            module.relu = nn.SiLU()
    return model


MODELS = {
    "resnet18": lambda: resnet18(num_classes=10),
    "resnet18-silu": smooth_resnet18,
    "transformer": Transformer,
}


class Job(NamedTuple):
    """What has processes of its own. `run` is the variant, with a number if it is not the first."""

    model: str
    optimizer: str
    gpus: int
    run: str

    def file(self, name: str) -> str:
        return "-".join(map(str, (*self, name)))


def batches(job: Job, rank: int, steps: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """This rank's images (64, 3, 32, 32) and labels at each step."""
    digits = Digits(train=True)
    images, labels = digits.images.to(device), digits.labels.to(device)
    generator = torch.Generator().manual_seed(0)
    order = torch.randint(len(labels), (steps, job.gpus, BATCH), generator=generator)[:, rank]
    if "other" in job.run and job.model == "transformer":
        order = order.flip(1)
    return [(images[chosen], labels[chosen]) for chosen in order.to(device)]


def train(job: Job, level: str, apex: ModuleType, data: list[tuple[Tensor, Tensor]]) -> dict:
    """Of each step: the loss, the scale, whether it was skipped; and the first true gradient."""

    def scale() -> float:
        return apex.amp.state_dict()["loss_scaler0"]["loss_scale"]

    torch.manual_seed(0)
    model = MODELS[job.model]().to(data[0][0].device)
    if job.gpus > 1:
        model = apex.parallel.convert_syncbn_model(model)
    kind = torch.optim.SGD if job.optimizer == "SGD" else apex.optimizers.FusedAdam
    optimizer = kind(model.parameters(), **OPTIMIZERS[job.optimizer])
    model, optimizer = apex.amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if job.gpus > 1:
        model = apex.parallel.DistributedDataParallel(model)

    losses, scales, skipped, gradient = [], [scale()], [], torch.tensor([math.nan])
    for images, labels in data:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        losses.append(loss.detach())
        scales.append(scale())
        if scales[-1] >= scales[-2] and all(skipped):  # the weights are still those of the start
            grads = [parameter.grad for parameter in apex.amp.master_params(optimizer)]
            gradient = torch.cat([grad.detach().float().flatten() for grad in grads]).cpu()
        skipped.append(int(scales[-1] < scales[-2]))
        optimizer.step()
    losses = torch.stack(losses).float().cpu()
    return {"loss": losses, "scale": scales[1:], "skipped": skipped, "gradient": gradient}


def work(job: Job, rank: int, devices: list[int], args: Namespace, folder: Path) -> None:
    """What each process of a job does: trains at every level and leaves the results in `folder`."""
    sys.stdout = sys.stderr  # what the backends have to say is no part of the table
    warnings.filterwarnings("ignore", "apex.* deprecated")
    torch.set_num_threads(1)
    other = "other" in job.run
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = other, not other
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    if other and job.model == "transformer":
        torch.backends.cuda.preferred_blas_library("cublaslt")
    on_gpu = args.device == "cuda"
    device = torch.device("cuda", devices[rank]) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if job.gpus > 1:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"file://{folder / job.file('store')}",
            rank=rank,
            world_size=job.gpus,
            timeout=timedelta(seconds=60),
        )
    apex = importlib.import_module("apex" if job.run.startswith("apex") else "apex_native")
    data = batches(job, rank, args.steps, device)
    for level in TRAINING_ORDER:
        result = train(job, level, apex, data)
        if rank == 0:
            torch.save(result, folder / job.file(level))
    if job.gpus > 1:
        dist.destroy_process_group()


def place(job: Job, running: dict[Job, tuple[list[int], list]], count: int) -> list[int]:
    """The least busy devices for a job; too few, for now, if it is a pair beside other pairs.

    NCCL's kernels hold a GPU while they wait for each other, so two pairs on the same two GPUs
    would mostly wait.
    """
    load = Counter(device for devices, _ in running.values() for device in devices)
    paired = {device for pair in running if pair.gpus > 1 for device in running[pair][0]}
    free = [device for device in range(count) if job.gpus == 1 or device not in paired]
    return sorted(free, key=lambda device: load[device])[: job.gpus]


def run_all(jobs: list[Job], count: int, args: Namespace, folder: Path) -> None:
    """Runs the jobs, pairs first, several at once. One that fails leaves results out."""
    context = multiprocessing.get_context("forkserver")  # one import of torch serves them all
    context.set_forkserver_preload(["matplotlib.figure", "torch", "torchvision"])
    waiting = sorted(jobs, key=lambda job: -job.gpus)
    running: dict[Job, tuple[list[int], list]] = {}
    start = time.monotonic()
    while waiting or running:
        for job in list(waiting):
            devices = place(job, running, count)
            if len(devices) == job.gpus and len(running) < args.jobs:
                waiting.remove(job)
                calls = [(job, rank, devices, args, folder) for rank in range(job.gpus)]
                processes = [context.Process(target=work, args=call, daemon=True) for call in calls]
                running[job] = devices, processes
                for process in processes:
                    process.start()
        started = [process for _, processes in running.values() for process in processes]
        wait([process.sentinel for process in started if process.exitcode is None])
        for job, (_, processes) in list(running.items()):
            codes = [process.exitcode for process in processes]
            if any(codes) or None not in codes:
                for process in processes:
                    process.kill()  # the other one of a pair would wait in vain
                del running[job]
                outcome = f"{time.monotonic() - start:4.0f} s: {'failed' if any(codes) else 'done'}"
                print(outcome, *job, file=sys.stderr)


def distance(gradient: Tensor, other: Tensor) -> float:
    return ((gradient - other).norm() / gradient.norm()).item()


def table(results: dict[tuple, dict], runs: list[str]) -> tuple[str, bool]:
    """Each configuration in Markdown, and whether every gradient is near enough."""
    first, *band, judged = runs
    others = [judged, *band]
    heads = ["model", "optimizer", "GPUs", "level", *(f"mean \\|Δloss\\|, {run}" for run in others)]
    heads += [f"gradient, {run}" for run in others]
    heads += [f"skipped: {', '.join(runs)}", f"same scales: {', '.join(others)}"]
    lines, all_near = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"], True
    # The first gradient is before any step: runs with other optimizers measure its band, too.
    bands = defaultdict(list)
    for (model, _, gpus, level), of_runs in results.items():
        if first in of_runs:
            gradient = of_runs[first]["gradient"]
            seen = [of_runs[run]["gradient"] for run in band if run in of_runs]
            bands[model, gpus, level] += [distance(gradient, other) for other in seen]
    for (model, optimizer, gpus, level), of_runs in results.items():
        cells = [model, optimizer, str(gpus), level]
        if failed := [run for run in runs if run not in of_runs]:
            lines.append("| " + " | ".join([*cells, f"failed: {', '.join(failed)}"]) + " |")
            all_near = False
            continue
        loss, gradient, scale = (of_runs[first][name] for name in ("loss", "gradient", "scale"))
        cells += [f"{(loss - of_runs[run]['loss']).abs().mean():.2g}" for run in others]
        distances = [distance(gradient, of_runs[run]["gradient"]) for run in others]
        near = distances[0] <= CHANCE * max(bands[model, gpus, level], default=0)
        mark = ""
        has_half_syncbn = gpus > 1 and level != "O0" and model.startswith("resnet18")
        if not distances[0] <= (SYNCBN_LIMIT if has_half_syncbn else LIMITS[level]):
            turns_over = model == "resnet18" and gpus > 1
            mark = " †" if near else " ‡" if turns_over else " **too far**"
        cells += [f"{distances[0]:.2g}{mark}", *(f"{distance:.2g}" for distance in distances[1:])]
        cells.append(", ".join(str(sum(of_runs[run]["skipped"])) for run in runs))
        same = [scale == of_runs[run]["scale"] for run in others]
        cells.append(", ".join("yes" if equal else "**no**" for equal in same))
        lines.append("| " + " | ".join(cells) + " |")
        all_near &= "too far" not in mark
    note = f"All against {first}. gradient: ‖g − g'‖ / ‖g‖ of the first step that was not skipped; "
    lines += [
        "",
        note + "limits: 1e-5 at O0, 1e-3 at O1 to O3, 4e-3 with SyncBN. †: above its limit, as far "
        "as the band is. ‡: above it, where SyncBN rounds otherwise and ReLUs turn over; see SiLU.",
    ]
    return "\n".join(lines), all_near


def write(results: dict[tuple, dict], path: Path) -> None:
    """The curves, a line for each step of each run."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*Job._fields[:3], "level", "variant", "step", "loss", "scale", "skipped"])
        for key, of_runs in results.items():
            for run, result in of_runs.items():
                losses = [f"{loss:.6g}" for loss in result["loss"].tolist()]
                steps = zip(losses, result["scale"], result["skipped"], strict=True)
                writer.writerows([*key, run, step, *seen] for step, seen in enumerate(steps))


def draw(results: dict[tuple, dict], runs: list[str], path: Path) -> None:
    """A row for each model, optimizer and number of GPUs, a column for each level."""
    rows = list(dict.fromkeys(key[:3] for key in results))
    figure = Figure(figsize=(12, 1 + 1.6 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), len(LEVELS), sharex=True, sharey=True, squeeze=False)
    styles = dict(zip(runs, STYLES if len(runs) > 2 else STYLES[::2], strict=True))
    for (*key, level), of_runs in results.items():
        panel = panels[rows.index(tuple(key)), LEVELS.index(level)]
        for run, result in of_runs.items():
            color, width = styles[run]
            means = result["loss"].unfold(0, min(10, len(result["loss"])), 1).mean(1)
            panel.plot(means, color=color, lw=width, label=NAMES.get(run, run))
        panel.set(yscale="log")
        panel.grid(alpha=0.3)
    for panel, key in zip(panels[:, 0], rows, strict=True):
        panel.set_ylabel("{}\n{}, GPUs: {}".format(*key))
    for panel, level in zip(panels[0], LEVELS, strict=True):
        panel.set_title(level)
    figure.supxlabel("step")
    figure.supylabel("loss of rank 0, mean of 10 steps")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    figure.savefig(path, dpi=100)


def parse_args() -> tuple[Namespace, int]:
    """The arguments, and the number of devices."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    variants = [backend + other for backend in ("apex", "native") for other in ("", "-other")]
    add("--steps", type=int, default=200)
    add("--quick", dest="steps", action="store_const", const=20, help="--steps 20")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--variants", nargs="+", choices=variants, default=["apex", "apex-other", "native"])
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    add("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS))
    add("--gpus", nargs="+", type=int, choices=(1, 2), default=[1, 2], help="processes of a run")
    add("--jobs", type=int, default=6, help="how many runs go on at once")
    add("--output", type=Path, default=HERE, help="folder of parity.csv and parity.png")
    args = parser.parse_args()
    if not 2 <= len(args.variants) <= 3:
        parser.error("--variants takes two, or three with a band")
    needed = ("amp_C", "apex.amp", "apex.optimizers", "apex.parallel")
    try:
        for module in needed if any(name.startswith("apex") for name in args.variants) else ():
            importlib.import_module(module)
    except Exception as error:  # an Apex that was built for another torch fails in many ways
        problem = f"{type(error).__name__}: {error}"
        parser.exit(2, f"error: real Apex can't be imported here ({problem})\n")
    count = torch.cuda.device_count() if args.device == "cuda" else max(args.gpus)
    if count < max(args.gpus):
        parser.error(f"--gpus {max(args.gpus)}: this machine has {count} GPUs")
    return args, count


def main() -> int:
    args, count = parse_args()
    times = [args.variants[:index].count(name) for index, name in enumerate(args.variants)]
    runs = [f"{name} {n + 1}" if n else name for name, n in zip(args.variants, times, strict=True)]
    configurations = list(product(args.models, args.optimizers, args.gpus))
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_all([Job(*key, run) for key in configurations for run in runs], count, args, folder)
        results = {}
        for key, level in product(configurations, LEVELS):
            files = {run: folder / Job(*key, run).file(level) for run in runs}
            results[(*key, level)] = {
                run: torch.load(file, mmap=True) for run, file in files.items() if file.exists()
            }
        write(results, args.output / "parity.csv")
        text, all_near = table(results, runs)
        print(text)
        draw(results, runs, args.output / "parity.png")
    return 0 if all_near else 1


if __name__ == "__main__":
    sys.exit(main())
