"""Import of a generated project's scripts into the process of a test."""

import importlib.util
import sys
from collections.abc import Sized
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from engine.backend import load_backend
from torch import nn

SCRIPTS = ("task", "main", "predict")  # in the order in which one imports another


@dataclass(frozen=True)
class Project:
    """The scripts of a generated project as modules.

    They import the libraries where they stand in the template, of which a project has copies.
    """

    folder: Path
    task: ModuleType
    main: ModuleType
    predict: ModuleType


_loaded: dict[Path, Project] = {}


def load_project(folder: str | Path) -> Project:
    """Return the scripts of the project in `folder`, imported once in each process.

    They are entered into ``sys.modules`` in the place of another project's.
    """
    folder = Path(folder).resolve()
    if folder not in _loaded:
        _loaded[folder] = Project(folder, **{name: _import(folder, name) for name in SCRIPTS})
    for name in SCRIPTS:
        sys.modules[name] = getattr(_loaded[folder], name)
    return _loaded[folder]


def evaluate(
    project: Project, model: nn.Module, metrics: object, batches: Sized
) -> dict[str, float]:
    """Return main.evaluate's results for a model without an average, on the CPU."""
    run = SimpleNamespace(
        backend=load_backend("native", "O0"),
        eval_models={"": model},
        metrics={"": metrics},
        device=torch.device("cpu"),
        memory_format=torch.contiguous_format,
        watchdog=SimpleNamespace(
            watch=lambda batches, _: batches, enter=lambda _: None, leave=lambda: None
        ),
        checkpoints=SimpleNamespace(until_stopped=lambda batches: batches),
        logger=SimpleNamespace(
            progress_bar=lambda batches, *_: batches,
            agree_on=lambda results: results,
        ),
    )
    return project.main.evaluate(run, batches)


def _import(folder: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
