"""Consistency of README.md and docs/ with the tests, the decisions and the flags; their limits."""

import ast
import json
import re
import subprocess
import sys
from difflib import get_close_matches
from pkgutil import resolve_name

import pytest
import torch
from fresh import ROOT
from running import run

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
PITFALLS = rows(read("pitfalls.md"))
FAULTS = rows(read("faults.md"))
# The text that states the behaviour of each row, by page.
STATED = {
    "apex_behaviour.md": [row[0] for row in ROWS],
    "pitfalls.md": [row[0] for row in PITFALLS],
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
    for row in ROWS + PITFALLS + FAULTS:
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
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        cited = re.findall(r"test_\w+\.py\b|\btest_\w+", page.read_text(encoding="utf-8"))
        assert not cited, f"{page.name}: {cited}; list tests in {BEHAVIOURS.relative_to(ROOT)}"


DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
TITLES = {
    path.name: path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    for path in DECISIONS
}


def test_each_difference_has_its_reason_in_a_decision():
    known = {title.partition(": ")[2] for title in TITLES.values()}
    for behaviour, here in ROWS:
        titles = re.findall("“(.+?)”", here)
        assert bool(titles) == here.startswith("different"), behaviour
        assert set(titles) <= known, behaviour


def test_decisions_are_listed_and_have_their_parts():
    listed = dict(re.findall(r"^- \[(.+)\]\((.+)\)$", read("decisions/index.md"), re.MULTILINE))
    assert listed == {title: name for name, title in TITLES.items()}
    for path in DECISIONS:
        text = path.read_text(encoding="utf-8")
        assert text.startswith(f"# {path.name[:4]}: ")
        parts = re.findall(r"^\*\*(\w+)\.\*\* ", text, re.MULTILINE)
        assert parts == ["Context", "Decision", "Consequence"], path.name


def count_words(text):
    """Return the number of words; the lines of tables and other signs are none."""
    return sum(any(map(str.isalnum, word)) for word in text.split())


LIMITS = {"README.md": 700, "benchmarks/RESULTS.md": 2000, "docs/scaling.md": 1200}
LIMITS |= {f"docs/decisions/{path.name}": 150 for path in DECISIONS}


def test_documents_are_within_their_limits():
    words = {name: count_words((ROOT / name).read_text(encoding="utf-8")) for name in LIMITS}
    assert not {name: count for name, count in words.items() if count > LIMITS[name]}
    table = rows((ROOT / "README.md").read_text(encoding="utf-8"))
    assert 0 < len(table) <= 8


@pytest.mark.parametrize("task", ["classification", "segmentation", "contrastive"])
@pytest.mark.parametrize(
    "answers",
    [{"cluster": "none"}, {"cluster": "slurm", "backend": "apex"}, {"cluster": "kubernetes"}],
    ids=lambda answers: answers["cluster"],
)
def test_generated_readme_is_within_its_limit(bake, task, answers):
    readme = (bake(task=task, **answers) / "README.md").read_text(encoding="utf-8")
    assert count_words(readme) <= 900
    assert "{%" not in readme and "{{" not in readme and "\n\n\n" not in readme


@pytest.mark.parametrize(
    ("answers", "uses_apex", "shares_disk"),
    [
        ({}, True, False),
        ({"opt_level": "O5"}, False, False),
        ({"backend": "native"}, False, False),
        ({"ddp": "fsdp", "opt_level": "O4"}, False, True),
        ({"ddp": "dataparallel", "sync_bn": False}, False, False),
    ],
    ids=str,
)
def test_generated_readme_states_what_the_run_needs(bake, answers, uses_apex, shares_disk):
    readme = (bake(**answers) / "README.md").read_text(encoding="utf-8")
    assert ("runs on real Apex where" in readme) == uses_apex
    assert ("on a disk that all machines share" in readme) == shares_disk
    assert ("Install a copy" in readme) == (not shares_disk and answers.get("sync_bn", True))


@pytest.mark.slow
def test_page_of_flags_is_that_of_the_parser():
    """`python tools/flags.py --write` updates it."""
    command = [sys.executable, ROOT / "tools" / "flags.py"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == read("reference/flags.md")


def test_environment_variables_are_documented():
    """Each variable that run.sh reads with a default of its own."""
    script = (ROOT / PROJECT / "run.sh").read_text(encoding="utf-8")
    variables = set(re.findall(r"\$\{([A-Z_]+):-", script)) - {"TORCH_CPP_LOG_LEVEL"}
    assert len(variables) > 8
    page = read("reference/environment.md")
    assert {name for name in variables if f"`{name}`" not in page} == set()


def test_questions_are_documented():
    questions = json.loads((ROOT / "cookiecutter.json").read_text(encoding="utf-8"))
    table = {
        name: row for row in rows(read("reference/questions.md")) for name in row[0].split(", ")
    }
    for name, default in questions.items():
        if not name.startswith("_"):
            choices = table[f"`{name}`"][1]
            assert not isinstance(default, list) or choices == ", ".join(default)
    assert len(table) == 12


@pytest.mark.xdist_group("short")
def test_entries_of_checkpoints_are_documented(shared_project, tmp_path):
    flags = ("--arch", "shufflenet_v2_x0_5", "--steps", 1, "--ema", 0.9, "--freeze", "conv1")
    done = run(shared_project(), *flags, "--output", tmp_path / "run", nproc=0)
    assert done.returncode == 0, done.stderr
    saved = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    page = read("reference/checkpoint_format.md").split("## Metadata")
    documented = [{name for row in rows(part) for name in row[0].split(", ")} for part in page]
    entries = saved.keys() | {"run_id"}  # with another tracker than TensorBoard only
    metadata = saved["metadata"].keys() | {"trained_settings"}  # of optimizers such as Prodigy
    assert [{f"`{name}`" for name in found} for found in (entries, metadata)] == documented


def test_links_lead_to_files():
    pages = [
        ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
    ]
    pages += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    for page in pages:
        for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            assert "://" in link or (page.parent / link).is_file(), f"{page.name}: {link}"


def test_names_to_update_to_exist():
    """The names in the changelog's tables for owners of projects of 0.9."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    section = changelog.partition("\n### Updating from 0.9\n")[2].partition("\n## ")[0]
    for row in rows(section):
        for name in re.findall(r"`((?:engine|apex_native)\.[\w.]+)", row[-1]):
            resolve_name(name)
    tables = rows(section.partition("\nModules:\n")[2])
    assert len(tables) > 15
    for _, own in tables:
        module, *names = re.findall(r"`([\w.]+)[`(]", own)
        resolve_name(module)
        for name in names:  # of modules, or beside the first name
            resolve_name(name if "." in name else f"{module.rpartition('.')[0]}.{name}")


def defined_flags():
    """Return the flags that the source of main.py, its parser and the tasks defines."""
    names = ("main.py", "engine/cli.py", "engine/flags.py")
    files = [ROOT / PROJECT / name for name in names]
    files += (ROOT / PROJECT).glob("task*.py")
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    return set(re.findall(r'"(--[\w-]+)"', source))


GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
PAGES_OF_FLAGS = ["../README.md", "faq.md", *(f"guides/{path.name}" for path in GUIDES)]
OTHERS = {"--ipc", "--user", "--build-arg", "--gpus-per-node", "--no-NAME"}  # Docker's and SLURM's


@pytest.mark.parametrize("page", PAGES_OF_FLAGS)
def test_advised_flags_exist(page):
    commands = re.findall(r"`((?:\./run\.sh|--)[^`]*)`", read(page))
    advised = {flag for command in commands for flag in re.findall(r"--[\w-]+", command)}
    assert advised
    flags = defined_flags()
    assert {flag for flag in advised if flag not in flags | OTHERS} == set()


def test_comparison_cites_a_source_for_each_column():
    section = read("comparison.md").split("\n## this template\n")[0]
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


def test_example_of_a_split_ignores_other_files_and_can_be_repeated(tmp_path):
    names = (
        ".DS_Store",
        "Thumbs.db",
        ".hidden/1.jpg",
        "cat/.1.jpg",
        "cat/Thumbs.db",
        "empty/a.txt",
    )
    few = ("dog/1.png", "dog/2.png", "cow/1.png")  # the training needs the only cow
    for name in (*names, *few, *(f"cat/{number}.JPG" for number in range(30))):
        path = tmp_path / "train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    page = read("tutorials/own_data.md").split("**Without a validation set**")[1]
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1].replace("DIR", str(tmp_path))
    for _ in range(2):
        exec(code, {})
    moved = [path for path in (tmp_path / "val").rglob("*") if path.is_file()]
    assert sorted(path.parent.name for path in moved) == ["cat"] * 3 + ["dog"]
    assert {path.suffix for path in moved} == {".JPG", ".png"}


def test_example_of_a_split_moves_images_with_their_masks(tmp_path):
    names = (".hidden.jpg", *(f"{number}.{'jpg' if number % 2 else 'png'}" for number in range(30)))
    for kind in ("images", "annotations"):
        (tmp_path / kind / "training").mkdir(parents=True)
    for name in names:
        (tmp_path / "images" / "training" / name).touch()
        (tmp_path / "annotations" / "training" / name).with_suffix(".png").touch()
    page = read("tutorials/own_data.md").split("move each image with its mask:")[1]
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1].replace("DIR", str(tmp_path))
    exec(code, {})
    with pytest.raises(FileExistsError):  # which has been split is not split again
        exec(code, {})
    images, masks = (
        {path.stem for path in (tmp_path / kind / "validation").iterdir()}
        for kind in ("images", "annotations")
    )
    assert len(images) == 3
    assert images == masks
    assert len(list((tmp_path / "annotations" / "training").iterdir())) == 28
