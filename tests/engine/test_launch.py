"""Tests of engine.launch: its signals, its exit status and what it passes to torchrun."""

import os
import platform
import re
import runpy
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fresh import TEMPLATE
from processes import fork_server

# Blocked signals are those of a process that still imports.
READY = "import os, signal, sys, time\n{}\nprint('ready', flush=True)\n{}\n"
WAIT = "time.sleep(60)"
EXIT_THREAD = {"x86_64": 60, "aarch64": 93}.get(platform.machine())  # system call of one thread
UNBLOCK = "signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())"
SAVE = textwrap.dedent(
    """
    def save(number, _):
        time.sleep({seconds})
        print("saved", flush=True)
        os._exit(128 + number)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, save)
    """
)


def be_launcher(argv: list[str], variables: dict[str, str], log: Path, ignored: int) -> None:
    """Make this process ``python -m engine.launch`` with these arguments."""
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    if ignored:
        signal.signal(ignored, signal.SIG_IGN)
    os.environ.update(variables)
    sys.path.insert(0, str(TEMPLATE))
    sys.argv = ["launch.py", *argv]
    runpy.run_module("engine.launch", run_name="__main__")


class Launcher:
    """Launcher of one process, in a fork of a process that has imported torch."""

    def __init__(self, folder: Path, script: str, *options: str, ignored=0, **variables: str):
        self.log, path = folder / "log", folder / "main.py"
        self.log.touch()
        path.write_text(script)
        argv = ["--nproc-per-node=1", *options, str(path)]
        self.process = fork_server().Process(
            target=be_launcher, args=(argv, variables, self.log, ignored)
        )
        self.process.start()

    def wait_for(self, text: str) -> "Launcher":
        deadline = time.monotonic() + 30
        while text not in self.log.read_text():
            assert time.monotonic() < deadline and self.process.is_alive(), self.log.read_text()
            time.sleep(0.02)
        return self

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> tuple[int, str]:
        """Return its exit status and what was printed."""
        self.process.join(30)
        return self.process.exitcode, self.log.read_text().removeprefix("ready\n")


@pytest.fixture
def launch(tmp_path):
    """Start a launcher; return it once its process has printed that it is ready."""
    started = []

    def launch(before, after=WAIT, *options, **settings):
        started.append(Launcher(tmp_path, READY.format(before, after), *options, **settings))
        return started[0].wait_for("ready\n")

    yield launch
    for launcher in started:
        launcher.process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_is_forwarded_and_is_the_exit_status(launch, number):
    launcher = launch(UNBLOCK + SAVE.format(seconds=1))
    launcher.send(number)
    assert launcher.end() == (128 + number, "saved\n")


@pytest.mark.parametrize("names", [("LOCAL_RANK", "RANK"), ("RANK", "LOCAL_RANK")])
def test_processes_are_found_wherever_their_environment_has_the_rank(names):
    """It is the first variable if a launcher that another one has started got it so."""
    from engine.launch import _children, _processes  # here, since the launchers run the module

    sleep = [shutil.which("sleep"), "60"]
    child = subprocess.Popen(sleep, env=dict.fromkeys(names, "0"), start_new_session=True)
    other = subprocess.Popen(sleep, env={"NO_LOCAL_RANK": "0"}, start_new_session=True)
    bare = subprocess.Popen(sleep, env={}, start_new_session=True)
    fork = subprocess.Popen(sleep, env=dict.fromkeys(names, "0"))  # as in a session of another
    everyone = (child, other, bare, fork)
    try:
        assert child.pid in _processes(_children())  # although exec may not have set it yet
        for process in everyone:
            while not Path(f"/proc/{process.pid}/cmdline").read_bytes():
                time.sleep(0.01)
        assert _processes(_children()) & {process.pid for process in everyone} == {child.pid}
    finally:
        for process in everyone:
            process.kill()
            process.wait()


def test_nohup_is_respected(launch):
    launcher = launch(UNBLOCK + SAVE.format(seconds=0), "time.sleep(2)", ignored=signal.SIGHUP)
    launcher.send(signal.SIGHUP)
    assert launcher.end() == (0, "")


@pytest.mark.parametrize(("wait", "text"), [("2", "error: processes are killed"), ("60", "")])
def test_processes_that_do_not_end_are_killed(launch, wait, text):
    """After STOP_WAIT seconds, or at a second signal."""
    launcher = launch(UNBLOCK + SAVE.format(seconds=60), STOP_WAIT=wait)
    launcher.send(signal.SIGINT)
    time.sleep(1.3)
    if wait == "60":
        launcher.send(signal.SIGINT)
    status, said = launcher.end()
    assert status == 128 + signal.SIGINT
    assert said.startswith(text) and bool(said) == bool(text)


def test_launcher_waits_for_the_last_thread_of_its_processes(launch):
    """The kernel releases the files of a process, and its locks, when its last thread has ended."""
    end = f"import ctypes; exit = ctypes.CDLL(None).syscall; last = {EXIT_THREAD}"
    handle = "signal.signal(signal.SIGTERM, lambda *_: exit(last, 0))"
    wait = "import threading; threading.Thread(target=lambda: (time.sleep(3), os._exit(1))).start()"
    launcher = launch("; ".join((UNBLOCK, end, handle, wait)))
    began = time.monotonic()
    launcher.send(signal.SIGTERM)
    assert launcher.end() == (128 + signal.SIGTERM, "")
    assert time.monotonic() - began > 1.5


