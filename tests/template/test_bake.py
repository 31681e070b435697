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
from fresh import TEMPLATE

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
    "constraints.txt",
    "main.py",
    "predict.py",
    "pyproject.toml",
    "run.sh",
    "task.py",
    "data/digits.npz",
    "data/example.png",
    "tests/test_task.py",
    "tests/test_training.py",
]
# The libraries are copied whole.
FILES += [
    str(path.relative_to(TEMPLATE))
    for library in ("apex_native", "engine")
    for path in sorted((TEMPLATE / library).rglob("*"))
    if path.is_file() and "__pycache__" not in path.parts
]
WITH_FLAGS = ("main.py", "task.py", "engine/flags.py")
JOBS = {"slurm": {"launch/slurm.sbatch"}, "kubernetes": {"launch/trainjob.yaml"}, "none": set()}
RECIPES = {
    f"recipes/{name}.json"
    for name in (
        "fashion_mnist_resnet18",
        "fashion_mnist_wrn",
        "finetune",
        "imagenet_resnet50_90",
        "imagenet_resnet50_modern",
    )
}
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
        if answers["ddp"] == "fsdp" and (level in ("O1", "O2", "O3") or backend == "apex"):
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


def check_complexity(*paths):
    """Check the functions' complexity and number of statements, whatever the project's settings."""
    limits = ("lint.mccabe.max-complexity=10", "lint.pylint.max-statements=50")
    options = [word for limit in limits for word in ("--config", limit)]
    select = ("--no-cache", "--isolated", "--select", "C901,PLR0915")
    run(sys.executable, "-m", "ruff", "check", *select, *options, *paths)


def long_functions(source):
    """Return the functions that are longer than 50 lines, with their lengths."""
    functions = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lengths = [(node.name, node.end_lineno - node.lineno + 1) for node in functions]
    return [(name, length) for name, length in lengths if length > 50]


def test_long_functions_include_those_whose_name_recurs():
    long = "def build():\n" + "    pass\n" * 50
    nested = "def build_model():\n    def build():\n        pass\n"
    assert long_functions(long + nested) == [("build", 51)]


def file_names(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def leftovers(name, text):
    for line in text.splitlines():
        is_jinja = re.search(r"(?<!\$){{", line)  # and no expression of GitHub's
        if LEFTOVER.search(line) or (is_jinja and not name.endswith(".py")):
            yield name, line


# Every combination


@pytest.mark.parametrize(
    ("level", "every"),
    [("O0", 7), *(pytest.param(one, 1, marks=pytest.mark.weekly) for one in LEVELS)],
)
def test_every_combination(template, bake, tmp_path, level, every):
    """Generate projects with all combinations of answers, or with every seventh one."""
    seen, code, wrappers = set(), [], set()
    for number, answers in enumerate(combinations(template, opt_level=level)):
        if number % every:
            continue
        wrappers.add(answers["ddp"])
        project = bake(into=tmp_path / str(number), **answers)
        expected = set(FILES) - ({"LICENSE"} if answers["license"] == "none" else set())
        expected |= JOBS[answers["cluster"]]
        expected |= RECIPES if answers["task"] == "classification" else set()
        assert file_names(project) == expected, answers
        for name in expected - {"data/digits.npz", "data/example.png"}:
            text = (project / name).read_text(encoding="utf-8")
            if (name, text) not in seen:
                seen.add((name, text))
                assert list(leftovers(name, text)) == [], answers
                if name.endswith(".py"):
                    compile(text, name, "exec")
                    code.append(project / name)
                if name in ("main.py", "predict.py"):
                    assert long_functions(text) == [], answers
        sources = [(project / name).read_text(encoding="utf-8") for name in WITH_FLAGS]
        for name in json.loads((project / "config.example.json").read_text(encoding="utf-8")):
            assert f'"--{name.replace("_", "-")}"' in "".join(sources), answers
        settings = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
        assert settings["project"].get("license", "none") == answers["license"]
    lint(*code)
    check_complexity(*code)
    # fused_adam, sync_bn, ddp and backend; FSDP and DataParallel with auto or native.
    scripts = 2 * 2 * 2 * (2 if level in ("O4", "O5") else 3) + 2 * 2 * (level != "O4")
    scripts += 2 * 2 * 2 * (level in ("O0", "O4", "O5"))
    assert number + 1 == 3 * scripts
    assert len([name for name, _ in seen if name == "task.py"]) == 3
    if every > 1:
        assert wrappers == {"apex", "torch", "fsdp", "dataparallel"}
        return
    assert len([name for name, _ in seen if name == "main.py"]) == 3 * scripts


@pytest.mark.slow
@pytest.mark.parametrize(
    "slug", [pytest.param("a", id="shortest"), pytest.param("x" * 60, id="longest")]
)
@pytest.mark.parametrize("backend", ["auto", "native"])
def test_code_is_formatted_for_slugs_of_any_length(bake, tmp_path, slug, backend):
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
            ["torch.optim.SGD", " nn.parallel.", "--momentum"],
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
            {"ddp": "fsdp", "opt_level": "O4"},
            ["sharding.apply(model, task.BLOCKS)", "join_forward"],
            ["DistributedDataParallel", "delay_allreduce"],
            id="fsdp",
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
            ["model, optimizer = apex", "--ignore-index"],
            id="contrastive",
        ),
        pytest.param(
            {"opt_level": "O5", "backend": "native"},
            ['opt_level="O5"', 'backend="native"'],
            ['opt_level="O1"', 'backend="auto"'],
            id="bf16-native",
        ),
    ],
)
def test_answers_select_the_code(bake, answers, there, gone):
    project = bake(**answers)
    text, task = ((project / name).read_text(encoding="utf-8") for name in ("main.py", "task.py"))
    assert [part for part in there if part not in text + task] == []
    assert [part for part in gone if part in text] == []


