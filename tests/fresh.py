"""Copies of the template as a fresh clone has it, and default flags of the classification task."""

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "{{cookiecutter.project_slug}}"
UNCHANGED = {
    "class_weights": False,
    "mixup": 0.0,
    "cutmix": 0.0,
    "random_erasing": 0.0,
    "auto_augment": None,
    "image_size": None,
    "hflip": 0.5,
    "model_options": {},
    "skip_broken": 0,
}  # the flags of training samples of the task classification, by default
LEFTOVERS = ("__pycache__", ".*_cache", "*.egg-info", "runs")


def copy_template(folder: Path) -> Path:
    """Copy the template into `folder`, without what working in it leaves behind.

    cookiecutter takes every file that it finds for a part of the template, and fails on caches.
    """
    shutil.copy(ROOT / "cookiecutter.json", folder)
    for name in ("hooks", "{{cookiecutter.project_slug}}"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(*LEFTOVERS))
    return folder
