"""engine.monitoring.deliver: every point reaches a tracker once, whatever happens in between."""

import json
import os
import random
import time

import pytest
from engine import UserError
from engine.monitoring import deliver, trackers
from engine.monitoring.deliver import PNG, Delivery, redact
from engine.monitoring.trackers import FOLDER, QUEUE
from parameters import mostly_slow


class FakeTracker:
    """Tracker whose calls fail with the probability `risk`, before or after storing the data."""

    def __init__(self, output):
        self.reconnect()

    @classmethod
    def reset(cls, seed=0, risk=0.0, has_images=True):
        cls.chosen, cls.risk, cls.has_images = random.Random(seed), risk, has_images
        cls.points, cls.images, cls.runs, cls.ends = [], [], [], []

    def reconnect(self):
        self.fail()

    def fail(self):
        if self.chosen.random() < self.risk:
            raise ConnectionError("the tracker does not answer")

    def start(self, run):
        self.fail()
        self.runs.append(run)

    def last_steps(self):
        self.fail()
        last = {}
        for group, step, _ in self.points:
            last[group] = max(step, last.get(group, -1))
        return last

    def log(self, points):
        self.fail()
        self.points += [(one["group"], one["step"], one["values"]["loss"]) for one in points]
        self.fail()

    def image(self, name, path, step):
        if not self.has_images:
            raise PermissionError("no store for files")
        self.images.append((name, step))

    def finish(self, status):
        self.fail()
        self.ends.append(status)


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """Function that appends records to the queue of a run."""
    monkeypatch.setitem(trackers.ADAPTERS, "mlflow", FakeTracker)
    FakeTracker.reset()
    path = tmp_path / FOLDER / QUEUE
    path.parent.mkdir()

    def append(*records):
        with path.open("a") as file:
            file.writelines(json.dumps(one) + "\n" for one in records)

    append(start(0))
    return append


def start(step, run_id="0123456789abcdef"):
    return {"start": {"run_id": run_id, "step": step, "trackers": ["mlflow"]}}


def point(step, loss=1.0, group="step"):
    return {"group": group, "step": step, "time": 0.0, "values": {"loss": loss}}


def steps(group="step"):
    return [step for name, step, _ in FakeTracker.points if name == group]


def test_points_of_a_resumed_run_replace_those_that_were_not_sent(queue, tmp_path):
    queue(point(1), point(2), point(3), start(1), point(2, 7.0), point(2, 9.0, "epoch"))
    Delivery(tmp_path, "mlflow").send()
    assert FakeTracker.points == [("step", 1, 1.0), ("step", 2, 7.0), ("epoch", 2, 9.0)]


def test_points_that_a_tracker_has_are_not_sent_again(queue, tmp_path):
    queue(point(1), point(2))
    Delivery(tmp_path, "mlflow").send()
    queue(start(1), point(2, 7.0), point(3))
    assert Delivery(tmp_path, "mlflow").send() == 3
    assert steps() == [1, 2, 3]
    assert Delivery(tmp_path, "mlflow").send() == 0


def test_tracker_is_asked_if_its_state_is_lost(queue, tmp_path):
    queue(point(1), point(2))
    Delivery(tmp_path, "mlflow").send()
    (tmp_path / FOLDER / "mlflow.json").unlink()
    queue(point(3))
    Delivery(tmp_path, "mlflow").send()
    assert steps() == [1, 2, 3]


@pytest.mark.parametrize("is_same_process", [True, False])
def test_points_that_a_tracker_loses_with_its_process_are_sent_again(
    queue, tmp_path, monkeypatch, is_same_process
):
    """W&B's process keeps them in memory; each end of the run confirms those before it."""
    monkeypatch.setitem(trackers.BUFFERED, "mlflow", 3 * len(json.dumps(point(1)) + "\n"))
    monkeypatch.setattr(FakeTracker, "last_steps", lambda self: {})
    queue(point(1), point(2, group="rows"), {"finish": "KILLED"}, start(2), point(3))
    delivery = Delivery(tmp_path, "mlflow")
    delivery.send()
    queue(*map(point, range(4, 9)), point(9, group="rows"))
    delivery.send()
    del FakeTracker.points[-3:]
    if is_same_process:
        delivery.fail(ConnectionError("lost"))
    else:  # a resumed run, which repeats the last two steps
        delivery = Delivery(tmp_path, "mlflow")
        queue(start(6), point(7), point(8), point(9, group="rows"))
    queue(point(10))
    delivery.send()
    assert steps() == [1, *range(3, 9), 10]
    assert steps("rows") == [2, 9]


