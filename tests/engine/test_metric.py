"""engine.monitoring.metric: the metric that selects the best model."""

import math

import pytest
import torch
from engine import UserError
from engine.monitoring.meter import NanCounter
from engine.monitoring.metric import Best, MonitoredMetric


@pytest.mark.parametrize(
    ("scores", "patience", "has_stalled"),
    [
        ([], 1, False),
        ([0.5], 1, False),
        ([0.5, 0.6], 1, False),
        ([0.5, 0.6, 0.6], 1, True),
        ([0.5, 0.6, 0.4], 2, False),
        ([0.5, 0.6, 0.4, 0.5], 2, True),
        ([0.5, 0.6, 0.4, 0.7], 2, False),
        ([-math.inf, -math.inf], 1, True),  # never finite
        ([0.5, 0.4, 0.3], None, False),
    ],
)
def test_patience_counts_validations_after_the_best(scores, patience, has_stalled):
    assert MonitoredMetric("accuracy").has_stalled(scores, patience) == has_stalled


def test_best_is_the_better_one_of_model_and_average():
    results = {"loss": 0.3, "loss_ema": 0.2, "accuracy": 0.8, "accuracy_ema": 0.7}
    assert MonitoredMetric("accuracy").best(results) == Best(0.8, "accuracy")
    assert MonitoredMetric("loss", "min").best(results) == Best(-0.2, "loss_ema")
    assert MonitoredMetric("loss").best({"loss": math.nan}) == Best(-math.inf, "loss")


def test_highest_loss_is_not_the_best():
    with pytest.raises(UserError, match='METRIC is val_loss in task.py: METRIC_MODE must be "min"'):
        MonitoredMetric("val_loss").require({"val_loss": 1.0})
    MonitoredMetric("val_loss", "min").require({"val_loss": 1.0})


def test_metrics_replace_no_other_column():
    metric = MonitoredMetric("val_accuracy", "max")
    metric.require({"val_loss": 1.0, "val_accuracy": 0.5})
    with pytest.raises(UserError, match=r"returns lr, step, which is a column of metrics\.csv"):
        metric.require({"step": 1.0, "lr": 1.0, "val_accuracy": 0.5})
    with pytest.raises(UserError, match=r"returns 'val_a\\xa0b': use at most 100 printable char"):
        metric.require({"val_a\xa0b": 1.0, "val_accuracy": 0.5})
    metric.require({"a" * 100: 1.0, "val_accuracy": 0.5})
    with pytest.raises(UserError, match="use at most 100 printable characters"):
        metric.require({"a" * 101: 1.0, "val_accuracy": 0.5})


def test_names_of_the_average_are_no_others():
    metric = MonitoredMetric("accuracy")
    assert metric.with_suffix({"accuracy": torch.tensor(0.5)}, "_ema") == {"accuracy_ema": 0.5}
    assert metric.with_suffix({3: 0.5}, "_ema") == {"3_ema": 0.5}
    with pytest.raises(UserError, match="returns loss_ema: names that end in _ema are those of"):
        metric.with_suffix({"accuracy": 0.5, "loss_ema": 0.5}, "")
    with pytest.raises(UserError, match="METRIC is accuracy_ema in task.py: set it to accuracy;"):
        MonitoredMetric("accuracy_ema").require({"accuracy": 0.5, "accuracy_ema": 0.6})


@pytest.mark.parametrize("value", [[0.5], None, "high", torch.zeros(2)])
def test_result_that_is_no_number_is_an_error(value):
    kind = type(value).__name__
    with pytest.raises(UserError, match=f"returns iou as a {kind} and not as a number"):
        MonitoredMetric("accuracy").with_suffix({"accuracy": 0.5, "iou": value}, "")


def test_unknown_mode_is_an_error():
    with pytest.raises(UserError, match='METRIC_MODE is \'mean\' in task.py: use "max" or "min"'):
        MonitoredMetric("loss", "mean")


def test_batches_with_nan_are_counted():
    counter = NanCounter(torch.device("cpu"))
    nan, one = torch.tensor([1.0, math.nan]), torch.ones(2)
    for outputs in (one, nan, (one, one), {"out": [one, nan]}, torch.full((2,), -math.inf)):
        counter.update(outputs)
    assert counter.compute() == 2
