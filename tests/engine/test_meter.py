"""engine.monitoring.meter: mean loss and throughput."""

import math
import re

import numpy as np
import pytest
import torch
from engine import UserError
from engine.monitoring.logger import WARM_UP, Logger
from engine.monitoring.meter import Meter
from engine.monitoring.metric import MonitoredMetric
from engine.text import printable


def test_warm_up_is_excluded_from_throughput(clock, tmp_path):
    logger = Logger(tmp_path, 0, MonitoredMetric("val_accuracy"))
    first, second = (logger.start_epoch(torch.device("cpu"), 10) for _ in range(2))
    assert (first.warm_up, second.warm_up) == (WARM_UP, 0)
    for step in range(WARM_UP + 4):
        clock[0] += 100.0 if step < WARM_UP else 2.0
        first.update(torch.tensor(float(step)))
    results = first.results()
    assert results["images_per_second"] == 5.0
    assert results["train_loss"] == 3.0
    assert (first.warm_up_seconds(), second.warm_up_seconds()) == (300.0, 0.0)


@pytest.mark.parametrize(("seconds", "is_logged"), [(5.0, True), (1.0, False)])
def test_a_long_warm_up_is_logged_once(clock, tmp_path, capsys, seconds, is_logged):
    logger = Logger(tmp_path, 0, MonitoredMetric("val_accuracy"))
    for _ in range(2):
        meter = logger.start_epoch(torch.device("cpu"), 10)
        for step in range(WARM_UP + 4):
            clock[0] += seconds if step < meter.warm_up else 1.0
            meter.update(torch.tensor(1.0))
        logger._print_warm_up(meter.results()["images_per_second"])
    text = "warm-up: 3 batches in 15.0 s, not counted in images/s\n"
    assert capsys.readouterr().out == (text if is_logged else "")


def test_epoch_without_steps_has_no_warm_up(clock, tmp_path, capsys):
    """As that of a run that was stopped after its last step, and is resumed."""
    logger = Logger(tmp_path, 0, MonitoredMetric("val_accuracy"))
    meter = logger.start_epoch(torch.device("cpu"), 10)
    clock[0] += 1.0
    assert meter.results()["images_per_second"] == 0
    logger._print_warm_up(0.0)
    assert capsys.readouterr().out == ""


def test_throughput_within_the_warm_up_counts_all_steps(clock):
    for steps in (2, 3):
        clock[0] = 0.0
        meter = Meter(torch.device("cpu"), 10, warm_up=3)
        for _ in range(steps):
            clock[0] += 5.0
            meter.update(torch.ones(()))
        assert meter.results()["images_per_second"] == 2.0
        assert meter.warm_up_seconds() == 0


def test_asynchronous_record_has_the_numbers_of_its_own_step(clock, monkeypatch):
    """It is complete at the next record, when the state is saved, or when it is read."""
    monkeypatch.setattr(Meter, "is_asynchronous", True)
    records = []
    meter = Meter(torch.device("cpu"), 10, 3, records.append)
    scale = torch.full((), 8.0)
    for step in range(1, 8):
        clock[0] += 5.0 if step <= 3 else 1.0
        meter.update(torch.full((), float(step)))
        if step in (2, 5, 6, 7):
            meter.record(step, 0.1, scale)
            scale *= 2
        if step == 5:
            assert meter.state_dict() == {"train_loss": (15.0, 5)}
    assert [record[:3] for record in records] == [(2, 0.1, 1.5), (5, 0.1, 4.0), (6, 0.1, 6.0)]
    assert meter.read()[:3] == (7, 0.1, 7.0)
    assert [record.loss_scale for record in records] == [8.0, 16.0, 32.0, 64.0]
    assert [record.images_per_second for record in records] == [2.0, 10.0, 10.0, 10.0]


