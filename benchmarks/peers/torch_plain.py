"""A loop on torch alone, as someone who knows torch well writes it."""

import os

import torch
import torch.distributed as dist
from common import build_batch, build_criterion, build_model, build_optimizer, parse_args
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def main() -> None:
    args = parse_args()
    dtype = TYPES[args.precision]
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    is_distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if is_distributed:
        dist.init_process_group("nccl" if on_gpu else "gloo")

    model = build_model(args)
    if args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = build_optimizer(args, model.parameters())
    if is_distributed:
        model = DistributedDataParallel(
            model,
            device_ids=[local_rank] if on_gpu else None,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # nor does Apex's, or the project's before it validates
        )
    if args.compile or args.cuda_graphs:
        model = torch.compile(model, mode="reduce-overhead" if args.cuda_graphs else None)
    criterion = build_criterion(args)
    scaler = torch.amp.GradScaler(device.type, args.init_scale, enabled=dtype == torch.float16)
    images, targets = build_batch(args, device)

    while True:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = criterion(model(images), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


if __name__ == "__main__":
    main()
