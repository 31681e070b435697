"""Import this first, and ``import apex`` imports apex_native in the rest of the process.

It is for scripts that other programs start. ``python -m apex_native script.py`` does the same
without a change to the script.
"""

import sys
from types import TracebackType

from apex_native.__main__ import explain, install

_print_error = sys.excepthook


def _explain_and_print(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if isinstance(error, ImportError | AttributeError) and trace is not None:
        explain(error)
    _print_error(kind, error, trace)


install()
sys.excepthook = _explain_and_print