@pytest.mark.parametrize("added", [3, 30])
def test_queue_that_a_crash_of_the_host_has_shortened_is_sent_again(queue, tmp_path, added):
    """The state may be newer on the disk than the queue; the run adds what it trains again."""
    queue(*(point(step) for step in range(10)))
    Delivery(tmp_path, "mlflow").send()
    path = tmp_path / FOLDER / QUEUE
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]))
    queue(start(2), *(point(step, loss=0.25) for step in range(3, 3 + added)))
    Delivery(tmp_path, "mlflow").send()
    assert [step for _, step, _ in FakeTracker.points] == list(range(max(10, 3 + added)))


def test_state_of_another_run_is_not_used(queue, tmp_path):
    queue(point(1), point(2))
    Delivery(tmp_path, "mlflow").send()
    other = Delivery(tmp_path, "mlflow")
    (tmp_path / FOLDER / QUEUE).unlink()
    FakeTracker.reset()
    queue(start(0, "f" * 16), point(1))
    with pytest.raises(UserError, match="another run"):
        other.send()
    Delivery(tmp_path, "mlflow").send()
    assert steps() == [1]


def test_incomplete_line_is_left_for_later(queue, tmp_path):
    queue(point(1))
    path = tmp_path / FOLDER / QUEUE
    line = json.dumps(point(2)) + "\n"
    path.write_text(path.read_text() + line[:9])
    delivery = Delivery(tmp_path, "mlflow")
    assert delivery.send() == 2
    path.write_text(path.read_text() + line[9:])
    assert delivery.send() == 1
    assert steps() == [1, 2]


@pytest.mark.parametrize("seed", mostly_slow(range(20), fast=4))
def test_each_step_arrives_once_through_random_failures_and_resumptions(queue, tmp_path, seed):
    """A call that fails may have stored its data; a run may be killed and resumed in between."""
    FakeTracker.reset(seed, risk=0.3)
    chosen = random.Random(seed)
    delivery, step = Delivery(tmp_path, "mlflow"), 0

    def attempt():
        try:
            delivery.send()
        except ConnectionError as error:
            delivery.fail(error)

    while step < 200:
        for _ in range(chosen.randrange(12)):
            step += 1
            queue(point(step), *[point(step, group="epoch")] * (step % 10 == 0))
        attempt()
        if chosen.random() < 0.2:
            step -= min(step, chosen.randrange(30))
            queue(start(step))
            delivery = Delivery(tmp_path, "mlflow")
    FakeTracker.risk = 0.0
    delivery.send()
    assert steps() == list(range(1, step + 1))
    assert steps("epoch") == list(range(10, step + 1, 10))


def test_image_that_is_refused_does_not_hold_up_the_points(queue, tmp_path):
    FakeTracker.reset(has_images=False)
    (tmp_path / "epoch_001.png").write_bytes(PNG)
    image = {"group": "validation", "step": 1, "image": "epoch_001.png"}
    queue(point(1), image, image | {"image": "removed.png", "step": 2}, point(2))
    delivery = Delivery(tmp_path, "mlflow")
    for _ in range(2):
        with pytest.raises(PermissionError):
            delivery.send()
    delivery.send()
    assert steps() == [1, 2]
    assert "epoch_001.png is refused, no store for files" in delivery.state["problem"]


@pytest.mark.parametrize(
    "name",
    ["../outside.png", "/etc/hostname", "link.png", "folder", "fifo", "sparse.png", "eps.png"],
)
def test_file_outside_the_run_is_not_sent(queue, tmp_path, name):
    output = tmp_path / "run"
    (output / FOLDER).mkdir(parents=True)
    (tmp_path / FOLDER / QUEUE).rename(output / FOLDER / QUEUE)
    (tmp_path / "outside.png").write_bytes(PNG)
    (output / "eps.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0")  # PIL would run Ghostscript
    (output / "link.png").symlink_to(tmp_path / "outside.png")
    (output / "folder").mkdir()  # may hold links
    os.mkfifo(output / "fifo")
    (output / "sparse.png").write_bytes(PNG)
    os.truncate(output / "sparse.png", 2**40)
    with (output / FOLDER / QUEUE).open("a") as file:
        file.write(json.dumps({"group": "validation", "step": 1, "image": name}) + "\n")
    delivery = Delivery(output, "mlflow")
    assert delivery.send() == 2
    assert not FakeTracker.images
    assert "is not an image in the folder of the run" in delivery.state["problem"]


