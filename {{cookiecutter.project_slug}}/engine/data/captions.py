"""Folders of images with captions, or packed ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine import MAX_TABLE_BYTES, UserError, fingerprint, read_text
from engine.data import shards
from engine.data.files import naming_errors, read_file
from engine.data.folders import Scan


class PackedCaptions(shards.PackedSamples):
    """Samples (path, caption) of a packed folder."""

    def __getitem__(self, index: Any) -> tuple[Path, bytes]:  # slices are not used
        path = self.pack.extra(index)
        with naming_errors(path, "a caption"):
            caption = bytes(read_file(path)).split(b"\n")[self.pack.records["label"][index]]
            caption.decode()  # raises UnicodeDecodeError
            if not caption or b"\0" in caption or len(caption) > self.pack.manifest.longest:
                raise ValueError("it is empty or too long for pack.json or holds a NUL character")
        return Path(self.pack.image(index)), caption


def list_captions(folder: Path, limit: int) -> Sequence[tuple[Path, bytes]]:
    """Return the images and captions of a folder with a captions.tsv, or of a packed one.

    Args:
        limit: bytes of the longest caption that is allowed.

    Raises UserError for an incomplete or damaged pack, and as `read_captions` does.
    """
    if not shards.is_packed(folder):
        return read_captions(folder, limit)
    pack = shards.Pack(folder, "txt")
    require_short(pack.manifest.longest, limit, str(folder))
    return PackedCaptions(pack)


def identify(folder: Path, pairs: Sequence[tuple[Path, bytes]]) -> fingerprint.Fingerprint:
    """Return the fingerprint of the images and captions of a folder, or of a packed one."""
    if isinstance(pairs, PackedCaptions):  # whose captions are in the shards
        return fingerprint.of_files(folder, pairs)
    names = {} if shards.is_packed(folder) else fingerprint.of_files(folder, pairs)
    return names | {"captions": fingerprint.digest(caption.decode() for _, caption in pairs)}


def read_captions(folder: Path, limit: int) -> list[tuple[Path, bytes]]:
    """Return the images and captions in `folder`/captions.tsv, which may have a header line.

    Raises UserError for a line that isn't FILE, tab, TEXT, an empty or too long caption, or a file
    that is missing or outside the folder.
    """
    path = folder / "captions.tsv"
    if not path.exists():
        raise UserError(f"{path} is missing: it has FILE, a tab, and TEXT in each line")
    pairs = []
    for number, line in enumerate(read_lines(path), 1):
        name, tab, text = (part.strip(" ") for part in line.partition("\t"))
        if (number, name, text) == (1, "file", "text") or not line.strip():
            continue
        caption = text.strip().encode()
        require_short(len(caption), limit, f"{path}, line {number}")
        if not (tab and name and caption) or b"\t" in caption or b"\0" in caption:
            raise UserError(
                f"{path}, line {number}: it must be FILE, a tab, and a text without tabs"
            )
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise UserError(f"{path}, line {number}: {name} must be a path below {folder}")
        pairs.append((folder / name, caption))
    try:
        there = {file for parent in {file.parent for file, _ in pairs} for file in parent.glob("*")}
    except OSError as error:
        raise UserError(f"{path} names files that can't be listed ({error.strerror})") from None
    if missing := sorted({str(file) for file, _ in pairs if file not in there}):
        names = ", ".join(missing[:5]) + (", …" if len(missing) > 5 else "")
        raise UserError(f"{path} names {len(missing)} files that are not there: {names}")
    _report_uncaptioned(folder, there - {file for file, _ in pairs})
    if not pairs:
        raise UserError(f"{path} holds no captions (FILE, tab, TEXT in each line)")
    return pairs


def _report_uncaptioned(folder: Path, files: set[Path]) -> None:
    scan = Scan(folder)
    for file in sorted(files):
        if file.suffix.lower() in scan.suffixes and not file.name.startswith("."):
            scan.ignore("images without a caption", str(file))
    scan.report()


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file, split at \\n only: a caption may contain U+0085."""
    try:
        return read_text(path, MAX_TABLE_BYTES).removesuffix("\n").split("\n")
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}); name another file") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8; save it as that") from None


def require_short(length: int, limit: int, place: str) -> None:
    """Raise UserError if a caption of `length` bytes is too long; `place` names its origin."""
    if length > limit:
        raise UserError(
            f"{place}: the text has {length} bytes, more than {limit}; shorten it, or raise "
            "LENGTH in task.py"
        )
