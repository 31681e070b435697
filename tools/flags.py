"""Tables of all flags of main.py for docs/reference/flags.md, from the parser itself.

python tools/flags.py            prints the page
python tools/flags.py --write    writes it

It generates a project for each of PROJECTS and runs its `parse_args` up to the point of parsing.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from cookiecutter.main import cookiecutter

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "flags.md"
# Answers of projects with other flags than the default project, and the answers that they require.
PROJECTS = {
    "task=segmentation": {},
    "task=contrastive": {},
    "fused_adam=no": {},
    "sync_bn=no": {},
    "ddp=torch": {},
    "ddp=fsdp": {"opt_level": "O4"},
    "ddp=dataparallel": {"sync_bn": "no"},
}
INTRODUCTION = """# Flags

`./run.sh [flags]` accepts these flags; `./run.sh --help` prints those of your project, whose
answers decide some defaults and flags. The tables are those of a default project.
`--config FILE.json` sets defaults, which the command line overrides. A flag without a value, other
than `--json`, also has a form that begins with `--no-`.
"""
# Runs in a project: prints the flags of its parser as JSON, {group: [[names, default, help], …]}.
READER = """
import argparse
import json
import main
from engine import cli

class RecordedGroup(cli.ArgumentGroup):
    def __init__(self, parser, title):
        super().__init__(parser, title)
        self.flags = []

    def add_argument(self, *names, **options):
        one = super().add_argument(*names, **options)
        row = [one.option_strings, one.metavar or "", list(one.choices or [])]
        if one.help != argparse.SUPPRESS and one.dest != "help":
            self.flags.append([*row, one.help % vars(one)])
        return one

def read(parser, *_):
    print(json.dumps({title: group.flags for title, group in parser.groups.items()}))
    raise SystemExit

cli.ArgumentGroup = RecordedGroup
cli.ConfigurableParser.parse_args = read
main.parse_args()
"""


def read_flags(answer: str = "") -> dict[str, list]:
    """Return the flags of a project with this answer, and else the defaults, by group."""
    sys.path.insert(0, str(ROOT / "tests"))
    from fresh import copy_template

    name, _, value = answer.partition("=")
    context = {name: value, **PROJECTS[answer]} if answer else {}
    with tempfile.TemporaryDirectory() as folder:
        template, output = Path(folder, "template"), Path(folder, "output")
        template.mkdir()
        with contextlib.redirect_stdout(sys.stderr):
            project = cookiecutter(
                str(copy_template(template)),
                no_input=True,
                default_config=True,
                output_dir=str(output),
                extra_context=context,
            )
        command = [sys.executable, "-c", READER]
        done = subprocess.run(command, cwd=project, stdout=subprocess.PIPE, text=True, check=True)
    return {title: flags for title, flags in json.loads(done.stdout).items() if flags}


def table(flags: list) -> str:
    """Return the Markdown table of a group's flags."""
    lines = ["| flag | meaning |", "|---|---|"]
    for names, metavar, choices, help in flags:
        name = next(name for name in names if name.startswith("--"))
        value = f"{{{','.join(choices)}}}" if choices and not metavar else metavar
        value, text = (" ".join(text.split()).replace("|", " or ") for text in (value, help))
        lines.append(f"| `{name}{f' {value}' if value else ''}` | {text} |")
    return "\n".join(lines)


def flag_names(groups: dict[str, list]) -> set[str]:
    """Return the names of the flags, without the forms that begin with --no-."""
    names = {name for flags in groups.values() for names, *_ in flags for name in names}
    return {name for name in names if not name.startswith("--no-")}


def page() -> str:
    """Return the page: the default project's groups, and what differs with other answers."""
    default = read_flags()
    parts = [INTRODUCTION]
    for title, flags in default.items():
        parts.append(f"## {title[0].upper()}{title[1:]}\n\n{table(flags)}\n")
    known = [flag for flags in default.values() for flag in flags]
    for answer in PROJECTS:
        groups = read_flags(answer)
        parts.append(f"## Different with {answer}\n")
        if own := [flag for flags in groups.values() for flag in flags if flag not in known]:
            parts.append(f"{table(own)}\n")
        if missing := sorted(flag_names(default) - flag_names(groups)):
            parts.append(f"It has no {', '.join(f'`{name}`' for name in missing)}.\n")
    return "\n".join(parts)


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
