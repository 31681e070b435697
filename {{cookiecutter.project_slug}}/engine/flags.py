"""The flags of main.py that owners rarely change, by help group."""

import argparse
from argparse import BooleanOptionalAction
from importlib.util import find_spec
from pathlib import Path

from apex_native.amp.frontend import OPT_LEVELS
from engine import cli, distributed, prepare_tracing
from engine.data.remote import RemoteFolder
from engine.monitoring.trackers import NAMES as TRACKERS
from engine.monitoring.trackers import TENSORBOARD


def add_data_arguments(parser: cli.ArgumentParser, layout: str) -> None:
    """Add the flags of the data; `layout` describes the folder that --data takes."""
    add = parser.group("data").add_argument
    help = f"{layout}, or a URL of packed data (default: the included digits)"
    add("--data", type=cli.data_location, metavar="DIR", help=help)
    help = "folder for shards of a URL (default: ~/.cache/packed_data)"
    add(
        "--cache-dir", type=cli.not_empty, default="~/.cache/packed_data", metavar="PATH", help=help
    )
    help = "maximum size of --cache-dir (default: 64GB)"
    add("--cache-size", type=cli.size_type, default=64 * 10**9, metavar="SIZE", help=help)
    add("--dummy", action="store_true", help="train on one synthetic batch, made on the device")
    help = "data-loading workers per process (default: its CPU cores, at most 8; 0 without --data)"
    add("--workers", type=cli.worker_count, help=help)
    help = "skip at most N unreadable files, listed in broken_files.txt; the CPU decodes all files"
    add("--skip-broken", type=cli.non_negative_int, default=0, help=help)


def add_model_arguments(parser: cli.ArgumentParser, ddp: str) -> None:
    """Add the flags of the model; FSDP's help does not list --channels-last."""
    add = parser.group("model").add_argument
    add(
        "--weights",
        type=cli.not_empty,
        help="initial weights: a file, or torchvision's name, such as DEFAULT",
    )
    add("--freeze", nargs="+", metavar="MODULE", help="submodules not to train, such as layer1")
    help = "NHWC, fast for convolutions (default: yes)" if ddp != "fsdp" else argparse.SUPPRESS
    add("--channels-last", action=BooleanOptionalAction, help=help)
    help = "recompute each block's activations in the backward pass: less memory, slower"
    add("--checkpoint-activations", action="store_true", help=help)


def add_compile_arguments(
    parser: cli.ArgumentParser, graphs: str = "compile into CUDA graphs, for small batches"
) -> None:
    """Add --compile, --cuda-graphs, with `graphs` as its help, and --compress-gradients."""
    add = parser.group("model").add_argument
    add("--compile", action="store_true", help="torch.compile: slower start, faster steps")
    add("--cuda-graphs", action="store_true", help=graphs)
    add = parser.group("distributed").add_argument
    add("--compress-gradients", action="store_true", help="average gradients in bfloat16")


def add_sharding_arguments(parser: cli.ArgumentParser) -> None:
    """Add the flags of `add_compile_arguments`, --reshard-after-forward and --cpu-offload."""
    add_compile_arguments(parser, graphs=argparse.SUPPRESS)
    add = parser.group("distributed").add_argument
    add(
        "--reshard-after-forward",
        action=BooleanOptionalAction,
        default=True,
        help="free a block's gathered weights between its forward and backward pass",
    )
    add("--cpu-offload", action="store_true", help="keep weights and optimizer in the CPU's memory")


