"""Formulas that are compiled where there is a GPU."""

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from apex_native.parallel.syncbn import has_triton
from torch import Tensor


def compute(formula: Callable[..., Tensor], inputs: Tensor, *args: Any) -> Tensor:
    """Return ``formula(inputs, *args)``, compiled on a GPU for which Triton can build kernels."""
    if inputs.is_cuda and has_triton():
        formula = _compiled(formula)
    return formula(inputs, *args)


@cache
def _compiled(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    # torch may set it at import, to a folder in /tmp that another user may own.
    if not folder or Path(folder).parent == Path(tempfile.gettempdir()):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = _cache_folder()
    return torch.compile(formula)


def _cache_folder() -> str:
    """Return a folder of this user for compiled code, which torch unpickles."""
    path = Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
    with suppress(OSError):  # such as a file or a broken link of that name
        path.mkdir(mode=0o700, exist_ok=True)
        if {path.stat().st_uid, path.lstat().st_uid} == {os.getuid()}:
            return str(path)
    return tempfile.mkdtemp(prefix="torchinductor_")
