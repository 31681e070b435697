"""The part of Apex that only the installable package has; `covered` lists what both parts cover.

The other part is the library in a generated project.
"""

import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from apex_native import __main__ as runner
from apex_native import log_rank_zero

from .covered import COVERED

# Modules of Apex whose calls raise where its kernels were not built, and these kernels.
KERNELS = {
    "apex.contrib.clip_grad": "amp_C",
    "apex.contrib.optimizers.distributed_fused_adam": "distributed_adam_cuda",
    "apex.contrib.optimizers.distributed_fused_lamb": "distributed_lamb_cuda",
    "apex.multi_tensor_apply": "amp_C",
    "apex.normalization": "fused_layer_norm_cuda",
    "apex.optimizers": "amp_C",
    "apex.transformer": "scaled_masked_softmax_cuda",
}


def install() -> None:
    """Complete ``install`` of the runner: add the names of this part, or fill an installed Apex.

    The latter if the environment variable APEX_NATIVE_FILL is set, as ``--fill`` does.
    """
    if "APEX_NATIVE_FILL" in os.environ:
        fill()
        return
    for name in ("apex.as_apex", "apex.extras"):  # names of ours that Apex does not have
        sys.modules[name] = None  # type: ignore[assignment]
    for name in COVERED:
        module = sys.modules.get(name) or _new_module(name)
        vars(module).update(covered_values(name))
        runner.add_module(name, module)


def fill() -> None:
    """Restore the installed Apex, add the names that it lacks, and print which part has what.

    Exits if no Apex is installed.
    """
    with _installed_apex():
        if importlib.util.find_spec("apex") is None:
            sys.exit("--fill: no Apex is installed; without --fill, apex_native serves alone.")
        found = {name: _import_working(name) for name in ("apex", *COVERED)}
    # Functions of amp share their state, so it is taken from one of the two as a whole.
    has_amp = hasattr(found["apex.amp"], "initialize")
    kept, added = [], []
    for name in COVERED:
        is_amp = f"{name}.".startswith("apex.amp.")
        if is_amp and has_amp:
            kept.append("apex.amp")
            continue
        module = (None if is_amp else found[name]) or _new_module(name)
        values = covered_values(name)
        lacking = {key: value for key, value in values.items() if not hasattr(module, key)}
        vars(module).update(lacking)
        runner.add_module(name, module)
        if module is found[name]:
            kept += [name] if COVERED[name] else []  # a package that may have nothing itself
            added += [f"{name}.{key}" for key in lacking]
        else:
            added.append(name)
    log_rank_zero(
        f"apex_native --fill: the installed Apex has {_summary(kept)}; "
        f"apex_native adds {_summary(added)}"
    )


def covered_values(name: str) -> dict[str, Any]:
    """Return what apex_native has for the module `name` of Apex, by name."""
    return {
        key: getattr(importlib.import_module(f"apex_native.{source}"), key)
        for source, keys in COVERED[name].items()
        for key in keys.split()
    }


def _new_module(name: str) -> ModuleType:
    spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
    return importlib.util.module_from_spec(spec)


@contextlib.contextmanager
def _installed_apex() -> Iterator[None]:
    """Undo in the body, for imports, what the runner did to have apex_native imported as Apex."""
    hidden = ("apex", "amp_C", "apex_C")
    for name in [name for name in sys.modules if name.partition(".")[0] in hidden]:
        del sys.modules[name]
    path = sys.path[:]
    sys.path[:] = [folder for folder in path if folder != runner.SPAWNED]
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = path


def _import_working(name: str) -> ModuleType | None:
    """Return the installed module `name` of Apex; None if it is missing, or its kernels are."""
    kernels = [kernel for module, kernel in KERNELS.items() if f"{name}.".startswith(f"{module}.")]
    try:
        for kernel in kernels:
            importlib.import_module(kernel)
        return importlib.import_module(name)
    except ImportError:
        return None


def _summary(names: list[str]) -> str:
    """Return `names` without those of modules in packages that are among them."""
    short = [
        n for n in dict.fromkeys(names) if not any(n.startswith(f"{package}.") for package in names)
    ]
    return ", ".join(short) or "nothing"
