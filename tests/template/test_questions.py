"""What is asked, what each answer does, and which answers are refused."""

import ast
import json
import re
import subprocess
import sys

import pytest
from cookiecutter.exceptions import FailedHookException
from cookiecutter.generate import generate_context
from cookiecutter.prompt import prompt_for_config
from hypothesis import example, given, settings
from hypothesis import strategies as st

QUESTIONS = {
    "project_name": "DDP Training",
    "project_slug": "ddp_training",
    "description": "Multi-GPU, mixed-precision training in PyTorch.",
    "author_name": "The DDP Training authors",
    "task": "classification",
    "opt_level": "O1",
    "fused_adam": True,
    "sync_bn": True,
    "ddp": "apex",
    "backend": "auto",
    "cluster": "none",
    "license": "MIT",
}
SLUG = re.compile("[A-Za-z]([A-Za-z0-9_-]{0,58}[A-Za-z0-9])?")


@pytest.fixture(scope="module")
def asked(template):
    return json.loads((template / "cookiecutter.json").read_text(encoding="utf-8"))


def files(folder):
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder): path.read_bytes() for path in paths}


# What is asked


def test_default_answers(defaults):
    assert defaults == QUESTIONS


def test_every_question_and_choice_has_a_prompt(asked):
    prompts = asked["__prompts__"]
    assert list(prompts) == list(QUESTIONS)
    for name in QUESTIONS:
        choices = asked[name] if isinstance(asked[name], list) else []
        sentences = prompts[name] if choices else {"__prompt__": prompts[name]}
        assert list(sentences) == ["__prompt__", *choices]
        for key, sentence in sentences.items():
            assert "[" not in sentence, "rich takes brackets for markup"
            assert len(sentence.split()) > 3
            assert key == "__prompt__" or sentence.startswith(f"{key}: ")
        assert re.search(r"\?( \(.*\))?$", sentences["__prompt__"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    [
        pytest.param({"project_name": "Another name"}, id="project_name"),
        pytest.param({"project_slug": "another_slug"}, id="project_slug"),
        pytest.param({"description": "Another description."}, id="description"),
        pytest.param({"author_name": "Another author"}, id="author_name"),
        *(pytest.param({"opt_level": level}, id=level) for level in ("O0", "O2", "O3", "O4", "O5")),
        pytest.param({"fused_adam": False}, id="sgd"),
        pytest.param({"sync_bn": False}, id="no-sync_bn"),
        pytest.param({"ddp": "torch"}, id="torch-ddp"),
        *(pytest.param({"task": task}, id=task) for task in ("segmentation", "contrastive")),
        *(pytest.param({"backend": backend}, id=backend) for backend in ("apex", "native")),
        *(pytest.param({"cluster": cluster}, id=cluster) for cluster in ("slurm", "kubernetes")),
        *(pytest.param({"license": name}, id=name) for name in ("BSD-3-Clause", "Apache-2.0")),
        pytest.param({"license": "none"}, id="no-license"),
    ],
)
def test_every_answer_changes_the_project(bake, answer):
    assert files(bake(**answer)) != files(bake())


# The default folder name


def default_slug(template, project_name):
    context = generate_context(str(template / "cookiecutter.json"))["cookiecutter"]
    questions = {name: context[name] for name in ("project_name", "project_slug")}
    # As typed text arrives, not as text from the command line, which cookiecutter renders.
    questions["project_name"] = "{{ cookiecutter._typed }}"
    return prompt_for_config(
        {"cookiecutter": {"_typed": project_name, **questions}}, no_input=True
    )["project_slug"]


@pytest.mark.parametrize(
    ("project_name", "slug"),
    [
        ("DDP Training", "ddp_training"),
        ("  Señor Ümlaut's net!  ", "senor_umlaut_s_net"),
        ("under_scored-name", "under_scored_name"),
        ("3D U-Net", "ddp_3d_u_net"),
        ("🔥🔥", "ddp_training"),
        ("", "ddp_training"),
        ("../../etc", "etc"),
        ("深度学习", "shen_du_xue_xi"),
        ("x" * 300, "x" * 56),
        ("3" * 300, "ddp_" + "3" * 56),
    ],
)
def test_default_slug(template, project_name, slug):
    assert default_slug(template, project_name) == slug


@settings(deadline=None)
@given(st.text())
@example("_")
@example("-a-")
@example("a" * 55 + " b")
@example("{{ 7*7 }}")
@example("&amp;&#x2f;..")
def test_default_slug_is_always_valid(template, project_name):
    assert SLUG.fullmatch(default_slug(template, project_name))


@pytest.mark.parametrize(
    ("words", "meant"),
    [(("yes", "on"), True), (("True", "1"), True), (("no", "f"), False), (("False", "OFF"), False)],
)
def test_yes_no_words(bake, words, meant):
    """As they arrive from the command line before cookiecutter 2.7."""
    fused_adam, sync_bn = words
    assert files(bake(fused_adam=fused_adam, sync_bn=sync_bn)) == files(
        bake(fused_adam=meant, sync_bn=meant)
    )


# What is refused


@pytest.fixture
def refusal(bake, capfd, tmp_path):
    """The sentence that refuses the answers, once it is sure that nothing is left of them."""

    def refusal(**answers):
        out = tmp_path / "out"
        out.mkdir(exist_ok=True)
        with pytest.raises(FailedHookException):
            bake(into=out, **answers)
        assert [path for path in tmp_path.rglob("*") if path != out] == []
        sentence = capfd.readouterr().err
        assert re.fullmatch(r"[^\n]+\.\n", sentence)
        return sentence

    return refusal


@pytest.mark.parametrize(
    "slug",
    [
        pytest.param("my project", id="space"),
        pytest.param("my.project", id="dot"),
        pytest.param("_project", id="leading-underscore"),
        pytest.param("-project", id="option"),
        pytest.param("1project", id="digit"),
        pytest.param("project_", id="trailing-underscore"),
        pytest.param("project\n", id="newline"),
        pytest.param("projét", id="accent"),
        pytest.param("проект", id="cyrillic"),
        pytest.param("🔥", id="emoji"),
        pytest.param("$(touch pwned)", id="shell"),
        pytest.param("{{ 7*7 }}", id="jinja"),
        pytest.param('a\'b"""c', id="quotes"),
        pytest.param("a\\b", id="backslash"),
        pytest.param("x" * 61, id="long"),
        pytest.param("../outside", id="beside-the-output"),
        pytest.param("\udcff", id="surrogate"),
    ],
)
def test_invalid_slug_is_refused(refusal, slug):
    assert refusal(project_slug=slug).startswith(f"project_slug cannot be {slug!a}: ")


def test_absolute_slug_is_refused(refusal, tmp_path):
    assert "project_slug" in refusal(project_slug=str(tmp_path / "elsewhere"))


def test_slug_with_a_slash_leaves_no_file(bake, tmp_path):
    with pytest.raises(FailedHookException):
        bake(into=tmp_path, project_slug="a/b")
    # The one trace that a hook cannot take away: cookiecutter makes a/b, and removes b alone.
    assert list(tmp_path.rglob("*")) == [tmp_path / "a"]


@pytest.mark.parametrize("slug", ["", ".", "..", "mine/inner"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_slug_with_parent_folder_is_refused(bake, tmp_path, slug, overwrite):
    mine = tmp_path / "out" / "mine" / "inner" / "main.py"
    mine.parent.mkdir(parents=True)
    mine.write_text("# mine")
    with pytest.raises(Exception, match="already exists|Hook script failed"):
        bake(tmp_path / "out", options={"overwrite_if_exists": overwrite}, project_slug=slug)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [mine]
    assert mine.read_text() == "# mine"


@pytest.mark.parametrize(
    "slug", ["torch", "Torch", "json", "antigravity", "pip", "apex-native", "Apex__Native"]
)
def test_slug_that_shadows_a_module_is_refused(refusal, slug):
    assert refusal(project_slug=slug).startswith(f"project_slug cannot be '{slug}': it would hide")


@pytest.mark.parametrize("slug", ["a", "A1", "my-net", "my_net-2", "torch_net", "x--y", "x" * 60])
def test_valid_slug_is_accepted(bake, slug):
    assert bake(project_slug=slug).name == slug


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("opt_level", "O9"),
        ("opt_level", "o1"),
        ("opt_level", ["O1"]),
        ("opt_level", None),
        ("fused_adam", "maybe"),
        ("fused_adam", None),
        ("sync_bn", ""),
        ("task", "detection"),
        ("ddp", "horovod"),
        ("backend", "cuda"),
        ("cluster", "pbs"),
        ("license", "GPL-3.0"),
        ("license", ""),
    ],
)
def test_unknown_choice_is_refused(refusal, asked, name, answer):
    choices = ", ".join(asked[name]) if isinstance(asked[name], list) else "yes or no"
    assert refusal(**{name: answer}).startswith(f"{name} cannot be {answer!a}: ")
    assert refusal(**{name: answer}).endswith(f" {choices}.\n")


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_opt_level_without_support_in_apex_is_refused(refusal, level):
    sentence = refusal(opt_level=level, backend="apex")
    assert sentence.startswith(f"opt_level {level} does not exist in NVIDIA's Apex: set backend to")


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        *(("sync_bn", True), ("sync_bn", "yes"), ("backend", "apex"), ("opt_level", "O4")),
        *(("cluster", "slurm"), ("cluster", "kubernetes")),
    ],
)
def test_unsupported_answers_with_dataparallel_are_refused(refusal, name, answer):
    sentence = refusal(**{"ddp": "dataparallel", "sync_bn": False, name: answer})
    assert re.match(rf"{name} (\w+ )?cannot go with ddp dataparallel, ", sentence)
    assert f"set {name} to " in sentence and sentence.endswith("or ddp to apex or torch.\n")


