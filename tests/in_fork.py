"""Execution of Python's arguments in a fork, apart from what the tests have imported."""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile

from fresh import TEMPLATE
from processes import fork_server


def run_python(folder, *arguments, path, **variables):
    """Run Python with these arguments in `folder`; return its status and what it printed.

    It is a fork of a process that has imported torch, which saves seconds. The folders of `path`
    are its PYTHONPATH, and `variables` are added to its environment.
    """
    path = [str(entry) for entry in path]
    process = fork_server().Process(target=_execute, args=(folder, arguments, path, variables))
    process.start()
    process.join(120)
    process.kill()
    said = [(folder / name).read_text() for name in ("stdout", "stderr")]
    return subprocess.CompletedProcess(arguments, process.exitcode, *said)


def _execute(folder, arguments, path, variables):
    """Run the arguments of Python in this process; its output goes to files."""
    os.chdir(folder)
    multiprocessing.process.ORIGINAL_DIR = str(folder)  # of processes that a script spawns
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), number)
    tempfile.tempdir = None  # TMPDIR may be another one
    os.environ |= {"PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": "", **variables}
    others = [entry for entry in sys.path if entry != str(TEMPLATE)]
    sys.path[:] = [str(folder), *path, *others]
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
