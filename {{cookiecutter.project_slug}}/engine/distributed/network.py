"""Addresses, sockets and stores: what listens where, and how a lost connection is noticed."""

import contextlib
import errno
import fcntl
import os
import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

from engine import UserError, log_line, print_error
from engine.distributed.consistency import clock_problem
from engine.launch import LAUNCH_ID, kill_processes, running_processes

SIOCGIFCONF = 0x8912  # Linux's request for the addresses of all interfaces, and
INTERFACE_BYTES = 40  # those of one in its reply
MESSAGE_BYTES = 500  # at most
LINGER_S = 10.0  # for the other launchers to end after the one that serves the store
FAILURE_S = 30.0  # for them to end after one whose processes have failed; some may be writing
FINISHED_S = 300.0  # for those whose processes have ended well to wait for the others, in torchrun
FAILED = "failed"  # key of the store, with the time of the last failure
HAS_FAILED = threading.Event()  # less than FAILURE_S ago, on another host
RESUME = "start ./run.sh on all hosts again, with --resume auto"
ELSEWHERE = f"the job has failed on another host, which logs why: {RESUME}"
RETRY_S = 0.5  # between two attempts to reach a server
NAME_WAIT_S = 60  # for the name of this host: Kubernetes' DNS may resolve that of a new pod late
STORE_TIMEOUT = timedelta(seconds=20)  # for an answer of a store
# A host that does not answer for 10 s is lost. A probe each second finds it after a short outage.
KEEP_ALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 9, "TCP_USER_TIMEOUT": 10_000}


def local_address(target: str) -> str:
    """Return the address of this host by which the host `target` can reach it.

    If that is this host itself, its address may be one that only this host can reach, such as the
    127.0.1.1 that some systems give their own name; then the one by which it reaches others.
    """
    own = _source_address(target)
    if is_loopback(own):
        with contextlib.suppress(OSError):  # there is no other network
            return _source_address("192.0.2.1")  # reserved for documentation: any outside address
    return own


def _source_address(target: str) -> str:
    """Return the address of this host from which it sends to `target`."""

    def source(family: int, address: tuple) -> str:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return probe.getsockname()[0]

    return _use_address(source, target, 1)


