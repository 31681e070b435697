"""Data loaders whose workers live for the whole training."""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, default_collate

from engine import UserError, distributed, end_with_parent
from engine.data import (
    DatasetWrapper,
    ResumableDistributedSampler,
    SeededDataset,
    collate,
    gpu_decoding,
    mix_seeds,
    rng_preserved,
    seed_cpu,
    select_batch,
)
from engine.distributed.watchdog import ignore_stop_signals


class TrainLoader:
    """Loader of one epoch after the other, whose workers live as long as it is iterated over.

    They load the first batches of an epoch during the last steps, and the validation, of the one
    before it, unless the data set has a method `set_epoch`: it is called in its epoch, and may read
    what the training has computed for it. Each iteration yields the batches from the position of
    `sampler` to the end of its epoch, without an incomplete one.

    Args:
        epochs: number of epochs, beyond which nothing is loaded.
        options: of `build_loader`.

    Raises UserError if images are to be decoded on a device that cannot; if no run could resume
    from a position of the sampler; or if an iteration goes on after a later one has started.
    """

    def __init__(
        self,
        dataset: SeededDataset,
        sampler: ResumableDistributedSampler,
        *,
        batch_size: int,
        epochs: int,
        **options: Any,
    ) -> None:
        if not hasattr(sampler, "start_sample"):
            raise UserError(
                f"{type(sampler).__name__} has no position to resume from: derive the sampler from "
                "ResumableDistributedSampler"
            )
        self.dataset = dataset
        self.sampler = sampler
        self.batch_size = batch_size
        self.batch_sampler = SeededBatchSampler(sampler, batch_size, dataset.seed)
        own = dataset.dataset
        # The set_epoch of the engine's depends on the epoch alone.
        while isinstance(own, DatasetWrapper) and type(own).__module__.startswith("engine."):
            own = own.dataset
        self._loads_ahead = not hasattr(own, "set_epoch")
        self._indices = EpochBatches(self.batch_sampler, epochs)
        self._loader = build_loader(EpochDataset(dataset), batch_sampler=self._indices, **options)
        self._batches: Iterator = iter(())
        self._position: tuple[int, int] | None = None  # of the sampler, where `_batches` continue
        self._attributes: dict[tuple[int, str], Any] = {}  # of the data that the workers copied
        self._iterations = 0

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def start(self) -> None:
        """Start the workers, which share no file that this process opens from now on."""
        if self._loads_ahead:
            self._position = (self.sampler.epoch, self.sampler.start_sample)
        else:
            self._indices.end = self.sampler.epoch  # no batches
        self._batches = iter(self._loader)

    def __iter__(self) -> Iterator:
        start = (self.sampler.epoch, self.sampler.start_sample)
        if start != self._position or self._indices.are_outdated():
            if not self._loads_ahead:
                self._indices.end = self.sampler.epoch + 1
            self._batches = iter(self._loader)
        if self._loader.num_workers:
            self._warn_of_changes()
        self._position = None
        self._iterations += 1
        iteration = self._iterations
        for remaining in reversed(range(len(self))):
            if iteration != self._iterations:
                raise UserError(
                    "a batch was taken from the loader of the training while it is iterated over: "
                    "make another DataLoader for it"
                )
            batch = next(self._batches)
            if batch is None:
                raise UserError(
                    "the collate_fn of the training data returned None: all batches are needed, so "
                    "return another sample in the place of one that is left out"
                )
            if not remaining and self._loads_ahead:
                self._position = (self.sampler.epoch + 1, 0)
            yield batch

    def _warn_of_changes(self) -> None:
        attributes = _attributes(self.dataset.dataset)
        before = self._attributes or attributes
        self._attributes = attributes
        common = before.keys() & attributes.keys()
        changed = {key[1] for key in common if _differ(before[key], attributes[key])}
        if changed:
            distributed.print_on_rank_zero(
                f"warning: {', '.join(sorted(changed))} of the training data changed after the "
                "loading workers copied it, without effect: set it in the data set's method "
                "set_epoch(epoch)"
            )


def _attributes(dataset: Any) -> dict[tuple[int, str], Any]:
    """Return the settings of a data set and of those that it wraps, by object and name."""
    own = getattr(dataset, "__dict__", {})
    settings = {
        (id(dataset), name): value
        for name, value in own.items()
        if isinstance(value, int | float | str | list | tuple | np.ndarray | Tensor)
        or callable(value)  # a transform
    }
    return settings | (_attributes(own["dataset"]) if "dataset" in own else {})


