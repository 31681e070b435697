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


@pytest.fixture
def project(bake):
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


def test_the_first_commit_passes_and_a_later_one_is_put_in_order(project):
    done = commit_hooks(project)
    assert done.returncode == 0, done.stdout + done.stderr
    mine = project / "mine.py"
    mine.write_text("import os\nx = {'a':1}\n")
    assert commit_hooks(project).returncode == 1
    assert mine.read_text() == 'x = {"a": 1}\n'
    assert commit_hooks(project).returncode == 0


def test_a_push_installs_checks_and_tests_the_project(project):
    workflow = yaml.safe_load((project / ".github" / "workflows" / "tests.yml").read_text())
    (job,) = workflow["jobs"].values()
    install, *checks, tests = (step["run"] for step in job["steps"] if "run" in step)
    assert (install, tests) == (
        "pip install -e .[test]",
        "python -m pytest -n auto --dist loadfile",
    )
    pyproject = tomllib.loads((project / "pyproject.toml").read_text())
    needed = pyproject["project"]["optional-dependencies"]["test"]
    assert {name.partition(">")[0] for name in needed} == {
        "pre-commit",
        "pytest",
        "pytest-xdist",
        "ruff",
    }
    assert len(checks) == 2
    for check in checks:
        done = subprocess.run([sys.executable, "-m", *check.split()], cwd=project)
        assert done.returncode == 0
