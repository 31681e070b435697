"""nginx on this machine, and a proxy before it that causes faults, for the tests of data by URL."""

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ports import free_port

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
START_S = 30.0
BUSY = b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
CONFIG = """
daemon off;
master_process off;
pid {folder}/pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log {folder}/access.log combined;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        root {root};
        location /slow/ {{ alias {root}/; limit_rate 200k; }}
        location /private/ {{ return 403; }}
        location /unlisted/ {{ alias {root}/; error_page 404 = /private/; }}
        location /whole/ {{ alias {root}/; max_ranges 0; }}
    }}
}}
"""


class Nginx:
    """A server of the files in `root`: /slow/ sends 200 KB/s, /whole/ ignores range requests.

    /unlisted/ answers 403 for files that are not there, as S3 does without s3:ListBucket.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        (folder / "config").write_text(CONFIG.format(root=root, folder=folder, port=self.port))

    def requests(self) -> list[str]:
        """Return the log lines of the requests so far."""
        return (self.folder / "access.log").read_text().splitlines()


@contextmanager
def serving(root: Path, folder: Path) -> Iterator[Nginx]:
    """Run nginx with its files in `folder`, which is empty."""
    server = Nginx(root, folder)
    for path in (root, *root.parents):  # its workers may have another user
        with suppress(OSError):
            path.chmod(path.stat().st_mode | 0o055)
    command = [NGINX, "-c", str(folder / "config"), "-e", str(folder / "error.log")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while True:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", server.port), 1).close()
                break
            assert process.poll() is None and time.monotonic() < deadline, "nginx did not start"
            time.sleep(0.05)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


class FaultyProxy:
    """A proxy of one request for each connection, with a fault in each of the first ones.

    Args:
        faults: "refuse" closes the connection, "error" answers 503, "cut" ends after 200 bytes, and
            "stall" sends nothing for two seconds.
    """

    def __init__(self, port: int, faults: list[str]) -> None:
        self.target, self.faults = port, deque(faults)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                fault = self.faults.popleft() if self.faults else ""
                thread = threading.Thread(target=self._answer, args=(client, fault), daemon=True)
                thread.start()

    def _answer(self, client: socket.socket, fault: str) -> None:
        with client, suppress(OSError):
            if fault == "refuse":
                return
            request = b""
            while not request.endswith(b"\r\n\r\n"):
                piece = client.recv(65536)
                if not piece:
                    return
                request += piece
            if fault == "error":
                client.sendall(BUSY)
                return
            if fault == "stall":
                time.sleep(2)
                return
            with socket.create_connection(("127.0.0.1", self.target), 10) as server:
                server.sendall(request[:-2] + b"Connection: close\r\n\r\n")
                sent = 0
                while piece := server.recv(65536):
                    if fault == "cut":
                        piece = piece[: max(0, 350 - sent)]
                    client.sendall(piece)
                    sent += len(piece)
                    if fault == "cut" and sent >= 350:
                        return
