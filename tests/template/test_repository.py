"""The generated project as its owner's repository: hooks before a commit, tests after a push."""

import os
import subprocess
import sys

import pytest
import yaml

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
    assert job["strategy"]["matrix"]["torch"] == ["torch==2.6.*", "torch"]
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


@pytest.mark.slow
def test_pre_commit_passes_and_fixes_style(project):
    done = commit_hooks(project)
    assert done.returncode == 0, done.stdout + done.stderr
    mine = project / "mine.py"
    mine.write_text("import os\nx = {'a':1}\n")
    assert commit_hooks(project).returncode == 1
    assert mine.read_text() == 'x = {"a": 1}\n'
    assert commit_hooks(project).returncode == 0
