"""Regression of the number of lit pixels in synthetic images: a task.py without classes.

A test puts it in the place of a generated project's task.py.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
from engine import cli
from engine.data.images import read_image
from engine.monitoring import image_grid
from engine.optim import eval_mode
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

METRIC = "val_mae"
METRIC_MODE = "min"
LAYOUT = "not used"
BATCH_SIZE = 16
WARMUP_EPOCHS = 1.0
BLOCKS: tuple[str, ...] = ()
DUMMY_CLASSES = 0


def add_arguments(parser: cli.ArgumentParser) -> None:
    """Add the flags of this task."""
    parser.group("model").add_argument("--arch", default="cnn", help="only cnn")
    parser.group("model").add_argument("--width", type=cli.positive_int, default=8, help="channels")


def check_arguments(parser: cli.ArgumentParser, args: argparse.Namespace) -> None:
    """Stop with an error message if flags contradict each other."""


def build_model(arch: str, num_classes: int) -> nn.Module:
    """Return a small convolutional network: (N, 3, H, W) -> (N, 1)."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(8, 1),
    )


class Spots(Dataset):
    """Images with random pixels lit, and the fraction of them, which is the target."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.fractions = torch.rand(size, generator=generator)
        noise = torch.rand(size, 3, 16, 16, generator=generator)
        self.images = (noise < self.fractions[:, None, None, None]).float()

    def __len__(self) -> int:
        return len(self.fractions)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.fractions[index]


def build_datasets(args: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """Return the training and the validation set of (image, fraction)."""
    return Spots(400, seed=0), Spots(101, seed=1)


def prepare(batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the model's input and the loss's targets."""
    images, fractions = batch
    return images, fractions


def criterion(output: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean squared error."""
    return F.mse_loss(output.float().squeeze(1), targets)


class Metrics:
    """Loss and mean absolute error of the validation set."""

    def __init__(self, num_classes: int, device: torch.device, args: argparse.Namespace) -> None:
        self.totals = torch.zeros(3, dtype=torch.float64, device=device)

    def reset(self) -> None:
        """Clear the totals."""
        self.totals.zero_()

    def update(self, output: Tensor, targets: Tensor) -> None:
        """Add a batch."""
        errors = output.double().squeeze(1) - targets.double()
        size = errors.new_tensor(len(errors))
        self.totals += torch.stack([errors.square().sum(), errors.abs().sum(), size])

    def compute(self) -> dict[str, float]:
        """Return the metrics over all processes."""
        dist.all_reduce(self.totals)
        squares, absolutes, count = self.totals.tolist()
        return {
            "val_loss": squares / count,
            "val_mae": absolutes / count,
            "val_rmse": math.sqrt(squares / count),
        }


def dummy_batch(batch_size: int, device: torch.device) -> list[Tensor]:
    """Return one random batch."""
    return [
        torch.rand(batch_size, 3, 16, 16, device=device),
        torch.rand(batch_size, device=device),
    ]


@torch.no_grad()
def show(
    model: nn.Module,
    val_set: Dataset,
    metrics: Metrics,
    output: Path,
    epoch: int | None = None,
) -> Path:
    """Write predictions and targets of the first samples as text; return the file's path."""
    path = image_grid.image_path(output, epoch).with_suffix(".txt")
    path.parent.mkdir(parents=True, exist_ok=True)
    pairs = [val_set[index] for index in range(4)]
    images = torch.stack([image for image, _ in pairs]).to(next(model.parameters()).device)
    with eval_mode(model):
        predictions = model(images).float().squeeze(1).tolist()
    lines = [f"{value:.3f} {pair[1]:.3f}" for value, pair in zip(predictions, pairs, strict=True)]
    path.write_text("\n".join(lines) + "\n")
    return path


def add_predict_arguments(parser: cli.ArgumentParser) -> None:
    """Add the flags of predict.py that belong to this task."""


class Predictor:
    """Inference on one image file."""

    def __init__(self, model: nn.Module, metadata: dict, args: argparse.Namespace) -> None:
        self.model = model

    def __call__(self, path: Path) -> list[tuple[str, float]]:
        """Return the predicted fraction of lit pixels."""
        image = (read_image(path) / 255).unsqueeze(0)
        return [("fraction", self.model(image.to(next(self.model.parameters()).device)).item())]
