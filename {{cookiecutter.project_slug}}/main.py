"""Train a model on one GPU, on all GPUs of a machine, or on several machines.

./run.sh                                             all GPUs here, or two processes on the CPU
./run.sh --data DIR                                  on data of your own
NPROC=1 ./run.sh --dummy --steps 100                 one process, synthetic data
NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 ./run.sh   first of two machines; the other: NODE_RANK=1
"""

import math
import sys
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import task
from engine import backend, checkpoint, cli, distributed, examine, finite, rng, training, weights
from engine.check import Audit, sample, try_out
from engine.order import Order, Repeated, Seeded, loading
from engine.report import Report
from engine.saver import Saver

LOG_EVERY = 10  # steps
DUMMY_STEPS = 100  # in an epoch of --dummy
OUTPUT = Path("runs/«project_slug»")


def parse_args() -> Namespace:
    parser = cli.ConfigurableParser(
        prog="./run.sh", description="Train; validate after each epoch."
    )
    count, amount, flag = cli.count, cli.amount, BooleanOptionalAction

    add = parser.add_argument_group("data").add_argument
    add("--data", type=Path, metavar="DIR", help=f"{task.LAYOUT}; by default, the digits")
    add("--dummy", action="store_true", help="synthetic images, made on the device")
    # % if task == "segmentation"
    add("--ignore-index", type=cli.natural, help="label without a class (default: 0 of ADE20K)")
    # % endif
    add("--workers", type=cli.natural, help="processes that load data, for each process")
    # % if task == "classification"
    decoders = ("cpu", "gpu")
    add("--decode", choices=decoders, default="cpu", help="where JPEG files become images")
    # % endif

    add = parser.add_argument_group("model").add_argument
    # % if task == "segmentation"
    archs = "deeplabv3_resnet50 or another of torchvision, smp:DECODER:ENCODER, or unet"
    add("--arch", help=f"{archs} (default: the first; for the digits, the last)")
    # % else
    add("--arch", default="resnet18", help="one of torchvision's models, such as resnet50")
    # % endif
    # % if ddp != "dataparallel"
    add("--compile", action=flag, default=False, help="compile the model: a slow start, fast steps")
    add("--cuda-graphs", action=flag, default=False, help="the same for small batches, as graphs")
    # % endif
    # % if task == "contrastive"
    add("--weights", help="a file, of the image encoder or both, or torchvision's name (DEFAULT)")
    # % else
    add("--weights", help="to begin with: a file, or torchvision's name, such as DEFAULT")
    # % endif
    add("--freeze", nargs="+", metavar="PART", help="keep these as they are, such as layer1")
    # % if sync_bn
    add("--sync-bn-group", type=cli.natural, default=0, help="processes sharing one (default: all)")
    # % endif
    add("--channels-last", action=flag, help="NHWC, which convolutions like best (default: yes)")

    add = parser.add_argument_group("optimisation").add_argument
    add("--epochs", type=count, default=10, help="to train for; --schedule ends with them")
    add("--steps", type=count, help="stop after so many steps in all")
    # % if ddp == "dataparallel"
    add("--batch-size", type=count, default=task.BATCH_SIZE, help="of all GPUs together")
    # % else
    add("--batch-size", type=count, default=task.BATCH_SIZE, help="of each process")
    # % endif
    # % if fused_adam
    add("--lr", type=amount, default=1e-3, help="the highest learning rate")
    add("--weight-decay", type=amount, default=1e-2, help="decoupled: FusedAdam is AdamW")
    # % else
    add("--lr", type=amount, default=0.05, help="the highest learning rate")
    add("--momentum", type=amount, default=0.9, help="of SGD")
    add("--weight-decay", type=amount, default=1e-4, help="added to the gradient")
    # % endif
    # % if task == "contrastive"
    add("--text-lr", type=amount, help="the text encoder's highest (default: that of --lr)")
    # % endif
    add("--decay-weights-only", action="store_true", help="not norms and biases")
    add("--scale-lr", type=count, metavar="IMAGES", help="--lr is for steps of so many")
    add("--schedule", choices=("cosine", "step", "none"), default="cosine", help="step: ×0.1 twice")
    # % if task == "segmentation" and not fused_adam
    add("--warmup-epochs", type=amount, default=3.0, help="of a rising learning rate")
    # % else
    add("--warmup-epochs", type=amount, default=1.0, help="of a rising learning rate")
    # % endif
    # % if task != "contrastive"
    add("--accumulate", type=count, default=1, metavar="N", help="batches of a step, one by one")
    # % endif
    add("--label-smoothing", type=cli.share, default=0.0, help="in the training's loss")
    add("--clip-grad", type=amount, metavar="NORM", help="the gradients' highest norm")
    add("--ema", type=cli.share, metavar="DECAY", help="validate and save a moving average, too")

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
    # % if ddp != "dataparallel"
    add("--compress-gradients", action="store_true", help="send them as bfloat16: half the bytes")
    # % endif
    add("--timeout", type=count, default=600, help="seconds in which a step must be done")

    add = parser.add_argument_group("run").add_argument
    add("--output", type=Path, default=OUTPUT, help="folder of checkpoints and metrics")
    add("--resume", type=Path, help="a checkpoint, or 'auto' for the last one in --output, if any")
    add("--save-every", type=cli.interval, metavar="N|Nm", help="steps or minutes, and each epoch")
    add("--keep", type=count, default=2, help="so many of the newest checkpoints")
    add("--eval-only", action="store_true", help="validate, and train nothing")
    add("--seed", type=cli.natural, default=0, help="of weights, order and augmentations")
    add("--deterministic", action="store_true", help="bit by bit the same on a GPU too; slower")
    add("--check", action="store_true", help="look at this machine and these flags, train nothing")
    add("--json", dest="check", action="store_true", help="--check, for a program to read")

    args = parser.parse_args()
    if args.keep_batchnorm_fp32 is not None and args.opt_level in ("O1", "O4"):
        parser.error(f"--keep-batchnorm-fp32 is for cast weights; {args.opt_level} casts none")
    # % if task == "classification"
    if args.decode == "gpu" and (args.dummy or args.data is None):
        parser.error("--decode gpu is for the JPEG files of --data")
    # % endif
    # % if task != "contrastive" and ddp != "dataparallel"
    if args.cuda_graphs and args.accumulate > 1:
        parser.error("--accumulate: --cuda-graphs keep no gradients from one batch to the next")
    # % endif
    if args.workers is None:
        args.workers = min(distributed.cores(), 8) if args.data else 0
    # % if ddp == "dataparallel"
    if args.opt_level == "O4":
        parser.error(
            "--opt-level O4: its casts don't reach DataParallel's threads; take O5 for bf16"
        )
    # % endif
    # % if task == "segmentation"
    if args.arch is None:
        args.arch = "deeplabv3_resnet50" if args.data or args.dummy else "unet"
    # % elif task == "contrastive"
    if args.text_lr is None:
        args.text_lr = args.lr
    # % endif
    return args


