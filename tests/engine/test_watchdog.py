"""Tests of engine.distributed.watchdog and network: failures and losses of other processes."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from datetime import timedelta
from functools import partial
from importlib.metadata import PackageNotFoundError
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist
from engine import PeerError, UserError, distributed
from engine.distributed import network, peers, watchdog
from engine.distributed.peers import PeerMonitor, PeerServer
from engine.launch import LAUNCH_ID, RESTART
from fresh import TEMPLATE
from ports import free_port
from processes import fork_server


def work(
    rank: int,
    world_size: int,
    port: int,
    action: str,
    ready: Semaphore,
    go: Semaphore,
    errors: Path,
) -> None:
    """Connect to the other processes, wait for them, and run the code `action`."""
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))

    def main() -> None:
        timeout = timedelta(seconds=30)
        if rank == 0:
            store = network.serve_store("127.0.0.1", port, timeout)
        else:
            store = dist.TCPStore("127.0.0.1", port, None, False, timeout, wait_for_workers=False)
        PeerMonitor.connect(store, rank, "127.0.0.1")
        # As the comparison of the processes in a run: rank 0's fork would keep a connection open
        # that its thread is just accepting.
        store.set(f"connected {rank}", "")
        store.wait([f"connected {other}" for other in range(world_size)])
        if os.fork() == 0:  # as a data loader's worker, which may outlive its process for seconds
            os.closerange(0, 3)
            time.sleep(60)
            os._exit(0)
        ready.release()
        assert go.acquire(timeout=30)
        exec(action, {**globals(), "store": store})

    distributed.run(main)


class Job:
    """Processes of a job, each with its own action.

    They are forks of a process that has imported torch, which saves seconds.
    """

    def __init__(self, *actions: str) -> None:
        port = free_port()
        self.folder = tempfile.TemporaryDirectory()
        context = fork_server()
        # Not a Barrier: a process that is killed while it holds its lock leaves it locked for good.
        ready, go = context.Semaphore(0), context.Semaphore(0)
        self.processes = []
        for rank, action in enumerate(actions):
            errors = Path(self.folder.name, str(rank))
            arguments = (rank, len(actions), port, action, ready, go, errors)
            self.processes.append(context.Process(target=work, args=arguments))
            self.processes[-1].start()
        for _ in actions:
            assert ready.acquire(timeout=60)
        for _ in actions:
            go.release()

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()

    def statuses(self, seconds: float = 30.0) -> list[int | None]:
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.1, deadline - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def errors(self) -> str:
        return "".join(path.read_text() for path in sorted(Path(self.folder.name).iterdir()))


def wait_for_end(process: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while Path(f"/proc/{process}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


WAIT = "time.sleep(60)"


def run_script(script: str, seconds: float) -> subprocess.CompletedProcess:
    """Run a script that imports the engine; return its status and its output."""
    command = [sys.executable, "-c", textwrap.dedent(script)]
    environment = os.environ | {"PYTHONPATH": str(TEMPLATE)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)


@pytest.mark.slow
def test_signal_after_the_end_of_a_run_is_not_an_error() -> None:
    script = """
        import os, signal, time
        import torch.distributed as dist
        from engine.distributed.watchdog import StopSignals
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        signals = StopSignals()
        signals.start()
        dist.destroy_process_group()
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received.wait(10)
        time.sleep(0.2)
    """
    done = run_script(script, 60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("rank", [0, 1])
def test_exception_ends_all_processes_and_only_its_traceback_is_logged(rank) -> None:
    actions = [WAIT, WAIT, WAIT]
    actions[rank] = "raise ValueError('the cause')"
    with Job(*actions) as job:
        assert job.statuses() == [1, 1, 1]
        errors = job.errors()
    assert errors.count("Traceback") == errors.count("ValueError: the cause") == 1
    assert "error: " not in errors


@pytest.mark.parametrize(("seconds", "status"), [(60, 1), (0, 0)])
def test_a_body_that_exceeds_its_time_limit_is_reported(seconds: int, status: int) -> None:
    action = f"""
