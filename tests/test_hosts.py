"""Training on several hosts: network namespaces, each with an address of its own."""

import contextlib
import os
import re
import shutil
import signal
import subprocess

import pytest
from running import SCREENED, Run, assert_same_run, run

pytestmark = pytest.mark.xdist_group("train")
# Eleven steps in an epoch. Three processes and more need --deterministic for the same bits.
SMALL = ("--arch", "shufflenet_v2_x0_5", "--batch-size", 64, "--epochs", 2, "--deterministic")
SWITCH = f"s{os.getpid()}"


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


def space_of(number):
    return f"h{os.getpid()}-{number}"


class Host:
    """A network namespace with a name and an address, on a cable to the switch."""

    def __init__(self, number):
        self.number, self.space, self.cable = number, space_of(number), f"port{number}"
        ip("netns", "add", self.space)
        ip("-n", self.space, "link", "set", "lo", "up")
        ends = ("eth0", "netns", self.space, "type", "veth", "peer", "name", self.cable)
        ip("link", "add", *ends, "netns", SWITCH)
        ip("-n", SWITCH, "link", "set", self.cable, "master", "bridge", "up")
        ip("-n", self.space, "address", "add", f"10.0.0.{number + 1}/24", "dev", "eth0")
        ip("-n", self.space, "link", "set", "eth0", "up")

    def command(self, before="true"):
        """What starts a command here, after `before`."""
        script = f'hostname host{self.number} && {before} && exec "$@"'
        return "ip", "netns", "exec", self.space, "unshare", "--uts", "sh", "-c", script, "sh"

    def start(self, project, *flags, before="true", **variables):
        """``./run.sh`` with one process, as one of two hosts unless `variables` say otherwise."""
        defaults = {"NPROC": "1", "NNODES": "2", "NODE_RANK": str(self.number)}
        defaults |= {"MASTER_ADDR": "10.0.0.1", "CUDA_VISIBLE_DEVICES": ""}
        return Run(project, *flags, prefix=self.command(before), **defaults | variables)

    def lose(self):
        """All processes die, and nobody is told: the cable is out."""
        ip("-n", SWITCH, "link", "set", self.cable, "down")
        done = subprocess.run(["ip", "netns", "pids", self.space], capture_output=True, text=True)
        for process in done.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)

    def come_back(self):
        ip("-n", SWITCH, "link", "set", self.cable, "up")


