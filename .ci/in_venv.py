"""Runs a command in the development environment, which is made first if it isn't there.

    python3 .ci/in_venv.py pytest -n 2      runs pytest in it
    python3 .ci/in_venv.py                  only makes it, and prints where it is
    python3 .ci/in_venv.py --remove         removes it

The environment is the folder that VENV names, or else one under the user's cache folder whose name
holds a hash of the requirements (requirements-dev.txt, or the file that REQUIREMENTS names), the
Python version and TORCH, a version of torch such as 2.6 (default: the newest): every clone with the
same requirements shares it, and a change makes a new one. A stamp is written into it last, so it is
complete or made anew; a lock lets only one process make it. This needs nothing but Python's
standard library.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

NAME = "ddp-apex-template"
ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / (os.environ.get("REQUIREMENTS") or "requirements-dev.txt")
VERSION = "{}.{}".format(*sys.version_info)
TORCH = os.environ.get("TORCH", "")
STAMP = f".{NAME}"  # empty while the environment is being made, then its key


def key():
    content = REQUIREMENTS.read_bytes() + f"{VERSION} {sysconfig.get_platform()}".encode()
    prefix = f"torch{TORCH}-" if TORCH else ""
    return f"{prefix}py{VERSION}-{hashlib.sha256(content).hexdigest()[:12]}"


def default_folder():
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / NAME / key()


def is_complete(folder):
    stamp, python = folder / STAMP, folder / "bin" / "python"
    return stamp.exists() and stamp.read_text() == key() and python.exists()


def remove(folder):
    """Removes an environment that was made here; anything else is left alone."""
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / STAMP).exists():
        sys.exit(f"{folder} is in the way and was not made by make: remove it, or set VENV.")
    # The stamp goes last, so that an interrupted removal can be taken up again.
    for path in folder.iterdir():
        if path.name != STAMP:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.rmtree(folder)


@contextlib.contextmanager
def locked(folder):
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(folder.name + ".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Waiting for another make, which is at work in {folder}", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def make(folder, lock):
    """Makes the environment, from the start if an earlier attempt was interrupted."""
    try:
        import ensurepip  # noqa: F401
        import venv
    except ImportError:
        package = f"python{VERSION}-venv"
        sys.exit(f"This Python can't make environments: on Debian and Ubuntu, install {package}.")
    remove(folder)
    print(f"Installing {REQUIREMENTS.name} into {folder} (once)", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STAMP).touch()
    venv.create(folder, symlinks=True, with_pip=True)
    install = [folder / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check"]
    # pip holds the lock as well, in case that it outlives this process.
    done = subprocess.run(
        [*install, "-r", REQUIREMENTS, *([f"torch=={TORCH}.*"] if TORCH else [])],
        stdout=sys.stderr,
        pass_fds=[lock.fileno()],
    )
    if done.returncode:
        sys.exit("The installation failed, for the reason above; the next make starts it again.")
    unfinished = folder / (STAMP + ".new")
    unfinished.write_text(key())
    unfinished.replace(folder / STAMP)


def main():
    if sys.version_info < (3, 10):  # noqa: UP036
        sys.exit("Python 3.10 or later is needed: name one, as in make PYTHON=python3.12.")
    folder = Path(os.environ.get("VENV") or default_folder()).expanduser().absolute()
    command = sys.argv[1:]
    if command == ["--remove"]:
        with locked(folder):
            remove(folder)
        return
    if not is_complete(folder):
        with locked(folder) as lock:
            if not is_complete(folder):
                make(folder, lock)
    if not command:
        print(folder)
        return
    os.environ["VIRTUAL_ENV"] = str(folder)
    os.environ["PATH"] = f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    # PYTHON may name the interpreter that made the environment; run.sh would take that one.
    for name in ("PYTHON", "PYTHONHOME"):
        os.environ.pop(name, None)
    os.execvp(command[0], command)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Interrupted.")
