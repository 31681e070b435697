"""launch/slurm.sbatch, on a real SLURM: a controller and two nodes, all on this machine."""

import os
import re
import shutil
import stat
import subprocess
import sys
import time

import pytest
import root
from ports import free_port
from running import SCREENED, assert_same_run, consolidate
from transformer import with_transformer

CONFIG = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
# MASTER_PORT follows from it, and another test may be running on this machine.
FirstJobId={ports[0]}
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 Gres=gpu:2
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 Gres=gpu:2
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=2
"""
DAEMONS = """\
munged --force --socket=$PWD/munge.socket --key-file=$PWD/munge.key --pid-file=$PWD/munge.pid \\
    --seed-file=$PWD/munge.seed --log-file=$PWD/munge.log
slurmctld
slurmd -N n1
slurmd -N n2
exec sleep infinity
"""
# They and all jobs are in a namespace that ends with its first process, and that with this one.
CONFINED = (
    *("setpriv", "--pdeathsig", "KILL"),
    *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
)
COMMANDS = ("slurmctld", "slurmd", "sbatch", "munged", "setpriv", "unshare")
# With dropout and batch norm; eleven steps in an epoch.
SMALL = ("--arch", "mobilenet_v3_small", "--batch-size", "64")
NO_GPU = "--gpus-per-node=0"


class Cluster:
    """Two nodes, each of eight cores and two GPUs, so to speak."""

    def __init__(self, folder):
        self.folder, self.projects = folder, set()
        variables = {"SLURM_CONF": f"{folder}/slurm.conf", "NPROC": "1"}
        self.env = SCREENED | variables
        ports = [free_port() for _ in range(3)]
        (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, ports=ports))
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-1]\n")
        for name in ("gpu0", "gpu1"):
            os.mknod(folder / name, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        for name in ("state", "n1", "n2"):
            (folder / name).mkdir()
        (folder / "munge.key").touch(0o600)
        (folder / "munge.key").write_bytes(os.urandom(64))

    def __enter__(self):
        with (self.folder / "daemons.log").open("w") as log:
            self.daemons = subprocess.Popen(
                [*CONFINED, "sh", "-euc", DAEMONS],
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            self.wait_until((self.folder / "n2.pid").exists)
            self.wait_until(lambda: self.ask("sinfo", "-ho", "%T %D", "-p", "low") == "idle 2\n")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.daemons.kill()
        self.daemons.wait()

    def ask(self, *command, cwd=None):
        """What the command prints."""
        options = {"cwd": cwd, "env": self.env, "capture_output": True, "timeout": 60}
        done = subprocess.run(command, text=True, **options)
        assert done.returncode == 0, done.stderr + self.logs()
        return done.stdout

    def submit(self, project, *words):
        """Starts launch/slurm.sbatch there with sbatch's options, "--" and flags of main.py."""
        self.projects.add(project)
        end = words.index("--")
        job = ("--cpus-per-task=1", *words[:end], "launch/slurm.sbatch", *words[end + 1 :])
        return self.ask("sbatch", "--parsable", *job, cwd=project).strip()

    def shows(self, job, text):
        return text in self.ask("scontrol", "show", "job", job)

    def wait_for(self, job, state):
        self.wait_until(lambda: self.shows(job, f"JobState={state} "))

    def start_again(self, job):
        """Once it is requeued, without the two minutes that SLURM lets it wait."""
        self.wait_for(job, "PENDING")
        # Not at once: within a second, a node takes the new start for the old one.
        self.ask("scontrol", "update", f"JobId={job}", "StartTime=now+3seconds")

    def wait_until(self, holds, seconds=300):
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.3)

    def logs(self):
        paths = [*self.folder.glob("*.log")]
        for project in self.projects:
            paths += [*project.glob("slurm-*.out"), *project.glob("runs/*/*.log")]
        return "\n".join(f"== {path}\n{path.read_text()[-3000:]}" for path in paths)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if os.geteuid():
        root.skip("only root can start a SLURM here")
    if missing := [name for name in COMMANDS if not shutil.which(name)]:
        root.skip(f"{missing[0]} is missing: apt-get install slurm-wlm munge")
    if subprocess.run([*CONFINED, "true"], capture_output=True).returncode:
        root.skip("a namespace for SLURM's processes can't be made here")
    with Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def project(bake):
    return bake(cluster="slurm")


