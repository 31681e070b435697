"""Writing of packed data: encoding by several processes, shards, index and progress."""

import fcntl
import io
import json
import os
import re
import sys
import tarfile
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple, cast

import numpy as np
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional
from tqdm import tqdm

from engine import SUFFIX, OutageError, UserError, log_line, read_text, regular_only, replacing
from engine.data import shards
from engine.data.files import naming_errors, read_file
from engine.data.images import read_image, read_labels, trim
from engine.data.loading import prepare_worker
from engine.data.shards import BLOCK, INDEX, MANIFEST, PROGRESS, TIMES, Manifest, Shard
from engine.text import printable

CHUNK = 8  # files that a worker encodes at a time
CHUNKS_AHEAD = 4  # of each worker: bounds the memory
MAX_SHORT_SIDE = 1024  # a JPEG file has at most 65,500 pixels a side, `trim` leaves 64 times this
MAX_SIDE = 2**16 - 1  # of an image in the index
NEAREST = InterpolationMode.NEAREST_EXACT


class Options(NamedTuple):
    """Flags on which the packed bytes depend."""

    short_side: int
    quality: int
    shard_size: int
    shuffle: bool = False


class Source(NamedTuple):
    """An image to pack, and what the second member of its sample is made of."""

    path: str
    labels: Sequence[int]  # of its entries in the index, one or more
    text: bytes
    mask: str = ""  # path; replaces `text`


class PackedSample(NamedTuple):
    """A packed sample: the image file, and the second member; an error if it can't be read."""

    position: int  # in the list of sources
    labels: Sequence[int] = ()
    suffix: str = ""
    image: bytes = b""
    extra: bytes = b""
    height: int = 0
    width: int = 0
    error: str = ""


def encode(position: int, source: Source, options: Options) -> PackedSample:
    """Return a sample with its shorter side resized to at most `options.short_side` pixels.

    A file that is small enough is copied unchanged, and so is its mask.
    """
    try:
        image = read_image(source.path)  # also finds damage in a file that is copied
        data, extra = _read(source.path), source.text
        if source.mask:
            labels = read_labels(Path(source.mask))
            extra = _read(source.mask)
            if labels.shape != image.shape[1:]:
                raise UserError(f"{source.path} and {source.mask} differ in size; make them alike")
    except OutageError:  # the file may be intact
        raise
    except UserError as error:
        return PackedSample(position, error=str(error))
    height, width = image.shape[1:]
    suffix = Path(source.path).suffix.lower()
    if min(height, width) > options.short_side or max(height, width) > MAX_SIDE:
        image = trim(image)
        ratio = min(1.0, options.short_side / min(image.shape[1:]))
        height, width = (round(side * ratio) for side in image.shape[1:])
        image = functional.resize(image, [height, width], antialias=True)
        data, suffix = _as_file(image, "JPEG", quality=options.quality), ".jpg"
        if source.mask:
            labels = functional.resize(trim(labels[None]), [height, width], NEAREST)
            extra = _as_file(labels.byte(), "PNG")
    return PackedSample(position, source.labels, suffix, data, extra, height, width)


def _read(path: str) -> bytes:
    with naming_errors(path, "an image"):
        return bytes(read_file(path))


def _as_file(image: torch.Tensor, file_format: str, **options: int) -> bytes:
    """Return the file of an image of three channels or one, uint8 (C, H, W)."""
    buffer = io.BytesIO()
    functional.to_pil_image(image).save(buffer, file_format, **options)
    return buffer.getvalue()


def encode_chunk(start: int, sources: Sequence[Source], options: Options) -> list[PackedSample]:
    """Return the samples of consecutive sources, of which the first has the position `start`."""
    return [encode(start + index, source, options) for index, source in enumerate(sources)]


def encode_all(
    sources: Sequence[Source], start: int, options: Options, workers: int
) -> Iterator[PackedSample]:
    """Yield the samples from position `start` on, in order, encoded by several processes."""
    pending: deque[Future[list[PackedSample]]] = deque()
    with ProcessPoolExecutor(workers, initializer=prepare_process) as pool:
        for first in range(start, len(sources), CHUNK):
            chunk = sources[first : first + CHUNK]
            pending.append(pool.submit(encode_chunk, first, chunk, options))
            if len(pending) > CHUNKS_AHEAD * workers:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()


def prepare_process() -> None:
    """Prepare a process for encoding."""
    prepare_worker(0)
    torch.set_num_threads(1)  # each file is encoded by one thread