from engine.distributed.watchdog import time_limit
rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
with time_limit("reading the data", 1.0):
    time.sleep({seconds} * rank)
time.sleep(2)
dist.barrier()
"""
    with Job(action, action) as job:
        assert job.statuses() == [status, status]
        errors = job.errors()
    message = "error: rank 1 has been in reading the data for 1 s, more than --timeout; it is here"
    assert errors.count("error: ") == errors.count(message) == status


@pytest.mark.parametrize(("seconds", "status"), [(60, 1), (1.5, 0)])
def test_time_in_which_a_job_is_paused_does_not_count(seconds: float, status: int) -> None:
    """As by Ctrl-Z, `docker pause` or `scontrol suspend`; a hang after it is reported."""
    action = f"""
from engine.distributed.watchdog import time_limit
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with time_limit("reading the data", 4.0):
    for _ in range({round(10 * seconds)}):
        time.sleep(0.1)
"""
    with Job(action) as job:
        time.sleep(0.5)
        os.kill(job.processes[0].pid, signal.SIGSTOP)
        time.sleep(6.0)
        os.kill(job.processes[0].pid, signal.SIGCONT)
        assert job.statuses(10) == [status]
        assert job.errors().count("has been in reading the data for") == status


def test_a_hang_of_the_disk_that_has_the_code_is_reported(tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    os.mkfifo(code)  # it can be opened when another process writes to it, that is, never
    action = f"""
from engine.distributed.watchdog import time_limit
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with time_limit("step 3", 0.5):
    exec(compile("time.sleep(60)", {str(code)!r}, "exec"))
"""
    with Job(action) as job:
        assert job.statuses(10) == [1]
        assert "has been in step 3 for" in job.errors()
        assert "its position in the code takes long to read" in job.errors()


def test_limit_is_exceeded_by_at_most_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[float] = []
    monkeypatch.setattr(watchdog, "_exit_from", lambda _, seconds: exits.append(seconds))
    started = time.monotonic()
    with watchdog.time_limit("reading the data", 0.8):
        while not exits:
            time.sleep(0.01)
    assert time.monotonic() - started < 0.8 + watchdog.TURN_S


def test_same_exception_in_all_processes_is_logged_once() -> None:
    with Job(*3 * ["raise ValueError('the cause')"]) as job:
        assert job.statuses() == [1, 1, 1]
        assert job.errors().count("Traceback") == 1


def test_broken_connections_of_others_are_not_logged() -> None:
    broken = "time.sleep(1); raise RuntimeError('Connection closed by peer')"
    with Job(broken, "raise ValueError('the cause')", broken) as job:
        assert job.statuses() == [1, 1, 1]
        errors = job.errors()
    assert "the cause" in errors
    assert "Connection closed" not in errors


def test_users_error_is_logged_once_and_is_everyones_status() -> None:
    with Job(WAIT, "raise UserError('set --lr')", "raise UserError('set --lr')") as job:
        assert job.statuses() == [2, 2, 2]
        assert job.errors() == "error: set --lr\n"


@pytest.mark.parametrize("rank", [0, 2])
def test_killed_process_ends_all_others_with_one_message(rank) -> None:
    with Job(WAIT, WAIT, WAIT) as job:
        job.processes[rank].kill()
        statuses = job.statuses()
        errors = job.errors()
    assert statuses == [-signal.SIGKILL if other == rank else 1 for other in range(3)]
    assert re.findall(r"error: rank (\d) on \S+ has ended without a message", errors) == [str(rank)]


FULL_DISK = "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)"


def test_a_log_that_can_not_be_written_keeps_no_process_alive() -> None:
    """Neither after the loss of another one, nor in a hang or after an exception of its own."""
    alone = f"{FULL_DISK}; {WAIT}"
    with Job(alone, alone, WAIT) as job:
        time.sleep(1)
        job.processes[2].kill()
        assert job.statuses(20) == [1, 1, -signal.SIGKILL]
    action = f"""
