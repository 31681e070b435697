"""Metric that selects the best model of a run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine import UserError

# Of metrics.csv; val_loss is the only one that a task returns.
COLUMNS = ("epoch", "step", "train_loss", "val_loss", "lr", "loss_scale", "images_per_second")
AVERAGE = "_ema"  # suffix of the metrics of the moving average
MAX_NAME = 100  # characters


class Best(NamedTuple):
    """Result that is compared with others."""

    score: float  # higher is better; -inf if there is no finite value
    name: str  # of the metric, with the suffix of the average if that is better


@dataclass(frozen=True)
class MonitoredMetric:
    """Metric that selects the best model, by its highest ("max") or its lowest value ("min")."""

    name: str
    mode: str = "max"

    def __post_init__(self) -> None:
        if self.mode not in ("max", "min"):
            raise UserError(f'METRIC_MODE is {self.mode!r} in task.py: use "max" or "min"')

    @staticmethod
    def with_suffix(results: Mapping[str, Any], suffix: str) -> dict[str, float]:
        """Return the results of the task as numbers, under names that end in `suffix`.

        Raises UserError for one that is no number, or ends in the suffix of the average already.
        """
        numbers = {}
        for key, value in results.items():
            name = str(key)  # such as the number of a class
            if name.endswith(AVERAGE):
                raise UserError(
                    f"Metrics.compute in task.py returns {name}: names that end in {AVERAGE} are "
                    "those of --ema; use another one"
                )
            try:
                numbers[name + suffix] = float(value)
            except (TypeError, ValueError, RuntimeError):  # the last one for a tensor of several
                raise UserError(
                    f"Metrics.compute in task.py returns {name} as a {type(value).__name__} and "
                    "not as a number: give each number a name of its own"
                ) from None
        return numbers

    def best(self, results: Mapping[str, float]) -> Best:
        """Return the better one of the model and its average, which there may not be."""
        names = [name for name in (self.name, self.name + AVERAGE) if name in results]
        candidates = [Best(self.value(results[name]), name) for name in names]
        finite = [candidate for candidate in candidates if math.isfinite(candidate.score)]
        return max(finite, key=lambda best: best.score, default=Best(-math.inf, self.name))

    def require(self, results: Mapping[str, float]) -> None:
        """Raise UserError if the task does not return the metric, or a name has another meaning."""
        if taken := results.keys() & set(COLUMNS) - {"val_loss"}:
            raise UserError(
                f"Metrics.compute in task.py returns {', '.join(sorted(taken))}, which is a column "
                "of metrics.csv: use another name"
            )
        # Long names would make the history look like an altered file when it is read.
        if bad := [name for name in results if not name.isprintable() or len(name) > MAX_NAME]:
            raise UserError(
                f"Metrics.compute in task.py returns {bad[0]!a}: use at most {MAX_NAME} printable "
                "characters, and plain spaces, in its name"
            )
        if (self.name, self.mode) == ("val_loss", "max"):
            raise UserError('METRIC is val_loss in task.py: METRIC_MODE must be "min"')
        if self.name.endswith(AVERAGE):
            raise UserError(
                f"METRIC is {self.name} in task.py: set it to {self.name.removesuffix(AVERAGE)}; "
                "with --ema, the better one of the model and the average counts"
            )
        if self.name not in results:
            raise UserError(
                f"Metrics.compute in task.py returns {', '.join(results)} but not METRIC, which is "
                f"{self.name}: set METRIC to one of them"
            )

    @staticmethod
    def has_stalled(scores: Sequence[float], patience: int | None) -> bool:
        """Return whether none of the last `patience` scores is better than those before them."""
        if patience is None:
            return False
        before, last = scores[:-patience], scores[-patience:]
        return bool(before) and max(last) <= max(before)

    def value(self, score: float) -> float:
        """Return the metric's value for a score, or the score for a value."""
        return score if self.mode == "max" else -score
