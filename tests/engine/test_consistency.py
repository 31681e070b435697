"""Tests of engine.distributed: comparison of processes, rendezvous and exit."""

import errno
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from engine import PeerError, UserError, distributed, launch
from engine.distributed import consistency, network
from engine.distributed.consistency import collect_facts, find_difference, require_same_facts
from ports import free_port
from torch.utils.data import IterableDataset

FACTS = {"torch": "2.6.0", "--lr": "0.1", "task.py": "0a1b"}
CPU = torch.device("cpu")


def test_difference_between_processes_is_reported_with_both_values() -> None:
    def difference(**changes: str) -> str:
        facts = ("a", FACTS), ("a", FACTS), ("b", {**FACTS, **changes})
        return find_difference(dict(enumerate(facts)))

    assert difference() == ""
    assert difference(loaded_by_one="2c3d") == ""
    for name in FACTS:
        message = difference(**{name: "another"})
        assert message.startswith(
            f"{name} is another on b (rank 2) but {FACTS[name]} on a (rank 0)"
        )


def test_facts_include_flags_and_project_files() -> None:
    facts = collect_facts(CPU, {"lr": 0.1, "data": "here", "batch_size": 2}, "apex")
    assert facts["--lr"] == "0.1"
    assert facts["--batch-size"] == "2"
    assert "--data" not in facts
    assert "engine/distributed/__init__.py" in facts
    assert {"run.sh", "engine/launch.py"} <= facts.keys()  # not loaded by the processes
    assert not [name for name in facts if "site-packages" in name]


def test_digests_are_of_the_files_at_the_start(tmp_path, monkeypatch) -> None:
    """A file may be edited while a run reads its data; a notebook may start another run."""
    monkeypatch.setattr(consistency, "__file__", str(tmp_path / "engine" / "distributed" / "x.py"))
    path = tmp_path / "task.py"
    path.write_text("first")
    first = collect_facts(CPU, {}, "")["task.py"]
    path.write_text("second")
    assert consistency.file_digests() == {"task.py": first}
    assert collect_facts(CPU, {}, "")["task.py"] != first


def test_different_devices_and_libraries_are_reported(monkeypatch) -> None:
    def collect(device: str, apex: str, torchvision: str) -> tuple[str, dict[str, str]]:
        monkeypatch.setattr(consistency, "version", lambda _: torchvision)
        return device, collect_facts(torch.device(device), {}, apex)

    first = collect("cpu", "apex", "0.21")
    for other, message in (
        (collect("cuda", "apex", "0.21"), "the kind of device is cuda on "),
        (collect("cpu", "apex_native", "0.21"), "Apex's backend is apex_native on "),
        (collect("cpu", "apex", "0.22"), "torchvision is 0.22 on "),
    ):
        assert find_difference({0: first, 1: other}).startswith(message)


class Samples(list):
    classes: object


def compare_data(*sizes_and_classes: tuple) -> str:
    """Return the error message of this rank, if any."""
    num_train, num_val, classes, *labels = sizes_and_classes[dist.get_rank()]
    train_set, val_set = Samples(range(num_train)), Samples(range(num_val))
    train_set.classes = val_set.classes = classes
    if labels:
        train_set.labels, val_set.labels = labels
    try:
        consistency.require_same_data(train_set, val_set)
    except UserError as error:
        return str(error)
    return ""


def test_validation_data_of_other_classes_is_an_error() -> None:
    train_set, val_set = Samples(), Samples()
    train_set.classes, val_set.classes = "ab", "abc"
    with pytest.raises(UserError, match="class 2 is missing in the training data and c in the val"):
        consistency.require_same_data(train_set, val_set)


@pytest.mark.parametrize("classes", [{"cat": 0, "dog": 1}, 2])
def test_classes_that_are_no_list_are_an_error(classes: object) -> None:
    data_set = Samples([1])
    data_set.classes = classes
    name = type(classes).__name__
    with pytest.raises(UserError, match=f"must be the list of their names, not {name}"):
        consistency.require_same_data(data_set, data_set)


def test_data_without_samples_is_an_error() -> None:
    with pytest.raises(UserError, match="the validation data has no samples: correct its data set"):
        consistency.require_same_data([1], [])


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        yield 1


class SizedStream(Stream):
    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize("kind", [Stream, SizedStream])
def test_data_without_a_length_or_an_index_is_an_error(kind: type) -> None:
    message = f"the validation data, of type {kind.__name__}, is iterable or has no length: a s"
    with pytest.raises(UserError, match=message):
        consistency.require_same_data([1], kind())


def test_validation_data_without_classes_is_an_error() -> None:
    """Such as a torch.utils.data.Subset."""
    train_set = Samples()
    train_set.classes = "ab"
    with pytest.raises(UserError, match="class 0 is a in the training data and missing in the val"):
        consistency.require_same_data(train_set, Samples())


