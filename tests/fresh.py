"""The template as a fresh clone has it."""

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "{{cookiecutter.project_slug}}"
LEFTOVERS = ("__pycache__", ".*_cache", "*.egg-info", "runs")


def copy_template(folder: Path) -> Path:
    """Copies the template into `folder`, without what working in it leaves behind.

    cookiecutter takes every file that it finds for a part of the template, and fails on caches.
    """
    shutil.copy(ROOT / "cookiecutter.json", folder)
    for name in ("hooks", "{{cookiecutter.project_slug}}"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(*LEFTOVERS))
    return folder
