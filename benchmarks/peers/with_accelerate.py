"""The loop with Hugging Face Accelerate, as its guide "Add Accelerate to your code" has it."""

import torch
from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs
from common import build_batch, build_criterion, build_model, build_optimizer, parse_args

PRECISIONS = {"fp32": "no", "fp16": "fp16", "bf16": "bf16"}


def main() -> None:
    args = parse_args()
    torch.backends.cudnn.benchmark = True
    scaler = GradScalerKwargs(init_scale=args.init_scale)
    accelerator = Accelerator(mixed_precision=PRECISIONS[args.precision], kwargs_handlers=[scaler])

    model = build_model(args).to(memory_format=torch.channels_last)
    optimizer = build_optimizer(args, model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    criterion = build_criterion(args)
    images, targets = build_batch(args, accelerator.device)

    while True:
        optimizer.zero_grad()
        loss = criterion(model(images), targets)
        accelerator.backward(loss)
        optimizer.step()


if __name__ == "__main__":
    main()