# One project


@pytest.fixture(scope="module")
def project(bake):
    return bake()


def test_files_keep_their_modes(template, project):
    source = template / "{{cookiecutter.project_slug}}"
    for name in file_names(project) - {"LICENSE", "data/example.png"} - RECIPES:
        assert (project / name).stat().st_mode == (source / name).stat().st_mode, name
    assert (project / "run.sh").stat().st_mode & 0o111


def test_code_and_data_without_markers_are_copies(template, project):
    source = template / "{{cookiecutter.project_slug}}"
    copies = {name for name in file_names(project) if name.endswith((".py", ".npz", ".sh"))}
    for name in copies - {"main.py", "run.sh", "tests/test_training.py"}:
        assert (project / name).read_bytes() == (source / name).read_bytes(), name


def test_generation_is_reproducible(bake, project, monkeypatch):
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
            "torch>=2.6,<3",
            "torchvision>=0.21",
            "tqdm>=4.66",
            "pillow>=11.0",
            "matplotlib>=3.7",
            "tensorboard>=2.11",
        ],
        "optional-dependencies": {
            "codec": ["torchcodec>=0.16"],
            "mlflow": ["mlflow>=2.14"],
            "timm": ["timm>=1.0"],
            "remote": ["aiohttp>=3.9", "fsspec>=2024.2"],
            "wandb": ["wandb>=0.19"],
            "onnx": ["onnxruntime>=1.20", "onnxscript>=0.3"],
            "test": [
                "mypy>=1.15",
                "pre-commit>=3.5",
                "pytest>=8.0",
                "pytest-xdist>=3.5",
                "ruff>=0.9",
            ],
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


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("LICENSE", {"license": "none"}),
        ("launch/slurm.sbatch", {"cluster": "none"}),
        ("launch/slurm.sbatch", {"cluster": "kubernetes"}),
        ("task_segmentation.py", {"task": "segmentation"}),
    ],
)
def test_user_files_are_kept(bake, tmp_path, name, answers):
    mine = tmp_path / "ddp_training" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    project = bake(into=tmp_path, options={"overwrite_if_exists": True}, **answers)
    assert mine.read_text() == "mine"
    assert {path.name for path in project.glob("*task*")} - {name} == {"task.py"}


def test_hook_prints_the_next_commands(bake, tmp_path, capfd):
    project = bake(into=tmp_path / "it's a folder")
    lines = [line.strip() for line in capfd.readouterr().err.splitlines()]
    go, install, start = [line for line in lines if line][-3:]
    assert run("sh", "-c", f"{go} && pwd") == f"{project}\n"
    assert shlex.split(install) == ["pip", "install", "-e", "."]
    assert (project / start).is_file()


# The markers


def test_template_files_compile_and_lint(template):
    folder = template / "{{cookiecutter.project_slug}}"
    for path in folder.rglob("*.py"):
        compile(path.read_bytes(), path, "exec")
    tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    lint(folder)


def test_post_hook_lists_every_file_with_markers(template):
    hook = (template / "hooks" / "post_gen_project.py").read_text(encoding="utf-8")
    marked = ast.literal_eval(re.search(r"^MARKED = (\(.*?\))$", hook, re.M | re.S)[1])
    folder = template / "{{cookiecutter.project_slug}}"
    texts = [name for name in file_names(folder) if not name.startswith("data/")]
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


def test_formatter_keeps_markers(switched, tmp_path):
    (tmp_path / "marked.py").write_text(TRICKY, encoding="utf-8")
    (tmp_path / "chosen.py").write_text(switched(TRICKY), encoding="utf-8")
    run(sys.executable, "-m", "ruff", "format", "--no-cache", "--diff", *tmp_path.glob("*.py"))


def test_markers_are_resolved_everywhere(switched):
    everything = switched(TRICKY)
    head, first, second = everything.split("\n\n\n")
    assert head == TRICKY[: TRICKY.index("\n# % if ddp")].replace("«opt_level»", "O1")
    assert first == "def first():\n    return 1"
    assert second == (
        "def second(x):\n\n    x = call(\n        x,\n        on=True,\n        levels=[\n"
        '            "O0",\n            "O1",\n        ],\n    )\n\n'
        "    y = x % 2\n\n    y += 1\n\n    return y  # the end: {# no comment #}\n"
    )


def test_unchosen_branches_are_removed(switched):
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
def test_template_error_names_file_and_line(switched, capfd, tmp_path, source, line, reason):
    with pytest.raises(FailedHookException):
        switched(source)
    message = capfd.readouterr().err
    assert message.startswith(f"The template is broken: main.py, line {line}: ")
    assert reason in message
    assert list((tmp_path / "out").iterdir()) == []


# What pip makes of it


@pytest.mark.parametrize("license", ["MIT", "none"])
def test_project_is_installable(bake, license):
    project = bake(license=license)
    build = "from setuptools import build_meta as b; b.prepare_metadata_for_build_editable('.')"
    run(sys.executable, "-c", build, cwd=project)
    (metadata,) = project.glob("*.dist-info/METADATA")
    lines = metadata.read_text(encoding="utf-8").splitlines()
    assert "Name: ddp_training" in lines
    assert "Requires-Dist: torch<3,>=2.6" in lines
    assert ("License-Expression: MIT" in lines) == (license == "MIT")
    assert not any("apex" in line.lower() for line in lines if line.startswith("Requires-Dist"))
    (modules,) = project.glob("*.dist-info/top_level.txt")
    assert modules.read_text().strip() == ""
