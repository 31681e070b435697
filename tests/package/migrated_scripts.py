"""Helpers of the tests of ``apex-native migrate``."""

import contextlib
import io
import os

COMMAND = ("-c", "from apex_native.extras.command import main; main()")


def losses(done):
    """Return the losses that a script printed.

    amp logs each overflow, and on a CPU without instructions for bfloat16 that it computes in fp32.
    """
    assert done.returncode == 0, done.stderr
    messages = ("amp: ", "Gradient overflow.")
    return [float(line) for line in done.stdout.splitlines() if not line.startswith(messages)]


def migrate(tmp_path, script, *flags, status=0):
    """Migrate a script, and return the source code and the report.

    It runs in this process, which saves a second for each of many calls.
    """
    from apex_native.extras.migrate import main  # needs libcst

    file, said, before = tmp_path / "script.py", io.StringIO(), os.getcwd()
    file.write_text(script)
    os.chdir(tmp_path)
    try:
        with contextlib.redirect_stderr(said):
            assert main([file.name, *flags, "--write"]) == status, said.getvalue()
    finally:
        os.chdir(before)
    return file.read_text(), said.getvalue()
