"""Settings from a file (--config, --print-config), and the command line of main.py."""

import argparse
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from engine import UserError, cli, distributed
from engine.flags import add_model_arguments

PROJECT = Path(__file__).parent.parent
EXAMPLE = PROJECT / "config.example.json"
SOME = ("--no-channels-last", "--loss-scale=128", "--save-every=10m", "--ema=0.9", "--resume=auto")
SOME += ("--data", "images", "--deterministic", "--freeze", "conv1", "layer1")


@pytest.fixture
def parse(monkeypatch, generated):
    """Return main.py's flags from a command line; an error raises its message."""

    def stop(message):
        raise UserError(message)

    def parse(*flags):
        monkeypatch.setattr(sys, "argv", ["main.py", *map(str, flags)])
        return generated.main.parse_args()

    monkeypatch.setattr(distributed, "stop", stop)
    return parse


@pytest.fixture
def file(tmp_path):
    """Write a file that holds a value as JSON, or a text or bytes unchanged."""

    def file(content):
        path = tmp_path / "config.json"
        if not isinstance(content, str | bytes):
            content = json.dumps(content)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return file


def test_command_line_overrides_config_file(parse, file):
    path = file({"epochs": 3, "lr": 1, "freeze": ["a", "b"], "deterministic": True, "dummy": True})
    args = parse("--epochs", 4, "--config", path, "--no-deterministic")
    assert (args.epochs, args.lr, args.freeze) == (4, 1.0, ["a", "b"])
    assert (args.deterministic, args.dummy) == (False, True)


def test_own_flags_may_lack_help_and_take_lists_of_numbers(monkeypatch, file):
    monkeypatch.setattr(distributed, "stop", pytest.fail)
    parser = cli.ConfigurableParser("main.py", "training")
    add = parser.group("own").add_argument
    add("--scales", nargs="+", type=float, default=[0.5, -1.0])
    add("--names", nargs="*", default=[])
    add("--hidden", type=int, default=3, help=argparse.SUPPRESS)
    add("--scales-of-others", nargs="+", type=float)
    add("--no-crop", dest="crops", action="store_false")
    add("-v", "--verbose", action="count", default=0)
    add("--fast", action="store_true", default=False, required=False)
    add("--slow", action="store_true", default=True)
    assert (parser.parse_args([]).fast, parser.parse_args([]).slow) == (False, True)
    flags = ["--scales", "0.25", "--names", "a", "b", "--hidden", "4", "--no-crop", "-vv"]
    given = cli.parsed_settings(parser.parse_args(flags)) | {"scales_of_others": [-1e-5, 2.0]}
    path = file(cli.as_json(given))
    assert cli.parsed_settings(parser.parse_args(["--config", str(path)])) == given
    assert "--hidden" not in parser.format_help()


def test_own_flags_may_be_required_beside_a_file(monkeypatch, file):
    monkeypatch.setattr(distributed, "stop", pytest.fail)
    parser = cli.ConfigurableParser("main.py", "training")
    add = parser.group("own").add_argument
    add("--note", required=True)
    add("--width", type=int, default=3)
    add("--tags", nargs="+", action="extend")
    add("--names", nargs="+", action="extend", default=["x"])
    path = str(file({"width": 4, "note": "b", "tags": ["c"], "names": ["x", "y"]}))
    given = parser.parse_args(["--note", "a", "--tags", "d", "--tags", "e", "--config", path])
    assert (given.note, given.width, given.tags) == ("a", 4, ["c", "d", "e"])
    assert given.names == ["x", "y"]


@pytest.mark.parametrize("flags", [(), SOME])
def test_saved_config_round_trip(parse, file, flags):
    settings = cli.parsed_settings(parse(*flags))
    assert cli.parsed_settings(parse("--config", file(cli.as_json(settings)))) == settings


def test_defaults_that_follow_from_other_flags_are_not_in_a_config_file(parse, file):
    args = parse("--data", "images")
    settings = cli.settings(args)  # which are compared between processes
    assert settings["workers"] == args.workers > 0  # which follows from --data
    parsed = cli.parsed_settings(args)
    assert (parsed["workers"], parsed.keys()) == (None, settings.keys())
    config = file(cli.as_json(cli.parsed_settings(parse())))
    assert parse("--config", config, "--data", "images").workers
    given = file(cli.as_json(cli.parsed_settings(parse("--workers=3"))))
    assert parse("--config", given).workers == 3


