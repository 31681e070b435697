"""Fixtures that build the package, and its modules beside the template's for tests in place."""

import shutil
import subprocess
import sys
import zipfile
from functools import partial

import pytest
from extras_path import add_extras
from fresh import LEFTOVERS, ROOT, TEMPLATE
from in_fork import run_python
from library_fixtures import *  # noqa: F403

add_extras()

BUILD = "import setuptools.build_meta as backend, sys; print(backend.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """Build the wheel from a copy of what it needs, and return its path."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in (TEMPLATE, ROOT / "packages"):
        ignored = shutil.ignore_patterns(*LEFTOVERS)
        shutil.copytree(folder, source / folder.name, ignore=ignored)
    target = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-c", BUILD, target], cwd=source, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "absent from the `packages`" not in done.stderr, done.stderr
    return target / done.stdout.split()[-1]


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory):
    """Return a folder for PYTHONPATH with the contents of the wheel."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture
def two_package_processes(two_processes):
    """Run functions on two processes that can import ``apex_native.extras``."""

    def run(function, *arguments):
        two_processes(add_extras)
        return two_processes(function, *arguments)

    return run


@pytest.fixture
def run(installed, tmp_path):
    """Run Python without a GPU in tmp_path, where the wheel's contents can be imported."""

    def run(*arguments, path=(), **variables):
        return run_python(tmp_path, *arguments, path=[installed, *path], **variables)

    return run


@pytest.fixture
def run_on_gpu(run):
    """Do what `run` does, with a GPU."""
    return partial(run, CUDA_VISIBLE_DEVICES="0")