def add_optimization_arguments(parser: cli.ArgumentParser, warmup_epochs: float) -> None:
    """Add the flags of the schedule, the loss and the gradients.

    Args:
        warmup_epochs: default of --warmup-epochs.
    """
    add = parser.group("optimization").add_argument
    add("--steps", type=cli.positive_int, help="stop after this many steps in total")
    add("--decay-weights-only", action="store_true", help="no weight decay for norms and biases")
    add(
        "--scale-lr",
        type=cli.positive_int,
        metavar="IMAGES",
        help="multiply --lr by global batch size / IMAGES",
    )
    help = "factor of the learning rate from each layer to the one before it, such as 0.75"
    add("--layer-decay", type=cli.factor, metavar="FACTOR", help=help)
    schedules = ("cosine", "step", "none")
    help = "of the learning rate, over --epochs: to 0, or ÷ 10 after 1/3 and 2/3, or constant"
    add("--schedule", choices=schedules, default="cosine", help=help)
    help = "epochs of linear warm-up"
    add("--warmup-epochs", type=cli.non_negative_float, default=warmup_epochs, help=help)
    add("--accumulate", type=cli.positive_int, default=1, help="gradient accumulation steps")
    add("--label-smoothing", type=cli.fraction, default=0.0, help="in the training loss")
    help = "maximum gradient norm (default: 0, no limit)"
    add("--clip-grad", type=cli.non_negative_float, metavar="NORM", help=help)
    help = "also validate and save an exponential moving average of the weights (default: 0, none)"
    add("--ema", type=cli.fraction, metavar="DECAY", help=help)


def add_precision_arguments(
    parser: cli.ArgumentParser, opt_level: str, backend: str, ddp: str
) -> None:
    """Add --backend and the flags of amp.initialize; FSDP's help lists what it supports."""
    hidden = argparse.SUPPRESS if ddp == "fsdp" else ""
    add = parser.group("precision").add_argument
    help = "Apex's mixed-precision level" + (": O0, O4 or O5" if hidden else "")
    add("--opt-level", choices=[*OPT_LEVELS], default=opt_level, help=help)
    help = hidden or "dynamic, or a number (default: the level's)"
    add("--loss-scale", type=cli.loss_scale, help=help)
    help = hidden or "keep batch norms in fp32 where weights are cast (default: the level's)"
    add("--keep-batchnorm-fp32", action=BooleanOptionalAction, help=help)
    help = hidden or "real Apex or apex_native"
    add("--backend", choices=("auto", "apex", "native"), default=backend, help=help)


def add_run_arguments(parser: cli.ArgumentParser, output: Path) -> None:
    """Add the flags of output, checkpoints, evaluation, reproducibility and --check."""
    add = parser.group("distributed").add_argument
    add("--timeout", type=cli.positive_int, default=600, help="seconds for a step or a start phase")
    add = parser.group("run").add_argument
    add(
        "--output",
        type=cli.local_path,
        help=f"folder of checkpoints and metrics (default: {output})",
    )
    help = "a checkpoint, or 'auto' for the newest in --output, if any"
    add("--resume", type=cli.local_path, help=help)
    help = "save every N steps or minutes, too (default: after each epoch only)"
    add("--save-every", type=cli.interval, help=help)
    add("--eval-every", type=cli.positive_int, default=1, help="epochs between validations")
    help = "early stopping: stop after N validations without a better metric"
    add("--patience", type=cli.positive_int, help=help)
    add("--keep", type=cli.positive_int, default=2, help="checkpoints to keep, besides best.pt")
    help = "steps between records and log lines (default: 10, and a line each minute)"
    add("--log-every", type=cli.positive_int, help=help)
    add(
        "--tracker",
        nargs="+",
        choices=TRACKERS,
        default=[TENSORBOARD],
        metavar="NAME",
        help=f"log to any of {', '.join(TRACKERS)} (default: {TENSORBOARD})",
    )
    add("--eval-only", action="store_true", help="validate --resume, do not train")
    help = "random seed of weights, order and augmentation"
    add("--seed", type=cli.non_negative_int, default=0, help=help)
    add("--deterministic", action="store_true", help="bit-identical on a GPU too; slower")
    add("--check", action="store_true", help="check this machine and these flags, do not train")
    add("--json", dest="check", action="store_true", help="--check with output as JSON")


