"""benchmarks/trackers.py, with so few calls that only its workings show."""

import subprocess
import sys

import pytest
from fresh import ROOT
from running import SCREENED


@pytest.mark.slow
def test_a_call_is_timed_for_tensorboard():
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "trackers.py", "--calls", "5", "--wait-s", "0"],
        env=SCREENED,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("| TensorBoard")]
    assert 0 < int(row.split("|")[2]) <= int(row.split("|")[3])
