"""A command line, and a file of its flags, that many processes read and one answers."""

import argparse
import json
import math
import shutil
import sys
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from engine import distributed

NO_SETTINGS = ("help", "config", "print_config", "check", "local_rank")  # of one start alone
WIDEST = 100  # columns that are still easy to read


class HelpFormatter(argparse.HelpFormatter):
    """A flag in few words, with its default if that is worth showing."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns - 2, WIDEST)
        super().__init__(prog, max_help_position=30, width=width)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        hidden = (None, False, argparse.SUPPRESS)
        is_hidden = any(action.default is value for value in hidden)  # 0 equals False
        if action.help is None or is_hidden or "default" in action.help:
            return action.help
        return action.help + " (default: %(default)s)"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return METAVARS.get(action.type) or super()._get_default_metavar_for_optional(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, BooleanOptionalAction):
            name = action.option_strings[0]
            return name if action.default is False else f"--[no-]{name[2:]}"
        return super()._format_action_invocation(action)


class Switch(BooleanOptionalAction):
    """``store_true`` with a ``--no-…`` too, for what a file has switched on."""

    def __init__(self, option_strings: list[str], dest: str, **kwargs: object) -> None:
        super().__init__(option_strings, dest, **{"default": False} | kwargs)


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, with help and errors from rank 0 alone, and errors that say what to do."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__(formatter_class=HelpFormatter, allow_abbrev=False, **kwargs)

    def parse_args(self, args: list[str] | None = None) -> Namespace:
        """The flags; what can't be one ends the program."""
        given, unknown = self.parse_known_args(args)
        if unknown:
            flag = unknown[0].partition("=")[0]
            known = [name for action in self._actions for name in action.option_strings]
            what = "flag" if flag.startswith("-") else "place for"
            self.error(f"there is no {what} {flag}{_nearest(flag, known)}")
        return given

    def _print_message(self, message: str, file: object = None) -> None:
        if distributed.is_speaker():
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        distributed.stop(f"{message} (--help lists the flags)")


class ConfigurableParser(ArgumentParser):
    """The same with ``--config``, a file of JSON that stands for flags.

    What it holds is checked as they are, and those on the command line win.
    """

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, usage=f"{prog} [flags]", description=description)
        self.register("action", "store_true", Switch)
        self.source = ""  # of the flags, if it is not the command line
        add = self.add_argument
        add("--config", type=Path, metavar="FILE", help="JSON with flags; those given here win")
        add("--print-config", action="store_true", help="print such a file of all flags, and exit")

    def parse_args(self, args: list[str] | None = None) -> Namespace:
        """The flags; what can't be one ends the program."""
        given = super().parse_args(args)
        if given.config is not None:
            self.set_defaults(**self._read(given.config))
            given = super().parse_args(args)
        if given.print_config:
            print_config(given)
        return given

    def _read(self, path: Path) -> dict[str, object]:
        """The values in a file, as the flags of the same names would have them."""
        self.source = f"--config {path}: "
        try:
            text = path.read_text(encoding="utf-8-sig")
            config = json.loads(text, object_pairs_hook=self._named_once)
        except OSError as error:
            self.error(f"it can't be read, {error.strerror}")
        except (ValueError, RecursionError) as error:
            self.error(f"it is not JSON, {error}")
        if not isinstance(config, dict):
            self.error('it must hold names and values, such as {"epochs": 30}')
        flags = {action.dest: action for action in self._actions if action.dest not in NO_SETTINGS}
        for name in config:
            if name not in flags:
                self.error(f"there is no setting {name}{_nearest(name, flags)}")
        values = {name: self._value(flags[name], value) for name, value in config.items()}
        self.source = ""
        return values

    def _named_once(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                self.error(f"it has {name} twice")
        return dict(pairs)

    def _value(self, action: argparse.Action, value: object) -> object:
        """`value` as the flag's own words would have it."""
        flag = action.option_strings[0]
        if value is None and action.default is None:
            return None
        if isinstance(action, BooleanOptionalAction):
            wanted, fits = "true or false", isinstance(value, bool)
            words = [flag if value else f"--no-{flag[2:]}"]
        elif action.nargs:
            wanted, parts = "a list of texts", value if isinstance(value, list) else []
            fits = bool(parts) and all(isinstance(part, str) for part in parts)
            words = [flag, *parts] if fits else []
        elif METAVARS.get(action.type) in ("N", "X"):
            wanted, fits = "a number", type(value) in (int, float)  # which a bool is not
            words = [f"{flag}={value}"]
        else:
            wanted, fits = "a text or a number", type(value) in (str, int, float)
            words = [f"{flag}={value}"]
        if not fits:
            self.error(f"{action.dest} is {json.dumps(value)}, but must be {wanted}")
        return getattr(self.parse_known_args(words)[0], action.dest)

    def error(self, message: str) -> NoReturn:
        super().error(self.source + message)


def _nearest(name: str, names: Iterable[str]) -> str:
    near = get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def settings(args: Namespace) -> dict[str, object]:
    """Those flags that make a run what it is, by name."""
    return {name: value for name, value in vars(args).items() if name not in NO_SETTINGS}


def as_json(config: dict[str, object]) -> str:
    """`config` as a file for ``--config``."""
    return json.dumps(config, indent=2, default=str) + "\n"


def print_config(args: Namespace) -> NoReturn:
    """Prints the settings in `args`, and ends the program."""
    if distributed.is_speaker():
        print(as_json(settings(args)), end="", flush=True)
    sys.exit()


def _checked(parse: Callable, holds: Callable[[object], bool], words: str) -> Callable:
    """A converter for ``add_argument(type=…)`` whose error says what was wanted."""

    def convert(text: str) -> object:
        try:
            value = parse(text)
        except ValueError:
            value = None
        if value is None or not holds(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {words}")
        return value

    return convert


def _scale(text: str) -> str | float:
    return text if text == "dynamic" else float(text)


def _interval(text: str) -> str:
    int(text.removesuffix("m"))
    return text


count = _checked(int, lambda value: value >= 1, "a whole number of at least 1")
natural = _checked(int, lambda value: 0 <= value < 2**32, "a whole number from 0 to 2^32 - 1")
amount = _checked(float, lambda value: 0 <= value < math.inf, "a number of at least 0")
share = _checked(float, lambda value: 0 <= value < 1, "a number from 0 to less than 1")
loss_scale = _checked(
    _scale,
    lambda value: value == "dynamic" or 0 < value <= 2**64,
    "'dynamic' or a number above 0 and up to 2^64",
)
interval = _checked(
    _interval,
    lambda value: int(value.removesuffix("m")) >= 1,
    "a number of steps, such as 500, or of minutes, such as 10m",
)
METAVARS = {count: "N", natural: "N", int: "N", amount: "X", share: "X", Path: "PATH"}