@pytest.fixture(scope="module")
def hosts():
    """Three of them, on one switch."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare", "hostname"))):
        pytest.skip("hosts are network namespaces, which need root and iproute2")
    try:
        ip("netns", "add", SWITCH)
        ip("-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        ip("-n", SWITCH, "link", "set", "bridge", "up")
        yield [Host(number) for number in range(3)]
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace can be made here: {error.stderr.decode().strip()}")
    finally:
        for space in (*map(space_of, range(3)), SWITCH):
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


@pytest.fixture(scope="module")
def project(bake):
    return bake()


@pytest.fixture(scope="module")
def idle(project, tmp_path_factory):
    """A project whose processes say who they are, and do nothing."""
    folder = tmp_path_factory.mktemp("idle")
    shutil.copytree(project / "engine", folder / "engine")
    shutil.copy(project / "run.sh", folder)
    (folder / "main.py").write_text(
        "import os, sys, time\n"
        "print('rank', os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\n"
        "time.sleep(float(sys.argv[3]))\n"
        "sys.exit(int(sys.argv[4]) if sys.argv[4:] else 0)\n"
    )
    return folder


@contextlib.contextmanager
def all_of(*runs):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(one) for one in runs]


def errors(*runs):
    """How each ended, and the sentence that says why."""
    ends = [one.end(60)[0] for one in runs]
    for one in runs:
        assert "Traceback" not in one.said
    return ends, [re.findall(r"^error: (.*)", one.said, re.MULTILINE)[-1] for one in runs]


# The launchers alone


def test_hosts_that_never_come(hosts, idle, tmp_path):
    wait = {"NODE_WAIT": "2"}
    with all_of(
        hosts[0].start(idle, "--output", tmp_path / "0", 9, NNODES="3", **wait),
        hosts[1].start(idle, "--output", tmp_path / "1", 9, MASTER_ADDR="10.0.0.3", **wait),
    ) as runs:
        statuses, (of_first, of_second) = errors(*runs)
    assert statuses == [1, 1]
    assert of_first.startswith("machines 1, 2 did not come in 2 s (NODE_WAIT); there are 3")
    assert of_second.startswith("MASTER_ADDR=10.0.0.3, MASTER_PORT=29500 did not answer for 2 s")
    assert "(NODE_WAIT; Connection refused)" in of_second


def test_a_host_that_waits_for_another_starts_before_it_saves(hosts, idle, tmp_path):
    with hosts[0].start(idle, "--output", tmp_path / "0", 3) as first:
        first.wait_for("waiting for machine 1")
        os.kill(first.process.pid, signal.SIGUSR1)
        with hosts[1].start(idle, "--output", tmp_path / "1", 3) as second:
            assert [one.end()[0] for one in (first, second)] == [0, 0]  # nothing was left to save
    assert "rank 0 0" in first.said


def test_a_host_that_is_to_start_again_does_so_before_it_saves(hosts, idle, tmp_path):
    with all_of(
        hosts[0].start(idle, "--output", tmp_path / "0", 3, MAX_RESTARTS="1"),
        hosts[1].start(idle, "--output", tmp_path / "1", 0, 1, MAX_RESTARTS="1"),
    ) as (first, second):
        second.wait_for("rank 1 0")
        second.wait_until(lambda: not second.ranks())
        os.kill(second.process.pid, signal.SIGUSR1)
        second.end()
    assert "rank 1 1" in second.said


@pytest.mark.parametrize("status", [0, 1])
def test_a_host_that_is_done_waits_for_the_other(hosts, idle, tmp_path, status):
    with all_of(
        hosts[0].start(idle, "--output", tmp_path / "0", 0),
        hosts[1].start(idle, "--output", tmp_path / "1", 3, status),
    ) as runs:
        assert [one.end()[0] for one in runs] == [status, status]
    why = "error: machine 1 (host1) ended with status 1, and says why\n"
    assert runs[0].said.endswith(why) == bool(status)


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"NODE_RANK": "0"}, "NODE_RANK is 0 here, but MASTER_ADDR=10.0.0.1 is another machine"),
        ({"NNODES": "3"}, "NNODES is 3 on machine 1 (host1) and 2 on machine 0 (host0)"),
    ],
    ids=["number", "count"],
)
def test_numbers_that_cant_be_right(hosts, idle, tmp_path, variables, sentence):
    first = hosts[0].start(idle, "--output", tmp_path / "0", 9, NODE_WAIT="5")
    second = hosts[1].start(idle, "--output", tmp_path / "1", 9, **variables)
    with all_of(first, second):
        statuses, said = errors(second)
    assert statuses == [2]
    assert said[0].startswith(sentence)


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "who"), [(0, "machine 0 (10.0.0.1)"), (1, "machine 1 (host1)")])
def test_a_host_that_is_lost_for_good(hosts, idle, tmp_path, lost, who):
    runs = [host.start(idle, "--output", tmp_path / f"{host.number}", 60) for host in hosts[:2]]
    with all_of(*runs):
        for one in runs:
            one.wait_for("rank")
        hosts[lost].lose()
        statuses, said = errors(runs[1 - lost])
        hosts[lost].come_back()
    assert statuses == [1]
    assert said[0].startswith(f"{who} is lost, and MAX_RESTARTS is 0: start all machines again")


# Training


def ends_well(*runs):
    for one in runs:
        assert one.end(120)[0] == 0, one.said


@pytest.fixture(scope="module")
def whole(project, tmp_path_factory):
    """The folder of a run of two processes on one host."""
    output = tmp_path_factory.mktemp("whole")
    done = run(project, *SMALL, "--output", output, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    return output


@pytest.mark.slow
def test_two_hosts_started_as_the_readme_says(hosts, project, whole, tmp_path):
    """With one process each, they train what two processes of one host do."""
    lines = re.findall(r"^    (NNODES=.*? \./run\.sh)", (project / "README.md").read_text(), re.M)
    assert len(lines) == 2
    runs = []
    for host, line in zip(hosts, lines, strict=False):
        command = f'{line} "$@"'
        flags = (*SMALL, "--output", tmp_path / f"{host.number}")
        runs.append(
            subprocess.Popen(
                [*host.command(), "sh", "-c", command, "sh", *map(str, flags)],
                env=SCREENED | {"NPROC": "1"},
                cwd=project,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    for one in runs:
        said, _ = one.communicate(timeout=120)
        assert one.returncode == 0, said
    assert_same_run(tmp_path / "0", whole)
    assert not (tmp_path / "1").exists()


@pytest.mark.slow
def test_three_hosts(hosts, project, tmp_path):
    flags = (*SMALL, "--steps", 11, "--output")
    with all_of(
        *(h.start(project, *flags, tmp_path / f"{h.number}", NNODES="3") for h in hosts)
    ) as runs:
        ends_well(*runs)
    one = tmp_path / "one"
    done = run(project, *flags, one, nproc=3, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "0", one)


@pytest.mark.slow
def test_hosts_that_are_lost_and_come_back(hosts, project, whole, tmp_path):
    """First the one without checkpoints, then the one that has them all; they share no disk."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def start(host):
        flags = (*SMALL, "--output", disk / f"{host.number}", "--save-every", 4)
        before = f"mount -t tmpfs none '{disk}'" if host.number else "true"
        return host.start(project, *flags, before=before, MAX_RESTARTS="2")

    first, second = [start(host) for host in hosts[:2]]
    with contextlib.ExitStack() as stack:
        stack.enter_context(first)
        stack.enter_context(second)
        first.wait_until((disk / "0" / "step-4.pt").exists, 120)
        hosts[1].lose()
        hosts[1].come_back()
        second = stack.enter_context(start(hosts[1]))
        first.wait_until((disk / "0" / "step-16.pt").exists, 120)
        assert "resumed" in first.said
        hosts[0].lose()
        hosts[0].come_back()
        first = stack.enter_context(start(hosts[0]))
        ends_well(first, second)
    assert "resumed" in first.said
    assert_same_run(disk / "0", whole)


