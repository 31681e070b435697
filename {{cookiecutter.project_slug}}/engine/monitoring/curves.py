"""Plots of runs, drawn from their metrics.csv and config.json.

python -m engine.monitoring.curves RUN                         redraw RUN/curves.png
python -m engine.monitoring.curves RUN RUN … [--output FILE]   compare runs in one picture

Neither torch nor, before something is drawn, matplotlib is imported: the plots are drawn in a
process next to the training.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
from itertools import chain, cycle
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from engine import EXIT_USAGE, UserError, end_with_parent, replacing, start_module
from engine.monitoring.metric import AVERAGE
from engine.monitoring.run_files import COLUMNS, FACTS, Run, read_run
from engine.text import one_message, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

PICTURE = "curves.png"
# These do not change results: where a run reads and writes, and how often.
OTHER_FLAGS = (
    "output",
    "resume",
    "config",
    "workers",
    "save_every",
    "log_every",
    "tracker",
    "eval_every",
    "report",
    "keep",
    "timeout",
    "eval_only",
    *FACTS,
)
# Okabe and Ito's palette for colour-blind readers; in black and white, markers tell runs apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = "osD^vP"
LINES: dict[str, dict[str, Any]] = {  # by what the column is of
    "training": {"linestyle": "--", "marker": "o", "markerfacecolor": "white"},
    "model": {"linestyle": "-", "marker": "o"},
    "average": {"linestyle": ":", "marker": "o", "markerfacecolor": "white"},
}
MAX_MARKERS = 20  # on a line
MAX_PLOTS = 30  # of further metrics; metrics.csv has the rest
TIMEOUT_S = 60.0  # for a drawing process at the end of a run
STYLE: Any = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
    "lines.markersize": 5,
}


def make_labels(runs: list[Run]) -> list[str]:
    """Return each run's name, the flags that make the runs differ, and the best result."""
    configs = [run.config for run in runs]
    flags = [
        flag
        for flag in dict.fromkeys(chain.from_iterable(configs))
        if flag not in OTHER_FLAGS and _differs(flag, configs)
    ]
    return [
        f"{run.name}: {', '.join([*_as_arguments(run.config, flags), run.describe_best()])}"
        for run in runs
    ]


def _differs(flag: str, configs: list[dict[str, object]]) -> bool:
    """Return whether runs differ in a flag. Those of an older version may lack one: it was off."""
    values = [config[flag] for config in configs if flag in config]
    was_missing = len(values) < len(configs)
    return any(value != values[0] for value in values) or bool(was_missing and values[0])


def _as_arguments(config: dict[str, object], flags: list[str]) -> Iterator[str]:
    """Yield the flags as command-line arguments, without those that were not given."""
    for flag in flags:
        value = config.get(flag)
        name = flag.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        elif value is not None:
            values = value if isinstance(value, list) else [value]
            yield " ".join([f"--{name}", *map(str, values)])


