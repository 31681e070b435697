"""Runs that are stopped, killed, hung and starved, and what is left of them."""

import contextlib
import os
import random
import re
import shutil
import signal
import sys
import time

import pytest
import torch
from root import small_disk
from running import Run, assert_same_run, metrics, run, run_two

pytestmark = pytest.mark.xdist_group("faults")
# With dropout and batch norm; eleven steps in an epoch. Many CPUs are slow at its layers in half.
SMALL = ("--arch", "mobilenet_v3_small", "--batch-size", 64, "--epochs", 2, "--opt-level", "O0")
IN_TIME = 10.0  # seconds in which a job that failed has ended


@pytest.fixture(scope="module")
def project(bake):
    return bake()


@pytest.fixture(scope="module")
def whole(project, tmp_path_factory):
    """The folder of a run that nothing happened to."""
    output = tmp_path_factory.mktemp("whole")
    assert run_two(project, *SMALL, "--output", output).returncode == 0
    return output


STARTED = "loss_scale images"  # the head of the table


def started(project, output, *flags, **variables):
    """A small run on two CPU processes, in the background."""
    return Run(project, *SMALL, "--output", output, *flags, CUDA_VISIBLE_DEVICES="", **variables)


@pytest.mark.parametrize(
    ("name", "delay"),
    [
        pytest.param("SIGTERM", 1.0, marks=pytest.mark.slow),
        pytest.param("SIGINT", 1.8, marks=pytest.mark.weekly),
        pytest.param("SIGHUP", 0.6, marks=pytest.mark.weekly),
        pytest.param("SIGUSR1", 0.3, marks=pytest.mark.weekly),
    ],
)
def test_resume_after_a_signal_is_bit_identical(project, whole, tmp_path, name, delay):
    output = tmp_path / "run"
    number = signal.Signals[name]
    with started(project, output, "--workers", 1) as stopped:
        stopped.wait_for(STARTED)
        time.sleep(delay)
        os.kill(stopped.process.pid, number)
        status, seconds = stopped.end()
    assert status == 128 + number, stopped.said
    assert seconds < 10
    assert "death signal" not in stopped.said
    assert "Traceback" not in stopped.said
    assert re.search(r"stopped after step \d+", stopped.said)
    done = run_two(project, *SMALL, "--output", output, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert_same_run(output, whole)


@pytest.mark.weekly
def test_second_ctrl_c_exits_at_once(project, breaking, tmp_path):
    breaking("print('now', flush=True); time.sleep(600)")  # so that the processes can't agree
    with started(project, tmp_path / "run", "--epochs", 50) as stopped:
        stopped.wait_for("now")
        time.sleep(1)
        ranks = stopped.ranks()
        os.kill(ranks[0], signal.SIGINT)
        time.sleep(1.5)
        os.kill(ranks[0], signal.SIGINT)
        status, seconds = stopped.end()
    assert status == 128 + signal.SIGINT, stopped.said
    assert seconds < IN_TIME


SAVES_FOR_LONG = """\
import signal, sys, time
from pathlib import Path

def save(number, _):
    time.sleep(32)  # the launcher waits for 30 by default
    Path(sys.argv[2], "saved").touch()
    sys.exit(128 + number)

signal.signal(signal.SIGTERM, save)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
print("started", flush=True)
time.sleep(600)
"""


@pytest.mark.weekly
def test_launcher_waits_for_a_slow_save(project, tmp_path):
    folder = tmp_path / "project"
    shutil.copytree(project / "engine", folder / "engine")
    shutil.copy(project / "run.sh", folder)
    (folder / "main.py").write_text(SAVES_FOR_LONG)
    (tmp_path / "run").mkdir()
    with Run(folder, "--output", tmp_path / "run", NPROC="1", STOP_WAIT="60") as stopped:
        stopped.wait_for("started")
        os.kill(stopped.process.pid, signal.SIGTERM)
        status, _ = stopped.end()
    assert (status, (tmp_path / "run" / "saved").exists()) == (128 + signal.SIGTERM, True)


@pytest.mark.weekly
def test_slurm_job_is_requeued_after_sigusr1(project, tmp_path):
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    (tmp_path / "scontrol").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    with started(project, tmp_path / "run", SLURM_JOB_ID="123", PATH=path) as stopped:
        stopped.wait_until(lambda: len(stopped.ranks()) == 2)  # which import torch
        # As SLURM does it: the processes get the signal and the launcher too, which passes it on.
        for process in (*stopped.ranks().values(), stopped.process.pid):
            os.kill(process, signal.SIGUSR1)
        assert stopped.end()[0] == 128 + signal.SIGUSR1, stopped.said
    assert (tmp_path / "asked").read_text() == "requeue 123\n"
    flags = (*SMALL, "--output", tmp_path / "run", "--steps", 12)
    done = run(project, *flags, nproc=0, SLURM_RESTART_COUNT="1")
    assert done.returncode == 0, done.stderr
    assert f"resumed {tmp_path}/run/last.pt" in done.stdout


@pytest.mark.weekly
def test_restart_after_a_killed_rank_is_bit_identical(project, whole, tmp_path):
    flags = ("--save-every", 4)
    with started(project, tmp_path / "run", *flags, MAX_RESTARTS="2") as killed:
        for rank, step in ((1, 4), (0, 16)):
            killed.wait_until((tmp_path / "run" / f"step-{step}.pt").exists)
            os.kill(killed.ranks()[rank], signal.SIGKILL)
        status, _ = killed.end(120)
    assert status == 0, killed.said
    assert killed.said.count("resumed") == 2
    for number in (1, 2):
        assert f"; {number} of MAX_RESTARTS=2 are used" in killed.said
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.slow
def test_restart_before_the_folder_is_opened_leaves_an_older_run_alone(project, whole):
    with started(project, whole, MAX_RESTARTS="1") as killed:
        killed.wait_until(lambda: len(killed.ranks()) == 2)  # which import torch
        os.kill(killed.ranks()[1], signal.SIGKILL)
        status, _ = killed.end()
    assert status == 2, killed.said
    assert "1 of MAX_RESTARTS=1 are used" in killed.said
    assert f"error: {whole} already holds a run: " in killed.said


BREAK = """
import os, sys, time, runpy
import torch
from engine import checkpoint
end_step = checkpoint.CheckpointManager.end_step
def end_step_and_break(self):
    stop_signal = end_step(self)
    if self.state.progress.step == 3 and os.environ["RANK"] == "1":
        {what}
    return stop_signal
checkpoint.CheckpointManager.end_step = end_step_and_break
runpy.run_path("{main}", run_name="__main__")
"""


@pytest.fixture
def breaking(project):
    """Makes main.py do something on rank 1, after the third step."""
    main = project / "main.py"
    kept = main.with_name("kept.py")
    main.rename(kept)
    yield lambda what: main.write_text(BREAK.format(what=what, main=kept))
    kept.rename(main)


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", ["ValueError", pytest.param("RuntimeError", marks=pytest.mark.weekly)]
)
def test_first_exception_is_reported_first(project, breaking, tmp_path, error):
    breaking(f"print('now', flush=True); raise {error}('the cause')")
    with started(project, tmp_path / "run", "--epochs", 50) as failed:
        failed.wait_for("now")
        status, seconds = failed.end()
        assert not failed.ranks()
    assert (status, seconds < IN_TIME) == (1, True), failed.said
    errors = re.findall(r"^\w*Error: .*", failed.said, re.MULTILINE)
    assert errors[0] == f"{error}: the cause", failed.said