def _differ(one: Any, other: Any) -> bool:
    are_plain = all(map(_is_plain, (one, other)))
    return one is not other and not (are_plain and one == other)


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number, a text, or a short list of these."""
    if isinstance(value, list | tuple):
        return len(value) <= 100 and all(isinstance(item, int | float | str) for item in value)
    return isinstance(value, int | float | str)


class EpochDataset(DatasetWrapper):
    """`dataset` for workers that live for several epochs: each batch states its epoch."""

    dataset: SeededDataset

    def __getitems__(self, batch: tuple[int, list[int]]) -> list:
        self.dataset.epoch, indices = batch
        return self.dataset.__getitems__(indices)


class SeededBatchSampler(BatchSampler):
    """BatchSampler without an incomplete batch, whose `sampler` may draw random numbers.

    Those of torch, NumPy and `random` depend only on the seed and the epoch: all processes draw the
    same, a resumed run does, too, and the random numbers of the training are left as they are.
    """

    sampler: ResumableDistributedSampler

    def __init__(self, sampler: ResumableDistributedSampler, batch_size: int, seed: int) -> None:
        super().__init__(sampler, batch_size, drop_last=True)
        self.seed = seed

    def __iter__(self) -> Iterator[list[int]]:
        with rng_preserved():
            seed_cpu(mix_seeds(self.seed, self.sampler.epoch))
            return iter([*super().__iter__()])


class EpochBatches:
    """Epoch and indices of each batch from the position of the sampler to the epoch `end`."""

    def __init__(self, batches: SeededBatchSampler, epochs: int) -> None:
        self.batches = batches
        self.end = epochs
        self._made: dict[int, list[list[int]]] = {}  # batches by epoch

    def are_outdated(self) -> bool:
        """Return whether the sampler was changed after the batches of its epoch were made."""
        current = self.batches.sampler.epoch
        made = self._made.get(current)
        self._made = {epoch: one for epoch, one in self._made.items() if epoch > current}
        if made is None:
            return False
        now = [*self.batches]
        # A sampler whose own generator goes on can't be compared.
        return made != now and now == [*self.batches]

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        self._made = {}
        start_sample = self.batches.sampler.start_sample
        for epoch in range(self.batches.sampler.epoch, self.end):
            batch_sampler = copy(self.batches)
            batch_sampler.sampler = sampler = copy(batch_sampler.sampler)  # still in its own epoch
            sampler.set_epoch(epoch, start_sample)
            batches = [*batch_sampler]
            if len(batches) != len(batch_sampler):  # the next epoch would be shifted
                raise UserError(
                    f"{type(sampler).__name__} yields {len(batch_sampler)} batches by "
                    f"its __len__, but {len(batches)} from start_sample {start_sample} of epoch "
                    f"{epoch + 1}: they must agree"
                )
            self._made[epoch] = batches
            for indices in batches:
                yield epoch, indices
            start_sample = 0


def read_batch(dataset: SeededDataset, indices: Sequence[int], workers: int) -> list[Tensor]:
    """Return the samples at `indices` as one batch, on the CPU.

    If there are to be `workers`, a process of its own reads it. In this one, a file that the data
    set opens at its first sample would be shared, with the position in it, by all workers that are
    forked later, or could not be pickled for others.
    """
    if not workers:
        return select_batch(dataset, indices)
    (batch,) = DataLoader(
        dataset,
        batch_sampler=[[*indices]],
        num_workers=1,
        collate_fn=partial(collate, collate_fn=dataset.collate_fn),
        worker_init_fn=prepare_worker,
        generator=torch.Generator(),
    )
    return batch


def build_loader(
    dataset: SeededDataset | EpochDataset, *, workers: int, device: torch.device, **options: Any
) -> DataLoader:
    """Return a loader of `dataset` that does not draw from the training's random numbers.

    Its workers are kept for further iterations. Its images are decoded by them, or on `device` if
    ``dataset.decode`` is "gpu".

    Args:
        options: of DataLoader, such as `sampler` and `batch_size`. They replace the defaults, but
            `worker_init_fn` is called after the loader's own.

    Raises UserError if images are to be decoded on a device that cannot; or for `collate_fn`, which
    is a method of the data set.
    """
    if "collate_fn" in options:
        raise UserError(
            "collate_fn makes the batches of tests and pictures, too: make it a method of the data "
            "set, in place of an option of its loader"
        )
    defaults: dict[str, Any] = {
        "num_workers": workers,
        "persistent_workers": workers > 0,
        "pin_memory": device.type == "cuda",
        "generator": torch.Generator(),  # the default would draw the workers' seeds from torch's
    }
    options = defaults | options
    options["worker_init_fn"] = partial(prepare_worker, init=options.get("worker_init_fn"))
    atexit.unregister(_end_workers)  # so that it is registered once
    atexit.register(_end_workers)
    if dataset.decode == "gpu":
        if dataset.collate_fn is not default_collate:
            raise UserError("--decode gpu: the data set has a collate_fn; add --decode cpu")
        gpu_decoding.require_gpu_decoder(device)
        return gpu_decoding.DecodingLoader(device, dataset, **options)
    collate_fn = partial(collate, collate_fn=dataset.collate_fn)
    loader = DataLoader if isinstance(dataset, EpochDataset) else NonEmptyLoader
    return loader(dataset, collate_fn=collate_fn, **options)


class NonEmptyLoader(DataLoader):
    """DataLoader without the batches of which no sample is left."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's is narrower
        return (batch for batch in super().__iter__() if batch is not None)


def prepare_worker(worker: int, init: Callable[[int], None] | None = None) -> None:
    """Leave signals and errors to the training process, which a loader's worker belongs to.

    Args:
        init: called with the number of the worker, as DataLoader's `worker_init_fn`.
    """
    ignore_stop_signals()
    end_with_parent()
    parent = multiprocessing.parent_process()
    if parent and os.getppid() != parent.pid:
        if multiprocessing.get_start_method() == "fork":
            os._exit(1)  # it has ended before
        # The parent of this process is a fork server, the default from Python 3.14 on.
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    sys.excepthook = _report_unless_disconnected
    if init:
        init(worker)


def _end_with(process: multiprocessing.process.BaseProcess) -> None:
    process.join()
    os._exit(1)


def _end_workers() -> None:
    """End the workers of loaders that are still referenced when the interpreter exits.

    multiprocessing would send them SIGTERM, which they ignore, and wait for them without a limit.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise an error
    children = [child for child in multiprocessing.active_children() if child.daemon]
    for child in children:  # others than loaders' workers may handle it
        child.terminate()
    deadline = time.monotonic() + 1
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        child.kill()


def _report_unless_disconnected(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Report an error of the thread that hands over tensors, unless the training has ended.

    The training process may exit while it receives one.
    """
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)
