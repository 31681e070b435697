"""The recipe fashion_mnist_resnet18 or _wrn by hand, as torchvision's reference script trains.

    python benchmarks/peers/torch_fashion_mnist.py --project PROJECT [--recipe NAME] [--data DIR]

Model, images and values of the recipe are those of the generated project. Transforms of
torchvision for each sample, DataLoader, torch's autocast and GradScaler, a learning rate for each
epoch, and validation after the last one are written out here. Prints accuracy and seconds.
"""

import argparse
import json
import math
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

DATA = Path("/usr/share/datasets/fashion-mnist")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Transformed(Dataset):
    """Images of a data set, transformed one by one."""

    def __init__(self, dataset: Dataset, transform: v2.Compose) -> None:
        self.dataset, self.transform = dataset, transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.dataset[index]
        return self.transform(image), label


def parse_args() -> argparse.Namespace:
    """Return the flags; those that are not given are the recipe's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--project", type=Path, required=True, help="a generated project")
    add("--recipe", default="fashion_mnist_resnet18")
    add("--data", type=Path, default=DATA)
    add("--dtype", choices=("float16", "bfloat16"), default="float16")
    add("--workers", type=int, default=8)
    add("--seed", type=int, default=0)
    for name, kind in (("arch", str), ("epochs", int), ("batch_size", int)):
        add(f"--{name.replace('_', '-')}", type=kind)
    args = parser.parse_args()
    recipe = json.loads((args.project / "recipes" / f"{args.recipe}.json").read_text())
    given = {name: value for name, value in vars(args).items() if value is not None}
    return argparse.Namespace(**recipe | given)


def build_loaders(args: argparse.Namespace) -> tuple[DataLoader, DataLoader]:
    """Return the loaders of the training and the test images."""
    from engine.data import idx  # of the project

    size = idx.image_size(args.data)
    to_float = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    augment = [v2.RandomCrop(size, padding=4), v2.RandomHorizontalFlip(), *to_float]
    augment.append(v2.RandomErasing(args.random_erasing))
    # As validation images, without the project's shifts and flips.
    training = idx.IdxImages(args.data, True, size)
    training.images, training.margin = training.images[..., 4:-4, 4:-4], 0
    test = idx.IdxImages(args.data, False, size)
    options = {"num_workers": args.workers, "pin_memory": torch.cuda.is_available()}
    return (
        DataLoader(
            Transformed(training, v2.Compose(augment)),
            args.batch_size,
            shuffle=True,
            drop_last=True,
            persistent_workers=args.workers > 0,
            **options,
        ),
        DataLoader(Transformed(test, v2.Compose(to_float)), args.batch_size, **options),
    )


def build_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """Return the recipe's optimizer: SGD if the recipe has a momentum, else AdamW."""
    lr = args.lr * args.batch_size / args.scale_lr
    fused = torch.cuda.is_available()
    options = {"lr": lr, "weight_decay": args.weight_decay, "fused": fused}
    if hasattr(args, "momentum"):
        return torch.optim.SGD(model.parameters(), momentum=args.momentum, **options)
    return torch.optim.AdamW(model.parameters(), **options)


def lr_factor(step: int, steps_per_epoch: int, args: argparse.Namespace) -> float:
    """Return the fraction of the learning rate: a linear warm-up, then half a cosine."""
    epoch = (step + 0.5) / steps_per_epoch
    if epoch < args.warmup_epochs:
        return epoch / args.warmup_epochs
    progress = (epoch - args.warmup_epochs) / max(1e-9, args.epochs - args.warmup_epochs)
    return (1 + math.cos(math.pi * min(1.0, progress))) / 2


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader, to_device: partial) -> float:
    """Return the accuracy on the test images."""
    model.eval()
    correct = sum(
        (model(to_device(images)).argmax(1).cpu() == labels).sum() for images, labels in loader
    )
    return float(correct) / len(loader.dataset)


def main() -> None:
    args = parse_args()
    sys.path.insert(0, str(args.project))
    from engine.small_models import build_small_model

    start = time.perf_counter()
    torch.manual_seed(args.seed)
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    to_device = partial(
        Tensor.to, device=device, memory_format=torch.channels_last, non_blocking=True
    )
    train_loader, test_loader = build_loaders(args)
    model = build_small_model(args.arch, 10).to(device, memory_format=torch.channels_last)
    optimizer = build_optimizer(args, model)
    factor = partial(lr_factor, steps_per_epoch=len(train_loader), args=args)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    dtype = getattr(torch, args.dtype)
    is_scaled = device.type == "cuda" and args.dtype == "float16"
    scaler = torch.amp.GradScaler(device.type, enabled=is_scaled)
    for _ in range(args.epochs):
        model.train()
        for images, labels in train_loader:
            with torch.autocast(device.type, dtype, enabled=device.type == "cuda"):
                loss = F.cross_entropy(model(to_device(images)), labels.to(device))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
    result = accuracy(model, test_loader, to_device)
    seconds = time.perf_counter() - start
    print(json.dumps({"val_accuracy": result, "seconds": round(seconds, 1), "arch": args.arch}))


if __name__ == "__main__":
    main()
