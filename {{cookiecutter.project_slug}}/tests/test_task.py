"""Validation is exact: however a set is shared out, each of its samples counts once."""

import pytest
import torch
import torch.distributed as dist
from processes import Processes
from torch import nn
from torch.utils.data import DataLoader, Subset

import main
import task
from engine import distributed


def build() -> nn.Module:
    """A model with batch norm, in float64 so that results don't depend on how batches are cut."""
    torch.manual_seed(0)
    return task.build_model("shufflenet_v2_x0_5", 10).double()


def double(batch: list) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = torch.utils.data.default_collate(batch)
    return images.double(), labels


def validated(size: int) -> dict[str, float]:
    """What every rank gets from main.validate on the first `size` validation samples."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    val_set = Subset(task.Digits(train=False), range(size))
    batches = DataLoader(distributed.shard(val_set, rank, world_size), 4, collate_fn=double)
    model = build()
    for buffer in model.buffers():  # as if each rank had gone its own way in training
        buffer.add_(rank)
    metrics = task.Metrics(torch.device("cpu"))
    main.validate(model, metrics, batches, torch.contiguous_format)  # which is forgotten
    return main.validate(model, metrics, batches, torch.contiguous_format)


@pytest.fixture(scope="module", params=[2, 3])
def processes(request: pytest.FixtureRequest) -> Processes:
    processes = Processes("gloo", request.param)
    yield processes
    processes.stop()


@pytest.mark.parametrize("size", [1, 7, 25])
@torch.no_grad()
def test_it_equals_that_of_a_single_process(processes: Processes, size: int) -> None:
    images, labels = double([task.Digits(train=False)[index] for index in range(size)])
    output = build().eval()(images)
    loss = nn.functional.cross_entropy(output.float(), labels, reduction="sum").item() / size
    accuracy = (output.argmax(1) == labels).sum().item() / size
    for results in processes(validated, size):
        assert results[task.METRIC] == accuracy
        assert results["val_loss"] == pytest.approx(loss, rel=1e-6)
