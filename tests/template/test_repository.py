"""The generated project as its owner's repository: hooks before a commit, tests after a push."""

import os
import re
import subprocess
import sys
from itertools import chain

import pytest
import yaml
from fresh import ROOT
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


pytestmark = pytest.mark.xdist_group("repository")


@pytest.fixture(scope="module")
def project(bake):
    """A repository in which mypy, which takes most of the time here, keeps its cache."""
    folder = bake()
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    return folder


def commit_hooks(project):
    """What `git commit` of all files would run."""
    subprocess.run(["git", "add", "--all"], cwd=project, check=True)
    scripts = os.path.dirname(sys.executable)
    return subprocess.run(
        [sys.executable, "-m", "pre_commit", "run", "--all-files"],
        cwd=project,
        env=os.environ | {"PATH": os.pathsep.join([scripts, os.environ["PATH"]])},
        capture_output=True,
        text=True,
    )


def test_generated_ci_lints_and_tests(project):
    workflow = yaml.safe_load((project / ".github" / "workflows" / "tests.yml").read_text())
    (job,) = workflow["jobs"].values()
    install, *checks, tests = (step["run"] for step in job["steps"] if "run" in step)
    assert (install, tests) == (
        'pip install -e .[test] "${{ matrix.torch }}"',
        "python -m pytest -n auto --dist loadfile",
    )
    matrix = job["strategy"]["matrix"]["include"]
    assert [one["torch"] for one in matrix] == ["torch==2.6.*", "torch", "torch"]
    assert [one.get("constraints") for one in matrix] == [None, None, "constraints.txt"]
    assert job["env"] == {"PIP_CONSTRAINT": "${{ matrix.constraints }}"}
    pyproject = tomllib.loads((project / "pyproject.toml").read_text())
    needed = pyproject["project"]["optional-dependencies"]["test"]
    assert {name.partition(">")[0] for name in needed} == {
        "mypy",
        "pre-commit",
        "pytest",
        "pytest-xdist",
        "ruff",
    }
    assert [check.split()[0] for check in checks] == ["ruff", "ruff", "mypy"]
    for check in checks[:-1]:  # make lint runs mypy on such a project, which takes a minute
        done = subprocess.run([sys.executable, "-m", *check.split()], cwd=project)
        assert done.returncode == 0
    assert checks[-1] == "mypy"


def test_ci_runs_the_tests_that_need_root():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = chain.from_iterable(workflow["jobs"][name]["steps"] for name in ("test", "weekly"))
    lines = [step.get("run", "") for step in steps]
    runs = [line for line in lines if re.search("make (test|slow|weekly)$", line)]
    assert len(runs) == 3
    assert all(run.startswith("sudo env ") and " REQUIRE_ROOT=true " in run for run in runs)


def test_generated_ci_has_a_torch_that_shards_on_the_cpu(bake):
    workflow = (
        bake(ddp="fsdp", opt_level="O4") / ".github" / "workflows" / "tests.yml"
    ).read_text()
    matrix = yaml.safe_load(workflow)["jobs"]["tests"]["strategy"]["matrix"]["include"]
    assert [one["torch"] for one in matrix] == ["torch==2.9.*", "torch", "torch"]


def test_constraints_fix_a_version_of_each_dependency(bake):
    folder = bake(task="segmentation")
    lines = (folder / "constraints.txt").read_text().splitlines()
    fixed = dict(line.split("==") for line in lines if not line.startswith("#"))
    settings = tomllib.loads((folder / "pyproject.toml").read_text())
    extras = settings["project"]["optional-dependencies"].values()
    needed = [*settings["project"]["dependencies"], *chain.from_iterable(extras)]
    for requirement in map(Requirement, [*needed, *settings["build-system"]["requires"]]):
        assert requirement.specifier.contains(fixed[requirement.name]), requirement


@pytest.mark.weekly
def test_pre_commit_passes_and_fixes_style(project):
    done = commit_hooks(project)
    assert done.returncode == 0, done.stdout + done.stderr
    mine = project / "mine.py"
    mine.write_text("import os\nx = {'a':1}\n")
    assert commit_hooks(project).returncode == 1
    assert mine.read_text() == 'x = {"a": 1}\n'
    assert commit_hooks(project).returncode == 0


def test_workflows_fix_the_commits_of_actions_and_keep_no_credentials(project):
    """A tag can be moved to other code; a token that is kept could be read by tests."""
    workflows = [folder / ".github" / "workflows" for folder in (ROOT, project)]
    steps = [
        step
        for path in workflows
        for file in path.iterdir()
        for job in yaml.safe_load(file.read_text())["jobs"].values()
        for step in job["steps"]
        if "uses" in step
    ]
    assert steps
    for step in steps:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"]), step
        if step["uses"].startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
