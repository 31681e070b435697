"""engine.report: what images/s counts."""

import pytest
import torch
import torch.distributed as dist

from engine import report


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """Time that a test moves on, and a group of one process."""
    now = [0.0]
    monkeypatch.setattr(report.time, "perf_counter", lambda: now[0])
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield now
    dist.destroy_process_group()


def test_the_warm_up_is_timed_apart(clock, tmp_path):
    run = report.Report(tmp_path, 0, "val_accuracy")
    first, second = (run.meter(torch.device("cpu"), 10) for _ in range(2))
    assert (first.warm_up, second.warm_up) == (report.WARM_UP, 0)
    for step in range(report.WARM_UP + 4):
        clock[0] += 100.0 if step < report.WARM_UP else 2.0
        first.add(torch.tensor(float(step)))
    assert first.warm_up_s == 100.0 * report.WARM_UP
    results = first.results()
    assert results["images_per_second"] == 5.0
    assert results["train_loss"] == 3.0


def test_a_run_that_ends_in_its_warm_up_counts_all_its_steps(clock):
    for steps in (2, 3):
        clock[0] = 0.0
        meter = report.Meter(torch.device("cpu"), 10, warm_up=3)
        for _ in range(steps):
            clock[0] += 5.0
            meter.add(torch.ones(()))
        assert meter.results()["images_per_second"] == 2.0
