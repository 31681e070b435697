"""Run a script that was written for Apex, unchanged, on apex_native.

    python -m apex_native [--fill] old_script.py [its arguments]
    python -m apex_native [--fill] -m old.package [its arguments]
    torchrun --nproc-per-node 4 -m apex_native old_script.py [its arguments]

`import apex` then finds this package, in every module that the script imports and in processes
that it starts by `multiprocessing`. --fill (of the package apex-native) keeps an installed Apex,
and adds only the names that it lacks. --local_rank is passed to scripts that accept it, if the
launcher sets only LOCAL_RANK, as torchrun does.
"""

import atexit
import importlib.util
import os
import re
import runpy
import sys
import traceback
import zipfile
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

import apex_native.compat  # noqa: F401, the package does not import it

# Modules here, and the modules of Apex that scripts import their names from.
ALIASES = {
    "amp": "amp.amp",
    "amp.state": "amp._amp_state amp.scaler",
    "compat": "fp16_utils fp16_utils.fp16util multi_tensor_apply",
    "normalization": "normalization.fused_layer_norm",
    "optimizers.elementwise": "optimizers.fused_adagrad optimizers.fused_adam optimizers.fused_sgd",
    "optimizers.layerwise": "optimizers.fused_lamb optimizers.fused_novograd",
    "parallel.syncbn": "parallel.optimized_sync_batchnorm parallel.sync_batchnorm",
}

# The installable package has more of Apex, in `extras`, than this folder by itself.
EXTRAS, URL = "apex_native.extras", "git+https://github.com/org/ddp-apex-template"
HAS_EXTRAS = importlib.util.find_spec(EXTRAS) is not None
# Processes that the script spawns inherit the path and find an `apex` there that calls install().
SPAWNED = str(Path(__file__).with_name("_spawned"))
# The dots, the module and the names of an import, but for Apex's.
IMPORTS = re.compile(
    r"^[ \t]*(?!\w+[ \t]+apex\b)(?:from[ \t]+(\.*)([\w.]*)[ \t]*)?import\b(\s*\([^)]*\)|.*)", re.M
)

# What to use instead of names of Apex, given as patterns, that only the installable package has,
PACKAGED = {
    r"FP16_?\w+|(Dynamic)?LossScaler|convert_module": 'apex.amp.initialize with opt_level="O2"',
    r"FusedMixedPrecisionLamb|contrib\.optimizers\.(\w+\.)?FusedAdam": "apex.optimizers",
    r"\w*(layer|rms)_norm\w*": "torch.nn.functional.layer_norm or rms_norm",
    r"amp_C|apex_C|MultiTensorApply": "torch's _foreach functions",
    r"(apply_)?flat_dist_call|(un)?flatten|split_by_type": "torch.distributed.all_reduce",
    r"apex\.amp\.(amp\.)?(init|opt)": 'apex.amp.initialize with opt_level="O1"',
    r"amp\.lists": "apex.amp.register_half_function or register_float_function",
    r"apex\.contrib\.clip_grad": "torch.nn.utils.clip_grad_norm_",
    r"apex\.contrib\.(focal_loss|xentropy)": "torch.nn.functional.cross_entropy",
    r"apex\.contrib\.(group_norm|multihead_attn)": "torch.nn.GroupNorm or MultiheadAttention",
    r"contrib\.optimizers\.distributed_\w+": "torch.distributed.optim.ZeroRedundancyOptimizer",
    r"apex\.(fused_dense|mlp)": "torch.nn.Sequential of torch.nn.Linear and an activation",
    r"transformer\.(amp|enums|\w+Type|layers|microbatches|parallel_state|\w+\.utils|"
    r"functional\.(fused_softmax|FusedScaleMaskSoftmax))": "Megatron-LM",
}
# and of names that it lacks too.
EQUIVALENTS = {
    r"apex\.RNN": "torch.nn.LSTM, GRU or RNN",
    r"apex\.contrib\.fmha": "torch.nn.functional.scaled_dot_product_attention",
    r"apex\.contrib\.groupbn": "apex.parallel.SyncBatchNorm",
    r"apex\.contrib\.optimizers(\.\w+)*": "torch.distributed.optim.ZeroRedundancyOptimizer",
    r"apex\.pyprof": "torch.profiler",
    r"apex\.transformer(\.\w+)*": "torch.distributed.tensor.parallel",
}


def install() -> None:
    """Make ``apex`` and its modules names of apex_native's, in place of any Apex installed."""
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "apex_native":
            sys.modules["apex" + name.removeprefix("apex_native")] = module
    for name, aliases in ALIASES.items():
        for alias in aliases.split():
            add_module(f"apex.{alias}", sys.modules[f"apex_native.{name}"])
    for name in ("amp_C", "apex_C", "apex.compat"):  # an installed Apex's, and a name of ours
        sys.modules[name] = None  # type: ignore[assignment]
    atexit.register(destroy_process_group)
    sys.path.insert(0, SPAWNED)
    if HAS_EXTRAS:
        importlib.import_module(EXTRAS).install()
    elif "APEX_NATIVE_FILL" in os.environ:
        sys.exit(f"--fill needs the installable package: pip install {URL}")


def add_module(name: str, module: ModuleType) -> None:
    """Make `module` importable as `name`."""
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent and isinstance(getattr(sys.modules[parent], last, module), ModuleType):
        setattr(sys.modules[parent], last, module)
    if not hasattr(module, "__path__"):
        module.__path__ = []  # a package, as in Apex; find_spec() raises for names below a module


def destroy_process_group() -> None:
    """Destroy the process group, if the script left it open and did not fail."""
    failed = hasattr(sys, "last_value")  # operations may be pending, which this would wait for
    if dist.is_available() and dist.is_initialized() and not failed:
        dist.destroy_process_group()