def test_processes_whose_main_thread_has_ended_are_waited_for(launch):
    """They have no environment any more by which they are found."""
    wait = "import threading; threading.Thread(target=lambda: (time.sleep(5), os._exit(9))).start()"
    end = f"import ctypes; time.sleep(1); ctypes.CDLL(None).syscall({EXIT_THREAD}, 0)"
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    launcher = launch(f"{UNBLOCK}; {ignore}; {wait}", end)
    time.sleep(2)
    began = time.monotonic()
    launcher.send(signal.SIGTERM)
    assert launcher.end() == (128 + signal.SIGTERM, "")
    assert time.monotonic() - began > 1.5


@pytest.mark.slow
def test_processes_that_are_being_started_are_killed_too(launch, tmp_path):
    from engine.launch import _read  # here, since the launchers run the module

    launcher = launch("", WAIT, "--nproc-per-node=48")
    launcher.send(signal.SIGTERM)
    assert launcher.end()[0] == 128 + signal.SIGTERM
    time.sleep(1)
    script = str(tmp_path / "main.py").encode()
    commands = [one for one in os.listdir("/proc") if script in _read(f"{one}/cmdline")]
    assert len(commands) < 6  # of 48: some may have been about to start


def test_processes_that_only_start_end_at_once(launch):
    launcher = launch("")
    began = time.monotonic()
    launcher.send(signal.SIGINT)
    assert launcher.end() == (128 + signal.SIGINT, "")
    assert time.monotonic() - began < 5


