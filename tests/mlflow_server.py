"""MLflow's server on this machine, for the tests of trackers."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

START_S = 180  # on a machine that runs other tests beside it


@contextmanager
def mlflow_server(folder: Path, port: int) -> Iterator[None]:
    """Run MLflow's server with a SQLite database."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=folder, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_S
        while True:
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.2)
        yield
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # its own end can take longer than 20 s
        server.wait(20)
