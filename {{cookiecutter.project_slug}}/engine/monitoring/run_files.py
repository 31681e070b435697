"""Settings and metrics of runs: their config.json and metrics.csv.

As the process that draws the curves imports this module, it imports no torch.
"""

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from engine import MAX_TABLE_BYTES, UserError, read_text, replacing
from engine.monitoring.metric import COLUMNS, Best, MonitoredMetric
from engine.text import csv_cell, printable, text_of_cell

TABLE = "metrics.csv"
MAX_CELLS = 10**7  # of metrics.csv: the rows times the columns, most of which may be empty
CONFIG = "config.json"
POSITION = ("epoch", "step")
MAX_COUNT = 2**53  # of steps and the like; a float holds larger integers inexactly
METRIC, METRIC_MODE, LAUNCH, DISCARDED = "METRIC", "METRIC_MODE", "LAUNCH", "DISCARDED"
FILES = "FILES"
FACTS = (METRIC, METRIC_MODE, LAUNCH, DISCARDED, FILES)  # in config.json, in addition to flags


@dataclass
class Run:
    """Settings and metrics of a run, read from its folder."""

    name: str
    config: dict[str, object]
    metric: MonitoredMetric
    columns: list[str]
    rows: list[dict[str, float]]  # an epoch without a validation has no metrics

    @property
    def best(self) -> tuple[Best, float]:
        """The best value of the metric, and the first epoch that has it."""
        results = [(self.metric.best(row), row["epoch"]) for row in self.rows]
        return max(results, key=lambda result: (result[0].score, -result[1]))

    def points(self, column: str) -> list[tuple[float, float]]:
        """Return the epochs that have a value in a column, each with the value."""
        return [(row["epoch"], row[column]) for row in self.rows if column in row]

    def describe_best(self) -> str:
        """Return the best value with its epoch."""
        best, epoch = self.best
        if best.score == -math.inf:
            return f"no {best.name}"
        return f"best {best.name} {self.metric.value(best.score):.4f} in epoch {epoch:.0f}"


def read_rows(table: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file.

    Raises OSError and ValueError as `read_text` does, and ValueError for more than MAX_CELLS.
    """
    text = read_text(table, MAX_TABLE_BYTES)
    reader = csv.DictReader(io.StringIO(text))
    reader.fieldnames = [text_of_cell(cell) for cell in reader.fieldnames or ()]
    if len(reader.fieldnames) * text.count("\n") > MAX_CELLS:  # it fills short rows
        raise ValueError(f"{table.name} is too large")
    return list(reader)


def read_run(folder: Path) -> Run:
    """Read a run. Raises UserError if the folder holds none, or one without a finished epoch."""
    table = folder / TABLE
    config = folder / CONFIG
    try:
        rows = read_rows(table)
        _check_rows(rows, table)
        numbers = [{name: float(cell) for name, cell in row.items() if cell} for row in rows]
        flags = json.loads(read_text(config))
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}; name the folder of a run") from None
    except (ValueError, TypeError, RecursionError, csv.Error) as error:
        raise UserError(f"{folder} does not hold the files of a run ({error})") from None
    if not isinstance(flags, dict):
        raise UserError(f"{config} holds no settings: copy it from the run again")
    columns = list(rows[0])
    return Run(printable(folder), flags, _metric_of(flags, columns, table), columns, numbers)


def _check_rows(rows: list[dict[str, str]], table: Path) -> None:
    if not rows:
        raise UserError(f"{table} has no rows yet: a run adds one after each epoch")
    if not set(COLUMNS) - {"val_loss"} <= rows[0].keys():
        raise UserError(
            f"{table} is not the table of a run, which has the columns {', '.join(COLUMNS)}"
        )
    for line, row in enumerate(rows, 2):
        if None in (*row, *row.values()) or not math.isfinite(float(row["epoch"])):
            raise UserError(f"line {line} of {table} is incomplete: remove it")


def _metric_of(flags: dict[str, Any], columns: list[str], table: Path) -> MonitoredMetric:
    """Return the metric that config.json names; in runs of version 0.9, the only one."""
    further = [name for name in columns if name not in COLUMNS]
    metric = MonitoredMetric(str(flags.get(METRIC, *further[:1])), flags.get(METRIC_MODE, "max"))
    if metric.name not in columns:
        raise UserError(f"{table} has no column of the run's metric: copy it from the run again")
    return metric


def parse_row(row: Mapping[str, str]) -> dict[str, float]:
    """Return the numbers in a row of metrics.csv. Raises KeyError or ValueError for others."""
    position = {name: int(row[name]) for name in POSITION}
    # No checkpoint could hold others.
    if not all(0 <= count < MAX_COUNT for count in position.values()):
        raise ValueError(f"{position} is not the position of a run")
    if not all(map(str.isprintable, row)):
        raise ValueError("the name of a column is not printable")
    return {name: float(value) for name, value in row.items() if value} | position


def main_columns(metric: str) -> list[str]:
    """Return the columns of the console's table, with which metrics.csv starts."""
    return list(dict.fromkeys([*COLUMNS[:4], metric, *COLUMNS[4:]]))


def write_rows(table: Path, rows: Sequence[Mapping[str, Any]], metric: str) -> None:
    """Write metrics.csv as a whole, so that a row that did not fit is written later."""
    columns = dict.fromkeys([*main_columns(metric), *chain.from_iterable(rows)])
    if rows and not any("val_loss" in row for row in rows) and metric != "val_loss":
        del columns["val_loss"]  # the only one that a task may leave out
    cells = ([row.get(name) for name in columns] for row in rows)
    write_csv(table, [list(map(csv_cell, columns)), *cells])


def write_csv(path: Path, rows: Iterable[list]) -> None:
    """Replace the CSV file at `path` by one of these rows; None is an empty cell."""
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
