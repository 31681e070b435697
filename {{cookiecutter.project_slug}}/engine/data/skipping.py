"""Data sets that skip unreadable files, for --skip-broken."""

import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine import FULL_DISK, MAX_BYTES, UserError, log_line, regular_only
from engine.data import DatasetWrapper, SeededDataset, SizedDataset, decode_crops
from engine.data.files import FileError
from engine.text import printable

RECORD = "broken_files.txt"  # in --output


def skip_broken(
    dataset: SizedDataset, limit: int, output: Path, data: Path | str | None = None
) -> SizedDataset:
    """Return `dataset` with up to `limit` unreadable files skipped; unchanged for a limit of 0.

    Files outside of `data`, a folder or URL, which an evaluation may have recorded in the folder
    `output`, do not count.
    """
    root = f"{printable(_absolute(str(data))).rstrip('/')}/" if data else ""
    return SkippingDataset(dataset, limit, output / RECORD, root) if limit else dataset


def only_readable(dataset: SizedDataset, seed: int) -> SeededDataset:
    """Return `dataset` for a loader that leaves unreadable samples out instead of replacing them.

    Each sample then counts once in a validation; a replacement would count twice.
    """
    kind = ReadableSamples if isinstance(dataset, SkippingDataset) else SeededDataset
    return kind(dataset, seed)


class SkippingDataset(DatasetWrapper):
    """`dataset` with the next readable sample in place of one with an unreadable file.

    The number of samples stays, and a replacement depends on nothing but the files, so that
    processes have equally many batches and a resumed run has the same ones.

    Args:
        limit: number of different unreadable files, of all processes that share `record`.
        record: text file that lists them, one in each line.
        root: with which the names of those begin that count; "" for all.
    """

    decode = "cpu"  # the GPU would decode a file when nothing can take its place

    def __init__(self, dataset: SizedDataset, limit: int, record: Path, root: str = "") -> None:
        super().__init__(dataset)
        self.limit = limit
        self.record = record
        self.root = root
        self._unlisted: set[str] = set()

    def __getitem__(self, index: int) -> Any:
        for offset in range(len(self)):
            sample = self.read((index + offset) % len(self))
            if sample is not None:
                return sample
        raise UserError("no file of the data set can be read")

    def read(self, index: int) -> Any:
        """Return a decoded sample, or None if its file can't be read, which is recorded."""
        try:
            return decode_crops(self.dataset[index])
        except FileError as error:
            self._add(error)
            return None

    def _add(self, error: FileError) -> None:
        """Add a file to the record. Raises UserError if it is one too many."""
        name = printable(_absolute(error.path))
        root = self.root if name.startswith(self.root) else ""  # of a data set with other folders
        self._unlisted.add(name)
        listed: set[str] = set()
        note = ""
        try:
            self.record.parent.mkdir(parents=True, exist_ok=True)
            with open(self.record, "a+", encoding="utf-8", opener=regular_only) as file:
                with suppress(OSError):  # a file system without locks
                    fcntl.lockf(file, fcntl.LOCK_EX)  # other processes add to it, too
                file.seek(0)
                listed = {*file.read(MAX_BYTES).splitlines()}
                self._unlisted -= listed
                if not self._unlisted:
                    return
                listed = {one for one in listed if one.startswith(root)}
                if len(listed) + len(self._unlisted) <= self.limit:
                    file.writelines(f"{name}\n" for name in sorted(self._unlisted))
        except OSError as problem:
            if problem.errno not in FULL_DISK:
                raise UserError(f"{self.record} can't be written ({problem.strerror})") from None
            note = f"; the disk of {self.record} is full"
        number = len(listed) + len(self._unlisted)
        if number > self.limit:
            raise UserError(
                f"{error}; {self.record} lists {number - 1} more, as many as --skip-broken "
                f"allows (python -m engine.data.verify DATA finds all){note}"
            )
        log_line(f"warning: {error}; skipped, {number} of at most {self.limit}{note}")
        if not note:
            self._unlisted.clear()


def _absolute(name: str) -> str:
    """Return an absolute path; a URL, and the empty path of a worker's error, as they are."""
    return os.path.abspath(name) if name and "://" not in name else name


class ReadableSamples(SeededDataset):
    """SeededDataset whose batches lack the samples that can't be read."""

    dataset: SkippingDataset

    def read(self, indices: Sequence[int]) -> list:
        """Return the samples of a batch that can be read."""
        samples = [self.dataset.read(index) for index in indices]
        return [sample for sample in samples if sample is not None]
