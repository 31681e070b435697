"""Escaping of text that others wrote, such as the names of files, classes and captions."""

import json
import re

# Control characters, line separators, changes of direction, and bytes that are not UTF-8.
UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
MAX_MESSAGE = 2000  # characters
FORMULA = ("=", "+", "-", "@")  # a spreadsheet program evaluates a cell that starts with one


def printable(text: object) -> str:
    r"""Return `text` in one line, with escapes such as \x1b for what would control a terminal."""
    return UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def one_message(text: object) -> str:
    """Return `text` in one line, as `printable` does; a long one without its middle."""
    line = printable(text)
    half = MAX_MESSAGE // 2
    return line if len(line) <= MAX_MESSAGE else f"{line[:half]} […] {line[-half:]}"


def short_number(value: float) -> str:
    """Return `value` with four digits, or without decimals from 1,000 on."""
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def json_line(value: object) -> str:
    """Return `value` as JSON in one line, with escapes for what would control a terminal."""
    text = json.dumps(value, ensure_ascii=False, default=float)  # tensors and the like
    return UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def redact_addresses(text: str) -> str:
    """Return `text` without user names and passwords in addresses, with and without a scheme.

    They end at the last @, as clients read them. A password may hold any character; a / before any
    colon ends the host.
    """
    word = r"(?<![^\s\"<>])[^\s\"<>]+@"  # to its last @, which takes linear time
    address = r"(//)(?:[^/:]*:.*|[^/]+)@|(?<![^/])[^/:]*:[^/]+@"
    return re.sub(word, lambda found: re.sub(address, r"\1…@", found[0]), text)


def csv_cell(text: str) -> str:
    """Return `text` for a cell of a CSV file, with a quote before what would be a formula."""
    text = printable(text)
    return f"'{text}" if text.lstrip().startswith(FORMULA) else text


def text_of_cell(cell: str) -> str:
    """Return the text that `csv_cell` has quoted, or `cell` itself."""
    text = cell.removeprefix("'")
    return text if csv_cell(text) == cell else cell
