"""How fast a training step is on more GPUs than were at hand: a model, fitted to 1, 2 and 4 H200s.

    python benchmarks/scaling_model.py                  # its tables
    python benchmarks/scaling_model.py --write          # writes them into the pages
    python benchmarks/scaling_model.py --step-ms 180 --parameters 300e6 --nics 1 --gbits 100

The last form is for a job of your own: --step-ms is its step on one GPU. scaling_model.md states
what the model is made of, where each number is from, and what it leaves out.
"""

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import NormalDist, fmean
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

BENCHMARKS = Path(__file__).resolve().parent
DOCS = BENCHMARKS.parent / "docs"
COUNTS = (8, 16, 64, 256, 1024, 4096)
GB, MS, US = 1e9, 1e-3, 1e-6

# From documents; scaling_model.md names them.
NVLINK = 370 * GB  # bus bandwidth of a ring on Hopper
NIC_SHARE = 0.94  # of a network card's line rate that NCCL reaches
BASE = {"ring": 8.4 * US, "tree": 14.0 * US}  # NCCL's for its protocols Simple and LL128
INSIDE = {"ring": 3.4 * US, "tree": 1.25 * US}  # a hop over NVLink
BETWEEN = {"ring": 14.0 * US, "tree": 8.5 * US}  # a hop over the network
TREE_SHARE = 0.92 * 120 / 128  # of the bandwidth, for a tree with LL128
FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20  # DistributedDataParallel's
GPU_HOURS_TO_FAILURE = 16_384 * 54 * 24 / 419  # Llama 3

# Assumed.
BACKWARD = 2 / 3  # of a step
FRACTION = 0.5  # of a GPU's memory, for all but activations
SAVE_BANDWIDTH = 2 * GB  # of one process writing a checkpoint
RESTART = 600.0  # seconds from a failure to the first step after it

RESNET50, TRANSFORMER = 25_557_032, 1_315_950_592  # parameters; the second is MPT-1B's
STATE = {"DDP, O1": 16, "DDP, O2": 20, "FSDP": 16}  # bytes per parameter, see large_models.md
IMAGE = 101e3  # bytes of a JPEG file in benchmarks/RESULTS.md
DECODED = 3_325 / 8  # images/s of a core by --decode cpu, beside the training; from there, too
SEQUENCE = 2048


class Cluster(NamedTuple):
    """Hosts of NVLink-connected GPUs, and the network between them."""

    nics: int = 8  # of a host
    gbits: float = 400  # of each
    per_host: int = 8
    nvlink: float = NVLINK

    def hosts(self, gpus: int) -> int:
        return math.ceil(gpus / self.per_host)

    def bandwidth(self, gpus: int) -> float:
        """Bus bandwidth: what a ring's slowest link carries."""
        if gpus <= self.per_host:
            return self.nvlink
        return min(self.nvlink, self.nics * self.gbits / 8 * GB * NIC_SHARE)


BEST = Cluster()
NETWORKS = {
    "8 × 400 Gb/s": BEST,
    "1 × 400 Gb/s": Cluster(nics=1),
    "1 × 100 Gb/s": Cluster(nics=1, gbits=100),
    "1 × 25 Gb/s": Cluster(nics=1, gbits=25),
}


def ring(size: float, gpus: int, cluster: Cluster) -> float:
    """Seconds of an all-reduce of `size` bytes in one ring through all GPUs."""
    hops, across = 2 * (gpus - 1), 2 * (cluster.hosts(gpus) - 1)
    latency = BASE["ring"] + (hops - across) * INSIDE["ring"] + across * BETWEEN["ring"]
    return latency + hops / gpus * size / cluster.bandwidth(gpus)


def tree(size: float, gpus: int, cluster: Cluster) -> float:
    """Seconds of one in a chain within each host and a tree between them, up and down."""
    local = min(gpus, cluster.per_host)
    depth = math.log2(cluster.hosts(gpus))
    latency = BASE["tree"] + 2 * ((local - 1) * INSIDE["tree"] + depth * BETWEEN["tree"])
    return latency + 2 * size / (TREE_SHARE * cluster.bandwidth(gpus))


def all_reduce(size: float, gpus: int, cluster: Cluster) -> float:
    """Seconds by the faster of the two, which is how NCCL chooses."""
    return min(way(size, gpus, cluster) for way in (ring, tree)) if gpus > 1 else 0.0


