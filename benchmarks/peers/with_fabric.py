"""The loop with Lightning Fabric, as its guide "Convert PyTorch code to Fabric" has it."""

import os

import torch
from common import build_batch, build_criterion, build_model, build_optimizer, parse_args
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision

PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed"}


def main() -> None:
    args = parse_args()
    torch.backends.cudnn.benchmark = True
    devices = int(os.environ.get("WORLD_SIZE", "1"))
    strategy = "ddp" if devices > 1 else "auto"
    if args.precision == "fp16":
        scaler = torch.amp.GradScaler("cuda", args.init_scale)
        precision = {"plugins": MixedPrecision("16-mixed", "cuda", scaler)}
    else:
        precision = {"precision": PRECISIONS[args.precision]}
    fabric = Fabric(devices=devices, strategy=strategy, **precision)
    fabric.launch()

    model = build_model(args).to(memory_format=torch.channels_last)
    optimizer = build_optimizer(args, model.parameters())
    model, optimizer = fabric.setup(model, optimizer)
    criterion = build_criterion(args)
    images, targets = build_batch(args, fabric.device)

    while True:
        optimizer.zero_grad()
        loss = criterion(model(images), targets)
        fabric.backward(loss)
        optimizer.step()


if __name__ == "__main__":
    main()
