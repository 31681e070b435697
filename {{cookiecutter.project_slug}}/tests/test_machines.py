"""When the first launcher begins a round, ends it, and gives up."""

import copy
import io
import json
import os
import socket
import sys
import time
from argparse import Namespace
from dataclasses import asdict
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from engine import distributed, launch, machines
from engine.errors import UserError
from engine.machines import SILENCE_S, TICK_S, Launcher, Link, Meeting, read

WAIT_S = 600


class Clock:
    """A meeting of two machines, and launchers that speak at every tick but for the silent ones."""

    def __init__(self, max_restarts: int = 3) -> None:
        self.settings = {"NNODES": 2, "MAX_RESTARTS": max_restarts}
        self.launchers = [self.launcher(0)]
        self.meeting = Meeting(self.launchers[0], WAIT_S)
        self.silent = []
        self.now = 0.0

    def launcher(self, rank: int, name: str | None = None, **settings: int) -> Launcher:
        return Launcher(rank, name or f"host{rank}", self.settings | settings)

    def come(self, *arguments: object, **settings: int) -> Launcher:
        self.launchers.append(self.launcher(*arguments, **settings))
        return self.launchers[-1]

    def run(self, seconds: float) -> None:
        """Until then; `call` is what was said last."""
        until = self.now + seconds
        while self.now < until:
            self.now += TICK_S
            for launcher in self.launchers:
                launcher.beat += launcher not in self.silent
            said = dict(enumerate(copy.deepcopy(self.launchers)))
            self.call = self.meeting.look(said, self.now)


@pytest.fixture
def running() -> Clock:
    """Two machines in their first round."""
    clock = Clock()
    clock.come(1)
    clock.run(TICK_S)
    assert (clock.call.round, clock.call.members, clock.call.running) == (0, [0, 1], True)
    return clock


def test_a_round_goes_on_while_all_speak(running: Clock) -> None:
    running.run(10 * SILENCE_S)
    assert running.call.running
    assert not running.call.end


def test_a_machine_whose_processes_failed_ends_the_round(running: Clock) -> None:
    first, second = running.launchers
    second.done = 0
    running.run(TICK_S)
    assert not running.call.running
    running.run(60)
    assert not running.call.running  # the first has not ended its own yet
    first.done = 0
    running.run(TICK_S)
    assert (running.call.round, running.call.running) == (1, True)


def test_launchers_that_were_stopped_listen_first(running: Clock, monkeypatch) -> None:
    running.silent = list(running.launchers)
    running.now += 60
    running.run(TICK_S)
    assert running.call.running
    running.run(SILENCE_S + TICK_S)
    assert not running.call.running

    link = Link("localhost", 1, running.launchers[1], None, "")
    now = link.heard
    monkeypatch.setattr(machines.time, "monotonic", lambda: now)
    now += 60
    assert not link.is_lost()
    for _ in range(3):
        now += SILENCE_S / 2
        is_lost = link.is_lost()
    assert is_lost


def test_meeting_again_is_a_restart() -> None:
    clock = Clock(max_restarts=0)
    second = clock.come(1)
    clock.run(TICK_S)
    second.done = 0
    clock.run(TICK_S)
    assert clock.call.end[1].startswith("machine 1 (host1) is lost, and MAX_RESTARTS is 0: start")


def test_a_machine_that_is_lost_while_all_meet(monkeypatch) -> None:
    """The launchers meet again, but not that of a run on one machine."""
    tries = iter((dist.DistNetworkError, dist.DistStoreError, None))

    def rendezvous(*_: object) -> None:
        if problem := next(tries):
            raise problem("gone")

    monkeypatch.setattr(launch, "_rendezvous", rendezvous)
    with pytest.raises(dist.DistNetworkError):
        launch._meet_all(None, None)
    monkeypatch.setattr(launch, "_met", [None])
    launch._meet_all(None, None)
    assert not list(tries)


def test_a_machine_that_is_lost_is_waited_for(running: Clock, capsys) -> None:
    first, second = running.launchers
    running.silent.append(second)
    running.run(SILENCE_S - TICK_S)
    assert running.call.running
    running.run(2 * TICK_S)
    assert not running.call.running
    first.done = 0
    running.run(WAIT_S / 2)
    assert not running.call.running
    assert capsys.readouterr().err == "waiting for machine 1, at most 600 s (NODE_WAIT)\n"
    running.come(1)
    running.run(TICK_S)
    assert (running.call.round, running.call.members, running.call.running) == (1, [0, 2], True)


