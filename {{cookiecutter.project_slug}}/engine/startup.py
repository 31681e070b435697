"""The same start of all processes, of resumed runs, and of predict.py.

main.py and predict.py import this before anything else: task.py may order words by a set, or draw
random numbers, when it is imported.
"""

import os
import sys
from pathlib import Path

from engine import PROJECT

script = getattr(sys.modules["__main__"], "__file__", None)
is_own = script and Path(script).resolve() in (PROJECT / "main.py", PROJECT / "predict.py")
if is_own and "IPython" not in sys.modules and "PYTHONHASHSEED" not in os.environ:
    os.environ["PYTHONHASHSEED"] = "0"  # as run.sh does; Python reads it when it starts
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

from engine.data import seed_everything  # noqa: E402, torch is not imported twice

seed_everything(0)
