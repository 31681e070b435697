"""Ports of the loopback interface for servers that a test starts later."""

import itertools
import os
import random
import socket

PORTS_PER_WORKER = 400
FIRST_PORT = 20_000 + PORTS_PER_WORKER * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
OFFSETS = itertools.count(random.randrange(PORTS_PER_WORKER))


def free_port() -> int:
    """Return a port on which nothing listens and which nothing else takes soon.

    Each worker of pytest-xdist has a range of its own, below the one from which Linux takes ports
    for connections and for servers that ask for any port (32768 and higher).
    """
    for _ in range(PORTS_PER_WORKER):
        port = FIRST_PORT + next(OFFSETS) % PORTS_PER_WORKER
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise OSError(f"no free port from {FIRST_PORT} to {FIRST_PORT + PORTS_PER_WORKER - 1}")
