"""./run.sh --check: every check can fail, and whatever breaks or hangs becomes a line."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from apex_native import amp
from engine import backend, checkpoint, distributed, doctor, examine
from engine.doctor import BEGUN, MACHINE, MAIN, OK, RANK_0, WARNING, WRONG
from engine.errors import UserError

PROJECT = Path(__file__).parent.parent
GIB = 2**30


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Runs one check, and returns its mark and its text."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def look(check: Callable, *arguments: object) -> tuple[str, str]:
        told = []
        monkeypatch.setattr(doctor, "tell", lambda name, mark, text: told.append((mark, text)))
        went_well = doctor.look({"name": partial(check, *arguments)})
        assert told[0] == (BEGUN, "it did not end")
        assert went_well == (told[-1][0] != WRONG)
        return told[-1]

    return look


def test_a_check_that_breaks_is_a_line(look):
    def broken() -> Iterator[tuple[str, str]]:
        yield OK, "so far"
        raise ZeroDivisionError("by zero")

    assert look(broken) == (WRONG, "it failed with ZeroDivisionError: by zero")


# What needs no torch


def test_an_old_python(look, monkeypatch):
    assert look(doctor.python)[0] == OK
    monkeypatch.setattr(doctor, "OLDEST_PYTHON", (99, 0))
    mark, text = look(doctor.python)
    assert mark == WRONG and "PYTHON=" in text


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch) -> Callable:
    """Puts a script in the place of nvidia-smi."""

    def put(script: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        doctor.gpus.cache_clear()

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    yield put
    doctor.gpus.cache_clear()


TWO = "printf 'NVIDIA H200, 570.86.15\\nNVIDIA H200, 570.86.15\\n'"


@pytest.mark.parametrize(
    ("script", "mark", "words"),
    [
        (TWO, OK, "570.86.15, 2 × NVIDIA H200"),
        ("", WARNING, "training runs on the CPU"),
        ("echo Driver/library version mismatch; exit 18", WRONG, "version mismatch): reboot"),
        ("exec sleep 5", WRONG, "does not answer"),
    ],
    ids=["good", "no_gpu", "failing", "hanging"],
)
def test_the_driver(look, nvidia_smi, monkeypatch, script, mark, words):
    monkeypatch.setattr(doctor, "DRIVER_S", 0.5)
    nvidia_smi(script)
    found = look(doctor.driver)
    assert found[0] == mark and words in found[1]


def test_no_driver(look, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    doctor.gpus.cache_clear()
    assert look(doctor.driver)[0] == WARNING
    assert look(doctor.links) == (BEGUN, "")
    doctor.gpus.cache_clear()


TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \t{0}\tPIX\t0-47\t0
GPU1\t{0}\t X \tSYS\t0-47\t0
NIC0\tPIX\tSYS\t X \t\t
"""


@pytest.mark.parametrize(("link", "mark"), [("NV18", OK), ("PHB", OK), ("SYS", WARNING)])
def test_links(look, nvidia_smi, link, mark):
    nvidia_smi(f"if [ $1 = topo ]; then cat <<'E'\n{TOPOLOGY.format(link)}\nE\nelse {TWO}; fi")
    found = look(doctor.links)
    assert found[0] == mark and link in found[1]
    assert mark == OK or "GPU0–GPU1" in found[1] and "CUDA_VISIBLE_DEVICES" in found[1]


def test_a_low_limit_of_open_files(look, monkeypatch):
    for hard, remedy in [(4096, "ulimit -n 4096"), (-1, "ulimit -n 4096"), (256, "have the hard")]:
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (256, hard))
        mark, text = look(doctor.open_files)
        assert mark == WARNING and remedy in text


