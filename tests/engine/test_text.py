"""engine.text: escapes in text that others wrote."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine import UserError, distributed
from engine.monitoring.logger import Logger
from engine.text import csv_cell, json_line, printable
from fresh import TEMPLATE

HOSTILE = "a\x1b[2J\nb\x9b\u202e\udc80.jpg"
ESCAPED = r"a\x1b[2J\nb\x9b\u202e\udc80.jpg"


def test_control_characters_are_escaped_and_other_scripts_are_not():
    assert printable(HOSTILE) == ESCAPED
    for name in ("Straße", "七", "گربه\u200c", "👩\u200d🚀", "a\u3000b"):
        assert printable(name) == name


def test_json_has_no_control_characters_and_the_same_value():
    line = json_line({"file": HOSTILE, "found": "七"})
    assert printable(line) == line and "七" in line
    assert json.loads(line) == {"file": HOSTILE, "found": "七"}


def test_numbers_in_tensors_are_json_numbers():
    assert json_line([("value", torch.tensor(0.5))]) == '[["value", 0.5]]'


def test_long_errors_and_warnings_are_cut(tmp_path, capsys, monkeypatch):
    """Such as those that hold the arch of an altered checkpoint."""
    monkeypatch.setattr(distributed, "exit_process", lambda status: None)
    text = f"best.pt: its arch {2_000_000 * 'x'}; use another one"
    Logger(tmp_path, 0, "metric").warning(text)
    distributed.stop(text)
    said = capsys.readouterr()
    for line in (said.out, said.err):
        assert len(line) < 2100
        assert "best.pt: its arch xxx" in line and line.endswith("xxx; use another one\n")


FAILING_PROGRAM = """
from engine import UserError, distributed

def main():
    print("in the buffer of stdout")
    raise UserError("wrong usage")

distributed.run(main)
"""


def test_usage_error_has_its_exit_status_on_a_full_disk():
    command = [sys.executable, "-EB", "-c", FAILING_PROGRAM]  # not PYTHONUNBUFFERED
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, cwd=TEMPLATE, stdout=full, stderr=full, check=False)
    assert done.returncode == 2


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", " =1"])
def test_formulas_are_quoted_in_csv_files(text):
    assert csv_cell(text).startswith("'")
    assert csv_cell("cat = dog") == "cat = dog"


def test_logs_and_errors_are_escaped(tmp_path, capsys, monkeypatch):
    Logger(tmp_path, 0, "metric").warning(HOSTILE)
    monkeypatch.setattr(distributed, "exit_process", lambda status: None)
    distributed.stop(HOSTILE)
    for name in ("FileError", "OutageError"):
        distributed.stop(f"Caught {name} in a worker.\n  trace\nengine.x.{name}: {ESCAPED}")
    said = capsys.readouterr()
    assert said.out == f"warning: {ESCAPED}\n"
    assert said.err == 3 * f"error: {ESCAPED}\n"


def test_user_errors_of_workers_keep_their_type():
    from engine.data.files import FileError

    assert issubclass(FileError, UserError)
    assert str(FileError("a")) == "a"
