"""What is generated: every combination of answers, file by file."""

import ast
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from cookiecutter.exceptions import FailedHookException

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
FILES = [
    ".dockerignore",
    ".github/workflows/tests.yml",
    ".gitignore",
    ".pre-commit-config.yaml",
    "Dockerfile",
    "LICENSE",
    "README.md",
    "config.example.json",
    "main.py",
    "predict.py",
    "pyproject.toml",
    "run.sh",
    "task.py",
    "apex_native/__init__.py",
    "apex_native/__main__.py",
    "apex_native/_say.py",
    "apex_native/_spawned/apex.py",
    "apex_native/amp/__init__.py",
    "apex_native/amp/_state.py",
    "apex_native/amp/frontend.py",
    "apex_native/amp/functions.py",
    "apex_native/amp/handle.py",
    "apex_native/amp/models.py",
    "apex_native/amp/optimizer.py",
    "apex_native/amp/properties.py",
    "apex_native/amp/scaler.py",
    "apex_native/fp16_utils.py",
    "apex_native/multi_tensor_apply.py",
    "apex_native/normalization.py",
    "apex_native/optimizers/__init__.py",
    "apex_native/optimizers/_base.py",
    "apex_native/optimizers/fused_adagrad.py",
    "apex_native/optimizers/fused_adam.py",
    "apex_native/optimizers/fused_lamb.py",
    "apex_native/optimizers/fused_novograd.py",
    "apex_native/optimizers/fused_sgd.py",
    "apex_native/parallel/LARC.py",
    "apex_native/parallel/__init__.py",
    "apex_native/parallel/_exchange.py",
    "apex_native/parallel/_formula.py",
    "apex_native/parallel/_mailbox.py",
    "apex_native/parallel/_rows.py",
    "apex_native/parallel/distributed.py",
    "apex_native/parallel/reducer.py",
    "apex_native/parallel/sync_batchnorm.py",
    "data/README.md",
    "data/digits.npz",
    "data/make_digits.py",
    "engine/__init__.py",
    "engine/backend.py",
    "engine/check.py",
    "engine/checkpoint.py",
    "engine/cli.py",
    "engine/curves.py",
    "engine/distributed.py",
    "engine/doctor.py",
    "engine/errors.py",
    "engine/events.py",
    "engine/examine.py",
    "engine/files.py",
    "engine/finite.py",
    "engine/images.py",
    "engine/launch.py",
    "engine/machines.py",
    "engine/order.py",
    "engine/report.py",
    "engine/resize.py",
    "engine/rng.py",
    "engine/saver.py",
    "engine/sheet.py",
    "engine/training.py",
    "engine/watch.py",
    "engine/weights.py",
    "tests/conftest.py",
    "tests/processes.py",
    "tests/test_amp.py",
    "tests/test_check.py",
    "tests/test_checkpoint.py",
    "tests/test_config.py",
    "tests/test_doctor.py",
    "tests/test_features.py",
    "tests/test_formulas.py",
    "tests/test_functions.py",
    "tests/test_images.py",
    "tests/test_machines.py",
    "tests/test_normalization.py",
    "tests/test_old_scripts.py",
    "tests/test_on_gpu.py",
    "tests/test_optimizers.py",
    "tests/test_order.py",
    "tests/test_parallel.py",
    "tests/test_predict.py",
    "tests/test_report.py",
    "tests/test_saver.py",
    "tests/test_sheet.py",
    "tests/test_task.py",
    "tests/test_training.py",
    "tests/tiny.py",
]
JOBS = {"slurm": {"launch/slurm.sbatch"}, "kubernetes": {"launch/trainjob.yaml"}, "none": set()}
# "{{" is left out for Python, where f-strings hold it.
LEFTOVER = re.compile(r"# %|[«»]|cookiecutter|\{%|(?<!\$)\{#")


def combinations(template, **fixed):
    """Every set of choices that is not refused; in turn, what is not in the code."""
    asked = json.loads((template / "cookiecutter.json").read_text(encoding="utf-8"))
    asked = {name: values for name, values in asked.items() if not name.startswith("_")}
    choices = {n: v if isinstance(v, list) else [v, not v] for n, v in asked.items()}
    choices = {n: v for n, v in choices.items() if len(v) > 1 and not isinstance(asked[n], str)}
    choices |= {name: [value] for name, value in fixed.items()}
    licenses = itertools.cycle(choices.pop("license"))
    clusters = itertools.cycle(choices.pop("cluster"))
    for values in itertools.product(*choices.values()):
        answers = dict(zip(choices, values, strict=True))
        level, backend = answers["opt_level"], answers["backend"]
        if level in ("O4", "O5") and backend == "apex":
            continue
        if answers["ddp"] == "dataparallel" and (
            answers["sync_bn"] or backend == "apex" or level == "O4"
        ):
            continue
        alone = answers["ddp"] == "dataparallel"
        cluster = "none" if alone else next(clusters)
        yield answers | {"license": next(licenses), "cluster": cluster}


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def lint(*paths):
    """Folders of projects or files of them, by their own settings."""
    run(sys.executable, "-m", "ruff", "check", "--no-cache", *paths)
    run(sys.executable, "-m", "ruff", "format", "--no-cache", "--check", *paths)