def complete_arguments(
    parser: cli.ArgumentParser, args: argparse.Namespace, ddp: str, output: Path
) -> None:
    """Reject flags that contradict each other; set defaults that depend on others.

    Args:
        ddp: "apex", "torch", "fsdp" or "dataparallel", the wrapper that the project uses.
        output: default of --output; --eval-only writes to the folder of its checkpoint instead.
    """
    args.model_options = {}  # which the task may set
    args.static_shapes = False  # likewise: compile for each input shape on its own
    _report_without_effect(args)
    if isinstance(args.data, str):
        args.data = RemoteFolder(args.data, Path(args.cache_dir).expanduser(), args.cache_size)
    if ddp == "fsdp":
        _check_sharding_arguments(parser, args)
    if args.keep_batchnorm_fp32 is not None and OPT_LEVELS[args.opt_level].patch_torch_functions:
        parser.error(f"--keep-batchnorm-fp32 is for cast weights; {args.opt_level} casts none")
    if ddp == "dataparallel" and args.opt_level == "O4":
        parser.error("--opt-level O4: DataParallel's threads cast to float16; use O5 for bfloat16")
    if ddp != "dataparallel" and args.cuda_graphs and args.accumulate > 1:
        parser.error("--accumulate: --cuda-graphs keep no gradients from one batch to the next")
    if args.output is None:
        is_beside = args.eval_only and args.resume not in (None, Path("auto"))
        args.output = args.resume.parent if is_beside else output
    for name in args.tracker:
        if not args.eval_only and name != TENSORBOARD and find_spec(name) is None:
            parser.error(f"--tracker {name}: its package is missing: pip install {name}")
    if args.workers is None:
        args.workers = min(distributed.cpu_cores(), 8) if args.data else 0


def _report_without_effect(args: argparse.Namespace) -> None:
    """Log flags that have no effect, or not all of it, together with others."""
    if args.dummy and args.data:  # such as that of a recipe
        distributed.print_on_rank_zero("--dummy: --data is not read")
        args.data = None
    if args.warmup_epochs > args.epochs:
        distributed.print_on_rank_zero(
            f"warning: --epochs {args.epochs} end before --warmup-epochs {args.warmup_epochs:g}: "
            "the learning rate does not reach --lr"
        )


def _check_sharding_arguments(parser: cli.ArgumentParser, args: argparse.Namespace) -> None:
    """Reject flags that cannot go with FSDP."""
    if args.opt_level in ("O1", "O2", "O3"):
        parser.error(
            f"--opt-level {args.opt_level}: the loss scale of fp16 does not go with FSDP; use O4 "
            "or O5, which compute in bfloat16, or O0"
        )
    if args.loss_scale is not None or args.keep_batchnorm_fp32 is not None:
        parser.error(
            "--loss-scale and --keep-batchnorm-fp32 are not for FSDP: bfloat16 needs no loss "
            "scale, and batch norms compute in fp32"
        )
    if args.cuda_graphs:
        parser.error("--cuda-graphs: FSDP gathers weights to new addresses; use --compile")
    if args.channels_last:
        parser.error("--channels-last: FSDP shards contiguous weights only; leave it out")
    args.channels_last = False
    if args.cpu_offload and args.opt_level == "O4":
        parser.error("--cpu-offload: O4's casts are those of the weights' device; use O5 for bf16")


def backend_needs(args: argparse.Namespace, ddp: str) -> dict[str, bool]:
    """Return what the flags need of the implementation of Apex's calls, for `load_backend`."""
    if ddp == "dataparallel":
        return {"replicated": True}
    needs = {"compiled": args.compile or args.cuda_graphs}
    if needs["compiled"]:
        prepare_tracing()
    if ddp == "fsdp":
        needs["sharded"] = True
    if ddp == "apex":
        needs["compressed"] = args.compress_gradients
    return needs
