"""The package as the wheel has it, in place: one package of two folders."""

import apex_native
from fresh import ROOT

EXTRAS = str(ROOT / "packages" / "apex_native")


def add_extras() -> None:
    """Let this process import ``apex_native.extras``."""
    if EXTRAS not in apex_native.__path__:
        apex_native.__path__.append(EXTRAS)
