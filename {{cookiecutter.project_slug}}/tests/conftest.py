"""Flags of the tests."""

from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
# Of main.py, for all tests: for example ("--data", f"{PROJECT}/tests/images").
FLAGS: tuple[str, ...] = ()
