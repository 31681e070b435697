"""Checkpoints: whole or not there, of tensors and plain types only, the same on either backend."""

import os
import pickle
import shutil
from pathlib import Path
from textwrap import shorten

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engine.errors import UserError

PARTS = ("model", "optimizer", "amp", "epoch", "step", "steps_per_epoch", "best")


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside a DistributedDataParallel, whose keys carry no ``module.``."""
    return getattr(model, "module", model)


def _apex_masters(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """Real Apex's fp32 masters by their half parameter; empty where there are none.

    Apex makes them at the first backward pass. Moments that are loaded before that are rounded to
    fp16, so they are made now.
    """
    if hasattr(optimizer, "_amp_lazy_init"):
        optimizer._amp_lazy_init()
        stash = optimizer._amp_stash
        if hasattr(stash, "all_fp32_from_fp16_params"):
            return dict(zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True))
    return {}


def save(path: Path, model: nn.Module, optimizer: Optimizer, amp: object, **rest: object) -> None:
    """Writes `path`: ``model``, ``optimizer``, ``amp`` and what is in `rest`.

    ``model`` is fp32 at every opt_level; where there are fp32 masters it holds their values, so
    that a resumed run goes on from the weights that it had. The file appears whole or not at all:
    it is written beside its place, flushed to the disk, and renamed.
    """
    module = unwrap(model)
    weights = module.state_dict()
    masters = _apex_masters(optimizer)
    for name, parameter in module.named_parameters():
        if parameter in masters:
            weights[name] = masters[parameter].detach()
    state = {
        "model": dict(weights),
        "optimizer": optimizer.state_dict(),
        "amp": dict(amp.state_dict()),
        **rest,
    }
    temporary = _beside(path)
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    _put_in_place(temporary, path)


def keep(path: Path, other: Path) -> None:
    """Keeps the checkpoint at `path` as `other` too, without a second copy on the disk."""
    temporary = _beside(other)
    temporary.unlink(missing_ok=True)
    try:
        temporary.hardlink_to(path)
    except OSError:  # a file system without links
        shutil.copyfile(path, temporary)
    _put_in_place(temporary, other)


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp")


def _put_in_place(temporary: Path, path: Path) -> None:
    temporary.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load(path: Path) -> dict[str, object]:
    """Reads a checkpoint into the CPU's memory, without running any code that it may hold.

    Raises UserError if it is missing, torn, or not a checkpoint of this project.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"--resume {path}: there is no such file") from None
    except (PermissionError, IsADirectoryError) as error:
        raise UserError(f"--resume {path}: it can't be read ({error.strerror})") from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError):
        raise UserError(
            f"--resume {path}: it is torn, or not a checkpoint; use another one"
        ) from None
    missing = [part for part in PARTS if not isinstance(state, dict) or part not in state]
    if missing:
        raise UserError(
            f"--resume {path}: it is not a checkpoint of this project "
            f"(it has no {', '.join(missing)})"
        )
    counts = [state[name] for name in ("epoch", "step", "steps_per_epoch")]
    if not all(isinstance(count, int) and count >= 0 for count in counts) or not counts[-1]:
        raise UserError(f"--resume {path}: its epoch and step are no counts; use another one")
    return state


def restore(path: Path, model: nn.Module, optimizer: Optimizer, amp: object) -> dict[str, object]:
    """Loads `path` into model, optimizer and amp, and returns all that it holds.

    The optimizer's settings, such as the weight decay, stay those of this run. Raises UserError if
    the checkpoint does not fit.
    """
    state = load(path)
    try:
        theirs, ours = _kind(state["optimizer"]["param_groups"]), _kind(optimizer.param_groups)
        if theirs != ours:
            raise UserError(
                f"--resume {path}: it was made with another optimizer, one with {theirs}, where "
                f"this project's has {ours}; use a checkpoint of this optimizer"
            )
        module = unwrap(model)
        module.load_state_dict(state["model"])
        masters = _apex_masters(optimizer)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if parameter in masters:
                    masters[parameter].copy_(state["model"][name])
        own = [_settings(group) for group in optimizer.param_groups]
        optimizer.load_state_dict(state["optimizer"])
        for group, settings in zip(optimizer.param_groups, own, strict=True):
            group.update(settings)
        amp.load_state_dict(state["amp"])
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = shorten(" ".join(str(error).split()), 160)
        raise UserError(
            f"--resume {path}: it does not fit this model and optimizer; resume with the --arch "
            f"and the classes that it was made with ({reason})"
        ) from None
    return state


def _kind(groups: list[dict]) -> str:
    """What tells Adam's groups from SGD's; torch's SGD would load either without a word."""
    return " and ".join(name for name in ("betas", "momentum") if name in groups[0]) or "neither"


def _settings(group: dict) -> dict:
    return {name: value for name, value in group.items() if name not in ("params", "step")}