def test_interrupt_while_the_launcher_imports_has_no_traceback(tmp_path):
    (tmp_path / "torch.py").write_text("print('ready', flush=True); import time; time.sleep(60)")
    path = os.pathsep.join((str(tmp_path), str(TEMPLATE)))
    launcher = subprocess.Popen(
        [sys.executable, "-m", "engine.launch", "--nproc-per-node=1", "main.py"],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert launcher.stdout.readline() == "ready\n"
    launcher.send_signal(signal.SIGINT)
    assert launcher.communicate(timeout=20) == ("", None)
    assert launcher.returncode == 128 + signal.SIGINT


def test_signals_do_not_interrupt_the_main_thread(launch):
    """torchrun's handlers would raise in Popen.poll, whose lock would then stay acquired."""
    launcher = launch("")
    status = Path(f"/proc/{launcher.process.pid}/status").read_text()
    blocked = int(re.search(r"SigBlk:\s+(\w+)", status)[1], 16)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        assert blocked >> (number - 1) & 1


def test_failure_is_noticed_if_the_parent_ignores_the_end_of_children(launch):
    """After ``trap '' CHLD`` the system keeps no exit statuses, which Popen takes for success."""
    launcher = launch("", "time.sleep(1); sys.exit(3)", ignored=signal.SIGCHLD)
    assert launcher.end()[0] == 3


def test_variables_of_torchrun_have_no_effect(launch):
    assert launch("", "", PET_NNODES="7", PET_MAX_RESTARTS="many").end() == (0, "")


def test_reason_of_a_restart_and_the_id_of_the_launch_are_passed_on(launch):
    names = "('ENGINE_LAUNCH_ID', 'ENGINE_RESTART')"
    show = f"print(*map(os.environ.get, {names}), flush=True); time.sleep(0.5)"
    die = "os.environ['TORCHELASTIC_RESTART_COUNT'] == '1' or os.kill(os.getpid(), 9)"
    status, output = launch("", f"{show}; {die}", "--max-restarts=1").end()
    assert status == 0
    first, _, second = output.splitlines()
    launch_id = first.removesuffix(" None")
    assert re.fullmatch(r"[0-9a-f]{16}", launch_id)
    assert re.fullmatch(rf"{launch_id} process \d+ was ended by SIGKILL", second)


def launch_in_container(folder: Path, script: str, *options: str) -> str:
    """Run a script with the launcher as PID 1 of a namespace, which succeeds; return its output."""
    path = folder / "main.py"
    path.write_text(textwrap.dedent(script))
    namespace = ["unshare", "--pid", "--fork", "--mount-proc"]
    done = subprocess.run(
        [*namespace, sys.executable, "-m", "engine.launch", *options, path],
        env=os.environ | {"PYTHONPATH": str(TEMPLATE)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


needs_namespace = pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a PID namespace")


@needs_namespace
def test_launcher_of_a_container_ignores_and_reaps_orphans(tmp_path):
    """PID 1 becomes the parent of what a training process leaves behind."""
    output = launch_in_container(
        tmp_path,
        """
        import os, subprocess, sys, time
        if "ENGINE_RESTART" in os.environ:
            time.sleep(1)
            print(os.environ["ENGINE_RESTART"])
            print(subprocess.run(["ps", "-eo", "stat,args"], capture_output=True).stdout)
            sys.exit()
        os.environ["ENGINE_IN_RANK"] = "1"  # as engine.distributed.run sets it
        subprocess.Popen(["sleep", "60"])
        subprocess.Popen(["sleep", "1.2"])
        time.sleep(1)
        os.kill(os.getpid(), 9)
        """,
        "--nproc-per-node=1",
        "--max-restarts=1",
    )
    reason, processes = output.splitlines()
    assert re.fullmatch(r"process \d+ was ended by SIGKILL", reason)
    assert "sleep 60" in processes and "defunct" not in processes


@needs_namespace
def test_signal_to_an_orphan_does_not_end_the_job(tmp_path):
    output = launch_in_container(
        tmp_path,
        """
        import os, signal, subprocess, sys, time
        if os.environ["LOCAL_RANK"] == "1":
            sys.exit()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
        os.environ["ENGINE_IN_RANK"] = "1"
        command = "sleep 60 >/dev/null 2>&1 & echo $!"
        orphan = int(subprocess.run(["sh", "-c", command], capture_output=True).stdout)
        reader, writer = os.pipe()
        if not os.fork():
            if not os.fork():  # its environment in /proc has no ENGINE_IN_RANK
                os.write(writer, str(os.getpid()).encode())
                time.sleep(60)
            os._exit(0)
        time.sleep(1)
        os.kill(orphan, 15)
        os.kill(int(os.read(reader, 9)), 15)
        time.sleep(1)
        print("done")
        """,
        "--nproc-per-node=2",
    )
    assert output == "done\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_signal_to_one_process_before_it_can_save_is_not_followed_by_a_restart(launch, name):
    """After its first step, it would save and exit with the same status.

    The launcher looks for its processes five times a second; they import torch for longer.
    """
    stop = f"print('started', flush=True); time.sleep(1); os.kill(os.getpid(), signal.{name})"
    status, output = launch(UNBLOCK, stop, "--max-restarts=3").end()
    assert status == 128 + signal.Signals[name], output
    assert output.count("started") == 1


@pytest.mark.parametrize(("is_stopping", "status"), [(False, None), (False, 2), (True, None)])
def test_nothing_is_restarted_before_the_end_of_a_process_is_handled(is_stopping, status) -> None:
    """torchrun may notice it before the thread that can tell whether the job is to end."""
    from engine.launch import SignalThread  # here, since the launchers run the module

    command = ["sleep", "60"] if status is None else ["sh", "-c", f"exit {status}"]
    process = subprocess.Popen(command)
    try:
        if status:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        signals = SimpleNamespace(known={process.pid}, is_stopping=is_stopping)
        arguments = (signals, "subprocess.Popen", ())
        start = threading.Thread(target=SignalThread.delay_restart, args=arguments)
        start.start()
        start.join(0.2)
        assert start.is_alive() == bool(is_stopping or status)
        signals.known, signals.is_stopping = set(), False
        start.join(5)
        assert not start.is_alive()
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_processes_are_found_while_threads_end() -> None:
    """The files of a thread in /proc vanish when it ends."""
    from engine.launch import _children, _processes  # here, since the launchers run the module

    child = subprocess.Popen(["sleep", "60"], env={"LOCAL_RANK": "0"}, start_new_session=True)
    is_over = threading.Event()

    def start_threads() -> None:
        while not is_over.is_set():
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()

    starters = [threading.Thread(target=start_threads) for _ in range(4)]
    for starter in starters:
        starter.start()
    try:
        for _ in range(2000):  # fewer than 300 were enough
            assert _processes(_children()) == {child.pid}
    finally:
        is_over.set()
        child.kill()
        child.wait()
        for starter in starters:
            starter.join()


@pytest.mark.slow
def test_thread_that_uses_a_store_does_not_abort_the_launcher_at_its_end() -> None:
    code = """
        import os, sys, threading
        import torch.distributed as dist
        from engine import launch

        def use(store):
            while True:
                store.set("time", "0")

        launch._run = lambda nodes, signals: (3, "reason")
        sys.argv = ["launch.py", "--nproc-per-node=1"]
        statuses = set()
        for _ in range(20):
            if not os.fork():
                store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                threading.Thread(target=use, args=(store,), daemon=True).start()
                launch.main()
            statuses.add(os.waitstatus_to_exitcode(os.wait()[1]))
        print(statuses)
        os._exit(0)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=TEMPLATE,
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("{3}\n", "error: reason\n" * 20)


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (35, "signal 35")])
def test_failure_names_a_signal_that_may_have_no_name(number, name):
    """In another process: the launchers of the other tests fork this one."""
    code = """
        import os, sys
        from types import SimpleNamespace
        from engine.launch import _describe_failure

        received = SimpleNamespace(si_status=int(sys.argv[1]), si_code=os.CLD_KILLED, si_pid=7)
        print(_describe_failure(received))
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(int(number))]
    done = subprocess.run(command, cwd=TEMPLATE, capture_output=True, text=True, check=True)
    assert done.stdout == f"process 7 was ended by {name}\n"