@pytest.mark.parametrize(
    ("name", "answer"),
    [("opt_level", "O1"), ("opt_level", "O2"), ("opt_level", "O3"), ("backend", "apex")],
)
def test_unsupported_answers_with_fsdp_are_refused(refusal, name, answer):
    sentence = refusal(**{"ddp": "fsdp", "opt_level": "O0", name: answer})
    assert re.match(rf"{name} (\w+ )?cannot go with ddp fsdp, ", sentence)
    assert f"set {name} to " in sentence and sentence.endswith("or ddp to apex or torch.\n")


@pytest.mark.parametrize("name", ["project_name", "description", "author_name"])
@pytest.mark.parametrize("half", ["\ud800", "\udcff"])
def test_lone_surrogate_is_refused(refusal, name, half):
    sentence = refusal(**{name: f"before{half}after"})
    assert sentence.startswith(f"{name} holds {half!a}, ")


def test_command_line_refusal(template, config, tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "cookiecutter", "--config-file", config, "--no-input"),
            *("--output-dir", tmp_path, template, "opt_level=O4", "backend=apex"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("opt_level O4 does not exist in NVIDIA's Apex")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_project_modules_are_refused_as_slugs(template, bake, tmp_path):
    project = template / "{{cookiecutter.project_slug}}"
    names = {path.stem for path in project.iterdir() if path.is_dir() or path.suffix == ".py"}
    for path in project.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module.partition(".")[0])
    assert {"engine", "main", "torch"} <= names
    # These are task.py in a project.
    names -= {"template_task_segmentation", "template_task_contrastive"}
    for name in names - {path.stem for path in project.glob("tests/*.py")}:
        with pytest.raises(FailedHookException):
            print(f"{name} is accepted by the pre-hook:", bake(into=tmp_path, project_slug=name))
