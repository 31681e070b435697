"""Switch the answers into the code, and say what to do next.

task.py is that of classification; template_task_TASK.py replaces it if another task is chosen.

The files of MARKED are valid Python, shell and TOML in the template and were copied as they are.
Here, what depends on an answer is chosen by their markers, which are gone from the result:

    # % if sync_bn
    model = apex.parallel.convert_syncbn_model(model)
    # % endif
    parser.add_argument("--opt-level", default="«opt_level»")
"""

import sys

# cookiecutter runs a copy of this in the folder for temporary files, where others may put modules.
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]

import contextlib
import json
import re
import shlex
import traceback
from pathlib import Path
from tempfile import gettempdir

from jinja2 import Environment, StrictUndefined, TemplateError

# JSON inside a raw string is the one way in: nothing typed can end the string or be run.
ANSWERS = json.loads(
    r"""
{{ cookiecutter | tojson }}
"""
)
# A list and not a search: with --overwrite-if-exists the user's own files are in this folder too,
# where "# %%" starts a notebook cell and « is a quotation mark.
MARKED = ("main.py", "pyproject.toml", "run.sh", "tests/test_training.py")
OTHER_TASKS = ("segmentation", "contrastive")
CHOSEN = ("project_slug", "task", "opt_level", "ddp", "backend", "license")
YES_OR_NO = ("fused_adam", "sync_bn")
YES = ("1", "true", "t", "yes", "y", "on")
TYPED = ("description", "author_name")

JINJA = Environment(
    block_start_string="«%",
    block_end_string="%»",
    variable_start_string="«",
    variable_end_string="»",
    comment_start_string="«#",
    comment_end_string="#»",
    keep_trailing_newline=True,
    undefined=StrictUndefined,
)
GAP = "\0"  # stands where a marker stood; no source holds one


def toml(text):
    """The text as the inside of a TOML string; nothing if it is not one line.

    A package's metadata has one line for each. setuptools cuts a longer description, and behind a
    longer name it loses the dependencies, so such a text is left to the README and the LICENSE.
    """
    if text.splitlines() != [text]:
        return ""
    # TOML has JSON's escapes, but no surrogate pairs, and it wants DEL escaped too.
    return json.dumps(text, ensure_ascii=False)[1:-1].replace("\x7f", r"\u007f")


def switch(source, answers):
    """Follow the markers. Of the blank lines around one, the longer run stays."""
    # As blocks, because Jinja's line_statement_prefix swallows the blank lines below a statement.
    source = re.sub(r"^[ \t]*# % (.+)$", rf"«% \1 %»{GAP}", source, flags=re.MULTILINE)
    text = JINJA.from_string(source).render(answers)
    text = re.sub(rf"\n*({GAP}\n+)+", lambda run: max(run[0].split(GAP)), text)
    return text.strip("\n") + "\n"


def check(path, text):
    """Raise SyntaxError unless the text is Python in which no marker is left."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.search("# %|[«»]", line):
            raise SyntaxError(f"a marker is left: {line.strip()}", (path, number, None, None))
    compile(text, path, "exec")


for task in OTHER_TASKS:
    other = Path(f"template_task_{task}.py")
    if task == ANSWERS["task"]:
        other.replace("task.py")
    else:
        other.unlink()

for path in map(Path, MARKED):
    answers = {name: ANSWERS[name] for name in CHOSEN}
    # Words come from a command line, before cookiecutter 2.7.
    answers.update({name: str(ANSWERS[name]).lower() in YES for name in YES_OR_NO})
    if path.suffix != ".py":  # nothing that was typed gets into code
        answers.update({name: toml(str(ANSWERS[name])) for name in TYPED})
    try:
        text = switch(path.read_text(encoding="utf-8"), answers)
        if path.suffix == ".py":
            check(path, text)
    except (TemplateError, SyntaxError) as error:
        at = getattr(error, "lineno", None) or traceback.extract_tb(error.__traceback__)[-1].lineno
        sys.exit(f"The template is broken: {path}, line {at}: {getattr(error, 'msg', error)}")
    path.write_text(text, encoding="utf-8")

Path("run.sh").chmod(Path("run.sh").stat().st_mode | 0o111)  # a template in a zip file has lost it

for folder in ("launch", "recipes"):
    with contextlib.suppress(OSError):  # it has a file for these answers, or one of the user's
        Path(folder).rmdir()

# `cruft update` generates in a temporary folder, and, unlike cookiecutter, states no output folder.
is_update = "_output_dir" not in ANSWERS and Path(gettempdir()).resolve() in Path.cwd().parents
if not is_update:
    # Not to stdout, which is the diff where `cruft diff` runs this.
    next_commands = f"cd {shlex.quote(str(Path.cwd()))}", "pip install -e .", "./run.sh"
    print("\nNext:\n", *next_commands, sep="\n    ", end="\n\n", file=sys.stderr)
