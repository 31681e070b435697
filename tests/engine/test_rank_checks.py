"""engine.diagnostics.rank_checks: preflight checks of each rank's GPU and network."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from engine import UserError, distributed
from engine.diagnostics import preflight, rank_checks
from engine.diagnostics.preflight import ERROR, OK, PENDING, WARNING
from ports import free_port

GIB = 2**30


def test_old_torch_is_an_error(run_check, monkeypatch):
    assert run_check(rank_checks.check_torch)[0] == OK
    monkeypatch.setattr(torch, "__version__", "2.5.1+cu121")
    status, text = run_check(rank_checks.check_torch)
    assert status == ERROR and "install 2.6 or later" in text


def raising(error: Exception) -> Callable:
    def raises(*arguments: object, **options: object) -> None:
        raise error

    return raises


TOO_OLD = RuntimeError("The NVIDIA driver on your system is too old (found 11040). Please update.")


@pytest.mark.parametrize(
    ("built", "visible", "init", "status", "words"),
    [
        (None, None, None, ERROR, "built without CUDA"),
        ("13.2", "", None, WARNING, "CUDA_VISIBLE_DEVICES hides every GPU"),
        ("13.2", None, raising(TOO_OLD), ERROR, "too old (found 11040): update the driver"),
        ("13.2", "GPU-wrong", print, ERROR, "CUDA_VISIBLE_DEVICES (GPU-wrong)"),
    ],
    ids=["cpu_build", "hidden", "old_driver", "unknown"],
)
def test_gpu_that_torch_can_not_use(run_check, monkeypatch, built, visible, init, status, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(preflight, "gpus", lambda: [["NVIDIA H200", "570"]])
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = run_check(rank_checks.check_cuda)
    assert found[0] == status and words in found[1]


def test_torch_without_nccl_is_an_error(run_check, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert run_check(rank_checks.check_nccl)[0] == ERROR


def test_gpus_without_peer_access_are_a_warning(run_check, monkeypatch):
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, two: True)
    assert run_check(rank_checks.check_peer_access, 3)[0] == OK
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, two: (one, two) != (1, 2))
    status, text = run_check(rank_checks.check_peer_access, 3)
    assert status == WARNING and text.startswith("GPU1–GPU2 can't access")
    assert run_check(rank_checks.check_peer_access, 1) == (PENDING, "")


@pytest.fixture
def fake_gpu(monkeypatch) -> torch.device:
    """Return the CPU, which torch describes as a GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (12, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (139 * GIB, 140 * GIB))
    return torch.device("cpu")


def test_used_gpu_memory_is_a_warning(run_check, monkeypatch, fake_gpu):
    assert run_check(rank_checks.check_device, fake_gpu)[0] == OK
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3 * GIB, 140 * GIB))
    status, text = run_check(rank_checks.check_device, fake_gpu)
    assert status == WARNING and "3.0 of 140.0 GiB free: other processes use it" in text


def test_torch_for_other_gpus_is_an_error(run_check, monkeypatch, fake_gpu):
    error = RuntimeError("CUDA error: no kernel image is available\nCUDA kernel errors might be …")
    monkeypatch.setattr(torch, "ones", raising(error))
    status, text = run_check(rank_checks.check_device, fake_gpu)
    assert status == ERROR and "no kernel image is available)" in text
    assert "sm_120; this one supports sm_80 sm_90" in text


@pytest.fixture
def master(monkeypatch) -> None:
    """Set the address of the rendezvous, in which ranks wait a second for each other."""
    monkeypatch.setenv(preflight.DEADLINE, "0")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(
        rank_checks, "device_identity", lambda device: getattr(device, "identity", "")
    )


def set_time_left(monkeypatch, seconds: float) -> None:
    monkeypatch.setenv(preflight.DEADLINE, str(time.monotonic() + seconds + 3))  # rank 0's rest


