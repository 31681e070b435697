"""Train a model on one GPU, on all GPUs of a machine, or on several machines.

    ./run.sh                                             all GPUs, or two processes on the CPU
    ./run.sh --data DIR                                  your own data
    NPROC=1 ./run.sh --dummy --steps 100                 one process, synthetic data
    NNODES=2 MASTER_ADDR=10.0.0.1 ./run.sh               two machines: the same command on both

`build` sets everything up in the order that Apex needs; `train` runs the epochs; `train_step` is
the part to edit for another kind of training. Model, data, loss and metrics are in task.py.
"""

# First: task.py may draw random numbers when it is imported.
from engine import startup  # noqa: F401  # isort: skip

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import task
from engine import cli, distributed, flags, optim
from engine.backend import Backend, load_backend, unwrap
from engine.blocks import checkpoint_activations
from engine.checkpoint import CheckpointManager, Progress, TrainingState
from engine.checkpoint.compatibility import use_saved_classes
from engine.checkpoint.pretrained import load_pretrained
from engine.data import (
    RepeatedBatch,
    ResumableDistributedSampler,
    SeededDataset,
    mix_seeds,
    rng_preserved,
    seed_everything,
    to_device,
)
from engine.data.loading import TrainLoader, build_loader, read_batch
from engine.data.skipping import only_readable, skip_broken
from engine.diagnostics import first_step
from engine.diagnostics.checks import check_settings
from engine.diagnostics.memory import check_memory
from engine.distributed.consistency import class_names, require_same_data
from engine.distributed.watchdog import StopSignals, Watchdog, time_limit
from engine.monitoring import lock
from engine.monitoring.image_grid import evenly
from engine.monitoring.logger import Logger
from engine.monitoring.meter import Meter, NanCounter
from engine.monitoring.metric import AVERAGE, MonitoredMetric

DDP = "«ddp»"  # flags are validated for it: change it with the wrapper in wrap_model
OUTPUT = Path("runs/«project_slug»")
DUMMY_STEPS = 100  # per epoch of --dummy


def parse_args() -> argparse.Namespace:
    """Return the flags; --config FILE.json sets defaults, the command line overrides them."""
    parser = cli.ConfigurableParser(
        "./run.sh",
        "Train, and validate after each epoch. The flags that are used most: --data, --arch, "
        "--epochs, --batch-size, --lr, --output, --resume.",
    )
    flags.add_data_arguments(parser, task.LAYOUT)
    flags.add_model_arguments(parser, DDP)
    # % if ddp == "fsdp"
    flags.add_sharding_arguments(parser)
    # % elif ddp != "dataparallel"
    flags.add_compile_arguments(parser)
    # % endif
    # % if sync_bn
    parser.group("model").add_argument(
        "--sync-bn-group",
        type=cli.non_negative_int,
        default=0,
        help="ranks per SyncBN group (default: 0, all)",
    )
    # % endif
    add = parser.group("optimization").add_argument
    add("--epochs", type=cli.positive_int, default=10, help="epochs; --schedule spans them")
    add("--batch-size", type=cli.positive_int, default=task.BATCH_SIZE, help="per process")
    # % if fused_adam
    add("--lr", type=cli.non_negative_float, default=1e-3, help="peak learning rate")
    add("--weight-decay", type=cli.non_negative_float, default=1e-2, help="decoupled, as AdamW's")
    # % else
    add("--lr", type=cli.non_negative_float, default=0.05, help="peak learning rate")
    add("--momentum", type=cli.non_negative_float, default=0.9, help="of SGD")
    add("--weight-decay", type=cli.non_negative_float, default=1e-4, help="added to the gradient")
    # % endif
    flags.add_optimization_arguments(parser, task.WARMUP_EPOCHS)
    flags.add_precision_arguments(parser, opt_level="«opt_level»", backend="«backend»", ddp=DDP)
    add = parser.group("distributed").add_argument
    add("--local-rank", "--local_rank", type=int, help="for old launchers; LOCAL_RANK overrides it")
    # % if ddp == "apex"
    add("--delay-allreduce", action="store_true", help="accept parameters without a gradient")
    # % endif
    flags.add_run_arguments(parser, OUTPUT)
    task.add_arguments(parser)

    args = parser.parse_args()
    flags.complete_arguments(parser, args, DDP, OUTPUT)
    with time_limit("reading the flags", args.timeout):  # the task may read --data
        task.check_arguments(parser, args)
    return args