@pytest.mark.parametrize("flag", ["--freeze", "--tracker", "--config"])
def test_repeated_flag_whose_first_values_would_be_lost_is_an_error(parse, file, flag):
    path = str(file({}))
    value = {"--tracker": "tensorboard", "--config": path}.get(flag, "conv1")
    for words in ([flag, value, flag, value], [f"{flag}={value}", flag, value]):
        with pytest.raises(UserError, match=f"^{flag} is given 2 times: give it once"):
            parse(*words)
    assert parse("--lr", 1, "--lr", 2).lr == 2  # as wrappers of run.sh override their own


def test_help_with_fsdp_has_no_flag_that_fsdp_refuses():
    parsers = {ddp: cli.ConfigurableParser("main.py", "training") for ddp in ("fsdp", "apex")}
    for ddp, parser in parsers.items():
        add_model_arguments(parser, ddp)
        assert ("--channels-last" in parser.format_help()) == (ddp == "apex")


def test_print_config_round_trip(parse, file, capsys):
    with pytest.raises(SystemExit) as end:
        parse(*SOME, "--print-config")
    assert not end.value.code
    printed = capsys.readouterr().out
    settings = json.loads(printed)
    assert not {"config", "print_config", "check", "local_rank"} & settings.keys()
    assert settings["workers"] is None  # it follows from others, which may change
    given = cli.parsed_settings(parse(*SOME))
    assert cli.parsed_settings(parse("--config", file(printed))) == given


def test_only_rank_0_prints_config_and_help(parse, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    for flag in ("--print-config", "--help"):
        with pytest.raises(SystemExit) as end:
            parse(flag)
        assert not end.value.code
    assert capsys.readouterr().out == ""


def test_learning_rate_of_the_example_config_fits_the_optimizer(shared_project):
    for answer, rate in ((True, 0.002), (False, 0.1)):
        path = shared_project(fused_adam=answer) / "config.example.json"
        assert json.loads(path.read_text())["lr"] == rate


def test_example_config_holds_flags_of_the_project(parse, generated):
    path = generated.folder / "config.example.json"
    args = vars(parse("--config", path))
    example = json.loads(path.read_text())
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
        ({"epochs": 2.5}, "argument --epochs: '2.5' is not a whole number from 1 to 2^31 - 1"),
        ({"epochs": 0}, "argument --epochs: '0' is not a whole number from 1 to 2^31 - 1"),
        ({"opt_level": "01"}, "argument --opt-level: invalid choice: '01'"),
        ({"output": ["runs"]}, "output is ["),
        ({"deterministic": 1}, "deterministic is 1, but must be true or false"),
        ({"channels_last": "no"}, "channels_last is "),
        ({"freeze": "conv1"}, 'freeze is "conv1", but must be a list'),
        ({"freeze": [None]}, "freeze is [null], but must be a list of texts or numbers"),
        ({"freeze": ["fc", "--help"]}, 'freeze is ["fc", "--help"], but must be a list of texts'),
        ({"output": "a\0b"}, r'output is "a\u0000b", which no command line can hold'),
        ({"data": "\ud800"}, "which no command line can hold"),
        ({"freeze": ["fc", "\0"]}, "which no command line can hold"),
        ({"workers": 4_000_000_000}, "is not a whole number from 0 to 256"),
        ({"accumulate": 2**63}, "is not a whole number from 1 to 2^31 - 1"),
        ([], "it must hold names and values"),
        ("{", "it is not JSON"),
        ("", "it is not JSON"),
        ('{"epochs": 1, "lr": 1, "epochs": 2}', "it has epochs twice"),
        (b"\xff", "it is not JSON"),
    ],
)
def test_config_file_errors(parse, file, content, words):
    path = file(content)
    with pytest.raises(UserError) as error:
        parse("--config", path)
    assert str(error.value).startswith(f"--config {path}: ")
    assert words in str(error.value)


