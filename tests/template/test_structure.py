"""Limits on the structure of the generated project: its size, its functions, its language."""

import ast
import re
from pathlib import Path

import pytest
import task
from engine import cli
from fresh import ROOT, TEMPLATE

MAX_FILES = 125  # lower these two whenever the libraries shrink
MAX_LINES = 22_833
MAX_TEST_LINES, MAX_TEST_FILES = 600, 6
MAX_APEX_NATIVE_LINES = 3_831
MAX_MARKERS = 60  # in the template's main.py
# Question words and personifications, of which a docstring's first word is none.
NO_IMPERATIVE = re.compile(
    r"(What|Whether|Which|Who|Whose|When|Where|Why|How|That|Says|Tells|Speaks|Goes|Knows|Meets|"
    r"Leaves|Wants|Thinks|Remembers|Mends|Begins|Lets)\b"
)


@pytest.fixture(scope="module")
def project(bake):
    return bake()


def python_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*.py")) if "__pycache__" not in path.parts]


def count_lines(*paths: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def test_number_of_files_and_lines(project):
    files = [path for path in project.rglob("*") if path.is_file()]
    assert len(files) <= MAX_FILES
    assert count_lines(*python_files(project)) <= MAX_LINES
    assert count_lines(*python_files(project / "apex_native")) <= MAX_APEX_NATIVE_LINES


def test_size_of_the_owners_tests(project):
    tests = python_files(project / "tests")
    assert len(tests) <= MAX_TEST_FILES
    assert count_lines(*tests) <= MAX_TEST_LINES


def test_number_of_markers_in_main():
    source = (TEMPLATE / "main.py").read_text(encoding="utf-8")
    assert len(re.findall(r"^\s*# % ", source, re.MULTILINE)) <= MAX_MARKERS


def docstrings(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    return [text for text in found if text]


def test_docstrings_open_with_an_imperative_or_a_noun():
    found = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path in python_files(TEMPLATE) + python_files(ROOT / "packages")
        for text in docstrings(path)
        if NO_IMPERATIVE.match(text)
    ]
    assert found == []


def test_only_the_backend_reads_private_state_of_amp():
    modules = set(python_files(TEMPLATE / "engine")) - {TEMPLATE / "engine" / "backend.py"}
    found = [path for path in modules if "_amp_" in path.read_text(encoding="utf-8")]
    assert found == []


def name_of_flag(node: ast.AST) -> str:
    """Return the flag that an expression of main.py reads from `args`, or ""."""
    match node:
        case ast.Attribute(value=ast.Name("args") | ast.Attribute(attr="args"), attr=name):
            return name
        case ast.Call(
            func=ast.Name("getattr"),
            args=[ast.Name("args") | ast.Attribute(attr="args"), ast.Constant(name), *_],
        ):
            return name
    return ""


def test_main_reads_two_flags_of_the_task():
    """A task of the owner's has other flags; `args.arch` and `args.flip_tta` are documented."""
    parser = cli.ArgumentParser()
    task.add_arguments(parser)
    flags = vars(parser.parse_args([])).keys()
    tree = ast.parse((TEMPLATE / "main.py").read_text(encoding="utf-8"))
    assert flags & set(map(name_of_flag, ast.walk(tree))) == {"arch", "flip_tta"}
