"""Data sets that skip unreadable files, for --skip-broken."""

import fcntl
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine import FULL_DISK, MAX_BYTES, UserError, log_line, regular_only
from engine.data import DatasetWrapper, SeededDataset, SizedDataset, decode_crops
from engine.data.files import FileError
from engine.text import printable

RECORD = "broken_files.txt"  # in --output


def skip_broken(dataset: SizedDataset, limit: int, output: Path) -> SizedDataset:
    """Return `dataset` with up to `limit` unreadable files skipped; unchanged for a limit of 0."""
    return SkippingDataset(dataset, limit, output / RECORD) if limit else dataset


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
    """

    decode = "cpu"  # the GPU would decode a file when nothing can take its place

    def __init__(self, dataset: SizedDataset, limit: int, record: Path) -> None:
        super().__init__(dataset)
        self.limit = limit
        self.record = record
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
        self._unlisted.add(printable(error.path))
        known: set[str] = set()
        note = ""
        try:
            self.record.parent.mkdir(parents=True, exist_ok=True)
            with open(self.record, "a+", encoding="utf-8", opener=regular_only) as file:
                with suppress(OSError):  # a file system without locks
                    fcntl.lockf(file, fcntl.LOCK_EX)  # other processes add to it, too
                file.seek(0)
                known = {*file.read(MAX_BYTES).splitlines()}
                self._unlisted -= known
                if not self._unlisted:
                    return
                if len(known) + len(self._unlisted) <= self.limit:
                    file.writelines(f"{name}\n" for name in sorted(self._unlisted))
        except OSError as problem:
            if problem.errno not in FULL_DISK:
                raise UserError(f"{self.record} can't be written ({problem.strerror})") from None
            note = f"; the disk of {self.record} is full"
        number = len(known) + len(self._unlisted)
        if number > self.limit:
            raise UserError(
                f"{error}; {self.record} lists {number - 1} more, as many as --skip-broken "
                f"allows (python -m engine.data.verify DATA finds all){note}"
            )
        log_line(f"warning: {error}; skipped, {number} of at most {self.limit}{note}")
        if not note:
            self._unlisted.clear()


class ReadableSamples(SeededDataset):
    """SeededDataset whose batches lack the samples that can't be read."""

    dataset: SkippingDataset

    def read(self, indices: Sequence[int]) -> list:
        """Return the samples of a batch that can be read."""
        samples = [self.dataset.read(index) for index in indices]
        return [sample for sample in samples if sample is not None]
