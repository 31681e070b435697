"""benchmarks/chaos.py and signals.py with a few kills and signals."""

import csv
import re
import subprocess
import sys

import pytest
from fresh import ROOT

pytestmark = [pytest.mark.xdist_group("faults"), pytest.mark.weekly]


def run(name, *flags):
    command = [sys.executable, str(ROOT / "benchmarks" / name), *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, timeout=400)


def test_killed_runs_equal_an_undisturbed_one(tmp_path):
    output = tmp_path / "chaos.csv"
    done = run("chaos.py", "--kills", 4, "--launched", 0.3, "--output", output)
    assert done.returncode == 0, done.stderr
    with output.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 4
    assert f"{len(rows)} kills in" in done.stdout


def test_launchers_end_at_signals():
    done = run("signals.py", "--signals", 200)
    assert done.returncode == 0, done.stderr
    count = re.search(r"^(\d+) signals to \d+ launchers: each ended", done.stdout, re.MULTILINE)
    assert count and int(count[1]) >= 200