def rendezvous_errors(devices: list[str], types: Sequence[str] = ("cpu", "cpu")) -> list[str]:
    """Return the error of each rank in a rendezvous of ranks with these devices."""
    errors = [""] * len(devices)

    stores = []  # rank 0's serves the others

    def join(rank: int) -> None:
        try:
            device = SimpleNamespace(type=types[rank], identity=devices[rank])
            stores.append(rank_checks.rendezvous(rank, 2, device))
        except UserError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=join, args=[rank]) for rank in range(len(devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.parametrize("devices", [["GPU-8a", "GPU-9b"], ["", ""], ["GPU-8a", "GPU-8a"]])
def test_ranks_that_share_a_gpu_are_an_error(master, monkeypatch, devices):
    set_time_left(monkeypatch, 10)  # for a busy host
    one, two = rendezvous_errors(devices)
    assert one == two
    shared = "ranks 0 and 1 have the same GPU (GPU-8a)"
    assert (shared in one) == (devices[1] == "GPU-8a") == bool(one)


def test_different_facts_are_an_error(master, monkeypatch):
    """Such as versions, and the project's code."""
    set_time_left(monkeypatch, 10)
    one, two = rendezvous_errors(["", ""], types=["cpu", "cuda"])
    assert one == two and one.startswith("the kind of device is cuda on ")


def test_wrong_clock_is_an_error(master, monkeypatch):
    set_time_left(monkeypatch, 10)
    seconds = iter((0, 10))  # since 1970: rank 0's, then rank 1's
    monkeypatch.setattr(time, "time", lambda: next(seconds))
    one, two = rendezvous_errors(["", ""])
    assert one == two
    assert one.endswith(" is +10 s from rank 0's: set both by NTP")


def test_missing_rank_is_an_error(master):
    assert "rank 1 of 2 did not join" in rendezvous_errors([""])[0]


def test_missing_host_is_an_error(master, monkeypatch):
    monkeypatch.setenv("NNODES", "2")
    assert "host 1 of 2 did not join" in rendezvous_errors([""])[0]


def test_others_are_waited_for_until_the_check_is_stopped(monkeypatch):
    """Their import of torch takes a minute on some network drives: CHECK_WAIT covers it."""
    set_time_left(monkeypatch, 100)
    assert 95 < rank_checks.time_left().total_seconds() <= 100
    _, environment = preflight.make_commands("main.py", 1, [])["rank 0"]
    left = float(environment[preflight.DEADLINE]) - time.monotonic()
    assert preflight.TIMEOUT_S - 5 < left <= preflight.TIMEOUT_S


def test_hosts_with_different_numbers_of_processes_are_an_error(monkeypatch):
    monkeypatch.setenv("NNODES", "2")
    set_time_left(monkeypatch, 10)
    store = dist.HashStore()
    store.set("processes 0", "2")
    store.set("processes 1", "1")
    problem = rank_checks.find_problem(store, 4)
    assert problem.startswith("the hosts start 2, 1 processes: they can train")


def test_unreachable_master_is_an_error(run_check, master):
    device = torch.device("cpu")
    result = run_check(rank_checks.check_all_reduce, 1, 1, 2, device)
    assert result == (PENDING, "")  # rank 0, on the same host, reports the reason
    status, text = run_check(rank_checks.check_all_reduce, 1, 0, 2, device)
    assert status == ERROR and "MASTER_ADDR=127.0.0.1" in text and "can't be reached" in text


def test_rank_0_that_does_not_answer_is_an_error(run_check, master, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    port = int(os.environ["MASTER_PORT"])
    silent = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    status, text = run_check(rank_checks.check_all_reduce, 1, 0, 2, torch.device("cpu"))
    assert status == ERROR and text.startswith("rank 0 did not answer in time: run the check on")
    assert silent.check(["device 1"])


def test_used_master_port_is_an_error(run_check, two_hosts):
    two_hosts.listen()
    status, text = run_check(rank_checks.check_all_reduce, 0, 0, 2, torch.device("cpu"))
    assert status == ERROR and "can't be used on this host (Address already in use" in text


def test_all_reduce(run_check, master, monkeypatch):
    device = torch.device("cpu")
    try:
        status, text = run_check(rank_checks.check_all_reduce, 0, 0, 1, device)
        assert status == OK and text.startswith("16 MiB over gloo in ")
    finally:
        dist.destroy_process_group()
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.add_(1))
    try:
        status, text = run_check(rank_checks.check_all_reduce, 0, 0, 1, device)
        assert status == ERROR and "NCCL_P2P_DISABLE=1" in text
    finally:
        dist.destroy_process_group()


def test_failed_all_reduce_is_an_error(run_check, monkeypatch):
    error = RuntimeError("NCCL error\nLast error:\nConnect to 10.0.0.2 failed\nmore")
    monkeypatch.setattr(rank_checks, "rendezvous", lambda *_: dist.HashStore())
    monkeypatch.setattr(distributed, "select_gloo_interface", lambda: None)
    monkeypatch.setattr(dist, "init_process_group", raising(error))
    status, text = run_check(rank_checks.check_all_reduce, 0, 0, 2, torch.device("cpu"))
    assert status == ERROR and "(Connect to 10.0.0.2 failed): " in text
    assert "NCCL_DEBUG=INFO" in text and "NCCL_SOCKET_IFNAME" in text


def test_slow_all_reduce_is_a_warning(run_check, monkeypatch):
    def slow(tensor: torch.Tensor) -> None:
        time.sleep(0.05)
        tensor.fill_(3)  # 1 + 2

    store = dist.HashStore()
    store.set("done 1", "")
    monkeypatch.setattr(rank_checks, "rendezvous", lambda *_: store)
    monkeypatch.setattr(distributed, "select_gloo_interface", lambda: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "all_reduce", slow)
    status, text = run_check(rank_checks.check_all_reduce, 0, 0, 2, torch.device("cpu"))
    assert status == WARNING and "which is slow" in text


def test_hang_is_explained_in_advance():
    status, text = next(rank_checks.check_all_reduce(0, 0, 2, torch.device("cuda")))
    assert status == ERROR and "NCCL_DEBUG=INFO" in text and "--ipc=host" in text


def test_more_processes_than_gpus_are_an_error(monkeypatch):
    sent = []
    monkeypatch.setattr(preflight, "send", lambda *line: sent.append(line))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in [("RANK", "1"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")]:
        monkeypatch.setenv(name, value)
    for name, value in [("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")]:
        monkeypatch.setenv(name, value)
    rank_checks.main()
    ((name, status, text),) = sent
    assert status == ERROR and "NPROC=1 ./run.sh" in text