class ShardWriter:
    """Tar file of samples, whose bytes depend on nothing but these and the pack's id.

    Attributes:
        records: index entries of the samples.
    """

    def __init__(self, file: BinaryIO, number: int, pack_id: str) -> None:
        self.file, self.number = file, number
        self.digest = sha256()
        self.start = b""
        self.records: list[tuple[int, ...]] = []
        self.size = 0
        headers = {"comment": f"pack {pack_id}"}
        self.tar = tarfile.open(  # noqa: SIM115 - closed by `close`
            fileobj=cast(IO[bytes], self),  # needs no other methods
            mode="w",
            format=tarfile.PAX_FORMAT,
            pax_headers=headers,
        )

    def write(self, data: bytes) -> int:
        """Write bytes of the tar file."""
        self.digest.update(data)
        self.start += data[: shards.START - len(self.start)]
        self.size += len(data)
        return self.file.write(data)

    def tell(self) -> int:
        """Return the position in the tar file."""
        return self.size

    def has_room(self, sample: PackedSample, limit: int) -> bool:
        """Return whether a sample fits into `limit` bytes; the first one always does."""
        size = len(sample.image) + len(sample.extra) + 6 * BLOCK  # headers, padding, the end
        return not self.records or self.size + size <= limit

    def add(self, sample: PackedSample, kind: str) -> None:
        """Append a sample, whose key is its position among the sources."""
        key = f"{sample.position:09d}"
        offset = self.size + BLOCK
        second = f".{kind}"
        first = sample.suffix
        # Others would need a further header in the tar file, or are that of the second member.
        if first == second or not re.fullmatch(r"\.\w{1,8}", first, re.ASCII):
            first = ".image"
        for suffix, data in ((first, sample.image), (second, sample.extra)):
            info = tarfile.TarInfo(key + suffix)
            info.size = len(data)
            self.tar.addfile(info, io.BytesIO(data))
        lengths = len(sample.image), len(sample.extra)
        place = self.number, sample.height, sample.width
        self.records += [(offset, *lengths, label, *place) for label in sample.labels]

    def close(self) -> Shard:
        """Complete the tar file; return its entry of the manifest."""
        self.tar.close()
        name = shards.shard_name(self.number)
        start = sha256(self.start).hexdigest()
        return Shard(name, self.size, len(self.records), self.digest.hexdigest(), start)


def _stat(path: str) -> tuple[int, int]:
    """Return size and time of modification; -1 for a file that can't be read, an error later."""
    try:
        status = os.stat(path)
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


