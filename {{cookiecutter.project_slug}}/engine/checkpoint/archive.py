"""Reading of files that torch.save has written, without running code, with all checks."""

import io
import re
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from engine import UserError

SAFE_TORCH = (2, 10)
MAX_DEPTH = 100  # of nested containers
MAX_SHARING = 10  # times that a container occurs, on average
CONTAINERS = (dict, list, tuple, set)
DIRECTORY = 0x10  # attribute of a directory in a ZIP archive


def security_warning() -> str:
    """Return a warning if an altered file can crash this torch, or run code in it; else ""."""
    major, minor = torch.__version__.split(".")[:2]
    if (int(major), int(minor)) >= SAFE_TORCH:
        return ""
    return (
        f"torch {torch.__version__} can be made to crash, or worse, by a file from a stranger "
        "(CVE-2026-24747): update to torch 2.10, or load only files that you trust"
    )


def read(path: Path, content: io.BytesIO | None = None) -> Any:
    """Read a file of `torch.save` into the CPU's memory, without running any code, and check it.

    Raises UserError if it is missing, truncated, altered, or too large when unpacked.
    """
    try:
        with content or path.open("rb") as file:
            if zipfile.is_zipfile(file):
                _check_archive(path, file)
            file.seek(0)
            content = torch.load(file, map_location="cpu", weights_only=True)
            _check_structure(path, content)
            return content
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    except (PermissionError, IsADirectoryError) as error:
        raise UserError(f"{path}: it can't be read ({error.strerror})") from None
    except UserError:
        raise
    except Exception as error:  # a file of any bytes raises anything
        code = re.search(r"GLOBAL (\S+)", str(error))
        if code:
            raise UserError(
                f"{path}: it holds {code[1]}, which can't be read without running code; "
                "if you trust the file, torch.load it with weights_only=False and torch.save its "
                "model, optimizer, amp and epoch alone"
            ) from None
        raise UserError(f"{path}: it is torn, or not a checkpoint; use another one") from None


def _check_archive(path: Path, file: BinaryIO) -> None:
    """Check the archive for alterations that torch does not detect.

    Raises BadZipFile for a tensor whose checksum is wrong, or that is marked as a directory, of
    which torch reads nothing; and UserError for an archive that is compressed, as torch's are not.
    """
    with zipfile.ZipFile(file) as archive:
        if sum(part.file_size for part in archive.infolist()) > file.seek(0, io.SEEK_END):
            raise UserError(f"{path}: it unpacks to more than it is; use another one")
        folders = (part.filename for part in archive.infolist() if part.external_attr & DIRECTORY)
        altered = archive.testzip() or next(folders, None)
    if altered:
        raise zipfile.BadZipFile(altered)


class Extent(NamedTuple):
    """Containers in a value, counted each time that they occur, and their depth."""

    size: int
    depth: int


def _check_structure(path: Path, content: object) -> None:
    """Raise UserError if containers hold themselves, or one another too deeply or too often.

    A file of some bytes can hold 10 lists of 10 times the same list, and so on, which no program
    can visit.
    """
    extents: dict[int, Extent] = {}
    try:
        is_valid = _measure([content], extents, 0).size <= MAX_SHARING * (1000 + len(extents))
    except RecursionError:
        is_valid = False
    if not is_valid:
        raise UserError(f"{path}: its structure is altered; use another one")


def _measure(value: Any, extents: dict[int, Extent], level: int) -> Extent:
    """Return the extent of a container.

    Args:
        extents: those of the containers that were measured before, by their id.
        level: of `value` in the checkpoint.

    Raises RecursionError if a container holds itself, or is nested too deeply.
    """
    if id(value) not in extents:
        if level > MAX_DEPTH:
            raise RecursionError
        items = (*value, *value.values()) if isinstance(value, dict) else value
        nested = [item for item in items if isinstance(item, CONTAINERS)]
        parts = [_measure(item, extents, level + 1) for item in nested]
        depth = 1 + max((part.depth for part in parts), default=0)
        extents[id(value)] = Extent(1 + sum(part.size for part in parts), depth)
    extent = extents[id(value)]
    if level + extent.depth > MAX_DEPTH:
        raise RecursionError
    return extent
