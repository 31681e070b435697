"""Command line and JSON configuration file of a training job with many processes.

Every process parses the same flags; only rank 0 prints help and errors.
"""

import argparse
import json
import math
import os
import re
import shutil
import sys
from argparse import BooleanOptionalAction
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

from engine import distributed, read_text
from engine.monitoring.run_files import FACTS

Value = TypeVar("Value", int, float)
# They differ at each start, or follow from other flags.
NOT_SETTINGS = (
    "config",
    "print_config",
    "check",
    "local_rank",
    "parsed",
    "model_options",
    "static_shapes",
)
MAX_WORKERS = 256  # of a process: a mistyped number would exhaust the machine
MAX_WIDTH = 100  # columns of the help text
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
# Names that other scripts have for a flag here.
OTHER_NAMES = {
    **dict.fromkeys(("amp", "bf16", "fp16", "mixed-precision", "precision"), "opt-level"),
    "checkpoint": "resume",
    "early-stopping": "patience",
    "evaluate": "eval-only",
    "gradient-accumulation-steps": "accumulate",
    "learning-rate": "lr",
    "max-grad-norm": "clip-grad",
    "model": "arch",
    "pretrained": "weights",
}
METAVARS: dict[object, str] = {int: "N", Path: "PATH"}  # by the type of a flag


def number_type(
    parse: Callable[[str], Value], low: float, high: float, expected: str
) -> Callable[[str], Value]:
    """Return a converter for ``add_argument(type=…)`` of values from `low` to below `high`.

    Its error message states what was `expected`.
    """

    def convert(text: str) -> Value:
        with suppress(ValueError):
            value = parse(text)
            if low <= value < high:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")

    METAVARS[convert] = "N" if parse is int else "X"
    return convert


def interval(text: str) -> str:
    """Convert a number of steps, such as "500", or of minutes, such as "10m"."""
    if not re.fullmatch(r"0*[1-9]\d{0,8}m?", text):
        expected = "a number of steps, such as 500, or of minutes, such as 10m"
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return text


def size_type(text: str) -> int:
    """Convert a number of bytes, such as 256MB."""
    found = re.fullmatch(r"(\d+)([KMG]B|)", text)
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text} must be a size, such as 256MB")
    return int(found[1]) * UNITS[found[2]]


