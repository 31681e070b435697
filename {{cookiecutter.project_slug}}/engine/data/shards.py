"""Packed data: samples in tar files, with an index for random access to them.

A folder of a pack holds:

- shard-00000.tar and so on, which the webdataset library reads, too. A sample is two members, such
  as 000000007.jpg and 000000007.cls; the number is the place of the file in the folder that was
  packed. A global header has the id of the pack.
- index.bin: MAGIC and the id of the pack, then a record of type RECORD for each sample.
- pack.json: the manifest, written last; a pack without it is not complete.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from io import FileIO
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import numpy as np

from engine import MAX_BYTES, UserError, exists, open_regular

FORMAT = 1  # version, in the manifest
MANIFEST, PROGRESS, INDEX = "pack.json", "progress.json", "index.bin"
TIMES = "times.txt"  # checksum of the times at which the packed files were modified
REMOTE = "remote.json"  # in a local mirror of a pack that is read by URL (engine/data/remote.py)
CACHE = "ENGINE_DATA_CACHE"  # environment variable: the folder of the mirrors, for workers, too
SPLITS, MASK_SPLITS = ("train", "val"), ("training", "validation")
# Beside the splits of data with masks: one's own list of the classes, ADE20K's.
CLASS_FILES = ("classes.txt", "objectInfo150.txt")
MAGIC = b"PACKIDX1"
ID_LENGTH = 24  # hexadecimal digits
HEADER_LENGTH = len(MAGIC) + ID_LENGTH
RECORD = np.dtype(
    [
        ("offset", "<u8"),  # of the image in its shard
        ("length", "<u4"),  # of the image, in bytes
        ("extra", "<u4"),  # length of the second member, which follows
        ("label", "<u4"),
        ("shard", "<u4"),
        ("height", "<u2"),
        ("width", "<u2"),
    ]
)
START = 2**16  # bytes of a shard whose checksum is compared before samples of it are read
BLOCK = 512  # of a tar file: headers have one, and data is padded to whole ones
AGAIN = "copy the pack again, or delete it and pack anew (python -m engine.data.pack)"


@dataclass
class Shard:
    """Entry of the manifest."""

    name: str
    bytes: int
    samples: int
    sha256: str
    start_sha256: str  # of the first START bytes


@dataclass
class Manifest:
    """Contents of pack.json, and of progress.json while a folder is being packed."""

    id: str
    split: str
    kind: str  # of the second member of each sample: "cls", "txt" or "mask.png"
    options: dict[str, int]
    classes: list[str]
    longest: int = 0  # bytes of the longest caption
    format: int = FORMAT
    samples: int = 0  # entries of the index
    next: int = 0  # position of the first source that is not in a shard
    shards: list[Shard] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)  # files that can't be read
    index_sha256: str = ""

    @classmethod
    def parse(cls, data: bytes) -> "Manifest":
        """Return the manifest in a JSON file. Raises ValueError if it is damaged."""
        try:
            values = json.loads(data)
            entries = [Shard(**_require_types(Shard, entry)) for entry in values["shards"]]
            manifest = cls(**_require_types(cls, values) | {"shards": entries})
        except (KeyError, TypeError, RecursionError):
            raise ValueError from None
        if not (
            re.fullmatch(f"[0-9a-f]{{{ID_LENGTH}}}", manifest.id)
            and all(isinstance(name, str) for name in manifest.classes)
            and all(isinstance(value, int) for value in manifest.options.values())
            and len(manifest.classes) <= 10_000 + 100 * manifest.samples  # a model has all
            and len(set(manifest.classes)) == len(manifest.classes)
            and all(shard.name == shard_name(number) for number, shard in enumerate(entries))
            and manifest.samples == sum(shard.samples for shard in entries)
        ):
            raise ValueError
        "".join(manifest.classes).encode(errors="surrogateescape")  # half a surrogate pair is none
        return manifest

    @property
    def index_size(self) -> int:
        """The bytes of the index."""
        return HEADER_LENGTH + RECORD.itemsize * self.samples


def is_packed(folder: Path) -> bool:
    """Return whether a folder holds a pack, or the beginning of one."""
    return any(exists(folder / name) for name in (MANIFEST, PROGRESS))


def is_mirror(folder: Path) -> bool:
    """Return whether a folder is in this run's cache; any data may hold such a file."""
    return str(folder.parent.parent) == os.environ.get(CACHE) and (folder / REMOTE).is_file()


def shard_name(number: int) -> str:
    """Return the file name of the shard with that number, from 0."""
    return f"shard-{number:05d}.tar"


