"""Manifest of a sharded checkpoint: ``manifest.json`` with the size and checksum of each file."""

import json
import stat
import zlib
from pathlib import Path
from typing import Any

from engine import UserError, read_text, replacing
from engine.checkpoint.archive import UnreadableError, reason_of

MANIFEST, INDEX = "manifest.json", "index.json"
MANIFEST_VERSION = 1
CHUNK = 2**24  # bytes


def write(path: Path, identity: str, files: dict[str, list[int]]) -> None:
    """Write the manifest of the folder `path`.

    Args:
        identity: that ``state.pt`` holds, too.
        files: by name, as `describe` returns them.
    """
    manifest = {"version": MANIFEST_VERSION, "id": identity, "files": files}
    with replacing(path / MANIFEST) as file:
        file.write_text(json.dumps(manifest, indent=1))


def exists(path: Path) -> bool:
    """Return whether `path` is a folder with a valid manifest."""
    try:
        read(path)
    except UserError:
        return False
    return True


def validate(path: Path, part: slice = slice(None)) -> None:
    """Raise UserError if a file is missing, or has another size or checksum than it was written.

    Only this `part` of the files is checked.
    """
    for name, expected in [*read(path)["files"].items()][part]:
        file = path / name
        try:
            # The size first: to read a file that is larger than expected could take hours.
            is_whole = _size_of(file) == expected[0] and describe(file) == expected
        except OSError as error:
            kind = UnreadableError if reason_of(error) else UserError
            raise kind(f"{path}: its {name} can't be read ({error.strerror})") from None
        if not is_whole:
            raise UserError(f"{path}: its {name} is torn or altered; use another one")


def read(path: Path) -> dict[str, Any]:
    """Return the manifest of the folder `path`. Raises UserError if it has no valid one."""
    try:
        _size_of(path / MANIFEST)  # an error for a link
        manifest = json.loads(read_text(path / MANIFEST))
        is_valid = manifest["version"] == MANIFEST_VERSION and isinstance(manifest["id"], str)
        files = manifest["files"]
        is_valid = is_valid and INDEX in files and all(map(_is_name, files))
        if not is_valid or not all(_are_counts(one) for one in files.values()):
            raise ValueError
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        if reason := reason_of(error):
            raise UnreadableError(f"{path}: {MANIFEST} can't be read ({reason})") from None
        is_run = (path / "best.pt").exists()
        other = "name a file in it, such as best.pt" if is_run else "use another one"
        raise UserError(
            f"{path}: it has no valid {MANIFEST}, so it is incomplete or no checkpoint; {other}"
        ) from None
    return manifest


def _is_name(name: str) -> bool:
    """Return whether `name` is that of a file in the folder."""
    return Path(name).name == name and name.isprintable()


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and [type(one) for one in value] == [int, int]


def _size_of(path: Path) -> int:
    """Return the size of a file in bytes. Raises OSError for a link and what is no regular file."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(None, "it is no regular file")
    return status.st_size


def describe(path: Path) -> list[int]:
    """Return the size and the CRC-32 of a file. Raises OSError if it is no regular one."""
    _size_of(path)
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return [size, checksum]
