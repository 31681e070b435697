"""The command ``apex-native``."""

import sys

from apex_native import VERSION
from apex_native import __main__ as runner

USAGE = """usage: apex-native run [--fill] SCRIPT.py [its arguments]
       apex-native run [--fill] -m MODULE [its arguments]
       apex-native migrate SCRIPT.py [--opt-level O1] [--loss-scale dynamic] [--write]
       apex-native --version

Run a script that was written for NVIDIA Apex, unchanged, on PyTorch alone;
or print a diff that replaces its calls of Apex by PyTorch's.

  --fill   use what an installed Apex still has, and add only what it lacks

On several GPUs: torchrun --nproc-per-node 4 -m apex_native [--fill] SCRIPT.py [its arguments]
"""


def main() -> None:
    """Run the subcommand that the command line names."""
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    asks_for_help = command != "migrate" and {"-h", "--help"} & {*sys.argv[1:3]}
    if asks_for_help:
        print(USAGE, end="")
    elif command == "run":
        del sys.argv[1]
        runner.main()
    elif command == "migrate":
        from .migrate import main as migrate

        sys.exit(migrate(sys.argv[2:]))
    elif command == "--version":
        print(f"apex-native {VERSION}")
    else:
        wrong = f"apex-native: no command {command!r}\n" if command else ""
        sys.stderr.write(wrong + USAGE)
        sys.exit(2)
