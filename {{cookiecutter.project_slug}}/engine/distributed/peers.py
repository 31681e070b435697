"""Detection of failed and lost processes, after which all others exit within seconds."""

import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

import torch.distributed as dist

from engine import EXIT_USAGE, PeerError, distributed, print_error
from engine.distributed.network import keep_alive, listen, read_words, send
from engine.launch import LAUNCHER, USAGE_SIGNAL

# Exit statuses of a job that must not be restarted, and the signal that makes the launcher exit.
FINAL_STATUSES = {
    EXIT_USAGE: USAGE_SIGNAL,
    128 + signal.SIGTERM: signal.SIGTERM,
    128 + signal.SIGINT: signal.SIGINT,
    128 + signal.SIGHUP: signal.SIGHUP,
    128 + signal.SIGUSR1: signal.SIGTERM,
}
CONNECT_S = 30.0  # for the connection to rank 0
REPLY_S = 2.0  # for the reply of rank 0 to a process that fails
WRITER = "checkpoint writer"  # name of the thread
SHARD_WRITER = "shard writer"  # the same for a sharded checkpoint, which takes all processes
WRITE_S = 20.0  # for a checkpoint that is being written; torchrun waits for 30
LINGER_S = 1.0  # in which a launcher ends this process, too, if it ends the job


def exit_process(status: int, has_lost_peer: bool = False) -> NoReturn:
    """Exit this process at once, without Python's clean-up, and all processes of the job with it.

    A checkpoint that is being written is completed, unless it is sharded and one of the processes
    is lost. After a user's error or a signal, the launcher must not restart the job; it receives a
    signal.
    """
    announce_failure(status)
    finish_writing((WRITER,) if has_lost_peer else (WRITER, SHARD_WRITER))
    for stream in filter(None, (sys.stdout, sys.stderr)):  # one may be closed
        with contextlib.suppress(OSError):  # a full disk
            stream.flush()
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    may_restart = restarts < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if status in FINAL_STATUSES and may_restart and LAUNCHER in os.environ:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(os.environ[LAUNCHER]), FINAL_STATUSES[status])
    os._exit(status)


def finish_writing(writers: Sequence[str] = (WRITER, SHARD_WRITER)) -> None:
    """Wait, but not for long, until these threads have written a checkpoint."""
    for thread in threading.enumerate():
        if thread.name in writers and thread.is_alive():  # else, it is about to start
            thread.join(WRITE_S)


def announce_failure(status: int) -> bool:
    """Make all processes of the job exit; return whether this one is to log the cause.

    That is the first one that fails. The others exit while they wait for the answer.
    """
    monitor = peer_monitor()
    return monitor is None or monitor.announce_failure(status)


def peer_monitor() -> "PeerMonitor | None":
    """Return the monitor of the other processes, if there are any."""
    monitors = (thread for thread in threading.enumerate() if isinstance(thread, PeerMonitor))
    return next(monitors, None)


