"""Writer of TensorBoard events."""

import io
import time
from collections.abc import Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path

from PIL import Image

from engine import regular_only

PREFIX = "events.out.tfevents"


class EventWriter:
    """Writer of a TensorBoard event file for the steps after `step`.

    torch's SummaryWriter writes in a thread, which prints a traceback when the disk is full. Here
    each method returns when its event is written, or raises OSError.
    """

    def __init__(self, folder: Path, step: int) -> None:
        # Imported here: it takes 0.1 s, which only rank 0 needs, and may be missing.
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event_type = event_pb2.Event
        # TensorBoard reads the files in the order of their names. The clock may have been set back.
        numbers = [path.suffix[1:] for path in folder.glob(f"{PREFIX}.*")]
        last = max((int(number) for number in numbers if number.isdecimal()), default=0)
        path = folder / f"{PREFIX}.{max(time.time_ns(), last + 1)}"
        self._record_writer = RecordWriter
        self.file = FileIO(path, "x")
        self._write(file_version="brain.Event:2")
        # Hides events of later steps, which a stopped run wrote after its last checkpoint.
        self._write(step=step + 1, session_log={"status": event_pb2.SessionLog.START})

    def add_scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Add a point to the curve of each value. TensorBoard shows a group's curves together."""
        points = [{"tag": f"{group}/{n}", "simple_value": value} for n, value in values.items()]
        self._write(step=step, summary={"value": points})

    def add_image(self, tag: str, path: Path, step: int) -> None:
        """Add the image in a PNG file."""
        with open(path, "rb", opener=regular_only) as file:
            content = file.read()
        width, height = Image.open(io.BytesIO(content)).size
        image = {"width": width, "height": height, "encoded_image_string": content}
        self._write(step=step, summary={"value": [{"tag": tag, "image": image}]})

    def _write(self, **fields: object) -> None:
        event = self._event_type(wall_time=time.time(), **fields)
        record = io.BytesIO()
        self._record_writer(record).write(event.SerializeToString())
        append(self.file, record.getvalue())


def append(file: FileIO, record: bytes) -> None:
    """Append a record to an unbuffered file. Raises OSError; then nothing of it is left there."""
    end = file.tell()
    rest = memoryview(record)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        with suppress(OSError):
            file.seek(end)
            file.truncate()
        raise
