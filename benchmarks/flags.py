"""What the flags of these programs may be."""

import argparse
from pathlib import Path


def whole_number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def file_name(text: str) -> Path:
    """Of a file to write: looked at before hours have gone into what it is to hold."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in a folder that exists")
    return path
