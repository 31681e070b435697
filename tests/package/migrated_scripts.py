"""Helpers of the tests of ``apex-native migrate``."""

COMMAND = ("-c", "from apex_native.extras.command import main; main()")


def losses(done):
    """Return the losses that a script printed.

    amp logs each overflow, and on a CPU without instructions for bfloat16 that it computes in fp32.
    """
    assert done.returncode == 0, done.stderr
    messages = ("amp: ", "Gradient overflow.")
    return [float(line) for line in done.stdout.splitlines() if not line.startswith(messages)]


def migrate(run, tmp_path, script, *flags, status=0):
    """Migrate a script, and return the source code and the report."""
    (tmp_path / "script.py").write_text(script)
    done = run(*COMMAND, "migrate", "script.py", *flags, "--write")
    assert done.returncode == status, done.stderr
    return (tmp_path / "script.py").read_text(), done.stderr