def not_empty(text: str) -> str:
    """Return `text`. An empty one, as of an unset variable of the shell, is an error."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name something, or leave the flag out")
    return text


def path(text: str) -> Path:
    """Convert a path, which is not empty; a ``~`` in front becomes the home directory."""
    return Path(os.path.expanduser(not_empty(text)))


def local_path(text: str) -> Path:
    """Convert the path of a file or folder of this machine."""
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"{text} is a URL, which only --data takes; name a local path"
        )
    return path(text)


def data_location(text: str) -> Path | str:
    """Convert a path, or the URL of packed data, which remains a string."""
    if "://" not in text:
        return path(text)
    if not re.fullmatch(r"(https?|s3)://[^\s?#@]+", text):
        raise argparse.ArgumentTypeError(
            "a URL must be https://HOST/PATH or s3://BUCKET/PATH, without a query or a password"
        )
    return text


positive_int = number_type(int, 1, 2**31, "a whole number from 1 to 2^31 - 1")
non_negative_int = number_type(int, 0, 2**32, "a whole number from 0 to 2^32 - 1")
worker_count = number_type(int, 0, MAX_WORKERS + 1, f"a whole number from 0 to {MAX_WORKERS}")
core_count = number_type(int, 1, 1025, "a whole number from 1 to 1024")
non_negative_float = number_type(float, 0, math.inf, "a number of at least 0")
fraction = number_type(float, 0, 1, "a number from 0 to less than 1")
factor = number_type(float, math.ulp(0), 1, "a number above 0 and less than 1")
probability = number_type(float, 0, math.nextafter(1, 2), "a number from 0 to 1")
static_loss_scale = number_type(
    float,
    math.ulp(0),
    math.nextafter(2**64, math.inf),
    "'dynamic' or a number above 0 and up to 2^64",
)


def loss_scale(text: str) -> float | str:
    """Convert a loss scale: "dynamic", or a number."""
    return text if text == "dynamic" else static_loss_scale(text)


METAVARS |= {loss_scale: "SCALE", interval: "N|Nm", path: "PATH", local_path: "PATH"}


class _StoreTrue(BooleanOptionalAction):
    """``store_true`` that also accepts ``--no-…``, to override a configuration file."""

    def __init__(
        self, option_strings: list[str], dest: str, default: bool = False, **options: Any
    ) -> None:
        super().__init__(option_strings, dest, **options)
        self.default = default  # not above: before Python 3.13 help would show it


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser with output from rank 0 only and suggestions for misspelled flags."""

    def __init__(self, prog: str | None = None, usage: str | None = None, description: str = ""):
        self.actions: list[argparse.Action] = []
        self.groups: dict[str, ArgumentGroup] = {}
        width = min(shutil.get_terminal_size().columns - 2, MAX_WIDTH)
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            formatter_class=partial(argparse.HelpFormatter, max_help_position=30, width=width),
            allow_abbrev=False,
        )

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Add a flag or a positional argument, as argparse does."""
        action = super().add_argument(*names, **options)
        self.actions.append(action)
        return action

    def group(self, title: str) -> "ArgumentGroup":
        """Return the help group of that title; create it at the first call."""
        if title not in self.groups:
            self.groups[title] = ArgumentGroup(self, title)
        return self.groups[title]

    def parse_args(self, args=None, namespace=None):  # as argparse's
        """Return the parsed flags; stop the program with one error message if one is invalid."""
        given, unknown = self.parse_known_intermixed_args(args, namespace)  # flags between files
        if unknown:
            flag = unknown[0].partition("=")[0]
            known = [name for action in self.actions for name in action.option_strings]
            kind = "flag" if flag.startswith("-") else "place for"
            self.error(f"there is no {kind} {flag}{_suggestion(flag, known)}")
        return given

    def print_help(self, file: IO[str] | None = None) -> None:  # type: ignore[override]
        """Print the help text on rank 0."""
        if distributed.is_rank_zero():
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        """Stop the program with one error message and status 2."""
        distributed.stop(f"{message} (--help lists the flags)")


class ArgumentGroup:
    """Flags under one title of the help text."""

    def __init__(self, parser: ArgumentParser, title: str) -> None:
        self.parser = parser
        self._group = parser.add_argument_group(title)

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Add a flag as argparse does; the metavar follows from the type, help shows the default.

        ``store_true`` flags get a ``--no-…`` form.
        """
        if options.get("action") == "store_true" and "dest" not in options:
            options["action"] = _StoreTrue
        if options.get("type") in METAVARS:
            options.setdefault("metavar", METAVARS[options["type"]])
        text = options.get("help") or argparse.SUPPRESS
        is_shown = text != argparse.SUPPRESS and "default" not in text
        if is_shown and options.get("default") is not None:
            options["help"] = f"{text} (default: %(default)s)"
        action = self._group.add_argument(*names, **options)
        self.parser.actions.append(action)
        return action