class SplitPacker:
    """Packing of one folder, from the start or from where it was interrupted.

    The folder is locked until this object is deleted, unless the pack is complete.

    Raises UserError if the folder holds something else, or a pack of other options or files, or
    another process packs it.
    """

    def __init__(
        self,
        folder: Path,
        sources: Sequence[Source],
        classes: Sequence[str],
        options: Options,
        kind: str,
    ) -> None:
        self.folder, self.sources, self.options, self.kind = folder, sources, options, kind
        self.root = os.path.commonpath([os.path.dirname(source.path) for source in sources])
        self.progress = Manifest("", folder.name, kind, options._asdict(), list(classes))
        if kind == "txt":
            lines = (line for source in sources for line in source.text.split(b"\n"))
            self.progress.longest = max(map(len, lines))
        self.progress.id, self.times = self._digests()
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.is_complete:
            self.index = self._lock()
        self._resume()

    @property
    def is_complete(self) -> bool:
        """Return whether nothing is left to pack."""
        return (self.folder / MANIFEST).is_file()

    def _resume(self) -> None:
        """Read what was packed before."""
        state = next(filter(Path.is_file, map(self.folder.joinpath, (MANIFEST, PROGRESS))), None)
        if state is None:
            with replacing(self.folder / TIMES) as temporary:
                temporary.write_text(self.times)
            self._save(PROGRESS)
            return
        try:
            before = Manifest.parse(read_text(state).encode())
        except (OSError, ValueError):
            raise UserError(f"{state} is damaged; delete {self.folder} and pack anew") from None
        if before.id == self.progress.id:
            self.progress = before
            self._require_same_times()
            return
        changed = [
            f"--{name.replace('_', '-')} {value} instead of {before.options.get(name)}"
            for name, value in self.options._asdict().items()
            if value != before.options.get(name)
        ]
        difference = ", ".join(changed) or "its files had other names, sizes or labels"
        raise UserError(
            f"{self.folder} holds another pack: {difference}; give the same options and files, or "
            "name a new folder"
        )

    def _lock(self) -> BinaryIO:
        """Return the index, locked and open for appending, of a folder that is new or begun."""
        path = self.folder / INDEX
        if not shards.is_packed(self.folder):
            others = {other.name for other in self.folder.iterdir() if other.suffix != SUFFIX}
            is_begun = INDEX in others and not path.lstat().st_size  # killed before it had progress
            if others - ({TIMES, INDEX} if is_begun else {TIMES}):
                raise UserError(f"{self.folder} holds something else; name a new folder")
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise UserError(f"{path} is not a regular file; delete {self.folder} and pack anew")
        index = open(path, "ab", opener=regular_only)  # noqa: SIM115 - the lock ends with it
        try:
            # Not lockf: that lock would end as soon as this process closes the file once.
            fcntl.flock(index, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{self.folder} is being packed by another process") from None
        except OSError as error:  # a file system without locks
            log_line(f"warning: {self.folder} can't be locked ({error.strerror}): pack it once")
        return index

    def _digests(self) -> tuple[str, str]:
        """Return an id, and a checksum of the times at which the files were modified.

        The id differs for other options, and for files of other names or sizes. The times are not
        part of it: a pack of copied files has the same bytes.
        """
        digest = sha256(json.dumps(asdict(self.progress), sort_keys=True).encode())
        times = sha256()
        for source in self.sources:
            name = os.path.relpath(source.path, self.root)
            (size, time), (mask_size, mask_time) = _stat(source.path), _stat(source.mask)
            digest.update(repr((name, source.labels, source.text, (size, mask_size))).encode())
            times.update(repr((time, mask_time)).encode())
        return digest.hexdigest()[: shards.ID_LENGTH], times.hexdigest()

    def _require_same_times(self) -> None:
        """Raise UserError if a file was modified after the packing had started."""
        path = self.folder / TIMES
        if not path.is_file() or read_text(path) != self.times:
            raise UserError(
                f"{self.folder} was packed from files with other times of modification, so they "
                "may have changed; pack into a new folder"
            )

    def _save(self, name: str) -> None:
        with replacing(self.folder / name) as temporary:
            text = json.dumps(asdict(self.progress), indent=1)
            temporary.write_text(f"{text}\n", encoding="utf-8")

    def run(self, workers: int) -> None:
        """Pack what is left, without the manifest."""
        if self.progress.shards:
            size = os.fstat(self.index.fileno()).st_size
            self.index.truncate(min(size, self.progress.index_size))
        else:
            self.index.truncate(0)
            self.index.write(shards.MAGIC + self.progress.id.encode())
            self.index.flush()
        shards.check_files(self.folder, self.progress)
        with tqdm(
            desc=f"packing {self.folder.name}",
            total=len(self.sources),
            initial=self.progress.next,
            unit=" files",
            disable=None,
        ) as bar:
            self._write_shards(self._encoded(bar, workers))
        self.progress.next = len(self.sources)
        self._save(PROGRESS)

    def _encoded(self, bar: tqdm, workers: int) -> Iterator[PackedSample]:
        """Yield the readable samples; report and record the others."""
        for sample in encode_all(self.sources, self.progress.next, self.options, workers):
            bar.update()
            if not sample.error:
                yield sample
                continue
            tqdm.write(printable(sample.error), file=sys.stderr)
            path = self.sources[sample.position].path
            self.progress.broken.append(os.path.relpath(path, self.root))

    def _write_shards(self, samples: Iterator[PackedSample]) -> None:
        """Write samples to shards; after each one, its part of the index, and the progress."""
        sample = next(samples, None)
        while sample:
            number = len(self.progress.shards)
            with (
                replacing(self.folder / shards.shard_name(number)) as temporary,
                temporary.open("wb") as file,
            ):
                shard = ShardWriter(file, number, self.progress.id)
                while sample and shard.has_room(sample, self.options.shard_size):
                    shard.add(sample, self.kind)
                    sample = next(samples, None)
                entry = shard.close()
            self.index.write(np.array(shard.records, shards.RECORD).tobytes())
            self.index.flush()
            os.fsync(self.index.fileno())
            self.progress.shards.append(entry)
            self.progress.samples += entry.samples
            self.progress.next = sample.position if sample else len(self.sources)
            self._save(PROGRESS)

    def finish(self) -> None:
        """Write the manifest."""
        self.progress.index_sha256 = shards.checksum(self.folder / INDEX)
        self._save(MANIFEST)
        (self.folder / PROGRESS).unlink()
