"""Preflight checks of main.py's settings: Apex, CPU cores, output and checkpoint."""

import os
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NoReturn

import torch

from engine import OUTPUT_FIX, UserError, backend, distributed, is_directly_in, module_command
from engine.checkpoint import format as checkpoint
from engine.checkpoint.selection import AUTO, find
from engine.diagnostics import data_checks, preflight
from engine.diagnostics.preflight import ERROR, GIB, OK, WARNING, Results
from engine.monitoring.logger import has_checkpoints

CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # of a container, in which all cores are visible


def check_settings(
    settings: Namespace,
    needs: dict[str, bool],
    build_datasets: Callable[[], tuple],
    memory: Callable[[], Results],
) -> NoReturn:
    """Check the settings of main.py and its training and validation set, and exit.

    Args:
        needs: further arguments of `backend.load_backend`.
        build_datasets: returns the training and the validation set; it is called once.
        memory: the check of the model's memory; see `engine.diagnostics.memory`.
    """
    if preflight.RESULTS not in os.environ:
        _exec_preflight()
    datasets = cache(build_datasets)
    checks: dict[str, Callable[[Namespace], Results]] = {
        "flags": check_flags,
        "Apex": partial(check_apex, needs),
        "CPU": check_cpu,
        "output": check_output,
        "resume": check_resume,
    }
    preflight.run_checks({name: partial(check, settings) for name, check in checks.items()})
    if preflight.run_checks({"data": partial(data_checks.check_data, settings, datasets)}):
        measured = cache(partial(data_checks.measure, settings, datasets))
        samples = partial(data_checks.check_samples, settings, measured)
        shared_memory = partial(data_checks.check_shared_memory, settings, measured)
        preflight.run_checks({"samples": samples, "shared memory": shared_memory})
    preflight.run_checks({"memory": memory})
    sys.exit()


def _exec_preflight() -> NoReturn:
    """Replace this process, of ``python main.py`` or torchrun, with the preflight of run.sh."""
    if not distributed.is_local_leader():
        sys.exit()  # rank 0 checks for all
    num_ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    project = Path(__file__).parent.parent.parent
    environment = os.environ | {"PYTHONPATH": str(project)}
    command = module_command("engine.diagnostics.preflight")
    command += [f"--nproc-per-node={num_ranks}", *sys.argv]
    os.execve(sys.executable, command, environment)


def check_flags(settings: Namespace) -> Results:
    """Show the given flags."""
    given = [flag for flag in sys.argv[1:] if flag not in ("--check", "--json")]
    text = " ".join(given) or "the defaults"
    if settings.batch_size == 1:
        fix = "use a batch size of at least 2"
        yield WARNING, f"{text}: batch norm can't train on a single value per channel; {fix}"
    else:
        yield OK, text


def check_apex(needs: dict[str, bool], settings: Namespace) -> Results:
    """Show which package implements Apex's calls, why, and which parts of real Apex exist."""
    problem = backend.problem_with_apex(settings.opt_level, **needs)
    reason = backend.load_backend(settings.backend, settings.opt_level, **needs).reason
    parts = backend.parts_of_apex()
    present = [part for part in parts if parts[part]]
    missing = [part for part in parts if not parts[part]]
    if present:
        reason += f"; Apex here has {', '.join(present)}"
        reason += f", but no {', '.join(missing)}" if missing else ""
    if problem and problem.remedy:
        yield WARNING, f"{reason}: {problem.remedy}"
    elif problem is None and missing:
        yield WARNING, f"{reason}: {backend.BUILD} for its full speed"
    else:
        yield OK, reason


def check_cpu(settings: Namespace) -> Results:
    """Compare the CPU cores with the threads and the data loader's workers."""
    num_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    workers = settings.workers
    cores = distributed.cpu_cores()
    threads = torch.get_num_threads()
    text = f"{num_ranks} × (cores {cores}, threads {threads}, --workers {workers})"
    limit, period = CPU_LIMIT.read_text().split() if CPU_LIMIT.exists() else ("max", "1")
    allowed = float(limit.replace("max", "inf")) / int(period)
    if allowed < cores * num_ranks:
        fix = "raise its limit, or reduce OMP_NUM_THREADS and --workers"
        yield WARNING, f"{text}; but this container may use only {allowed:g} cores in all: {fix}"
    elif threads > cores or (threads == 1 and cores >= 4):
        yield WARNING, f"{text}: unset OMP_NUM_THREADS, so that run.sh divides the cores by ranks"
    elif workers > cores:
        yield WARNING, f"{text}: use at most --workers {cores}, the number of cores"
    else:
        yield OK, text


def check_output(settings: Namespace) -> Results:
    """Check that --output can be written, holds no other run, and has space for checkpoints."""
    output = settings.output
    folder = output.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        raise UserError(f"{output} can't be written ({error.strerror}): {OUTPUT_FIX}") from None
    text = f"{output} can be written, {free / GIB:.1f} GiB free"
    if free < GIB:
        yield ERROR, f"{text}, too little for checkpoints: free space, or choose another --output"
    elif settings.resume is None and has_checkpoints(output):
        yield WARNING, f"{text}, but holds a run: add --resume auto, or choose another --output"
    elif free < 10 * GIB:
        yield WARNING, f"{text}, little for checkpoints of a large model"
    else:
        yield OK, text


def check_resume(settings: Namespace) -> Results:
    """Check that there is a complete checkpoint to resume from."""
    path = settings.resume
    if path is None:
        return
    yield WARNING, f"{path} was not read in time (a slow disk or a large file?)"
    warnings: list[str] = []
    if path == AUTO:
        source = find(settings.output, AUTO, warnings.append)
        path = source.path if source else None
    if path is None:
        yield OK, f"{settings.output} has no checkpoint: the run starts from the beginning"
        return
    state = checkpoint.load_state(path)
    if not settings.eval_only:
        checkpoint.require_own_format(path, state, is_directly_in(path, settings.output))
    if warnings:
        yield WARNING, f"{path} is used: {'; '.join(warnings)}"
    else:
        steps = "" if state["step"] is None else f", {state['step']} steps"
        yield OK, f"{path}, after {state['epoch']} epochs{steps}"