def draw(runs: list[Run], path: Path) -> None:
    """Draw the runs to a file, whose ending chooses the format. Raises UserError if it can't."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(f"{path} needs matplotlib ({error}): install it") from None
    metrics = list(dict.fromkeys(run.metric for run in runs))
    if len(metrics) > 1:
        names = " and ".join(f"{metric.name} ({metric.mode})" for metric in metrics)
        raise UserError(f"{names} can't be compared: name runs of one task")
    metric = metrics[0].name
    labels = _legend_labels(runs)
    num_lines = sum(label.count("\n") + 1 for label in labels)
    has_scales = any(len({scale for _, scale in run.points("loss_scale")}) > 1 for run in runs)
    further = _further_metrics(runs)
    layout: list[list] = [list("LLLMMM"), list("rriiss" if has_scales else "rrriii")]
    for first in range(0, len(further), 3):  # three plots in a row, of two cells each
        a, b, c = [*range(len(further)), ".", "."][first : first + 3]
        layout.append([a, a, b, b, c, c])
    with matplotlib.rc_context(STYLE):
        height = 1.5 + 2.5 * len(layout) + 0.22 * num_lines
        figure = Figure(figsize=(10, height), layout="constrained")
        axes = figure.subplot_mosaic(layout, height_ratios=[3] + [2] * (len(layout) - 1))
        _plot(axes["L"], "loss", runs, ["train_loss", "val_loss", "val_loss" + AVERAGE])
        handles = _plot(axes["M"], metric, runs, [metric, metric + AVERAGE])
        _plot(axes["r"], "learning rate", runs, ["lr"])
        _plot(axes["i"], "images/s", runs, ["images_per_second"])
        axes["i"].axhline(0, color="black", linewidth=0.8)  # so that a small change looks small
        if has_scales:
            _plot(axes["s"], "loss scale", runs, ["loss_scale"])
            axes["s"].set_yscale("log", base=2)
        for number, name in enumerate(further):
            _plot(axes[number], name, runs, [name, name + AVERAGE])
        figure.legend(handles, labels, loc="outside lower left")
        kind = path.suffix.removeprefix(".")
        if kind not in figure.canvas.get_supported_filetypes():
            raise UserError(f"--output {path}: matplotlib can't write .{kind}; use .png or .pdf")
        with replacing(path) as temporary:
            figure.savefig(temporary, format=kind, dpi=110)


def _further_metrics(runs: list[Run]) -> list[str]:
    """Return the metrics with a plot of their own; that of the model shows its average, too."""
    names = dict.fromkeys(chain.from_iterable(run.columns for run in runs))
    shown = {*COLUMNS, runs[0].metric.name}
    shown |= {name + AVERAGE for name in names}
    return [name for name in names if name not in shown][:MAX_PLOTS]


def _legend_labels(runs: list[Run]) -> list[str]:
    """Return the labels, wrapped, and escaped for matplotlib."""
    labels = [_plain(fill(one_message(label), 130)) for label in make_labels(runs)]
    # matplotlib hides a label that starts with _.
    return [f"./{label}" if label.startswith("_") else label for label in labels]


def _plain(text: str) -> str:
    """Return `text` escaped for matplotlib, which reads what is between two $ as a formula."""
    return text.replace("$", r"\$")


def _plot(axes: Axes, title: str, runs: list[Run], columns: list[str]) -> list[Line2D]:
    """Plot columns of each run, if it has them, by epoch; return the first line of each run.

    Values that are not finite are marked at the bottom.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator

    first_lines: list[Line2D] = []
    finite: list[float] = []
    lost_epochs: list[float] = []
    present = [name for name in columns if any(name in run.columns for run in runs)]
    for run, colour, marker in zip(runs, cycle(COLOURS), cycle(MARKERS)):
        lines: list[Line2D] = []
        for column in present:
            points = run.points(column)
            epochs = [epoch for epoch, _ in points]
            values = [value for _, value in points]
            every = math.ceil(len(values) / MAX_MARKERS) or 1
            look = _line(column) | {"color": colour, "marker": marker, "markevery": every}
            lines += axes.plot(epochs, values, **look)
            finite += filter(math.isfinite, values)
            lost_epochs += [epoch for epoch, value in points if not math.isfinite(value)]
        first_lines += lines[:1]
    if len(present) > 1:
        for column in present:
            axes.plot([], [], color="grey", label=_plain(column), **_line(column))
        axes.legend()
    bottom = axes.get_xaxis_transform()
    axes.plot(lost_epochs, [0.03] * len(lost_epochs), "x", color="black", transform=bottom)
    axes.set_title(_plain(one_message(title)) + (" (×: not finite)" if lost_epochs else ""))
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    may_be_log = min(finite, default=0) > 0 and "images_per_second" not in columns
    if may_be_log and 5 * statistics.median(finite) < max(finite):  # linear: mostly empty
        axes.set_yscale("log")
        is_wide = max(finite) > 1e4 * min(finite)  # with several subs, it would leave all out
        axes.yaxis.set_major_locator(LogLocator(subs=(1,) if is_wide else (1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    return first_lines


def _line(column: str) -> dict[str, Any]:
    if column.endswith(AVERAGE):
        return LINES["average"]
    return LINES["training" if column.startswith("train_") else "model"]


class BackgroundProcess:
    """Process that draws a run's curves during training; `warn` is called if it fails."""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self.folder = folder
        self.warn = warn
        self.is_current = True  # the latest process has read all rows, or will
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start to draw, unless the previous process is still drawing."""
        self.is_current = self.wait(0.0)
        if not self.is_current:
            return
        try:
            self._process = start_module(
                "engine.monitoring.curves",
                str(self.folder),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            self._warn(error.strerror)

    def wait(self, timeout_s: float) -> bool:
        """Return whether no process is drawing. After a timeout, other than 0, it is killed."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            if not timeout_s:
                return False
            self._process.kill()
        _, errors = self._process.communicate()
        if self._process.returncode:
            reason = (errors.splitlines() or ["it takes too long"])[-1]
            self._warn(reason.removeprefix("error: "))
        self._process = None
        return True

    def finish(self) -> None:
        """Wait until the curves with all rows are drawn, or have failed."""
        self.wait(TIMEOUT_S)
        if not self.is_current:
            self.start()
            self.wait(TIMEOUT_S)

    def _warn(self, reason: object) -> None:
        self.warn(f"{PICTURE} is not drawn ({reason})")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. Exit with status 2 and a one-line message after a user error."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.monitoring.curves", description="Plot runs."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="its --output folder")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: compare.png")
    args = parser.parse_args(arguments)
    path = args.output or (Path("compare.png") if len(args.runs) > 1 else args.runs[0] / PICTURE)
    try:
        draw([read_run(folder) for folder in args.runs], path)
    except Exception as error:  # matplotlib raises anything if values are altered
        reason = getattr(error, "strerror", None) or repr(error)
        message = error if isinstance(error, UserError) else f"{path} can't be written ({reason})"
        parser.exit(EXIT_USAGE, f"error: {one_message(message)}\n")
    print(printable(path))


if __name__ == "__main__":
    end_with_parent()
    os.nice(10)  # a run draws its curves while it trains
    main()