def buckets(size: float, bucket: float = BUCKET) -> list[float]:
    """The sizes in which DistributedDataParallel sends gradients of `size` bytes."""
    first = min(size, FIRST_BUCKET, bucket)
    whole, rest = divmod(size - first, bucket)
    return [first, *[bucket] * int(whole), *[rest] * (rest > 0)]


def exposed(
    backward: float, size: float, gpus: int, cluster: Cluster, bucket: float = BUCKET
) -> float:
    """Seconds by which the last all-reduce outlasts the backward pass.

    Gradients become ready evenly over that pass, and a bucket waits for the one before it.
    """
    done = end = 0.0
    for part in buckets(size, bucket):
        done += part
        ready = min(1.0, done / size) * backward
        end = max(ready, end) + all_reduce(part, gpus, cluster)
    return max(0.0, end - backward)


def expected_maximum(count: int) -> float:
    """Of `count` standard normal numbers (Blom's approximation)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


class Work(NamedTuple):
    """What one GPU does in a step, without the others."""

    gpu: float  # seconds that its kernels take
    cpu: float = 0.0  # seconds that starting them takes
    loader: float = 0.0  # seconds that its share of the cores takes for the next batch
    gradients: float = RESNET50 * 4.0  # bytes
    micro_batches: int = 1  # accumulated; only the last one's backward pass sends gradients
    graphs: bool = False  # as with CUDA graphs: all gradients are sent when there are all

    @property
    def seconds(self) -> float:
        """The three go on at once, so the longest counts."""
        return max(self.gpu, self.cpu, self.loader)


class Step(NamedTuple):
    """The parts of a step, in seconds."""

    alone: float
    waiting: float  # for the slowest GPU
    sending: float  # gradients, when there is nothing left to compute

    @property
    def seconds(self) -> float:
        return sum(self)


def predict(work: Work, gpus: int, cluster: Cluster, bucket: float = BUCKET) -> Step:
    """A step on `gpus` GPUs, each of which does `work`."""
    if work.cpu and gpus > 1:
        work = work._replace(cpu=work.cpu + FITTED.ddp)
    backward = BACKWARD * work.seconds / work.micro_batches
    sending = exposed(backward, work.gradients, gpus, cluster, bucket)
    if work.graphs and gpus > 1:
        sending = all_reduce(work.gradients, gpus, cluster) + FITTED.at_once
    return Step(work.seconds, work.seconds * FITTED.noise * expected_maximum(gpus), sending)


def efficiency(work: Work, gpus: int, cluster: Cluster, bucket: float = BUCKET) -> float:
    """Speed to that of as many single GPUs."""
    return work.seconds / predict(work, gpus, cluster, bucket).seconds


# What was measured: H200s of one host, torch 2.11, CUDA 13, ResNet-50, 224², synthetic images.


class Measured(NamedTuple):
    what: str
    batch: int  # of each GPU
    gpus: int
    seconds: float
    alone: float  # seconds of its step on one GPU
    use: str = ""  # what was fitted to it
    on_cpu: bool = False  # the CPU is slower than the GPU
    gradient: int = 4  # bytes
    graphs: bool = False

    def work(self) -> Work:
        gradients = float(RESNET50 * self.gradient)
        if self.on_cpu:
            return Work(0.0, self.alone, gradients=gradients)
        return Work(self.alone, gradients=gradients, graphs=self.graphs)


EAGER, EAGER_32 = 256 / 6_224, 32 / 2_885  # torch by hand
# main.py: a median of step_compiled.csv, and those of three other files of benchmarks/.
COMPILED, GRAPHS_32 = 35.71 * MS, 6.62 * MS
O1, O1_OF_EIGHT = 41.96 * MS, 42.11 * MS
EAGER_32_SLOW = 18.5 * MS  # where the CPU is slow
MEASURED = (
    Measured("torch, fp16", 256, 4, 1024 / 23_962, EAGER, "noise"),
    Measured("torch, fp16, compiled", 256, 4, 1024 / 26_037, 256 / 6_811, "noise"),
    Measured("Apex, O1, NCHW", 256, 4, 1024 / 11_916, 256 / 3_022, "noise"),
    Measured("Apex, O1", 256, 4, 1024 / 23_191, 256 / 6_006, "noise"),
    Measured("Apex, O2", 256, 4, 1024 / 23_561, 256 / 6_022, "noise", gradient=2),
    Measured("torch, fp16", 32, 4, 128 / 9_069, EAGER_32, "DDP on the CPU", on_cpu=True),
    Measured("Apex, O1", 32, 4, 128 / 8_437, 32 / 2_502, on_cpu=True),
    Measured("main.py, O1", 256, 2, 42.87 * MS, O1),
    Measured("main.py, O1", 256, 4, 43.21 * MS, O1),
    Measured("main.py, O1, a host with eight", 256, 2, 43.03 * MS, O1_OF_EIGHT),
    Measured("main.py, O1, a host with eight", 256, 4, 43.55 * MS, O1_OF_EIGHT),
    Measured("main.py, O1, a host with eight", 256, 8, 43.84 * MS, O1_OF_EIGHT),
    Measured("the same model, compiled", 256, 2, 37.78 * MS, COMPILED),
    Measured("the same model, CUDA graphs", 256, 2, 37.40 * MS, COMPILED, graphs=True),
    Measured("main.py, CUDA graphs", 32, 2, 7.34 * MS, GRAPHS_32, "sending at once", graphs=True),
    Measured("main.py, O1, a slower CPU", 32, 2, 25.6 * MS, EAGER_32_SLOW, on_cpu=True),
    Measured("main.py, O1, a slower CPU", 32, 4, 29.6 * MS, EAGER_32_SLOW, on_cpu=True),
)


class Fitted(NamedTuple):
    fixed: float  # seconds of a compiled step, however small the batch
    per_image: float
    ddp: float  # seconds of the CPU that DistributedDataParallel adds
    at_once: float  # seconds that sending all gradients at once takes, beside the sending
    noise: float  # standard deviation of a GPU's step, as a share of it


def fit() -> Fitted:
    """Each number by its formula turned round; `noise` is a mean over several figures."""

    def unsent(one: Measured) -> float:
        backward = BACKWARD * one.alone
        return one.seconds - exposed(backward, one.work().gradients, one.gpus, BEST)

    per_image = (COMPILED - GRAPHS_32) / (256 - 32)
    noise = fmean(
        (unsent(one) / one.alone - 1) / expected_maximum(one.gpus)
        for one in MEASURED
        if one.use == "noise"
    )
    (late,) = (one for one in MEASURED if one.use == "DDP on the CPU")
    ddp = unsent(late) / (1 + noise * expected_maximum(late.gpus)) - late.alone
    (two,) = (one for one in MEASURED if one.use == "sending at once")
    waited = two.alone * (1 + noise * expected_maximum(two.gpus))
    at_once = two.seconds - waited - all_reduce(two.work().gradients, two.gpus, BEST)
    return Fitted(GRAPHS_32 - 32 * per_image, per_image, ddp, at_once, noise)


FITTED = fit()


def modelled(one: Measured) -> float:
    """What the model says in place of a measured figure."""
    return predict(one.work(), one.gpus, BEST).seconds


# What others have published.


class Published(NamedTuple):
    what: str
    gpus: int
    batch: int  # of each GPU; sequences in MPT's
    per_second: float  # images or tokens, of all GPUs


MLPERF_A100 = (
    Published("MLPerf 2.0, DGX A100", 8, 408, 27_003),
    Published("MLPerf 2.0, DGX A100", 64, 51, 166_876),
    Published("MLPerf 2.0, DGX A100", 1024, 35, 2_326_751),
    Published("MLPerf 2.0, DGX A100", 4216, 16, 6_144_686),
)
MLPERF_H100 = (
    Published("MLPerf 3.0, DGX H100", 8, 400, 55_788),
    Published("MLPerf 3.0, DGX H100", 64, 50, 293_442),
    Published("MLPerf 3.0, DGX H100", 512, 40, 2_226_664),
    Published("MLPerf 3.0, DGX H100", 768, 42, 3_387_091),
    Published("MLPerf 3.1, HGX H100", 3584, 16, 9_855_131),
)
MPT_1B = (
    Published("MPT-1B, FSDP, H100", 16, 20, 736_596),
    Published("MPT-1B, FSDP, H100", 32, 20, 1_444_183),
    Published("MPT-1B, FSDP, H100", 64, 20, 2_841_754),
)
MPT_3B = (
    Published("MPT-3B, FSDP, H100", 32, 6, 736_701),
    Published("MPT-3B, FSDP, H100", 64, 6, 1_441_663),
)
DGX_A100_TF32 = (
    Published("DeepLearningExamples, TF32, DGX A100", 1, 256, 938),
    Published("DeepLearningExamples, TF32, DGX A100", 8, 256, 7_248),
)
DGX_A100_AMP = (
    Published("DeepLearningExamples, mixed, DGX A100", 1, 256, 2_470),
    Published("DeepLearningExamples, mixed, DGX A100", 8, 256, 16_621),
)
DGX_A100 = Cluster(gbits=200, nvlink=235 * GB)
# From the same logs of MLPerf: GPUs, global batch, epochs and seconds to an accuracy of 75.9%.
RUNS = (
    ("H100", 8, 3_200, 35, 816.1),
    ("H100", 64, 3_200, 35, 159.9),
    ("H100", 512, 20_480, 50, 29.9),
    ("H100", 768, 32_256, 56, 22.2),
    ("H100", 3_584, 57_344, 77, 11.0),
    ("A100", 4_216, 67_456, 86, 19.1),
)


def follow(
    figures: tuple[Published, ...], given: int, cluster: Cluster, gradients: float, unit: int = 1
) -> list[tuple[Published, float | None]]:
    """The model's speed for the figures after the first `given`, which its compute is set to.

    One given figure sets the time of an image, two that and the time of an empty step.
    """

    def speed(one: Published, fixed: float, per_one: float) -> float:
        work = Work(fixed + per_one * one.batch, gradients=gradients)
        return one.batch * one.gpus * unit / predict(work, one.gpus, cluster).seconds

    alone = [(0, 0.0)] * (2 - given)  # batch and seconds on one GPU
    for one in figures[:given]:
        gpu = solve(lambda gpu, one=one: speed(one, gpu, 0.0), one.per_second)
        alone.append((one.batch, gpu))
    (small, fast), (large, slow) = sorted(alone)
    per_one = (slow - fast) / (large - small)
    fixed = fast - per_one * small
    return [
        (one, None if index < given else speed(one, fixed, per_one))
        for index, one in enumerate(figures)
    ]


def solve(speed: Callable[[float], float], wanted: float) -> float:
    """The seconds at which the falling function `speed` is `wanted`."""
    low, high = 1e-6, 100.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if speed(middle) > wanted else (low, middle)
    return low


def published() -> list[tuple[Published, float | None]]:
    half, single = RESNET50 * 2.0, RESNET50 * 4.0
    # What FSDP sends, gathers in 2 bytes and reductions in 4, is as much as an all-reduce in 4.
    return [
        *follow(DGX_A100_TF32, 1, DGX_A100, single),
        *follow(DGX_A100_AMP, 1, DGX_A100, single),
        *follow(MLPERF_A100, 2, DGX_A100, half),
        *follow(MLPERF_H100, 2, BEST, half),
        *follow(MPT_1B, 1, BEST, TRANSFORMER * 4.0, SEQUENCE),
        *follow(MPT_3B, 1, BEST, 2_651_837_440 * 4.0, SEQUENCE),
    ]


# The jobs that the tables are of.


def resnet50(batch: float, how: str = "compiled") -> Work:
    """At O1, a step of `batch` images: eager, compiled, or compiled with CUDA graphs.

    A compiled step is taken for one whose CPU is never late, so it is of large batches.
    """
    gpu = FITTED.fixed + FITTED.per_image * batch
    if how == "eager":
        return Work(gpu * O1 / COMPILED, EAGER_32)
    return Work(gpu, graphs=how == "graphs")


def transformer(tokens: float) -> Work:
    """MPT-1B, as fast on each GPU as published for 16 of them."""
    first = MPT_1B[0]
    waiting = 1 + FITTED.noise * expected_maximum(first.gpus)
    return Work(tokens * first.gpus / first.per_second / waiting, gradients=TRANSFORMER * 4.0)


def failures(gpus: int, state: float) -> tuple[float, float, float]:
    """Seconds between two of them; between two checkpoints of `state` bytes; the share lost.

    The second by Young's formula. Lost is what saving, training again and starting again take.
    """
    apart = GPU_HOURS_TO_FAILURE * 3600 / gpus
    save = state / SAVE_BANDWIDTH
    interval = math.sqrt(2 * save * apart)
    return apart, interval, save / interval + (interval / 2 + RESTART) / apart


# The tables.


def markdown(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows))


def difference(model: float, figure: float) -> str:
    return f"{model / figure - 1:+.1%}".replace("-", "−")


def measured_table() -> str:
    heads = ["run", "batch a GPU", "GPUs", "alone", "measured", "model", "difference", "used for"]
    rows = (
        [
            one.what,
            str(one.batch),
            str(one.gpus),
            *(f"{each / MS:.1f} ms" for each in (one.alone, one.seconds, modelled(one))),
            difference(modelled(one), one.seconds),
            one.use or "held out",
        ]
        for one in MEASURED
    )
    return markdown(heads, rows)


def fitted_table() -> str:
    two = f"main.py on one GPU: {GRAPHS_32 / MS:.2f} ms at batch 32, with CUDA graphs, and "
    two += f"{COMPILED / MS:.2f} ms at 256, compiled: two figures for two numbers"
    rows = (
        ["a compiled step of no image", f"{FITTED.fixed / MS:.2f} ms", two],
        ["an image more", f"{FITTED.per_image / US:.0f} µs", "the same"],
        ["DDP's CPU time", f"{FITTED.ddp / MS:.2f} ms", "torch, fp16, batch 32, four GPUs"],
        [
            "sending at once, beside the sending",
            f"{FITTED.at_once / MS:.2f} ms",
            "main.py, CUDA graphs, batch 32, two GPUs",
        ],
        ["noise", f"{FITTED.noise:.1%}", "the mean of the five rows of batch 256 marked so"],
    )
    return markdown(["number", "value", "fitted to"], rows)


def published_table() -> str:
    rows = (
        [
            one.what,
            f"{one.gpus:,}",
            str(one.batch),
            f"{one.per_second:,.0f}",
            f"{model:,.0f}" if model else "set to it",
            difference(model, one.per_second) if model else "",
        ]
        for one, model in published()
    )
    heads = ["source", "GPUs", "batch a GPU", "published, /s", "model, /s", "difference"]
    return markdown(heads, rows)


def resnet50_table() -> str:
    """Each GPU keeps its 256 images."""
    rows = []
    for gpus in (1, *COUNTS):
        work = resnet50(256)
        speed = 256 * gpus / predict(work, gpus, BEST).seconds
        rows.append(
            [
                f"{gpus:,}",
                *(f"{efficiency(work, gpus, cluster):.0%}" for cluster in NETWORKS.values()),
                f"{256 * gpus:,}",
                f"{speed:,.0f}",
                f"{speed * IMAGE / GB:,.1f} GB/s",
                f"{speed / gpus / DECODED:.0f}",
            ]
        )
    heads = ["GPUs", *NETWORKS, "global batch", "images/s", "read", "cores a GPU, to decode"]
    return markdown(heads, rows)


def capped(gpus: int) -> int:
    """Images of each GPU where all have 32,768 together."""
    return min(256, 32_768 // gpus)


def capped_table() -> str:
    rows = []
    for gpus in COUNTS:
        batch = capped(gpus)
        graphs = predict(resnet50(batch, "graphs"), gpus, BEST)
        compiled = predict(resnet50(batch), gpus, BEST).seconds
        eager = predict(resnet50(batch, "eager"), gpus, BEST)
        rows.append(
            [
                f"{gpus:,}",
                str(batch),
                f"{graphs.seconds / MS:.1f} ms",
                " + ".join(f"{part / MS:.1f}" for part in graphs),
                f"{batch * gpus / graphs.seconds:,.0f}",
                f"{compiled / MS:.1f} ms" if batch >= 128 else "–",
                f"{eager.seconds / MS:.1f} ms",
                f"{batch * gpus / eager.seconds:,.0f}",
            ]
        )
    heads = ["GPUs", "batch a GPU", "CUDA graphs", "compute + waiting + sending", "images/s"]
    return markdown([*heads, "compiled", "eager", "images/s, eager"], rows)


def runs_table() -> str:
    rows = (
        [
            f"{gpus:,} {kind}",
            f"{batch:,}",
            str(epochs),
            f"{seconds:,.0f} s",
            f"{gpus * seconds / 3600:.1f}",
        ]
        for kind, gpus, batch, epochs, seconds in RUNS
    )
    return markdown(["GPUs", "global batch", "epochs", "time", "GPU hours"], rows)


def sequences(gpus: int) -> int:
    """Of each GPU, where all have at most 4 Mi tokens together."""
    return min(20, 2**22 // SEQUENCE // gpus)


def transformer_table() -> str:
    rows = []
    for gpus in COUNTS:
        count = sequences(gpus)
        work = transformer(count * SEQUENCE)
        shares = [
            f"{efficiency(work, gpus, cluster):.0%}" if count else "–"
            for cluster in NETWORKS.values()
        ]
        apart, interval, lost = failures(gpus, TRANSFORMER * 12)
        rows.append(
            [
                f"{gpus:,}",
                str(count or "less than 1"),
                *shares,
                f"{apart / 3600:,.0f} h",
                f"{interval / 60:.0f} min",
                f"{lost:.1%}",
            ]
        )
    heads = ["GPUs", "sequences a GPU", *NETWORKS, "a failure every", "save every", "lost"]
    return markdown(heads, rows)


def remedies_table() -> str:
    slow = "1 × 100 Gb/s"
    cases = (
        ("ResNet-50, batch 256", resnet50(256), 64, "1 × 25 Gb/s"),
        ("ResNet-50, batch 32, CUDA graphs", resnet50(32, "graphs"), 64, slow),
        ("ResNet-50, batch 32, CUDA graphs", resnet50(32, "graphs"), 1024, "8 × 400 Gb/s"),
        ("MPT-1B, 8 sequences", transformer(8 * SEQUENCE), 64, slow),
    )
    rows = []
    for name, work, gpus, network in cases:
        cluster = NETWORKS[network]
        half = work._replace(gradients=work.gradients / 2)
        four = work._replace(gpu=work.gpu * 4, micro_batches=4)
        shares = (
            efficiency(work, gpus, cluster),
            efficiency(work, gpus, cluster, bucket=BUCKET / 5),
            efficiency(work, gpus, cluster, bucket=BUCKET * 4),
            efficiency(half, gpus, cluster),
        )
        # main.py refuses --accumulate with --cuda-graphs.
        last = "–" if "CUDA graphs" in name else f"{efficiency(four, gpus, cluster):.0%}"
        cells = [f"{share:.0%}" for share in shares]
        rows.append([f"{name}, {gpus:,} GPUs, {network}", *cells, last])
    heads = ["job", "as it is", "buckets of 5 MB", "of 100 MB", "half the bytes", "accumulate 4"]
    return markdown(heads, rows)


def memory_table() -> str:
    """Return the table of all but activations, and of the GPUs that have memory for these, too."""
    rows = []
    for billions in (0.35, 1.3, 3, 7, 13):
        o1, o2, fsdp = (billions * size for size in STATE.values())  # GB
        fits = [str(size) for size in (80, 141) if o1 <= size * FRACTION]
        rows.append(
            [
                f"{billions:g} billion",
                f"{o1:,.0f} GB",
                f"{o2:,.0f} GB",
                " and ".join(fits) or "none",
                *(f"{fsdp / gpus:,.1f} GB" for gpus in (8, 64)),
            ]
        )
    heads = ["parameters", "DDP, O1", "DDP, O2", "GPUs it fits (GB)"]
    return markdown([*heads, "FSDP over 8", "FSDP over 64"], rows)


TABLES = {
    "measured": measured_table,
    "fitted": fitted_table,
    "published": published_table,
    "resnet50": resnet50_table,
    "capped": capped_table,
    "runs": runs_table,
    "transformer": transformer_table,
    "remedies": remedies_table,
    "memory": memory_table,
}


def fill(page: str) -> str:
    """The page with today's tables between its marks."""

    def replace(found: re.Match[str]) -> str:
        return f"{found[1]}\n{TABLES[found[2]]()}\n{found[3]}"

    return re.sub(r"(<!-- table: (\w+) -->)\n.*?(<!-- end -->)", replace, page, flags=re.DOTALL)


