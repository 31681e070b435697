"""Draws runs, out of the metrics.csv and the config.json that they leave.

python -m engine.report RUN                            RUN/curves.png, once more
python -m engine.report RUN RUN … [--output FILE]      several runs in one picture

matplotlib is loaded where it is used: a training process reads the table and draws nothing.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import statistics
import sys
from dataclasses import dataclass
from itertools import chain, cycle
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from engine.errors import BAD_USAGE, UserError
from engine.files import replacing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

TABLE, CONFIG, PICTURE = "metrics.csv", "config.json", "curves.png"
COLUMNS = ("epoch", "step", "train_loss", "val_loss", "lr", "loss_scale", "images_per_second")
PLACES = ("output", "resume", "config")  # flags that do not make runs differ
# Okabe and Ito's colours, which the colour-blind tell apart; in black and white, markers do it.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = "osD^vP"
FIRST = {"linestyle": "--", "marker": "o", "markerfacecolor": "white"}  # of two
LAST = {"linestyle": "-", "marker": "o"}
MOST_MARKERS = 20  # on a line
STYLE = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
    "lines.markersize": 5,
}


@dataclass
class Run:
    """What a run has left: its flags, the name of its metric, and each column's values."""

    name: str
    config: dict[str, object]
    metric: str
    columns: dict[str, list[float]]

    @property
    def best(self) -> str:
        """The highest value of the metric, in words."""
        values = zip(self.columns[self.metric], self.columns["epoch"], strict=True)
        finite = [(value, -epoch) for value, epoch in values if math.isfinite(value)]
        if not finite:
            return f"no {self.metric}"
        value, epoch = max(finite)
        return f"best {self.metric} {value:.4f} in epoch {-epoch:.0f}"


