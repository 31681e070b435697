"""Classification: validation counts each sample once, however processes divide the set."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engine.data import ShardSampler
from processes import Processes
from projects import Project, evaluate, load_project
from torch import nn
from torch.utils.data import DataLoader, Subset

pytestmark = pytest.mark.xdist_group("in_process")


@pytest.fixture
def project(shared_project: Callable) -> Project:
    return load_project(shared_project(task="classification"))


def build(project: Project) -> nn.Module:
    """Return a model with batch norm, in float64, in which the division into batches is exact."""
    torch.manual_seed(0)
    return project.task.build_model("shufflenet_v2_x0_5", 10).double()


def double(batch: list) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = torch.utils.data.default_collate(batch)
    return images.double(), labels


def evaluate_shard(folder: Path, size: int) -> dict[str, float]:
    """Return what each rank computes on the first `size` validation samples."""
    project = load_project(folder)
    task = project.task
    rank, world_size = dist.get_rank(), dist.get_world_size()
    val_set = Subset(task.Digits(train=False), range(size))
    shard = ShardSampler(val_set, rank, world_size)
    batches = DataLoader(val_set, 4, sampler=shard, collate_fn=double)
    model = build(project)
    for buffer in model.buffers():  # as if each rank had gone its own way in training
        buffer.add_(rank)
    metrics = task.Metrics(10, torch.device("cpu"), Namespace(report=False))
    evaluate(project, model, metrics, batches)  # the next evaluation resets the metrics
    return evaluate(project, model, metrics, batches)


@pytest.mark.parametrize("size", [1, 7, 25])
@torch.no_grad()
def test_evaluation_equals_that_of_one_process(
    processes: Processes, project: Project, size: int
) -> None:
    task = project.task
    images, labels = double([task.Digits(train=False)[index] for index in range(size)])
    output = build(project).eval()(images)
    loss = nn.functional.cross_entropy(output.float(), labels, reduction="sum").item() / size
    accuracy = (output.argmax(1) == labels).sum().item() / size
    for results in processes(evaluate_shard, project.folder, size):
        assert results[task.METRIC] == accuracy
        assert results["val_loss"] == pytest.approx(loss, rel=1e-6)


def test_labels_of_a_folder_follow_another_order_of_its_classes(
    project: Project, image_folder: Path
) -> None:
    task = project.task
    images = task.Images(image_folder / "val", task.center_crop)
    before = [(path, images.classes[label]) for path, label in images.samples]
    assert images.classes == ["blue", "red"]
    images.reorder_classes(["red", "blue"])
    assert [(path, images.classes[label]) for path, label in images.samples] == before
    assert images[0][1] == images.classes.index("blue") == 1
