"""The speeds of RESULTS.md as a picture, from the turns that the other programs have written.

    python benchmarks/pictures.py [--output benchmarks/speed.png]

Each bar is a median, its line the fastest and the slowest turn.
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from flags import file_name
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scaling_model import LOOKS, logarithmic

HERE = Path(__file__).resolve().parent
(OURS, _), (THEIRS, _), *_ = LOOKS
BATCH = 256  # of loader.csv

STEP = (
    ("step.csv", "apex_snippet", "usual Apex script"),
    ("step.csv", "apex_channels_last-O1", "Apex without its DDP"),
    ("step_compiled.csv", "accelerate", "Accelerate"),
    ("step_compiled.csv", "fabric", "Fabric"),
    ("step_compiled.csv", "torch-fp16", "PyTorch"),
    ("step_compiled.csv", "project-O1", "main.py"),
    ("step_compiled.csv", "torch-compile-fp16", "PyTorch, compiled"),
    ("step_compiled.csv", "project-compile-O1", "main.py --compile"),
)
SMALL_STEP = (
    ("step_small.csv", "torch-fp16", "PyTorch"),
    ("step_small.csv", "project-compile-O1", "main.py --compile"),
    ("step_small.csv", "torch-graphs-fp16", "PyTorch, CUDA graphs"),
    ("step_small.csv", "project-graphs-O1", "main.py --cuda-graphs"),
)
SYNCED = (
    ("syncbn_slow.csv", "torch", "PyTorch, slower CPU"),
    ("syncbn_slow.csv", "native", "apex_native, slower CPU"),
    ("syncbn_slow.csv", "none", "no SyncBN, slower CPU"),
    ("syncbn.csv", "torch", "PyTorch"),
    ("syncbn.csv", "native", "apex_native"),
    ("syncbn.csv", "none", "no SyncBN"),
    ("syncbn.csv", "compiled-native", "apex_native, compiled"),
    ("syncbn.csv", "compiled-none", "no SyncBN, compiled"),
    ("syncbn_graphs.csv", "graphs-native", "apex_native, CUDA graphs, 3rd host"),
    ("syncbn_graphs.csv", "graphs-none", "no SyncBN, CUDA graphs, 3rd host"),
)
LOADERS = (
    ("loader.csv", "usual (PIL)", "PIL"),
    ("loader.csv", "--decode cpu", "--decode cpu"),
    ("loader.csv", "--decode gpu", "--decode gpu"),
    ("loader.csv", "synthetic", "no files (synthetic)"),
)


def turns(file: str, name: str, **others: object) -> list[float]:
    """The milliseconds of each turn of the contestant called `name`."""
    wanted = {column: str(value) for column, value in others.items()}
    with (HERE / file).open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if name == next(iter(row.values()))]
    rows = [row for row in rows if wanted.items() <= row.items()]
    return [
        float(row["ms_per_step"]) if "ms_per_step" in row else float(row["seconds"]) * 1e3
        for row in rows
    ]


def bars(axes: Axes, entries: Sequence[tuple[str, str, str]], images: int = 0) -> None:
    """Draw bars of milliseconds, or of images/s with so many images per step."""
    for place, (file, name, label) in enumerate(reversed(entries)):
        values = [images / ms * 1e3 if images else ms for ms in turns(file, name)]
        middle = median(values)
        is_ours = label.startswith(("main.py", "--", "apex_native", "no"))
        axes.barh(place, middle, color=OURS if is_ours else THEIRS)
        axes.plot([min(values), max(values)], [place, place], color="black", linewidth=1)
        axes.annotate(
            f"{middle:,.0f}" if images else f"{middle:.1f}",
            (max(values), place),
            (3, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(entries)), [label for *_, label in reversed(entries)])
    axes.margins(x=0.18)
    axes.set_xlabel("images/s" if images else "ms per step")


def draw_gpus(axes: Axes) -> None:
    runs = (
        ("scaling.csv", "project-O1", (1, 2, 4), "batch 256"),
        ("scaling_8.csv", "project-O1", (1, 2, 4, 8), "batch 256, older version"),
        ("scaling_small.csv", "project-graphs-O1", (1, 2), "batch 32, --cuda-graphs"),
    )
    for (file, name, counts, label), (colour, mark) in zip(runs, LOOKS, strict=False):
        times = [median(turns(file, name, gpus=count)) for count in counts]
        speeds = [times[0] / time for time in times]
        axes.plot(counts, speeds, color=colour, marker=mark, markersize=4, label=label)
    logarithmic(axes)
    axes.set_ylim(0.8, 1.005)
    axes.set_ylabel("efficiency")
    axes.legend(fontsize=8, loc="lower right")


def draw_growth(axes: Axes) -> None:
    batches, sides = (32, 64, 128, 256, 512), (112, 160, 224, 320, 448)
    along = (
        ("growth_batch.csv", "batch, at 224²", [(batch, 224) for batch in batches]),
        ("growth_image.csv", "image, at batch 64", [(64, side) for side in sides]),
    )
    for (file, label, places), (colour, mark) in zip(along, LOOKS, strict=False):
        pixels = [batch * side**2 / 1e6 for batch, side in places]
        times = [
            median(turns(file, "project-O1", batch_size=batch, image_size=side))
            for batch, side in places
        ]
        axes.plot(pixels, times, color=colour, marker=mark, markersize=4, label=label)
    axes.set_ylim(0)
    axes.set_xlabel("10⁶ pixels per step")
    axes.set_ylabel("ms per step")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=file_name, default=HERE / "speed.png")
    args = parser.parse_args()
    figure = Figure(figsize=(10, 8), layout="constrained")
    panels = figure.subplots(3, 2)
    for axes, entries, images, title in zip(
        panels.flat,
        (STEP, SMALL_STEP, SYNCED, LOADERS),
        (0, 0, 0, BATCH),
        (
            "Step time, batch 256 (two runs)",
            "Step time, batch 32",
            "Step time with SyncBN, batch 256, two GPUs",
            "Training from JPEG files, 8 cores",
        ),
        strict=False,
    ):
        bars(axes, entries, images)
        axes.set_title(title, fontsize=10)
    draw_gpus(panels[2, 0])
    panels[2, 0].set_title("Efficiency on the GPUs of one host", fontsize=10)
    draw_growth(panels[2, 1])
    panels[2, 1].set_title("Step time by pixels (two runs)", fontsize=10)
    title = "ResNet-50, O1 or fp16, NVIDIA H200; blue: this project"
    figure.suptitle(title, fontsize=12)
    figure.savefig(args.output, dpi=90)


if __name__ == "__main__":
    main()
