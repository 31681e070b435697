"""The package as the wheel has it, in place: one package of two folders."""

import importlib
from typing import Any

import apex_native
from fresh import ROOT

EXTRAS = str(ROOT / "packages" / "apex_native")


def add_extras() -> None:
    """Let this process import ``apex_native.extras``."""
    if EXTRAS not in apex_native.__path__:
        apex_native.__path__.append(EXTRAS)


def find_in_native(module: str, name: str) -> Any:
    """Return what apex_native has in the place of a name of Apex."""
    add_extras()
    from apex_native.extras.covered import COVERED

    *_, own = [key for key, names in COVERED[module].items() if name in names.split()]
    return getattr(importlib.import_module(f"apex_native.{own}"), name)