def rows(table: Path) -> list[dict[str, str]]:
    """The rows of `table`, if it is there."""
    if not table.exists():
        return []
    with table.open(newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


def read(folder: Path) -> Run:
    """The run in `folder`. Raises UserError if it is none, or has finished no epoch."""
    table, config = folder / TABLE, folder / CONFIG
    for path in (folder, table, config):
        if not path.exists():
            raise UserError(f"there is no {path}: name the folder of a run, its --output")
    try:
        found = rows(table)
        if not found:
            raise UserError(f"{table} has no rows yet: a run adds one after each epoch")
        others = [name for name in found[0] if name not in COLUMNS]
        if not others or not set(COLUMNS) <= found[0].keys():
            names = ", ".join(COLUMNS)
            raise UserError(f"{table} is not a run's: that has {names}, and its metric")
        for line, row in enumerate(found, 2):
            if None in (*row, *row.values()) or not math.isfinite(float(row["epoch"])):
                raise UserError(f"line {line} of {table} is torn: remove it")
        columns = {name: [float(row[name]) for row in found] for name in found[0]}
        flags = json.loads(config.read_text())
        if not isinstance(flags, dict):
            raise UserError(f"{config} holds no flags: copy it from the run again")
        return Run(str(folder), flags, others[0], columns)
    except OSError as error:
        raise UserError(f"{error.filename} can't be read ({error.strerror})") from None
    except (ValueError, TypeError, csv.Error) as error:
        raise UserError(f"{folder} does not hold what a run leaves ({error})") from None


def labels(runs: list[Run]) -> list[str]:
    """Each run's name, those of its flags that not all have alike, and its best result."""
    configs = [run.config for run in runs]
    flags = [
        flag
        for flag in dict.fromkeys(chain.from_iterable(configs))
        if flag not in PLACES and any(c.get(flag) != configs[0].get(flag) for c in configs)
    ]
    return [f"{run.name}: {', '.join([*_words(run.config, flags), run.best])}" for run in runs]


def _words(config: dict[str, object], flags: list[str]) -> Iterator[str]:
    """The `flags` as on the command line, but for those that were not given."""
    for flag in flags:
        value, name = config.get(flag), flag.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        elif value is not None:
            values = value if isinstance(value, list) else [value]
            yield " ".join([f"--{name}", *map(str, values)])


def draw(runs: list[Run], path: Path) -> None:
    """Draws `runs` to `path`, in the format of its ending."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ImportError as error:
        raise UserError(f"{path} is not drawn without matplotlib ({error}): install it") from None
    metrics = list(dict.fromkeys(run.metric for run in runs))
    if len(metrics) > 1:
        raise UserError(f"{' and '.join(metrics)} can't be compared: name runs of one task")
    # matplotlib takes what is between two dollars for a formula, and leaves out what begins with _.
    names = [fill(label, 130).replace("$", r"\$") for label in labels(runs)]
    names = [f"./{name}" if name.startswith("_") else name for name in names]
    lines = sum(name.count("\n") + 1 for name in names)
    with_scale = any(len(set(run.columns["loss_scale"])) > 1 for run in runs)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 6.5 + 0.22 * lines), layout="constrained")
        axes = figure.subplot_mosaic(
            "LLLMMM;rriiss" if with_scale else "LLLMMM;rrriii", height_ratios=[3, 2]
        )
        _panel(axes["L"], "loss", runs, ["train_loss", "val_loss"])
        handles = _panel(axes["M"], metrics[0], runs, metrics)
        _panel(axes["r"], "learning rate", runs, ["lr"])
        _panel(axes["i"], "images/s", runs, ["images_per_second"])
        axes["i"].axhline(0, color="black", linewidth=0.8)  # so that a small change looks small
        if with_scale:
            _panel(axes["s"], "loss scale", runs, ["loss_scale"])
            axes["s"].set_yscale("log", base=2)
        axes["L"].legend(
            [Line2D([], [], **kind, color="grey") for kind in (FIRST, LAST)],
            ["train_loss", "val_loss"],
        )
        figure.legend(handles, names, loc="outside lower left")
        kind = path.suffix.removeprefix(".")
        if kind not in figure.canvas.get_supported_filetypes():
            raise UserError(f"--output {path}: matplotlib writes no .{kind}; take .png, or .pdf")
        with replacing(path) as temporary:
            figure.savefig(temporary, format=kind, dpi=110)


def _panel(axes: Axes, title: str, runs: list[Run], columns: list[str]) -> list[Line2D]:
    """The `columns` of `runs` by epoch; of two, the first is dashed. Returns all lines."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    drawn, shown, lost = [], [], []
    for run, colour, marker in zip(runs, cycle(COLOURS), cycle(MARKERS)):
        epochs = run.columns["epoch"]
        look = {"color": colour, "marker": marker}
        for column, kind in zip(columns, (FIRST, LAST)[-len(columns) :], strict=True):
            values = [v if math.isfinite(v) else math.nan for v in run.columns[column]]
            every = math.ceil(len(values) / MOST_MARKERS)
            drawn += axes.plot(epochs, values, **kind | look, markevery=every)
            shown += [v for v in values if not math.isnan(v)]
            lost += [epoch for epoch, v in zip(epochs, values, strict=True) if math.isnan(v)]
    axes.plot(lost, [0.03] * len(lost), "x", color="black", transform=axes.get_xaxis_transform())
    epochs = [epoch for run in runs for epoch in run.columns["epoch"]]
    beside = max(0.5, (max(epochs) - min(epochs)) / 40)
    axes.set_xlim(min(epochs) - beside, max(epochs) + beside)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.set_title(f"{title} (×: not finite)" if lost else title)
    axes.set_xlabel("epoch")
    may_be_log = min(shown, default=0) > 0 and columns != ["images_per_second"]
    if may_be_log and 5 * statistics.median(shown) < max(shown):
        axes.set_yscale("log")  # most of a linear axis would be empty
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    return drawn


def main(arguments: list[str] | None = None) -> None:
    """The command line; a mistake is one sentence, and status 2."""
    parser = argparse.ArgumentParser(prog="python -m engine.report", description="Draw runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="its --output")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: compare.png")
    args = parser.parse_args(arguments)
    path = args.output or (Path("compare.png") if len(args.runs) > 1 else args.runs[0] / PICTURE)
    try:
        draw([read(folder) for folder in args.runs], path)
    except (UserError, OSError) as error:
        reason = getattr(error, "strerror", None)
        sentence = f"{path} can't be written ({reason})" if reason else error
        print(f"error: {sentence}", file=sys.stderr)
        sys.exit(BAD_USAGE)
    print(path)


if __name__ == "__main__":
    os.nice(10)  # as a run starts it, which is to have the cores
    main()
