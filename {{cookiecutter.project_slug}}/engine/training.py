"""What some trainings add to plain steps."""

import contextlib
import copy
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from engine.errors import UserError


def in_groups(batches: Iterable, size: int) -> Iterator[list]:
    """`size` batches at a time, each group for one step; the last has those that are left."""
    batches = iter(batches)
    while group := list(islice(batches, size)):
        yield group


def smallest_share(batch_size: int) -> int:
    """What DataParallel leaves of a batch for the last GPU."""
    share = -(-batch_size // max(1, torch.cuda.device_count()))
    return batch_size % share or share


def freeze(model: nn.Module, names: Iterable[str], trained: Iterable[nn.Module]) -> str:
    """Keeps parts of `model` as they are; returns what there is to say of it.

    Their parameters get no gradient, and they stay in eval mode: their batch norms use and keep
    the statistics that they have. Call it before the optimizer is made.

    Args:
        names: of parts, such as layer1 or features.0.
        trained: those of which something must be left to train.

    Raises UserError for a part that isn't there, and if nothing is left.
    """
    parts = dict(model.named_modules())
    for name in names:
        if name not in parts or not name:
            near = ", ".join(child for child, _ in model.named_children())
            raise UserError(f"--freeze {name}: the model has no such part; it has {near}")
        parts[name].requires_grad_(False).eval()
    sizes = {p: p.numel() for p in model.parameters()}
    frozen = sum(size for p, size in sizes.items() if not p.requires_grad)
    for part in trained:
        if not any(p.requires_grad for p in part.parameters()):
            where = next(name for name, child in parts.items() if child is part) or "the model"
            raise UserError(
                f"--freeze {' '.join(names)}: nothing is left to train in {where}; freeze less"
            )
    return f"{frozen:,} of {sum(sizes.values()):,} parameters are frozen"


def tune_communication(args: Namespace, *models: nn.Module) -> None:
    """Has gradients travel as --compress-gradients and --cuda-graphs want it.

    Compressed, fp32 ones travel as bfloat16: half the bytes, and averages rounded to 8 bits. With
    fp32's range, unlike fp16, it takes the gradients of any scaled loss. Those of a model that is
    in no DistributedDataParallel don't travel. Raises UserError if weights, and so their
    gradients, are half already.
    """
    if args.cuda_graphs:  # one for the whole model, not one for each bucket
        torch._dynamo.config.optimize_ddp = False
    for model in models:
        is_half = any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
        if args.compress_gradients and is_half:
            raise UserError(
                "--compress-gradients: at this --opt-level they have 16 bits already; leave it out"
            )
        if not isinstance(model, nn.parallel.DistributedDataParallel):
            continue
        if args.compress_gradients:
            model.register_comm_hook(None, bf16_compress_hook)
        accepts_unused = model.find_unused_parameters
        if args.cuda_graphs and hasattr(model, "average_at_once") and not accepts_unused:
            model.average_at_once()


def parameters(model: nn.Module, lr: float, decay_weights_only: bool) -> list[dict]:
    """What is trained of `model`, as an optimizer's groups; no decay for norms and biases if asked.

    These are the parameters of one dimension. Source: He and others, "Bag of Tricks for Image
    Classification with Convolutional Neural Networks", 2019.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not decay_weights_only:
        return [{"params": trained, "lr": lr}]
    weights = [parameter for parameter in trained if parameter.dim() > 1]
    others = [parameter for parameter in trained if parameter.dim() <= 1]
    return [{"params": weights, "lr": lr}, {"params": others, "lr": lr, "weight_decay": 0.0}]


def scale_lr(optimizer: Optimizer, factor: float) -> str:
    """Multiplies the learning rates by `factor`; returns what there is to say of the first."""
    lr = optimizer.param_groups[0]["lr"]
    for group in optimizer.param_groups:
        group["lr"] *= factor
    return f"learning rate {lr:g} × {factor:g} = {lr * factor:g} (--scale-lr)"


@contextlib.contextmanager
def reduction(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Whether the passes in its body, forward and backward, average gradients over processes.

    Those of passes without are added up, and averaged in the next one with. They must still be
    scaled then: give ``amp.scale_loss`` a ``delay_unscale`` in the passes without. A model that is
    in no DistributedDataParallel never averages any.
    """
    if wanted or dist.get_world_size() == 1:
        yield
    elif hasattr(model, "no_sync"):  # torch's, and apex_native's
        with model.no_sync():
            yield
    else:  # real Apex's
        model.disable_allreduce()
        try:
            yield
        finally:
            model.enable_allreduce()


@contextlib.contextmanager
def evaluation(module: nn.Module) -> Iterator[None]:
    """`module` in eval mode; afterwards each part of it is in the mode that it had before."""
    in_training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in in_training:
            part.training = True


class Ema:
    """The exponential moving average of a model's weights and statistics, in fp32.

    It begins with the weights that the model has.

    Args:
        model: before SyncBN and amp, whose casts a copy would have without its masters.
        decay: what is left of the average after a step, from 0 to 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.module = copy.deepcopy(model).requires_grad_(False)
        self.average = get_ema_multi_avg_fn(decay)

    @torch.no_grad()
    def update(self, weights: Mapping[str, Tensor]) -> None:
        """Takes a step's `weights` in, fp32, as ``checkpoint.weights`` gives them."""
        means = self.module.state_dict(keep_vars=True)
        # Weights that are tied have several names, and are averaged once.
        pairs = list({id(mean): (mean, weights[name]) for name, mean in means.items()}.values())
        averaged = [pair for pair in pairs if pair[0].is_floating_point()]
        means, values = map(list, zip(*averaged, strict=True))
        self.average(means, values, None)
        for count, value in pairs:
            if not count.is_floating_point():
                count.copy_(value)