@pytest.mark.slow
def test_run_stopped_at_the_last_of_its_steps_is_validated(project, breaking, tmp_path):
    breaking("import signal; os.kill(os.getpid(), signal.SIGTERM)")
    flags = ("--steps", 5, "--resume", "auto")
    with started(project, tmp_path / "run", *flags) as stopped:
        assert stopped.end()[0] == 128 + signal.SIGTERM, stopped.said
        assert "stopped after step 5" in stopped.said
    done = run_two(project, *SMALL, *flags, "--output", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    (row,) = metrics(tmp_path / "run")
    assert row["step"] == 5 and row["val_accuracy"] > 0


@pytest.mark.slow
def test_hang_is_reported_with_step_and_stack(project, breaking, tmp_path):
    breaking("time.sleep(600)")
    with started(project, tmp_path / "run", "--timeout", 6) as hung:
        hung.wait_for(STARTED)
        status, seconds = hung.end()
        assert not hung.ranks()
    assert (status, seconds < 6 + IN_TIME) == (1, True), hung.said
    found = re.search(r"error: rank 1 has been in step \d+ for (\d+) s, more than --t", hung.said)
    assert found and int(found[1]) >= 6, hung.said
    assert "time.sleep(600)" in hung.said


LOADS_FOR_LONG = """
import os, time, runpy
from engine.data import SeededDataset
take = SeededDataset.__getitems__
def get(self, indices):
    if os.environ["RANK"] == "1" and len(indices) > 2 and (len(self) > 1000) == {trains}:
        time.sleep(600)
    return take(self, indices)
SeededDataset.__getitems__ = get
runpy.run_path("{main}", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("trains", "where"),
    [(True, "epoch 1/2, batch 1"), (False, "validating, batch 1")],
)
@pytest.mark.weekly
def test_hanging_data_loader_is_reported(project, breaking, tmp_path, trains, where):
    main = project / "main.py"
    main.write_text(LOADS_FOR_LONG.format(trains=trains, main=project / "kept.py"))
    with started(project, tmp_path / "run", "--timeout", 6) as hung:
        hung.wait_for(STARTED)
        status, _ = hung.end()
        assert not hung.ranks()
    assert status == 1, hung.said
    assert f"error: rank 1 has been in {where} for " in hung.said
    assert "time.sleep(600)" in hung.said


@pytest.mark.weekly
def test_hanging_data_loader_of_eval_only_is_reported(project, breaking, whole, tmp_path):
    main = project / "main.py"
    main.write_text(LOADS_FOR_LONG.format(trains=False, main=project / "kept.py"))
    flags = ("--timeout", 6, "--eval-only", "--resume", whole / "last.pt")
    with started(project, tmp_path / "run", *flags) as hung:
        status, _ = hung.end()
    assert status == 1, hung.said
    assert "error: rank 1 has been in validating, batch 1 for " in hung.said


HANGS = """
import time, runpy, task
from engine.checkpoint import CheckpointManager
{function} = lambda *_, **__: time.sleep(600)
runpy.run_path("{main}", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "phase"),
    [
        ("task.check_arguments", "reading the flags"),
        ("task.build_datasets", "reading the data"),
        ("task.build_model", "building the model"),
        ("CheckpointManager.resume", "reading the checkpoint"),
        ("task.Metrics.compute", "computing the metrics"),
    ],
)
def test_hang_at_the_start_is_reported(project, breaking, tmp_path, function, phase):
    (project / "main.py").write_text(HANGS.format(function=function, main=project / "kept.py"))
    flags = ("--output", tmp_path / "run", "--timeout", 3)
    done = run(project, *SMALL, *flags, nproc=0, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    message = f"rank 0 has been in {phase} for [34] s, more than --timeout"
    assert re.search(message, done.stderr), done.stderr
    assert "time.sleep(600)" in done.stderr


OPENS_LATE = """
import os, time, runpy
from engine.monitoring.logger import Logger
open_at_once = Logger.open
def open_late(*arguments):
    print("opens", flush=True)
    time.sleep(3 if os.environ["RANK"] == "0" else 0)
    open_at_once(*arguments)
Logger.open = open_late
runpy.run_path("{main}", run_name="__main__")
"""


@pytest.mark.slow
def test_signal_while_rank_0_opens_its_files_is_no_failure(project, breaking, tmp_path):
    (project / "main.py").write_text(OPENS_LATE.format(main=project / "kept.py"))
    with started(project, tmp_path / "run") as stopped:
        stopped.wait_for("(?s)opens.*opens")
        os.kill(stopped.process.pid, signal.SIGTERM)
        status, _ = stopped.end()
    assert status == 128 + signal.SIGTERM
    assert "error: " not in stopped.said
    assert "stopped after step" in stopped.said


@pytest.mark.weekly
def test_exception_after_a_signal_is_reported(project, breaking, tmp_path):
    breaking("print('now', flush=True); time.sleep(3); raise RuntimeError('the cause')")
    with started(project, tmp_path / "run", "--epochs", 50) as failed:
        failed.wait_for("now")
        os.kill(failed.ranks()[1], signal.SIGTERM)
        failed.end()
    assert "RuntimeError: the cause" in failed.said


# What imports torch looks for its launcher when it has.
@pytest.mark.parametrize(
    ("moment", "seconds"),
    [
        pytest.param("importing torch", 3 * IN_TIME, marks=pytest.mark.weekly),
        pytest.param("training", IN_TIME, marks=pytest.mark.slow),
    ],
)
def test_processes_exit_when_the_launcher_dies(project, tmp_path, moment, seconds):
    with started(project, tmp_path / "run", "--epochs", 50) as orphaned:
        if moment == "training":
            orphaned.wait_for(STARTED)
        orphaned.wait_until(lambda: len(orphaned.ranks()) == 2)
        os.kill(orphaned.process.pid, signal.SIGKILL)
        orphaned.wait_until(lambda: not orphaned.ranks(), seconds)


@pytest.mark.weekly
def test_interpreter_may_be_a_wrapper_script(project, tmp_path):
    script = tmp_path / "python.sh"
    script.write_text(f'#!/bin/sh\nsetsid -w {sys.executable} "$@"\nexit $?\n')
    script.chmod(0o755)
    flags = (*SMALL, "--output", tmp_path / "run", "--steps", 2)
    done = run(project, *flags, NPROC="1", CUDA_VISIBLE_DEVICES="", PYTHON_EXEC=str(script))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "last.pt").exists()


