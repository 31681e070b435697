"""Fixtures of the tests that run a generated project's scripts in their own process."""

import pytest
from library_fixtures import (  # noqa: F401
    fresh,
    pytest_runtest_setup,
    two_gpus,
    two_processes,
)
from processes import Processes
from projects import Project, load_project

TASKS = ("classification", "segmentation", "contrastive")


@pytest.fixture(params=TASKS)
def generated(request: pytest.FixtureRequest, shared_project) -> Project:
    """The scripts of a project of each task with the default answers."""
    return load_project(shared_project(task=request.param))


@pytest.fixture(scope="session", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def processes(request: pytest.FixtureRequest):
    """Two and three processes over gloo, on the CPU."""
    processes = Processes("gloo", request.param)
    yield processes
    processes.stop()