# The script alone


def start(script, folder, **variables):
    env = os.environ | variables
    return subprocess.run(["bash", script], cwd=folder, env=env, capture_output=True, text=True)


def test_shellcheck(project):
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    command = [shutil.which("shellcheck", path=path), project / "launch" / "slurm.sbatch"]
    subprocess.run(command, check=True)


def test_started_outside_slurm(project):
    done = start("launch/slurm.sbatch", project)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"slurm\.sbatch: .*: sbatch launch/slurm\.sbatch\n", done.stderr)


def test_submitted_from_elsewhere(project, tmp_path):
    done = start(project / "launch" / "slurm.sbatch", tmp_path, SLURMD_NODENAME="n1")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"slurm\.sbatch: submit this from the project's .*\n", done.stderr)


def test_heterogeneous_job_is_refused(project):
    done = start("launch/slurm.sbatch", project, SLURMD_NODENAME="n1", SLURM_HET_SIZE="2")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"slurm\.sbatch: a heterogeneous job .*\n", done.stderr)


# On a cluster


def real(test):
    for mark in (pytest.mark.slurm, pytest.mark.weekly, pytest.mark.xdist_group("train")):
        test = mark(test)
    return test


@pytest.fixture
def instead(project, tmp_path):
    """A project of which only launch/ is there, and run.sh is the given script."""

    def instead(script):
        folder = tmp_path / "a project"
        shutil.copytree(project / "launch", folder / "launch")
        (folder / "run.sh").write_text(f"#!/bin/sh\n{script}")
        (folder / "run.sh").chmod(0o755)
        return folder

    return instead


@real
def test_what_each_node_is_told(cluster, instead):
    folder = instead(
        'echo "$NODE_RANK/$NNODES $MASTER_ADDR:$MASTER_PORT $CUDA_VISIBLE_DEVICES"\n'
        'printf "%s\\n" "$@"\n'
    )
    options = ("--array=0,7", "--gpus-per-node=2", "--ntasks-per-node=4", "--export=ALL,NNODES=5")
    job = cluster.submit(folder, *options, "--", "--data", "a b", "*")
    ports = set()
    for number in (0, 7):
        output = f"runs/{job}_{number}"
        cluster.wait_for(f"{job}_{number}", "COMPLETED")
        for node in (0, 1):
            name, told, *flags = (folder / output / f"node{node}.log").read_text().splitlines()
            assert name == f"node {node}: n{node + 1}"
            assert re.fullmatch(rf"{node}/2 127\.0\.0\.1:\d+ 0,1", told)
            assert flags == ["--output", output, f"--seed={number}", "--data", "a b", "*"]
            ports.add(told.split()[1])
    assert len(ports) == 2


@real
def test_a_job_without_gpus_sees_none(cluster, instead):
    folder = instead('echo "GPUs: ${CUDA_VISIBLE_DEVICES-all}"\n')
    job = cluster.submit(folder, NO_GPU, "--export=NONE", "--")
    cluster.wait_for(job, "COMPLETED")
    assert (folder / "runs" / job / "node1.log").read_text().endswith("GPUs: \n")


@real
def test_when_one_node_fails_the_job_does(cluster, instead):
    folder = instead('[ "$NODE_RANK" = 0 ] || exit 3\nexec sleep 1000\n')
    job = cluster.submit(folder, NO_GPU, "--")
    cluster.wait_for(job, "FAILED")


SAVE_AND_END = """\
trap 'exit 143' TERM
touch "start${SLURM_RESTART_COUNT:-0}.$NODE_RANK"
sleep 1000 &
wait
"""