from engine.distributed.watchdog import time_limit
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
{FULL_DISK}
with time_limit("reading the data", 1.0):
    time.sleep(60)
"""
    with Job(action) as job:
        assert job.statuses(20) == [1]
    with Job(f"{FULL_DISK}; raise ValueError('the cause')") as job:
        assert job.statuses(20) == [1]


WRITE = """
import threading
from engine.distributed import peers
def write(seconds):
    time.sleep(seconds)
    os.write(2, b"written")
peers.WRITE_S = 60.0
threading.Thread(None, write, peers.WRITER, (3,), daemon=True).start()
threading.Thread(None, write, peers.SHARD_WRITER, (60,), daemon=True).start()
"""


def test_loss_of_a_process_ends_a_sharded_write_and_completes_any_other() -> None:
    with Job(WRITE + WAIT, WAIT) as job:
        job.processes[1].kill()
        assert job.statuses() == [1, -signal.SIGKILL]
        assert job.errors().count("written") == 1


def test_processes_that_finish_one_after_the_other_succeed() -> None:
    with Job("time.sleep(1)", "pass", "time.sleep(2)") as job:
        assert job.statuses() == [0, 0, 0]
        assert job.errors() == ""


@pytest.mark.parametrize(
    ("module", "call"),
    [
        ("engine", "end_with_parent()"),
        pytest.param("engine.data.loading", "prepare_worker(0)", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("state", ["stopped", "blocked"])
def test_process_ends_with_its_parent_in_any_state(tmp_path, state, module, call) -> None:
    """A loader's worker may read from a pipe to which nobody writes."""
    os.mkfifo(tmp_path / "pipe")
    wait = {"stopped": "os.kill(os.getpid(), 19)", "blocked": f"open('{tmp_path}/pipe')"}[state]
    code = (
        "import os\n"
        f"from {module} import {call.partition('(')[0]}\n"
        "if child := os.fork():\n"
        "    os.waitpid(child, os.WUNTRACED)\n"
        f"{call}\n"
        f"print(os.getpid(), flush=True)\n{wait}\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(TEMPLATE)},
        stdout=subprocess.PIPE,
        text=True,
    )
    child = int(parent.stdout.readline())
    time.sleep(0.2)
    parent.kill()
    parent.wait()
    wait_for_end(child, seconds=5)


def test_ctrl_c_in_the_pause_before_a_fork_has_its_effect() -> None:
    """Python ignores exceptions of what it calls before a fork."""
    script = """
        import os, signal, threading, time
        from engine import distributed

        signal.signal(signal.SIGINT, signal.default_int_handler)  # not of a shell's background
        distributed.FORK_PAUSE_S = 0.5
        os.register_at_fork(before=lambda: time.sleep(1))  # the last one: a fork may take long
        pause, repeat = distributed.pause_before_fork, distributed.repeat_interrupt
        os.register_at_fork(before=pause, after_in_parent=repeat)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        if not os.fork():
            os._exit(0)
        try:
            time.sleep(30)
        except KeyboardInterrupt:
            print("interrupted")
    """
    done = run_script(script, 25)
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


@pytest.mark.parametrize("how", ["return", "sys.exit()"])
def test_exit_of_an_owner_waits_for_the_checkpoint_that_is_written(
    tmp_path: Path, how: str
) -> None:
    script = f"""
        import sys, threading, time
        from pathlib import Path
        from engine import distributed
        from engine.distributed.peers import WRITER

        def write():
            time.sleep(1)
            Path({str(tmp_path / "last.pt")!r}).touch()

        def main():
            threading.Thread(target=write, name=WRITER, daemon=True).start()
            {how}

        distributed.run(main)
    """
    done = run_script(script, 60)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "last.pt").exists()


