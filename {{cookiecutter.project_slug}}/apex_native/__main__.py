"""Run a script that was written for Apex, unchanged, on apex_native.

    python -m apex_native old_script.py [its arguments]
    python -m apex_native -m old.package [its arguments]
    torchrun --nproc-per-node 4 -m apex_native old_script.py [its arguments]

``import apex`` then finds this package, in every module that the script imports and in every
process that it starts. A script that takes ``--local_rank`` receives it where the launcher, such
as torchrun, only sets LOCAL_RANK.
"""

import atexit
import importlib.util
import os
import re
import runpy
import sys
import tokenize
import traceback
from pathlib import Path

import torch.distributed as dist

import apex_native.compat  # noqa: F401, the package does not import it

# Modules of Apex that scripts import from, and the modules that hold their names here.
ALIASES = {
    "amp._amp_state": "amp.state",
    "amp.scaler": "amp.state",
    "fp16_utils": "compat",
    "fp16_utils.fp16util": "compat",
    "multi_tensor_apply": "compat",
    "multi_tensor_apply.multi_tensor_apply": "compat",
    "normalization.fused_layer_norm": "normalization",
    "optimizers.fused_adagrad": "optimizers.elementwise",
    "optimizers.fused_adam": "optimizers.elementwise",
    "optimizers.fused_lamb": "optimizers.layerwise",
    "optimizers.fused_novograd": "optimizers.layerwise",
    "optimizers.fused_sgd": "optimizers.elementwise",
    "parallel.optimized_sync_batchnorm": "parallel.syncbn",
    "parallel.sync_batchnorm": "parallel.syncbn",
}

# What to use instead of modules and names of Apex that are missing here.
EQUIVALENTS = {
    "FP16_Optimizer": 'apex.amp.initialize with opt_level="O2"',
    "manual_rms_norm": "torch.nn.functional.rms_norm",
    "amp_C": "torch's _foreach functions",
    "apex.RNN": "torch.nn.LSTM, GRU or RNN",
    "apex.contrib.clip_grad": "torch.nn.utils.clip_grad_norm_",
    "apex.contrib.fmha": "torch.nn.functional.scaled_dot_product_attention",
    "apex.contrib.groupbn": "apex.parallel.SyncBatchNorm",
    "apex.contrib.multihead_attn": "torch.nn.MultiheadAttention",
    "apex.contrib.optimizers": "apex.optimizers or torch.distributed.optim.ZeroRedundancyOptimizer",
    "apex.contrib.xentropy": "torch.nn.functional.cross_entropy",
    "apex.fp16_utils.loss_scaler": "apex.amp.scale_loss",
    "apex.fused_dense": "torch.nn.Linear",
    "apex.mlp": "torch.nn.Sequential of torch.nn.Linear and torch.nn.ReLU",
    "apex.pyprof": "torch.profiler",
    "apex.transformer": "torch.distributed.tensor.parallel",
}

# Importing these fails: kernels of an installed Apex, and a module whose name is not Apex's.
HIDDEN = ("amp_C", "apex_C", "apex.compat")


def install() -> None:
    """Make ``apex`` and its modules names of apex_native's, in place of any Apex installed."""
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "apex_native":
            sys.modules["apex" + name.removeprefix("apex_native")] = module
    for alias, name in ALIASES.items():
        module = sys.modules[f"apex_native.{name}"]
        sys.modules[f"apex.{alias}"] = module
        parent, _, last = f"apex.{alias}".rpartition(".")
        if not hasattr(sys.modules[parent], last):
            setattr(sys.modules[parent], last, module)
        if not hasattr(module, "__path__"):
            # A package, as in Apex; find_spec() raises for names below a module.
            module.__path__ = []  # type: ignore[assignment]
    for name in HIDDEN:
        sys.modules[name] = None  # type: ignore[assignment]
    atexit.register(destroy_process_group)
    # Processes that the script spawns inherit the path and find an `apex` there that calls this.
    sys.path.insert(0, str(Path(__file__).with_name("_spawned")))


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
    for name, equivalent in EQUIVALENTS.items():
        if re.search(rf"\b{re.escape(name)}\b", text):
            message = f"{error}: apex_native does not have {name}; use {equivalent}"
            error.args = (message,)
            if isinstance(error, ImportError):
                error.msg = message
            return


def local_rank_arguments(script: Path, arguments: list[str]) -> list[str]:
    """Return ``--local_rank`` as `script` spells it, if it takes it and was not given it."""
    with tokenize.open(script) as file:  # in the encoding that its first lines may name
        flag = re.search(r"""["'](--local[_-]rank)["']""", file.read())
    given = any(re.match("--local[_-]rank", argument) for argument in arguments)
    if flag is None or given or "LOCAL_RANK" not in os.environ:
        return []
    return [f"{flag[1]}={os.environ['LOCAL_RANK']}"]


def run(name: str, arguments: list[str], is_module: bool) -> None:
    """Run the script or the module `name` as ``python`` or ``python -m`` does."""
    if is_module:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        source = Path(spec.origin) if spec and spec.origin else Path(__file__)
        sys.argv = [name, *local_rank_arguments(source, arguments), *arguments]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [name, *local_rank_arguments(Path(name), arguments), *arguments]
        sys.path.insert(0, str(Path(name).parent))
        runpy.run_path(name, run_name="__main__")


def main() -> None:
    """Run the script or the module that the command line names."""
    passed = re.fullmatch(r"--local[_-]rank=(\d+)", "".join(sys.argv[1:2]))
    if passed:  # by torch.distributed.launch, which puts it before the script's name
        os.environ.setdefault("LOCAL_RANK", passed[1])
        del sys.argv[1]
    is_module = sys.argv[1:2] == ["-m"] and len(sys.argv) > 2
    if not is_module and (len(sys.argv) < 2 or not Path(sys.argv[1]).is_file()):
        sys.exit("usage: python -m apex_native SCRIPT.py [its arguments], or -m MODULE")
    install()
    try:
        name, *arguments = sys.argv[2:] if is_module else sys.argv[1:]
        run(name, arguments, is_module)
    except (ImportError, AttributeError) as error:
        explain(error)
        raise


if __name__ == "__main__":
    main()