def _require_types(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a dataclass. Raises KeyError or TypeError if they do not suit it."""
    for name, hint in get_type_hints(kind).items():
        is_in_range = hint is not int or 0 <= values[name] < 2**63  # sizes and counts
        if not is_in_range or type(values[name]) is not (get_origin(hint) or hint):
            raise TypeError
    return values


class Pack:
    """Samples of a packed folder, by index.

    Args:
        folder: it is checked, except for the checksums. The shards of a mirror are not there yet.
        kind: what the second member of each sample is: "cls", "txt" or "mask.png"; None for any.

    Attributes:
        shard_sizes: samples of each shard, for `engine.data.shard_order`; none if they are local.

    Raises UserError if the pack is not complete, damaged, or of another kind.
    """

    def __init__(self, folder: Path, kind: str | None = None) -> None:
        self.folder, self.kind = folder, kind
        self.manifest = read_manifest(folder)
        found = self.manifest.kind
        if kind and found != kind:
            raise UserError(f"{folder} is packed for another task: with .{found}, not .{kind}")
        is_remote = is_mirror(folder)
        if not is_remote:
            check_files(folder, self.manifest)
        self.shard_sizes = [shard.samples for shard in self.manifest.shards] if is_remote else []
        index = folder / INDEX
        if checksum(index) != self.manifest.index_sha256:
            raise UserError(_damaged(index))
        self.records: np.ndarray
        try:
            self.records = np.memmap(index, RECORD, mode="r", offset=HEADER_LENGTH)
        except OSError:  # FUSE with direct I/O has no memory maps: a copy in each process
            self.records = np.fromfile(index, RECORD, offset=HEADER_LENGTH)
        label, classes = self.records["label"].max(), len(self.manifest.classes)
        if found == "cls" and label >= classes:
            raise UserError(f"{index} has label {label}, but only {classes} classes; {AGAIN}")

    def __reduce__(self) -> tuple:  # pickle would copy the index
        return type(self), (self.folder, self.kind)

    def __len__(self) -> int:
        return len(self.records)

    def image(self, index: int) -> str:
        """Return the path of an image in its shard, for engine.data.files.read_file."""
        record = self.records[index]
        return self._path(record, int(record["offset"]), int(record["length"]))

    def images(self) -> list[str]:
        """Return the paths of all images."""
        return list(dict.fromkeys(map(self.image, range(len(self)))))

    def extra(self, index: int) -> str:
        """Return the path of the second member of a sample."""
        record = self.records[index]
        end = int(record["offset"]) + int(record["length"])
        return self._path(record, end + -end % BLOCK + BLOCK, int(record["extra"]))

    def _path(self, record: np.void, offset: int, length: int) -> str:
        return f"{self.folder}/{shard_name(record['shard'])}/{offset}+{length}"


class PackedSamples(Sequence):
    """Samples of a packed folder, whose form `__getitem__` of a subclass defines."""

    def __init__(self, pack: Pack) -> None:
        self.pack = pack
        self.shard_sizes = pack.shard_sizes

    def __len__(self) -> int:
        return len(self.pack)


class PackedImages(PackedSamples):
    """Samples (path, label) of a packed folder of CLASS/IMAGE.

    Args:
        labels: replace those of the pack.
    """

    def __init__(self, pack: Pack, labels: Sequence[int]) -> None:
        super().__init__(pack)
        self.labels = labels

    def __getitem__(self, index: Any) -> tuple[str, int]:  # slices are not used
        return self.pack.image(index), self.labels[self.pack.records["label"][index]]


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the pack in `folder`. Raises UserError if it has none."""
    path = folder / MANIFEST
    if not path.exists():
        raise UserError(
            f"{folder} is not packed completely: run the command that packed it again, which "
            "continues it"
        )
    with _opening(path, MAX_BYTES) as file:  # not read to its end: some files have none
        return parse_manifest(file.read(os.fstat(file.fileno()).st_size), path)


def parse_manifest(content: bytes, name: object) -> Manifest:
    """Return the manifest in a file's `content`. Raises UserError, with its `name`, if invalid."""
    try:
        manifest = Manifest.parse(content)
        if not manifest.samples:
            raise ValueError
    except ValueError:
        raise UserError(f"{name} is damaged, or of another version; {AGAIN}") from None
    if manifest.format != FORMAT:
        raise UserError(f"{name} has format {manifest.format}, not {FORMAT}; pack anew")
    return manifest


def check_files(folder: Path, manifest: Manifest, with_starts: bool = True) -> None:
    """Check that the index and the shards are there, belong to the pack and have its sizes.

    Args:
        with_starts: compare the checksums of the starts of the shards, too.

    Raises UserError about the first one that does not.
    """
    _check_file(folder / INDEX, manifest.index_size, manifest.id)
    for shard in manifest.shards:
        start = shard.start_sha256 if with_starts else ""
        _check_file(folder / shard.name, shard.bytes, manifest.id, start)


def _check_file(path: Path, size: int, pack_id: str, start_sha256: str = "") -> None:
    with _opening(path) as file:
        start = file.read(START if start_sha256 else 2 * BLOCK)
        found = os.fstat(file.fileno()).st_size
    has_size = found == size
    is_changed = start_sha256 and has_size and sha256(start).hexdigest() != start_sha256
    if pack_id.encode() not in start[: 2 * BLOCK] or is_changed:
        raise UserError(f"{path} does not belong to the pack of {MANIFEST} beside it; {AGAIN}")
    if not has_size:
        raise UserError(f"{path} has {found} bytes instead of {size}; {AGAIN}")


def find_damage(folder: Path) -> Iterator[str]:
    """Yield an error message for each file of a pack; an empty one if its checksum is right."""
    manifest = read_manifest(folder)
    check_files(folder, manifest, with_starts=False)
    sums = {shard.name: shard.sha256 for shard in manifest.shards}
    for name, expected in ({INDEX: manifest.index_sha256} | sums).items():
        is_same = checksum(folder / name) == expected
        yield "" if is_same else _damaged(folder / name)


def _damaged(path: Path) -> str:
    return f"{path} is damaged: its checksum differs; {AGAIN}"


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file. Raises UserError if it can't be read."""
    digest = sha256()
    with _opening(path) as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _opening(path: Path, max_bytes: int = 2**63) -> Iterator[FileIO]:
    """Open a file of a pack for reading. Raises UserError if it can't be read."""
    try:
        with open_regular(path, max_bytes) as file:
            yield file
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}); {AGAIN}") from None
