"""Where the machines of a run meet, and meet again when one was lost and is back.

The launcher with NODE_RANK=0 keeps a store. There the launcher of each machine says twice a second
that it is alive, and the first one calls rounds: one begins when every machine is ready, and ends
when a machine falls silent, is started anew, or has processes that failed. Then each launcher ends
its own processes, and is ready for the next round, in which they start again.

torchrun brings two ways to meet. One does not look after the machines once they met; the other
numbers them as it likes, so that rank 0 may come to be where the checkpoints are not.
"""

import hashlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from engine.errors import BAD_USAGE

Kind = TypeVar("Kind")
TICK_S = 0.5  # in which each launcher speaks once
SILENCE_S = 10.0  # after which a machine counts as lost
QUIET_S = 5.0  # after which those that wait say for whom
GOODBYE_S = 5.0  # in which the others hear that the first launcher leaves


class Ended(Exception):
    """The run is over on this machine: a status, and a sentence that says why."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass
class Launcher:
    """What a launcher says of itself."""

    rank: int  # of its machine
    name: str
    settings: dict[str, int | str]  # which must be the same on all machines
    done: int = -1  # the last round that it is done with
    succeeded: bool = False  # its processes of this round have
    left: int | None = None  # its exit status
    beat: int = 0

    def __str__(self) -> str:
        return f"machine {self.rank} ({self.name})"


@dataclass
class Call:
    """What the first launcher says to all. Launchers have numbers, in the order they came in."""

    round: int = -1
    members: list[int] = field(default_factory=list)
    running: bool = False
    succeeded: bool = False  # all processes of this round have
    refused: list[tuple[int, str]] = field(default_factory=list)
    end: tuple[int, str] | None = None


def read(kind: type[Kind], text: str) -> Kind:
    """What a launcher said, without what only another version of this file knows."""
    told = json.loads(text)
    return kind(**{name: told[name] for name in kind.__dataclass_fields__ if name in told})


class Meeting:
    """Calls the rounds.

    Args:
        first: the launcher that does so; its settings are NNODES and MAX_RESTARTS.
        wait_s: how long to wait for machines that are not there.
    """

    def __init__(self, first: Launcher, wait_s: int) -> None:
        self.first, self.wait_s = first, wait_s
        self.count, self.max_restarts = first.settings["NNODES"], first.settings["MAX_RESTARTS"]
        self.call = Call()
        self.launchers: dict[int, Launcher] = {}
        self.came: dict[int, float] = {}
        self.heard: dict[int, float] = {}
        self.current: dict[int, int] = {}  # the launcher of each machine that is let in
        self.now = self.since = 0.0
        self.told = False

    def look(self, launchers: dict[int, Launcher], now: float) -> Call:
        """What to say to `launchers`, of which the first one is one."""
        if not self.launchers:
            self.since = now
        elif now - self.now > SILENCE_S / 2:  # this launcher itself was stopped: listen first
            self.came = dict.fromkeys(self.came, now)
            self.heard = dict.fromkeys(self.heard, now)
        for number, launcher in launchers.items():
            self.came.setdefault(number, now)
            if number not in self.launchers or launcher.beat != self.launchers[number].beat:
                self.heard[number] = now
        self.launchers, self.now = launchers, now
        self._let_in()
        self._end_with_those_that_left()
        members = (self.launchers[number] for number in self.call.members)
        self.call.succeeded = self.call.running and all(one.succeeded for one in members)
        if not self.call.running:
            self._begin_round_with_all()
        elif not self.call.succeeded:
            self._end_round_without_the_lost()
        return self.call

    def is_alone(self) -> bool:
        """Whether the first launcher is the only one that is left."""
        return all(self._is_gone(number) for rank, number in self.current.items() if rank != 0)

    def _is_lost(self, number: int) -> bool:
        is_silent = self.now - self.heard[number] > SILENCE_S
        return is_silent and self.launchers[number].left is None

    def _is_gone(self, number: int) -> bool:
        return self._is_lost(number) or self.launchers[number].left is not None

    def _is_ready(self, rank: int) -> bool:
        number = self.current.get(rank)
        if number is None or self._is_gone(number):
            return False
        return number not in self.call.members or self.launchers[number].done >= self.call.round

    def _let_in(self) -> None:
        """Lets in who came, or says why not.

        A launcher takes the place of one that is silent; whether it is shows in two seconds.
        """
        refused = [number for number, _ in self.call.refused]
        for number, launcher in self.launchers.items():
            before = self.current.get(launcher.rank, -1)
            if number <= before or number in refused:
                continue
            problem = self._disagreement(launcher)
            if before >= 0 and not self._is_gone(before):
                if self.heard[before] > self.came[number] + 2 * TICK_S:
                    problem = (
                        f"NODE_RANK={launcher.rank} is set on {self.launchers[before].name} and on "
                        f"{launcher.name}: number the machines from 0 to {self.count - 1}"
                    )
                elif self.now < self.came[number] + 4 * TICK_S:
                    continue
            if not problem:
                self.current[launcher.rank] = number
            elif self.call.round < 0:
                self._end(BAD_USAGE, problem)
            else:  # the others go on
                self.call.refused.append((number, problem))

    def _disagreement(self, launcher: Launcher) -> str:
        for name, ours in self.first.settings.items():
            theirs = launcher.settings.get(name, "another")
            if theirs != ours:
                return (
                    f"{name} is {theirs} on {launcher} and {ours} on {self.first}: make it the same"
                )
        return ""

    def _end_with_those_that_left(self) -> None:
        members = {*self.call.members, self.current.get(0, -1)}
        for launcher in (one for number, one in self.launchers.items() if number in members):
            if launcher.left:
                self._end(
                    launcher.left, f"{launcher} ended with status {launcher.left}, and says why"
                )

    def _end_round_without_the_lost(self) -> None:
        members = {number: self.launchers[number] for number in self.call.members}
        lost = [
            str(launcher)
            for number, launcher in members.items()
            if (self._is_lost(number) and not launcher.succeeded)
            or self.current[launcher.rank] != number
            or launcher.done >= self.call.round
        ]
        if lost and self.call.round >= self.max_restarts:
            self._end(1, for_good(" and ".join(lost), self.max_restarts))
        elif lost:
            self.call.running = False
            self.since, self.told = self.now, False

    def _begin_round_with_all(self) -> None:
        waited = self.now - self.since
        missing = [str(rank) for rank in range(self.count) if not self._is_ready(rank)]
        who = f"machine{'s' * (len(missing) > 1)} {', '.join(missing)}"
        if not missing:
            members = [self.current[rank] for rank in range(self.count)]
            self.call.round = 1 + max(self.launchers[number].done for number in members)
            self.call.members, self.call.running = members, True
        elif waited > self.wait_s:
            self._end(
                1,
                f"{who} did not come in {self.wait_s} s (NODE_WAIT); there are {self.count}, from "
                "0 on: start ./run.sh there with its NODE_RANK and the same MASTER_ADDR",
            )
        elif waited > QUIET_S and not self.told:
            self.told = True
            say(f"waiting for {who}, at most {self.wait_s} s (NODE_WAIT)")

    def _end(self, status: int, sentence: str) -> None:
        self.call.end = self.call.end or (status, sentence)


def for_good(who: str, max_restarts: int) -> str:
    """The sentence for machines that are not waited for."""
    return (
        f"{who} is lost, and MAX_RESTARTS is {max_restarts}: start all machines again, with "
        "--resume auto"
    )


def say(message: str) -> None:
    """Prints a line."""
    print(message, file=sys.stderr, flush=True)


class Link(threading.Thread):
    """Speaks for `me` to the first launcher, and listens to it.

    A thread of its own, because a machine that is lost may keep it waiting for minutes.

    Args:
        key: of the store that belongs to `meeting`, which only the first launcher has.
    """

    def __init__(
        self, address: str, port: int, me: Launcher, meeting: Meeting | None, key: str
    ) -> None:
        super().__init__(name="link", daemon=True)
        self.address, self.port, self.me, self.meeting, self.key = address, port, me, meeting, key
        self.call = Call()
        self.number = -1
        self.heard = self.asked = time.monotonic()
        self.problem = "no answer"  # why it is not heard
        self.said_goodbye = self.closed = False

    def is_lost(self) -> bool:
        """Whether the first launcher is out of reach."""
        now = time.monotonic()
        if now - self.asked > SILENCE_S / 2:  # this launcher itself was stopped: listen first
            self.heard = now
        self.asked = now
        return self.closed or now - self.heard > SILENCE_S

    def run(self) -> None:
        """Knocks until somebody opens, then speaks and listens until that fails."""
        while not self.closed:
            self.heard = time.monotonic()
            try:
                # torch's own client prints a warning for each try while nobody listens.
                socket.create_connection((self.address, self.port), SILENCE_S).close()
                self._talk(dist.PrefixStore("machines", connect(self.address, self.port)))
            except (OSError, RuntimeError, ValueError) as error:
                self.problem = getattr(error, "strerror", None) or str(error).splitlines()[0]
            self.closed = self.closed or self.is_in() or self.call.end is not None
            time.sleep(TICK_S)

    def is_in(self) -> bool:
        """Whether the first launcher knows of this one."""
        return self.number >= 0

    def _talk(self, store: dist.Store) -> None:
        if self.meeting and store.get("key").decode() != self.key:
            problem = f"NODE_RANK is 0 here, but MASTER_ADDR={self.address} is another machine, "
            self.call = Call(end=(BAD_USAGE, problem + "which has begun a run: mend one of them"))
            return
        self.number = store.add("count", 1) - 1
        while not self.closed:
            left = self.me.left
            self.me.beat += 1
            store.set(f"launcher {self.number}", json.dumps(asdict(self.me)))
            if self.meeting:
                keys = {number: f"launcher {number}" for number in range(store.add("count", 0))}
                launchers = {
                    number: read(Launcher, store.get(key))
                    for number, key in keys.items()
                    if store.check([key])
                }
                call = self.meeting.look(launchers, time.monotonic())
                store.set("call", json.dumps(asdict(call)))
            self.call = read(Call, store.get("call"))
            self.heard = time.monotonic()
            is_heard = not self.meeting or self.meeting.is_alone()
            self.said_goodbye = left is not None and is_heard
            time.sleep(TICK_S)


def connect(address: str, port: int, timeout_s: float = SILENCE_S) -> dist.Store:
    """The first launcher's store."""
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)