def test_config_file_that_never_ends_is_an_error(parse, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(UserError, match="it is not a regular file"):
            parse("--config", path)


def test_huge_config_file_is_an_error(parse, tmp_path):
    """A sparse file, which takes no space on the disk."""
    path = tmp_path / "config.json"
    path.touch()
    os.truncate(path, 2**40)
    with pytest.raises(UserError, match=r"config.json: it can't be read, it has \d+ bytes, more"):
        parse("--config", path)


def test_long_config_file_is_read_in_linear_time(parse, file):
    path = file({f"a{index}": 1 for index in range(200_000)})  # quadratic: many minutes
    with pytest.raises(UserError, match="there is no setting a0"):
        parse("--config", path)


def test_missing_config_file(parse, tmp_path):
    with pytest.raises(UserError, match="missing.json: it can't be read"):
        parse("--config", tmp_path / "missing.json")


def test_contradicting_settings_in_a_config_file_are_refused(parse, file):
    path = file({"opt_level": "O1", "keep_batchnorm_fp32": True})
    with pytest.raises(UserError, match="O1 casts none"):
        parse("--config", path)


@pytest.mark.parametrize(
    ("flags", "saying"),
    [
        (["--output", ""], "--output: it is empty"),
        (["--output", "s3://bucket/run"], "--output: s3://bucket/run is a URL, which only --data"),
        (["--data", ""], "--data: it is empty"),
        (["--resume", ""], "--resume: it is empty"),
        (["--weights", ""], "--weights: it is empty"),
        (["--layer-decay", "0"], "--layer-decay: '0' is not a number above 0 and less than 1"),
    ],
)
def test_values_without_a_meaning_are_errors(parse, flags, saying):
    with pytest.raises(UserError, match=saying):
        parse(*flags)


@pytest.mark.parametrize(
    ("flags", "folder"),
    [
        ((), "runs/ddp_training"),
        (("--resume", "auto"), "runs/ddp_training"),
        (("--resume", "elsewhere/best.pt"), "elsewhere"),
        (("--resume", "elsewhere/best.pt", "--output", "runs/ddp_training"), "runs/ddp_training"),
    ],
)
def test_evaluation_writes_beside_its_checkpoint_unless_told_otherwise(parse, flags, folder):
    assert parse("--eval-only", *flags).output == Path(folder)


def test_a_tilde_is_the_home(parse, file, monkeypatch):
    """The shell does not replace it in --output=~/runs, and JSON has none."""
    monkeypatch.setenv("HOME", "/home/me")
    assert parse("--output=~/runs").output == Path("/home/me/runs")
    assert parse("--config", file({"data": "~/images"})).data == Path("/home/me/images")


def test_flags_without_an_effect_are_named(parse, capsys):
    assert parse("--dummy", "--data", "somewhere", "--epochs", 1, "--warmup-epochs", 2).data is None
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "--dummy: --data is not read"
    assert said[1].startswith("warning: --epochs 1 end before --warmup-epochs 2: the learning rate")


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("--bach-size=3", "there is no flag --bach-size; did you mean --batch-size?"),
        ("--epoch", "there is no flag --epoch; did you mean --epochs?"),
        ("--learning_rate=0.1", "there is no flag --learning_rate; did you mean --lr?"),
        ("--fp16", "there is no flag --fp16; did you mean --opt-level?"),
        ("--optimizer=adam", "there is no flag --optimizer (--help"),
        ("--xyzzy", "there is no flag --xyzzy (--help"),
    ],
)
def test_unknown_flag_suggests_the_nearest(parse, flag, answer):
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
    assert {"data:", "model:", "optimization:", "precision:", "distributed:", "run:"} <= set(lines)


def readme_flags(folder):
    """Return the flags that follow ./run.sh in the README's code."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    spans = re.findall(r"`(?:[A-Z_]+=\S+ )*\./run\.sh\b([^`>]*)", text)
    lines = re.findall(r"^    (?:[A-Z_]+=\S+ )*\./run\.sh\b([^#\n]*)", text, re.MULTILINE)
    return sorted({flags.strip() for flags in spans + lines})


def test_readme_commands_parse(parse, generated, monkeypatch):
    monkeypatch.chdir(generated.folder)
    monkeypatch.setattr("engine.flags.find_spec", lambda name: name)  # all trackers are installed
    commands = readme_flags(generated.folder)
    assert len(commands) > 12
    for flags in commands:
        if flags in ("--help", "--print-config"):
            with pytest.raises(SystemExit) as end:
                parse(flags)
            assert not end.value.code
        else:
            parse(*shlex.split(flags))


def test_tracker_without_its_package_is_an_error(parse, monkeypatch):
    monkeypatch.setattr("engine.flags.find_spec", lambda name: None)
    assert parse().tracker == parse("--tracker", "tensorboard").tracker == ["tensorboard"]
    flags = ("--tracker", "tensorboard", "mlflow")
    with pytest.raises(UserError, match="--tracker mlflow: its package .*: pip install mlflow"):
        parse(*flags)
    assert parse("--eval-only", *flags).eval_only  # which logs to none
