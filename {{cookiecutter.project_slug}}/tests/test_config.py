"""--config and --print-config, and how flags answer."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

import main
from engine import cli, distributed
from engine.errors import UserError

PROJECT = Path(__file__).parent.parent
EXAMPLE = PROJECT / "config.example.json"
SOME = ("--no-channels-last", "--loss-scale=128", "--save-every=10m", "--ema=0.9", "--resume=auto")
SOME += ("--data", "images", "--deterministic", "--freeze", "conv1", "layer1")


@pytest.fixture
def parse(monkeypatch):
    """main.py's flags, from a command line; a mistake raises its sentence."""

    def stop(message):
        raise UserError(message)

    def parse(*flags):
        monkeypatch.setattr(sys, "argv", ["main.py", *map(str, flags)])
        return main.parse_args()

    monkeypatch.setattr(distributed, "stop", stop)
    return parse


@pytest.fixture
def file(tmp_path):
    """A file that holds a value as JSON, or a text or bytes as they are."""

    def file(content):
        path = tmp_path / "config.json"
        if not isinstance(content, str | bytes):
            content = json.dumps(content)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return file


def test_flags_on_the_command_line_win(parse, file):
    path = file({"epochs": 3, "lr": 1, "freeze": ["a", "b"], "deterministic": True, "dummy": True})
    args = parse("--epochs", 4, "--config", path, "--no-deterministic")
    assert (args.epochs, args.lr, args.freeze) == (4, 1.0, ["a", "b"])
    assert (args.deterministic, args.dummy) == (False, True)


@pytest.mark.parametrize("flags", [(), SOME])
def test_what_a_run_writes_can_be_given_back(parse, file, flags):
    settings = cli.settings(parse(*flags))
    assert cli.settings(parse("--config", file(cli.as_json(settings)))) == settings


def test_what_is_printed_can_be_given_back(parse, file, capsys):
    with pytest.raises(SystemExit) as end:
        parse(*SOME, "--print-config")
    assert not end.value.code
    printed = capsys.readouterr().out
    settings = json.loads(printed)
    assert not {"config", "print_config", "check", "local_rank"} & settings.keys()
    assert settings["workers"] is None  # it follows from others, which may change
    assert cli.settings(parse("--config", file(printed))) == cli.settings(parse(*SOME))


def test_of_several_processes_one_prints(parse, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    for flag in ("--print-config", "--help"):
        with pytest.raises(SystemExit) as end:
            parse(flag)
        assert not end.value.code
    assert capsys.readouterr().out == ""


def test_the_example_holds_flags_of_this_project(parse):
    args = vars(parse("--config", EXAMPLE))
    example = json.loads(EXAMPLE.read_text())
    assert {name: args[name] for name in example} == example | {"output": Path("runs/example")}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"epoch": 3}, "there is no setting epoch; did you mean epochs?"),
        ({"batch-size": 3}, "did you mean batch_size?"),
        ({"check": True}, "there is no setting check"),
        ({"epochs": "3"}, 'epochs is "3", but must be a number'),
        ({"epochs": True}, "epochs is true, but must be a number"),
        ({"epochs": None}, "epochs is null, but must be a number"),
        ({"epochs": 2.5}, "argument --epochs: '2.5' is not a whole number of at least 1"),
        ({"epochs": 0}, "argument --epochs: '0' is not a whole number of at least 1"),
        ({"opt_level": "01"}, "argument --opt-level: invalid choice: '01'"),
        ({"output": ["runs"]}, "output is ["),
        ({"deterministic": 1}, "deterministic is 1, but must be true or false"),
        ({"channels_last": "no"}, "channels_last is "),
        ({"freeze": "conv1"}, 'freeze is "conv1", but must be a list'),
        ({"freeze": [None]}, "freeze is [null], but must be a list of texts"),
        ([], "it must hold names and values"),
        ("{", "it is not JSON"),
        ("", "it is not JSON"),
        ('{"epochs": 1, "lr": 1, "epochs": 2}', "it has epochs twice"),
        (b"\xff", "it is not JSON"),
    ],
)
def test_a_mistake_in_a_file_is_named(parse, file, content, words):
    path = file(content)
    with pytest.raises(UserError) as error:
        parse("--config", path)
    assert str(error.value).startswith(f"--config {path}: ")
    assert words in str(error.value)


def test_a_file_that_is_not_there(parse, tmp_path):
    with pytest.raises(UserError, match="missing.json: it can't be read"):
        parse("--config", tmp_path / "missing.json")


def test_flags_that_do_not_go_together_are_refused_from_a_file_too(parse, file):
    path = file({"opt_level": "O1", "keep_batchnorm_fp32": True})
    with pytest.raises(UserError, match="O1 casts none"):
        parse("--config", path)


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("--bach-size=3", "there is no flag --bach-size; did you mean --batch-size?"),
        ("--epoch", "there is no flag --epoch; did you mean --epochs?"),
        ("--xyzzy", "there is no flag --xyzzy (--help"),
    ],
)
def test_the_flag_that_was_meant_is_named(parse, flag, answer):
    with pytest.raises(UserError) as error:
        parse(flag)
    assert str(error.value).startswith(answer)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_help_fits_the_terminal(parse, monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        parse("--help")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert lines[0] == "usage: ./run.sh [flags]"
    assert {"data:", "model:", "optimisation:", "precision:", "distributed:", "run:"} <= set(lines)


def flags_in_the_readme():
    """What follows ./run.sh there, in spans and in lines of code."""
    text = (PROJECT / "README.md").read_text(encoding="utf-8")
    spans = re.findall(r"`(?:[A-Z_]+=\S+ )*\./run\.sh\b([^`>]*)", text)
    lines = re.findall(r"^    (?:[A-Z_]+=\S+ )*\./run\.sh\b([^#\n]*)", text, re.MULTILINE)
    return sorted({flags.strip() for flags in spans + lines})


@pytest.mark.parametrize("flags", flags_in_the_readme())
def test_the_readmes_commands_are_understood(parse, monkeypatch, flags):
    monkeypatch.chdir(PROJECT)
    if flags in ("--help", "--print-config"):
        with pytest.raises(SystemExit) as end:
            parse(flags)
        assert not end.value.code
    else:
        parse(*shlex.split(flags))


def test_the_readme_has_commands():
    assert len(flags_in_the_readme()) > 20
