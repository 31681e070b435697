"""Train a model on one GPU, on all GPUs of a machine, or on several machines.

./run.sh                                             all GPUs here, or two processes on the CPU
./run.sh --data DIR --arch resnet50                  on images of your own
NPROC=1 ./run.sh --dummy --steps 100                 one process, synthetic data
NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 ./run.sh   first of two machines; the other: NODE_RANK=1
"""

import math
from argparse import BooleanOptionalAction, Namespace
from itertools import islice
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import task
from engine import checkpoint, cli, distributed
from engine.backend import load_backend
from engine.check import sample, try_out
from engine.errors import UserError
from engine.report import Report

LOG_EVERY = 10  # steps
DUMMY_STEPS = 100  # in an epoch of --dummy
OUTPUT = Path("runs/«project_slug»")


def parse_args() -> Namespace:
    parser = cli.ArgumentParser(prog="./run.sh", description="Train; validate after each epoch.")
    count, amount, flag = cli.count, cli.amount, BooleanOptionalAction

    add = parser.add_argument_group("data").add_argument
    add("--data", type=Path, metavar="DIR", help="train/CLASS/IMAGE and val/CLASS/IMAGE")
    add("--dummy", action="store_true", help="synthetic images, made on the device")
    add("--workers", type=cli.natural, help="processes that load data, for each process")

    add = parser.add_argument_group("model").add_argument
    add("--arch", default="resnet18", help="one of torchvision's models, such as resnet50")
    add("--compile", action=flag, default=False, help="compile the model: a slow start, fast steps")
    add("--channels-last", action=flag, help="NHWC, which tensor cores want (default: on a GPU)")

    add = parser.add_argument_group("optimisation").add_argument
    add("--epochs", type=count, default=10, help="the learning rate is 0 at the end of them")
    add("--steps", type=count, help="stop after so many steps in all")
    add("--batch-size", type=count, default=32, help="of each process")
    # % if fused_adam
    add("--lr", type=amount, default=1e-3, help="the highest learning rate")
    add("--weight-decay", type=amount, default=1e-2, help="decoupled: FusedAdam is AdamW")
    # % else
    add("--lr", type=amount, default=0.05, help="the highest learning rate")
    add("--momentum", type=amount, default=0.9, help="of SGD")
    add("--weight-decay", type=amount, default=1e-4, help="added to the gradient")
    # % endif
    add("--warmup-epochs", type=amount, default=1.0, help="of a rising learning rate")

    add = parser.add_argument_group("precision").add_argument
    levels = ("O0", "O1", "O2", "O3", "O4", "O5")
    add("--opt-level", choices=levels, default="«opt_level»", help="Apex's, see README.md")
    add("--loss-scale", type=cli.loss_scale, help="dynamic, or a number (default: the level's)")
    add("--keep-batchnorm-fp32", action=flag, help="where weights are cast (default: the level's)")
    backends = ("auto", "apex", "native")
    add("--backend", choices=backends, default="«backend»", help="real Apex or apex_native")

    add = parser.add_argument_group("distributed").add_argument
    add("--local-rank", "--local_rank", type=int, help="from old launchers; LOCAL_RANK wins")
    # % if ddp == "apex"
    add("--delay-allreduce", action="store_true", help="accept parameters without a gradient")
    # % endif

    add = parser.add_argument_group("run").add_argument
    add("--output", type=Path, default=OUTPUT, help="folder of checkpoints and metrics")
    add("--resume", type=Path, help="a checkpoint, or 'auto' for the last one in --output, if any")
    add("--eval-only", action="store_true", help="validate, and train nothing")
    add("--seed", type=cli.natural, default=0, help="of weights, order and augmentations")

    args = parser.parse_args()
    if args.keep_batchnorm_fp32 is not None and args.opt_level in ("O1", "O4"):
        parser.error(f"--keep-batchnorm-fp32 is for cast weights; {args.opt_level} casts none")
    if args.resume == Path("auto") or distributed.is_restart():
        last = args.output / "last.pt"
        args.resume = last if last.exists() else None
    if args.eval_only and args.resume is None:
        parser.error("--eval-only needs --resume with a checkpoint")
    return args


def learning_rate(args: Namespace, epoch: float) -> float:
    """A linear rise, then half a cosine down to 0; `epoch` counts fractions too."""
    if epoch < args.warmup_epochs:
        return args.lr * epoch / args.warmup_epochs
    done = (epoch - args.warmup_epochs) / max(args.epochs - args.warmup_epochs, 1e-9)
    return args.lr * (1 + math.cos(math.pi * min(done, 1))) / 2


def loss_scale(apex: ModuleType) -> float:
    return apex.amp.state_dict()["loss_scaler0"]["loss_scale"]


@torch.no_grad()
def validate(
    model: nn.Module, batches: DataLoader, memory_format: torch.memory_format, report: Report
) -> dict[str, float]:
    """The task's results on the whole validation set, each sample counted once."""
    # Not the DDP wrapper: shards may differ in length, and it would wait for all of them.
    module = checkpoint.unwrap(model)
    distributed.broadcast_buffers(module)
    module.eval()
    device = next(module.parameters()).device
    totals = torch.zeros_like(task.NO_TOTALS, device=device)
    for batch in report.bar(batches, "validating"):
        images, targets = distributed.to_device(batch, device, memory_format)
        totals += task.totals(module(task.prepare(images)), targets)
    dist.all_reduce(totals)
    module.train()
    return task.results(totals)


