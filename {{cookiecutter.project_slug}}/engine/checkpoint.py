"""Checkpoints: whole or not there, of tensors and plain types only, the same on either backend."""

import contextlib
import io
import math
import re
import socket
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from engine import distributed
from engine.errors import UserError
from engine.files import replacing

LAST, BEST = "last.pt", "best.pt"
A_FOLDER = 0x10  # an attribute of a part of an archive
PARTS = ("model", "optimizer", "amp", "epoch", "step", "samples", "best", "ranks")


@dataclass
class Progress:
    """How far a run is."""

    epoch: int = 0  # epochs that are done
    step: int = 0  # steps in all
    samples: int = 0  # of this epoch, taken by all processes together
    best: float = -math.inf


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside a DistributedDataParallel or DataParallel, or `model`, if in none.

    Its keys carry no ``module.`` of theirs. A model may have a part of that name itself.
    """
    is_torchs = isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel)
    is_apexs = type(model).__module__.startswith("apex.parallel.")
    return model.module if is_torchs or is_apexs else model


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


def weights(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The model's state, in fp32 at every opt_level.

    Where there are fp32 masters it holds their values, so that a resumed run goes on from the
    weights that it had.
    """
    module = unwrap(model)
    state = dict(module.state_dict())
    masters = _apex_masters(optimizer)
    for name, parameter in module.named_parameters() if masters else ():
        if parameter in masters:
            state[name] = masters[parameter].detach()
    return state


def collect(model: nn.Module, optimizer: Optimizer, amp: object) -> dict[str, object]:
    """What a checkpoint holds of them: ``model``, ``optimizer`` and ``amp``.

    And ``scale_is_dynamic``, which ``amp`` does not say in the form that Apex gives it. Waits for
    the device.
    """
    return {
        "model": weights(model, optimizer),
        "optimizer": optimizer.state_dict(),
        "amp": dict(amp.state_dict()),
        "scale_is_dynamic": _has_dynamic_scale(amp),
    }