def test_record_is_the_mean_since_the_previous_one(clock):
    meter = Meter(torch.device("cpu"), 10)
    meter.load_state_dicts([{"train_loss": (100.0, 5)}])  # of a run that was stopped
    for losses in ([1.0, 2.0], [7.0]):
        clock[0] += 1.0
        for loss in losses:
            meter.update(torch.tensor(loss))
        record = meter.record(10, 0.1, 8.0)
        assert record[:3] == (10, 0.1, sum(losses) / len(losses))
        assert record[4:] == (8.0, 10 * meter.num_batches / clock[0], {})
    assert meter.results()["train_loss"] == 110.0 / 8


@pytest.mark.parametrize("large", [1e8, math.inf])
def test_a_large_loss_is_in_the_record_of_its_step_only(clock, large):
    meter = Meter(torch.device("cpu"), 10)
    losses = []
    for step, loss in enumerate((0.25, large, 0.25, 0.5)):
        clock[0] += 1.0
        meter.update(torch.tensor(loss))
        meter.log(value=loss)
        record = meter.record(step, 0.1, 1.0)
        losses.append((record.train_loss, record.means["value"]))
    assert losses == [(0.25, 0.25), (large, large), (0.25, 0.25), (0.5, 0.5)]


def test_logged_values_have_means_of_their_own(clock):
    """They are resumed, too, and those of a step are in its record."""
    meter = Meter(torch.device("cpu"), 10)
    for step in range(4):
        clock[0] += 1.0
        meter.update(torch.ones(()))
        if step % 2:
            meter.log(grad_norm=torch.tensor(float(step)), tokens=100)
    assert meter.record(4, 0.1, 8.0).means == {"grad_norm": 2.0, "tokens": 100.0}
    again = Meter(torch.device("cpu"), 10)
    again.load_state_dicts([meter.state_dict()])
    again.update(torch.ones(()))
    again.log(grad_norm=8)
    clock[0] += 1.0
    assert again.record(5, 0.1, 8.0).means == {"grad_norm": 8.0}
    results = again.results()
    assert [results[name] for name in ("train_loss", "grad_norm", "tokens")] == [1.0, 4.0, 100.0]


def test_loss_need_not_be_logged(clock):
    """The steps of a GAN have several, by names of their own."""
    meter = Meter(torch.device("cpu"), 10)
    clock[0] += 1.0
    meter.log(loss_g=2.0)
    record = meter.record(1, 0.1, 8.0)
    assert math.isnan(record.train_loss)
    assert record.means == {"loss_g": 2.0}


@pytest.mark.parametrize("name", ["step", "val_loss", "a_ema", "a\tb"])
def test_logged_values_replace_no_other_column(clock, name):
    """A name of --ema's, or one that can't be printed, would make the checkpoint invalid."""
    meter = Meter(torch.device("cpu"), 64)
    shown = re.escape(printable(name))
    with pytest.raises(UserError, match=rf"meter\.log\({shown}=\.\.\.\): it is a column"):
        meter.log(**{name: 1.0})


@pytest.mark.parametrize(
    "value", [np.ones(2), torch.ones(2), [1.0, 2.0], None], ids=["array", "tensor", "list", "none"]
)
def test_a_logged_value_that_is_not_a_number_is_an_error(clock, value):
    meter = Meter(torch.device("cpu"), 64)
    with pytest.raises(UserError, match=r"meter\.log\(recalls=.*: it is a \w+ and not a number"):
        meter.log(recalls=value)
    clock[0] += 1.0
    meter.log(array=np.ones(1), tensor=torch.ones(1), flag=True)
    assert meter.results().keys() >= {"array", "tensor", "flag"}


def test_mean_of_no_steps_is_nan(clock):
    meter = Meter(torch.device("cpu"), 10)
    clock[0] += 1.0
    assert math.isnan(meter.results()["train_loss"])


def test_a_loss_may_have_a_dimension_of_one():
    meter = Meter(torch.device("cpu"), 10)
    meter.update(torch.ones(1, 1, requires_grad=True))
    assert meter.record(1, 0.1, 1.0).train_loss == 1.0
