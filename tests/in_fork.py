"""Execution of Python's arguments in a fork, apart from what the tests have imported."""

import multiprocessing
import os
import runpy
import sys

from fresh import TEMPLATE


def execute(tmp_path, arguments, folders):
    """Run the arguments of Python in this process; its output goes to files."""
    os.chdir(tmp_path)
    multiprocessing.process.ORIGINAL_DIR = str(tmp_path)  # of processes that a script spawns
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), number)
    os.environ |= {"PYTHONPATH": os.pathsep.join(folders), "CUDA_VISIBLE_DEVICES": ""}
    sys.path[:] = [*folders, *(folder for folder in sys.path if folder != str(TEMPLATE))]
    try:
        _run(*arguments)
    except Exception:  # multiprocessing would print it in its own way
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def _run(option, *rest):
    if option == "-m":
        sys.argv = list(rest)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif option == "-c":
        code, *sys.argv[1:] = rest
        exec(code, {"__name__": "__main__"})
    else:
        sys.argv = [option, *rest]
        runpy.run_path(option, run_name="__main__")
