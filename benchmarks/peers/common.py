"""What the hand-written loops share: flags; model, loss, optimizer and batch of the project.

That is all: how it trains, each of them shows in full.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import get_model, list_models, segmentation

CLASSES = 1000
PIXEL_CLASSES = 150  # of segmentation
AUX_WEIGHT = 0.5  # of torchvision's reference, as of the project
LR = {"sgd": 0.01, "adamw": 0.001}
# No step overflows. From torch's 2**16 the first ones do, and its fused SGD, where it skips the
# first of all, leaves a momentum that makes every weight nan.
INIT_SCALE = 2.0**10


def is_segmentation(arch: str) -> bool:
    return arch in list_models(segmentation)


def usual_size(arch: str) -> int:
    """The side of the project's images."""
    return 512 if is_segmentation(arch) else 224


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", default="resnet50")
    parser.add_argument("--batch-size", type=int, default=256, help="of each process")
    parser.add_argument("--image-size", type=int, help="default: the project's")
    parser.add_argument("--precision", required=True, help="fp32, fp16, bf16, or Apex's opt_level")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    parser.add_argument("--init-scale", type=float, default=INIT_SCALE, help="of the loss")
    parser.add_argument("--sync-bn", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--cuda-graphs", action="store_true")
    args = parser.parse_args()
    args.image_size = args.image_size or usual_size(args.arch)
    return args


def build_model(args: argparse.Namespace) -> nn.Module:
    if not is_segmentation(args.arch):
        return get_model(args.arch, weights=None, num_classes=CLASSES)
    auxiliary = {} if args.arch.startswith("lraspp") else {"aux_loss": True}
    return get_model(
        args.arch, weights=None, weights_backbone=None, num_classes=PIXEL_CLASSES, **auxiliary
    )


def build_criterion(args: argparse.Namespace) -> Callable[[Tensor | Mapping, Tensor], Tensor]:
    return segmentation_loss if is_segmentation(args.arch) else nn.CrossEntropyLoss()


def segmentation_loss(output: Mapping[str, Tensor], masks: Tensor) -> Tensor:
    loss = F.cross_entropy(output["out"], masks)
    if "aux" in output:
        loss = loss + AUX_WEIGHT * F.cross_entropy(output["aux"], masks)
    return loss


def build_optimizer(
    args: argparse.Namespace, parameters: Iterable[Tensor]
) -> torch.optim.Optimizer:
    lr = LR[args.optimizer]
    if args.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr, weight_decay=1e-2, fused=True)
    fused = torch.cuda.is_available()
    return torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=1e-4, fused=fused)


def build_batch(
    args: argparse.Namespace,
    device: torch.device,
    memory_format: torch.memory_format = torch.channels_last,
) -> tuple[Tensor, Tensor]:
    """The one batch that each step trains on."""
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
    if is_segmentation(args.arch):
        shape = args.batch_size, args.image_size, args.image_size
        targets = torch.randint(PIXEL_CLASSES, shape, device=device)
    else:
        targets = torch.randint(CLASSES, (args.batch_size,), device=device)
    return images.contiguous(memory_format=memory_format), targets
