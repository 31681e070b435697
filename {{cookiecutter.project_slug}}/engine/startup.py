"""Fixed hash seed and random seed, before task.py is imported.

main.py and predict.py import this first: task.py may take the order of words from a set, or draw
random numbers, when it is imported. These must be the same in all processes, restarts and programs.
"""

import os
import sys
from pathlib import Path

from engine import PROJECT

script = getattr(sys.modules["__main__"], "__file__", None)
is_own = script and Path(script).resolve() in (PROJECT / "main.py", PROJECT / "predict.py")
# A debugger, or a notebook's %run, would be restarted, too.
is_alone = sys.gettrace() is None and {"bdb", "pydevd", "IPython"}.isdisjoint(sys.modules)
if is_own and is_alone and "PYTHONHASHSEED" not in os.environ:
    os.environ["PYTHONHASHSEED"] = "0"  # as run.sh does; Python reads it when it starts
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

from engine.data import seed_everything  # noqa: E402, after the restart: torch takes seconds

if is_own:
    seed_everything(0)
