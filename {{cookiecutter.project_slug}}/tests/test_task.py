"""Tests of task.py: the contract on which main.py and predict.py rely.

They hold for any task. FLAGS are those of your data; one that learns slowly needs more STEPS.
"""

import math
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

import main
import task
from engine import cli
from engine.data import select_batch
from engine.monitoring.metric import MonitoredMetric

PROJECT = Path(__file__).resolve().parent.parent
# Of main.py, for all tests: for example ("--data", f"{PROJECT}/tests/data"), and what data and
# model need; not what changes training samples, such as --mixup.
FLAGS: tuple[str, ...] = ()
BATCH_SIZE = 4
STEPS = 15
CPU = torch.device("cpu")


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """The flags of main.py with their defaults."""
    return parse(monkeypatch)


@pytest.fixture(scope="module")
def datasets() -> tuple[Dataset, Dataset]:
    """The training set and the validation set."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return task.build_datasets(parse(monkeypatch))


@pytest.fixture
def train_set(datasets: tuple[Dataset, Dataset]) -> Dataset:
    return datasets[0]


@pytest.fixture
def val_set(datasets: tuple[Dataset, Dataset]) -> Dataset:
    return datasets[1]


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    """A process group of one process, over which metrics are reduced."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def parse(monkeypatch: pytest.MonkeyPatch) -> Namespace:
    monkeypatch.setattr(cli.ArgumentParser, "error", fail)  # which would end pytest
    monkeypatch.setattr(sys, "argv", ["main.py", *FLAGS])
    return main.parse_args()


def fail(parser: cli.ArgumentParser, message: str) -> NoReturn:
    pytest.fail(f"FLAGS: {message}")


def build(args: Namespace, dataset: Dataset, training: bool) -> nn.Module:
    """Return the model for `dataset`, the same at each call."""
    torch.manual_seed(0)
    num_classes = len(getattr(dataset, "classes", ()))
    model = task.build_model(args.arch, num_classes, **args.model_options)
    model.train(training)
    return model