def own_table(work: Work, cluster: Cluster) -> str:
    rows = []
    for gpus in (1, 2, 4, *COUNTS):
        step = predict(work, gpus, cluster)
        rows.append(
            [
                f"{gpus:,}",
                *(f"{each / MS:.1f}" for each in (step.seconds, step.waiting, step.sending)),
                f"{efficiency(work, gpus, cluster):.0%}",
            ]
        )
    return markdown(["GPUs", "step, ms", "waiting", "sending", "efficiency"], rows)


# The pictures, in Okabe and Ito's colours, which everyone can tell apart.

LOOKS = (("#0072B2", "o"), ("#E69F00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#D55E00", "v"))


def draw_efficiency(figure: Figure) -> None:
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    counts = [2**power for power in range(13)]
    for (name, cluster), (colour, mark) in zip(NETWORKS.items(), LOOKS, strict=False):
        look = {"color": colour, "marker": mark, "markersize": 4, "label": name}
        left.plot(counts, [efficiency(resnet50(256), n, cluster) for n in counts], **look)
        some = [n for n in counts if sequences(n)]
        shares = [efficiency(transformer(sequences(n) * SEQUENCE), n, cluster) for n in some]
        right.plot(some, shares, **look)
    seen = [one for one in MEASURED if one.batch == 256]
    left.plot(
        [one.gpus for one in seen],
        [one.alone / one.seconds for one in seen],
        "k+",
        markersize=8,
        label="measured",
    )
    left.set_title("ResNet-50, 256 images a GPU")
    right.set_title("MPT-1B, at most 4 Mi tokens together")
    left.set_ylabel("efficiency")
    for axes in (left, right):
        logarithmic(axes)
        axes.set_ylim(0, 1.05)
    left.legend(title="network of a host of 8", fontsize=8, title_fontsize=8)


