"""Fixtures that generate projects."""

import json
import os
import signal
from pathlib import Path

import pytest
from cookiecutter.generate import generate_context
from cookiecutter.main import cookiecutter
from cookiecutter.prompt import prompt_for_config
from fresh import copy_template

# Several processes share the cores: threads that wait for one another's core slow all of them down.
# And runs that are compared to the last bit have the same number of them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# --check imports torch, which takes long while other tests have the cores.
os.environ.setdefault("CHECK_WAIT", "100")

# Under nohup it is ignored, also by the processes that tests start and send it to.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    """Return the template as a fresh clone has it."""
    folder = tmp_path_factory.mktemp("template") / "ddp-apex-template"
    folder.mkdir()
    return copy_template(folder)


@pytest.fixture(scope="session")
def config(tmp_path_factory):
    """A configuration of cookiecutter that keeps the tests out of the home folder."""
    folder = tmp_path_factory.mktemp("home")
    path = folder / "config.yaml"
    folders = {name: str(folder / name) for name in ("replay_dir", "cookiecutters_dir")}
    path.write_text(json.dumps(folders))  # which is YAML too
    return path


@pytest.fixture(scope="session")
def defaults(template):
    """The answers of someone who presses Enter at every question."""
    context = generate_context(str(template / "cookiecutter.json"))
    answers = prompt_for_config(context, no_input=True)
    return {name: answer for name, answer in answers.items() if not name.startswith("_")}


@pytest.fixture(scope="session")
def bake(template, config, defaults, tmp_path_factory):
    """Generate a project from the defaults and the given answers; return its folder.

    The answers arrive as if typed: through a replay file, since --no-input would render them.
    `into` is the folder to generate in (default: a new one), `source` another template, and
    further options of cookiecutter go into `options`.
    """

    def bake(into=None, source=template, options=None, **answers):
        unknown = answers.keys() - defaults.keys()
        assert not unknown, f"no such question: {unknown}"
        folder = tmp_path_factory.mktemp("bake")
        replay = folder / "answers.json"
        replay.write_text(json.dumps({"cookiecutter": defaults | answers}))
        return Path(
            cookiecutter(
                str(source),
                replay=str(replay),
                config_file=str(config),
                output_dir=str(into or folder / "out"),
                **options or {},
            )
        )

    return bake


@pytest.fixture(scope="session")
def shared_project(bake):
    """Return the folder of a project with these answers, which no test changes."""
    folders = {}

    def shared_project(**answers):
        key = tuple(sorted(answers.items()))
        if key not in folders:
            folders[key] = bake(**answers)
        return folders[key]

    return shared_project


@pytest.fixture
def image_folder(tmp_path):
    """A folder for --data: two classes of JPEG and PNG files that can be told apart."""
    from PIL import Image

    folder = tmp_path / "images"
    for split, count in (("train", 12), ("val", 5)):
        for name in ("red", "blue"):
            (folder / split / name).mkdir(parents=True)
            for index in range(count):
                suffix = "png" if index % 3 else "jpg"
                image = Image.effect_noise((64, 48), 50).convert("RGB")
                tint = Image.new("RGB", image.size, name)
                Image.blend(image, tint, 0.5).save(folder / split / name / f"{index}.{suffix}")
    return folder