@pytest.mark.slow
def test_usage_error_is_not_restarted(project, tmp_path):
    done = run(project, "--arch", "resnet81", "--output", tmp_path / "run", MAX_RESTARTS="3")
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save_every", "status", "saved", "error"),
    [
        (
            11,
            1,
            [],
            r"losses in a row, up to step \d+, are not finite. The first layer that is not finite "
            r"is features.0",
        ),
        (
            3,
            2,
            [3],
            r"step-9.pt could not be written \(model.features.0.0.weight is not finite\), probably "
            r".* resume from \S*step-3.pt, the last good checkpoint$",
        ),
    ],
    ids=["losses", "checkpoints"],
)
def test_nan_weights_stop_the_run_and_keep_the_last_checkpoint(
    project, breaking, tmp_path, save_every, status, saved, error
):
    breaking("next(self.state.model.parameters()).data.fill_(float('nan'))")
    flags = (*SMALL, "--output", tmp_path / "run", "--save-every", save_every)
    done = run_two(project, *flags)
    assert done.returncode == status
    assert re.search(error, done.stderr, re.MULTILINE)
    assert done.stdout.count("could not be written") == 1
    last = (tmp_path / "run").glob("last.pt")
    assert [torch.load(path, weights_only=True)["step"] for path in last] == saved