def draw_check(figure: Figure) -> None:
    axes = figure.subplots()
    points: dict[str, list[tuple[int, float]]] = {}
    for one in MEASURED:
        if not one.use:
            off = one.seconds / modelled(one) - 1
            points.setdefault("measured here", []).append((one.gpus, off))
    for one, model in published():
        if model:
            source = one.what.split(maxsplit=1)[0].strip(",")
            off = model / one.per_second - 1
            points.setdefault(source, []).append((one.gpus, off))
    for (name, each), (colour, mark) in zip(points.items(), LOOKS, strict=False):
        axes.plot(*zip(*each, strict=True), mark, color=colour, label=name)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.axhspan(-0.05, 0.05, color="0.9", zorder=0)
    logarithmic(axes)
    axes.yaxis.set_major_formatter("{x:+.0%}")
    axes.set_ylabel("model's speed to it")
    axes.set_title("Figures that the model was not fitted to (grey: within 5%)")
    axes.legend(fontsize=8)


def logarithmic(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("GPUs")
    axes.grid(alpha=0.3)


PICTURES = {"scaling_efficiency.png": draw_efficiency, "scaling_check.png": draw_check}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--write",
        action="store_true",
        help="into docs/scaling.md and scaling_model.md, with pictures",
    )
    add("--step-ms", type=positive, help="of your job on one GPU")
    add("--loader-ms", type=positive, help="of its next batch on its share of the cores")
    add("--parameters", type=positive, default=RESNET50, help="that are trained")
    add("--gradient-bytes", type=positive, default=4, help="of each: 2 at O2")
    add("--nics", type=positive, default=BEST.nics, help="network cards of a host")
    add("--gbits", type=positive, default=BEST.gbits, help="of each, a second")
    add("--gpus-per-host", type=positive, default=BEST.per_host)
    return parser.parse_args()


def positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def main() -> int:
    args = parse_args()
    if args.step_ms:
        gradients = args.parameters * args.gradient_bytes
        loader = (args.loader_ms or 0) * MS
        work = Work(args.step_ms * MS, loader=loader, gradients=gradients)
        print(own_table(work, Cluster(args.nics, args.gbits, args.gpus_per_host)))
    elif args.write:
        for page in (DOCS / "scaling.md", BENCHMARKS / "scaling_model.md"):
            page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
        for name, draw in PICTURES.items():
            figure = Figure(figsize=(9, 3.6), layout="constrained")
            draw(figure)
            figure.savefig(DOCS / name, dpi=90)
    else:
        for name, table in TABLES.items():
            print(f"{name}\n\n{table()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