def test_worker_of_a_process_that_has_ended_ends() -> None:
    """Such as one that was forked just before its process was killed."""
    script = """
        import multiprocessing, os, time
        from engine.data.loading import prepare_worker

        def work():
            time.sleep(1)
            prepare_worker(0)
            time.sleep(30)

        worker = multiprocessing.get_context("fork").Process(target=work)
        worker.start()
        print(worker.pid, flush=True)
        os._exit(0)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    environment = os.environ | {"PYTHONPATH": str(TEMPLATE)}
    parent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    parent.wait()
    wait_for_end(worker, seconds=10)


@pytest.mark.slow
def test_worker_of_a_fork_server_ends_with_the_process_that_reads_from_it(tmp_path) -> None:
    """The default from Python 3.14 on: the worker's parent is the server."""
    script = """
        import multiprocessing, os, time
        from engine.data.loading import prepare_worker

        def work():
            prepare_worker(0)
            print(os.getpid(), flush=True)
            time.sleep(60)

        if __name__ == "__main__":
            multiprocessing.set_start_method("forkserver")
            multiprocessing.Process(target=work).start()
            time.sleep(60)
    """
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    environment = os.environ | {"PYTHONPATH": str(TEMPLATE)}
    command = [sys.executable, str(path)]
    parent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    wait_for_end(worker, seconds=10)


def test_strangers_cannot_end_a_job() -> None:
    stranger = textwrap.dedent(
        """
        import json, socket
        host, port, token = json.loads(store.get("peers"))
        for text in (b"failed 1\\n", b"wrong 1 host\\nfailed 1\\n", b"\\xff" * 10_000, b""):
            with socket.create_connection((host, port)) as connection:
                connection.sendall(text)
        time.sleep(2)
        """
    )
    with Job("time.sleep(3)", stranger) as job:
        assert job.statuses() == [0, 0]


@pytest.mark.parametrize(
    ("count", "reason"), [("0", "SLURM has requeued the job"), ("1", "a process failed")]
)
def test_reason_of_a_restart_is_logged(monkeypatch, capsys, count: str, reason: str) -> None:
    for name, value in (("TORCHELASTIC_RESTART_COUNT", count), (RESTART, "")):
        monkeypatch.setenv(name, value)
    distributed._log_restart(0)
    assert capsys.readouterr().out.startswith(f"restarted: {reason}; {count} of MAX_RESTARTS=")


def test_rank_0_may_end_before_the_others(monkeypatch) -> None:
    """Each process gets one report, in whatever order they are done."""
    errors: list = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    server = PeerServer("127.0.0.1")
    server.start()
    links = {}
    for rank in ("0", "1"):
        links[rank] = socket.create_connection(("127.0.0.1", server.port))
        links[rank].sendall(f"{server.token} {rank} host\n".encode())
        assert links[rank].recv(100) == b"welcome\n"
    for rank in links:
        links[rank].sendall(b"done\n")
        time.sleep(0.2)
    for link in links.values():
        assert link.recv(100) == b"done 0 0\n"
        link.close()
    assert not errors


def test_rank_0_out_of_reach_is_reported() -> None:
    store = dist.HashStore()
    port = free_port()
    store.set("peers", json.dumps(["127.0.0.1", port, "token"]))
    with pytest.raises(PeerError, match=f"rank 0 can't be reached at 127.0.0.1, port {port} "):
        PeerMonitor.connect(store, 1, "127.0.0.1")


def test_end_of_rank_0_while_a_process_connects_is_reported() -> None:
    store = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as server:
        store.set("peers", json.dumps([*server.getsockname(), "token"]))
        closing = threading.Thread(target=lambda: server.accept()[0].close())
        closing.start()
        with pytest.raises(PeerError, match="rank 0 closed the connection at the start"):
            PeerMonitor.connect(store, 1, "127.0.0.1")
        closing.join()


