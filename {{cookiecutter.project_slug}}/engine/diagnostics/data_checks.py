"""Preflight checks of the data: its size, random samples, and the shared memory for batches."""

import contextlib
import io
import os
import random
import re
import resource
import shutil
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils.data import ConcatDataset, DataLoader

from apex_native.amp.casting import nested_tensors
from engine import UserError
from engine.data import DatasetWrapper, select_batch
from engine.data.loading import prepare_worker
from engine.diagnostics.first_step import describe_large_batch
from engine.diagnostics.preflight import ERROR, GIB, MIB, OK, WARNING, Results, num_processes

SHARED_MEMORY = Path("/dev/shm")
SECONDS = 4.0  # for reading samples
MAX_SAMPLES = 10_000
CHUNK = 4  # samples that a worker reads at a time


@dataclass(frozen=True)
class Sample:
    """Measurements of one sample."""

    shapes: str  # with types
    size: int  # bytes of its tensors
    error: str  # if it can't be read
    peak: int  # bytes of the largest memory that the process has had


class SampleProbe(DatasetWrapper):
    """Measurements of the samples of `dataset`, as a loader's worker reads them."""

    def __getitem__(self, index: int) -> Sample:
        shapes, size, message = "", 0, ""
        try:
            tensors = list(nested_tensors(select_batch(self.dataset, [index])))
        except UserError as error:
            message = str(error)
        else:
            size = sum(tensor.nbytes for tensor in tensors)
            shapes = ", ".join(
                f"{str(tensor.dtype)[6:]} {' × '.join(map(str, tensor.shape[1:]))}"
                for tensor in tensors
                if tensor.dim() > 1
            )
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return Sample(shapes, size, message, peak)


@dataclass
class Measured:
    """Measurements of random samples of the training and the validation set."""

    samples: list[Sample] = field(default_factory=list)
    per_second: float = 0.0  # 0 if there are too few to measure it

    @property
    def largest(self) -> int:
        """Return the bytes of the largest sample."""
        return max((sample.size for sample in self.samples), default=0)


def measure(settings: Namespace, datasets: Callable[[], tuple]) -> Measured:
    """Read random samples of both sets with the given number of workers for SECONDS."""
    measured = Measured()
    if settings.dummy:
        return measured
    both: ConcatDataset[Sample] = ConcatDataset(map(SampleProbe, datasets()))
    chosen = random.SystemRandom().sample(range(len(both)), min(len(both), MAX_SAMPLES))
    loader = DataLoader(
        both,
        batch_size=CHUNK,
        sampler=chosen,
        num_workers=settings.workers,
        collate_fn=list,
        worker_init_fn=prepare_worker,
    )
    chunks = iter(loader)
    measured.samples += next(chunks)  # includes the start of the workers
    start = time.perf_counter()
    for chunk in chunks:
        measured.samples += chunk
        elapsed = time.perf_counter() - start
        measured.per_second = (len(measured.samples) - CHUNK) / elapsed
        if elapsed > SECONDS:
            break
    return measured


def check_data(settings: Namespace, datasets: Callable[[], tuple]) -> Results:
    """Count the samples and the classes."""
    if settings.dummy:
        yield OK, "synthetic"
        return
    consequence = "the start of each run will be slow; samples and /dev/shm were not checked"
    yield WARNING, f"{settings.data} was not counted in time (a slow disk?): {consequence}"
    with contextlib.redirect_stderr(io.StringIO()) as reports:
        train_set, val_set = datasets()
    name = settings.data or "the project's own data set"
    text = f"{name}: {len(train_set)} training samples, {len(val_set)} validation samples"
    if hasattr(train_set, "classes"):
        text += f", {len(train_set.classes)} classes"
    count = len(train_set) // num_processes()
    warnings = re.findall("^warning: (.*)", reports.getvalue(), re.MULTILINE)
    if not len(train_set) or not len(val_set):
        yield ERROR, f"{text}: both sets need samples"
    elif count < settings.batch_size and not settings.eval_only:
        yield ERROR, f"{text}: {describe_large_batch(settings.batch_size, count)}"
    elif warnings:
        yield WARNING, f"{text}; {'; '.join(warnings)}"
    else:
        yield OK, text


def check_samples(settings: Namespace, measured: Callable[[], Measured]) -> Results:
    """Read random samples: their shapes, memory and rate, and files that are damaged."""
    if settings.dummy:
        return
    yield WARNING, "no sample was read in time: training will wait for the disk"
    result = measured()
    count = len(result.samples)
    if errors := [sample.error for sample in result.samples if sample.error]:
        fix = f"python -m engine.data.verify {settings.data} finds all, --skip-broken N skips them"
        is_accepted = len(errors) <= settings.skip_broken
        problem = f"{len(errors)} of {count} random samples can't be read: {errors[0]}; {fix}"
        yield WARNING if is_accepted else ERROR, problem
        return
    text = f"{count} random samples of {result.samples[0].shapes}"
    if result.per_second:
        text += f", {result.per_second:.0f} per second in each process"
    batch = settings.batch_size * result.largest / MIB
    peak = max(sample.peak for sample in result.samples) / MIB
    yield OK, f"{text}; a batch takes {batch:.1f} MiB, a loading process up to {peak:.0f} MiB"


def check_shared_memory(settings: Namespace, measured: Callable[[], Measured]) -> Results:
    """Check that /dev/shm, through which workers pass batches to the training, is large enough."""
    if not SHARED_MEMORY.exists():
        return
    free = shutil.disk_usage(SHARED_MEMORY).free
    # For training and for validation: two ahead for each worker (prefetch_factor), and one in use.
    batches = int(os.environ["LOCAL_WORLD_SIZE"]) * 2 * (2 * settings.workers + 1)
    needed = batches * settings.batch_size * measured().largest if settings.workers else 0
    text = f"{SHARED_MEMORY} has {free / MIB:.0f} MiB free, batches take up to {needed / MIB:.0f}"
    fix = "start the container with --ipc=host, or --shm-size=16g"
    if free < needed:
        yield ERROR, f"{text}: {fix}, or train with fewer --workers"
    elif free < GIB and torch.cuda.device_count() > 1:
        yield WARNING, f"{text}, and NCCL needs some: {fix}"
    else:
        yield OK, text
