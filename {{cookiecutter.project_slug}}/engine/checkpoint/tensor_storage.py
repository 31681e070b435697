"""Tensors in a folder, by torch.distributed.checkpoint, read without running code of the files.

torch's own index, ``.metadata``, is a pickle. It is written for other programs, and never read
here: ``index.json`` has the same content.
"""

import io
import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties
from torch.futures import Future

from engine import MAX_TABLE_BYTES, read_text, replacing
from engine.checkpoint.archive import read
from engine.checkpoint.manifest import INDEX
from engine.checkpoint.validation import MAX_DIMS, check_sizes, has_nan

DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
SWITCH_INTERVAL_S = 1e-4  # of threads, while tensors are written


class Chunk(NamedTuple):
    """Consecutive rows of a tensor, or a scalar, in a file of torch.save inside a larger file."""

    num_rows: int  # 1 of a scalar
    file: str
    start: int  # in bytes
    length: int


@dataclass(frozen=True)
class Entry:
    """Shape, type and chunks of a tensor. The chunks follow one another from the first row on."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[Chunk]

    def check(self, sizes: Mapping[str, int]) -> None:
        """Raise ValueError if the chunks are not the whole tensor, or are larger than their files.

        Args:
            sizes: in bytes, of the files in the folder.
        """
        numbers = list(self.shape)
        for one in self.chunks:
            numbers += one.num_rows, one.start, one.length
        if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
            raise ValueError("a size is no count")
        if len(self.shape) > MAX_DIMS:
            raise ValueError("it has too many dimensions")
        num_rows = math.prod(self.shape[:1]) if math.prod(self.shape) else 0
        if sum(one.num_rows for one in self.chunks) != num_rows:
            raise ValueError("rows are missing")
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        for one in self.chunks:
            if one.num_rows * row_bytes > one.length or one.start + one.length > sizes[one.file]:
                raise ValueError("it is larger than its file")

    def regions(self) -> Iterator[tuple[Chunk, torch.Size, torch.Size]]:
        """Yield each chunk with its first index and its shape in the tensor."""
        row = 0
        for one in self.chunks:
            first = (row, *[0] * len(self.shape[1:])) if self.shape else ()
            shape = (one.num_rows, *self.shape[1:]) if self.shape else ()
            yield one, torch.Size(first), torch.Size(shape)
            row += one.num_rows


def save(folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup) -> None:
    """Write `tensors`, of which those that are sharded are this rank's; all ranks call it.

    Of the others, such as batch norm's statistics, rank 0's are written: the validation uses them.

    Raises OSError on all ranks if one of them fails.
    """
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    with _os_errors(), _frequent_switches():
        dcp.save(tensors, storage_writer=_Writer(folder), planner=planner, process_group=group)


def load(folder: Path, index: dict[str, Entry], tensors: dict[str, Tensor], alone: bool) -> None:
    """Read into `tensors`; all ranks call it, unless this process is `alone`.

    Raises OSError on all ranks if one of them fails, or a tensor is altered or holds nan; alone,
    also UserError or ValueError for such a tensor.
    """
    reader = _Reader(folder, index)
    with _os_errors():
        if not alone:
            dcp.load(tensors, storage_reader=reader)
            return
        # As dcp.load with no_dist=True, which torch 2.6 lacks.
        reader.read_metadata()
        for key, (_, shape) in reader.chunks.items():
            spans = zip(key.offset or (), shape, strict=True)
            part = tuple(slice(start, start + length) for start, length in spans)
            tensors[key.fqn][part].copy_(reader.read_chunk(key))


def read_index(folder: Path, sizes: Mapping[str, int]) -> dict[str, Entry]:
    """Return shapes, types and chunks of the tensors in `folder`.

    All tensors together are no larger than the files. Raises any error for an altered index.

    Args:
        sizes: in bytes, of the files in the folder.
    """
    index = {}
    content = json.loads(read_text(folder / INDEX, MAX_TABLE_BYTES))
    for name, (shape, dtype, chunks) in content.items():
        index[name] = Entry(tuple(shape), DTYPES[dtype], [Chunk(*one) for one in chunks])
        index[name].check(sizes)
    total = sum(chunk.length for entry in index.values() for chunk in entry.chunks)
    if total > sum(sizes.values()):
        raise ValueError("chunks overlap")
    return index


def _entry(name: str, stored: Any, places: Mapping[MetadataIndex, Any]) -> Entry:
    """Return the entry of a tensor that was saved, whose chunks are in `places`."""
    assert isinstance(stored, dcp.TensorStorageMetadata)
    entry = Entry(tuple(stored.size), stored.properties.dtype, [])
    for chunk in sorted(stored.chunks, key=lambda one: tuple(one.offsets)):
        if not math.prod(chunk.sizes):  # of a rank for which no rows are left
            continue
        where = places[MetadataIndex(name, chunk.offsets)]
        num_rows = math.prod(chunk.sizes[:1])
        entry.chunks.append(Chunk(num_rows, where.relative_path, where.offset, where.length))
        if tuple(chunk.sizes[1:]) != entry.shape[1:]:
            raise ValueError(f"{name} is not sharded by its rows")
    return entry


class _Writer(dcp.FileSystemWriter):
    """Writer of torch's files and of the index."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:  # of torch.save, which could not close its file after another
            cause: BaseException | None = error
            while cause and not isinstance(cause, OSError):
                cause = cause.__context__
            raise cause or error from None

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        # Not from metadata.storage_data, which some versions of torch set in a copy.
        places = {one.index: one.storage_data for of_rank in results for one in of_rank}
        stored = metadata.state_dict_metadata
        entries = {name: _entry(name, one, places) for name, one in stored.items()}
        names = {dtype: name for name, dtype in DTYPES.items()}
        content = {name: (one.shape, names[one.dtype], one.chunks) for name, one in entries.items()}
        with replacing(Path(self.path, INDEX)) as file:
            file.write_text(json.dumps(content))