@pytest.mark.slow
def test_a_signal_on_one_host_stops_the_run_on_all(hosts, project, tmp_path):
    flags = (*SMALL, "--epochs", 50, "--output")
    runs = [
        host.start(project, *flags, tmp_path / f"{host.number}", MAX_RESTARTS="1")
        for host in hosts[:2]
    ]
    with all_of(*runs):
        runs[0].wait_for("loss_scale  images")
        os.kill(runs[1].process.pid, signal.SIGTERM)
        assert [one.end()[0] for one in runs] == [128 + signal.SIGTERM] * 2
    assert "stopped after step" in runs[0].said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "line", "words"),
    [
        (
            "main.py",
            "import torch; torch.__version__ = '2.5'",
            "torch is 2.5 on host1 (rank 1) but ",
        ),
        ("task.py", "# Edited here alone.", "task.py is "),
    ],
    ids=["torch", "code"],
)
def test_hosts_that_differ(hosts, project, tmp_path, file, line, words):
    """The project's own tests/test_machines.py has the rest."""
    copied = shutil.copytree(project, tmp_path / "project")
    (copied / file).write_text(f"{line}\n{(copied / file).read_text()}")
    first = hosts[0].start(project, *SMALL, "--output", tmp_path / "0")
    second = hosts[1].start(copied, *SMALL, "--output", tmp_path / "1")
    with all_of(first, second):
        statuses, said = errors(first, second)
    assert statuses == [2, 2]
    assert said[0].startswith(words)
    assert said[1] == "machine 0 (host0) ended with status 2, and says why"


@pytest.mark.slow
def test_the_newest_checkpoint_is_on_another_host(hosts, project, tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "step-7.pt").touch()
    flags = (*SMALL, "--resume", "auto", "--output")
    with all_of(
        *(host.start(project, *flags, tmp_path / f"{host.number}") for host in hosts[:2])
    ) as runs:
        statuses, said = errors(*runs)
    assert statuses == [2, 2]
    assert "on host1 has a checkpoint of step 7, on the machine with NODE_RANK=0 none: " in said[0]


@pytest.mark.slow
def test_check(hosts, project, tmp_path):
    with all_of(
        *(h.start(project, "--check", "--output", tmp_path / f"{h.number}") for h in hosts[:2])
    ) as runs:
        ends_well(*runs)
    assert re.search(r"✓ rendezvous +2 machines meet at 10.0.0.1, port 29500", runs[0].said)
    assert re.search(r"✓ all-reduce .* over gloo in .* 2 ranks", runs[0].said)
