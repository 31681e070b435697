"""Real Apex or apex_native: which one serves, and why."""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import apex_native
from engine.errors import UserError

CALLS = (
    "amp.initialize",
    "amp.scale_loss",
    "parallel.DistributedDataParallel",
    "parallel.convert_syncbn_model",
    "optimizers.FusedAdam",
)
"""What a project may call. Apex's version number is always 0.1, so the calls are looked for."""

EXTENSIONS = ("amp_C", "apex_C", "syncbn")
"""Their compiled parts. Without amp_C there is no FusedAdam; the others have slow stand-ins."""

APEX_LEVELS = ("O0", "O1", "O2", "O3")

UNINSTALL = "pip uninstall apex"
REBUILD = "build Apex for this torch, or pip uninstall apex"
BUILD = "build Apex with its C++ and CUDA extensions"


class Problem(NamedTuple):
    """Why real Apex can't serve, and what to do if it should; nothing where nothing is amiss."""

    reason: str
    remedy: str = ""


def load_backend(choice: str, opt_level: str, **needs: bool) -> tuple[ModuleType, str]:
    """The package that serves Apex's calls, and one line that says which and why.

    Args:
        choice: "apex" (real Apex or stop), "native" (apex_native), or "auto": real Apex if it
            has every call, its compiled extensions and a GPU, else apex_native.
        opt_level, needs: as `problem_with_apex` takes them.

    Raises UserError if `choice` is "apex" and Apex can't serve.
    """
    if choice == "native":
        return apex_native, "apex_native, as asked"
    problem = problem_with_apex(opt_level, **needs)
    if problem is None:
        return importlib.import_module("apex"), "real Apex"
    if choice == "apex":
        raise UserError(
            f"--backend apex: {problem.reason}; use --backend native, which needs no Apex"
        )
    return apex_native, f"apex_native, because {problem.reason}"


def problem_with_apex(
    opt_level: str, compiled: bool = False, replicated: bool = False, compressed: bool = False
) -> Problem | None:
    """Why real Apex can't serve here, or None if it can.

    Args:
        opt_level: O4 and O5 are not in NVIDIA's Apex.
        compiled: whether the model is to be compiled, which Apex's patches of torch stand against.
        replicated: whether DataParallel is to copy the model, which its patch of forward can't.
        compressed: whether DDP is to compress gradients, for which Apex's has no hook.
    """
    try:
        apex = importlib.import_module("apex")
    except ModuleNotFoundError as error:
        if error.name == "apex":
            return Problem("Apex is not installed")
        return Problem(f"the package called apex can't be imported ({error})", REBUILD)
    except Exception as error:  # whatever a broken or foreign package raises
        reason = f"the package called apex can't be imported ({type(error).__name__}: {error})"
        return Problem(reason, REBUILD)
    if not hasattr(apex, "__path__"):
        return Problem(f"the module called apex at {apex.__file__} is not NVIDIA's Apex", UNINSTALL)
    parts = parts_of_apex()
    missing = [call for call in CALLS if not parts[call]]
    if len(missing) == len(CALLS):
        return Problem("the package called apex is not NVIDIA's Apex", UNINSTALL)
    if missing:
        return Problem(f"this Apex no longer has {', '.join(missing)} (removed in May 2025)")
    if not parts["amp_C"]:
        reason = "Apex was installed without its compiled extensions (amp_C is missing)"
        return Problem(reason, BUILD)
    if compiled:
        return Problem(
            "torch.compile can't follow the functions that real Apex puts in place of torch's"
        )
    if replicated:
        return Problem(
            "real Apex ties a model's forward to one GPU, and DataParallel's copies call that"
        )
    if compressed:
        return Problem("real Apex's DDP can't compress gradients")
    if not torch.cuda.is_available():
        return Problem("Apex needs a GPU")
    if opt_level not in APEX_LEVELS:
        return Problem(f"NVIDIA's Apex has no {opt_level}")
    return None


def channels_last(apex: ModuleType, asked: bool | None, say: Callable[[str], None]) -> bool | None:
    """What --channels-last says, or False, with a line, where only NCHW is right.

    Real Apex's DDP, which several processes need, puts gradients back in NCHW order, whatever that
    of the weights is. Raises UserError if channels_last was asked for there.
    """
    if apex.__name__ != "apex" or dist.get_world_size() == 1:
        return asked
    if asked:
        raise UserError("--channels-last: real Apex's DDP mixes up its gradients; leave it out")
    say("NCHW, because real Apex's DDP mixes up the gradients of channels_last weights")
    return False


def syncbn_group(apex: ModuleType, size: int) -> dist.ProcessGroup | None:
    """The `size` processes, or all for 0, that this one shares batch norm's statistics with."""
    processes = dist.get_world_size()
    if size and processes % size:
        raise UserError(f"--sync-bn-group {size} must divide {processes} processes")
    return apex.parallel.create_syncbn_process_group(size)


def loss_scale(apex: ModuleType) -> Tensor | float:
    """The scale that losses have now: on apex_native a tensor if it is kept on the device."""
    scaler = apex.amp._amp_state.loss_scalers[0]
    return scaler.factor if hasattr(scaler, "factor") else scaler.loss_scale()


def parts_of_apex() -> dict[str, bool]:
    """Which of CALLS and EXTENSIONS are there and can be used."""
    calls = {call: _is_callable(*f"apex.{call}".rsplit(".", 1)) for call in CALLS}
    return calls | {name: _is_importable(name) for name in EXTENSIONS}


def _is_importable(module: str) -> bool:
    try:
        importlib.import_module(module)
    except Exception:  # what was built for another torch fails in many ways on import
        return False
    return True


def _is_callable(module: str, name: str) -> bool:
    return _is_importable(module) and callable(getattr(sys.modules[module], name, None))