def listening(port: int) -> list[str]:
    """Return the addresses at which something listens at that port."""
    lines = subprocess.run(["ss", "-ltnH"], capture_output=True, text=True, check=True).stdout
    addresses = [line.split()[3] for line in lines.splitlines()]
    return [address for address in addresses if address.endswith(f":{port}")]


def test_server_is_waited_for_up_to_a_limit():
    port, stores = free_port(), []
    start = time.monotonic()
    with pytest.raises(dist.DistNetworkError, match="Connection refused"):
        network.wait_for_server("127.0.0.1", port, 2.0)
    assert 1.0 < time.monotonic() - start < 4.0
    serve = partial(network.serve_store, "127.0.0.1", port)
    timer = threading.Timer(1.0, lambda: stores.append(serve()))
    timer.start()
    network.wait_for_server("127.0.0.1", port, 30.0).close()
    timer.join()
    assert stores


def test_store_listens_at_its_address_only() -> None:
    store = network.serve_store("127.0.0.1", 0)
    assert listening(store.port) == [f"127.0.0.1:{store.port}"]
    client = dist.TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=5))
    client.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize(
    ("settings", "ahead", "message"),
    [
        (network._describe("2"), 0, None),
        (network._describe("2"), 10, "^the clock of .* is -10 s from that of 127"),
        ("NNODES=2, torch 2.5", 0, "^NNODES=2, torch .* on .*, but NNODES=2, torch 2.5 at 127.0.0"),
        (f"{network._describe('2')}9", 0, "^NNODES=2, torch .*, torchvision .* on .*, but NNODES"),
    ],
)
def test_different_host_is_refused_by_the_launcher(monkeypatch, settings, ahead, message) -> None:
    server = network.serve_store("127.0.0.1", 0)
    server.set("settings", settings)
    server.set("launch", "that of the first host")
    server.set("time", str(time.time() + ahead))
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "NODE_RANK": "1"}
    monkeypatch.setattr(os, "environ", variables)
    for name in ("_exit_without_store", "_exit_after_failure"):
        monkeypatch.setattr(network, name, lambda *_: None)  # this process
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        network.join_hosts("2")
    is_refused_early = message and "torch" in message
    assert is_refused_early or variables[LAUNCH_ID] == "that of the first host"


def test_missing_torchvision_is_a_difference(monkeypatch) -> None:
    """A host without it would end an elastic job that it joins."""
    monkeypatch.setattr(network, "version", mock.Mock(side_effect=PackageNotFoundError))
    assert network._describe("1:2").endswith(", torchvision missing")


def test_name_that_is_resolved_late_is_waited_for(monkeypatch) -> None:
    """As that of a pod, which Kubernetes' DNS may learn after the pod has started."""
    resolve, calls = socket.getaddrinfo, []

    def resolve_late(host: str, *arguments, **options) -> list:
        calls.append(host)
        if host == "pod-0" and len(calls) < 4:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve("127.0.0.1" if host == "pod-0" else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_late)
    monkeypatch.setattr(socket, "gethostbyname", lambda host: resolve_late(host, 0)[0][4][0])
    variables = {"MASTER_ADDR": "pod-0", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}
    monkeypatch.setattr(os, "environ", variables | {LAUNCH_ID: "1"})
    monkeypatch.setattr(network, "RETRY_S", 0.01)
    served = []
    monkeypatch.setattr(network, "wait_for_server", lambda *_: served.append(True) or sys.exit())
    with pytest.raises(SystemExit):
        network.join_hosts("2")
    assert served and calls[:4] == ["pod-0"] * 4


@pytest.fixture
def slept(monkeypatch):
    """Return the list of how long a thread of the launcher sleeps; it ends by SystemExit.

    The list's `events` are called, one in each sleep.
    """

    class Slept(list):
        events = iter(())

        def sleep(self, seconds: float) -> None:
            self.append((seconds, network.HAS_FAILED.is_set()))
            assert len(self) < 1000, "it waits for ever"
            next(self.events, int)()

    slept = Slept()
    monkeypatch.setattr(network, "time", SimpleNamespace(sleep=slept.sleep, time=time.time))
    monkeypatch.setattr(network, "HAS_FAILED", threading.Event())
    monkeypatch.setattr(os, "_exit", sys.exit)
    return slept