def spread_batch(dataset: Dataset, count: int = BATCH_SIZE) -> list[Tensor]:
    """Return a batch of samples from all over the dataset, which may be sorted by class."""
    return select_batch(dataset, [index * len(dataset) // count for index in range(count)])


def roll(value: object) -> object:
    """Return tensors, also nested ones, whose samples are in another order."""
    if isinstance(value, Tensor):
        return value.roll(1, dims=0)
    if isinstance(value, Mapping):
        return {name: roll(entry) for name, entry in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(roll(entry) for entry in value)
    return value


def test_datasets_have_samples_of_the_same_form(datasets: tuple[Dataset, Dataset]) -> None:
    train_batch, val_batch = (spread_batch(dataset) for dataset in datasets)
    assert len(train_batch) == len(val_batch)
    for train_part, val_part in zip(train_batch, val_batch, strict=True):
        assert train_part.dtype == val_part.dtype
        assert train_part.ndim == val_part.ndim


def test_datasets_have_the_same_classes(train_set: Dataset, val_set: Dataset) -> None:
    assert getattr(train_set, "classes", None) == getattr(val_set, "classes", None)


def test_validation_samples_are_not_augmented(val_set: Dataset) -> None:
    torch.testing.assert_close(spread_batch(val_set), spread_batch(val_set), rtol=0, atol=0)


def test_loss_is_a_finite_scalar_with_gradients(args: Namespace, train_set: Dataset) -> None:
    model = build(args, train_set, training=True)
    inputs, targets = task.prepare(spread_batch(train_set))
    loss = task.criterion(model(inputs), targets)
    assert loss.ndim == 0
    assert loss.isfinite()
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert any(gradient.any() for gradient in gradients)


def test_loss_depends_on_the_targets(args: Namespace, train_set: Dataset) -> None:
    """Give the samples of a batch the targets of other samples, directly or in the batch."""
    model = build(args, train_set, training=False)

    @torch.no_grad()
    def loss_of(batch: list[Tensor], rolls_targets: bool = False) -> float:
        inputs, targets = task.prepare(batch)
        if rolls_targets:
            targets = roll(targets)
        return task.criterion(model(inputs), targets).item()

    first, *others = spread_batch(train_set)
    loss = loss_of([first, *others])
    assert loss_of([first, *others]) == loss
    mispaired = [loss_of([first, *others], rolls_targets=True), loss_of([first, *roll(others)])]
    assert any(other != loss for other in mispaired)


def train_on_one_batch(model: nn.Module, batch: list[Tensor]) -> list[float]:
    """Train some steps; return their losses."""
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        inputs, targets = task.prepare(batch)
        loss = task.criterion(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_on_one_batch_reduces_the_loss(args: Namespace, train_set: Dataset) -> None:
    losses = train_on_one_batch(build(args, train_set, training=True), spread_batch(train_set))
    assert min(losses[-3:]) < losses[0]


def test_label_smoothing_is_accepted(args: Namespace, train_set: Dataset) -> None:
    inputs, targets = task.prepare(spread_batch(train_set))
    output = build(args, train_set, training=False)(inputs)
    assert task.criterion(output, targets, 0.1).isfinite()


@torch.no_grad()
def compute_metrics(
    args: Namespace, val_set: Dataset, splits: list[int], is_reused: bool = False
) -> tuple[task.Metrics, dict[str, float]]:
    """Return metrics and their results for one batch, which is added in parts of these sizes.

    Reused ones have other results before they are reset.
    """
    metrics = task.Metrics(len(getattr(val_set, "classes", ())), CPU, args)
    model = build(args, val_set, training=False)
    batch = spread_batch(val_set)
    if is_reused:
        inputs, targets = task.prepare(batch)
        metrics.update(model(inputs), roll(targets))
    metrics.reset()
    for part in zip(*(part.split(splits) for part in batch), strict=True):
        inputs, targets = task.prepare(list(part))
        metrics.update(model(inputs), targets)
    return metrics, metrics.compute()


def test_metrics_do_not_depend_on_the_batches(args: Namespace, val_set: Dataset) -> None:
    _, whole = compute_metrics(args, val_set, [BATCH_SIZE])
    _, parts = compute_metrics(args, val_set, [1, BATCH_SIZE - 1], is_reused=True)
    assert task.METRIC in whole
    assert math.isfinite(whole[task.METRIC])
    assert not any(map(math.isinf, whole.values()))  # nan may be that of a class without samples
    assert parts == pytest.approx(whole, rel=1e-3, abs=1e-5, nan_ok=True)


@torch.no_grad()
def test_training_on_one_batch_improves_the_metric(args: Namespace, val_set: Dataset) -> None:
    """METRIC changes in the direction of METRIC_MODE."""
    model = build(args, val_set, training=True)
    batch = spread_batch(val_set)
    inputs, targets = task.prepare(batch)
    scores = []
    for is_trained in (False, True):
        if is_trained:
            with torch.enable_grad():
                train_on_one_batch(model, batch)
        model.train()
        for _ in range(20):  # batch norm's running statistics become those of the batch
            model(inputs)
        model.eval()
        metrics = task.Metrics(len(getattr(val_set, "classes", ())), CPU, args)
        metrics.update(model(inputs), targets)
        scores.append(MonitoredMetric(task.METRIC, task.METRIC_MODE).best(metrics.compute()).score)
    assert scores[1] >= scores[0]


def test_dummy_batch_can_be_trained(args: Namespace) -> None:
    torch.manual_seed(0)
    model = task.build_model(args.arch, task.DUMMY_CLASSES, **args.model_options)
    model.eval()
    inputs, targets = task.prepare(list(task.dummy_batch(2, CPU, **args.model_options)))
    with torch.no_grad():
        assert task.criterion(model(inputs), targets).isfinite()


def test_show_writes_a_file_for_each_epoch_or_none(
    args: Namespace, val_set: Dataset, tmp_path: Path
) -> None:
    metrics, _ = compute_metrics(args, val_set, [BATCH_SIZE])
    paths = {
        task.show(build(args, val_set, training=False), val_set, metrics, tmp_path, epoch)
        for epoch in (1, 2, None)
    }
    assert paths == {None} or len(paths) == 3
    for path in map(Path, paths - {None}):
        assert tmp_path in path.parents and path.stat().st_size > 0
