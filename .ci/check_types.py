"""Run mypy on generated projects, as their owners' CI does: one of each task, and one with FSDP.

The modules that only the package apex-native has are checked with it, as a part of apex_native.
"""

import shutil
import subprocess
import sys

from demo import ROOT, generate

ANSWERS = (
    {"task": "classification"},
    {"task": "segmentation"},
    {"task": "contrastive"},
    {"ddp": "fsdp", "opt_level": "O4"},
)
FOLDER = ROOT / "build" / "types"


def check(answers: dict[str, str]) -> bool:
    """Return whether the project with these answers passes; all use the libraries' cache."""
    project = generate(FOLDER / "-".join(answers.values()), answers)
    shutil.copytree(ROOT / "packages" / "apex_native", project / "apex_native", dirs_exist_ok=True)
    print(answers, flush=True)
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(FOLDER / "cache")]
    return subprocess.run(command, cwd=project, check=False).returncode == 0


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    results = [check(answers) for answers in ANSWERS]
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