@pytest.fixture
def two_machines(monkeypatch) -> socket.socket:
    """The environment of the first of two machines, and a socket at the port that it names."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = str(other.getsockname()[1])
        for name, value in [("NNODES", "2"), ("NODE_RANK", "0"), ("MASTER_PORT", port)]:
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        yield other


def test_address_already_in_use(look, two_machines, monkeypatch):
    assert look(doctor.rendezvous)[0] == OK
    two_machines.listen()
    mark, text = look(doctor.rendezvous)
    assert mark == WRONG and "free port" in text
    monkeypatch.setenv("NODE_RANK", "1")
    assert look(doctor.rendezvous)[0] == OK


def test_an_unknown_first_machine(look, two_machines, monkeypatch):
    def fails(host: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", fails)
    mark, text = look(doctor.rendezvous)
    assert mark == WRONG and "MASTER_ADDR=127.0.0.1" in text and "give its IP" in text


# With torch, in a rank


def test_an_old_torch(look, monkeypatch):
    assert look(examine.torch_itself)[0] == OK
    monkeypatch.setattr(torch, "__version__", "2.5.1+cu121")
    mark, text = look(examine.torch_itself)
    assert mark == WRONG and "install 2.6 or later" in text


def raising(error: Exception) -> Callable:
    def raises(*arguments: object, **options: object) -> None:
        raise error

    return raises


TOO_OLD = RuntimeError("The NVIDIA driver on your system is too old (found 11040). Please update.")


@pytest.mark.parametrize(
    ("built", "visible", "init", "mark", "words"),
    [
        (None, None, None, WRONG, "built without CUDA"),
        ("13.2", "", None, WARNING, "CUDA_VISIBLE_DEVICES hides every GPU"),
        ("13.2", None, raising(TOO_OLD), WRONG, "too old (found 11040): update the driver"),
        ("13.2", "GPU-wrong", print, WRONG, "CUDA_VISIBLE_DEVICES (GPU-wrong)"),
    ],
    ids=["cpu_build", "hidden", "old_driver", "unknown"],
)
def test_a_gpu_that_torch_does_not_see(look, monkeypatch, built, visible, init, mark, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "gpus", lambda: [["NVIDIA H200", "570"]])
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = look(examine.cuda)
    assert found[0] == mark and words in found[1]


def test_a_torch_without_nccl(look, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert look(examine.nccl)[0] == WRONG


def test_gpus_that_do_not_reach_each_other(look, monkeypatch):
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, two: True)
    assert look(examine.peers, 3)[0] == OK
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, two: (one, two) != (1, 2))
    mark, text = look(examine.peers, 3)
    assert mark == WARNING and text.startswith("GPU1–GPU2 do not reach")
    assert look(examine.peers, 1) == (BEGUN, "")


@pytest.fixture
def a_gpu(monkeypatch) -> torch.device:
    """The CPU, in the clothes of a GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (12, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (139 * GIB, 140 * GIB))
    return torch.device("cpu")


def test_a_gpu_that_others_use(look, monkeypatch, a_gpu):
    assert look(examine.own_device, a_gpu)[0] == OK
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3 * GIB, 140 * GIB))
    mark, text = look(examine.own_device, a_gpu)
    assert mark == WARNING and "3.0 of 140.0 GiB free: others use it" in text


def test_a_torch_for_other_gpus(look, monkeypatch, a_gpu):
    error = RuntimeError("CUDA error: no kernel image is available\nCUDA kernel errors might be …")
    monkeypatch.setattr(torch, "ones", raising(error))
    mark, text = look(examine.own_device, a_gpu)
    assert mark == WRONG and "no kernel image is available)" in text
    assert "sm_120; this one is for sm_80 sm_90" in text