def test_a_machine_is_back_before_it_is_missed(running: Clock) -> None:
    first, second = running.launchers
    running.silent.append(second)
    running.run(1)
    running.come(1)
    running.run(4 * TICK_S)
    assert running.call.running
    running.run(2 * TICK_S)
    assert not running.call.running
    first.done = 0
    running.run(TICK_S)
    assert running.call.members == [0, 2]


def test_a_new_first_launcher_goes_on_with_the_count() -> None:
    clock = Clock()
    clock.come(1).done = 1  # it lost the launcher before this one
    clock.run(TICK_S)
    assert (clock.call.round, clock.call.running) == (2, True)


def test_a_number_that_two_machines_have() -> None:
    clock = Clock()
    clock.come(0, "other")
    clock.run(3)
    assert clock.call.end == (
        2,
        "NODE_RANK=0 is set on host0 and on other: number the machines from 0 to 1",
    )


def test_a_machine_too_many_does_not_end_the_run(running: Clock) -> None:
    running.come(1, "other")
    running.run(3)
    assert running.call.running
    assert running.call.refused == [
        (2, "NODE_RANK=1 is set on host1 and on other: number the machines from 0 to 1")
    ]


def test_settings_that_differ() -> None:
    clock = Clock()
    clock.come(1, NNODES=3)
    clock.run(TICK_S)
    assert clock.call.end == (
        2,
        "NNODES is 3 on machine 1 (host1) and 2 on machine 0 (host0): make it the same",
    )


def test_a_launcher_of_another_version() -> None:
    clock = Clock()
    clock.meeting.first.settings["the version of engine/machines.py"] = "0a1b"
    told = asdict(Launcher(1, "host1", {"NNODES": 2, "MAX_RESTARTS": 3})) | {"mood": "good"}
    clock.launchers.append(read(Launcher, json.dumps(told)))
    clock.run(TICK_S)
    assert clock.call.end == (
        2,
        "the version of engine/machines.py is another on machine 1 (host1) and 0a1b on machine 0 "
        "(host0): make it the same",
    )


@pytest.mark.parametrize("status", [1, 2, 143])
def test_a_machine_that_leaves_ends_the_run(running: Clock, status: int) -> None:
    running.launchers[1].left = status
    running.run(TICK_S)
    assert running.call.end == (
        status,
        f"machine 1 (host1) ended with status {status}, and says why",
    )
    assert running.meeting.is_alone()


def test_machines_that_are_done_wait_for_each_other(running: Clock) -> None:
    running.launchers[0].succeeded = True
    running.run(10 * SILENCE_S)
    assert not running.call.succeeded
    running.launchers[1].succeeded = True
    running.run(TICK_S)
    assert running.call.succeeded
    running.launchers[1].left = 0
    running.run(10 * SILENCE_S)
    assert running.call.succeeded and running.call.running and not running.call.end


def test_a_machine_that_is_lost_when_it_is_done_is_not_missed(running: Clock) -> None:
    running.launchers[1].succeeded = True
    running.silent.append(running.launchers[1])
    running.run(2 * SILENCE_S)
    assert running.call.running and not running.call.end
    running.launchers[0].succeeded = True
    running.run(TICK_S)
    assert running.call.succeeded


def test_a_machine_that_fails_when_another_is_done(running: Clock) -> None:
    running.launchers[0].succeeded = True
    running.launchers[1].done = 0
    running.run(TICK_S)
    assert not running.call.running and not running.call.succeeded


def test_a_machine_that_is_done_is_not_missed(running: Clock) -> None:
    running.launchers[1].left = 0
    running.silent.append(running.launchers[1])
    running.run(10 * SILENCE_S)
    assert running.call.running


def test_a_machine_that_never_comes() -> None:
    clock = Clock()
    clock.run(WAIT_S)
    assert not clock.call.end
    clock.run(2 * TICK_S)
    status, sentence = clock.call.end
    assert status == 1
    assert sentence.startswith("machine 1 did not come in 600 s (NODE_WAIT)")


def test_no_more_restarts() -> None:
    clock = Clock(max_restarts=0)
    clock.silent.append(clock.come(1))
    clock.run(SILENCE_S + 2 * TICK_S)
    status, sentence = clock.call.end
    assert status == 1
    assert sentence.startswith("machine 1 (host1) is lost, and MAX_RESTARTS is 0: start")


FACTS = {"torch": "2.6.0", "--lr": "0.1", "task.py": "0a1b"}
CPU = torch.device("cpu")


