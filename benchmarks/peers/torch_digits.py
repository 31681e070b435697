"""What `make demo` trains, on torch alone, as someone who knows torch well writes it.

The model and the digits are those of the project.
"""

import argparse
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS = 10
BATCH_SIZE = 32


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader, totals: Tensor) -> float:
    """The share of the validation set that is right, which the sampler may pad."""
    model.eval()
    totals.zero_()
    for images, labels in loader:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(images.contiguous(memory_format=torch.channels_last))
        totals += torch.tensor([(output.argmax(1) == labels).sum(), len(labels)])
    model.train()
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--project", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--scale-loss", action="store_true", help="as O1 does, also in bfloat16")
    args = parser.parse_args()
    sys.path.append(str(args.project))
    from task import Digits, build_model

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    train_set, val_set = Digits(train=True), Digits(train=False)
    sampler = DistributedSampler(train_set, drop_last=True)
    train_loader = DataLoader(train_set, BATCH_SIZE, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val_set, BATCH_SIZE, sampler=DistributedSampler(val_set, shuffle=False))

    model = build_model("resnet18", 10).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=1e-2, fused=True)
    steps = EPOCHS * len(train_loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2
    )
    model = DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)
    criterion = nn.CrossEntropyLoss()
    scaler = torch.amp.GradScaler("cpu", enabled=args.scale_loss)
    totals = torch.zeros(2)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for number, (images, labels) in enumerate(train_loader, 1):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16):
                output = model(images.contiguous(memory_format=torch.channels_last))
                loss = criterion(output, labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            if number % 10 == 0 and rank == 0:
                print(f"epoch {epoch + 1} step {number} loss {loss.item():.4f}")
        found = accuracy(model.module, val_loader, totals)
        if rank == 0:
            print(f"epoch {epoch + 1} accuracy {found:.4f}")
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, os.path.join(args.output, "last.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
