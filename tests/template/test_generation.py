"""The ways to a project: prompts, replay, an existing folder, a zip file, git and cruft."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cookiecutter.exceptions import FailedHookException
from fresh import ROOT
from parameters import mostly_slow

TYPED = '{{ 7*7 }} {% raw %} {# "it\'s" $(touch pwned) `touch pwned` \\ 😀 «opt_level» # % if'


def read(folder, without=(".git", ".cruft.json")):
    paths = [path for path in folder.rglob("*") if path.is_file()]
    names = {path: path.relative_to(folder) for path in paths}
    return {str(n): p.read_bytes() for p, n in names.items() if n.parts[0] not in without}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a command in a new folder, away from this machine's settings; return what it prints."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("COOKIECUTTER_CONFIG", "XDG_CONFIG_HOME", "GIT_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "A. Tester")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "tester@example.org")
    work = tmp_path / "work"
    work.mkdir()

    def run(*command, cwd=work, stdin="", status=0):
        command = [str(part) for part in command]
        if command[0] in ("cookiecutter", "cruft"):
            command = [sys.executable, "-m", *command]
        done = subprocess.run(
            command, cwd=cwd, input=stdin, capture_output=True, encoding="utf-8", timeout=120
        )
        assert done.returncode == status, done.stdout + done.stderr
        run.stderr = done.stderr
        return done.stdout

    run.work = work
    return run


@pytest.fixture
def repository(run, template, tmp_path):
    """The template as a git repository."""
    folder = tmp_path / "repository"
    shutil.copytree(template, folder)
    run("git", "init", "--quiet", "--initial-branch=main", cwd=folder)
    commit(run, folder, "one")
    return folder


def commit(run, folder, message):
    run("git", "add", "--all", cwd=folder)
    run("git", "commit", "--quiet", "--message", message, cwd=folder)


def test_defaults_without_prompts(run, template, bake):
    run("cookiecutter", "--no-input", template)
    assert f"Next:\n\n    cd {run.work}/ddp_training\n" in run.stderr
    assert read(run.work / "ddp_training") == read(bake())


def test_answers_on_the_command_line(run, template, bake):
    run("cookiecutter", "--no-input", template, "fused_adam=no", "opt_level=O2", "license=none")
    expected = bake(fused_adam=False, opt_level="O2", license="none")
    assert read(run.work / "ddp_training") == read(expected)


def test_answers_in_a_file(run, template, bake):
    text = "default_context:\n  task: segmentation\n  fused_adam: false\n  ddp: torch\n"
    (run.work / "answers.yaml").write_text(text)
    run("cookiecutter", "--no-input", "--config-file", "answers.yaml", template, "ddp=apex")
    assert read(run.work / "ddp_training") == read(bake(task="segmentation", fused_adam=False))
    # And that of the documentation.
    page = (ROOT / "docs" / "get_started.md").read_text(encoding="utf-8")
    text = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1]
    (run.work / "answers.yaml").write_text(text)
    run("cookiecutter", "--no-input", "--config-file", "answers.yaml", template)
    named = {"project_name": "Leaves", "author_name": "The Leaves authors"}
    expected = bake(task="segmentation", project_slug="leaves", **named)
    assert read(run.work / "leaves") == read(expected)


def test_prompts(run, template, bake):
    answers = [
        TYPED,
        "my-project",
        f"{TYPED} does it",
        f"{TYPED} & Co",
        "2",
        "6",
        "n",
        "no",
        "2",
        "3",
        "3",
        "2",
    ]
    said = run("cookiecutter", template, stdin="\n".join(answers) + "\n")
    expected = bake(
        project_name=TYPED,
        project_slug="my-project",
        description=f"{TYPED} does it",
        author_name=f"{TYPED} & Co",
        task="segmentation",
        opt_level="O5",
        fused_adam=False,
        sync_bn=False,
        ddp="torch",
        backend="native",
        cluster="kubernetes",
        license="BSD-3-Clause",
    )
    assert read(run.work / "my-project") == read(expected)
    assert not list(run.work.rglob("pwned"))

    said = " ".join(said.split())
    prompts = json.loads((template / "cookiecutter.json").read_text(encoding="utf-8"))[
        "__prompts__"
    ]
    for question in prompts.values():
        for sentence in [question] if isinstance(question, str) else question.values():
            assert sentence in said


def test_defaults_follow_the_project_name(run, template, bake):
    run("cookiecutter", template, stdin=TYPED + 12 * "\n")
    slug = "ddp_7_7_raw_it_s_touch_pwned_touch_pwned_opt_level_if"
    expected = bake(project_name=TYPED, project_slug=slug, author_name=f"The {TYPED} authors")
    assert read(run.work / slug) == read(expected)


def test_replay(run, template):
    answers = [TYPED, "replayed", TYPED, TYPED, "3", "2", "n", "y", "2", "3", "2", "3"]
    run("cookiecutter", template, stdin="\n".join(answers) + "\n")
    first = read(run.work / "replayed")
    run("cookiecutter", "--replay", "--output-dir", "again", template)
    assert read(run.work / "again" / "replayed") == first
    run("cookiecutter", "--replay", template, status=1)  # it is there already
    assert read(run.work / "replayed") == first


@pytest.fixture
def edited(bake, tmp_path):
    """A project on which its user has worked, and what was added to it."""
    project = bake(into=tmp_path / "out", opt_level="O1")
    added = {
        "notebook.py": "# %%\nx = '«opt_level»'\n# % if sync_bn\n# %matplotlib inline\n",
        "engine/extra.py": "# %% [markdown]\nnot = python\n",
        "apex_native/amp/extra.py": "# % endif\n",
        "data/photos/0.txt": "{{ 7*7 }}",
        "tests/test_mine.py": "# % nothing\n",
        "runs/last.pt": "\0",
        "LICENSE.md": "{% if",
    }
    for name, text in added.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text, encoding="utf-8")
    (project / "main.py").write_text("# %% mine\n« edited »\n", encoding="utf-8")
    return project, {name: text.encode() for name, text in added.items()}


def test_overwriting_keeps_what_the_user_added(bake, edited):
    project, added = edited
    bake(into=project.parent, options={"overwrite_if_exists": True}, opt_level="O3", ddp="torch")
    assert read(project) == read(bake(opt_level="O3", ddp="torch")) | added


def test_refused_answers_leave_an_existing_project_unchanged(bake, edited):
    project, _ = edited
    before = read(project)
    with pytest.raises(FailedHookException):
        bake(
            into=project.parent,
            options={"overwrite_if_exists": True},
            opt_level="O4",
            backend="apex",
        )
    assert read(project) == before


def test_modules_in_the_folder_for_temporary_files_are_not_run(run, template, bake, monkeypatch):
    """Any user of the host can put them there; cookiecutter runs the hooks in it."""
    folder = run.work / "shared"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    for name in ("contextlib", "jinja2", "json", "pathlib", "re", "shlex", "tempfile", "traceback"):
        (folder / f"{name}.py").write_text("raise SystemExit('code of another user')\n")
    run("cookiecutter", "--no-input", template)
    assert read(run.work / "ddp_training") == read(bake())


def test_zip_file(run, template, bake):
    archive = shutil.make_archive(str(run.work / "template"), "zip", template.parent, template.name)
    run("cookiecutter", "--no-input", archive)
    project = run.work / "ddp_training"
    assert read(project) == read(bake())
    assert os.access(project / "run.sh", os.X_OK), "zip files lose it"


def test_git_checkout_of_a_tag(run, repository, bake):
    run("git", "tag", "v1", cwd=repository)
    (repository / "hooks" / "pre_gen_project.py").write_text("raise SystemExit('broken')\n")
    commit(run, repository, "two")
    run("cookiecutter", "--no-input", repository.as_uri(), status=1)
    run("cookiecutter", "--no-input", "--checkout", "v1", repository.as_uri())
    assert read(run.work / "ddp_training") == read(bake())


@pytest.mark.parametrize(
    "name", mostly_slow(["{{ 7*7 }}", "it's", 'three """ quotes', "with space", "ü🙂\\n"])
)
def test_template_path_with_special_characters(run, template, bake, tmp_path, name):
    shutil.copytree(template, tmp_path / name)
    run("cookiecutter", "--no-input", tmp_path / name)
    assert read(run.work / "ddp_training") == read(bake())