def test_what_differs_between_processes_is_named() -> None:
    def told(**changes: str) -> str:
        facts = ("a", FACTS), ("a", FACTS), ("b", {**FACTS, **changes})
        return distributed._difference(dict(enumerate(facts)))

    assert told() == ""
    assert told(loaded_by_one="2c3d") == ""
    for name in FACTS:
        sentence = told(**{name: "another"})
        assert sentence.startswith(
            f"{name} is another on b (rank 2) but {FACTS[name]} on a (rank 0)"
        )


def test_facts_are_of_the_project() -> None:
    facts = distributed._facts(CPU, Namespace(lr=0.1, data="here", batch_size=2), "apex")
    assert facts["--lr"] == "0.1"
    assert facts["--batch-size"] == "2"
    assert "--data" not in facts
    assert "engine/distributed.py" in facts
    assert not [name for name in facts if "site-packages" in name]


def test_devices_and_libraries_that_differ(monkeypatch) -> None:
    def told(device: str, apex: str, torchvision: str) -> tuple[str, dict[str, str]]:
        monkeypatch.setattr(distributed, "version", lambda _: torchvision)
        return device, distributed._facts(torch.device(device), Namespace(), apex)

    first = told("cpu", "apex", "0.21")
    for other, sentence in (
        (told("cuda", "apex", "0.21"), "the kind of device is cuda on "),
        (told("cpu", "apex_native", "0.21"), "Apex's backend is apex_native on "),
        (told("cpu", "apex", "0.22"), "torchvision is 0.22 on "),
    ):
        assert distributed._difference({0: first, 1: other}).startswith(sentence)


class Samples(list):
    classes: str


def said_of_data(*told: tuple[int, int, str]) -> str:
    train_set, val_set = map(Samples, map(range, told[dist.get_rank()][:2]))
    train_set.classes = told[dist.get_rank()][2]
    try:
        assert distributed.same_data(train_set, val_set) == (train_set, val_set)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("theirs", "sentence"),
    [
        ((40, 9, "ab"), ""),
        ((38, 9, "ab"), "the number of samples to train on is 38 on "),
        ((40, 10, "ab"), "the number of samples to validate on is 10 on "),
        ((40, 9, "abc"), "the number of classes is 3 on "),
        ((40, 9, "ax"), "class 1 is x on "),
    ],
)
def test_data_that_differs_between_machines(two_processes, theirs, sentence) -> None:
    one, two = two_processes(said_of_data, (40, 9, "ab"), theirs)
    assert one == two
    assert one.startswith(sentence) and bool(one) == bool(sentence)


def test_a_terminal_that_lacks_letters(monkeypatch) -> None:
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    distributed.run(lambda: print("0.1 × 2", flush=True))
    assert stdout.buffer.getvalue() == b"0.1 ? 2\n"


def test_ranks_that_never_come_are_named() -> None:
    patience = timedelta(seconds=0.5)
    store = dist.TCPStore("localhost", 0, None, True, patience, wait_for_workers=False)
    store.set("facts 2", "")
    with pytest.raises(UserError, match="^rank 1, 3 of 4 did not come: "):
        distributed._compare(store, 0, 4, FACTS)
    with pytest.raises(UserError, match="^rank 3 of 4 did not come: "):
        distributed._compare(store, 1, 4, FACTS)


@pytest.mark.parametrize(
    ("rank", "sentence"),
    [("0", "^rank 1 of 2 did not come"), ("1", "^MASTER_ADDR=localhost, .* does not answer")],
)
def test_a_process_that_was_started_alone(monkeypatch, rank, sentence) -> None:
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    for name, value in (("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_PORT", port)):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(UserError, match=sentence):
        distributed.join(CPU, Namespace(timeout=-59), "apex_native")


def test_a_clock_that_is_off_is_told(capsys, monkeypatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for ahead, is_told in ((0, False), (300, True)):
        store = dist.HashStore()
        store.set("difference", json.dumps([time.time() - ahead, ""]))
        distributed._compare(store, 1, 2, FACTS)
        assert ("is +300 s from rank 0's" in capsys.readouterr().err) == is_told


def test_gloo_is_not_sent_to_an_address_of_this_machine_alone(monkeypatch) -> None:
    variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.1.1"}
    monkeypatch.setattr(os, "environ", variables)
    distributed.choose_interface()
    assert variables.get("GLOO_SOCKET_IFNAME") != "lo"
