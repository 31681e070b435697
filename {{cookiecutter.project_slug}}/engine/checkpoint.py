"""Checkpoints: whole or not there, of tensors and plain types only, the same on either backend."""

import math
import os
import pickle
import re
import shutil
from itertools import chain
from pathlib import Path
from textwrap import shorten

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
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

    One of another script, in the form that Apex documents (``model``, ``optimizer``, ``amp``), is
    completed; ``origin`` says so. Raises UserError if it is missing, torn, or no checkpoint.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"--resume {path}: there is no such file") from None
    except (PermissionError, IsADirectoryError) as error:
        raise UserError(f"--resume {path}: it can't be read ({error.strerror})") from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        code = re.search(r"GLOBAL (\S+)", str(error))
        if code:
            raise UserError(
                f"--resume {path}: it holds {code[1]}, which can't be read without running code; "
                "if you trust the file, torch.load it with weights_only=False and torch.save its "
                "model, optimizer, amp and epoch alone"
            ) from None
        raise UserError(
            f"--resume {path}: it is torn, or not a checkpoint; use another one"
        ) from None
    parts = state if isinstance(state, dict) else {}
    missing = [part for part in PARTS[:2] if not isinstance(parts.get(part), dict)]
    if missing:
        raise UserError(
            f"--resume {path}: it is not a checkpoint, a dict of model, optimizer and amp "
            f"(it has no {' and no '.join(missing)})"
        )
    state["origin"] = ""
    if any(part not in state for part in PARTS):
        _complete(state)
    counts = [state[name] for name in ("epoch", "step", "steps_per_epoch")]
    if not all(isinstance(count, int) and count >= 0 for count in counts) or not counts[-1]:
        raise UserError(f"--resume {path}: its epoch and step are no counts; use another one")
    return state


def _complete(state: dict[str, object]) -> None:
    """Adds to another script's checkpoint what those of this project have beside its parts.

    Its ``epoch``, if it is a count, is taken for the epochs that are done, as most scripts save it.
    """
    has_epoch = isinstance(state.get("epoch"), int)
    epoch = state["epoch"] if has_epoch else 0
    held = {"weights": True, "optimizer": True, "loss scale": "amp" in state, "epoch": has_epoch}
    taken = [name for name, is_there in held.items() if is_there]
    missing = [name for name in held if name not in taken]
    state["origin"] = f", a checkpoint of another script: its {', '.join(taken)}"
    if missing:
        state["origin"] += f"; it has no {' and no '.join(missing)}"
    state.update(epoch=epoch, step=epoch, steps_per_epoch=1, best=-math.inf)


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
        if not hasattr(module, "module"):  # old scripts often save the model in its wrapper
            consume_prefix_in_state_dict_if_present(state["model"], "module.")
        module.load_state_dict(state["model"])
        masters = _apex_masters(optimizer)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if parameter in masters:
                    masters[parameter].copy_(state["model"][name])
        own = [_settings(group) for group in optimizer.param_groups]
        optimizer.load_state_dict(state["optimizer"])
        _place_moments(optimizer, state["optimizer"])
        for group, settings in zip(optimizer.param_groups, own, strict=True):
            group.update(settings)
        if "amp" in state:
            amp.load_state_dict(state["amp"])
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = shorten(" ".join(str(error).split()), 160)
        raise UserError(
            f"--resume {path}: it does not fit this model and optimizer; resume with the --arch "
            f"and the classes that it was made with ({reason})"
        ) from None
    return state


def _kind(groups: list[dict]) -> str:
    """What tells Adam's groups from SGD's; torch's SGD would load either without a word."""
    return " and ".join(name for name in ("betas", "momentum") if name in groups[0]) or "neither"


def _place_moments(optimizer: Optimizer, saved: dict) -> None:
    """Adam's moments as real Apex's kernel takes them to be, where it reads them by the address.

    They are fp32, where torch loads them in the parameter's type, fp16 at O3; and they lie as the
    parameter does, where torch leaves them channels last if they were saved so.
    """
    indices = chain.from_iterable(group["params"] for group in saved["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for index, parameter in zip(indices, parameters, strict=True):
        for name in {"exp_avg", "exp_avg_sq"} & saved["state"].get(index, {}).keys():
            moment = torch.empty_like(parameter, dtype=torch.float32)
            optimizer.state[parameter][name] = moment.copy_(saved["state"][index][name])


def _settings(group: dict) -> dict:
    return {name: value for name, value in group.items() if name not in ("params", "step")}
