"""``apex-native migrate``: rewrite the Apex calls of a script to plain PyTorch."""

import argparse
import ast
import difflib
import io
import os
import re
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from shlex import quote
from typing import Any

from .report import PREFIX, Report

USAGE = "apex-native migrate SCRIPT.py [--opt-level O1] [--loss-scale dynamic] [--write]"
MARK = f"{PREFIX}earlier"
# nbconvert writes the code of such cells and lines as a text, which is not read.
MAGIC = rb"""(?m)^[^#\n]*run_(?:cell|line)_magic\(\s*['"](time|timeit|capture|prun)['"]"""
EPILOG = """Exit status: 0 all calls were rewritten; 1 some were left, each below a comment;
2 nothing was done (usage, no such file, invalid Python, no Apex in it)."""


def migrate(code: bytes, level: str = "", loss_scale: str = "") -> tuple[bytes, Report]:
    """Return the rewritten source code, in the same encoding, and the report.

    `level` is an optimization level, and `loss_scale` "dynamic", in place of the script's.

    Raises libcst.ParserSyntaxError or SyntaxError for invalid Python, RecursionError if it is
    nested too deeply, and ValueError if the result would be invalid.
    """
    import libcst as cst
    from libcst import matchers
    from libcst.metadata import MetadataWrapper, PositionProvider

    from .amp import Analysis
    from .imports import STILL_USED, NoteImports, apex_imports, clean
    from .references import References
    from .rewrite import Rewrite

    _parse(code)  # libcst crashes on deep nesting, which Python refuses
    report = Report()
    # Comments of an earlier migration keep their lines until the report is complete.
    is_earlier: matchers.MatchIfTrue[str] = matchers.MatchIfTrue(
        lambda text: text.startswith(PREFIX)
    )
    earlier = matchers.EmptyLine(comment=matchers.Comment(is_earlier))
    mark = cst.EmptyLine(comment=cst.Comment(MARK))
    tree: Any = matchers.replace(cst.parse_module(code), earlier, mark)
    wrapper = MetadataWrapper(tree)
    analysis = Analysis(level, loss_scale)
    wrapper.visit(analysis)
    wrapper.visit(References(analysis.usage))
    rewrite = Rewrite(analysis.usage, report)
    module: Any = clean(wrapper.visit(rewrite))
    positions, imports = wrapper.resolve(PositionProvider), apex_imports(wrapper.module)
    # The reports of calls that are left explain the imports of what they call.
    explained = {name for name in imports if name[-1].split(".")[0] in rewrite.left_names}
    silent = apex_imports(module).keys() - explained
    lines = {name: positions[node].start.line for name, node in imports.items()}
    if silent:
        report.left += [(line, STILL_USED) for name, line in lines.items() if name in silent]
        module = module.visit(NoteImports(silent))
    elif not report.changed and not report.left:
        report.changed += [(line, "import removed: nothing uses it") for line in lines.values()]
    marked = matchers.EmptyLine(comment=matchers.Comment(MARK))
    module = matchers.replace(module, marked, cst.RemovalSentinel.REMOVE)
    try:
        _parse(module.bytes)
    except SyntaxError as error:
        cause = "as with form feeds in the indentation"
        raise ValueError(f"the result would not be valid Python, {cause}: {error}") from None
    return module.bytes, report


def _parse(code: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        ast.parse(code)


def write(path: Path, content: bytes) -> None:
    """Replace the file at once, and keep its mode."""
    path = path.resolve()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, path.stat().st_mode)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _problem_of_notebook(path: Path, content: bytes) -> str:
    """Return why code of a notebook, or of one that was converted, can't be read; "" if it can."""
    if path.suffix == ".ipynb":
        convert = f"jupyter nbconvert --to script {quote(str(path))}"
        return f"{path} is a notebook: convert it to a script first ({convert})"
    if magic := re.search(MAGIC, content):
        name = magic[1].decode()
        return (
            f"{path}: the code of a cell or line with %{name} is a string here, and is not read: "
            f"remove %{name} from the notebook, and convert it again"
        )
    return ""


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status."""
    parser = argparse.ArgumentParser(usage=USAGE, epilog=EPILOG)
    parser.add_argument("script", type=Path)
    parser.add_argument(
        "--opt-level",
        choices=("O0", "O1", "O4"),
        default="",
        help="in place of the script's, which may come from its command line",
    )
    parser.add_argument(
        "--loss-scale",
        choices=("dynamic",),
        default="",
        help="in place of the script's, at O1",
    )
    parser.add_argument("--write", action="store_true", help="write the file, not a diff")
    args = parser.parse_args(arguments)
    try:
        import libcst as cst
    except ImportError:
        return _fail("needs libcst: pip install 'apex-native[migrate]'")
    try:
        old = args.script.read_bytes()
        if problem := _problem_of_notebook(args.script, old):
            return _fail(problem)
        new, report = migrate(old, args.opt_level, args.loss_scale)
    except OSError as error:
        return _fail(f"cannot read {args.script}: {error.strerror}")
    except (RecursionError, MemoryError):  # of libcst and of Python's own parser
        return _fail(f"{args.script} holds expressions that are nested too deeply; split them")
    except (cst.ParserSyntaxError, UnicodeDecodeError, SyntaxError) as error:
        fix = "convert Python 2, and indentations of tabs and spaces, first"
        return _fail(f"{args.script} can't be parsed as Python 3 ({fix}): {error}")
    except ValueError as error:
        return _fail(f"{args.script}: {error}; it is unchanged")
    if not report.changed and not report.left:
        ours = " (imports of apex_native are not converted)" if b"apex_native" in old else ""
        return _fail(f"{args.script} does not import apex{ours}; nothing to migrate")
    if args.write:
        try:
            write(args.script, new)
        except OSError as error:
            return _fail(f"cannot write {args.script}: {error.strerror}; it is unchanged")
    else:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # exit silently when piped into "head"
        before, after = (
            io.StringIO(text.decode(errors="replace")).readlines() for text in (old, new)
        )
        name = str(args.script)
        sys.stdout.writelines(difflib.unified_diff(before, after, name, name))
    sys.stderr.writelines(f"{_printable(line)}\n" for line in report.lines(str(args.script)))
    return 1 if report.left else 0


def _fail(message: str) -> int:
    sys.stderr.write(f"apex-native migrate: {_printable(message)}\n")
    return 2


def _printable(text: str) -> str:
    """Return `text` with escapes for what would control a terminal, as a name or a literal may."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