def _use_address(use: Callable[[int, tuple], Any], name: str | None, port: int) -> Any:
    """Return what `use` returns for the family and address of a name: one of IPv4 if possible."""
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    found.sort(key=lambda one: one[0] != socket.AF_INET)
    for family, _, _, _, address in found[:-1]:
        try:
            return use(family, address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return use(found[-1][0], found[-1][4])


def is_own_address(address: str) -> bool:
    """Return whether `address` is one of this host."""
    try:
        listen(address, 0).close()
    except OSError:
        return False
    return True


def select_interface(address: str) -> None:
    """Make gloo use the network interface with that address of ours; on a single host NCCL, too.

    On a single host gloo uses no other one, whatever GLOO_SOCKET_IFNAME is: it reads pickled
    objects from its connections. By default, gloo uses the address of the host's name, which often
    only this host can reach, and NCCL listens on all interfaces.
    """
    if name := _interfaces().get(address):
        if address == "127.0.0.1":
            os.environ["GLOO_SOCKET_IFNAME"] = name
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _interfaces() -> dict[str, str]:
    """Return the names of the network interfaces by IPv4 address; one may have several."""
    reply = array("B", bytes(1024 * INTERFACE_BYTES))
    length = 0
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        request = struct.pack("iP", len(reply), reply.buffer_info()[0])
        length, _ = struct.unpack("iP", fcntl.ioctl(probe, SIOCGIFCONF, request))
    entries = [reply[start:][:INTERFACE_BYTES] for start in range(0, length, INTERFACE_BYTES)]
    return {
        socket.inet_ntoa(entry[20:24]): entry[:16].tobytes().partition(b"\0")[0].decode()
        for entry in reversed(entries)
    }


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens at that address of this host only; "" is all of them."""

    def serve(family: int, place: tuple) -> socket.socket:
        return socket.create_server(place[:2], family=family)

    return _use_address(serve, address or None, port)


def serve_store(address: str, port: int, timeout: timedelta = STORE_TIMEOUT) -> dist.TCPStore:
    """Return a store that this process serves at `address`, not on all interfaces if possible.

    Args:
        port: 0 for any free one.

    Raises:
        UserError: if the port is in use.
    """
    try:
        is_hidden = socket.gethostbyname(address).startswith("127.") and not is_loopback(address)
        # The name is another address to the other hosts, or a router translates the address.
        interface = "" if is_hidden or not is_own_address(address) else address
        listener = listen(interface, port)
    except OSError as error:
        raise UserError(
            f"MASTER_ADDR={address}, MASTER_PORT={port} can't be used on this host "
            f"({error.strerror}): set others, on all hosts"
        ) from None
    return dist.TCPStore(
        interface or "localhost",
        listener.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,  # a launcher that serves this port uses this server
        master_listen_fd=listener.detach(),
        use_libuv=torch.__version__ >= "2.8",  # before, it had to listen by itself
    )


def wait_for_server(address: str, port: int, seconds: float) -> socket.socket:
    """Return a connection to a server that may start later: torch waits up to thrice its limit.

    Raises DistNetworkError after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        try:
            connection = socket.create_connection((address, port), min(5.0, max(0.1, left)))
            connection.settimeout(None)
            return connection
        except OSError as error:
            if left < RETRY_S:
                raise dist.DistNetworkError(str(error.strerror or error)) from None
        time.sleep(RETRY_S)


def is_loopback(address: str) -> bool:
    """Return whether `address` is a loopback address by its text; a name is not resolved."""
    return address == "localhost" or address.startswith("127.")


def serve_locally() -> tuple[dist.Store, None, list[str]]:
    """Return what `join_hosts` does for a single host: its store is on the loopback interface."""
    store = serve_store("127.0.0.1", 0)
    options = ["--rdzv-backend=static", "--node-rank=0", "--master-addr=127.0.0.1"]
    return store, None, [*options, f"--master-port={store.port}"]


def join_hosts(nodes: str) -> tuple[dist.Store | None, dist.Store | None, list[str]]:
    """Serve the store at MASTER_ADDR, if that is this host, or wait for it.

    Args:
        nodes: number of hosts, as NNODES.

    Returns:
        The store if it is served here; a client of it, for `announce_failure`; and options by
        which torchrun uses it.

    Raises:
        UserError: if the host of the store has another NNODES, torch, torchvision or time.
        DistNetworkError: if the store does not answer within NODE_WAIT seconds.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ.get("MASTER_PORT") or 29500)
    rank, wait = os.environ.get("NODE_RANK"), int(os.environ.get("NODE_WAIT") or 600)
    settings = _describe(nodes)
    server = None
    log_line(f"waiting for {nodes} hosts at {address}, port {port}")
    if rank in (None, "", "0"):
        _wait_for_name(address, min(wait, NAME_WAIT_S))
    if rank == "0" or (not rank and is_own_address(address)):
        server = serve_store(address, port)
        server.set("launch", os.environ[LAUNCH_ID])
        server.set("settings", settings)
        server.set(FAILED, "")
        threading.Thread(target=_publish_time, args=(server,), daemon=True).start()
    connection = wait_for_server(address, port, wait)
    store = dist.TCPStore(address, port, timeout=timedelta(seconds=wait), wait_for_workers=False)
    if (expected := store.get("settings").decode()) != settings:
        host = socket.gethostname()
        raise UserError(f"{settings} on {host}, but {expected} at {address}: use the same")
    os.environ[LAUNCH_ID] = store.get("launch").decode()
    if problem := clock_problem(float(store.get("time")), f"that of {address}"):
        raise UserError(problem)
    threading.Thread(target=_exit_without_store, args=(connection, address), daemon=True).start()
    threading.Thread(target=_exit_after_failure, args=(store,), daemon=True).start()
    # Each rendezvous has a store of its own, on the host that has rank 0 then.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return server, store, [f"--local-addr={local_address(address)}"]


def _describe(nodes: str) -> str:
    """Return what hosts must have in common before they join a job of NNODES=`nodes`.

    One that joins an elastic job restarts the others: if it failed, it would end them, too.
    """
    try:
        torchvision = version("torchvision")
    except PackageNotFoundError:
        torchvision = "missing"
    return f"NNODES={nodes}, torch {torch.__version__}, torchvision {torchvision}"


def _wait_for_name(name: str, seconds: float) -> None:
    """Wait until a name can be resolved, but not for longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(socket.gaierror):
            socket.getaddrinfo(name, None)
            return
        time.sleep(RETRY_S)


def _publish_time(store: dist.Store) -> None:
    """Store the time of this host once a second, for the others to compare with theirs."""
    while True:
        store.set("time", str(time.time()))
        time.sleep(1.0)


def _exit_without_store(connection: socket.socket, address: str) -> None:
    """Exit the launcher when its host is lost: torchrun waits for an answer without a limit."""
    keep_alive(connection)
    read_words(connection)
    time.sleep(LINGER_S)  # if the job has ended, so will this process
    if HAS_FAILED.is_set():  # which ends it, with that message, or its processes have ended well
        time.sleep(FINISHED_S)
    kill_processes()
    print_error(f"the store at MASTER_ADDR={address} is lost: {RESUME}")
    os._exit(1)


def announce_failure(store: dist.Store | None) -> None:
    """Make the launchers of other hosts exit if their processes do not end by themselves.

    A process that failed before it was connected to the others does not end them.

    Args:
        store: that `join_hosts` has returned; None if there is one host.
    """
    if store is None:
        return

    def announce() -> None:
        with contextlib.suppress(dist.DistError):  # its launcher has ended
            store.set(FAILED, str(time.time()))

    thread = threading.Thread(target=announce, daemon=True)
    thread.start()
    thread.join(1.0)  # its host may be lost


def _exit_after_failure(store: dist.Store) -> None:
    """Exit the launcher if its processes do not end after another one has announced a failure.

    If they have ended, torchrun waits for other hosts, or has started others with them.
    """
    with contextlib.suppress(dist.DistError):  # the store is lost
        last = store.get(FAILED)  # from before this launcher joined
        while True:
            while store.get(FAILED) == last:
                time.sleep(1.0)
            last = store.get(FAILED)
            HAS_FAILED.set()
            known = running_processes()
            time.sleep(FAILURE_S)
            if known & running_processes(known):
                kill_processes(known)
                print_error(ELSEWHERE)
                os._exit(1)
            HAS_FAILED.clear()


def keep_alive(connection: socket.socket) -> None:
    """Make the kernel probe the other end of a connection, and close it if there is no answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def read_words(connection: socket.socket) -> list[str]:
    """Return the words of a line; none if the connection ends, or times out, before it does."""
    line = b""
    while not line.endswith(b"\n"):
        try:
            byte = connection.recv(1)
        except OSError:
            byte = b""
        if not byte or len(line) >= MESSAGE_BYTES:
            return []
        line += byte
    return line.decode(errors="replace").split()


def send(connection: socket.socket, line: str) -> None:
    """Send a line, unless the connection has ended."""
    with contextlib.suppress(OSError):
        connection.sendall(f"{line}\n".encode())
