"""Runs a script that was written for Apex, unchanged, on apex_native.

    python -m apex_native old_script.py [its arguments]
    python -m apex_native -m old.package [its arguments]
    torchrun --nproc-per-node 4 -m apex_native old_script.py [its arguments]

``import apex`` then finds this package, in every module that the script imports and in every
process that it starts. A script that takes ``--local_rank`` is given it where the launcher, as
torchrun, only sets LOCAL_RANK.
"""

import importlib.util
import os
import pkgutil
import re
import runpy
import sys
import tokenize
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import apex_native

ALIASES = {
    "amp._amp_state": "amp._state",
    "fp16_utils.fp16util": "fp16_utils",
    "multi_tensor_apply.multi_tensor_apply": "multi_tensor_apply",
    "normalization.fused_layer_norm": "normalization",
    "parallel.optimized_sync_batchnorm": "parallel.sync_batchnorm",
}
"""Modules of Apex that scripts import from, and the modules that hold their names here."""

INSTEAD = {"FP16_Optimizer": 'amp.initialize with opt_level="O2"'}


class Refuser:
    """An import finder that says of an ``apex.…`` what there is instead of it."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raises ModuleNotFoundError for modules of Apex; all others are not its business."""
        if name in ("amp_C", "apex_C"):
            raise ModuleNotFoundError(
                f"{name} holds Apex's kernels, which apex_native does without; the nearest thing "
                "there is torch's _foreach functions",
                name=name,
            )
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
        if not module.name.rpartition(".")[2].startswith("_"):
            importlib.import_module(module.name)
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "apex_native":
            sys.modules["apex" + name.removeprefix("apex_native")] = module
    for alias, name in ALIASES.items():
        sys.modules[f"apex.{alias}"] = module = sys.modules[f"apex.{name}"]
        parent, _, last = alias.rpartition(".")
        if not hasattr(sys.modules[f"apex.{parent}"], last):
            setattr(sys.modules[f"apex.{parent}"], last, module)
        if not hasattr(module, "__path__"):
            module.__path__ = []  # a package, as in Apex: what it lacks is the Refuser's to say
    sys.meta_path.insert(0, Refuser)
    # Processes that the script spawns take over the path, and find an `apex` there that calls this.
    sys.path.insert(0, str(Path(__file__).with_name("_spawned")))


def explain(error: ImportError | AttributeError) -> None:
    """Adds to the error about a missing name of this package what there is instead of it."""
    missing = (
        r"name '(?P<name>\w+)' from '(?P<module>apex_native[\w.]*)'",
        r"module '(?P<module>apex_native[\w.]*)' has no attribute '(?P<name>\w+)'",
    )
    found = next(filter(None, (re.search(pattern, str(error)) for pattern in missing)), None)
    if found:
        module, name = found["module"], found["name"]
        names = vars(sys.modules[module]).items()
        public = [
            known
            for known, value in names
            if not known.startswith("_") and not isinstance(value, ModuleType)
        ]
        nearest = INSTEAD.get(name) or get_close_matches(name, public, n=1, cutoff=0.0)[0]
        text = f"{module} has no {name}; the nearest thing there is {nearest}"
        error.args = (text,)
        if isinstance(error, ImportError):
            error.msg = text


def local_rank_for(script: Path, arguments: list[str]) -> list[str]:
    """The ``--local_rank`` that `script` takes, was not given, and the environment knows."""
    with tokenize.open(script) as file:  # in the encoding that its first lines may name
        flag = re.search(r"""["'](--local[_-]rank)["']""", file.read())
    given = any(re.match("--local[_-]rank", argument) for argument in arguments)
    if flag is None or given or "LOCAL_RANK" not in os.environ:
        return []
    return [f"{flag[1]}={os.environ['LOCAL_RANK']}"]


def main() -> None:
    """Runs the script or the module that the command line names."""
    passed = re.fullmatch(r"--local[_-]rank=(\d+)", "".join(sys.argv[1:2]))
    if passed:  # by torch.distributed.launch, which puts it before the script's name
        os.environ.setdefault("LOCAL_RANK", passed[1])
        del sys.argv[1]
    is_module = sys.argv[1:2] == ["-m"] and len(sys.argv) > 2
    if not is_module and (len(sys.argv) < 2 or not Path(sys.argv[1]).is_file()):
        sys.exit("usage: python -m apex_native SCRIPT.py [its arguments], or -m MODULE")
    install()
    try:
        if is_module:
            name, arguments = sys.argv[2], sys.argv[3:]
            spec = importlib.util.find_spec(name) or importlib.util.find_spec(f"{name}.__main__")
            source = Path(spec.origin) if spec and spec.origin else Path(__file__)
            sys.argv = [name, *local_rank_for(source, arguments), *arguments]
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            script, arguments = Path(sys.argv[1]), sys.argv[2:]
            sys.argv = [str(script), *local_rank_for(script, arguments), *arguments]
            sys.path.insert(0, str(script.parent))
            runpy.run_path(str(script), run_name="__main__")
    except (ImportError, AttributeError) as error:
        explain(error)
        raise


if __name__ == "__main__":
    main()
