"""Loss and throughput of training, measured without making the CPU wait for the GPU."""

import math
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from apex_native.amp.casting import nested_tensors
from engine import UserError
from engine.distributed import all_gather
from engine.monitoring.metric import AVERAGE, COLUMNS
from engine.text import printable

Timestamp = Any  # a torch.cuda.Event on a GPU, otherwise seconds
Sums = dict[str, tuple[float, int]]  # sum and number of the values of a name
LOSS = "train_loss"


class NanCounter:
    """Number of validation batches for which a model's outputs hold nan, of all processes.

    A metric may not show it: the class of the largest of some logits is a class, also of nan.
    """

    def __init__(self, device: torch.device) -> None:
        self.count = torch.zeros((), device=device, dtype=torch.long)

    def update(self, outputs: Any) -> None:
        """Count a batch if a tensor in its outputs holds nan. Does not wait for the device."""
        flags = [one.isnan().any().to(self.count.device) for one in nested_tensors(outputs)]
        if flags:
            self.count += torch.stack(flags).any()

    def compute(self) -> int:
        """Return the number; all processes call it together."""
        if dist.is_initialized():
            dist.all_reduce(self.count)
        return int(self.count)


class LogRecord(NamedTuple):
    """Numbers of a run at one of its logging steps."""

    step: int
    lr: float
    train_loss: float  # mean on this rank since the previous record
    nonfinite_losses: float  # consecutive losses, up to this one, that are not finite
    loss_scale: float
    images_per_second: float  # of all ranks
    means: Mapping[str, float]  # of values that the loop logs (`Meter.log`)


