"""Restoring a checkpoint's entries: model, optimizer, loss scalers, average, random numbers."""

import warnings
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.optim import Optimizer

from engine import UserError
from engine.backend import Backend, unwrap
from engine.checkpoint.format import TrainingState
from engine.checkpoint.validation import check_like, check_loaded, is_number
from engine.data import mix_seeds, rng_preserved, seed_everything, set_rng_state
from engine.monitoring.meter import LOSS, Sums
from engine.monitoring.run_files import MAX_COUNT
from engine.text import printable

MAX_BUFFERS = 2**31  # bytes that those of a model may have, or ten times those of its weights
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
OWN = ("torch.", "apex")  # other packages have an AdamW, too, with another state
FUSED = ("FusedAdam", "FusedLAMB")  # whose moments are fp32, also of half parameters
ADAM = ("Adam", "AdamW", *FUSED)  # whose kernels assume two moments
SGD = ("SGD", "FusedSGD")
ALIKE = ({"Adam", "AdamW", "FusedAdam"}, {*SGD})  # whose states have the same entries
ERRORS = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)


def restore(
    path: Path, entries: dict[str, Any], state: TrainingState, is_evaluation: bool = False
) -> str:
    """Load a checkpoint's entries into model, optimizer and loss scalers; return a note on them.

    The optimizer's settings, such as the weight decay, stay those of this run, but for those that
    training had changed. An evaluation needs the model only, and may lack flags that group the
    optimizer's parameters.

    Args:
        path: of the checkpoint, for messages.
        entries: of the checkpoint, as `format.load` returns them; ``origin`` is updated.
        state: to be restored, except for its average and progress.

    Raises UserError if the checkpoint does not fit.
    """
    if not is_evaluation:
        _check_optimizer(path, entries["metadata"].get("optimizer", ""), state.optimizer)
    elif state.ema and not entries.get("ema"):
        raise UserError(f"--ema: {path} has no average of the weights; leave it out")
    try:
        module = unwrap(state.model)
        if not hasattr(module, "module"):  # old scripts often save the model in its wrapper
            consume_prefix_in_state_dict_if_present(entries["model"], "module.")
        check_like(entries["model"], module.state_dict())
        state.backend.load_fp32_state_dict(state.model, state.optimizer, entries["model"])
        loaded = state.backend.fp32_state_dict(state.model, state.optimizer)
        check_loaded(entries["model"], loaded)
        if is_evaluation:
            return ""
        _restore_optimizer_if_own(state.optimizer, entries)
        _restore_scalers(entries, state.backend)
    except ERRORS as error:  # altered values raise many kinds
        reason = shorten(str(error), 160)
        arch = f"--arch {entries['metadata'].get('arch', '')}".rstrip()
        raise UserError(
            f"--resume {path}: it does not fit this model and optimizer; resume with the {arch}, "
            "the classes, the task.py, the --freeze, the --decay-weights-only and the "
            f"--layer-decay that it was made with ({reason})"
        ) from None
    return _describe_missing_moments(state.optimizer) if entries["step"] else ""


def build_with(
    weights: dict[str, Tensor], build_model: Callable[[], nn.Module], seed: Any = 0
) -> nn.Module:
    """Return the model of `build_model`, on the CPU, with these weights.

    First a model without memory gets them, because altered metadata can make `build_model` need any
    amount. Raises RuntimeError, TypeError or ValueError if they do not fit.

    Args:
        seed: that of the training, since a model may keep random numbers that are not in its state.
    """
    seed = seed if isinstance(seed, int) and 0 <= seed < 2**32 else 0  # a file may be altered
    with warnings.catch_warnings():
        # A model without memory gets no values, even if `build_model` loads pretrained weights.
        warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")
        with rng_preserved():
            return _build_twice(weights, build_model, seed)


def _build_twice(
    weights: dict[str, Tensor], build_model: Callable[[], nn.Module], seed: int
) -> nn.Module:
    for device in ("meta", "cpu"):
        seed_everything(seed)
        try:
            with torch.device(device):
                model = build_model()
        except (RuntimeError, TypeError, UserError):
            if device == "cpu":
                raise
            continue  # it computes with values
        check_like(weights, model.state_dict())
        model.load_state_dict(weights)
        size = sum(buffer.nbytes for buffer in model.buffers())  # some are not in the file
        tensors = (weight for weight in weights.values() if isinstance(weight, Tensor))
        if size > max(MAX_BUFFERS, 10 * sum(weight.nbytes for weight in tensors)):
            raise RuntimeError(f"its buffers take {size} bytes, many times those of its weights")
    check_loaded(weights, model.state_dict())
    return model


