"""Formulas that are compiled where there is a GPU."""

from collections.abc import Callable
from functools import cache
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
    return torch.compile(formula)