class Meter:
    """Means of the loss and of other values, and throughput, since its creation.

    Values are summed, and the time is taken, on the device. The CPU queues work several steps
    ahead of a GPU; if it waited for a number, the GPU would run out of work.

    Args:
        device: of the losses.
        images_per_batch: of all ranks.
        warm_up: number of first batches, which choose and compile kernels, to time separately.
        on_record: called with each record once its numbers have arrived.
        reserved: names that other columns of metrics.csv have.
    """

    def __init__(
        self,
        device: torch.device,
        images_per_batch: int,
        warm_up: int = 0,
        on_record: Callable[[LogRecord], None] = lambda record: None,
        reserved: Collection[str] = COLUMNS,
    ) -> None:
        self.images_per_batch = images_per_batch
        self.warm_up = warm_up
        self.on_record = on_record
        self.reserved = frozenset(reserved)
        # [0]: of the epoch, [1]: since the latest record, which a difference of totals would round.
        self.sums = {LOSS: torch.zeros(2, device=device)}
        self.counts = {LOSS: 0}  # more than the batches if a stopped run had begun the epoch
        self.nonfinite_losses = torch.zeros((), device=device)  # consecutive ones, across epochs
        self.num_batches = 0
        self.latest: LogRecord | None = None
        self._pending: Callable[[], LogRecord] | None = None  # waits for its numbers
        self._recorded: dict[str, int] = {}  # counts at the latest record
        self._start = self._now()
        self._warm_up_end = self._start

    def update(self, loss: Tensor) -> None:
        """Count a batch with the given loss. Does not wait for the device."""
        loss = loss.detach().reshape(())
        self._add(LOSS, loss, 1)
        self.nonfinite_losses = (self.nonfinite_losses + 1) * ~loss.isfinite()
        self.num_batches += 1
        if self.num_batches == self.warm_up:
            self._warm_up_end = self._now()

    def log(self, **values: Tensor | float) -> None:
        """Add values, by name, to the means of the epoch. Does not wait for the device.

        metrics.csv, curves.png and TensorBoard show the means under these names. All ranks call it
        together if a value is a DTensor; with --cpu-offload, they wait for one another.

        Raises UserError if a name is that of another column, or a value is not a number.
        """
        for name, value in values.items():
            if name in self.reserved or name.endswith(AVERAGE) or not name.isprintable():
                raise UserError(
                    f"meter.log({printable(name)}=...): it is a column of metrics.csv, ends in "
                    f"{AVERAGE} or has characters that can't be printed; use another name"
                )
            if hasattr(value, "full_tensor"):  # a DTensor of FSDP, such as a norm of its parameters
                value = value.full_tensor()
            try:
                number = torch.as_tensor(value).detach().reshape(())
            except (TypeError, ValueError, RuntimeError):
                raise UserError(
                    f"meter.log({name}=...): it is a {type(value).__name__} and not a number: give "
                    "each number a name of its own"
                ) from None
            self._add(name, number, 1)

    def _add(self, name: str, total: Tensor | float, count: int) -> None:
        if name not in self.sums:
            self.sums[name] = torch.zeros(2, device=self.nonfinite_losses.device)
            self.counts[name] = 0
        self.sums[name] += total
        self.counts[name] += count

    def state_dict(self) -> Sums:
        """Return the sums for a checkpoint. Waits for the device."""
        self.read()
        return {name: (sums[0].item(), self.counts[name]) for name, sums in self.sums.items()}

    def load_state_dicts(self, states: list[Sums]) -> None:
        """Continue from the states of this rank, or of several ranks."""
        for name, (total, count) in chain.from_iterable(state.items() for state in states):
            self._add(name, total, count)
        self._since_record()

    @property
    def is_asynchronous(self) -> bool:
        """True if the device works behind the CPU, so that reading a number would stall it."""
        return self.nonfinite_losses.is_cuda

    def record(self, step: int, lr: float, loss_scale: Tensor | float) -> LogRecord | None:
        """Start to copy the current numbers to the CPU; return the latest record that is complete.

        On a GPU that is the record of the previous call, on the CPU the one of this call.
        """
        self.read()
        scale = torch.zeros_like(self.nonfinite_losses) + loss_scale
        sums = [both[1] for both in self.sums.values()]
        numbers = torch.stack([self.nonfinite_losses, scale, *sums])
        copy = numbers.to("cpu", non_blocking=True)
        counts = self._since_record()
        interval = self._timed_interval()
        self._pending = partial(self._complete, step, lr, counts, copy, interval)
        return self.latest if self.is_asynchronous else self.read()

    def _since_record(self) -> dict[str, int]:
        """Return the numbers of values since the latest record, and sum up from zero again."""
        counts = {name: count - self._recorded.get(name, 0) for name, count in self.counts.items()}
        self._recorded = dict(self.counts)
        for sums in self.sums.values():
            sums[1].zero_()  # an assigned number would be copied, and the CPU wait for it
        return counts

    def read(self) -> LogRecord | None:
        """Complete the pending record, if any, and return the latest. Waits for its copy only."""
        if self._pending:
            self.latest = self._pending()
            self._pending = None
            self.on_record(self.latest)
        return self.latest

    def _complete(
        self, step: int, lr: float, counts: dict[str, int], numbers: Tensor, interval: tuple
    ) -> LogRecord:
        images_per_second = _throughput(*interval)  # from here on the copy is valid
        nonfinite_losses, loss_scale, *totals = numbers.tolist()
        pairs = zip(counts.items(), totals, strict=True)
        means = {name: total / count for (name, count), total in pairs if count}
        loss = means.pop(LOSS, math.nan)  # an owner's step may log others
        return LogRecord(step, lr, loss, nonfinite_losses, loss_scale, images_per_second, means)

    def results(self) -> dict[str, float]:
        """Return the means and the throughput of all ranks. Waits for the device.

        The mean of no values is nan: a checkpoint may be at the end of an epoch of smaller data.
        """
        states = all_gather(self.state_dict(), dist.group.WORLD)  # with values of other names, too
        names = dict.fromkeys(chain.from_iterable(states))
        results = {}
        for name in names:
            totals, counts = zip(*(state[name] for state in states if name in state), strict=True)
            total = torch.tensor(totals).sum().item()  # in fp32, as each sum
            results[name] = total / sum(counts) if any(counts) else math.nan
        results["images_per_second"] = _throughput(*self._timed_interval())
        return results

    def warm_up_seconds(self) -> float:
        """Return how long the warm-up took; 0 if the throughput includes it. Waits for it."""
        if self.warm_up and self.num_batches > self.warm_up:
            return _seconds(self._start, self._warm_up_end)
        return 0.0

    def _now(self) -> Timestamp:
        """Return the time at which the device finishes the work queued so far."""
        if not self.nonfinite_losses.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _timed_interval(self) -> tuple[int, Timestamp, Timestamp]:
        """Return the images, start and end of the batches after the warm-up, or within it."""
        if self.num_batches > self.warm_up:
            num_batches = self.num_batches - self.warm_up
            return num_batches * self.images_per_batch, self._warm_up_end, self._now()
        return self.num_batches * self.images_per_batch, self._start, self._now()


def _throughput(num_images: int, start: Timestamp, end: Timestamp) -> float:
    """Return the images per second of an interval. Waits until the device has reached its end."""
    return num_images / _seconds(start, end)


def _seconds(start: Timestamp, end: Timestamp) -> float:
    """Return the length of an interval. Waits until the device has reached its end."""
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000
