"""Files of torch.save: writing them, and reading them with all checks, without running code."""

import errno
import io
import os
import re
import stat
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from engine import DAMAGE, UserError, replacing
from engine.checkpoint import inspection

SAFE_TORCH = (2, 10)
MAX_DEPTH = 100  # of nested containers
MAX_PICKLES = 10  # in an archive, of which torch makes one
CONTAINERS = (dict, list, tuple, set)
MAGIC_NUMBER = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # pickled, at the start of files of torch < 1.6
DIRECTORY = 0x10  # attribute of a directory in a ZIP archive
# The records at the end of a ZIP archive; the first two only in the form for large ones, ZIP64.
END_64 = struct.Struct("<4sQ2H2L4Q")
LOCATOR_64 = struct.Struct("<4sLQL")
END = struct.Struct("<4s2H2H2LH")
IN_END_64 = (0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)  # instead of numbers that END can't hold


def security_warning(path: Path) -> str:
    """Return a warning if the file can crash this torch, or run code in it; else "".

    `read` checks what torch before 2.10 does not, but for folders and files of torch before 1.6.
    """
    major, minor = torch.__version__.split(".")[:2]
    if (int(major), int(minor)) >= SAFE_TORCH:
        return ""
    if path.is_file():
        with path.open("rb") as file:
            if _is_archive(file):
                return ""
    return (
        f"torch {torch.__version__} can be made to crash, or worse, by such a checkpoint from a "
        "stranger (CVE-2026-24747): update to torch 2.10, or load only those that you trust"
    )


class UnreadableError(UserError):
    """File that the system can't read now: it may be intact."""


def reason_of(error: BaseException | None) -> str:
    """Return the reason of an error that is not due to the file's content; "" for other errors."""
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return os.strerror(errno.ENOMEM)
    if isinstance(error, OSError) and error.errno not in DAMAGE:
        return str(error.strerror)
    return ""


