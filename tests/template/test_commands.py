"""Commands in README.md, the documentation, CONTRIBUTING.md and benchmarks/.

Those for a generated project are executed here, with fewer steps. tests/documented_commands.toml
lists all others, with the tests that run them or the reason why none does.
"""

import re
import sys
from fnmatch import fnmatchcase
from importlib import import_module

import pytest
from fresh import ROOT
from test_readme import commands as commands_of_readme
from test_readme import execute, failures, fill_hub, save_old_checkpoint, trains

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LISTED = ROOT / "tests" / "documented_commands.toml"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
IN_PROJECT = re.compile(r"([A-Z_]+=\S+ )*(\./run\.sh|python -m engine[.\w]+|python predict\.py)\b")


def commands(page):
    """Return the commands of a page's blocks, each in one line and without comments."""
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    lines = [line for line in lines if not line.lstrip().startswith("#")]
    return [" ".join(line.partition("  # ")[0].split()) for line in lines]


ALL = {command: page for page in PAGES for command in commands(page)}
ELSEWHERE = (  # listed, with their tests
    "NNODES=",
    "--tracker tensorboard mlflow",
    "--config recipes/",
    "--layer-decay",
    "--image-size",
    "--flip-tta",
    "engine.checkpoint.consolidate",
    "s3://",
    "engine.data.pack DIR packed --shuffle",
)
TRAINED = [
    line for line in ALL if IN_PROJECT.match(line) and not any(part in line for part in ELSEWHERE)
]


def entries():
    return tomllib.loads(LISTED.read_text(encoding="utf-8"))


def test_blocks_of_commands_are_marked():
    """Only a block that is marked as sh is found by `commands`."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        others = re.findall(r"^ *```(?!sh\n)\w*\n(.*?)^ *```", text, re.M | re.S)
        others += re.findall(
            r"^\n((?:    \S.*\n)+)", re.sub(r"(?ms)^( *)```.*?```$", "", text), re.M
        )
        for block in others:
            assert not re.search(r"^ *(\./run\.sh|pip|python|sbatch|docker|make)\b", block, re.M), (
                f"{page.name}: mark this block as ```sh:\n{block}"
            )


def test_every_command_is_executed_or_listed():
    patterns = {name for group in entries().values() for name in group}
    missing = [
        f"{page.relative_to(ROOT)}: {command}"
        for command, page in ALL.items()
        if command not in TRAINED and not any(fnmatchcase(command, name) for name in patterns)
    ]
    assert len(TRAINED) > 35
    assert not missing, f"add to {LISTED.name}:\n" + "\n".join(missing)
    unused = [name for name in patterns if not any(fnmatchcase(line, name) for line in ALL)]
    assert not unused, f"{LISTED.name} lists commands that no page has: {unused}"


def test_commands_that_train_name_a_folder(shared_project):
    """The default one is not free after ./run.sh, the first of Get started and the READMEs."""
    found = {*ALL}
    for page in PAGES:
        for row in re.findall(r"^\|.*", page.read_text(encoding="utf-8"), re.MULTILINE):
            found |= {text for text in re.findall(r"`([^`]+)`", row) if IN_PROJECT.match(text)}
    for task in ("classification", "segmentation", "contrastive"):
        found |= {*commands_of_readme(shared_project(task=task))}
    names_folder = re.compile(r"--output|--config \S+\.json|^\./run\.sh$")  # or a file names it
    assert [line for line in found if trains(line) and not names_folder.search(line)] == []


@pytest.mark.parametrize(
    "name",
    [
        "engine.checkpoint.consolidate",
        "engine.data.pack",
        "engine.data.verify",
        "engine.monitoring.curves",
        "engine.monitoring.deliver",
    ],
)
def test_help_has_the_command_and_describes_each_flag(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name.rpartition('.')[2]}.py", "--help"])
    with pytest.raises(SystemExit):
        import_module(name).main()
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python -m {name} ")
    assert re.findall(r"^  (--\S+)(?: \S+)?\n(?! {10})", text, re.MULTILINE) == []


def test_listed_tests_exist():
    source = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/test_*.py"))
    for names in entries()["tested"].values():
        for name in names:
            assert f"def {name}(" in source, name
    assert all(reason.strip() for reason in entries()["reasons"].values())


@pytest.mark.weekly
@pytest.mark.xdist_group("train")
def test_commands_for_a_project_work(bake, image_folder, tmp_path):
    project = bake()
    hub = fill_hub(tmp_path, "classification")
    small = "--epochs 1 --steps 4 --batch-size 4 --output"
    tuned = f"--data {image_folder}"
    for flags in (f"{small} runs/a", f"{small} runs/b --seed 1", f"{tuned} {small} runs/tuned"):
        done = execute(project, f"./run.sh {flags}", NPROC="1")
        assert done.returncode == 0, done.stderr
    for name in ("OLD.pt", "FILE.pt"):
        save_old_checkpoint(project / "runs" / "a" / "best.pt", project / name)
    done = execute(project, f"python -m engine.data.pack {image_folder} packed")
    assert done.returncode == 0, done.stderr
    assert any(project.glob("packed/**/pack.json"))
    lines = [line.replace("runs/ddp_training/", "runs/a/") for line in TRAINED]
    lines = [line for line in lines if "engine.data.pack" not in line]
    lines = [line.replace("--arch resnet50", "--arch shufflenet_v2_x0_5") for line in lines]
    failed = failures(project, lines, image_folder, hub)
    assert not failed, "\n".join(failed)
    assert (project / "FILE.json").read_text().startswith("{")
    assert (project / "compare.png").exists()
    assert (project / "runs" / "tuned" / "class_report.csv").exists()
