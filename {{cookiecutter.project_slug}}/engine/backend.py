"""Real Apex or apex_native: which one serves, and why."""

import importlib
from types import ModuleType

import torch

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

APEX_LEVELS = ("O0", "O1", "O2", "O3")


def load_backend(choice: str, opt_level: str, compiled: bool = False) -> tuple[ModuleType, str]:
    """The package that serves Apex's calls, and one line that says which and why.

    Args:
        choice: "apex" (real Apex or stop), "native" (apex_native), or "auto": real Apex if it
            has every call, its compiled extensions and a GPU, else apex_native.
        opt_level: O4 and O5 are not in NVIDIA's Apex.
        compiled: whether the model is to be compiled, which Apex's patches of torch stand against.

    Raises UserError if `choice` is "apex" and Apex can't serve.
    """
    if choice == "native":
        return apex_native, "apex_native, as asked"
    problem = _problem_with_apex(opt_level, compiled)
    if problem is None:
        return importlib.import_module("apex"), "real Apex"
    if choice == "apex":
        raise UserError(f"--backend apex: {problem}; use --backend native, which needs no Apex")
    return apex_native, f"apex_native, because {problem}"


def _problem_with_apex(opt_level: str, compiled: bool) -> str | None:
    """Why real Apex can't serve here, or None if it can."""
    try:
        apex = importlib.import_module("apex")
    except ModuleNotFoundError as error:
        if error.name == "apex":
            return "Apex is not installed"
        return f"the package called apex can't be imported ({error})"
    except Exception as error:  # whatever a broken or foreign package raises
        return f"the package called apex can't be imported ({type(error).__name__}: {error})"
    if not hasattr(apex, "__path__"):
        return f"the module called apex at {apex.__file__} is not NVIDIA's Apex"
    missing = [call for call in CALLS if not _is_callable(call)]
    if len(missing) == len(CALLS):
        return "the package called apex is not NVIDIA's Apex"
    if missing:
        return f"this Apex no longer has {', '.join(missing)} (removed in May 2025)"
    try:
        importlib.import_module("amp_C")
    except ImportError:
        return "Apex was installed without its compiled extensions (amp_C is missing)"
    if compiled:
        return "torch.compile can't follow the functions that real Apex puts in place of torch's"
    if not torch.cuda.is_available():
        return "Apex needs a GPU"
    if opt_level not in APEX_LEVELS:
        return f"NVIDIA's Apex has no {opt_level}"
    return None


def _is_callable(call: str) -> bool:
    module, name = call.rsplit(".", 1)
    try:
        return callable(getattr(importlib.import_module(f"apex.{module}"), name, None))
    except Exception:  # an Apex built for another torch fails in many ways on import
        return False