def main() -> None:
    args = parse_args()

    # The device comes first: NCCL, and whatever is made on "cuda", go to the current one.
    rank, local_rank, world_size = distributed.ranks(args.local_rank)
    device = distributed.device_for(local_rank)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    apex, reason = load_backend(args.backend, args.opt_level, args.compile)
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method="env://")
    torch.manual_seed(args.seed)
    report = Report(args.output, rank, task.METRIC)
    report.say(f"{distributed.describe(world_size, device)}, {args.opt_level}, {reason}")

    # Data: each process trains on its own shard, in a new order each epoch.
    if args.dummy:
        num_classes, sampler = task.DUMMY_CLASSES, None
        train_loader = [task.dummy_batch(args.batch_size, device)] * DUMMY_STEPS
        val_loader = train_loader[:1]
        tried = task.dummy_batch(min(2, args.batch_size), torch.device("cpu"))
    else:
        train_set, val_set = task.build_datasets(args.data)
        num_classes = len(train_set.classes)
        sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
        if args.batch_size > len(sampler) and not args.eval_only:
            raise UserError(
                f"--batch-size {args.batch_size} is more than the {len(sampler)} training images "
                f"of each process: use at most {max(1, len(sampler))}, or fewer processes"
            )
        workers = args.workers
        if workers is None:
            workers = min(distributed.cores(), 8) if args.data else 0
        loading = {"batch_size": args.batch_size, "num_workers": workers, "pin_memory": on_gpu}
        train_loader = DataLoader(train_set, sampler=sampler, drop_last=True, **loading)
        val_loader = DataLoader(distributed.shard(val_set, rank, world_size), **loading)
        tried = sample(train_set, min(2, args.batch_size, len(train_set)))
    steps_per_epoch = len(train_loader)

    # Model, SyncBN, device and memory format; only then the optimizer, which must see the
    # parameters that are trained; then amp, which may cast them; then DDP, which hooks them.
    model = task.build_model(args.arch, num_classes)
    try_out(model, task.criterion, task.prepare(tried[0]), tried[1])
    # % if sync_bn
    model = apex.parallel.convert_syncbn_model(model)
    # % endif
    # % if ddp == "apex"
    if apex.__name__ == "apex":  # its DDP puts gradients back in NCHW order, as if weights were so
        if args.channels_last:
            raise UserError("--channels-last: real Apex's DDP mixes up its gradients; leave it out")
        report.say("NCHW, because real Apex's DDP mixes up the gradients of channels_last weights")
        args.channels_last = False
    # % endif
    channels_last = on_gpu if args.channels_last is None else args.channels_last
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    model = model.to(device, memory_format=memory_format)
    # % if fused_adam
    optimizer = apex.optimizers.FusedAdam(
        model.parameters(), lr=args.lr, weight_decay=args.weight_decay
    )
    # % else
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay
    )
    # % endif
    model, optimizer = apex.amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    if args.compile:
        model.compile()
    # % if ddp == "apex"
    model = apex.parallel.DistributedDataParallel(model, delay_allreduce=args.delay_allreduce)
    # % else
    model = nn.parallel.DistributedDataParallel(model, device_ids=[local_rank] if on_gpu else None)
    # % endif

    step, best = 0, -math.inf
    if args.resume:
        state = checkpoint.restore(args.resume, model, optimizer, apex.amp)
        best = state["best"]
        done = state["step"] / state["steps_per_epoch"]
        step = round(done * steps_per_epoch)  # another number of processes has other steps
        report.say(f"resumed {args.resume} after {done:.2f} epochs{state['origin']}")
    if args.eval_only:
        results = validate(model, val_loader, memory_format, report)
        report.say(" ".join(f"{name} {value:.4f}" for name, value in results.items()))
        return
    report.open(vars(args), args.resume, step // steps_per_epoch)
    last_step = min(args.epochs * steps_per_epoch, args.steps or math.inf)

    while step < last_step:
        epoch, first = divmod(step, steps_per_epoch)
        if sampler:
            sampler.set_epoch(epoch)  # or every epoch has the order of the first
        # Augmentations differ between processes and epochs, and come back the same on a resume.
        torch.manual_seed(args.seed + rank + world_size * epoch)
        end = min(steps_per_epoch, last_step - epoch * steps_per_epoch)
        batches = islice(train_loader, first, end)
        bar = report.bar(batches, f"epoch {epoch + 1}/{args.epochs}", end - first)
        meter = report.meter(device, args.batch_size * world_size)
        for batch in bar:
            images, targets = distributed.to_device(batch, device, memory_format)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(args, (step + 0.5) / steps_per_epoch)

            loss = task.criterion(model(task.prepare(images)), targets)
            optimizer.zero_grad()
            with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()

            step += 1
            meter.add(loss)
            if step % LOG_EVERY == 0:  # here the CPU waits for the GPU
                bar.set_postfix(meter.progress(), loss_scale=loss_scale(apex))

        row = {"epoch": epoch + 1, "step": step, **meter.results()}
        if meter.warm_up_s:
            report.say(f"warm-up: {meter.warm_up_s:.1f} s, not counted in images_per_second")
        row |= {"lr": optimizer.param_groups[0]["lr"], "loss_scale": loss_scale(apex)}
        row |= validate(model, val_loader, memory_format, report)
        report.row(row)
        is_best, best = row[task.METRIC] > best, max(best, row[task.METRIC])
        if rank == 0:
            position = {"epoch": step // steps_per_epoch, "step": step, "best": best}
            last = args.output / "last.pt"
            checkpoint.save(
                last, model, optimizer, apex.amp, **position, steps_per_epoch=steps_per_epoch
            )
            if is_best:
                checkpoint.keep(last, args.output / "best.pt")

    report.say(f"best {task.METRIC} {best:.4f}; checkpoints and metrics.csv are in {args.output}")


if __name__ == "__main__":
    distributed.run(main)
