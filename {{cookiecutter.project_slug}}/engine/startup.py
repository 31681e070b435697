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
# Not in a debugger or another program that runs the script, which would be restarted, too.
options, command = sys.orig_argv[1 : -len(sys.argv)], sys.orig_argv[-len(sys.argv) :]
is_direct = command == sys.argv and all(option.startswith("-") for option in options)
if is_own and is_direct and "PYTHONHASHSEED" not in os.environ:
    os.environ["PYTHONHASHSEED"] = "0"  # as run.sh does; Python reads it when it starts
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

from engine.data import seed_everything  # noqa: E402, after the restart: torch takes seconds

if is_own:
    seed_everything(0)
