"""Free text comes out as it was typed, wherever it gets to, and nothing in it is run."""

import email
import os
import re
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAME, DESCRIPTION, AUTHOR = "Name-to-replace", "Description-to-replace", "Author-to-replace"
FRAGMENTS = [
    *(
        "'",
        '"',
        "\\",
        "\n",
        "\r",
        "\r\n",
        "\t",
        "\0",
        "\x1b[31m",
        "\x7f",
        "\x85",
        "\u2028",
        "\ufeff",
    ),
    *("{{ 7*7 }}", "{{", "}}", "{% raw %}", "{% endraw %}", "{% if", "{#", "#}", "{{ nothing }}"),
    *("«", "»", "«opt_level»", "«%", "# % if", "\n# % endif\n", "\n    # % for x in y\n", "# %%"),
    *("$(touch pwned)", "`touch pwned`", "; touch pwned", "| touch pwned", "${HOME}", "%PATH%"),
    *(
        '"""',
        "'''",
        '\n"""\nopen("pwned", "w")\n"""\n',
        "'); open('pwned', 'w') #",
        '\\"',
        "\\u0022",
    ),
    "{{ cycler.__init__.__globals__.os.system('touch pwned') }}",
    *(
        "😀",
        "👨‍👩‍👧",
        "\u202eright to left",
        "שלום",
        "مرحبا",
        "ü",
        "深度",
        "&amp;",
        "<b>",
        "]]>",
        "\\ud83d",
    ),
    *(
        "[project]",
        '"\nname = "other"',
        "#",
        "-",
        "--help",
        "/",
        "..",
        "%s",
        "{}",
        "{0}",
        "a, b",
        "a@b",
    ),
]
hostile = st.lists(
    st.sampled_from(FRAGMENTS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    max_size=6,
).map("".join)


def read(folder):
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def plain(bake):
    """The files of a project whose texts are three words to look for."""
    return read(bake(project_name=NAME, description=DESCRIPTION, author_name=AUTHOR))


def test_hostile_text_reaches_only_documents(plain):
    def holding(word):
        return {name for name, content in plain.items() if word.encode() in content}

    assert holding(NAME) == {"README.md"}
    assert holding(DESCRIPTION) == {"README.md", "pyproject.toml"}
    assert holding(AUTHOR) == {"LICENSE", "pyproject.toml"}


def check(bake, plain, name, description, author, **answers):
    project = bake(project_name=name, description=description, author_name=author, **answers)
    files = read(project)
    assert files.keys() == plain.keys(), "nothing else was made"
    assert not os.path.exists("pwned")

    # Every file but pyproject.toml has the very text in the place of the word.
    texts = {NAME: name, DESCRIPTION: description, AUTHOR: author}
    texts = {word.encode(): text.encode() for word, text in texts.items()}
    for path in files.keys() - {"pyproject.toml"}:
        expected = re.sub(b"|".join(texts), lambda word: texts[word[0]], plain[path])
        assert files[path] == expected, path

    # pyproject.toml has it when it is parsed, or not at all where it is no line of metadata.
    expected = tomllib.loads(plain["pyproject.toml"].decode())
    expected["project"]["description"] = description
    expected["project"]["authors"][0]["name"] = author
    for key, text in (("description", description), ("authors", author)):
        if text.splitlines() != [text]:
            del expected["project"][key]
    assert tomllib.loads(files["pyproject.toml"].decode()) == expected
    return project


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(hostile, hostile, hostile)
@example("", "", "")
@example(
    *3 * ["{{ 7*7 }} {% raw %} {# $(touch pwned) `touch pwned` 😀 \"quoted\" \\ 'this' \u202ertl"]
)
@example(*3 * ['"""\nopen("pwned", "w")\n"""'])
@example(*3 * ["\r"])
@example(*3 * ["line\n"])
@example(*3 * ["\0\x01\x1f\x7f\x80\x9f\ud7ff\ue000\uffff\U0010ffff"])
@example(*3 * ["# % if sync_bn"])
@example(*3 * ["\n\n```python\nx  =  f( 1 )\n```\n\n"])
@example(*3 * ["«opt_level»"])
@example(*3 * ["'\"\\n\\u0041\\ud83d"])
@example(*3 * ["x" * 10_000])
def test_typed_text_is_preserved(bake, plain, name, description, author):
    project = check(bake, plain, name, description, author)
    # The code is the same as with plain words, byte by byte; ruff reads pyproject.toml once more.
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", project / "main.py"]
        assert subprocess.run(ruff, stdout=subprocess.DEVNULL).returncode == 0


COMMON = (
    "'",
    '"""',
    "\n",
    "\0",
    "{{ 7*7 }}",
    "«opt_level»",
    "\n# % endif\n",
    "$(touch pwned)",
    "ü",
)


@pytest.mark.parametrize(
    "fragment",
    [pytest.param(f, marks=() if f in COMMON else pytest.mark.weekly) for f in FRAGMENTS],
)
def test_each_fragment_alone(bake, plain, fragment):
    check(bake, plain, fragment, fragment, fragment)


METADATA = """
import os, sys
from setuptools import build_meta
for folder in sys.argv[1:]:
    os.chdir(folder)
    build_meta.prepare_metadata_for_build_editable(folder)
"""


@pytest.mark.slow
def test_project_with_hostile_text_is_installable(bake):
    characters = [*"\n\r\t\0\x0b\x0c\x1b\x1c\x7f\x85\u2028\ufeff\u202e,;:@<%\\\"'", "\r\n", "😀"]
    texts = ["", " ", "\n", "{{ 7*7 }}", *(f"a{character}b: c" for character in characters)]
    projects = [bake(description=text, author_name=text) for text in texts]
    subprocess.run([sys.executable, "-c", METADATA, *projects], check=True, capture_output=True)
    for text, project in zip(texts, projects, strict=True):
        (path,) = project.glob("*.dist-info/METADATA")
        metadata = email.message_from_bytes(path.read_bytes())
        assert metadata["Name"] == "ddp_training"
        needs = metadata.get_all("Requires-Dist")
        assert needs[:3] == ["torch<3,>=2.6", "torchvision>=0.21", "tqdm>=4.66"]
        assert metadata["License-Expression"] == "MIT"
        assert (metadata["Summary"] is None) == (text.splitlines() != [text])