def file_names(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def leftovers(name, text):
    for line in text.splitlines():
        if LEFTOVER.search(line) or ("{{" in line and not name.endswith(".py")):
            yield name, line


# Every combination


@pytest.mark.parametrize(
    "level", ["O1", *(pytest.param(one, marks=pytest.mark.slow) for one in LEVELS if one != "O1")]
)
def test_every_combination(template, bake, tmp_path, level):
    seen, code = set(), []
    for number, answers in enumerate(combinations(template, opt_level=level)):
        project = bake(into=tmp_path / str(number), **answers)
        expected = set(FILES) - ({"LICENSE"} if answers["license"] == "none" else set())
        expected |= JOBS[answers["cluster"]]
        assert file_names(project) == expected, answers
        for name in expected - {"data/digits.npz"}:
            text = (project / name).read_text(encoding="utf-8")
            if (name, text) not in seen:
                seen.add((name, text))
                assert list(leftovers(name, text)) == [], answers
                if name.endswith(".py"):
                    compile(text, name, "exec")
                    code.append(project / name)
                if name in ("main.py", "predict.py"):  # to be read in one sitting
                    assert len(text.splitlines()) < {"main.py": 300, "predict.py": 100}[name]
        flags = (project / "main.py").read_text(encoding="utf-8")
        for name in json.loads((project / "config.example.json").read_text(encoding="utf-8")):
            assert f'add("--{name.replace("_", "-")}"' in flags, answers
        settings = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
        assert settings["project"].get("license", "none") == answers["license"]
    lint(*code)
    # fused_adam, sync_bn, ddp and backend, and DataParallel with auto or native.
    scripts = 2 * 2 * 2 * (2 if level in ("O4", "O5") else 3) + 2 * 2 * (level != "O4")
    assert len([name for name, _ in seen if name == "main.py"]) == 3 * scripts == number + 1
    assert len([name for name, _ in seen if name == "task.py"]) == 3


@pytest.mark.parametrize(
    "slug", [pytest.param("a", id="shortest"), pytest.param("x" * 60, id="longest")]
)
@pytest.mark.parametrize("backend", ["auto", "native"])
def test_a_slug_of_any_length_leaves_the_code_in_order(bake, tmp_path, slug, backend):
    for ddp, fused_adam in itertools.product(["apex", "torch"], [True, False]):
        into = tmp_path / f"{ddp}-{fused_adam}"
        bake(into=into, project_slug=slug, backend=backend, ddp=ddp, fused_adam=fused_adam)
    lint(tmp_path)


@pytest.mark.parametrize(
    ("answers", "there", "gone"),
    [
        pytest.param(
            {},
            [
                "convert_syncbn_model(",
                ".FusedAdam(",
                "apex.parallel.DistributedDataParallel(",
                '"O1"',
            ],
            ["torch.optim", " nn.parallel.", "--momentum"],
            id="defaults",
        ),
        pytest.param({"sync_bn": False}, [".FusedAdam("], ["syncbn"], id="no-sync_bn"),
        pytest.param({"fused_adam": False}, ["SGD(", "--momentum"], ["FusedAdam"], id="sgd"),
        pytest.param(
            {"ddp": "torch"},
            ["nn.parallel.DistributedDataParallel("],
            ["apex.parallel.DistributedDataParallel", "delay_allreduce"],
            id="torch-ddp",
        ),
        pytest.param(
            {"ddp": "dataparallel", "sync_bn": False},
            ["nn.DataParallel("],
            ["DistributedDataParallel", "delay_allreduce", "compile"],
            id="dataparallel",
        ),
        pytest.param(
            {"task": "segmentation"},
            ["--ignore-index"],
            ["text_encoder", "resnet18"],
            id="segmentation",
        ),
        pytest.param(
            {"task": "contrastive"},
            ["[model.image_encoder, model.text_encoder],", "--text-lr"],
            ["num_classes", "model, optimizer = ", "--ignore-index"],
            id="contrastive",
        ),
        pytest.param(
            {"opt_level": "O5", "backend": "native"},
            ['default="O5"', 'default="native"'],
            ['default="O1"', 'default="auto"'],
            id="bf16-native",
        ),
    ],
)
def test_the_answers_are_in_the_code_and_nothing_else(bake, answers, there, gone):
    text = (bake(**answers) / "main.py").read_text(encoding="utf-8")
    assert [part for part in there if part not in text] == []
    assert [part for part in gone if part in text] == []


# One project


@pytest.fixture(scope="module")
def project(bake):
    return bake()


def test_files_keep_their_modes(template, project):
    source = template / "{{cookiecutter.project_slug}}"
    for name in file_names(project) - {"LICENSE"}:
        assert (project / name).stat().st_mode == (source / name).stat().st_mode, name
    assert (project / "run.sh").stat().st_mode & 0o111


def test_code_and_data_without_markers_are_copies(template, project):
    source = template / "{{cookiecutter.project_slug}}"
    copies = {name for name in file_names(project) if name.endswith((".py", ".npz", ".sh"))}
    marked = {"main.py", "predict.py", "run.sh"}
    marked |= {"tests/test_features.py", "tests/test_training.py"}
    for name in copies - marked:
        assert (project / name).read_bytes() == (source / name).read_bytes(), name


def test_the_same_answers_give_the_same_bytes(bake, project, monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setenv("PYTHONUTF8", "0")
    again = bake()
    assert file_names(again) == file_names(project)
    for name in file_names(project):
        assert (again / name).read_bytes() == (project / name).read_bytes(), name


def test_pyproject(project):
    settings = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["project"] == {
        "name": "ddp_training",
        "version": "0.1.0",
        "description": "Multi-GPU, mixed-precision training in PyTorch.",
        "authors": [{"name": "The DDP Training authors"}],
        "license": "MIT",
        "license-files": ["LICENSE"],
        "requires-python": ">=3.10",
        "dependencies": [
            "torch>=2.6",
            "torchvision>=0.21",
            "tqdm>=4.66",
            "matplotlib>=3.7",
            "tensorboard>=2.11",
        ],
        "optional-dependencies": {
            "test": ["pre-commit>=3.5", "pytest>=8.0", "pytest-xdist>=3.5", "ruff>=0.6"]
        },
    }


@pytest.mark.parametrize(
    ("name", "begins", "holds"),
    [
        ("MIT", "MIT License\n\nCopyright (c) A. Uthor\n\n", "Permission is hereby granted"),
        (
            "BSD-3-Clause",
            "BSD 3-Clause License\n\nCopyright (c) A. Uthor\n\n",
            "3. Neither the name",
        ),
        ("Apache-2.0", "\n" + 33 * " " + "Apache License\n", "\n   Copyright A. Uthor\n"),
    ],
)
def test_license(bake, name, begins, holds):
    text = (bake(license=name, author_name="A. Uthor") / "LICENSE").read_text(encoding="utf-8")
    assert text.startswith(begins)
    assert holds in text
    assert text.endswith((".\n", "License.\n")) and not text.endswith("\n\n")
    assert not re.search(r"\b20[1-9]\d\b|yyyy", text), "a year would change what cruft compares"


def test_no_license_leaves_one_of_the_users(bake, tmp_path):
    mine = tmp_path / "ddp_training" / "LICENSE"
    mine.parent.mkdir()
    mine.write_text("mine")
    bake(into=tmp_path, options={"overwrite_if_exists": True}, license="none")
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("cluster", ["none", "kubernetes"])
def test_what_the_user_keeps_in_launch_stays(bake, tmp_path, cluster):
    mine = tmp_path / "ddp_training" / "launch" / "slurm.sbatch"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    bake(into=tmp_path, options={"overwrite_if_exists": True}, cluster=cluster)
    assert mine.read_text() == "mine"


def test_it_says_what_to_do_next(bake, tmp_path, capfd):
    project = bake(into=tmp_path / "it's a folder")
    lines = [line.strip() for line in capfd.readouterr().err.splitlines()]
    go, install, start = [line for line in lines if line][-3:]
    assert run("sh", "-c", f"{go} && pwd") == f"{project}\n"
    assert shlex.split(install) == ["pip", "install", "-e", "."]
    assert (project / start).is_file()


# The markers


def test_the_template_is_in_order_where_it_stands(template):
    folder = template / "{{cookiecutter.project_slug}}"
    for path in folder.rglob("*.py"):
        compile(path.read_bytes(), path, "exec")
    tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    lint(folder)


def test_the_post_hook_knows_every_file_with_markers(template):
    hook = (template / "hooks" / "post_gen_project.py").read_text(encoding="utf-8")
    marked = ast.literal_eval(re.search(r"^MARKED = (\(.*?\))$", hook, re.M | re.S)[1])
    folder = template / "{{cookiecutter.project_slug}}"
    texts = [name for name in file_names(folder) if not name.endswith(".npz")]
    found = [n for n in texts if re.search("# ?%|[«»]", (folder / n).read_text(encoding="utf-8"))]
    assert sorted(marked) == sorted(found)


@pytest.fixture
def switched(template, bake, tmp_path):
    """What becomes of a main.py of one's own."""

    def switched(source, **answers):
        copy = tmp_path / "template"
        shutil.copytree(template, copy, dirs_exist_ok=True)
        path = copy / "{{cookiecutter.project_slug}}" / "main.py"
        path.write_text(source, encoding="utf-8")
        project = bake(into=tmp_path / "out", source=copy, **answers)
        return (project / "main.py").read_text(encoding="utf-8")

    return switched


TRICKY = '''\
"""Docstring with {{ braces }}, {% percent %}, {# hash #} and 100 % sure."""

import os
import sys

LEVELS = {"«opt_level»": {"a": {}}, "b": f"{{}} {os.sep!r:>{10}} {{{sys.path}}}"}
TEXT = "%s %% %(x)d" % 1
# % if ddp == "apex"


def first():
    return 1


# % endif


def second(x):
    # % if fused_adam

    x = call(
        x,
        # % if not sync_bn
        off=True,
        # % else
        on=True,
        # % endif
        levels=[
            # % for level in ("O0", "O1")
            "«level»",
            # % endfor
        ],
    )

    # % elif backend == "native"
    x = "native"
    # % else

    # A comment stays.
    x = "sgd"

    # % endif

    y = x % 2

    # % if sync_bn
    y += 1
    # % endif

    return y  # the end: {# no comment #}
'''


def test_the_formatter_leaves_markers_alone(switched, tmp_path):
    (tmp_path / "marked.py").write_text(TRICKY, encoding="utf-8")
    (tmp_path / "chosen.py").write_text(switched(TRICKY), encoding="utf-8")
    run(sys.executable, "-m", "ruff", "format", "--no-cache", "--diff", *tmp_path.glob("*.py"))


def test_markers_between_anything(switched):
    everything = switched(TRICKY)
    head, first, second = everything.split("\n\n\n")
    assert head == TRICKY[: TRICKY.index("\n# % if ddp")].replace("«opt_level»", "O1")
    assert first == "def first():\n    return 1"
    assert second == (
        "def second(x):\n\n    x = call(\n        x,\n        on=True,\n        levels=[\n"
        '            "O0",\n            "O1",\n        ],\n    )\n\n'
        "    y = x % 2\n\n    y += 1\n\n    return y  # the end: {# no comment #}\n"
    )


def test_nothing_is_left_of_what_was_not_chosen(switched):
    text = switched(TRICKY, sync_bn=False, ddp="torch", fused_adam=False)
    assert text.split("\n\n\n")[1:] == [
        'def second(x):\n\n    # A comment stays.\n    x = "sgd"\n\n'
        "    y = x % 2\n\n    return y  # the end: {# no comment #}\n"
    ]


@pytest.mark.parametrize(
    ("source", "line", "reason"),
    [
        pytest.param("x = 1\ny = 2  # % if sync_bn\n", 2, "a marker is left", id="after-code"),
        pytest.param("# % if sync_bn\n#\n# % if\n", 3, "Expected an expression", id="malformed"),
        pytest.param("# % if sync_bn\nx = 1\n", 1, "endif", id="unclosed"),
        pytest.param("x = 1\n\n# %% a cell\n", 3, "a marker is left", id="cell"),
        pytest.param("x = 1\n\ny = '«nothing»'\n", 3, "'nothing' is undefined", id="undefined"),
        pytest.param("#\n# % if nothing\n# % endif\n", 2, "'nothing' is undefined", id="condition"),
        pytest.param("x = '«author_name»'\n", 1, "'author_name' is undefined", id="free-text"),
        pytest.param("# % if sync_bn\nx = = 1\n# % endif\n", 1, "invalid syntax", id="no-python"),
    ],
)
def test_a_broken_template_is_named_by_file_and_line(
    switched, capfd, tmp_path, source, line, reason
):
    with pytest.raises(FailedHookException):
        switched(source)
    message = capfd.readouterr().err
    assert message.startswith(f"The template is broken: main.py, line {line}: ")
    assert reason in message
    assert list((tmp_path / "out").iterdir()) == []


# What pip makes of it


@pytest.mark.parametrize("license", ["MIT", "none"])
def test_it_can_be_installed(bake, tmp_path, license):
    project = bake(license=license)
    build = "from setuptools import build_meta as b; b.prepare_metadata_for_build_editable('.')"
    run(sys.executable, "-c", build, cwd=project)
    (metadata,) = project.glob("*.dist-info/METADATA")
    lines = metadata.read_text(encoding="utf-8").splitlines()
    assert "Name: ddp_training" in lines
    assert "Requires-Dist: torch>=2.6" in lines
    assert ("License-Expression: MIT" in lines) == (license == "MIT")
    assert not any("apex" in line.lower() for line in lines if line.startswith("Requires-Dist"))
    (modules,) = project.glob("*.dist-info/top_level.txt")
    assert modules.read_text().strip() == ""
