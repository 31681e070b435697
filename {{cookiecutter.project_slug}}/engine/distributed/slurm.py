"""Requests to SLURM."""

import os
import subprocess
from collections.abc import Callable


def requeue(info: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Ask SLURM, if it started this job, to start it again; log that by `info` or `warn`."""
    job = os.environ.get("SLURM_JOB_ID")
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:  # the plain id of an array's last job would mean all
        job = f"{array}_{task}"
    if not job:
        return
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, timeout=20)
        info(f"SLURM starts job {job} again")
    except (OSError, subprocess.SubprocessError) as error:
        warn(f"scontrol requeue {job} failed ({error})")