def _describe_missing_moments(optimizer: Optimizer) -> str:
    """Return what to add to the message if Adam has trained, but not with all parameters."""
    if _kind(optimizer.param_groups[0]) != "betas":  # SGD without momentum has no state
        return ""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    missing = sum(not optimizer.state.get(one) for one in parameters)
    note = f", without the optimizer's moments of {missing} of {len(parameters)} parameters"
    return note if missing else ""


def restore_average(average: dict[str, Tensor] | None, state: TrainingState) -> str:
    """Restore the average of the weights, if any; return what to add to the message."""
    ema = state.ema
    if ema is None:
        return "" if average is None else ", without its average of the weights: add --ema for it"
    weights = average or state.backend.fp32_state_dict(state.model, state.optimizer)
    check_like(weights, ema.module.state_dict())
    ema.module.load_state_dict(weights)
    check_loaded(weights, ema.module.state_dict())
    return "" if average else "; it has no average of the weights, which starts here"


def restore_ranks(
    ranks: list[dict[str, Any]], step: int, scales_lr: bool
) -> tuple[list[Sums], str]:
    """Restore the random number generators of this process.

    Args:
        ranks: what each process saved of its own.
        step: of the run, for the seeds if the number of processes has changed.
        scales_lr: the learning rate is a multiple of the number of processes.

    Returns the sums to start this process's meter with, and what to add to the message.
    """
    rank = dist.get_rank()
    is_same_number = len(ranks) == dist.get_world_size()
    if is_same_number:
        own = [ranks[rank]]
        set_rng_state(ranks[rank]["rng"])
    else:
        own = ranks if rank == 0 else []
        seed_everything(mix_seeds(torch.initial_seed(), step))
    means = [one["meter"] if "meter" in one else {LOSS: one["losses"]} for one in own]
    if is_same_number or not ranks:  # none in another script's checkpoint
        return means, ""
    rule = "scales with them" if scales_lr else "stays"
    return means, f", not bit-identical: {len(ranks)} processes saved it; the learning rate {rule}"


def optimizer_name(optimizer: Optimizer) -> str:
    """Return the name of the optimizer's class, or of a known one that it is derived from."""
    names = [kind.__name__ for kind in type(optimizer).__mro__]
    return next((name for name in names if any(name in alike for alike in ALIKE)), names[0])


def _check_optimizer(path: Path, saved: str, optimizer: Optimizer) -> None:
    """Raise UserError if the class named `saved`, if any, is another optimizer."""
    own = optimizer_name(optimizer)
    if saved not in ("", own) and not any({saved, own} <= alike for alike in ALIKE):
        raise UserError(
            f"--resume {path}: its optimizer was {printable(saved)} and is {own} now; "
            f"start a new run with --weights {path}"
        )


def _restore_scalers(entries: dict[str, Any], backend: Backend) -> None:
    """Restore the loss scalers, unless one scale is static and the other dynamic or another."""
    scalers = entries.get("amp", {})
    scales = {name: one["loss_scale"] for name, one in scalers.items()}
    own_scales = {name: one["loss_scale"] for name, one in backend.apex.amp.state_dict().items()}
    were_static = all(scale == 1.0 for scale in scales.values())
    was_dynamic = entries.get("scale_is_dynamic", not were_static)
    is_dynamic = backend.has_dynamic_loss_scale()
    if was_dynamic == is_dynamic and (is_dynamic or scales == own_scales):
        backend.apex.amp.load_state_dict(scalers)


def _restore_optimizer_if_own(optimizer: Optimizer, entries: dict[str, Any]) -> None:
    """Load the optimizer's state. That of another script may not fit, and is then left out."""
    fresh = optimizer.state_dict()
    try:
        trained = entries["metadata"].get("trained_settings", [])
        _restore_optimizer(optimizer, entries["optimizer"], {"lr", "step", *trained})
    except ERRORS:
        if not entries["origin"]:
            raise
        optimizer.load_state_dict(fresh)
        del entries["origin"]["optimizer"]
        entries["origin"]["fitting optimizer"] = False


def _kind(group: dict[str, Any]) -> str:
    """Return the hyperparameter that distinguishes Adam's parameter groups from SGD's."""
    return next((name for name in ("betas", "momentum") if name in group), "neither")