def explain(error: ImportError | AttributeError) -> None:
    """Add torch's equivalent to the message about a missing name of Apex, where one is known."""
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""  # has all of the name
    text = f"{error} {line}".replace("apex_native", "apex")
    text = re.sub(r"cannot import name '(\w+)' from '([\w.]+)'", r"\2.\1", text)
    text = re.sub(r"module '([\w.]+)' has no attribute '(\w+)'", r"\1.\2", text)
    text = re.sub(r"from +([\w.]+) +import +\(?", r"\1.", text)
    for pattern, equivalent in (EQUIVALENTS if HAS_EXTRAS else PACKAGED | EQUIVALENTS).items():
        if match := re.search(rf"\b({pattern})\b", text):
            message = f"{error}: apex_native does not have {match[0]}; use {equivalent}"
            if pattern in PACKAGED:
                message += f", or install the package, which has it: pip install {URL}"
            error.args = (message,)
            if isinstance(error, ImportError):
                error.msg = message
            return


def imported_files(text: str, path: str, folder: str) -> Iterator[str]:
    """Yield files that `text`, of the module at `path`, imports from `folder` or its package."""
    for dots, module, names in IMPORTS.findall(text):
        start = os.path.normpath(os.path.join(path, "../" * len(dots))) if dots else folder
        for name in re.findall(r"[\w.]+", names):
            parts = f"{module}.{name}".strip(".").split(".")
            for stem in list(accumulate(parts, os.path.join, initial=start))[1:]:
                yield from filter(os.path.isfile, (f"{stem}.py", f"{stem}/__init__.py"))


def local_rank_arguments(script: str, folder: str, arguments: list[str]) -> list[str]:
    """Return ``--local_rank`` as the script or its imports from `folder` spell it, if not given."""
    given = any(re.match("--local[_-]rank", argument) for argument in arguments)
    if given or "LOCAL_RANK" not in os.environ or not os.path.isfile(script):
        return []
    files = [os.path.abspath(script)]
    for path in files:  # to which the loop adds
        text = Path(path).read_text("latin-1")
        # Not where it is compared. In compiled code, a text of 12 characters follows its length.
        if flag := re.search(r"(?<!with\()(?<!== )[\x22'\x0c](--local[_-]rank)(?![= ]|. in)", text):
            break
        files += sorted(set(imported_files(text, path, folder)).difference(files))
    rank = os.environ["LOCAL_RANK"]
    if rank == "0":
        found = f"{path} has it" if flag else f"neither {script} nor modules it imports have it"
        sys.stderr.write(f"apex_native: {'passed' if flag else 'no'} --local_rank: {found}\n")
    return [f"{flag[1]}={rank}"] if flag else []


def run_module(name: str, arguments: list[str]) -> None:
    """Run the module `name` as ``python -m`` does."""
    module = name
    if os.getcwd() not in sys.path and not getattr(sys.flags, "safe_path", False):
        sys.path.insert(1, os.getcwd())  # as ``-m`` does, but not an installed command
    try:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            module = f"{name}.__main__"
            spec = importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # an import in the package
            raise
        spec = None
    if spec is None or spec.origin is None:
        sys.stderr.write(f"no module {module}\n")
        sys.exit(2)
    sys.argv = [name, *local_rank_arguments(spec.origin, os.getcwd(), arguments), *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def run_script(name: str, arguments: list[str]) -> None:
    """Run the script `name` as ``python`` does."""
    folder = os.path.dirname(os.path.realpath(name))
    sys.argv = [name, *local_rank_arguments(name, folder, arguments), *arguments]
    if os.getcwd() in sys.path:  # which ``-m`` has put before all others, unlike a script's run
        sys.path.remove(os.getcwd())
        sys.path.append(os.getcwd())  # where this package may be, for spawned processes
    # First, as scripts expect, but for an `apex` in it, which spawned processes would import.
    has_apex = os.path.isfile(os.path.join(folder, "apex", "__init__.py"))
    sys.path.insert(int(has_apex), folder)
    path = os.path.abspath(name)  # valid also after the script changes the working directory
    if path.endswith(".pyc") or zipfile.is_zipfile(path):  # which Python runs, too
        runpy.run_path(path, run_name="__main__")
        return
    # runpy would make sys.argv[0] absolute as well, which stays as it was given.
    main = ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(main))


def main() -> None:
    """Run the script or the module that the command line names."""
    if passed := re.fullmatch(r"--local[_-]rank=(\d+)", "".join(sys.argv[1:2])):
        # By torch.distributed.launch, which puts it before the script's name.
        os.environ.setdefault("LOCAL_RANK", passed[1])
        del sys.argv[1]
    if sys.argv[1:2] == ["--fill"]:
        os.environ["APEX_NATIVE_FILL"] = sys.argv.pop(1)  # for the script's own processes, too
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(__doc__)
        sys.exit()
    is_module = sys.argv[1:2] == ["-m"] and len(sys.argv) > 2
    if not is_module and (len(sys.argv) < 2 or not Path(sys.argv[1]).is_file()):
        sys.stderr.write("".join(f"no file {name}\n" for name in sys.argv[1:2] if name[:1] != "-"))
        sys.stderr.write("usage: python -m apex_native [--fill] SCRIPT.py|-m MODULE [arguments]\n")
        sys.exit(2)
    install()
    try:
        if is_module:
            run_module(sys.argv[2], sys.argv[3:])
        else:
            run_script(sys.argv[1], sys.argv[2:])
    except (ImportError, AttributeError) as error:
        explain(error)
        raise


if __name__ == "__main__":
    main()
