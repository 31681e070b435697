"""A command line that is read by many processes and answers once."""

import argparse
import math
from collections.abc import Callable

from engine import distributed


class HelpFormatter(argparse.HelpFormatter):
    """Shows the default of every flag that has one worth showing."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        hidden = (None, argparse.SUPPRESS)
        if action.help is None or action.default in hidden or "default" in action.help:
            return action.help
        return action.help + " (default: %(default)s)"


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, with help and errors from rank 0 alone, and errors that say what to do."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, formatter_class=HelpFormatter, allow_abbrev=False, **kwargs)

    def _print_message(self, message: str, file: object = None) -> None:
        if distributed.is_speaker():
            super()._print_message(message, file)

    def error(self, message: str) -> None:
        distributed.stop(f"{message} (--help lists the flags)")


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


count = _checked(int, lambda value: value >= 1, "a whole number of at least 1")
natural = _checked(int, lambda value: 0 <= value < 2**32, "a whole number from 0 to 2^32 - 1")
amount = _checked(float, lambda value: 0 <= value < math.inf, "a number of at least 0")
loss_scale = _checked(
    _scale,
    lambda value: value == "dynamic" or 0 < value <= 2**64,
    "'dynamic' or a number above 0 and up to 2^64",
)
