"""What the hand-written loops share: flags, and the model, optimizer and batch of the project.

That is all: how it trains, each of them shows in full.
"""

import argparse
from collections.abc import Iterable

import torch
import torchvision
from torch import Tensor, nn

CLASSES = 1000


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", default="resnet50")
    parser.add_argument("--batch-size", type=int, default=256, help="of each process")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--precision", required=True, help="fp32, fp16, bf16, or Apex's opt_level")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    parser.add_argument("--sync-bn", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--cuda-graphs", action="store_true")
    return parser.parse_args()


def build_model(args: argparse.Namespace) -> nn.Module:
    return torchvision.models.get_model(args.arch, weights=None, num_classes=CLASSES)


def build_optimizer(
    args: argparse.Namespace, parameters: Iterable[Tensor]
) -> torch.optim.Optimizer:
    if args.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=1e-2, fused=True)
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=1e-4)


def build_batch(
    args: argparse.Namespace,
    device: torch.device,
    memory_format: torch.memory_format = torch.channels_last,
) -> tuple[Tensor, Tensor]:
    """The one batch that each step trains on."""
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
    targets = torch.randint(CLASSES, (args.batch_size,), device=device)
    return images.contiguous(memory_format=memory_format), targets