def schedule(args: Namespace, epoch: float) -> float:
    """The share of the highest learning rate at `epoch`, which counts fractions too.

    A linear rise to 1, then half a cosine down to 0, or 0.1 and 0.01 for the last two thirds, or 1.
    """
    if epoch < args.warmup_epochs:
        return epoch / args.warmup_epochs
    if args.schedule != "cosine":
        return 0.1 ** int(3 * epoch / args.epochs) if args.schedule == "step" else 1.0
    done = (epoch - args.warmup_epochs) / max(args.epochs - args.warmup_epochs, 1e-9)
    return (1 + math.cos(math.pi * min(done, 1))) / 2


@torch.no_grad()
def validate(
    model: nn.Module, metrics: task.Metrics, batches: Iterable, memory_format: torch.memory_format
) -> dict[str, float]:
    """The task's metrics on the whole validation set, each sample counted once."""
    # Not the DDP wrapper: shards may differ in length, and it would wait for all of them.
    module = checkpoint.unwrap(model)
    distributed.broadcast_buffers(module)
    device = next(module.parameters()).device
    metrics.reset()
    with training.evaluation(module):
        for batch in batches:
            images, targets = distributed.to_device(batch, device, memory_format)
            metrics.update(module(task.prepare(images)), targets)
        return metrics.compute()