class _Reader(dcp.FileSystemReader):
    """Reader of the tensors in an index, each with the checks that whole files have."""

    def __init__(self, folder: Path, index: dict[str, Entry]) -> None:
        super().__init__(folder)
        self.folder, self.index = folder, index
        self.chunks: dict[MetadataIndex, tuple[Chunk, torch.Size]] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        stored: dict[str, Any] = {}
        for name, entry in self.index.items():
            parts = []
            for chunk, offsets, shape in entry.regions():
                parts.append(dcp.ChunkStorageMetadata(offsets, shape))
                self.chunks[MetadataIndex(name, offsets)] = chunk, shape
            properties = TensorProperties(entry.dtype)
            stored[name] = dcp.TensorStorageMetadata(properties, torch.Size(entry.shape), parts)
        return Metadata(stored, storage_data={})

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        for item in plan.items:
            spans = zip(item.storage_offsets, item.lengths, strict=True)
            part = tuple(slice(start, start + length) for start, length in spans)
            target = planner.resolve_tensor(item).detach()
            target.copy_(self.read_chunk(item.storage_index)[part])
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read_chunk(self, key: MetadataIndex) -> Tensor:
        """Return a part of a tensor. Raises UserError or ValueError if it is altered."""
        chunk, shape = self.chunks[key]
        path = self.folder / chunk.file
        with path.open("rb") as file:
            file.seek(chunk.start)
            values = read(path, io.BytesIO(file.read(chunk.length)))
        if not isinstance(values, Tensor) or values.shape != shape:
            raise ValueError(f"{key.fqn} is altered")
        check_sizes(path, {key.fqn: values})
        if values.dtype != self.index[key.fqn].dtype:
            raise ValueError(f"{key.fqn} is altered")
        if has_nan(values):
            raise ValueError(f"{key.fqn} is not finite")
        return values


@contextmanager
def _frequent_switches() -> Iterator[None]:
    """Context in which a thread that computes in Python holds the training thread up less.

    Planning takes dcp a second of that, and the training thread takes the interpreter's lock back
    about a thousand times a step: with Python's 5 ms, one step takes a second longer.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


@contextmanager
def _os_errors() -> Iterator[None]:
    """Context that raises an OSError for the first failure of the ranks, which torch wraps."""
    try:
        yield
    except dcp.CheckpointException as error:  # which is no Exception
        first = next(iter(error.failures.values()))[0]
        text = getattr(first, "strerror", None) or str(first) or type(first).__name__
        raise OSError(getattr(first, "errno", None), text) from None
