"""TensorBoard events on a full disk: why the engine does not use torch's SummaryWriter."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine.monitoring.events import PREFIX, EventWriter
from fresh import TEMPLATE
from PIL import Image

SCRIPT = """
import resource
import sys
import time
from pathlib import Path


def open_summary_writer(folder):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder)
    writer.flush()
    return writer, lambda step: writer.add_scalar("loss", 1.0, step)


def open_event_writer(folder):
    from engine.monitoring.events import EventWriter

    writer = EventWriter(folder, 0)
    return writer, lambda step: writer.add_scalars("step", {"loss": 1.0}, step)


folder = Path(sys.argv[2])
writer, add = globals()[f"open_{sys.argv[1]}"](folder)
(path,) = folder.glob("events.*")
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limit[1]))
for step in range(2):
    try:
        add(step)
        time.sleep(0.5)
        print("returned")
    except OSError as error:
        print(error.strerror)
"""


def add_to_full_disk(writer: str, folder: object) -> subprocess.CompletedProcess:
    """Add two events to an event file that cannot grow."""
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, writer, str(folder)],
        env=os.environ | {"PYTHONPATH": str(TEMPLATE)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_event_writer_raises_in_the_failed_call(tmp_path):
    done = add_to_full_disk("event_writer", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "File too large"
    assert done.stderr == ""


def test_steps_after_the_clock_was_set_back_are_shown(tmp_path, monkeypatch):
    """TensorBoard reads the files in the order of their names, which are times."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    now = time.time_ns()
    for step, minutes in enumerate((0, -60, -60, 30)):
        monkeypatch.setattr(time, "time_ns", lambda minutes=minutes: now + minutes * 60 * 10**9)
        EventWriter(tmp_path, step).add_scalars("step", {"loss": 1.0}, step + 1)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"events.out.tfevents.{now + ns}" for ns in (0, 1, 2, 1800 * 10**9)]
    shown = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [point.step for point in shown.Scalars("step/loss")] == [1, 2, 3, 4]


def test_links_are_not_followed(tmp_path, monkeypatch):
    """Whoever else can write to the folder may make one at any time."""
    Image.new("RGB", (8, 8)).save(tmp_path / "picture.png")
    (tmp_path / "link.png").symlink_to(tmp_path / "picture.png")
    (tmp_path / "run").mkdir()
    writer = EventWriter(tmp_path / "run", 0)
    writer.add_image("picture", tmp_path / "picture.png", 1)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        writer.add_image("picture", tmp_path / "link.png", 1)
    (tmp_path / "run" / f"{PREFIX}.{2**63}").touch()  # the next is higher by one
    monkeypatch.setattr(Path, "glob", lambda folder, _: [folder / f"{PREFIX}.{2**63}"])
    (tmp_path / "run" / f"{PREFIX}.{2**63 + 1}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        EventWriter(tmp_path / "run", 0)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.slow
def test_summary_writer_prints_a_traceback_from_its_thread(tmp_path):
    """If this fails, SummaryWriter has improved: see docs/decisions/0001-tensorboard-writer.md."""
    pytest.importorskip("torch.utils.tensorboard")
    done = add_to_full_disk("summary_writer", tmp_path)
    assert done.stdout == "returned\nFile too large\n", done.stderr
    assert done.stderr.startswith("Exception in thread")
    assert "Traceback (most recent call last)" in done.stderr
