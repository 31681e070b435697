"""Parameters of which make test runs the first ones, and make slow the others."""

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(values: Iterable[Any], fast: int = 1) -> list[Any]:
    """Return `values` for parametrize, those after the first `fast` with the mark slow.

    A tuple has the values of several arguments.
    """
    listed = list(values)
    return listed[:fast] + [_slow(one) for one in listed[fast:]]


def _slow(one: Any) -> Any:
    if isinstance(one, type(pytest.param())):
        return pytest.param(*one.values, id=one.id, marks=[*one.marks, pytest.mark.slow])
    return pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.slow)
