"""Refuse answers that cannot become a project, before any of its files is written.

A refusal is one sentence that names the answer to change. cookiecutter has made the project's
folder by now, and takes it away again when this script fails.
"""

import sys

# cookiecutter runs a copy of this in the folder for temporary files, where others may put modules.
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]

import json
import re
from itertools import chain

# JSON inside a raw string is the one way in: nothing typed can end the string or be run.
ANSWERS = json.loads(
    r"""
{{ cookiecutter | tojson }}
"""
)

# As in cookiecutter.json, which checks what is typed, but not what a replay file says.
CHOICES = {
    "task": ("classification", "segmentation", "contrastive"),
    "opt_level": ("O1", "O0", "O2", "O3", "O4", "O5"),
    "ddp": ("apex", "torch", "fsdp", "dataparallel"),
    "backend": ("auto", "apex", "native"),
    "cluster": ("none", "slurm", "kubernetes"),
    "license": ("MIT", "BSD-3-Clause", "Apache-2.0", "none"),
}
# Before 2.7, cookiecutter hands on a yes or no from the command line as the word that it was.
YES, NO = ("1", "true", "t", "yes", "y", "on"), ("0", "false", "f", "no", "n", "off")
# A folder of such a name can be imported in place of the module, and pip would take a distribution
# of such a name for the one that the project needs.
TAKEN = {
    *sys.stdlib_module_names,
    *("apex", "apex_native", "data", "engine", "launch", "main", "predict"),
    *("recipes", "task", "tests"),
    *("torch", "torchvision", "torchcodec", "triton", "numpy", "pil", "pillow", "tqdm"),
    *("tensorboard", "mlflow", "wandb", "trackio", "matplotlib", "torchmetrics", "sklearn"),
    *("segmentation_models_pytorch", "timm", "onnxruntime", "onnxscript", "aiohttp", "fsspec"),
    *("pytest", "ruff", "pip", "setuptools", "wheel", "cookiecutter", "jinja2"),
}


def refused_names():
    """Yield why a project cannot have this name."""
    slug = str(ANSWERS["project_slug"])
    # The length keeps lines of code that hold it from growing too long.
    if not re.fullmatch("[A-Za-z]([A-Za-z0-9_-]{0,58}[A-Za-z0-9])?", slug):
        yield (
            f"project_slug cannot be {slug!a}: it names a folder and a Python distribution, so"
            " choose up to 60 letters a to z, digits, _ and -, of which the first is a letter and"
            " the last a letter or a digit."
        )
    # As pip compares names: Py-Torch, py_torch and py--torch are one.
    if re.sub("[-_]+", "_", slug.lower()) in TAKEN:
        yield (
            f"project_slug cannot be {slug!a}: it would hide the Python module or package of that"
            f" name, so choose another, such as 'my_{slug}'."
        )


def refused_answers():
    """Yield why a single answer is invalid."""
    for name, choices in CHOICES.items():
        if ANSWERS[name] not in choices:
            yield f"{name} cannot be {ANSWERS[name]!a}: choose one of {', '.join(choices)}."
    for name in ("fused_adam", "sync_bn"):
        if str(ANSWERS[name]).lower() not in YES + NO:
            yield f"{name} cannot be {ANSWERS[name]!a}: answer yes or no."


def refused_combinations():
    """Yield why answers cannot go together."""
    if ANSWERS["opt_level"] in ("O4", "O5") and ANSWERS["backend"] == "apex":
        yield (
            f"opt_level {ANSWERS['opt_level']} does not exist in NVIDIA's Apex: set backend to auto"
            " or native, or opt_level to O0, O1, O2 or O3."
        )
    if ANSWERS["ddp"] == "fsdp":
        yield from refused_with_fsdp()
    if ANSWERS["ddp"] == "dataparallel":
        yield from refused_with_dataparallel()


def refused_with_fsdp():
    """Yield why answers cannot go with ddp fsdp."""
    if ANSWERS["opt_level"] not in ("O0", "O4", "O5"):
        yield (
            f"opt_level {ANSWERS['opt_level']} cannot go with ddp fsdp, whose sharded gradients"
            " have no loss scale, which fp16 needs: set opt_level to O4 or O5, which compute in"
            " bf16, or to O0, or ddp to apex or torch."
        )
    if ANSWERS["backend"] == "apex":
        yield (
            "backend apex cannot go with ddp fsdp, whose sharded parameters Apex's kernels do"
            " not take: set backend to auto or native, or ddp to apex or torch."
        )


def refused_with_dataparallel():
    """Yield why answers cannot go with ddp dataparallel."""
    if str(ANSWERS["sync_bn"]).lower() not in NO:
        yield (
            "sync_bn cannot go with ddp dataparallel, whose copies of a model normalise each on"
            " its own: set sync_bn to no, or ddp to apex or torch."
        )
    if ANSWERS["cluster"] != "none":
        yield (
            f"cluster {ANSWERS['cluster']} cannot go with ddp dataparallel, which stays on one"
            " machine: set cluster to none, or ddp to apex or torch."
        )
    if ANSWERS["backend"] == "apex":
        yield (
            "backend apex cannot go with ddp dataparallel, whose copies of a model would all"
            " run on the first GPU: set backend to auto or native, or ddp to apex or torch."
        )
    if ANSWERS["opt_level"] == "O4":
        yield (
            "opt_level O4 cannot go with ddp dataparallel, whose threads its casts do not"
            " reach: set opt_level to O5, which is bf16 too, or ddp to apex or torch."
        )


def refused_texts():
    """Yield why a text cannot be written to a file."""
    for name in ("project_name", "description", "author_name"):
        # Half of a surrogate pair: what is left of a byte that was not UTF-8. No file holds it.
        if half := re.search("[\ud800-\udfff]", str(ANSWERS[name])):
            yield (
                f"{name} holds {half[0]!a}, which is half a character and cannot be written to a"
                " file: type it again without."
            )


REFUSALS = (refused_names, refused_answers, refused_combinations, refused_texts)
sys.exit(next(chain.from_iterable(refused() for refused in REFUSALS), None))