def read(path: Path, content: io.BytesIO | None = None) -> Any:
    """Read a file of `torch.save` into the CPU's memory, without running any code, and check it.

    Raises UserError if it is missing, truncated, altered, or too large when unpacked, and
    UnreadableError if the system can't read it.
    """
    try:
        if not content and stat.S_IFMT(path.stat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
            raise UserError(f"{path}: it is no regular file")  # to read it might never end
        with content or path.open("rb") as file:
            _check_archive(path, file)
            file.seek(0)
            loaded = torch.load(file, map_location="cpu", weights_only=True)
            copies: dict[int, Copy] = {}
            plain = _copy(loaded, copies, 0)
            # Some bytes can hold 10 lists of 10 times the same list or text, and so on.
            is_large = plain.length > inspection.MAX_SHARING * file.seek(0, os.SEEK_END)
            if is_large or plain.size > inspection.MAX_SHARING * (1000 + len(copies)):
                raise RecursionError
            return plain.made
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    except UserError:
        raise
    except RecursionError:
        raise UserError(f"{path}: its structure is altered; use another one") from None
    except Exception as error:  # a file of any bytes raises anything
        reason = reason_of(error) or reason_of(error.__context__)  # of zipfile's errors
        if reason:
            raise UnreadableError(f"{path}: it can't be read ({reason})") from None
        if code := re.search(r"GLOBAL (\S+)", str(error)):
            raise UserError(
                f"{path}: it holds {code[1]}, which can't be read without the risk that it "
                "runs code or takes any memory; if you trust the file, torch.load it with "
                "weights_only=False and torch.save its model, optimizer, amp and epoch alone"
            ) from None
        raise UserError(f"{path}: it is torn, or not a checkpoint; use another one") from None


def write(path: Path, content: Any) -> None:
    """Write a file atomically. Raises OSError for a full disk and the like."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # raised on closing a file that could not be written
            raise error.__context__ or error from None


def _check_archive(path: Path, file: BinaryIO) -> None:
    """Check the file for alterations that torch does not detect.

    Raises:
        BadZipFile: for a tensor whose checksum is wrong, that is marked as a directory, of which
            torch reads nothing, or whose name torch takes for that of another; and for an archive
            in which torch may read other bytes than are checked here.
        UserError: for an archive that is compressed, as torch's are not.
        Exception: for a pickle that makes torch allocate memory or read beyond a record.
    """
    if not _is_archive(file):  # of torch < 1.6
        if MAGIC_NUMBER not in file.read(64):  # others are not read, of any size
            raise zipfile.BadZipFile
        file.seek(0)
        content = file.read()
        _check_pickles(content, inspection.NUM_OLD_PICKLES)
        inspection.check_old_storages(content)
        return
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
        if sum(part.file_size for part in parts) > file.seek(0, io.SEEK_END):
            raise UserError(f"{path}: it unpacks to more than it is; use another one")
        if not _is_unambiguous(file, parts) or archive.testzip():
            raise zipfile.BadZipFile
        has_folder = any(part.external_attr & DIRECTORY for part in parts)
        sizes = {part.filename.lower(): part.file_size for part in parts}
        num_pickles = sum(name.endswith(".pkl") for name in sizes)
        if has_folder or len(sizes) < len(parts) or num_pickles > MAX_PICKLES:
            raise zipfile.BadZipFile
        for name in archive.namelist():
            if name.lower().endswith(".pkl"):
                pickled = archive.read(name)
                _check_pickles(pickled, 1)
                prefix = name.lower().rpartition("/")[0] + "/data/"
                records = (record for record in sizes if record.startswith(prefix))
                stored = {one.removeprefix(prefix): sizes[one] for one in records}
                inspection.check_storages(pickled, stored)


def _is_archive(file: BinaryIO) -> bool:
    """Return whether torch takes the file for an archive; zipfile looks at its end instead."""
    start = file.read(4)
    file.seek(0)
    return start == b"PK\3\4"


def _is_unambiguous(file: BinaryIO, parts: list[zipfile.ZipInfo]) -> bool:
    """Return whether any reader of ZIP archives finds the same parts as zipfile does.

    zipfile searches backwards from the end of the file for the directory of the parts; others, such
    as torch's, take the position that the end states. An archive of `torch.save` has nothing
    between its records at the end, no comment, no compression, and only ZIP64's extra fields.
    """
    position = file.seek(-END.size, io.SEEK_END)
    signature, _, _, *stated, comment = END.unpack(file.read(END.size))
    if signature != b"PK\5\6" or comment:
        return False
    numbers = stated
    start_64 = max(0, position - LOCATOR_64.size - END_64.size)
    file.seek(start_64)
    end_64, locator = file.read(END_64.size), file.read(LOCATOR_64.size)
    if locator.startswith(b"PK\6\7"):
        position = start_64
        signature, length, _, _, _, _, *numbers = END_64.unpack(end_64)
        is_next = LOCATOR_64.unpack(locator)[2] == position
        if signature != b"PK\6\6" or length != END_64.size - 12 or not is_next:
            return False
    pairs = zip(stated, numbers, IN_END_64, strict=True)
    _, num_parts, size, start = numbers
    return (
        all(number in (number_64, instead) for number, number_64, instead in pairs)
        and num_parts == len(parts)
        and start + size == position
        and all(_is_plain(part) for part in parts)
    )


def _is_plain(part: zipfile.ZipInfo) -> bool:
    """Return whether a part is not compressed, and its entry has no fields but those of ZIP64."""
    is_stored = part.compress_type == zipfile.ZIP_STORED and part.compress_size == part.file_size
    field, length = struct.unpack("<2H", part.extra[:4].ljust(4, b"\0"))
    return is_stored and (not part.extra or (field, 4 + length) == (1, len(part.extra)))


def _check_pickles(pickled: bytes, num_pickles: int) -> None:
    file = io.BytesIO(pickled)
    for _ in range(num_pickles):
        if file.tell() < len(pickled):
            inspection.check_tuples(file)


class Copy(NamedTuple):
    """Copy of a value, and its measures."""

    made: Any
    size: int = 0  # containers in it, each time they occur
    length: int = 0  # characters in it, each time they occur
    depth: int = 0  # nested containers


def _copy(value: Any, copies: dict[int, Copy], level: int) -> Copy:
    """Return `value` with plain dicts, lists and tuples, but for the versions in state dicts.

    A file can give an OrderedDict attributes that hide its methods, and `_metadata` by which
    `load_state_dict` assigns tensors of any type.

    Args:
        copies: those made before, by the id of the original.
        level: of `value` in the checkpoint.

    Raises RecursionError if a container holds itself, or is nested too deeply.
    """
    if not isinstance(value, CONTAINERS):
        return Copy(value, length=len(value) if isinstance(value, str) else 0)
    if id(value) not in copies:
        if level > MAX_DEPTH:
            raise RecursionError
        kind: Any = next(kind for kind in CONTAINERS if isinstance(value, kind))
        keys = list(dict.keys(value)) if isinstance(value, dict) else []
        items = list(dict.values(value) if isinstance(value, dict) else value)
        parts = [_copy(part, copies, level + 1) for part in items + keys]
        copied_items = [part.made for part in parts[: len(items)]]
        made: Any = dict(zip(keys, copied_items, strict=True)) if keys else kind(copied_items)
        versions = _versions(getattr(value, "__dict__", {}).get("_metadata"))
        if versions and kind is dict:
            made = OrderedDict(made)
            made._metadata = versions  # as nn.Module.load_state_dict documents
        depth = 1 + max((part.depth for part in parts), default=0)
        length = sum(part.length for part in parts)
        copies[id(value)] = Copy(made, 1 + sum(part.size for part in parts), length, depth)
    if level + copies[id(value)].depth > MAX_DEPTH:
        raise RecursionError
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
