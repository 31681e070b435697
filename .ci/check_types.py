"""Run mypy on the project that the default answers generate, as its owner's CI does.

The modules that only the package apex-native has are checked with it, as a part of apex_native.
"""

import shutil
import subprocess
import sys

from demo import ROOT, generate


def main() -> int:
    folder = ROOT / "build" / "types"
    shutil.rmtree(folder, ignore_errors=True)
    project = generate(folder)
    shutil.copytree(ROOT / "packages" / "apex_native", project / "apex_native", dirs_exist_ok=True)
    return subprocess.run([sys.executable, "-m", "mypy"], cwd=project, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