@pytest.mark.slow
@pytest.mark.parametrize("size", ["60m", "20m"])
def test_full_disk_does_not_stop_training(project, tmp_path, size):
    """The oldest checkpoints make room; a disk for one has no room for the next."""
    disk = tmp_path / "disk"
    with small_disk(disk, size):
        flags = (*SMALL, "--output", disk / "run", "--save-every", 2)
        done = run_two(project, *flags, "--keep", 9, "--steps", 10)
        last = torch.load(disk / "run" / "last.pt", weights_only=True)
        if size == "60m":
            assert done.returncode == 0, done.stderr
            assert "warning: the disk is full: removed" in done.stdout
            assert last["step"] == 10
        else:
            assert done.returncode == 2
            assert "(No space left on device); the run goes on" in done.stdout
            assert "fix that, and add --resume auto" in done.stderr
            assert last["step"] == 2
        deadline = time.monotonic() + 60  # for what draws the curves, beside the run
        while list((disk / "run").glob("*.tmp")):
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.weekly
def test_random_kills_are_bit_identical(project, whole, tmp_path, capsys):
    """Killed and stopped at random moments, during saves too, runs end as if nothing had been."""
    kills, seed = 0, int(os.environ.get("CHAOS_SEED", random.randrange(2**32)))
    chance = random.Random(seed)
    print(f"CHAOS_SEED={seed}")  # shown if the test fails
    wanted = int(os.environ.get("CHAOS_KILLS", 30))
    lives = 0
    for number in range(wanted):
        output, status = tmp_path / str(number), None
        while status != 0:
            lives += 1
            assert lives < 5 * wanted + 20, f"seed {seed}"
            flags = ("--save-every", 1, "--resume", "auto")
            with started(project, output, *flags) as victim:
                if chance.random() < 0.8:
                    victim.wait_for(STARTED)
                time.sleep(chance.uniform(0.0, 2.0))
                if kills < wanted and victim.process.poll() is None:
                    target = chance.choice([*victim.ranks().values(), victim.process.pid])
                    blow = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(target, blow)
                        kills += 1
                status, _ = victim.end()
        assert_same_run(output, whole)
        if kills >= wanted:
            break
    with capsys.disabled():
        print(f"\nchaos: {kills} kills, {lives} lives, seed {seed}", file=sys.stderr)
    assert kills >= wanted