def main() -> None:
    args = parse_args()
    # % if task == "segmentation"
    build_datasets = partial(task.build_datasets, args.data, args.ignore_index)
    # % else
    build_datasets = partial(task.build_datasets, args.data)
    # % endif
    # % if ddp == "dataparallel"
    needs = {"replicated": True}
    # % elif ddp == "apex"
    needs = {"compiled": args.compile or args.cuda_graphs, "compressed": args.compress_gradients}
    # % else
    needs = {"compiled": args.compile or args.cuda_graphs}
    # % endif
    if args.check:
        examine.settings(args, build_datasets, needs)

    # The device comes first: NCCL, and whatever is made on "cuda", go to the current one.
    rank, local_rank, world_size = distributed.ranks(args.local_rank)
    # % if ddp == "dataparallel"
    if world_size > 1:
        distributed.stop(f"DataParallel is one process for all GPUs, not {world_size}: use NPROC=1")
    # % endif
    # % if task == "contrastive"
    if args.batch_size * world_size == 1 and not args.eval_only:
        distributed.stop("--batch-size 1: one pair has no wrong answer to learn from; take more")
    # % endif
    device = distributed.device_for(local_rank)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
        # % if ddp != "dataparallel"
        torch.backends.cudnn.benchmark = not args.deterministic
        # % endif
    # % if ddp != "dataparallel"
    elif args.cuda_graphs:
        distributed.stop("--cuda-graphs: this run is on the CPU; take --compile, or leave it out")
    # % endif
    if args.deterministic:
        distributed.make_deterministic()
    apex, reason = backend.load_backend(args.backend, args.opt_level, **needs)
    distributed.join(device, args, apex.__name__)
    rng.seed(args.seed)
    report = Report(args.output, rank, task.METRIC)
    report.say(f"{distributed.describe(world_size, device)}, {args.opt_level}, {reason}")
    # % if ddp == "apex"
    args.channels_last = backend.channels_last(apex, args.channels_last, report.say)
    # % endif
    memory_format = torch.contiguous_format if args.channels_last is False else torch.channels_last

    # Data: each process trains on its own shard, in a new order each epoch.
    if args.dummy:
        # % if task != "contrastive"
        classes = [str(number) for number in range(task.DUMMY_CLASSES)]
        # % endif
        batch = task.dummy_batch(args.batch_size, device)
        batch = distributed.to_device(batch, device, memory_format)
        train_loader = sampler = Repeated(batch, DUMMY_STEPS, world_size)
        val_loader, tried = [batch], [part[:2].cpu() for part in batch]
    else:
        with report.clock("reading the data"):
            train_set, val_set = distributed.same_data(*build_datasets())
        # % if task != "contrastive"
        classes = [str(name) for name in train_set.classes]
        # % endif
        train_set, val_set = Seeded(train_set, args.seed), Seeded(val_set, args.seed)
        sampler = Order(train_set, args.seed)
        options = loading(args.batch_size, args.workers, on_gpu)
        # % if task == "classification"
        Loader = DataLoader if args.decode == "cpu" else task.gpu_loader(device)
        train_loader = Loader(train_set, sampler=sampler, drop_last=True, **options)
        val_loader = Loader(distributed.shard(val_set, rank, world_size), **options)
        # % else
        train_loader = DataLoader(train_set, sampler=sampler, drop_last=True, **options)
        val_loader = DataLoader(distributed.shard(val_set, rank, world_size), **options)
        # % endif
        # % if ddp == "dataparallel"
        tried = sample(train_set, min(2, training.smallest_share(args.batch_size), len(train_set)))
        # % else
        tried = sample(train_set, min(2, args.batch_size, len(train_set)))
        # % endif
    batches_per_epoch = len(train_loader)
    # % if task == "contrastive"
    steps_per_epoch = batches_per_epoch
    # % else
    steps_per_epoch = math.ceil(batches_per_epoch / args.accumulate)
    # % endif

    # Model, SyncBN, device and memory format; only then the optimizer, which must see the
    # parameters that are trained; then amp, which may cast them; then DDP, which hooks them. One
    # process has nobody to share statistics or gradients with.
    # % if task == "contrastive"
    model = task.build_model(args.arch)
    try_out(model, task.criterion, task.prepare(tried[0]), model.text_encoder(tried[1]))
    # % else
    model = task.build_model(args.arch, len(classes))
    try_out(model, task.criterion, task.prepare(tried[0]), tried[1])
    # % endif
    if args.weights:
        # % if task == "contrastive"
        report.say(weights.load(model, args.weights, args.arch, "image_encoder"))
        # % else
        report.say(weights.load(model, args.weights, args.arch))
        # % endif
    ema = training.Ema(model, args.ema) if args.ema else None
    # % if sync_bn
    group = backend.syncbn_group(apex, args.sync_bn_group)
    if world_size > 1:
        model = apex.parallel.convert_syncbn_model(model, process_group=group)
    # % endif
    model = model.to(device, memory_format=memory_format)
    validated = ema.module.to(device, memory_format=memory_format) if ema else model
    # % if task == "contrastive"
    if args.freeze:
        encoders = model.image_encoder, model.text_encoder
        report.say(training.freeze(model, args.freeze, encoders))
    parameters = [
        *training.parameters(model.image_encoder, args.lr, args.decay_weights_only),
        *training.parameters(model.text_encoder, args.text_lr, args.decay_weights_only),
    ]
    # % else
    if args.freeze:
        report.say(training.freeze(model, args.freeze, [model]))
    parameters = training.parameters(model, args.lr, args.decay_weights_only)
    # % endif
    # % if fused_adam
    optimizer = apex.optimizers.FusedAdam(parameters, lr=args.lr, weight_decay=args.weight_decay)
    # % else
    momentum, decay = args.momentum, args.weight_decay
    optimizer = torch.optim.SGD(parameters, args.lr, momentum, weight_decay=decay, fused=on_gpu)
    # % endif
    images_per_batch = args.batch_size * world_size
    if args.scale_lr:
        # % if task == "contrastive"
        factor = images_per_batch / args.scale_lr
        # % else
        factor = images_per_batch * args.accumulate / args.scale_lr
        # % endif
        report.say(training.scale_lr(optimizer, factor))
    highest = [group["lr"] for group in optimizer.param_groups]
    # % if ddp == "apex"
    delay = args.delay_allreduce or args.deterministic  # see make_deterministic
    # % elif ddp == "torch"
    devices, delay = [local_rank] if on_gpu else None, args.deterministic  # see make_deterministic
    # % endif
    # % if task == "contrastive"
    encoders, optimizer = apex.amp.initialize(
        [model.image_encoder, model.text_encoder],
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    # % if ddp != "dataparallel"
    if needs["compiled"]:
        for encoder in encoders:
            encoder.compile(mode="reduce-overhead" if args.cuda_graphs else None)
    # % endif
    # % if ddp == "dataparallel"
    # One process and a thread for each GPU: at every step the model is copied to all GPUs, the
    # outputs come back to the first, and Python runs one thread at a time. The threads are new
    # each time, and would time cuDNN's algorithms again. For comparison only.
    encoders = [nn.DataParallel(encoder) for encoder in encoders]
    # % else
    if world_size > 1:
        # % if ddp == "apex"
        encoders = [
            apex.parallel.DistributedDataParallel(encoder, delay_allreduce=delay)
            for encoder in encoders
        ]
        # % else
        encoders = [
            nn.parallel.DistributedDataParallel(encoder, devices, find_unused_parameters=delay)
            for encoder in encoders
        ]
        # % endif
    training.tune_communication(args, *encoders)
    # % endif
    image_encoder, text_encoder = encoders
    # % else
    model, optimizer = apex.amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    # % if ddp != "dataparallel"
    if needs["compiled"]:
        model.compile(mode="reduce-overhead" if args.cuda_graphs else None)
    # % endif
    # % if ddp == "dataparallel"
    # One process and a thread for each GPU: at every step the model is copied to all GPUs, the
    # outputs come back to the first, and Python runs one thread at a time. The threads are new
    # each time, and would time cuDNN's algorithms again. For comparison only.
    model = nn.DataParallel(model)
    # % else
    if world_size > 1:
        # % if ddp == "apex"
        model = apex.parallel.DistributedDataParallel(model, delay_allreduce=delay)
        # % else
        model = nn.parallel.DistributedDataParallel(model, devices, find_unused_parameters=delay)
        # % endif
    training.tune_communication(args, model)
    # % endif
    # % endif

    # % if task == "classification"
    metrics = task.Metrics(device)
    # % elif task == "segmentation"
    metrics = task.Metrics(len(classes), device)
    # % else
    metrics = task.Metrics(validated.text_encoder)
    # % endif
    # % if task == "contrastive"
    about = {"metric": task.METRIC}  # for predict.py
    # % else
    about = {"metric": task.METRIC, "classes": classes}  # for predict.py
    # % endif
    saver = Saver(args, model, optimizer, apex.amp, report.say, ema, about)
    rng.seed(rng.mixed(args.seed, rank))  # from here on, processes differ
    progress = saver.progress
    resume = saver.resume(args.resume, steps_per_epoch, required=args.eval_only)
    if args.eval_only:
        results = validate(validated, metrics, report.bar(val_loader, "validating"), memory_format)
        report.say(" ".join(f"{name} {value:.4f}" for name, value in results.items()))
        if not args.dummy:
            shown = validated, val_set.dataset, metrics, args.output
            report.picture(progress.step, task.show, *shown)
        return
    # % if task == "contrastive"
    audit = Audit(model, optimizer, apex.amp, train_loader, report.say, encoders)
    # % else
    audit = Audit(model, optimizer, apex.amp, train_loader, report.say)
    # % endif
    report.open(cli.settings(args), resume, progress)
    last_step = args.steps or sys.maxsize
    if progress.epoch >= args.epochs or progress.step >= last_step:
        report.say("nothing is left to train: --epochs and --steps count from the beginning")

    while progress.epoch < args.epochs and progress.step < last_step:
        sampler.begin(progress.epoch, progress.samples)
        # % if task == "contrastive"
        left = len(train_loader)
        # % else
        left = math.ceil(len(train_loader) / args.accumulate)  # steps
        # % endif
        count = min(left, last_step - progress.step)
        meter = report.meter(device, images_per_batch)
        # % if task == "contrastive"
        bar = report.bar(train_loader, f"epoch {progress.epoch + 1}/{args.epochs}", count)
        for batch in saver.steps(bar, meter):
            images, targets = distributed.to_device(batch, device, memory_format)
            done = (progress.samples / images_per_batch + 0.5) / batches_per_epoch
            # % else
        groups = training.in_groups(train_loader, args.accumulate)
        bar = report.bar(groups, f"epoch {progress.epoch + 1}/{args.epochs}", count)
        for batches in saver.steps(bar, meter):
            done = (progress.samples / images_per_batch + len(batches) / 2) / batches_per_epoch
            # % endif
            for group, lr in zip(optimizer.param_groups, highest, strict=True):
                group["lr"] = lr * schedule(args, progress.epoch + done)

            # % if task == "contrastive"
            images = task.prepare(images)
            embeddings = image_encoder(images), text_encoder(targets)
            loss = task.criterion(*embeddings, targets, rank, world_size, args.label_smoothing)
            with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            meter.add(loss)
            progress.samples += images_per_batch
            # % else
            # Gradients add up, scaled and on each process alone, and are averaged with the last's.
            for number, batch in enumerate(batches, 1):
                images, targets = distributed.to_device(batch, device, memory_format)
                is_last = number == len(batches)
                with training.reduction(model, is_last):
                    images = task.prepare(images)
                    # No name keeps the output: its memory is free in the backward pass.
                    loss = task.criterion(model(images), targets, args.label_smoothing)
                    part, wait = loss / len(batches), not is_last
                    with apex.amp.scale_loss(part, optimizer, delay_unscale=wait) as scaled_loss:
                        scaled_loss.backward()
                meter.add(loss)
                progress.samples += images_per_batch
            # % endif
            audit.gradients()
            if args.clip_grad:
                nn.utils.clip_grad_norm_(apex.amp.master_params(optimizer), args.clip_grad)
            optimizer.step()
            optimizer.zero_grad()  # here, so that validation has the gradients' memory
            if ema:
                ema.update(checkpoint.weights(model, optimizer))

            progress.step += 1
            if progress.step % LOG_EVERY == 0:  # on a GPU, of the time before: nothing waits
                lr = optimizer.param_groups[0]["lr"]
                log = report.step(bar, progress.step, lr, backend.loss_scale(apex))
                # % if task == "contrastive"
                finite.demand(log, model, {"image_encoder": images, "text_encoder": targets})
                # % else
                finite.demand(log, model, images)
                # % endif

        if count:  # the last log's, in any case
            # % if task == "contrastive"
            finite.demand(meter.read(), model, {"image_encoder": images, "text_encoder": targets})
            # % else
            finite.demand(meter.read(), model, images)
            # % endif
        row = {"epoch": progress.epoch + 1, "step": progress.step, **meter.results()}
        if meter.warm_up_s:
            report.say(f"warm-up: {meter.warm_up_s:.1f} s, not counted in images_per_second")
        row |= {"lr": optimizer.param_groups[0]["lr"], "loss_scale": backend.loss_scale(apex)}
        row |= validate(validated, metrics, report.bar(val_loader, "validating"), memory_format)
        report.row(row)
        if not args.dummy:
            shown = validated, val_set.dataset, metrics, args.output, row["epoch"]
            report.picture(progress.step, task.show, *shown)
        if count == left:
            progress.epoch, progress.samples = progress.epoch + 1, 0
        saver.save(row[task.METRIC])

    saver.finish()
    report.close(saver.progress.best)


if __name__ == "__main__":
    distributed.run(main)
