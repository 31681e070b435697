"""Real Apex at its best on one GPU: its amp on channels_last weights.

There is no DistributedDataParallel, because Apex's mixes up the gradients of such weights.
"""

import torch
from apex import amp
from apex.optimizers import FusedAdam
from common import LR, build_batch, build_criterion, build_model, build_optimizer, parse_args


def main() -> None:
    args = parse_args()
    torch.backends.cudnn.benchmark = True
    model = build_model(args).to("cuda", memory_format=torch.channels_last)
    if args.optimizer == "adamw":
        optimizer = FusedAdam(model.parameters(), lr=LR["adamw"], weight_decay=1e-2)
    else:
        optimizer = build_optimizer(args, model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.precision)
    criterion = build_criterion(args)
    images, targets = build_batch(args, torch.device("cuda"))

    while True:
        optimizer.zero_grad()
        loss = criterion(model(images), targets)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