def test_record_of_an_unknown_kind_is_skipped(queue, tmp_path):
    delivery = Delivery(tmp_path, "mlflow")
    queue({}, point(1))
    assert delivery.send() == 3
    assert [step for _, step, _ in FakeTracker.points] == [1]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(b"\0" * 4096, id="hole"),
        pytest.param(b'{"group": "st', id="torn"),
        pytest.param(b"[1, 2]", id="list"),
        pytest.param(b"\xff", id="no_utf_8"),
        pytest.param(b'{"group": "step", "time": 1.0, "values": {"loss": 1.0}}', id="no_step"),
        pytest.param(b'{"group": "step"}', id="no_kind"),
        pytest.param(b'{"start": 5}', id="no_start"),
        pytest.param(b"[" * 10_000, id="nested"),
    ],
)
def test_line_that_a_crash_of_the_host_has_damaged_is_skipped(queue, tmp_path, damage):
    queue(point(1))
    with (tmp_path / FOLDER / QUEUE).open("ab") as file:
        file.write(damage + b"\n")
    queue(point(2))
    delivery = Delivery(tmp_path, "mlflow")
    assert delivery.send() == 4
    assert steps() == [1, 2]
    assert "has damaged lines, which were left out" in delivery.state["problem"]


def test_line_without_an_end_is_not_read(queue, tmp_path):
    delivery = Delivery(tmp_path, "mlflow")
    queue(point(1))
    os.truncate(tmp_path / FOLDER / QUEUE, 2**40)  # takes no space on the disk
    assert delivery.send() == 2


def test_state_is_not_written_through_a_link(queue, tmp_path):
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / FOLDER / "mlflow.tmp").symlink_to(target)
    Delivery(tmp_path, "mlflow").send()
    assert target.read_text() == "precious"
    assert json.loads((tmp_path / FOLDER / "mlflow.json").read_text())["offset"] > 0


@pytest.mark.parametrize(
    "text",
    [
        None,
        "[]",
        "[" * 100_000,
        "{",
        '{"run_id": 1}',
        '{"run_id": RUN, "offset": "x", "steps": {}}',
        '{"run_id": RUN, "offset": 1.5, "steps": {}}',
        f'{{"run_id": RUN, "offset": {2**70}, "steps": {{}}}}',
        '{"run_id": RUN, "offset": 0, "steps": {"epoch": "last"}}',
        '{"run_id": RUN, "offset": 0, "steps": []}',
    ],
)
def test_state_that_is_altered_is_not_used(queue, tmp_path, text):
    path = tmp_path / FOLDER / "mlflow.json"
    if text is None:
        os.mkfifo(path)
    else:
        path.write_text(text.replace("RUN", json.dumps(Delivery(tmp_path, "mlflow").run_id)))
    delivery = Delivery(tmp_path, "mlflow")
    assert delivery.state["offset"] == 0
    assert delivery.send() == 1


def test_run_without_an_end_has_failed(queue, tmp_path):
    delivery = Delivery(tmp_path, "mlflow")
    queue(point(1))
    delivery.send()
    delivery.close()
    queue({"finish": "FINISHED"})
    delivery.send()
    delivery.close()
    assert FakeTracker.ends == ["FAILED", "FINISHED"]


def test_keys_are_not_in_messages(queue, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-key")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "p4ssw0rd")
    monkeypatch.setenv("A_KEY", "s3cr3t")  # the first part of another one
    text = "http://me:p4ssw0rd@host/api: s3cr3t-key is wrong, http://me:other@host"
    assert redact(text) == "http://…@host/api: … is wrong, http://…@host"
    assert redact("wrong key: Basic YXBpOnMz+/0=, Bearer a.b-c") == "wrong key: Basic …, Bearer …"
    assert redact('{"a":"http://me:p@h","b":"c@d"}') == '{"a":"http://…@h","b":"c@d"}'
    assert redact("http://me:an@ss@host/a/b and c@d") == "http://…@host/a/b and c@d"
    assert redact("at http://me:hunter'2/secret@host/a: refused") == "at http://…@host/a: refused"
    assert redact("(me:secret@host:9): 3@4") == "…@host:9): 3@4"
    for plain in ("https://host/path/file@2x.jpg", "/Users/me@corp", "https://host/a:b"):
        assert redact(plain) == plain
    began = time.monotonic()
    assert redact(40_000 * "a") == 40_000 * "a"
    assert redact(20_000 * "a:") == 20_000 * "a:"
    assert redact(20_000 * "//a:") == 20_000 * "//a:"
    assert time.monotonic() - began < 1
    delivery = Delivery(tmp_path, "mlflow")
    delivery.fail(ValueError(text))
    seen = capsys.readouterr().out + (tmp_path / FOLDER / "mlflow.json").read_text()
    assert "is wrong" in seen
    assert not [key for key in ("s3cr3t-key", "p4ssw0rd", "other") if key in seen]


def test_lock_that_is_a_link_is_an_error(queue, tmp_path, capsys):
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / FOLDER / "mlflow.lock").symlink_to(target)
    with pytest.raises(SystemExit) as stopped:
        deliver.main([str(tmp_path)])
    assert stopped.value.code == 2
    assert "mlflow.lock can't be used (Too many levels of symbolic" in capsys.readouterr().err
    assert target.read_text() == "precious"


