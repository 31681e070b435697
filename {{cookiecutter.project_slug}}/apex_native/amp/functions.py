"""Casts for functions of the user's own: as decorators, or registered before ``initialize``."""

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ._state import _amp_state, casts_are_on, disable_casts
from .models import cast_tensors

_registered: list[tuple[object, str, Callable]] = []


def half_function(function: Callable) -> Callable:
    """Makes `function` run on half tensors at O1 (bfloat16 at O4), and unchanged elsewhere.

    Inside, casts are off: what the function was given decides. The same holds for the other three.
    """
    return _cast(function, lambda _: _amp_state.opt_properties.function_type)


def bfloat16_function(function: Callable) -> Callable:
    """Makes `function` run on bfloat16 tensors at O1 and O4 (a name of ROCm's fork)."""
    return _cast(function, lambda _: torch.bfloat16)


def float_function(function: Callable) -> Callable:
    """Makes `function` run on fp32 tensors at O1 and O4."""
    return _cast(function, lambda _: torch.float32)


def promote_function(function: Callable) -> Callable:
    """Makes `function` run on the widest type among its floating-point tensors at O1 and O4."""
    return _cast(function, _widest)


def register_half_function(module: object, name: str) -> None:
    """Makes ``module.name`` a half_function at ``initialize``. Raises ValueError if missing."""
    _register(module, name, half_function)


def register_bfloat16_function(module: object, name: str) -> None:
    """As register_half_function, for bfloat16_function."""
    _register(module, name, bfloat16_function)


def register_float_function(module: object, name: str) -> None:
    """As register_half_function, for float_function."""
    _register(module, name, float_function)


def register_promote_function(module: object, name: str) -> None:
    """As register_half_function, for promote_function."""
    _register(module, name, promote_function)


def apply_registered() -> None:
    """Puts the registered casts in place, for good: they do nothing while casts are off."""
    while _registered:
        module, name, decorate = _registered.pop()
        setattr(module, name, decorate(getattr(module, name)))


def _register(module: object, name: str, decorate: Callable) -> None:
    if not hasattr(module, name):
        raise ValueError(f"There is no function {name} in {module}.")
    _registered.append((module, name, decorate))


def _cast(function: Callable, dtype_for: Callable[[tuple], torch.dtype]) -> Callable:
    @functools.wraps(function)
    def wrapper(*args: object, **kwargs: object) -> object:
        if not casts_are_on():
            return function(*args, **kwargs)
        dtype = dtype_for((args, tuple(kwargs.values())))
        with disable_casts():
            return function(*cast_tensors(args, dtype), **cast_tensors(kwargs, dtype))

    return wrapper


def _widest(values: object) -> torch.dtype:
    """The type that all floating-point tensors in nested lists and tuples promote to."""
    types = list(_floating_types(values)) or [torch.float32]
    return functools.reduce(torch.promote_types, types)


def _floating_types(values: object) -> Iterator[torch.dtype]:
    if isinstance(values, Tensor):
        if values.is_floating_point():
            yield values.dtype
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _floating_types(value)
