"""Parts of the optimization: parameter groups, schedule, micro-batches, frozen parts, average."""

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from engine import UserError, distributed, summarize
from engine.backend import is_sharded, local_shard
from engine.blocks import layer_numbers
from engine.data import get_rng_state, set_rng_state

T = TypeVar("T")


def micro_batches(batches: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of `size` batches, one for each optimizer step; the last one may be shorter."""
    remaining = iter(batches)
    while group := list(islice(remaining, size)):
        yield group


def smallest_replica_batch(batch_size: int) -> int:
    """Return how many samples of a batch DataParallel gives to the last GPU."""
    per_gpu = -(-batch_size // max(1, torch.cuda.device_count()))
    return batch_size % per_gpu or per_gpu


def param_groups(
    model: nn.Module, lr: float, decay_weights_only: bool, layer_decay: float | None = None
) -> list[dict[str, Any]]:
    """Return the trained parameters of `model` as an optimizer's parameter groups.

    With `decay_weights_only`, norms and biases, which are the parameters with one dimension, have
    no weight decay, nor have those that ``model.no_weight_decay()`` names, which timm's models
    have. Source: He et al., "Bag of Tricks for Image Classification with Convolutional Neural
    Networks", CVPR 2019.

    With `layer_decay`, the last layer has the learning rate `lr`, and each layer before it that of
    its successor times this factor. Source: Bao et al., "BEiT: BERT Pre-Training of Image
    Transformers", ICLR 2022.
    """
    factor = 1.0 if layer_decay is None else layer_decay
    excluded = getattr(model, "no_weight_decay", ())  # a method of timm's models, perhaps a set
    excluded = excluded() if callable(excluded) else excluded
    parameters = dict(model.named_parameters())
    numbers = dict.fromkeys(parameters, 0)
    if layer_decay is not None:
        numbers = layer_numbers(model)
        _print_layers(numbers, factor)
    groups: dict[tuple[int, bool], list[Tensor]] = {}
    for name, tensor in parameters.items():
        has_decay = not decay_weights_only or (tensor.dim() > 1 and name not in excluded)
        if tensor.requires_grad:
            groups.setdefault((numbers[name], has_decay), []).append(tensor)
    result: list[dict[str, Any]] = []
    for number, has_decay in sorted(groups, reverse=True):  # the first one's rate is logged
        rate = lr * factor ** (max(numbers.values()) - number)
        result.append({"params": groups[number, has_decay], "lr": rate})
        if not has_decay:
            result[-1]["weight_decay"] = 0.0
    return result


def _print_layers(numbers: Mapping[str, int], factor: float) -> None:
    """Print which parameters have the lowest and the highest learning rate."""
    last = max(numbers.values())
    first_names = summarize([name for name, number in numbers.items() if number == 0])
    last_names = summarize([name for name, number in numbers.items() if number == last])
    distributed.print_on_rank_zero(
        f"--layer-decay: of {last + 1} layers, the first ({first_names}) has {factor**last:.3g} "
        f"times the learning rate of the last ({last_names})"
    )


def scale_lr(optimizer: Optimizer, factor: float) -> str:
    """Multiply all learning rates by `factor`; return a message with the first one."""
    lr = optimizer.param_groups[0]["lr"]
    for group in optimizer.param_groups:
        group["lr"] *= factor
    return f"learning rate {lr:g} × {factor:g} = {lr * factor:g} (--scale-lr)"


def lr_factor(epoch: float, *, epochs: int, warmup_epochs: float, schedule: str) -> float:
    """Return the fraction of the base learning rate at `epoch`, which may be fractional.

    Args:
        epochs: length of the training, with which the schedule ends.
        warmup_epochs: length of the linear increase from 0 to 1 at the start.
        schedule: "cosine" (half a cosine from 1 to 0), "step" (1, then 0.1 and 0.01 for the second
            and the last third of all epochs), or "none" (always 1).
    """
    if epoch < warmup_epochs:
        return epoch / warmup_epochs
    if schedule == "none":
        return 1.0
    if schedule == "step":
        return 0.1 ** int(3 * epoch / epochs)
    progress = (epoch - warmup_epochs) / max(epochs - warmup_epochs, 1e-9)
    return (1 + math.cos(math.pi * min(progress, 1))) / 2


def freeze(model: nn.Module, names: Sequence[str]) -> str:
    """Freeze submodules of `model`, such as layer1 or features.0; return a message for the log.

    Their parameters get no gradient, and they stay in eval mode, so that their batch norms use and
    keep the statistics that they have. Call it before the optimizer is created.

    Raises UserError for a name that is not a submodule, and if nothing is left to train.
    """
    submodules = dict(model.named_modules())
    for name in names:
        if not name or name not in submodules:
            children = ", ".join(child for child, _ in model.named_children())
            raise UserError(f"--freeze {name}: the model has no such part; it has {children}")
        submodules[name].requires_grad_(False).eval()
    parameters = list(model.parameters())
    frozen = sum(p.numel() for p in parameters if not p.requires_grad)
    if not any(p.requires_grad for p in parameters):
        raise UserError(
            f"--freeze {' '.join(names)}: nothing is left to train in the model; freeze less"
        )
    return f"{frozen:,} of {sum(p.numel() for p in parameters):,} parameters are frozen"


def frozen_parameters(model: nn.Module) -> list[str]:
    """Return the names of the parameters that are not trained, all names of a shared one."""
    named = model.named_parameters(remove_duplicate=False)
    return [name for name, parameter in named if not parameter.requires_grad]


def begin_training_mode(model: nn.Module, warning: Callable[[str], None]) -> None:
    """Call ``model.train()``, which a class may override to keep some of its layers in eval mode.

    Args:
        warning: called with a message if the model had layers in eval mode that train now.

    Raises UserError for a model of `torch.compile`, whose parameters have other names.
    """
    if any(name == "_orig_mod" for name, _ in model.named_children()):
        raise UserError(
            "build_model returned a model of torch.compile, in which --layer-decay, --weights and "
            "exports don't find the layers: add --compile instead, or call model.compile()"
        )
    in_eval = [module for module in model.modules() if not module.training]
    model.train()
    if changed := sum(module.training for module in in_eval):
        warning(
            f"build_model returned {changed} of {len([*model.modules()])} modules in eval mode, "
            "which train now: override train() of a class to keep its layers in it, or add --freeze"
        )


@contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """Put models into eval mode, and afterwards each submodule back into the mode it had."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        # By train(): a class may merge weights in eval mode, or drop what it has cached there.
        for module, is_training in modes:
            if module.training != is_training:
                module.train(is_training)
            module.training = is_training


@contextmanager
def state_preserved(*models: nn.Module) -> Iterator[None]:
    """Undo what the body changes in the models' tensors and in attributes of their modules.

    Some models initialize themselves with their first batch, in eval mode, too. Lazy modules and
    those to which the body adds layers are left out. So are changes within lists and the like.
    """
    modules = [
        module
        for model in models
        for module in model.modules()
        if not any(map(is_lazy, chain(module.parameters(False), module.buffers(False))))
    ]
    before = [(dict(vars(module)), _registered(module)) for module in modules]
    tensors = {
        local_shard(tensor).detach(): local_shard(tensor).detach().to("cpu", copy=True)
        for module in modules
        for tensor in chain(module.parameters(False), module.buffers(False))
        if not distributed.is_expanded(tensor)  # which can't be written to, here and by the body
    }
    try:
        yield
    finally:
        for module, (attributes, registered) in zip(modules, before, strict=True):
            _restore_attributes(module, attributes, registered)
        with torch.no_grad():
            for tensor, value in tensors.items():
                tensor.copy_(value)


def _restore_attributes(
    module: nn.Module, attributes: dict[str, Any], registered: dict[str, Any]
) -> None:
    if _registered(module).keys() != registered.keys():  # it has made layers of its own
        return
    vars(module).clear()
    vars(module).update(attributes)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer is not registered[name]:
            setattr(module, name, registered[name])


def _registered(module: nn.Module) -> dict[str, nn.Module | Tensor]:
    """Return the children, parameters and buffers of a module itself by name."""
    tensors = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
    return dict(chain(module.named_children(), tensors))


def build_on_meta(create: Callable[[], nn.Module]) -> nn.Module:
    """Build a model on the meta device, without memory, if its constructor reads no values."""
    state = get_rng_state()
    try:
        with torch.device("meta"):
            return create()
    except Exception:  # torchvision's RegNet reads values, for example
        set_rng_state(state)  # or random parts that are no tensors would be others than on rank 0
        return create()


def build_empty(create: Callable[[], nn.Module]) -> nn.Module:
    """Build a model whose parameters and buffers are on the meta device, and all else is not."""
    state = get_rng_state()
    model = build_on_meta(create)
    parts = {*model.modules(), *model.parameters(), *model.buffers()}
    values = chain.from_iterable(vars(module).values() for module in model.modules())
    if any(_holds_others(value, parts) for value in values):
        set_rng_state(state)
        model = create()
    return model.to("meta")


def _holds_others(value: object, parts: Set) -> bool:
    """Return whether a value holds, in lists or dicts, tensors or modules other than `parts`."""
    if isinstance(value, Mapping):
        return any(_holds_others(item, parts) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_others(item, parts) for item in value)
    return isinstance(value, Tensor | nn.Module) and value not in parts


def place(model: nn.Module, device: torch.device, memory_format: torch.memory_format) -> None:
    """Move a model to `device`; give tensors of 4 dimensions, as convolutions', the format."""
    model.to(device)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.to(memory_format=memory_format)


def with_copies(models: Mapping[str, nn.Module], value: T) -> Iterator[tuple[str, nn.Module, T]]:
    """Yield names and models with a `value` of their own, which they may change in place."""
    *others, last = models.items()
    for name, model in others:
        yield name, model, copy.deepcopy(value)
    yield *last, value


def base_lrs(groups: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the learning rates of parameter groups, before the schedule changes them.

    An entry `lr_scale` multiplies them, as timm's layer decay and MAE's schedule assume.

    Raises UserError if a scheduler has changed them already.
    """
    if any("initial_lr" in group for group in groups):
        raise UserError(
            "a scheduler of torch has changed the learning rates, which set_learning_rates in "
            "main.py sets for each step: leave it out, and change the formula there"
        )
    return [group["lr"] * group.get("lr_scale", 1.0) for group in groups]


def has_fused_sgd(model: nn.Module) -> bool:
    """Return whether torch has a fast fused SGD for the parameters: not for FSDP's (torch 2.15)."""
    return next(model.parameters()).is_cuda and not is_sharded(model)


@contextmanager
def without_compilation() -> Iterator[None]:
    """Run compiled modules as they are; compilation for another batch size would slow them down."""
    if "torch._dynamo" not in sys.modules:  # whose import takes a second: nothing is compiled
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


class FlipAverage(nn.Module):
    """Model whose outputs, such as logits, are the means of those of an image and its mirror image.

    Raises UserError if the model does not map a tensor (N, C, H, W) to one of (N,) or (N, outputs).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        if not isinstance(images, Tensor):
            raise UserError(
                f"--flip-tta needs a model of one tensor of images, not a {type(images).__name__}"
            )
        flipped = images.flip(3)  # first: a model may change its input in place
        output = self.model(images)
        if not isinstance(output, Tensor) or output.dim() > 2:
            shape = getattr(output, "shape", None)
            kind = f"tensor {tuple(shape)}" if shape else type(output).__name__
            raise UserError(
                f"--flip-tta needs a model that returns a tensor (N, outputs), not a {kind}"
            )
        output = output.clone()  # of a CUDA graph, whose next run overwrites it
        return torch.stack([output, self.model(flipped)]).float().mean(dim=0)


class Ema:
    """Exponential moving average of a model's weights and statistics, in fp32.

    It starts with the weights that the model has. These are random in most runs, so the first
    updates have a lower decay: ``min(decay, (1 + step) / (10 + step))``.

    Args:
        model: before SyncBN conversion and before amp casts it.
        decay: weight of the previous average in each update, from 0 to 1.

    Attributes:
        module: a copy of the model that holds the average.

    Raises UserError if the model can't be copied.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        try:
            self.module = copy.deepcopy(model).requires_grad_(False)
        except (RuntimeError, TypeError) as error:  # such as a lock's
            raise UserError(
                f"--ema: the model can't be copied ({error}): give the class of that object a "
                "method __deepcopy__, or use the weight_norm of torch.nn.utils.parametrizations in "
                "place of that of torch.nn.utils"
            ) from None
        self.decay = decay
        self._infinite: set[str] | None = None  # masks, of which a mean would be nan

    @torch.no_grad()
    def update(self, state_dict: Mapping[str, Tensor], step: int) -> None:
        """Include the model's state, from ``Backend.fp32_state_dict``, after `step` other steps.

        Of integers and modules' extra state, which have no mean, the average has the model's.
        """
        extra = distributed.extra_state(state_dict)
        own = self.module.state_dict(keep_vars=True)
        # Tied weights have several names, and are averaged once.
        names = {
            id(mean): name
            for name, mean in own.items()
            if isinstance(mean, Tensor) and name not in extra
        }
        pairs = {  # amp may have cast buffers of another type
            name: (local_shard(own[name]), local_shard(state_dict[name]).to(own[name].dtype))
            for name in names.values()
        }
        if self._infinite is None:
            self._infinite = {
                name
                for name, pair in pairs.items()
                if any(map(_is_infinite, pair[: 1 if isinstance(own[name], nn.Parameter) else 2]))
            }
        decay = min(self.decay, (1 + step) / (10 + step))
        means: list[Tensor] = []
        values: list[Tensor] = []
        for name, (mean, value) in pairs.items():
            if not (mean.is_floating_point() or mean.is_complex()):
                mean.copy_(value)
            elif name in self._infinite:
                is_infinite = mean.isinf() | value.isinf()
                mean.copy_(torch.where(is_infinite, value, mean.lerp(value, 1 - decay)))
            else:
                means.append(mean)
                values.append(value)
        get_ema_multi_avg_fn(decay)(means, values, None)
        tensors = {id(one) for one in (*self.module.parameters(), *self.module.buffers())}
        if extra or not names.keys() <= tensors:  # a hook has made other tensors of them
            own.update(copy.deepcopy(extra))
            self.module.load_state_dict(own)


def _is_infinite(tensor: Tensor) -> bool:
    """Return whether a tensor holds inf or -inf, as masks do."""
    return tensor.is_floating_point() and bool(tensor.float().isinf().any())