@dataclass
class Data:
    """Batches to train and validate on, and what the model and the logs need to know of them."""

    train_loader: TrainLoader | RepeatedBatch
    sampler: ResumableDistributedSampler | RepeatedBatch
    batches_per_epoch: int  # of each process
    val_loader: DataLoader | list
    data_sets: dict[str, Any]  # "train" and "val"; none if synthetic
    classes: list[str]
    sample: list[Tensor]  # a small batch on the CPU, to check the model with
    val_sample: list[Tensor]  # the same, to check the validation with


@dataclass
class Run:
    """Everything that the training loop uses."""

    args: argparse.Namespace
    device: torch.device
    memory_format: torch.memory_format
    backend: Backend
    logger: Logger
    data: Data
    model: nn.Module
    optimizer: Optimizer
    base_lrs: list[float]
    ema: optim.Ema | None
    checkpoints: CheckpointManager
    stop_signals: StopSignals
    watchdog: Watchdog
    progress: Progress = field(init=False)
    audit: first_step.FirstStepAudit = field(init=False)  # of the resumed state and the first step
    eval_models: dict[str, nn.Module] = field(init=False)  # "": the model, AVERAGE: its average
    metrics: dict[str, task.Metrics] = field(init=False)  # by the same names

    def __post_init__(self) -> None:
        self.progress = self.checkpoints.state.progress  # one object: `resume` changes it in place
        self.eval_models = {"": unwrap(self.model)}
        if self.ema:
            self.eval_models[AVERAGE] = self.ema.module
        # % if task == "classification"
        if getattr(self.args, "flip_tta", False):  # a flag of the task
            self.eval_models = {
                suffix: optim.FlipAverage(model) for suffix, model in self.eval_models.items()
            }
        # % endif
        self.build_metrics()

    def build_metrics(self) -> None:
        """Start the metrics anew, with what they keep from one validation to the next."""
        build = partial(task.Metrics, len(self.data.classes), self.device, self.args)
        self.metrics = {suffix: build() for suffix in self.eval_models}

    def include_added_groups(self) -> None:
        """Let parameter groups that an edit has added follow the schedule, from their rate now."""
        self.base_lrs += optim.base_lrs(self.optimizer.param_groups[len(self.base_lrs) :])