def test_template_by_relative_path(run, template, bake):
    run(
        "cookiecutter",
        "--no-input",
        "--output-dir",
        "../out",
        ".",
        cwd=shutil.copytree(template, run.work / "t"),
    )
    assert read(run.work / "out" / "ddp_training") == read(bake())


@pytest.mark.slow
def test_cruft_update_of_an_edited_project(run, repository, bake):
    run("git", "tag", "v1", cwd=repository)
    task = Path("{{cookiecutter.project_slug}}", "task.py")
    with open(repository / task, "a", encoding="utf-8") as file:
        file.write("\n\nNEW = True\n")
    commit(run, repository, "two")

    # Somebody generated the version before, and has edited it since.
    answers = ("--extra-context", '{"opt_level": "O2"}')
    run("cruft", "create", "--no-input", "--checkout", "v1", *answers, repository)
    project = run.work / "ddp_training"
    generated = read(bake(opt_level="O2"))
    assert read(project) == generated
    edited = generated["task.py"].replace(b"\nimport", b"\n# Mine.\nimport", 1)
    assert edited != generated["task.py"]
    (project / "task.py").write_bytes(edited)
    run("git", "init", "--quiet", cwd=project)
    commit(run, project, "edited")
    run("cruft", "check", "--checkout", "v1", cwd=project)
    run("cruft", "check", "--checkout", "main", cwd=project, status=1)

    run("cruft", "update", "--skip-apply-ask", "--checkout", "main", cwd=project)
    assert "Next:" not in run.stderr  # it was generated in a temporary folder
    run("cruft", "check", cwd=project)
    assert read(project) == generated | {"task.py": edited + b"\n\nNEW = True\n"}
    assert "# Mine." in run("cruft", "diff", cwd=project)


@pytest.mark.parametrize(("ddp", "best"), [("apex", "best.pt"), ("fsdp", "best")])
def test_readme_names_the_checkpoints_of_the_project(bake, ddp, best):
    """Checkpoints of FSDP are folders, whose names have no suffix."""
    readme = (bake(ddp=ddp, opt_level="O4", sync_bn=False) / "README.md").read_text()
    assert f"predict.py runs/ddp_training/{best} data" in readme
    assert set(re.findall(r"/best(?:\.pt)?\b", readme)) == {f"/{best}"}