@pytest.fixture
def meeting(monkeypatch) -> None:
    """Where the ranks of a test meet; they wait half a second for each other."""
    monkeypatch.setattr(examine, "WAIT_S", 0.5)
    monkeypatch.setenv("MASTER_PORT", free_port())
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def met(devices: list[str]) -> list[str]:
    """What each rank says of a meeting of ranks with these devices."""
    said = [""] * len(devices)

    stores = []  # rank 0's serves the others

    def meet(rank: int) -> None:
        try:
            stores.append(examine._meet(rank, 2, devices[rank]))
        except UserError as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=meet, args=[rank]) for rank in range(len(devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


@pytest.mark.parametrize("devices", [["GPU-8a", "GPU-9b"], ["", ""], ["GPU-8a", "GPU-8a"]])
def test_every_rank_on_gpu_0(meeting, monkeypatch, devices):
    monkeypatch.setattr(examine, "WAIT_S", 10)  # for a machine that is busy
    one, two = met(devices)
    assert one == two
    shared = "ranks 0 and 1 have the same GPU (GPU-8a)"
    assert (shared in one) == (devices[1] == "GPU-8a") == bool(one)


def test_a_rank_that_does_not_come(meeting):
    assert "rank 1 of 2 did not come" in met([""])[0]


def test_a_machine_that_does_not_come(meeting, monkeypatch):
    monkeypatch.setenv("NNODES", "2")
    assert "machine 1 of 2 did not come" in met([""])[0]


def test_machines_with_other_numbers_of_processes(monkeypatch):
    monkeypatch.setenv("NNODES", "2")
    store = dist.HashStore()
    store.set("processes 0", "2")
    store.set("processes 1", "1")
    assert examine._problem(store, 4).startswith("machines start 2, 1 processes: they can train")


def test_a_first_machine_out_of_reach(look, meeting):
    device = torch.device("cpu")
    assert look(examine.exchange, 1, 1, 2, device) == (BEGUN, "")  # rank 0 was on this one
    mark, text = look(examine.exchange, 1, 0, 2, device)
    assert mark == WRONG and "MASTER_ADDR=127.0.0.1" in text and "out of reach" in text


def test_an_all_reduce(look, meeting, monkeypatch):
    device = torch.device("cpu")
    try:
        mark, text = look(examine.exchange, 0, 0, 1, device)
        assert mark == OK and text.startswith("16 MiB over gloo in ")
    finally:
        dist.destroy_process_group()
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.add_(1))
    try:
        mark, text = look(examine.exchange, 0, 0, 1, device)
        assert mark == WRONG and "NCCL_P2P_DISABLE=1" in text
    finally:
        dist.destroy_process_group()


def test_ranks_that_do_not_reach_each_other(look, monkeypatch):
    error = RuntimeError("NCCL error\nLast error:\nConnect to 10.0.0.2 failed\nmore")
    monkeypatch.setattr(examine, "_meet", lambda *_: dist.HashStore())
    monkeypatch.setattr(distributed, "choose_interface", lambda: None)
    monkeypatch.setattr(dist, "init_process_group", raising(error))
    mark, text = look(examine.exchange, 0, 0, 2, torch.device("cpu"))
    assert mark == WRONG and "(Connect to 10.0.0.2 failed): " in text
    assert "NCCL_DEBUG=INFO" in text and "NCCL_SOCKET_IFNAME" in text


def test_a_slow_all_reduce(look, monkeypatch):
    def slow(tensor: torch.Tensor) -> None:
        time.sleep(0.05)
        tensor.fill_(3)  # 1 + 2

    store = dist.HashStore()
    store.set("done 1", "")
    monkeypatch.setattr(examine, "_meet", lambda *_: store)
    monkeypatch.setattr(distributed, "choose_interface", lambda: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "all_reduce", slow)
    mark, text = look(examine.exchange, 0, 0, 2, torch.device("cpu"))
    assert mark == WARNING and "which is slow" in text


def test_what_may_hang_says_before_what_it_means():
    mark, text = next(examine.exchange(0, 0, 2, torch.device("cuda")))
    assert mark == WRONG and "NCCL_DEBUG=INFO" in text and "--ipc=host" in text
    mark, text = next(examine.data(args(data="/nfs/images"), None))
    assert mark == WARNING and "/nfs/images is not counted yet" in text


def test_more_processes_than_gpus(monkeypatch):
    told = []
    monkeypatch.setattr(doctor, "tell", lambda *line: told.append(line))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in [("RANK", "1"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")]:
        monkeypatch.setenv(name, value)
    for name, value in [("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")]:
        monkeypatch.setenv(name, value)
    examine.main()
    ((name, mark, text),) = told
    assert mark == WRONG and "NPROC=1 ./run.sh" in text


# In main.py

ARGS = Namespace(
    data=None,
    dummy=False,
    workers=1,
    batch_size=32,
    output=Path("runs"),
    resume=None,
    opt_level="O1",
    backend="auto",
    compile=False,
)


def args(**changed: object) -> Namespace:
    return Namespace(**vars(ARGS) | changed)


WHOLE = {
    "__init__.py": "",
    "amp.py": "def initialize(): pass\ndef scale_loss(): pass",
    "parallel.py": "class DistributedDataParallel: pass\ndef convert_syncbn_model(): pass",
    "optimizers.py": "class FusedAdam: pass",
}
"""A package that looks like a whole Apex."""


@pytest.mark.parametrize(
    ("package", "extensions", "gpu", "mark", "words"),
    [
        ({}, [], False, OK, "Apex is not installed"),
        ({"__init__.py": ""}, [], True, WARNING, "not NVIDIA's Apex: pip uninstall apex"),
        ({"__init__.py": "import velruse"}, [], True, WARNING, "or pip uninstall apex"),
        (WHOLE | {"amp.py": ""}, ["amp_C"], True, OK, "no longer has amp.initialize, amp.scale_"),
        (WHOLE, [], True, WARNING, "amp_C is missing); Apex here has amp.init"),
        (WHOLE, ["amp_C", "apex_C"], True, WARNING, "but no syncbn: build Apex with"),
        (WHOLE, ["amp_C", "apex_C", "syncbn"], False, OK, "Apex needs a GPU; Apex here has"),
        (WHOLE, ["amp_C", "apex_C", "syncbn"], True, OK, "real Apex; Apex here has amp.init"),
    ],
    ids=["none", "unrelated", "broken", "new", "python_only", "slow", "no_gpu", "whole"],
)
def test_apex(look, monkeypatch, tmp_path, package, extensions, gpu, mark, words):
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]
    for name in backend.EXTENSIONS:
        sys.modules[name] = sys if name in extensions else None  # None: it can't be imported
    if not package:
        sys.modules["apex"] = None
    (tmp_path / "apex").mkdir()
    for name, text in package.items():
        (tmp_path / "apex" / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    found = look(examine.apex, args())
    assert found[0] == mark and words in found[1]
    if "real Apex" not in found[1]:
        found = look(examine.apex, args(backend="apex"))
        assert found[0] == WRONG and "--backend native" in found[1]


@pytest.mark.parametrize(
    ("cores", "threads", "workers", "limit", "mark", "words"),
    [
        (8, 8, 8, "max 100000", OK, "2 × (cores 8, threads 8, --workers 8)"),
        (8, 8, 9, None, WARNING, "--workers 8"),
        (8, 1, 0, None, WARNING, "OMP_NUM_THREADS"),
        (1, 8, 0, None, WARNING, "OMP_NUM_THREADS"),
        (8, 8, 8, "200000 100000", WARNING, "may use 2 cores in all"),
    ],
    ids=["good", "workers", "one_thread", "many_threads", "container"],
)
def test_cpu(look, monkeypatch, tmp_path, cores, threads, workers, limit, mark, words):
    monkeypatch.setattr(distributed, "cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(examine, "CPU_LIMIT", tmp_path / "cpu.max")
    if limit:
        (tmp_path / "cpu.max").write_text(f"{limit}\n")
    found = look(examine.cpu, args(workers=workers))
    assert found[0] == mark and words in found[1]


@pytest.fixture
def free(monkeypatch) -> Callable:
    """Makes every disk have so many bytes free."""

    def free(size: float) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Namespace(free=size))

    return free


@pytest.mark.parametrize(
    ("size", "mark", "words"),
    [(99 * GIB, OK, "99.0 GiB"), (5 * GIB, WARNING, "little"), (GIB / 2, WRONG, "make room")],
)
def test_room_for_the_output(look, tmp_path, free, size, mark, words):
    free(size)
    found = look(examine.output, args(output=tmp_path / "new" / "run"))
    assert found[0] == mark and words in found[1]
    assert not (tmp_path / "new").exists()


def test_an_output_that_can_not_be_written(look):
    mark, text = look(examine.output, args(output=Path("/proc/runs")))
    assert mark == WRONG and "choose another --output" in text


def test_an_output_that_holds_a_run(look, tmp_path):
    (tmp_path / "last.pt").touch()
    mark, text = look(examine.output, args(output=tmp_path))
    assert mark == WARNING and "--resume auto" in text
    assert "holds a run" not in look(examine.output, args(output=tmp_path, resume="auto"))[1]


def test_a_batch_of_one(look, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["main.py", "--check", "--batch-size=1"])
    mark, text = look(examine.flags, args(batch_size=1))
    assert mark == WARNING and text.startswith("--batch-size=1: batch norm") and "take 2" in text
    assert look(examine.flags, args(batch_size=2)) == (OK, "--batch-size=1")


def test_what_is_to_be_resumed(look, tmp_path):
    assert look(examine.resumed, args()) == (BEGUN, "")
    how = args(output=tmp_path, resume=Path("auto"))
    assert look(examine.resumed, how) == (OK, f"{tmp_path} has no checkpoint: the run begins")
    mark, text = look(examine.resumed, args(resume=tmp_path / "missing.pt"))
    assert mark == WRONG and "there is no such file" in text
    model = torch.nn.Linear(2, 2)
    parts = model, torch.optim.SGD(model.parameters()), amp
    state = checkpoint.collect(*parts) | vars(checkpoint.Progress(epoch=3, step=40)) | {"ranks": []}
    checkpoint.write(tmp_path / "step-40.pt", state)
    assert look(examine.resumed, how) == (OK, f"{tmp_path}/step-40.pt, after 3 epochs, 40 steps")
    (tmp_path / "last.pt").write_bytes(b"torn")
    mark, text = look(examine.resumed, how)
    assert mark == WARNING and "step-40.pt serves: " in text and "last.pt: it is torn" in text
    (tmp_path / "step-40.pt").unlink()
    mark, text = look(examine.resumed, how)
    assert mark == WRONG and "no checkpoint in" in text


class Set(list):
    classes = ("cat", "dog")


IMAGE = torch.zeros(3, 224, 224, dtype=torch.uint8), 1


def test_data(look):
    sets = Set([IMAGE] * 6), Set([IMAGE])
    mark, text = look(examine.data, args(), lambda: sets)
    assert mark == OK and "6 samples to train on, 1 to validate on, 2 classes" in text
    assert "uint8 3 × 224 × 224" in text
    assert look(examine.data, args(dummy=True), None) == (OK, "synthetic")
    assert look(examine.data, args(), lambda: (sets[0], Set()))[0] == WRONG
    wrong = raising(UserError("--data x: there is no folder x"))
    assert look(examine.data, args(), wrong) == (WRONG, "--data x: there is no folder x")
    assert look(examine.data, args(), raising(OSError("stale")))[0] == WRONG


def test_bus_error_in_a_loader(look, free, monkeypatch):
    sets = Set([IMAGE]), Set([IMAGE])
    free(64 * 2**20)  # what Docker gives a container
    mark, text = look(examine.shared_memory, args(workers=8, batch_size=256), lambda: sets)
    assert mark == WRONG and "64 MiB free, batches take up to 1176" in text
    assert "--ipc=host" in text
    assert look(examine.shared_memory, args(workers=0), lambda: sets)[0] == OK
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    mark, text = look(examine.shared_memory, args(workers=0), lambda: sets)
    assert mark == WARNING and "NCCL" in text


# The processes


def child(code: str) -> tuple[list[str], dict]:
    code = f"import os, signal, sys, time; from engine.doctor import look, tell; {code}"
    return [sys.executable, "-c", code], os.environ | {"PYTHONPATH": str(PROJECT)}


GOOD = child("tell('torch', '✓', 'good')")


@pytest.mark.parametrize(
    ("who", "code", "name", "words"),
    [
        (RANK_0, "raise ImportError('libcudart.so.12: no such file')", "torch", "libcudart.so.12"),
        (RANK_0, "os.kill(os.getpid(), signal.SIGSEGV)", "torch", "can't be imported (without a"),
        (RANK_0, "time.sleep(60)", "torch", "no answer"),
        (RANK_0, "tell('x', '✓', ''); os.kill(os.getpid(), 11)", RANK_0, "ended by SIGSEGV"),
        (
            RANK_0,
            "tell('x', '✓', ''); print('NCCL WARN Connect failed'); print('bye'); sys.exit(1)",
            RANK_0,
            "ended with status 1 (NCCL WARN Connect failed)",
        ),
        (MAIN, "print('error: --lr x is no number'); sys.exit(2)", "flags", "--lr x is no number"),
        (MAIN, "import no_such_module", "flags", "No module named 'no_such_module'): mend"),
        (MAIN, "time.sleep(60)", "flags", "no answer"),
        (RANK_0, "tell('all-reduce', '✗', 'it hangs: try'); time.sleep(60)", "all-reduce", "try"),
        (RANK_0, "look({'CUDA': lambda: time.sleep(60)})", "CUDA", "it did not end"),
    ],
)
def test_what_breaks_or_hangs_is_a_line(who, code, name, words):
    start = time.monotonic()
    limit_s = 3 if "sleep" in code else 60
    found = doctor.gather({RANK_0: GOOD, MAIN: GOOD} | {who: child(code)}, limit_s)
    assert time.monotonic() - start < 30
    mark, text = found[who, name]
    assert mark == WRONG and words in text
    assert "Traceback" not in text
    assert (WRONG, who, name) not in [
        (mark, *key) for key, (mark, _) in found.items() if key[1] != name
    ]


def test_what_fails_with_torch_is_not_said_again():
    broken = child("raise ImportError('libcudart.so.12')")
    found = doctor.gather({RANK_0: broken, "rank 1": broken, MAIN: broken})
    assert list(found) == [(RANK_0, "torch")]


def test_what_was_begun_or_has_nothing_to_say_is_no_line():
    silent = child("look({'links': lambda: iter(())})")
    waiting = child("look({'all-reduce': lambda: time.sleep(60)})")
    assert doctor.gather({RANK_0: silent, "rank 1": waiting}) == {}


def test_nothing_is_left_running(tmp_path):
    pid = tmp_path / "pid"
    begun = f"open({str(pid)!r}, 'w').write(str(os.getpid())); tell('x', '✓', '')"
    wait = f"\nwhile not os.path.exists({str(pid)!r}): time.sleep(0.1)\n"
    first = child(f"{wait}time.sleep(1); tell('x', '✓', '')")
    doctor.gather({RANK_0: first, "rank 1": child(f"{begun}; time.sleep(60)")})
    stat = Path("/proc", pid.read_text(), "stat")
    deadline = time.monotonic() + 5
    while stat.exists() and " Z " not in stat.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not stat.exists() or " Z " in stat.read_text()


def test_each_rank_of_two_machines(two_machines, monkeypatch):
    monkeypatch.setenv("NODE_RANK", "1")
    monkeypatch.setenv("RANK", "7")  # of a launcher, who has nothing to say here
    children = doctor.children("main.py", 4, ["--check"])
    assert list(children) == [MACHINE, *(f"rank {local}" for local in range(4)), MAIN]
    _, environment = children["rank 2"]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "NODE_RANK")
    assert [environment[name] for name in names] == ["6", "2", "8", "4", "127.0.0.1", "1"]
    assert environment["MASTER_PORT"] == os.environ["MASTER_PORT"]
    assert "RANK" not in children[MAIN][1]


# As a whole


def check(*flags: str, **environment: str) -> subprocess.CompletedProcess:
    for _ in range(3):  # as it asks for, on a machine that others use
        done = subprocess.run(
            [str(PROJECT / "run.sh"), "--check", *flags],
            env=os.environ | {"PYTHON": sys.executable, "NPROC": "2"} | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if "no answer in time: try again" not in done.stdout:
            break
    return done


def test_this_machine_can_train(tmp_path):
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


@pytest.mark.gpu
def test_a_machine_with_gpus_can_train(tmp_path):
    gpus = torch.cuda.device_count()
    done = check("--json", "--output", str(tmp_path), NPROC=str(gpus))
    assert done.returncode == 0, done.stdout + done.stderr
    texts = {one["name"]: one["text"] for one in json.loads(done.stdout)["checks"]}
    assert f"{gpus} ranks" in texts["all-reduce"] and "over nccl" in texts["all-reduce"]
    for rank in range(gpus):
        assert texts[f"rank {rank}"].startswith(f"cuda:{rank}, ")
    assert ("peer access" in texts) == ("links" in texts) == (gpus > 1)


@pytest.mark.gpu
def test_a_gpu_for_two_ranks_is_a_line_too(tmp_path):
    gpus = torch.cuda.device_count()
    done = check("--output", str(tmp_path), NPROC=str(gpus + 1))
    assert done.returncode == 1
    assert f"NPROC={gpus} ./run.sh" in done.stdout
    assert done.stdout.count("processes were started on a machine with") == 1


@pytest.mark.parametrize(("terminal", "mark"), [("utf-8", WRONG), ("ascii", "error")])
def test_a_broken_torch_is_a_line_too(tmp_path, terminal, mark):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudnn.so.9: no file')")
    done = check(PYTHONPATH=str(tmp_path), PYTHONIOENCODING=terminal)
    assert done.returncode == 1
    assert done.stderr == ""
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(mark)]
    assert line.startswith(f"{mark} torch") and "libcudnn.so.9: no file" in line