def init_distributed(args: argparse.Namespace) -> tuple[torch.device, Backend]:
    """Start the process group; choose this process's device and the backend.

    The device comes first: NCCL, and tensors made on "cuda", use the current one.
    """
    rank, local_rank, world_size = distributed.resolve_ranks(args.local_rank)
    # % if ddp == "dataparallel"
    if world_size > 1:
        distributed.stop(f"DataParallel is one process for all GPUs, not {world_size}: use NPROC=1")
    # % endif
    device = distributed.select_device(local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # % if ddp != "dataparallel"
        torch.backends.cudnn.benchmark = not args.deterministic
    elif args.cuda_graphs:
        distributed.stop("--cuda-graphs: this run is on the CPU; use --compile, or leave it out")
    # % else
    # cuDNN's algorithms are not benchmarked: DataParallel's threads are new at each step.
    # % endif
    if args.deterministic:
        distributed.make_deterministic()
    # `backend.apex` is real Apex if it is installed and has what the flags need, else apex_native.
    backend = load_backend(args.backend, args.opt_level, **flags.backend_needs(args, DDP))
    timeout = distributed.operation_limit(args.timeout)
    # Also compares versions and flags of all processes, which env:// would not.
    store = distributed.rendezvous(device, cli.settings(args), backend.name, timeout)
    dist.init_process_group(
        # % if ddp == "fsdp"
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",  # checkpoints use both
        # % else
        "nccl" if device.type == "cuda" else "gloo",
        # % endif
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    return device, backend


def build_data(
    args: argparse.Namespace,
    device: torch.device,
    memory_format: torch.memory_format,
    logger: Logger,
) -> Data:
    """Build the data loaders: each process trains on its own shard, reshuffled every epoch."""
    if args.dummy:
        return build_dummy_data(args, device, memory_format)
    train_set, val_set = task.build_datasets(args)
    train_set = skip_broken(train_set, args.skip_broken, args.output, args.data)
    val_set = skip_broken(val_set, args.skip_broken, args.output, args.data)
    require_same_data(train_set, val_set)
    data_sets = {"train": train_set, "val": val_set}
    if args.eval_only:  # the data may lack some of the model's classes
        use_saved_classes(data_sets, args.output, args.resume, logger, args.timeout)
    # The random numbers of a batch follow from seed, epoch and first sample, not from the worker.
    seeded_train_set = SeededDataset(train_set, args.seed)
    seeded_val_set = SeededDataset(val_set, args.seed)
    sampler = ResumableDistributedSampler(seeded_train_set, args.seed)
    options = {"batch_size": args.batch_size, "workers": args.workers, "device": device}
    train_loader = TrainLoader(seeded_train_set, sampler, epochs=args.epochs, **options)
    # Each validation sample counts once: the shards are not padded to equal lengths, and
    # only_readable leaves out what --skip-broken skips, where training takes the next sample.
    shard = range(dist.get_rank(), len(val_set), dist.get_world_size())
    val_loader = build_loader(only_readable(val_set, args.seed), sampler=shard, **options)
    # % if ddp == "dataparallel"
    sample_size = min(2, optim.smallest_replica_batch(args.batch_size), len(train_set))
    # % else
    sample_size = min(2, args.batch_size, len(train_set))
    # % endif
    sample = read_batch(seeded_train_set, range(sample_size), args.workers)
    val_sample = read_batch(seeded_val_set, evenly(len(val_set), 8), args.workers)
    return Data(
        train_loader=train_loader,
        sampler=sampler,
        batches_per_epoch=len(train_loader),
        val_loader=val_loader,
        data_sets=data_sets,
        classes=class_names(train_set),
        sample=to_device(sample, torch.device("cpu"), memory_format),
        val_sample=to_device(val_sample, torch.device("cpu"), memory_format),
    )


def build_dummy_data(
    args: argparse.Namespace, device: torch.device, memory_format: torch.memory_format
) -> Data:
    """Return one synthetic batch, which is repeated."""
    batch = task.dummy_batch(args.batch_size, device, **args.model_options)
    batch = to_device(batch, device, memory_format)
    repeated = RepeatedBatch(batch, DUMMY_STEPS, dist.get_world_size())
    few = task.dummy_batch(min(2, args.batch_size), torch.device("cpu"), **args.model_options)
    sample = to_device(few, torch.device("cpu"), memory_format)
    return Data(
        train_loader=repeated,
        sampler=repeated,
        batches_per_epoch=DUMMY_STEPS,
        val_loader=[batch],
        data_sets={},
        classes=[str(number) for number in range(task.DUMMY_CLASSES)],
        sample=sample,
        val_sample=sample,
    )


def build_model(
    args: argparse.Namespace,
    backend: Backend,
    device: torch.device,
    memory_format: torch.memory_format,
    data: Data,
    logger: Logger,
) -> tuple[nn.Module, optim.Ema | None]:
    """Build the model and its moving average on the device, with their initial weights."""

    def build(num_classes: int) -> nn.Module:
        seed_everything(args.seed)  # also in predict.py; all processes build the same weights
        # % if ddp == "fsdp"
        create = partial(task.build_model, args.arch, num_classes, **args.model_options)
        return optim.build_empty(create) if dist.get_rank() else create()  # FSDP sends rank 0's
        # % else
        return task.build_model(args.arch, num_classes, **args.model_options)
        # % endif

    model = build(len(data.classes))
    if not args.eval_only:
        optim.begin_training_mode(model, logger.warning)
    # % if ddp != "fsdp"
    # An error message now, instead of an exception at the first step.
    sample = None if args.eval_only else data.sample
    first_step.check_model(model, task.criterion, task.prepare, sample, data.val_sample, device)
    # % endif
    if args.weights:
        logger.info(load_pretrained(model, args.weights, args.arch, data.classes, build))
    ema = None
    if args.ema:
        ema = optim.Ema(model, args.ema)  # in fp32, with plain batch norm
        logger.info(f"EMA: an average of the weights is validated as {task.METRIC}{AVERAGE}, too")
    # % if sync_bn
    group = backend.syncbn_group(args.sync_bn_group, args.timeout)
    if dist.get_world_size() > 1:
        model = backend.convert_syncbn_model(model, group)
    # % endif
    if args.freeze:
        logger.info(optim.freeze(model, args.freeze))
    if args.checkpoint_activations:
        logger.info(checkpoint_activations(model, task.BLOCKS))
    # % if ddp == "fsdp"
    from engine.distributed.sharding import Sharding

    # Before the optimizer, which takes the sharded parameters; it also moves them to the device.
    sharding = Sharding(
        device,
        args.opt_level,
        reshard_after_forward=args.reshard_after_forward,
        cpu_offload=args.cpu_offload,
        compress_gradients=args.compress_gradients,
    )
    logger.info(sharding.apply(model, task.BLOCKS))
    if ema:
        sharding.apply(ema.module, task.BLOCKS)
    # % else
    optim.place(model, device, memory_format)
    if ema:
        optim.place(ema.module, device, memory_format)
        val_sample = to_device(data.val_sample, device, memory_format)
        first_step.check_average(model, ema.module, task.prepare, val_sample)
    # % endif
    return model, ema


def build_optimizer(
    args: argparse.Namespace, backend: Backend, model: nn.Module, logger: Logger
) -> Optimizer:
    """Build the optimizer of the parameters that are not frozen."""
    # % if task == "contrastive"
    groups = []
    for name, lr in (("image_encoder", args.lr), ("text_encoder", args.text_lr)):
        encoder = model.get_submodule(name)
        groups += optim.param_groups(encoder, lr, args.decay_weights_only, args.layer_decay)
    # % else
    groups = optim.param_groups(model, args.lr, args.decay_weights_only, args.layer_decay)
    # % endif
    # % if fused_adam
    optimizer = backend.apex.optimizers.FusedAdam(
        groups, lr=args.lr, weight_decay=args.weight_decay
    )
    # % else
    optimizer = torch.optim.SGD(
        groups,
        lr=args.lr,
        momentum=args.momentum,
        weight_decay=args.weight_decay,
        fused=optim.has_fused_sgd(model),
    )
    # % endif
    if args.scale_lr:
        images_per_step = args.batch_size * dist.get_world_size() * args.accumulate
        logger.info(optim.scale_lr(optimizer, images_per_step / args.scale_lr))
    return optimizer


def wrap_model(
    args: argparse.Namespace, backend: Backend, model: nn.Module, optimizer: Optimizer
) -> tuple[nn.Module, Optimizer]:
    """Apply mixed precision, then compilation and DDP, which need the cast parameters."""
    apex = backend.apex
    # % if task == "contrastive"
    _, optimizer = apex.amp.initialize(
        [model.image_encoder, model.text_encoder],  # cast in place
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    # % else
    model, optimizer = apex.amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    # % endif
    # % if ddp == "dataparallel"
    # For comparison only: every step copies the model to all GPUs, gathers the outputs on the
    # first, and runs one Python thread at a time.
    return nn.DataParallel(model), optimizer
    # % elif ddp == "fsdp"
    if args.compile:
        from engine.distributed.sharding import compile_sharded

        compile_sharded(model)
    return model, optimizer  # whose gradients FSDP averages
    # % else
    if args.compile or args.cuda_graphs:
        mode = "reduce-overhead" if args.cuda_graphs else None
        model.compile(mode=mode, dynamic=False if args.static_shapes else None)
    if dist.get_world_size() > 1:
        # % if ddp == "apex"
        model = apex.parallel.DistributedDataParallel(
            model,
            # --deterministic: one order of reduction, after the whole backward pass.
            delay_allreduce=args.delay_allreduce or args.deterministic,
            retain_allreduce_buffers=True,  # saves memory; a gradient to keep needs clone()
        )
        # % else
        device = next(model.parameters()).device
        model = nn.parallel.DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            find_unused_parameters=args.deterministic,  # see make_deterministic
        )
        # % endif
    backend.tune_communication(
        model, compress=args.compress_gradients, cuda_graphs=args.cuda_graphs
    )
    return model, optimizer
    # % endif


def describe_model(args: argparse.Namespace, classes: list[str]) -> dict[str, Any]:
    """Return the metadata of checkpoints, from which predict.py builds the model again."""
    return {
        "metric": task.METRIC,
        "metric_mode": task.METRIC_MODE,
        "arch": args.arch,
        "model_options": args.model_options,
        "flip_tta": getattr(args, "flip_tta", False),
        "data": str(args.data or ""),
        "classes": classes,
        "opt_level": args.opt_level,
        "seed": args.seed,
    }


def build(args: argparse.Namespace) -> Run:
    """Set up a run: device, process group, data, model, optimizer, amp, DDP or what replaces it."""
    device, backend = init_distributed(args)
    seed_everything(args.seed)  # all processes read the same data
    metric = MonitoredMetric(task.METRIC, task.METRIC_MODE)
    logger = Logger(args.output, dist.get_rank(), metric, args.log_every, args.tracker)
    processes = distributed.describe(dist.get_world_size(), device)
    logger.info(f"{processes}, {args.opt_level}, {backend.reason}")
    # % if ddp == "apex"
    memory_format = backend.memory_format(args.channels_last, logger.info)
    # % else
    is_nchw = args.channels_last is False
    memory_format = torch.contiguous_format if is_nchw else torch.channels_last
    # % endif
    with logger.phase("reading the data", args.timeout):
        data = build_data(args, device, memory_format, logger)
    with logger.phase("building the model", args.timeout):
        model, ema = build_model(args, backend, device, memory_format, data, logger)
        optimizer = build_optimizer(args, backend, model, logger)
        base_lrs = optim.base_lrs(optimizer.param_groups)
        model, optimizer = wrap_model(args, backend, model, optimizer)
    stop_signals = StopSignals()  # SIGTERM, SIGINT and the like: save, then exit
    watchdog = Watchdog(args.timeout)
    checkpoints = CheckpointManager(
        folder=args.output,
        keep=args.keep,
        save_every=args.save_every,
        timeout_s=args.timeout,
        state=TrainingState(model, optimizer, backend, ema),
        metadata=describe_model(args, data.classes),
        data_sets=data.data_sets,
        settings=cli.parsed_settings(args),
        logger=logger,
        stop_signals=stop_signals,
        watchdog=watchdog,
    )
    seed_everything(mix_seeds(args.seed, dist.get_rank()))  # processes differ from here on
    return Run(
        args=args,
        device=device,
        memory_format=memory_format,
        backend=backend,
        logger=logger,
        data=data,
        model=model,
        optimizer=optimizer,
        base_lrs=base_lrs,
        ema=ema,
        checkpoints=checkpoints,
        stop_signals=stop_signals,
        watchdog=watchdog,
    )


def train_step(run: Run, batches: list[list[Tensor]], meter: Meter) -> object:
    """Train one optimizer step on its batches; return an input of the model, for `check_finite`."""
    amp = run.backend.apex.amp
    for number, batch in enumerate(batches, 1):
        is_last = number == len(batches)
        batch = to_device(batch, run.device, run.memory_format)
        inputs, targets = run.backend.without_casts(task.prepare, batch)
        # Gradients accumulate on each process, still scaled, and are averaged with the last batch:
        # `gradient_sync` turns averaging off for the others.
        with run.backend.gradient_sync(run.model, enabled=is_last):
            # The output has no name, so that its memory is free during the backward pass.
            loss = task.criterion(run.model(inputs), targets, run.args.label_smoothing)
            scaling = amp.scale_loss(loss / len(batches), run.optimizer, delay_unscale=not is_last)
            with scaling as scaled_loss:
                scaled_loss.backward()
        meter.update(loss)
    run.audit.check_gradients()  # of the first step, or the first one without an overflow
    if run.args.clip_grad:
        nn.utils.clip_grad_norm_(amp.master_params(run.optimizer), run.args.clip_grad)
    run.optimizer.step()  # after an overflow, amp skips the update; the step counts all the same
    run.optimizer.zero_grad()  # here, so that validation can use the gradients' memory
    if run.ema:
        weights = run.backend.fp32_state_dict(run.model, run.optimizer)
        run.ema.update(weights, run.progress.step)  # the completed steps decide its warm-up
    return inputs


def set_learning_rates(run: Run, num_batches: int) -> None:
    """Set the learning rates for the middle of the next step."""
    run.audit.check_learning_rates()  # warns if a scheduler has changed them
    args, progress = run.args, run.progress
    images_per_batch = args.batch_size * dist.get_world_size()  # of all processes
    batches_done = progress.samples / images_per_batch + num_batches / 2
    factor = optim.lr_factor(
        progress.epoch + batches_done / run.data.batches_per_epoch,
        epochs=args.epochs,
        warmup_epochs=args.warmup_epochs,
        schedule=args.schedule,
    )
    run.include_added_groups()
    for group, base_lr in zip(run.optimizer.param_groups, run.base_lrs, strict=True):
        group["lr"] = base_lr * factor


def train_one_epoch(run: Run) -> dict[str, Any]:
    """Train to the end of the epoch, or to --steps; return the epoch's metrics."""
    args, progress, logger = run.args, run.progress, run.logger
    run.data.sampler.set_epoch(progress.epoch, progress.samples)  # reshuffles; resumes mid-epoch
    # set_epoch has shortened the loader to what is left after `progress.samples`.
    remaining_steps = math.ceil(len(run.data.train_loader) / args.accumulate)
    num_steps = min(remaining_steps, (args.steps or sys.maxsize) - progress.step)
    images_per_batch = args.batch_size * dist.get_world_size()
    meter = logger.start_epoch(run.device, images_per_batch)
    run.checkpoints.start_epoch(meter)  # resumes the mean loss of an interrupted epoch

    title = f"epoch {progress.epoch + 1}/{args.epochs}"
    steps = run.watchdog.watch(optim.micro_batches(run.data.train_loader, args.accumulate), title)
    bar = logger.progress_bar(steps, title, num_steps)  # the first num_steps
    for batches in bar:
        run.watchdog.enter(f"step {progress.step + 1}")
        set_learning_rates(run, len(batches))
        inputs = train_step(run, batches, meter)
        progress.samples += images_per_batch * len(batches)  # TrainLoader's batches are full
        progress.step += 1
        if logger.is_due(progress.step):
            # On a GPU, of the previous logging step, so that the CPU does not wait for the GPU.
            lr = run.optimizer.param_groups[0]["lr"]
            record = logger.log_step(bar, meter, progress.step, lr, run.backend.loss_scale())
            first_step.check_finite(record, run.model, inputs)
        # The last step of --steps is saved with its row, so that a resumed run validates it.
        if progress.step != args.steps:
            stop_signal = run.checkpoints.end_step()  # saves if --save-every is due
            if stop_signal:
                run.checkpoints.save_and_exit(stop_signal)

    if num_steps:
        first_step.check_finite(meter.read(), run.model, inputs)
    row: dict[str, Any] = {"epoch": progress.epoch + 1, "step": progress.step}
    row |= meter.results()
    row["lr"] = run.optimizer.param_groups[0]["lr"]
    row["loss_scale"] = float(run.backend.loss_scale())
    if num_steps == remaining_steps:
        progress.epoch += 1  # from here on, the number of epochs that are complete
        progress.samples = 0
    return row


# % if ddp == "fsdp"
def join_forward(run: Run) -> None:
    """Run the models on a sample: ranks with more validation batches need this rank's weights."""
    batch = to_device(run.data.val_sample, run.device, run.memory_format)
    inputs, _ = run.backend.without_casts(task.prepare, batch)
    for _, model, own_inputs in optim.with_copies(run.eval_models, inputs):
        model(own_inputs)


# % endif
@torch.no_grad()
@rng_preserved()  # a validation does not change the random numbers of the training
def evaluate(run: Run, batches: Sequence | DataLoader) -> dict[str, float]:
    """Return the task's metrics over all samples; with --ema, those of the average, too.

    Each sample counts once. The metrics are nan if a model's outputs hold nan.
    """
    for suffix, model in run.eval_models.items():
        distributed.broadcast_buffers(model)  # batch norm's statistics may differ between processes
        run.metrics[suffix].reset()
    nans = {suffix: NanCounter(run.device) for suffix in run.eval_models}
    watched = run.watchdog.watch(batches, "validating")
    bar = run.logger.progress_bar(watched, "validating", len(batches))
    # % if ddp == "fsdp"
    until_stopped = run.checkpoints.until_stopped(bar, partial(join_forward, run))
    # % else
    # Without their DDP wrappers, which may wait for all processes: some have more batches.
    until_stopped = run.checkpoints.until_stopped(bar)
    # % endif
    results: dict[str, float] = {}
    with optim.eval_mode(*run.eval_models.values()):
        for batch in until_stopped:
            batch = to_device(batch, run.device, run.memory_format)
            prepared = run.backend.without_casts(task.prepare, batch)
            for suffix, model, (inputs, targets) in optim.with_copies(run.eval_models, prepared):
                outputs = model(inputs)
                nans[suffix].update(outputs)
                run.backend.update_metrics(run.metrics[suffix].update, outputs, targets)
        run.watchdog.enter("computing the metrics")
        for suffix, metrics in run.metrics.items():
            values = run.backend.without_casts(metrics.compute)
            values = MonitoredMetric.with_suffix(values, suffix)
            if batches_with_nan := nans[suffix].compute():
                run.logger.warning(f"the outputs for {batches_with_nan} batches hold nan")
                values = dict.fromkeys(values, math.nan)
            results |= values
        results = run.logger.agree_on(results)
        run.watchdog.leave()
    return results


def check_validation(run: Run) -> None:
    """Validate a small batch: a mistake in a metric is an error before training, not after it."""
    models = run.eval_models.values()
    with optim.without_compilation(), optim.state_preserved(*models):
        evaluate(run, [run.data.val_sample])
    run.build_metrics()


@rng_preserved()
def show_samples(run: Run, results: dict[str, float], epoch: int | None = None) -> None:
    """Write a picture of validation samples, by the better one of model and average; log it."""
    if not run.data.data_sets:
        return
    suffix = run.logger.monitored.best(results).name.removeprefix(task.METRIC)  # "" or AVERAGE
    model = run.eval_models[suffix]
    val_set = run.data.data_sets["val"]
    # % if ddp == "fsdp"
    with distributed.folder_of_rank(run.args.output) as output, optim.eval_mode(model):
        show = partial(task.show, model, val_set, run.metrics[suffix], output, epoch)
        if dist.get_rank() != 0:  # all ranks run the model
            show()
        run.logger.log_image(run.progress.step, show)
    # % else
    show = partial(task.show, model, val_set, run.metrics[suffix], run.args.output, epoch)
    with optim.eval_mode(model):
        run.logger.log_image(run.progress.step, show)
    # % endif


def is_finished(run: Run) -> bool:
    """Return whether --epochs or --steps are trained, or the metric no longer improves."""
    args, progress = run.args, run.progress
    is_trained = progress.epoch >= args.epochs or progress.step >= (args.steps or sys.maxsize)
    return is_trained or run.logger.monitored.has_stalled(progress.scores, args.patience)


def validate_epoch(run: Run) -> None:
    """Validate the epoch that was trained last, and save its results."""
    logger, progress = run.logger, run.progress
    run.audit.check_weights()
    results = evaluate(run, run.data.val_loader)
    row = progress.pending_row | results
    logger.log_epoch(row)
    progress.pending_row = {}
    progress.scores.append(logger.monitored.best(results).score)
    run.checkpoints.save(results)  # as best.pt too, if the metric is the best yet
    show_samples(run, results, int(row["epoch"]))
    run.optimizer.zero_grad()  # a picture may need gradients, such as one by Grad-CAM
    # --steps ended within the epoch: the score is saved, and dropped before the epoch goes on.
    if progress.samples:
        progress.scores = progress.scores[:-1]


def train(run: Run, resumed: Path | None) -> None:
    """Train until `is_finished`; save after each epoch, and validate those that are due."""
    logger, progress = run.logger, run.progress
    has_ended = is_finished(run) and not progress.pending_row
    if has_ended:
        logger.info(
            "nothing is left to train: --epochs, --steps and --patience count from the beginning"
        )
        if run.args.resume != Path("auto"):  # an earlier checkpoint: keep the later rows
            return
    run.audit = first_step.FirstStepAudit(
        run.model, run.optimizer, run.backend, run.data.train_loader, logger
    )
    run.watchdog.start()
    if not resumed:
        check_validation(run)
    run.stop_signals.start()  # before rank 0 opens files: all ranks start it at the same time
    config = None if has_ended else cli.parsed_settings(run.args)  # None: config.json stays
    logger.open(config, resumed, progress, cli.settings(run.args))
    # The row of an epoch is pending from its last step until it is validated: a run that was
    # stopped in between resumes with the validation.
    if progress.pending_row and isinstance(run.data.train_loader, TrainLoader):
        run.data.sampler.set_epoch(progress.epoch, progress.samples)
        run.data.train_loader.start()  # before `show_samples` reads samples in this process
    while progress.pending_row or not is_finished(run):
        if not progress.pending_row:
            row = train_one_epoch(run)
            if progress.epoch % run.args.eval_every == 0 or is_finished(run):
                progress.pending_row = row
            else:
                logger.log_epoch(row)
            run.checkpoints.save()  # an error in the validation does not lose the epoch
        if progress.pending_row:
            validate_epoch(run)
    if logger.monitored.has_stalled(progress.scores, run.args.patience):
        logger.info(f"{task.METRIC} has not improved in --patience {run.args.patience} validations")
    run.checkpoints.finish()
    logger.close(progress.best)


def main() -> None:
    """Train; with --eval-only only validate, with --check only check the machine and the flags."""
    args = parse_args()
    if args.check:
        build_untrained = partial(
            task.build_model, args.arch, task.DUMMY_CLASSES, **args.model_options
        )
        check_settings(
            args,
            flags.backend_needs(args, DDP),
            partial(task.build_datasets, args),
            partial(check_memory, args, DDP, task.BLOCKS, build_untrained),
        )
        return
    run = build(args)
    steps_per_epoch = math.ceil(run.data.batches_per_epoch / args.accumulate)
    run.include_added_groups()  # before the checkpoint's learning rates replace theirs
    # Last, since it fills the model, optimizer and amp that `build` has made. A process that
    # replaces a failed one resumes without --resume, too.
    with run.logger.phase("reading the checkpoint", args.timeout + lock.wait_limit()):
        resumed = run.checkpoints.resume(args.resume, steps_per_epoch, required=args.eval_only)
    if not args.eval_only:
        train(run, resumed)
        return
    run.watchdog.start()
    run.logger.check_folder()
    results = evaluate(run, run.data.val_loader)
    run.logger.log_evaluation(
        results,
        checkpoint=str(resumed),
        data=str(args.data or ""),
        same_data_as_in_training=run.checkpoints.has_same_val_data,
    )
    show_samples(run, results)


if __name__ == "__main__":
    distributed.run(main)
