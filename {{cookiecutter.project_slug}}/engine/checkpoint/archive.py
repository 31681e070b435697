"""Reading of files that torch.save has written, without running code, with all checks."""

import io
import re
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from engine import UserError
from engine.checkpoint.inspection import MAX_SHARING, check_storages, check_tuples

SAFE_TORCH = (2, 10)
MAX_DEPTH = 100  # of nested containers
CONTAINERS = (dict, list, tuple, set)
DIRECTORY = 0x10  # attribute of a directory in a ZIP archive
# Functions that torch.load calls for a file with any arguments, such as bytearray(2**40).
ALLOCATORS = re.compile(rb"c(__builtin__|builtins)\nbytearray\n|c_codecs\nencode\n")


def security_warning(path: Path) -> str:
    """Return a warning if the file can crash this torch, or run code in it; else "".

    `read` checks what torch before 2.10 does not, but for folders and files of torch before 1.6.
    """
    major, minor = torch.__version__.split(".")[:2]
    if (int(major), int(minor)) >= SAFE_TORCH or path.is_file() and zipfile.is_zipfile(path):
        return ""
    return (
        f"torch {torch.__version__} can be made to crash, or worse, by such a checkpoint from a "
        "stranger (CVE-2026-24747): update to torch 2.10, or load only those that you trust"
    )


def read(path: Path, content: io.BytesIO | None = None) -> Any:
    """Read a file of `torch.save` into the CPU's memory, without running any code, and check it.

    Raises UserError if it is missing, truncated, altered, or too large when unpacked.
    """
    try:
        if not content and path.exists() and not (path.is_file() or path.is_dir()):
            raise UserError(f"{path}: it is no regular file")  # to read it might never end
        with content or path.open("rb") as file:
            _check_archive(path, file)
            file.seek(0)
            loaded = torch.load(file, map_location="cpu", weights_only=True)
            plain = _copy_containers(loaded, {}, 0)
            _check_structure(path, plain)
            return plain
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    except (PermissionError, IsADirectoryError) as error:
        raise UserError(f"{path}: it can't be read ({error.strerror})") from None
    except UserError:
        raise
    except RecursionError:
        raise UserError(f"{path}: its structure is altered; use another one") from None
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
    """Check the file for alterations that torch does not detect.

    Raises BadZipFile for a tensor whose checksum is wrong, or that is marked as a directory, of
    which torch reads nothing, or that has the name of another, in torch's comparison of names; and
    UserError for an archive that is compressed, as torch's are not, and for a pickle that makes
    torch allocate memory or read beyond a record. Files of torch < 1.6 are no archives.
    """
    if not zipfile.is_zipfile(file):
        file.seek(0)
        _check_pickle(path, file.read(), num_pickles=5)
        return
    with zipfile.ZipFile(file) as archive:
        if sum(part.file_size for part in archive.infolist()) > file.seek(0, io.SEEK_END):
            raise UserError(f"{path}: it unpacks to more than it is; use another one")
        folders = (part.filename for part in archive.infolist() if part.external_attr & DIRECTORY)
        altered = archive.testzip() or next(folders, None)
        sizes = {part.filename.lower(): part.file_size for part in archive.infolist()}
        if altered or len(sizes) < len(archive.infolist()):
            raise zipfile.BadZipFile(altered)
        for name in archive.namelist():
            if name.lower().endswith(".pkl"):
                pickled = archive.read(name)
                _check_pickle(path, pickled)
                prefix = name.lower().rpartition("/")[0] + "/data/"
                records = (record for record in sizes if record.startswith(prefix))
                check_storages(pickled, {one.removeprefix(prefix): sizes[one] for one in records})


def _check_pickle(path: Path, pickled: bytes, num_pickles: int = 1) -> None:
    if ALLOCATORS.search(pickled):
        raise UserError(f"{path}: it holds bytes, which no checkpoint needs; use another one")
    file = io.BytesIO(pickled)
    for _ in range(num_pickles):
        if file.tell() < len(pickled):
            check_tuples(file)


def _copy_containers(value: Any, copies: dict[int, Any], level: int) -> Any:
    """Return `value` with plain dicts, lists and tuples, but for the versions in state dicts.

    A file can give an OrderedDict attributes that hide its methods, and `_metadata` by which
    `load_state_dict` assigns tensors of any type.

    Args:
        copies: those made before, by the id of the original.

    Raises RecursionError if a container holds itself, or is nested too deeply.
    """
    if not isinstance(value, dict | list | tuple):
        return value
    if level > MAX_DEPTH:
        raise RecursionError
    if id(value) not in copies:
        made: Any
        if isinstance(value, dict):
            made = {
                key: _copy_containers(item, copies, level + 1) for key, item in dict.items(value)
            }
            versions = _versions(getattr(value, "__dict__", {}).get("_metadata"))
            if versions:
                made = OrderedDict(made)
                made._metadata = versions  # noqa: SLF001, as nn.Module.load_state_dict documents
        else:
            items = (_copy_containers(item, copies, level + 1) for item in value)
            made = list(items) if isinstance(value, list) else tuple(items)
        copies[id(value)] = made
    return copies[id(value)]


def _versions(metadata: object) -> dict[str, dict[str, int]]:
    """Return the versions of modules, by their names, that a state dict has as metadata."""
    if not isinstance(metadata, dict):
        return {}
    versions = (
        (name, dict.get(entry, "version"))
        for name, entry in dict.items(metadata)
        if isinstance(entry, dict)
    )
    return {name: {"version": version} for name, version in versions if isinstance(version, int)}


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
