"""Dockerfile and .dockerignore, as far as they can be tested without Docker."""

import fnmatch
import os
import re
import subprocess
import sys
from pathlib import Path, PurePath

import pytest
import root
import setuptools
import yaml


@pytest.fixture(scope="module")
def project(bake):
    return bake()


def instructions(project):
    """Those of the Dockerfile, by name; of RUN a list."""
    text = (project / "Dockerfile").read_text()
    lines = [line.split(" ", 1) for line in text.splitlines() if line and line[0] != "#"]
    found = {name: yaml.safe_load(rest) if rest[0] == "[" else rest for name, rest in lines}
    return found | {"RUN": [rest for name, rest in lines if name == "RUN"]}


def test_it_runs_what_is_there_as_a_user_who_is_not_root(project):
    image = instructions(project)
    assert image["COPY"] == ". ."
    (command,) = image["ENTRYPOINT"]
    assert os.access(project / command, os.X_OK)
    assert re.fullmatch("[1-9][0-9]*:[1-9][0-9]*", image["USER"])


def test_only_that_user_can_write_runs_and_everyone_can_read_the_project(project, tmp_path):
    if os.geteuid():
        root.skip("only root can make a folder for another user")
    image = instructions(project)
    (tmp_path / "engine").mkdir(0o700)
    (tmp_path / "engine" / "saver.py").touch(0o600)
    subprocess.run(["sh", "-ec", image["RUN"][1]], cwd=tmp_path, check=True)
    modes = {path.name: oct(path.stat().st_mode & 0o7777) for path in tmp_path.rglob("*")}
    assert modes == {"engine": "0o755", "saver.py": "0o644", "runs": "0o755"}
    assert (
        f"{(tmp_path / 'runs').stat().st_uid}:{(tmp_path / 'runs').stat().st_gid}" == image["USER"]
    )
    assert os.path.join(image["WORKDIR"], "runs") in image["VOLUME"]


def is_in_image(name, rules):
    """As Docker reads .dockerignore: the last rule for a file or a folder that it is in counts."""
    path = PurePath(name)
    paths = [str(part) for part in (path, *path.parents)]
    kept = True
    for rule in rules:
        pattern = rule.removeprefix("!")
        if pattern.startswith("**/"):
            pattern, names = pattern[3:], path.parts
        else:
            names = [part for part in paths if part.count("/") == pattern.count("/")]
        if any(fnmatch.fnmatchcase(part, pattern) for part in names):
            kept = rule.startswith("!")
    return kept


@pytest.mark.parametrize("cluster", ["none", "slurm"])
def test_the_project_is_in_the_image_and_what_it_is_fed_and_writes_is_not(bake, cluster):
    project = bake(cluster=cluster)
    rules = (project / ".dockerignore").read_text().splitlines()
    files = [str(p.relative_to(project)) for p in project.rglob("*") if p.is_file()]
    assert [name for name in files if not is_in_image(name, rules)] == []
    others = ["runs/last.pt", "runs/a/last.pt", "data/mine/1.jpg", "data/train.npz", ".git/HEAD"]
    others += ["engine/__pycache__/saver.pyc", "tests/.ruff_cache/x", "net.egg-info/PKG-INFO"]
    others += [".venv/bin/python", ".pytest_cache/x", ".env", "launch/.env.local", "tls/own.key"]
    assert [name for name in others if is_in_image(name, rules)] == []


def test_nvidias_torch_stays(project, tmp_path):
    """pip, without an index, among packages of which torch's are the container's versions."""
    environment = tmp_path / "environment"
    command = [sys.executable, "-m", "venv", "--without-pip", environment]
    subprocess.run(command, check=True)
    (packages,) = environment.glob("lib/python3*/site-packages")
    versions = {"torch": "2.7.0a0+79aa17489c.nv25.4", "torchvision": "0.22.0a0"}
    versions |= {"matplotlib": "3.10.1", "pillow": "11.2.1", "tensorboard": "2.16.2"}
    versions |= {"tqdm": "4.67.1"}
    for name, version in versions.items():
        folder = packages / f"{name}-{version}.dist-info"
        folder.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / "METADATA").write_text(text)
    for pattern in ("setuptools*", "_distutils_hack"):
        for path in Path(setuptools.__file__).parents[1].glob(pattern):
            (packages / path.name).symlink_to(path)
    pip = {"PIP_PYTHON": str(environment / "bin" / "python"), "PIP_NO_INDEX": "1"}
    pip["PIP_NO_BUILD_ISOLATION"] = "0"  # which means that there is none
    pip["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    before = {path.name for path in packages.glob("*.dist-info")}
    install, _ = instructions(project)["RUN"]
    done = subprocess.run(
        ["sh", "-c", install], cwd=project, env=os.environ | pip, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    after = {path.name for path in packages.glob("*.dist-info")}
    assert after - before == {"ddp_training-0.1.0.dist-info"} and before < after
