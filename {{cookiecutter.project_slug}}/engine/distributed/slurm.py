"""Requests to SLURM."""

import os
import subprocess
from collections.abc import Callable


def requeue(info: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Ask SLURM, if it started this job, to start it again; log that by `info` or `warn`."""
    job = os.environ.get("SLURM_JOB_ID")
    if "SLURM_ARRAY_JOB_ID" in os.environ:  # the plain id of an array's last job would mean all
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if not job:
        return
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, timeout=20)
        info(f"SLURM starts job {job} again")
    except (OSError, subprocess.SubprocessError) as error:
        warn(f"scontrol requeue {job} failed ({error})")