class Machines(RendezvousHandler):
    """What torchrun's agent on each machine asks about all of them.

    Args:
        params: the endpoint of the first launcher's store, max_nodes, and from --rdzv-conf this
            machine's ``rank``, how many seconds to ``wait``, and ``max_restarts``.
    """

    use_agent_store = True

    def __init__(self, params: RendezvousParameters) -> None:
        address, _, port = params.endpoint.rpartition(":")
        self.address, self.port = address.strip("[]"), int(port)
        self.wait_s = params.get_as_int("wait")
        self.count, self.max_restarts = params.max_nodes, params.get_as_int("max_restarts")
        version = hashlib.sha1(Path(__file__).read_bytes()).hexdigest()
        settings = {
            "NNODES": self.count,
            "MAX_RESTARTS": self.max_restarts,
            "the version of engine/machines.py": version[:10],
        }
        self.me = Launcher(params.get_as_int("rank"), socket.gethostname(), settings)
        self.meeting, self.key = None, uuid.uuid4().hex
        if self.me.rank == 0:
            self.meeting = Meeting(self.me, self.wait_s)
            self.server = self._serve()
        self.link = self._new_link()
        self.round = -1

    def _serve(self) -> dist.Store:
        try:
            with socket.create_server(("", self.port)):
                pass  # torch's own prints a warning if it can't
            server = dist.TCPStore("localhost", self.port, is_master=True, wait_for_workers=False)
        except (OSError, RuntimeError) as error:
            is_ours = isinstance(error, OSError)
            reason = os.strerror(error.errno) if is_ours else str(error).splitlines()[0]
            raise Ended(
                BAD_USAGE,
                f"port {self.port} is not free on this machine ({reason}): set another "
                "MASTER_PORT, on all machines",
            ) from None
        dist.PrefixStore("machines", server).set("key", self.key)
        return server

    def _new_link(self) -> Link:
        link = Link(self.address, self.port, self.me, self.meeting, self.key)
        link.start()
        return link

    def _call(self) -> Call:
        """What the first launcher said last. Raises Ended if the run is over."""
        call = self.link.call
        if call.end:
            raise Ended(*call.end)
        for number, problem in call.refused:
            if number == self.link.number:
                raise Ended(BAD_USAGE, problem)
        return call

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for the next round."""
        self.me.done, self.me.succeeded = self.round, False
        heard, told = time.monotonic(), False
        first = f"MASTER_ADDR={self.address}, MASTER_PORT={self.port}"
        while True:
            call = self._call()
            if self.link.is_lost():
                if self.round >= self.max_restarts:
                    raise Ended(1, for_good(f"machine 0 ({self.address})", self.max_restarts))
                self.link.closed = True
                self.link = self._new_link()
            elif self.link.is_in():
                heard = self.link.heard
                if call.running and call.round > self.round and self.link.number in call.members:
                    self.round = call.round
                    break
            silent = time.monotonic() - heard
            if silent > self.wait_s:
                problem = self.link.problem
                problem += ", though this is NODE_RANK=0" if self.meeting else ""
                raise Ended(
                    1,
                    f"{first} did not answer for {self.wait_s} s (NODE_WAIT; {problem}): "
                    "start ./run.sh there with NODE_RANK=0, and open the ports between machines",
                )
            if silent > QUIET_S and not told:
                told = True
                problem = self.link.problem
                say(f"waiting for {first}, at most {self.wait_s} s (NODE_WAIT; {problem})")
            time.sleep(TICK_S / 5)
        store = connect(self.address, self.port, 2 * SILENCE_S)
        return RendezvousInfo(
            dist.PrefixStore(f"round {self.round}", store),
            self.me.rank,
            self.count,
            RendezvousStoreInfo(self.address, self.port),
        )

    def num_nodes_waiting(self) -> int:
        """Not 0 if the round is over. The agent asks whenever it looks after its processes."""
        call = self.link.call
        is_on = call.running and call.round == self.round and not call.end
        return int(self.link.is_lost() or not is_on)

    def wait_for_the_others(self) -> None:
        """Until the processes of all machines have ended as well as those of this one.

        Raises Ended if some have not, since those of this one are gone.
        """
        self.me.succeeded = True
        while not self._call().succeeded:
            if self.num_nodes_waiting():
                raise Ended(
                    1,
                    "another machine was lost after the processes of this one had ended: start all "
                    "again, with --resume auto",
                )
            time.sleep(TICK_S / 5)

    def leave(self, status: int) -> None:
        """Tells the others, and stays until they know."""
        self.me.left = status
        until = time.monotonic() + GOODBYE_S
        while not (self.link.said_goodbye or self.link.is_lost() or time.monotonic() > until):
            time.sleep(TICK_S / 5)
        self.link.closed = True

    def get_backend(self) -> str:
        return "machines"

    def get_run_id(self) -> str:
        return "machines"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True