@pytest.mark.parametrize(
    ("labels", "wrong"),
    [
        ([1, 2, 3], 3),
        (torch.tensor([0, 1, -1]), -1),
        ([0, 1, -100], -100),  # the metrics would count it
        (list(np.array([0, 1, 255])), 255),
        (list(torch.tensor([0, 1, 3])), 3),
    ],
    ids=["from 1", "negative", "ignored", "NumPy", "tensors"],
)
def test_labels_that_are_no_positions_are_an_error(
    labels: list[int] | torch.Tensor, wrong: int
) -> None:
    train_set, val_set = Samples(range(3)), Samples(range(3))
    train_set.classes = val_set.classes = "abc"
    train_set.labels, val_set.labels = [0, -100, 2], labels
    message = f"the validation data has the label {wrong}: labels must be 0 to 2, the positions in"
    with pytest.raises(UserError, match=message):
        consistency.require_same_data(train_set, val_set)


@pytest.mark.parametrize(
    "labels",
    [["a", "x", "z"], torch.ones(3, 4), list(torch.ones(3, 4)), [False, True, True], [0, 0, -100]],
    ids=["texts", "matrix", "vectors", "bools", "ignored"],
)
def test_labels_that_are_no_positions_on_purpose_are_accepted(labels: object) -> None:
    data_set = Samples(range(3))
    data_set.labels = labels
    consistency._require_positions(data_set, "training", 1)


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ((40, 9, "ab"), ""),
        ((38, 9, "ab"), "the number of samples to train on is 38 on "),
        ((40, 10, "ab"), "the number of samples to validate on is 10 on "),
        ((40, 9, "abc"), "the number of classes is 3 on "),
        ((40, 9, "ax"), "class 1 is x on "),
        ((40, 9, "ba"), "class 0 is b on "),
    ],
)
def test_different_data_is_reported_on_all_ranks(two_processes, theirs, message) -> None:
    one, two = two_processes(compare_data, (40, 9, "ab"), theirs)
    assert one == two
    assert one.startswith(message) and bool(one) == bool(message)


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (([0, 1, 0], [1, 0]), ""),
        (([0, 0, 1], [1, 0]), "the digest of the labels of the training data is "),
        (([0, 1, 0], [0, 1]), "the digest of the labels of the validation data is "),
    ],
)
def test_labels_in_another_order_are_reported_on_all_ranks(two_processes, theirs, message) -> None:
    """As those of IDX files, whose counts and class names are the same."""
    sizes = (3, 2, "ab")
    one, two = two_processes(compare_data, (*sizes, [0, 1, 0], [1, 0]), (*sizes, *theirs))
    assert one == two
    assert one.startswith(message) and bool(one) == bool(message)
    assert not one or f" on {socket.gethostname()} (rank 1) but " in one


def compare_forms(*attributes: dict) -> str:
    """Return the error message of this rank, if any, for training data with these attributes."""
    train_set = Samples(range(8))
    vars(train_set).update(attributes[dist.get_rank()])
    try:
        consistency.require_same_data(train_set, Samples(range(2)))
    except UserError as error:
        return str(error)
    return ""


FOLDER, PACK = {"fingerprint": {"file names": "0a"}}, {"fingerprint": {"pack": "1b"}}
URL = PACK | {"shard_sizes": [5, 3]}


@pytest.mark.parametrize(
    ("own", "theirs", "found"),
    [
        (PACK, PACK, ""),
        (URL, URL, ""),
        ({}, {}, ""),
        (FOLDER, PACK, "the form of the training data is a local pack on "),
        (FOLDER, URL, "the form of the training data is a pack by URL on "),
        (PACK, URL, "the form of the training data is a pack by URL on "),
        (URL, PACK | {"shard_sizes": [3, 5]}, "the digest of the sizes of its shards is "),
    ],
    ids=["packs", "URLs", "own", "folder and pack", "folder and URL", "pack and URL", "shards"],
)
def test_data_whose_order_depends_on_the_host_is_an_error(two_processes, own, theirs, found):
    """An index would be another sample: some are trained on twice, others never."""
    one, two = two_processes(compare_forms, own, theirs)
    assert one == two and bool(one) == bool(found)
    assert not one or one.startswith(found) and " (rank 1) but " in one


def test_terminals_that_lack_characters_are_supported(monkeypatch) -> None:
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    distributed.run(lambda: print("0.1 × 2", flush=True))
    assert stdout.buffer.getvalue() == b"0.1 ? 2\n"


def test_output_of_a_notebook_is_supported(monkeypatch) -> None:
    """Its stream has no ``reconfigure``."""
    stdout = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stdout)
    distributed.run(lambda: print("0.1 × 2"))
    assert stdout.getvalue() == "0.1 × 2\n"


@pytest.mark.parametrize(("kind", "status"), [(UserError, 2), (PeerError, 1)])
def test_job_that_lacks_a_process_may_be_restarted(monkeypatch, capsys, kind, status) -> None:
    """The launcher restarts it after status 1, and not after 2."""
    monkeypatch.setattr(distributed, "exit_process", sys.exit)
    with pytest.raises(SystemExit) as stopped:
        distributed.run(Mock(side_effect=kind("rank 1 did not come")))
    assert stopped.value.code == status
    assert capsys.readouterr().err == "error: rank 1 did not come\n"


