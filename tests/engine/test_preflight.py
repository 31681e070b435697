"""engine.diagnostics.preflight: host checks, child processes and the report of --check."""

import json
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from engine import module_command
from engine.diagnostics import preflight
from engine.diagnostics.preflight import (
    ERROR,
    HOST,
    MAIN,
    OK,
    PENDING,
    RANK_0,
    WARNING,
    check_driver,
    check_links,
    check_open_files,
    check_python,
    check_rendezvous,
    collect,
    make_commands,
)
from fresh import TEMPLATE
from parameters import mostly_slow


def test_exception_in_a_check_is_an_error(run_check):
    def broken() -> Iterator[tuple[str, str]]:
        yield OK, "so far"
        raise ZeroDivisionError("by zero")

    assert run_check(broken) == (ERROR, "the check failed with ZeroDivisionError: by zero")


# What needs no torch


def test_python_is_shown(run_check):
    assert run_check(check_python) == (OK, f"{platform.python_version()} at {sys.executable}")


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch) -> Callable:
    """Return a function that replaces nvidia-smi with a script."""

    def put(script: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        preflight.gpus.cache_clear()

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    yield put
    preflight.gpus.cache_clear()


TWO = "printf 'NVIDIA H200, 570.86.15\\nNVIDIA H200, 570.86.15\\n'"


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        (TWO, OK, "570.86.15, 2 × NVIDIA H200"),
        ("", WARNING, "training runs on the CPU"),
        ("echo Driver/library version mismatch; exit 18", ERROR, "version mismatch): reboot"),
        ("exec sleep 5", ERROR, "does not answer"),
    ],
    ids=["good", "no_gpu", "failing", "hanging"],
)
def test_driver(run_check, nvidia_smi, monkeypatch, script, status, words):
    monkeypatch.setattr(preflight, "DRIVER_TIMEOUT_S", 0.5)
    nvidia_smi(script)
    found = run_check(check_driver)
    assert found[0] == status and words in found[1]


@pytest.mark.parametrize("is_forbidden", [False, True])
def test_missing_driver_is_a_warning(run_check, monkeypatch, tmp_path, is_forbidden):
    monkeypatch.setenv("PATH", str(tmp_path))
    if is_forbidden:
        (tmp_path / "nvidia-smi").touch(0o644)
    preflight.gpus.cache_clear()
    assert run_check(check_driver)[0] == WARNING
    assert run_check(check_links) == (PENDING, "")
    preflight.gpus.cache_clear()


TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \t{0}\tPIX\t0-47\t0
GPU1\t{0}\t X \tSYS\t0-47\t0
NIC0\tPIX\tSYS\t X \t\t
"""


@pytest.mark.parametrize(("link", "status"), [("NV18", OK), ("PHB", OK), ("SYS", WARNING)])
def test_links(run_check, nvidia_smi, monkeypatch, link, status):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvidia_smi(f"if [ $1 = topo ]; then cat <<'E'\n{TOPOLOGY.format(link)}\nE\nelse {TWO}; fi")
    found = run_check(check_links)
    assert found[0] == status and link in found[1]
    assert status == OK or "GPU0–GPU1" in found[1] and "CUDA_VISIBLE_DEVICES" in found[1]


@pytest.mark.parametrize(
    ("visible", "status"), [("1", PENDING), ("0,1", WARNING), ("GPU-8932f937", WARNING)]
)
def test_links_are_those_of_the_visible_gpus(run_check, nvidia_smi, monkeypatch, visible, status):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvidia_smi(f"if [ $1 = topo ]; then cat <<'E'\n{TOPOLOGY.format('SYS')}\nE\nelse {TWO}; fi")
    assert run_check(check_links)[0] == status


def test_low_limit_of_open_files_is_a_warning(run_check, monkeypatch):
    for hard, fix in [(4096, "ulimit -n 4096"), (-1, "ulimit -n 4096"), (256, "have the hard")]:
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (256, hard))
        status, text = run_check(check_open_files)
        assert status == WARNING and fix in text


def test_master_address_of_another_host_is_an_error(run_check, two_hosts, monkeypatch):
    two_hosts.listen()  # as rank 0 of the check does
    assert run_check(check_rendezvous)[0] == OK
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    status, text = run_check(check_rendezvous)
    assert status == ERROR and "use an address of this host" in text
    monkeypatch.setenv("NODE_RANK", "1")
    assert run_check(check_rendezvous)[0] == OK


def test_unknown_master_address_is_an_error(run_check, two_hosts, monkeypatch):
    def fails(host: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", fails)
    status, text = run_check(check_rendezvous)
    assert status == ERROR and "MASTER_ADDR=127.0.0.1" in text and "use an IP address" in text


# Child processes


def child(code: str) -> tuple[list[str], dict]:
    """Return the command and the environment of a child that runs the code."""
    functions = "from engine.diagnostics.preflight import run_checks, send"
    code = f"import os, signal, sys, time; {functions}; {code}"
    return [sys.executable, "-c", code], os.environ | {"PYTHONPATH": str(TEMPLATE)}


GOOD = child("send('torch', 'ok', 'good')")


@pytest.mark.parametrize(
    ("who", "code", "name", "words"),
    mostly_slow(
        [
            (
                RANK_0,
                "raise ImportError('libcudart.so.12: no such file')",
                "torch",
                "libcudart.so.12",
            ),
            (
                RANK_0,
                "os.kill(os.getpid(), signal.SIGSEGV)",
                "torch",
                "can't be imported (no output",
            ),
            (RANK_0, "os.kill(os.getpid(), 9)", RANK_0, "ended by SIGKILL (no output)"),
            (RANK_0, "time.sleep(60)", "torch", "no answer"),
            (RANK_0, "send('x', 'ok', ''); os.kill(os.getpid(), 11)", RANK_0, "ended by SIGSEGV"),
            (
                RANK_0,
                "send('x', 'ok', ''); print('NCCL WARN Connect failed'); print('bye'); sys.exit(1)",
                RANK_0,
                "ended with status 1 (NCCL WARN Connect failed)",
            ),
            (
                MAIN,
                "print('error: --lr x is no number'); sys.exit(2)",
                "flags",
                "--lr x is no number",
            ),
            (MAIN, "import no_such_module", "flags", "No module named 'no_such_module'): correct"),
            (MAIN, "time.sleep(60)", "flags", "no answer"),
            (
                RANK_0,
                "send('all-reduce', 'error', 'it hangs: try'); time.sleep(60)",
                "all-reduce",
                "try",
            ),
            (
                RANK_0,
                "run_checks({'CUDA': lambda: time.sleep(60)})",
                "CUDA",
                "the check did not finish",
            ),
        ],
        fast=8,
    ),
)
def test_crash_or_hang_is_an_error(who, code, name, words):
    start = time.monotonic()
    limit_s = 3 if "sleep" in code else 60
    found = collect({RANK_0: GOOD, MAIN: GOOD} | {who: child(code)}, limit_s)
    assert time.monotonic() - start < 30
    status, text = found[who, name]
    assert status == ERROR and words in text
    assert "Traceback" not in text
    assert (ERROR, who, name) not in [
        (status, *key) for key, (status, _) in found.items() if key[1] != name
    ]


def test_failed_import_of_torch_is_reported_once():
    broken = child("raise ImportError('libcudart.so.12')")
    found = collect({RANK_0: broken, "rank 1": broken, MAIN: broken})
    assert list(found) == [(RANK_0, "torch")]


def test_pending_and_empty_results_are_not_reported():
    silent = child("run_checks({'links': lambda: iter(())})")
    waiting = child("run_checks({'all-reduce': lambda: time.sleep(60)})")
    assert collect({RANK_0: silent, "rank 1": waiting}) == {}


def has_ended(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    return not stat.exists() or " Z " in stat.read_text()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_no_child_is_left_running(tmp_path):
    pid = tmp_path / "pid"
    begun = f"open({str(pid)!r}, 'w').write(str(os.getpid())); send('x', 'ok', '')"
    wait = f"\nwhile not os.path.exists({str(pid)!r}): time.sleep(0.1)\n"
    first = child(f"{wait}time.sleep(1); send('x', 'ok', '')")
    collect({RANK_0: first, "rank 1": child(f"{begun}; time.sleep(60)")})
    wait_until(partial(has_ended, int(pid.read_text())))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_signal_leaves_no_child(tmp_path, number):
    pid = tmp_path / "pid"
    script = tmp_path / "main.py"
    script.write_text(
        "import os, time\nfrom pathlib import Path\n"
        f"Path('{pid}.tmp').write_text(str(os.getpid()))\n"
        f"os.rename('{pid}.tmp', {str(pid)!r})\ntime.sleep(60)\n"
    )
    command = ["env", "--default-signal=INT"]  # which a background job ignores
    command += [sys.executable, "-m", "engine.diagnostics.preflight", "--nproc-per-node=0"]
    environment = os.environ | {"PYTHONPATH": str(TEMPLATE)}
    with subprocess.Popen([*command, script], env=environment, cwd=tmp_path) as process:
        wait_until(pid.exists)
        process.send_signal(number)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    wait_until(partial(has_ended, int(pid.read_text())))


def test_another_signal_does_not_interrupt_the_end_of_the_children():
    script = "from engine.diagnostics.preflight import SIGNALS, _exit\nimport os, signal\n"
    script += "try: _exit(15, None)\nfinally: [os.kill(os.getpid(), number) for number in SIGNALS]"
    done = subprocess.run([sys.executable, "-c", script], cwd=TEMPLATE, check=False)
    assert done.returncode == 128 + signal.SIGTERM


def test_commands_of_two_hosts(two_hosts, monkeypatch):
    monkeypatch.setenv("NODE_RANK", "1")
    monkeypatch.setenv("RANK", "7")  # of a launcher; has no effect here
    commands = make_commands("main.py", 4, ["--check"])
    assert list(commands) == [HOST, *(f"rank {local}" for local in range(4)), MAIN]
    _, environment = commands["rank 2"]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "NODE_RANK")
    assert [environment[name] for name in names] == ["6", "2", "8", "4", "127.0.0.1", "1"]
    assert environment["MASTER_PORT"] == os.environ["MASTER_PORT"]
    assert "RANK" not in commands[MAIN][1]


def test_children_ignore_modules_of_the_current_folder(tmp_path):
    (tmp_path / "engine.py").write_text("raise SystemExit('a stray module')\n")
    commands = make_commands(str(TEMPLATE / "main.py"), 1, [])
    command, environment = commands[HOST]
    environment |= {preflight.RESULTS: str(tmp_path / "results")}
    subprocess.run(command, cwd=tmp_path, env=environment, check=False, timeout=120)
    assert (tmp_path / "results").is_file()
    assert commands["rank 0"][0] == module_command("engine.diagnostics.rank_checks")


# Complete preflight


@pytest.fixture(scope="module")
def check(bake):
    """Return a function that runs ``./run.sh --check`` in a generated project."""
    default = bake()

    def check(*flags: str, project=default, **environment: str) -> subprocess.CompletedProcess:
        settings = {"PYTHON": sys.executable, "NPROC": "2", "CHECK_WAIT": "100"}
        return subprocess.run(
            [str(project / "run.sh"), "--check", *flags],
            env=os.environ | settings | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return check


@pytest.mark.slow
def test_check_succeeds_on_this_host(check, tmp_path):
    done = check("--json", "--workers", "1", "--output", str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] is True
    assert {one["status"] for one in found["checks"]} <= {"ok", "warning"}
    names = [one["name"] for one in found["checks"]]
    assert len(names) == len(set(names))
    assert set(names) >= {
        *("Python", "driver", "open files", "torch", "CUDA", "NCCL", "all-reduce"),
        *("flags", "Apex", "CPU", "output", "data", "shared memory"),
    }
    texts = {one["name"]: one["text"] for one in found["checks"]}
    assert str(tmp_path) in texts["output"]
    assert "--workers 1" in texts["CPU"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_check_with_fsdp_divides_the_memory_by_the_processes(check, bake, tmp_path):
    project = bake(ddp="fsdp", opt_level="O0", sync_bn=False)
    flags = ("--json", "--arch", "resnet50", "--output", str(tmp_path))
    done = check(*flags, project=project, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    texts = {one["name"]: one["text"] for one in json.loads(done.stdout)["checks"]}
    assert "2 ranks" in texts["all-reduce"]
    assert "parameters need 0.28 GiB for each process" in texts["memory"]


@pytest.mark.gpu
def test_check_succeeds_on_a_host_with_gpus(check, tmp_path):
    gpus = torch.cuda.device_count()
    done = check("--json", "--output", str(tmp_path), NPROC=str(gpus))
    assert done.returncode == 0, done.stdout + done.stderr
    texts = {one["name"]: one["text"] for one in json.loads(done.stdout)["checks"]}
    assert f"{gpus} ranks" in texts["all-reduce"] and "over nccl" in texts["all-reduce"]
    for rank in range(gpus):
        assert texts[f"rank {rank}"].startswith(f"cuda:{rank}, ")
    assert ("peer access" in texts) == ("links" in texts) == (gpus > 1)


@pytest.mark.gpu
def test_too_few_gpus_are_an_error(check, tmp_path):
    gpus = torch.cuda.device_count()
    done = check("--output", str(tmp_path), NPROC=str(gpus + 1))
    assert done.returncode == 1
    assert f"NPROC={gpus} ./run.sh" in done.stdout
    assert done.stdout.count("processes were started on a machine with") == 1


@pytest.mark.parametrize(("terminal", "symbol"), [("utf-8", "✗"), ("ascii", "error")])
def test_broken_torch_is_an_error(check, tmp_path, terminal, symbol):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudnn.so.9: no file')")
    done = check(PYTHONPATH=str(tmp_path), PYTHONIOENCODING=terminal)
    assert done.returncode == 1
    assert done.stderr == ""
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(symbol)]
    assert line.startswith(f"{symbol} torch") and "libcudnn.so.9: no file" in line


def test_import_needs_no_torch():
    code = "import sys, engine.diagnostics.preflight; print('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(TEMPLATE)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert done.stdout == "False\n"