def preempt(cluster, folder):
    cluster.ask("sbatch", "--partition=high", "--exclusive", "-N2", "--wrap=true", cwd=folder)


@real
def test_a_job_that_ends_in_the_grace_time_of_its_preemption_is_requeued_else_it_has_failed(
    cluster, instead
):
    folder = instead(SAVE_AND_END)
    job = cluster.submit(folder, NO_GPU, "--")
    cluster.wait_until(lambda: len([*folder.glob("start0.*")]) == 2)
    preempt(cluster, folder)
    cluster.start_again(job)
    cluster.wait_until(lambda: len([*folder.glob("start1.*")]) == 2)
    cluster.ask("scancel", "--signal=TERM", job)
    cluster.wait_for(job, "FAILED")


@real
def test_usr1_does_not_end_a_job_that_is_only_starting(cluster, instead):
    folder = instead('touch "start$NODE_RANK"\nuntil [ -e go ]; do sleep 0.1; done\n')
    job = cluster.submit(folder, NO_GPU, "--")
    cluster.wait_until(lambda: len([*folder.glob("start*")]) == 2)
    cluster.ask("scancel", "--signal=USR1", job)
    time.sleep(1)  # in which the signal arrives
    (folder / "go").touch()
    cluster.wait_for(job, "COMPLETED")


FLAGS = (*SMALL, "--epochs", "4", "--seed", "0")


@pytest.fixture(scope="module")
def whole(cluster, project):
    """The output of a training that nothing disturbs."""
    job = cluster.submit(project, NO_GPU, "--", *FLAGS)
    cluster.wait_for(job, "COMPLETED")
    return project / "runs" / job


def assert_resumed(cluster, job, output, whole):
    cluster.wait_for(job, "COMPLETED")
    assert cluster.shows(job, "Restarts=1 ")
    said = "".join(path.read_text() for path in output.glob("node*.log"))
    assert said.count("2 processes on the CPU") == 2
    assert said.count(f"resumed runs/{job}/") == 1
    assert_same_run(output, whole)


@real
def test_jobs_share_nodes_and_one_that_is_stopped_is_requeued_and_ends_as_the_other(
    cluster, project, whole
):
    array = cluster.submit(project, NO_GPU, "--array=3-4", "--", *FLAGS)
    other, stopped = f"{array}_3", f"{array}_4"
    output = project / "runs" / stopped
    cluster.wait_until(lambda: (output / "last.pt").exists())
    cluster.ask("scancel", "--signal=USR1", stopped)
    cluster.start_again(stopped)
    assert_resumed(cluster, stopped, output, whole)
    cluster.wait_for(other, "COMPLETED")
    assert cluster.shows(other, "Restarts=0 ")
    assert_same_run(project / "runs" / other, whole)


@real
def test_requeued_job_with_fsdp_continues_from_its_sharded_checkpoint(cluster, bake, tmp_path):
    generated = bake(cluster="slurm", ddp="fsdp", opt_level="O0", sync_bn=False)
    project = with_transformer(generated, tmp_path / "project")
    flags = (*SMALL, "--epochs", "4", "--seed", "0", "--deterministic")
    whole, stopped = [cluster.submit(project, NO_GPU, "--", *flags) for _ in range(2)]
    output = project / "runs" / stopped
    cluster.wait_until(lambda: (output / "last").exists())
    cluster.ask("scancel", "--signal=USR1", stopped)
    cluster.start_again(stopped)
    for job in (whole, stopped):
        cluster.wait_for(job, "COMPLETED")
        consolidate(project, project / "runs" / job)
    assert_resumed(cluster, stopped, output, project / "runs" / whole)


@real
def test_a_training_that_another_job_preempts_ends_as_if_undisturbed(cluster, project, whole):
    job = cluster.submit(project, NO_GPU, "--", *FLAGS)
    output = project / "runs" / job
    cluster.wait_until(lambda: (output / "last.pt").exists())
    preempt(cluster, project)
    cluster.start_again(job)
    assert_resumed(cluster, job, output, whole)