def test_end_of_another_worker_does_not_interrupt_the_handling_of_the_first(
    monkeypatch, capsys
) -> None:
    """torch's handler raises at the end of each data-loading worker that was killed."""
    handler = signal.signal(signal.SIGCHLD, Mock(side_effect=RuntimeError("the second worker")))
    monkeypatch.setattr(distributed, "exit_process", sys.exit)
    announce = Mock(side_effect=lambda _: os.kill(os.getpid(), signal.SIGCHLD) or True)
    monkeypatch.setattr(distributed, "announce_failure", announce)
    try:
        with pytest.raises(SystemExit):
            distributed.run(Mock(side_effect=RuntimeError("the first worker")))
    finally:
        signal.signal(signal.SIGCHLD, handler)
    assert capsys.readouterr().err.endswith("RuntimeError: the first worker\n")


@pytest.mark.parametrize("is_zombie", [True, False])
def test_process_whose_launcher_has_ended_exits(monkeypatch, capsys, is_zombie) -> None:
    """It is a zombie while its caller reads the output that this process holds open.

    Unless it was killed, the launcher has logged why: another message would hide that.
    """
    monkeypatch.setattr(launch, "end_with_parent", Mock())
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    main = Mock()
    with subprocess.Popen(["true"]) as launcher:
        monkeypatch.setenv(launch.LAUNCHER, str(launcher.pid))
        os.waitid(os.P_PID, launcher.pid, os.WEXITED | (os.WNOWAIT if is_zombie else 0))
        with pytest.raises(SystemExit) as stopped:
            distributed.run(main)
    assert stopped.value.code == 1
    assert capsys.readouterr() == ("", "")
    main.assert_not_called()


def test_ranks_that_do_not_arrive_are_reported() -> None:
    timeout = timedelta(seconds=0.5)
    store = dist.TCPStore("localhost", 0, None, True, timeout, wait_for_workers=False)
    store.set("facts 2", "")
    with pytest.raises(PeerError, match="^rank 1, 3 of 4 did not come: "):
        require_same_facts(store, 0, 4, FACTS)
    with pytest.raises(PeerError, match="^rank 3 of 4 did not come: "):
        require_same_facts(store, 1, 4, FACTS)


@pytest.mark.parametrize(
    ("rank", "message"),
    [("0", "^rank 1 of 2 did not come"), ("1", "^MASTER_ADDR=localhost, .* does not answer")],
)
def test_process_without_the_others_reports_them(monkeypatch, rank, message) -> None:
    port = str(free_port())
    for name, value in (("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_PORT", port)):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(PeerError, match=message):
        distributed.rendezvous(CPU, {}, "apex_native", timedelta(seconds=1))


def test_clock_difference_is_a_warning(capsys, monkeypatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for ahead, is_reported in ((0, False), (10, True)):
        store = dist.HashStore()
        store.set("difference", json.dumps([time.time() - ahead, ""]))
        require_same_facts(store, 1, 2, FACTS)
        assert ("is +10 s from rank 0's" in capsys.readouterr().err) == is_reported


@pytest.mark.parametrize(("address", "name"), [("127.0.0.1", "lo"), ("10.0.0.1", "eth7")])
def test_gloo_listens_on_the_loopback_interface_on_a_single_host(monkeypatch, address, name):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    network.select_interface(address)
    assert os.environ["GLOO_SOCKET_IFNAME"] == name


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.1.2.3"}, True),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}, False),
        # Launchers of one process per host, such as Kubeflow's, set no LOCAL_WORLD_SIZE.
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "10.1.2.3"}, False),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, True),
        ({"WORLD_SIZE": "1", "MASTER_ADDR": "10.1.2.3"}, True),
        ({}, True),
    ],
)
def test_single_host_is_recognized(monkeypatch, variables, expected):
    monkeypatch.setattr(os, "environ", variables)
    assert distributed.is_single_host() == expected


def test_gloo_does_not_use_the_loopback_interface_on_several_hosts(monkeypatch) -> None:
    variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.1.1"}
    monkeypatch.setattr(os, "environ", variables)
    distributed.select_gloo_interface()
    assert variables.get("GLOO_SOCKET_IFNAME") != "lo"


def test_files_that_nobody_needs_may_fill_the_disk(tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, "no space")
    with pytest.raises(OSError, match="no space"), distributed.folder_of_rank(tmp_path) as folder:
        assert folder == tmp_path
        raise full
    monkeypatch.setenv("RANK", "1")
    with distributed.folder_of_rank(tmp_path) as folder:
        assert folder != tmp_path
        raise full
    with pytest.raises(FileNotFoundError), distributed.folder_of_rank(tmp_path):
        raise FileNotFoundError  # such as of a sample, without which no model runs