def in_memory(state: object) -> object:
    """A copy of `state` with its tensors in the CPU's memory.

    From a GPU they are copied in turn with what the GPU was given to do, so that no later step
    changes them, and nothing waits: they are there once the current stream is done.
    """
    if isinstance(state, Tensor):
        state = state.detach()
        return state.to("cpu", non_blocking=True) if state.is_cuda else state.clone()
    if isinstance(state, dict):
        return {name: in_memory(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(in_memory, state))
    return state


def write(path: Path, state: dict[str, object]) -> None:
    """Writes `state` to `path`, whole or not at all; torch adds a checksum of each tensor.

    Raises ValueError if the weights or the optimizer hold nan, and OSError for a full disk and the
    like.
    """
    bad = _first_nan(state)
    if bad:
        raise ValueError(f"{bad} is not finite")
    with replacing(path) as temporary, temporary.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # from closing what could not be written
            raise error.__context__ or error from None


def newest(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint in `folder` that is whole, or None if there is none at all.

    Says which ones are not whole. Raises UserError if none of them is.
    """
    found = sorted(numbered(folder), key=_age, reverse=True)
    last = folder / LAST
    if last.exists():
        found = [last, *(path for path in found if not path.samefile(last))]
    for path in found:
        try:
            load(path)
        except UserError as error:
            say(f"warning: {error}; trying the one before it")
            continue
        return path
    if found:
        raise UserError(f"--resume auto: no checkpoint in {folder} is whole; use another folder")
    return None


def find(resume: Path | None, folder: Path, say: Callable[[str], None]) -> Path | None:
    """What to resume, the same for every process: `resume`, or with "auto" the newest in `folder`.

    A process that takes the place of one that failed goes on with the newest, too.
    """
    choice = [resume]
    if resume == Path("auto") or distributed.is_restart():
        if dist.get_rank() == 0:
            given = None if resume == Path("auto") else resume
            choice = [newest(folder, say) or given]
            if distributed.is_restart() and choice == [None]:
                say(f"{folder} has no checkpoint: the run begins again")
        dist.broadcast_object_list(choice)
        if not (distributed.is_on_one_machine() or distributed.is_restart()):
            _require_none_newer_elsewhere(folder)
    return choice[0]


def _require_none_newer_elsewhere(folder: Path) -> None:
    """Raises UserError if the machines share no disk, and another than rank 0's has the newest."""
    steps = max((int(path.stem[5:]) for path in numbered(folder)), default=0)
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, (steps, socket.gethostname()))
    (ours, _), (most, host) = found[0], max(found)
    if most > ours:
        raise UserError(
            f"--resume auto: {folder} on {host} has a checkpoint of step {most}, on the machine "
            f"with NODE_RANK=0 {f'none after step {ours}' if ours else 'none'}: give that number "
            f"to {host}, or copy the folder"
        )


def hand_out(path: Path, group: dist.ProcessGroup) -> io.BytesIO | None:
    """What rank 0 reads in `path`: on another machine it may be missing, or of another run.

    None on one machine, and if rank 0 can't read it.

    Args:
        group: one of gloo.
    """
    if distributed.is_on_one_machine():
        return None
    content = bytearray()
    if dist.get_rank() == 0:
        with contextlib.suppress(OSError):  # load will say it
            content = bytearray(path.read_bytes())
    size = torch.tensor(len(content))
    dist.broadcast(size, 0, group)
    if not size:
        return None
    content = content or bytearray(size.item())
    dist.broadcast(torch.frombuffer(content, dtype=torch.uint8), 0, group)
    return io.BytesIO(content)


def numbered(folder: Path) -> list[Path]:
    """The checkpoints in `folder` that have the number of their step in their name."""
    return [path for path in folder.glob("step-*.pt") if path.stem[5:].isdecimal()]


def prune(folder: Path, keep: int) -> None:
    """Removes the numbered checkpoints in `folder` but for the newest `keep`."""
    for path in sorted(numbered(folder), key=_age, reverse=True)[keep:]:
        path.unlink(missing_ok=True)


def _age(path: Path) -> tuple[int, int]:
    """By the time of writing: a run that went back to an early step writes lower numbers."""
    return path.stat().st_mtime_ns, int(path.stem[5:])


def _first_nan(state: dict[str, object]) -> str | None:
    """The name of the first tensor of the model, its average or the optimizer that holds nan."""
    moments = state["optimizer"].get("state", {}).values()
    tensors = chain(
        state["model"].items(),
        ((f"the average's {name}", tensor) for name, tensor in state.get("ema", {}).items()),
        ((f"the optimizer's {name}", tensor) for one in moments for name, tensor in one.items()),
    )
    for name, tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.isnan().any():
            return name
    return None


def load(path: Path, content: io.BytesIO | None = None) -> dict[str, object]:
    """Reads a checkpoint into the CPU's memory, without running any code that it may hold.

    `content` is what the file holds, if that was read before.

    One of another script, in the form that Apex documents (``model``, ``optimizer``, ``amp``), is
    completed; ``origin`` says so. Raises UserError if it is missing, torn or altered, too large
    when unpacked, no checkpoint, or holds nan.
    """
    try:
        with content or path.open("rb") as file:
            if zipfile.is_zipfile(file):
                _check_archive(path, file)
            file.seek(0)
            state = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    except (PermissionError, IsADirectoryError) as error:
        raise UserError(f"{path}: it can't be read ({error.strerror})") from None
    except UserError:
        raise
    except Exception as error:  # a file of any bytes raises anything
        code = re.search(r"GLOBAL (\S+)", str(error))
        if code:
            raise UserError(
                f"{path}: it holds {code[1]}, which can't be read without running code; "
                "if you trust the file, torch.load it with weights_only=False and torch.save its "
                "model, optimizer, amp and epoch alone"
            ) from None
        raise UserError(f"{path}: it is torn, or not a checkpoint; use another one") from None
    parts = state if isinstance(state, dict) else {}
    missing = [part for part in PARTS[:2] if not isinstance(parts.get(part), dict)]
    if missing:
        raise UserError(
            f"{path}: it is not a checkpoint, a dict of model, optimizer and amp "
            f"(it has no {' and no '.join(missing)})"
        )
    if not all(map(_is_whole, tree_leaves(state))):
        raise UserError(f"{path}: a tensor of it is larger than what is stored; use another one")
    try:
        bad = _first_nan(state)
    except (AttributeError, TypeError):
        raise UserError(f"{path}: its optimizer's state is none; use another one") from None
    if bad:
        raise UserError(f"{path}: {bad} is not finite; use an earlier one")
    state["origin"] = ""
    if any(part not in state for part in PARTS):
        _complete(state)
    counts = [state[name] for name in ("epoch", "samples")] + [state["step"] or 0]
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        raise UserError(f"{path}: its epoch and step are no counts; use another one")
    if not (_is_number(state["best"]) and isinstance(state["ranks"], list)):
        raise UserError(f"{path}: its best or its ranks are altered; use another one")
    scalers = state.get("amp", {})
    scalers = scalers.values() if isinstance(scalers, dict) else [{}]
    scales = [part.get("loss_scale") for part in scalers if isinstance(part, dict)]
    if not all(_is_number(scale) and 0 < scale < math.inf for scale in scales):
        raise UserError(f"{path}: its loss scale is altered; use another one")
    return state


def _is_number(value: object) -> bool:
    return isinstance(value, float | int) and not math.isnan(value)


def _is_whole(value: object) -> bool:
    """Whether a tensor has all its numbers in memory: one can repeat one number without end."""
    if not isinstance(value, Tensor):
        return True
    is_plain = value.layout == torch.strided and value.device.type == "cpu"
    return is_plain and value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def _check_archive(path: Path, file: BinaryIO) -> None:
    """Raises BadZipFile for a tensor that was altered, which torch doesn't look for.

    So is one that is marked as a folder, of which torch reads nothing. And UserError for an archive
    that grows when it is read: torch stores tensors as they are.
    """
    with zipfile.ZipFile(file) as archive:
        if sum(part.file_size for part in archive.infolist()) > file.seek(0, io.SEEK_END):
            raise UserError(f"{path}: it unpacks to more than it is; use another one")
        folders = (part.filename for part in archive.infolist() if part.external_attr & A_FOLDER)
        altered = archive.testzip() or next(folders, None)
    if altered:
        raise zipfile.BadZipFile(altered)


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
    state.update(epoch=epoch, step=None, samples=0, best=-math.inf, ranks=[])


def restore(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer,
    amp: object,
    content: io.BytesIO | None = None,
) -> dict[str, object]:
    """Loads `path`, or its `content`, into model, optimizer and amp; returns all that it holds.

    The optimizer's settings, such as the weight decay, stay those of this run. Raises UserError if
    the checkpoint does not fit.
    """
    try:
        state = load(path, content)
    except UserError as error:
        raise UserError(f"--resume {error}") from None
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
        _check_shapes(optimizer, state["optimizer"])
        own = [_settings(group) for group in optimizer.param_groups]
        optimizer.load_state_dict(state["optimizer"])
        _place_moments(optimizer, state["optimizer"])
        for group, settings in zip(optimizer.param_groups, own, strict=True):
            group.update(settings)
        # A static scale is this run's own, and one to start a dynamic scale with it would be none.
        scalers = state.get("amp", {})
        were_static = all(scaler["loss_scale"] == 1.0 for scaler in scalers.values())
        if _has_dynamic_scale(amp) and state.get("scale_is_dynamic", not were_static):
            amp.load_state_dict(scalers)
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = shorten(" ".join(str(error).split()), 160)
        raise UserError(
            f"--resume {path}: it does not fit this model and optimizer; resume with the --arch, "
            "the classes, the --freeze and the --decay-weights-only that it was made with "
            f"({reason})"
        ) from None
    return state


def _has_dynamic_scale(amp: object) -> bool:
    return any(scaler.dynamic for scaler in amp._amp_state.loss_scalers)


def _kind(groups: list[dict]) -> str:
    """What tells Adam's groups from SGD's; torch's SGD would load either without a word."""
    return " and ".join(name for name in ("betas", "momentum") if name in groups[0]) or "neither"


def _pairs(optimizer: Optimizer, saved: dict) -> Iterator[tuple[int, nn.Parameter]]:
    """The parameters, each with its number in the state that was saved."""
    indices = chain.from_iterable(group["params"] for group in saved["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return zip(indices, parameters, strict=True)


def _check_shapes(optimizer: Optimizer, saved: dict) -> None:
    """Raises ValueError for a moment of another shape, which would be stretched to fit."""
    for index, parameter in _pairs(optimizer, saved):
        for name, value in saved["state"].get(index, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                raise ValueError(
                    f"{name} of parameter {index} is {tuple(value.shape)}, not "
                    f"{tuple(parameter.shape)}"
                )


def _place_moments(optimizer: Optimizer, saved: dict) -> None:
    """The moments as the fused kernels take them to be, which read them by the address.

    They lie as the parameter does, where torch leaves them channels last if they were saved so. And
    Adam's are fp32, where torch loads them in the parameter's type, fp16 at O3.
    """
    for index, parameter in _pairs(optimizer, saved):
        for name, value in saved["state"].get(index, {}).items():
            if name in ("exp_avg", "exp_avg_sq"):
                dtype = torch.float32
            elif name == "momentum_buffer" and value is not None:  # as old torch has it
                dtype = optimizer.state[parameter][name].dtype
            else:
                continue
            moment = torch.empty_like(parameter, dtype=dtype)
            optimizer.state[parameter][name] = moment.copy_(value)


def _settings(group: dict) -> dict:
    """What a resumed run has of its own; it sets the learning rate at each step."""
    return {name: value for name, value in group.items() if name not in ("params", "step", "lr")}
