"""Consistency of README.md and docs/ with the tests, the design decisions and the flags."""

import ast
import re
import sys
from difflib import get_close_matches

import pytest
from fresh import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = "{{cookiecutter.project_slug}}"
BEHAVIOURS = ROOT / "tests" / "documented_behaviours.toml"


def read(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def rows(text):
    """Return the cells of all tables in a text, without the head rows."""
    tables = re.findall(r"^\|.*\n\|-.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for table in tables
        for line in table.splitlines()
    ]


ROWS = rows(read("apex_behaviour.md"))
PITFALLS = rows(read("pitfalls.md").split("## In everyday training")[1])
SEEDS = rows(read("seeds.md"))
FAULTS = rows(read("faults.md"))
# The text that states the behaviour of each row, by page.
STATED = {
    "apex_behaviour.md": [row[0] for row in ROWS],
    "pitfalls.md": [row[0] for row in PITFALLS],
    "seeds.md": [row[1] for row in SEEDS],
    "faults.md": [row[0] for row in FAULTS],
}


@pytest.fixture(scope="module")
def tested():
    """The test functions that check each documented behaviour, by page and text of its row."""
    return tomllib.loads(BEHAVIOURS.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def test_functions():
    """The names of all test functions of this repository and of the generated project."""
    names = set()
    for folder in (ROOT / "tests", ROOT / PROJECT / "tests"):
        for file in folder.rglob("test_*.py"):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            names |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return {name for name in names if name.startswith("test_")}


def test_every_row_has_a_verdict():
    assert len(ROWS) > 100
    assert all(re.match(r"(same|better|different)\b", row[1]) for row in ROWS)
    assert len(PITFALLS) > 30
    assert len(FAULTS) > 20
    assert {row[0][:3] for row in SEEDS} == {"000", "001", "002", "003", "004"}
    for row in ROWS + PITFALLS + SEEDS + FAULTS:
        assert len(row) == 2, row
        assert all(row), row


@pytest.mark.parametrize("page", STATED)
def test_every_documented_behaviour_has_tests(tested, page):
    stated = STATED[page]
    assert len(set(stated)) == len(stated), "two rows state the same"
    untested = [text for text in stated if not tested[page].get(text)]
    obsolete = [text for text in tested[page] if text not in stated]
    assert not untested + obsolete, (
        f"docs/{page} and {BEHAVIOURS.relative_to(ROOT)} differ. Add an entry for each row without "
        "tests, and change or remove each entry without a row.\n"
        + "".join(f"row without tests: {text}\n" for text in untested)
        + "".join(f"entry without a row: {text}\n" for text in obsolete)
    )


def test_tests_of_documented_behaviours_exist(tested, test_functions):
    assert tested.keys() == STATED.keys()
    named = {name for page in tested.values() for names in page.values() for name in names}
    assert len(named) > 150
    missing = sorted(named - test_functions)
    assert not missing, (
        f"{BEHAVIOURS.relative_to(ROOT)} names tests that do not exist. Replace each by the test "
        "that checks the behaviour now; if it was renamed, `git log -p -S 'def NAME(' -- tests` "
        "shows its new name.\n"
        + "".join(
            f"{name} (similar: {', '.join(get_close_matches(name, test_functions)) or 'none'})\n"
            for name in missing
        )
    )


def test_docs_do_not_name_tests():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        cited = re.findall(r"test_\w+\.py\b|\btest_\w+", page.read_text(encoding="utf-8"))
        assert not cited, f"{page.name}: {cited}; list tests in {BEHAVIOURS.relative_to(ROOT)}"


def test_each_difference_has_its_reason_in_design_decisions():
    paragraphs = re.sub(r"\s+", " ", read("design_decisions.md"))
    for behaviour, here in ROWS:
        titles = re.findall("“(.+?)”", here)
        assert bool(titles) == here.startswith("different"), behaviour
        for title in titles:
            assert f"**{title}" in paragraphs, title


def test_links_lead_to_files():
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    pages += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    for page in pages:
        for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            assert "://" in link or (page.parent / link).is_file(), f"{page.name}: {link}"


def defined_flags():
    """Return the flags that the source of main.py, its parser and the tasks defines."""
    files = [ROOT / PROJECT / "main.py", ROOT / PROJECT / "engine" / "cli.py"]
    files += (ROOT / PROJECT).glob("task*.py")
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    return set(re.findall(r'"(--[\w-]+)"', source))


@pytest.mark.parametrize("page", ["../README.md", "faq.md"])
def test_advised_flags_exist(page):
    commands = re.findall(r"`((?:\./run\.sh|--)[^`]*)`", read(page))
    advised = {flag for command in commands for flag in re.findall(r"--[\w-]+", command)}
    assert advised
    assert advised <= defined_flags() | {"--ipc"}  # Docker's


def test_comparison_cites_a_source_for_each_column():
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
