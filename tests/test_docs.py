"""README and docs: the tests, reasons, pages and flags that they name are there."""

import ast
import re

import pytest
from fresh import ROOT

PROJECT = "{{cookiecutter.project_slug}}"


def read(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def rows(text):
    """The cells of the tables in a text, without their heads."""
    tables = re.findall(r"^\|.*\n\|-.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for table in tables
        for line in table.splitlines()
    ]


ROWS = rows(read("apex_behaviour.md"))
PITFALLS = rows(read("pitfalls.md").split("## In everyday training")[1])
SEEDS = rows(read("seeds.md"))


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
    assert all(re.match(r"(same|better|different)\b", row[1]) for row in ROWS)
    assert len(PITFALLS) > 30
    assert {row[0][:3] for row in SEEDS} == {"000", "001", "002", "003", "004"}
    for row in ROWS + PITFALLS + SEEDS:
        assert len(row) == 3, row
        assert re.fullmatch(r"`[\w/.]+\.py::test_\w+`(, `[\w/.]+\.py::test_\w+`)*", row[2]), row


def test_the_tests_that_it_names_exist(tests_there):
    for _, _, tests in ROWS + PITFALLS + SEEDS:
        for file, name in re.findall(r"`([\w/.]+)::(\w+)`", tests):
            assert name in tests_there.get(file, ()), f"{file}::{name}"


def test_each_difference_has_its_reason_in_design_decisions():
    paragraphs = re.sub(r"\s+", " ", read("design_decisions.md"))
    for behaviour, here, _ in ROWS:
        titles = re.findall("“(.+?)”", here)
        assert bool(titles) == here.startswith("different"), behaviour
        for title in titles:
            assert f"**{title}" in paragraphs, title


def test_the_tests_of_what_a_run_survives_are_there(tests_there):
    named = re.findall(r"`(test_\w+)`", read("faults.md"))
    assert len(named) > 8
    assert set(named) <= tests_there["tests/test_faults.py"]


def test_links_lead_to_files():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    for page in pages:
        for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            assert "://" in link or (page.parent / link).is_file(), f"{page.name}: {link}"


@pytest.mark.parametrize("page", ["../README.md", "faq.md"])
def test_the_flags_that_are_advised_exist(page):
    source = (ROOT / PROJECT / "main.py").read_text(encoding="utf-8")
    flags = set(re.findall(r'"(--[\w-]+)"', source)) | {"--ipc"}  # Docker's
    commands = re.findall(r"`((?:\./run\.sh|--)[^`]*)`", read(page))
    advised = {flag for command in commands for flag in re.findall(r"--[\w-]+", command)}
    assert advised
    assert advised <= flags


def test_the_comparison_says_where_each_column_is_from():
    section = re.search(r"## Compared with others\n(.*?)\n## ", read("../README.md"), re.DOTALL)[1]
    head, cells = re.search(r"^\|(.*)\|$", section, re.MULTILINE)[1], rows(section)
    columns = [name.strip() for name in head.split("|")]
    assert all(len(row) == len(columns) and all(row) for row in cells)
    sources = read("comparison.md")
    for name in columns[1:]:
        assert f"\n## {name}\n" in sources
    read_at = re.findall(r"([0-9a-f]{7}|\d\d\.\d\d|\d\.\d+\.\d)\s+\((\d{4}-\d\d-\d\d)\)", section)
    assert len(read_at) == len(columns) - 2  # all but this template's
    for version, date in read_at:
        assert re.search(rf"{re.escape(version)},\s+{date}", sources), version