def _restore_optimizer(optimizer: Optimizer, saved: dict[str, Any], trained: set[str]) -> None:
    """Load the state in `saved` into `optimizer`, whose settings but `trained` stay its own.

    Raises ValueError if it is the state of another kind of optimizer, or does not fit.
    """
    saved_groups = saved["param_groups"]
    theirs, ours = _kind(saved_groups[0]), _kind(optimizer.param_groups[0])
    if theirs != ours:  # torch's SGD would load the state of Adam
        raise ValueError(f"an optimizer with {theirs} saved it, and this one has {ours}")
    if len(saved_groups) != (own := len(optimizer.param_groups)):
        raise ValueError(f"it has {len(saved_groups)} parameter groups and not {own}")
    groups = []
    for saved_group, group in zip(saved_groups, optimizer.param_groups, strict=True):
        groups.append(group | {"params": saved_group["params"]})
        for name in trained.intersection(saved_group):  # FusedAdam's groups have a step
            _check_setting(name, saved_group[name], group.get(name))
            groups[-1][name] = saved_group[name]
    indices = list(chain.from_iterable(group["params"] for group in groups))
    if len(set(indices)) < len(indices):  # the moments of one parameter would be those of another
        raise ValueError("its parameter groups hold a parameter twice")
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    known = dict(zip(indices, parameters, strict=True))
    state = {index: saved["state"][index] for index in known if saved["state"].get(index)}
    names = {cls.__name__ for cls in type(optimizer).__mro__ if cls.__module__.startswith(OWN)}
    for index, moments in state.items():
        _check_state(index, known[index], moments, names)
    common = {key: one for key, one in saved["state"].items() if isinstance(key, str)}
    optimizer.load_state_dict({**saved, "param_groups": groups, "state": state | common})
    for index, moments in state.items():
        _place_moments(known[index], moments, optimizer.state[known[index]], names)


def _check_state(index: int, parameter: Tensor, saved: dict[str, Any], names: set[str]) -> None:
    """Raise ValueError if the state of a parameter is altered, or of another shape.

    Tensors of another shape would be broadcast. Optimizers that are not known may have any.

    Args:
        names: of the optimizer's classes.
    """
    is_adam = not names.isdisjoint(ADAM)
    if is_adam and (missing := {"exp_avg", "exp_avg_sq"}.difference(saved)):
        raise ValueError(f"parameter {index} has no {min(missing)}")
    for name, value in saved.items():
        entry = f"{name} of parameter {index}"
        if value is None and not is_adam:  # as torch's SGD without momentum saves its moments
            continue
        if name in MOMENTS or (isinstance(value, Tensor) and value.dim()):
            if is_adam or not names.isdisjoint(SGD):
                check_like({entry: value}, {entry: parameter})
        elif isinstance(value, Tensor | float | int):
            _check_number(entry, value, is_count=name == "step")


def _check_setting(name: str, value: Any, own: Any) -> None:
    """Raise ValueError if the value of a group's setting is altered: of another kind than `own`."""
    if isinstance(own, tuple) and isinstance(value, tuple) and len(own) == len(value):
        for one, other in zip(value, own, strict=True):  # such as betas
            _check_setting(name, one, other)
    elif isinstance(value, float | int) or (isinstance(value, Tensor) and not value.dim()):
        _check_number(f"the group's {name}", value, is_count=name == "step")
    elif isinstance(own, float | int | tuple):
        raise ValueError(f"the group's {name} is altered")


def _check_number(name: str, value: Any, is_count: bool) -> None:
    number = value.item() if isinstance(value, Tensor) else value
    is_integer = isinstance(number, int) and abs(number) < 2**64  # such as a random seed
    if not (is_integer or is_number(number)) or (is_count and not 0 <= number < MAX_COUNT):
        raise ValueError(f"{name} is altered")


def _place_moments(
    parameter: Tensor, saved: dict[str, Any], loaded: dict[str, Any], names: set[str]
) -> None:
    """Copy a parameter's moments into the memory layout and type that the kernels assume.

    The layout is the parameter's, where torch keeps that of the file, such as channels_last. Torch
    loads them in the parameter's type, which is fp16 at O3, where those of FUSED are fp32. Tensors
    without dimensions keep the type that they were saved with.
    """
    is_fused = not names.isdisjoint(FUSED)
    for name, value in saved.items():
        is_moment = name in MOMENTS and name in loaded  # not of an optimizer within another one
        if is_moment and isinstance(value, Tensor) and value.shape == parameter.shape:
            dtype = torch.float32 if is_fused else loaded[name].dtype
            loaded[name] = torch.empty_like(parameter, dtype=dtype).copy_(value)
            continue
        are_tensors = isinstance(value, Tensor) and isinstance(loaded.get(name), Tensor)
        if are_tensors and not value.dim() and name != "step":  # as ASGD's eta
            loaded[name] = value.to(loaded[name].device, copy=True)
