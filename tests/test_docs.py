"""docs/apex_behaviour.md: the tests and the reasons that it names are there."""

import ast
import re

import pytest
from fresh import ROOT

PROJECT = "{{cookiecutter.project_slug}}"


def read(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


LINES = [line for line in read("apex_behaviour.md").splitlines() if line.startswith("|")]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in LINES
    if not line.startswith(("|---", "| In Apex |"))
]


@pytest.fixture(scope="module")
def tests_there():
    """The names of all tests, by file, as the page writes it."""
    files = [*(ROOT / "tests").glob("test_*.py"), *(ROOT / PROJECT / "tests").glob("test_*.py")]
    return {
        str(file.relative_to(ROOT)).removeprefix(f"{PROJECT}/tests/"): {
            node.name
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        }
        for file in files
    }


def test_every_row_has_a_verdict_and_a_test():
    assert len(ROWS) > 100
    for row in ROWS:
        assert len(row) == 3, row
        assert re.match(r"(same|better|different)\b", row[1]), row
        assert re.fullmatch(r"`[\w/.]+\.py::test_\w+`(, `[\w/.]+\.py::test_\w+`)*", row[2]), row


def test_the_tests_that_it_names_exist(tests_there):
    for _, _, tests in ROWS:
        for file, name in re.findall(r"`([\w/.]+)::(\w+)`", tests):
            assert name in tests_there.get(file, ()), f"{file}::{name}"


def test_each_difference_has_its_reason_in_design_decisions():
    paragraphs = re.sub(r"\s+", " ", read("design_decisions.md"))
    for behaviour, here, _ in ROWS:
        titles = re.findall("“(.+?)”", here)
        assert bool(titles) == here.startswith("different"), behaviour
        for title in titles:
            assert f"**{title}" in paragraphs, title
