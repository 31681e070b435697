"""The loop of the usual Apex snippet: O1, NCHW, Apex's DistributedDataParallel, torch's SGD."""

import os

import torch
import torch.distributed as dist
from apex import amp
from apex.parallel import DistributedDataParallel
from common import build_batch, build_criterion, build_model, build_optimizer, parse_args


def main() -> None:
    args = parse_args()
    torch.backends.cudnn.benchmark = True
    rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)

    model = build_model(args).cuda()
    criterion = build_criterion(args)
    optimizer = build_optimizer(args, model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.precision)
    model = DistributedDataParallel(model)
    images, targets = build_batch(args, torch.device("cuda"), torch.contiguous_format)

    while True:
        output = model(images)
        loss = criterion(output, targets)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
