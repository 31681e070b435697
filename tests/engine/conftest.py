"""Fixtures of the library tests."""

import socket
import time
from functools import partial

import pytest
import torch.distributed as dist
from library_fixtures import *  # noqa: F403


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """Time that a test advances, and a process group of one rank."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield now
    dist.destroy_process_group()


@pytest.fixture
def run_check(monkeypatch):
    """Run one preflight check; return its last status and text."""
    from engine.diagnostics import preflight

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv(preflight.DEADLINE, "0")  # waits of a second

    def run_check(check, *arguments):
        sent = []
        monkeypatch.setattr(preflight, "send", lambda name, *result: sent.append(result))
        succeeded = preflight.run_checks({"name": partial(check, *arguments)})
        assert sent[0] == (preflight.PENDING, "the check did not finish")
        assert succeeded == (sent[-1][0] != preflight.ERROR)
        return sent[-1]

    return run_check


@pytest.fixture
def two_hosts(monkeypatch):
    """Set the environment of the first of two hosts; return a socket bound to MASTER_PORT."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = str(other.getsockname()[1])
        for name, value in [("NNODES", "2"), ("NODE_RANK", "0"), ("MASTER_PORT", port)]:
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        yield other
