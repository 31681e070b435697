"""Tests that need root: small disks, hosts in network namespaces, a SLURM."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest


def skip(reason: str) -> NoReturn:
    """Skip a test that this machine can't run; fail it where REQUIRE_ROOT is set, as in CI."""
    if os.environ.get("REQUIRE_ROOT"):
        pytest.fail(f"{reason}, and REQUIRE_ROOT is set", pytrace=False)
    pytest.skip(reason)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """Mount a disk of `size`, such as 60m, at a new folder."""
    if os.geteuid():
        skip("needs root, to mount a small disk")
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    if subprocess.run(command, check=False).returncode:
        skip("can't mount here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
