"""Events for TensorBoard."""

import time
from collections.abc import Mapping
from pathlib import Path

from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


class Events:
    """A file of events in `folder`, of a run that begins after `step`.

    torch's SummaryWriter writes the same in a thread, whose errors are tracebacks. Here all is on
    its way to the disk, or has raised OSError, when a method returns.
    """

    def __init__(self, folder: Path, step: int) -> None:
        path = folder / f"events.out.tfevents.{time.time_ns()}"  # TensorBoard reads them in order
        self.writer = RecordWriter(path.open("wb"))
        self._add(file_version="brain.Event:2")
        # Those of later steps are of a run that was stopped after its last checkpoint.
        self._add(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Adds a point to the curve of each of `values`; curves of a `group` are shown together."""
        points = [Summary.Value(tag=f"{group}/{n}", simple_value=v) for n, v in values.items()]
        self._add(step=step, summary=Summary(value=points))

    def picture(self, tag: str, path: Path, step: int) -> None:
        """Adds the picture in a PNG file."""
        with Image.open(path) as image:
            width, height = image.size
        image = Summary.Image(width=width, height=height, encoded_image_string=path.read_bytes())
        self._add(step=step, summary=Summary(value=[Summary.Value(tag=tag, image=image)]))

    def _add(self, **fields: object) -> None:
        self.writer.write(Event(wall_time=time.time(), **fields).SerializeToString())
        self.writer.flush()