class ConfigurableParser(ArgumentParser):
    """Parser with ``--config FILE.json``, which sets defaults that the command line overrides."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, usage=f"{prog} [flags]", description=description)
        self.error_prefix = ""
        add = self.group("configuration").add_argument
        add("--config", type=path, metavar="FILE", help="JSON file with defaults for these flags")
        add("--print-config", action="store_true", help="print all flags as such a file, and exit")

    def parse_args(self, args=None, namespace=None):  # as argparse's
        """Return the parsed flags; stop the program with one error message if one is invalid."""
        given = super().parse_args(args, namespace)
        self._reject_repeated(sys.argv[1:] if args is None else args)
        if given.config is not None:
            for action in self.actions:
                action.required = False  # those that are required have been given
            self.set_defaults(**self._read(given.config))
            given = super().parse_args(args, namespace)
        if given.print_config:
            if distributed.is_rank_zero():
                print(as_json(settings(given)), end="", flush=True)
            sys.exit()
        given.parsed = dict(vars(given))
        return given

    def _reject_repeated(self, words: Sequence[str]) -> None:
        """Stop if a flag with several values, or --config, is repeated; others are overridden."""
        flags = Counter(word.partition("=")[0] for word in words)
        store = next(type(action) for action in self.actions if action.dest == "config")
        for action in self.actions:
            name = action.option_strings[0] if action.option_strings else ""
            is_list = action.nargs in ("+", "*") and type(action) is store  # not "extend"
            if flags[name] > 1 and (is_list or name == "--config"):
                self.error(f"{name} is given {flags[name]} times: give it once, with all values")

    def _read(self, path: Path) -> dict[str, object]:
        """Return the values in a file, each converted as its flag converts its argument."""
        self.error_prefix = f"--config {path}: "
        try:
            config = json.loads(read_text(path), object_pairs_hook=self._reject_duplicates)
        except OSError as error:
            self.error(f"it can't be read, {error.strerror}")
        except (ValueError, RecursionError) as error:
            self.error(f"it is not JSON, {error}")
        if not isinstance(config, dict):
            self.error('it must hold names and values, such as {"epochs": 30}')
        config = {name: value for name, value in config.items() if name not in FACTS}
        actions = {action.dest: action for action in self.actions}
        known = [name for name in actions if name not in NOT_SETTINGS]
        for name in config:
            if name not in known:
                self.error(f"there is no setting {name}{_suggestion(name, known)}")
        values = {name: self._convert(actions[name], value) for name, value in config.items()}
        self.error_prefix = ""
        return values

    def _reject_duplicates(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        for name, count in Counter(name for name, _ in pairs).items():
            if count > 1:
                self.error(f"it has {name} twice")
        return dict(pairs)

    def _convert(self, action: argparse.Action, value: object) -> object:
        """Return `value` as parsing the flag itself would."""
        is_switch = isinstance(action, BooleanOptionalAction)
        if value is None and action.default is None:
            return None
        if action.nargs == 0 and not is_switch and isinstance(value, int):
            return value  # what an owner's "store_false" or "count" stores
        flag = action.option_strings[0]
        if is_switch:
            expected, is_valid = "true or false", isinstance(value, bool)
            words = [flag if value else f"--no-{flag[2:]}"]
        elif action.nargs not in (None, "?", 0):
            expected = "a list of texts or numbers, none a flag"
            values = value if isinstance(value, list) else [None]
            is_valid = all(map(_is_word, values)) and (value != [] or action.nargs == "*")
            if action.type is float and is_valid and not any(isinstance(x, str) for x in values):
                return [*map(float, values)]  # argparse takes -1e-05 for a flag
            words = [flag, *map(str, values)]
        elif METAVARS.get(action.type) in ("N", "X"):
            expected, is_valid = "a number", type(value) in (int, float)  # not a bool
            words = [f"{flag}={value}"]
        else:
            expected, is_valid = "a text or a number", type(value) in (str, int, float)
            words = [f"{flag}={value}"]
        if not is_valid:
            self.error(f"{action.dest} is {json.dumps(value)}, but must be {expected}")
        if not all(map(_is_argument, words)):
            self.error(f"{action.dest} is {json.dumps(value)}, which no command line can hold")
        start = argparse.Namespace(**{action.dest: None})  # or "extend" would add to the default
        return getattr(self.parse_known_args(words, start)[0], action.dest)

    def error(self, message: str) -> NoReturn:
        """Stop the program with one error message, which names the file if it is in one."""
        super().error(self.error_prefix + message)


def _is_word(value: object) -> bool:
    """Return whether `value` is one of several arguments of a flag, and no flag to argparse."""
    return type(value) in (int, float) or (isinstance(value, str) and not value.startswith("-"))


def _is_argument(text: str) -> bool:
    """Return whether the command line, or the path of a file, can be `text`."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def _suggestion(name: str, names: Iterable[str]) -> str:
    by_words = {_words(one): one for one in names}
    other = OTHER_NAMES.get(_words(name))
    near = [other] if other in by_words else get_close_matches(_words(name), by_words, n=1)
    return f"; did you mean {by_words[near[0]]}?" if near else ""


def _words(name: str) -> str:
    """Return the name of a flag or setting without what they differ in, such as ``batch-size``."""
    return name.lstrip("-").replace("_", "-")


def settings(args: argparse.Namespace) -> dict[str, object]:
    """Return the flags that define a run, by name."""
    return {name: value for name, value in vars(args).items() if name not in NOT_SETTINGS}


def parsed_settings(args: argparse.Namespace) -> dict[str, object]:
    """Return the settings as parsed, for a configuration file.

    A default that follows from other flags is None: in a later run it follows from that run's.
    """
    return settings(argparse.Namespace(**args.parsed))


def as_json(config: dict[str, object]) -> str:
    """Return `config` as the content of a file for ``--config``."""
    return json.dumps(config, indent=2, default=str) + "\n"