class PeerMonitor(threading.Thread):
    """Connection to rank 0, which reports that another process has failed or is lost.

    The kernel closes the connection when a process ends, however it ends. Its keep-alive probes
    detect a host without power or network, and need no answer from a process that is busy. The
    first process that fails logs why; the others exit with its status, and without a message.

    Args:
        connection: connection to rank 0's PeerServer.
        rank: rank of this process.
    """

    def __init__(self, connection: socket.socket, rank: int) -> None:
        super().__init__(name="peer monitor", daemon=True)
        self.connection = connection
        self.rank = rank
        self.server_address = connection.getpeername()[0]
        self.is_ending = False  # this process, or because of another one
        self.replied = threading.Event()
        os.register_at_fork(after_in_child=connection.close)  # it must end with this process

    @classmethod
    def connect(cls, store: dist.Store, rank: int, address: str) -> None:
        """Connect all processes that have `store`, and start the monitor of this one.

        Args:
            address: address of this host that the others can reach.

        Raises PeerError if rank 0 does not arrive, or is out of reach.
        """
        if rank == 0:
            server = PeerServer(address)
            server.start()
            store.set("peers", json.dumps([address, server.port, server.token]))
        try:
            host, port, token = json.loads(store.get("peers"))
        except dist.DistStoreError:
            raise PeerError("rank 0 did not come: start it, or look at its output") from None
        try:
            connection = socket.create_connection((host, port), CONNECT_S)
        except OSError as error:
            raise PeerError(
                f"rank 0 can't be reached at {host}, port {port} ({error}): it has ended, or the "
                "ports between the hosts are closed"
            ) from None
        keep_alive(connection)
        connection.settimeout(None)
        send(connection, f"{token} {rank} {socket.gethostname()}")
        if not read_words(connection):  # else, rank 0 knows this process from here on
            raise PeerError("rank 0 closed the connection at the start: check its output")
        cls(connection, rank).start()

    def announce_failure(self, status: int) -> bool:
        """Make all processes exit with `status`; return whether this one is the first to fail."""
        if self.is_ending:
            return False
        self._send(f"failed {status}")
        return True

    def finish(self) -> None:
        """Stop monitoring: this process has succeeded."""
        if not self.is_ending:
            self._send("done")

    def _send(self, message: str) -> None:
        self.is_ending = True
        send(self.connection, message)
        self.replied.wait(REPLY_S)

    def run(self) -> None:
        """Wait for the report of rank 0."""
        report = read_words(self.connection)
        if report:
            event, rank, detail = report
        elif self.is_ending:
            return
        else:
            event, rank, detail = "lost", "0", self.server_address
        if event == "done" or int(rank) == self.rank:
            self.replied.set()
            return
        self.is_ending = True
        if event == "failed":
            exit_process(int(detail))
        time.sleep(LINGER_S)
        if self.rank == 0 or (rank == "0" and (self.rank == 1 or distributed.is_local_leader())):
            print_error(f"rank {rank} on {detail} has ended without a message, or is out of reach")
        exit_process(1, has_lost_peer=True)


class PeerServer(threading.Thread):
    """Rank 0's end of the connections; it reports the first failure to all processes."""

    def __init__(self, address: str) -> None:
        super().__init__(name="peer server", daemon=True)
        self.token = secrets.token_hex(16)  # processes read it from the store
        self.listener = listen(address, 0)
        self.port = self.listener.getsockname()[1]
        self.sockets = [self.listener]
        self.peers: dict[str, socket.socket] = {}  # connections by rank
        self.report = ""  # the first one is the only one
        self.lock = threading.Lock()
        os.register_at_fork(after_in_child=self._close)

    def _close(self) -> None:
        for connection in self.sockets:
            connection.close()

    def run(self) -> None:
        """Accept connections."""
        while True:
            connection, _ = self.listener.accept()
            self.sockets.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Wait for the one message of a process, or for the end of its connection."""
        keep_alive(connection)
        connection.settimeout(CONNECT_S)
        greeting = read_words(connection)
        token = greeting[0] if len(greeting) == 3 else ""
        if not secrets.compare_digest(token.encode(), self.token.encode()):
            connection.close()  # not a process of this job
            return
        _, rank, host = greeting
        connection.settimeout(None)
        with self.lock:
            self.peers[rank] = connection
            send(connection, "welcome")
            self._send_report()
        message = read_words(connection)
        with self.lock:
            if message == ["done"] and rank != "0":
                if rank in self.peers:  # no report has been sent to it
                    send(self.peers.pop(rank), f"done {rank} 0")
                return
            if message == ["done"]:  # there is no server after this
                report = "done 0 0"
            elif message:
                report = f"failed {rank} {message[1]}"
            else:
                report = f"lost {rank} {host}"
            self.report = self.report or report
            self._send_report()

    def _send_report(self) -> None:
        if self.report:  # rank 0, which may exit at once, gets it last
            for rank in sorted(self.peers, key=lambda rank: rank == "0"):
                send(self.peers.pop(rank), self.report)