def test_following_a_process_needs_a_tracker(queue, tmp_path, capsys):
    for parent in ("0", "1"):
        with pytest.raises(SystemExit):
            deliver.main([str(tmp_path), "--follow", parent])
        assert "--follow needs --tracker" in capsys.readouterr().err


def test_tracker_that_is_a_path_is_an_error(queue, tmp_path, capsys):
    """Files of its name are written."""
    queue(point(1))
    file = tmp_path / FOLDER / QUEUE
    file.write_text(file.read_text().replace('"mlflow"', f'"{tmp_path}/poetry"'))
    lock = tmp_path / "poetry.lock"
    lock.write_text("precious")
    with pytest.raises(SystemExit) as stopped:
        deliver.main([str(tmp_path)])
    assert stopped.value.code == 2
    assert "is altered: it does not begin with the start" in capsys.readouterr().err
    assert lock.read_text() == "precious"


@pytest.mark.parametrize("damaged", [b'{"start": {"run_\0\0\0\0\n', b'{"start": {"run_id": 5}}\n'])
def test_damaged_start_is_left_out(queue, tmp_path, damaged):
    """Such as the last one, after a crash of the host: the one before it counts."""
    path = tmp_path / FOLDER / QUEUE
    path.write_bytes(json.dumps(start(0)).encode() + b"\n" + damaged)
    assert deliver.read_start(path, path.stat().st_size)["run_id"] == start(0)["start"]["run_id"]


def test_rest_of_a_line_without_an_end_is_not_read(queue, tmp_path, monkeypatch):
    """A sparse file may be longer than any disk."""
    path = tmp_path / FOLDER / QUEUE
    first, later = (json.dumps(start(step)).encode() + b"\n" for step in (0, 1))
    for module in (deliver, trackers):
        monkeypatch.setattr(module, "MAX_BYTES", len(first))
    path.write_bytes(first + len(first) * b"\0" + later)
    assert deliver.read_start(path, path.stat().st_size) == start(0)["start"]


@pytest.mark.parametrize("line", ["", "[1]", '{"start": {}}', '{"start": {"run_id": 1}}', "x"])
def test_queue_that_is_altered_is_an_error(queue, tmp_path, capsys, line):
    (tmp_path / FOLDER / QUEUE).write_text(line)
    with pytest.raises(SystemExit) as stopped:
        deliver.main([str(tmp_path)])
    assert stopped.value.code == 2
    assert "is altered: it does not begin with the start" in capsys.readouterr().err


def test_queue_that_is_a_pipe_is_an_error(queue, tmp_path, capsys):
    path = tmp_path / FOLDER / QUEUE
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(SystemExit) as stopped:
        deliver.main([str(tmp_path)])
    assert stopped.value.code == 2
    assert "it is not a regular file" in capsys.readouterr().err


def test_command_reports_what_is_left(queue, tmp_path, capsys):
    queue(point(1))
    FakeTracker.reset(risk=1.0)
    for name, status, said in [
        (tmp_path, 1, "mlflow: the tracker does not answer"),
        (tmp_path / "none", 2, "none has no points: name the --output folder of a run"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            deliver.main([str(name)])
        assert stopped.value.code == status
        assert said in capsys.readouterr().err
    FakeTracker.reset()
    with pytest.raises(SystemExit) as stopped:
        deliver.main([str(tmp_path)])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == "mlflow: 2 records delivered\n"
    assert steps() == [1]