def test_launcher_exits_if_its_processes_outlast_a_failure_elsewhere(
    monkeypatch, slept, capsys
) -> None:
    """Not after one from before it joined, nor if others have been started since."""
    store, processes, killed = dist.HashStore(), {1}, []
    store.set(network.FAILED, "")

    def fail() -> None:
        before = store.get(network.FAILED)
        network.announce_failure(store)
        while store.get(network.FAILED) == before:  # a busy machine starts its thread later
            time.sleep(0.01)

    restart = partial(processes.symmetric_difference_update, {1, 2})
    slept.events = iter([fail, restart, fail])
    monkeypatch.setattr(network, "running_processes", lambda *_: processes.copy())
    monkeypatch.setattr(network, "kill_processes", killed.append)
    fail()
    with pytest.raises(SystemExit, match="1"):
        network._exit_after_failure(store)
    assert slept == [(1.0, False), (30.0, True)] * 2
    assert killed == [{2}]
    assert capsys.readouterr().err == f"error: {network.ELSEWHERE}\n"


@pytest.mark.parametrize(("has_failed", "seconds"), [(False, 10), (True, 310)])
def test_lost_store_ends_a_launcher_that_waits_for_hosts_after_a_failure(
    monkeypatch, slept, capsys, has_failed, seconds
) -> None:
    """Only after torchrun's own wait for hosts, if its processes may have ended well."""
    monkeypatch.setattr(network, "kill_processes", int)
    if has_failed:
        network.HAS_FAILED.set()
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = socket.create_connection(server.getsockname())
        server.accept()[0].close()
    with connection, pytest.raises(SystemExit, match="1"):
        network._exit_without_store(connection, "10.0.0.1")
    assert sum(length for length, _ in slept) == seconds
    assert "error: the store at MASTER_ADDR=10.0.0.1 is lost" in capsys.readouterr().err


def test_failure_has_no_traceback_if_the_store_is_lost(monkeypatch) -> None:
    """As when the launchers of two hosts are stopped one after the other."""

    def lost(*_: str) -> None:
        raise dist.DistNetworkError("Broken pipe")

    uncaught = []
    monkeypatch.setattr(threading, "excepthook", uncaught.append)
    network.announce_failure(SimpleNamespace(set=lost))
    assert not uncaught


@pytest.mark.parametrize("address", ["127.0.0.1", "192.0.2.1"], ids=["own", "of_a_router"])
def test_port_in_use_is_reported(address: str) -> None:
    with socket.create_server(("", 0)) as used:
        port = used.getsockname()[1]
        with pytest.raises(UserError, match=f"MASTER_PORT={port} can't be used on this host"):
            network.serve_store(address, port)


def test_name_with_addresses_of_both_families_has_that_of_ipv4(monkeypatch) -> None:
    """torchrun and gloo take that one, whatever the order of the resolver."""
    resolve = socket.getaddrinfo

    def resolve_both(name: str | None, *args: object, **options: object) -> list:
        ipv6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))
        return [ipv6, *resolve("127.0.0.1" if name == "head" else name, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve_both)
    with network.listen("head", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    assert "." in network.local_address("head")


def test_own_addresses_are_recognized() -> None:
    assert network.is_own_address("127.0.0.1")
    assert network.is_own_address("localhost")
    assert not network.is_own_address("192.0.2.1")
    assert not network.is_own_address("no-such-host.invalid")


def test_exit_does_not_wait_for_a_writer_that_has_not_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing else ends the process if the thread that does so raises."""
    thread = threading.Thread(name=peers.WRITER)
    monkeypatch.setattr(threading, "enumerate", lambda: [thread])
    peers.finish_writing()
