"""Runs a script that was written for Apex, unchanged, on apex_native.

    python -m apex_native old_script.py [its arguments]
    torchrun --nproc-per-node 4 -m apex_native old_script.py [its arguments]

``import apex`` then finds this package, in every module that the script imports. A script that
takes ``--local_rank`` is given it where the launcher, as torchrun, only sets LOCAL_RANK.
"""

import importlib
import os
import pkgutil
import re
import runpy
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import apex_native


class Refuser:
    """An import finder that says of an ``apex.…`` what there is instead of it."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raises ModuleNotFoundError for modules of Apex; all others are not its business."""
        if not name.startswith("apex."):
            return None
        there = [known for known in sys.modules if known.startswith("apex.")]
        nearest = get_close_matches(name, there, n=1, cutoff=0.0)[0]
        raise ModuleNotFoundError(
            f"{name} is not in apex_native; the nearest thing there is {nearest}", name=name
        )


def install() -> None:
    """Makes ``apex`` and its modules names of apex_native's, in place of any Apex installed."""
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]
    for module in pkgutil.walk_packages(apex_native.__path__, "apex_native."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "apex_native":
            sys.modules["apex" + name.removeprefix("apex_native")] = module
    sys.meta_path.insert(0, Refuser)


def local_rank_for(script: Path, arguments: list[str]) -> list[str]:
    """The ``--local_rank`` that `script` takes, was not given, and the environment knows."""
    flag = re.search(r"""["'](--local[_-]rank)["']""", script.read_text(encoding="utf-8"))
    given = any(re.match("--local[_-]rank", argument) for argument in arguments)
    if flag is None or given or "LOCAL_RANK" not in os.environ:
        return []
    return [f"{flag[1]}={os.environ['LOCAL_RANK']}"]


def main() -> None:
    """Runs the script that the command line names."""
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        sys.exit("usage: python -m apex_native SCRIPT.py [its arguments]")
    script = Path(sys.argv[1])
    arguments = sys.argv[2:]
    sys.argv = [str(script), *local_rank_for(script, arguments), *arguments]
    sys.path.insert(0, str(script.parent))
    install()
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
