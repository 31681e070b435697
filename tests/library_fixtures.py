"""Fixtures that all library tests share."""

from collections.abc import Iterator

import pytest
import torch
from processes import Processes, begin_afresh

torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that are marked ``gpu`` or ``gpu(2)`` where there are fewer."""
    for mark in item.iter_markers("gpu"):
        needed = mark.args[0] if mark.args else 1
        if torch.cuda.device_count() < needed:
            pytest.skip(f"needs {needed} CUDA GPU{'s' * (needed > 1)}")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    begin_afresh()
    yield
    begin_afresh()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fill uninitialized memory with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # an error where cuBLAS isn't set up
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def one_process() -> Iterator[Processes]:
    """Run functions on one process over gloo, on the CPU."""
    processes = Processes("gloo", 1)
    yield processes
    processes.stop()


@pytest.fixture(scope="session")
def two_processes() -> Iterator[Processes]:
    """Run functions on two processes over gloo, on the CPU."""
    processes = Processes("gloo")
    yield processes
    processes.stop()


@pytest.fixture(scope="session")
def four_processes() -> Iterator[Processes]:
    """Run functions on four processes over gloo, on the CPU."""
    processes = Processes("gloo", 4)
    yield processes
    processes.stop()


@pytest.fixture(scope="session")
def interpreted_processes() -> Iterator[Processes]:
    """Run functions on two processes on the CPU with Triton's interpreter."""
    pytest.importorskip("triton", minversion="3.7")  # 3.6's interpreter fails on a newer NumPy
    processes = Processes("gloo", TRITON_INTERPRET="1")
    yield processes
    processes.stop()


@pytest.fixture(scope="session")
def two_gpus() -> Iterator[Processes]:
    """Run functions on two processes over NCCL, each with its own GPU."""
    processes = Processes("nccl")
    yield processes
    processes.stop()
