"""Instructions for owners' data and changes of task.py, followed to the letter."""

import ast
import re
import shlex

import numpy as np
import pytest
from fresh import ROOT
from PIL import Image
from running import metrics, predict, run

pytestmark = pytest.mark.xdist_group("short")
TASKS = {
    "classification": ("val_accuracy", "shufflenet_v2_x0_5"),
    "segmentation": ("val_miou", "lraspp_mobilenet_v3_large"),
    "contrastive": ("val_recall_at_1", "shufflenet_v2_x0_5"),
}


@pytest.fixture(scope="module", params=TASKS)
def project(request, bake):
    """The task, its project, and what its README says of one's own data."""
    project = bake(task=request.param)
    readme = (project / "README.md").read_text(encoding="utf-8")
    return request.param, project, re.search("## Your own data.*?(?=\n## )", readme, re.DOTALL)[0]


@pytest.fixture
def source(project):
    """The path of the project's task.py, which is unchanged after the test."""
    path = project[1] / "task.py"
    text = path.read_text(encoding="utf-8")
    yield path
    path.write_text(text, encoding="utf-8")


def trains(task, project, text, folder, output, *others, command=0):
    """That a command of the README trains for one epoch on the folder; the first, a small model."""
    flags = re.findall(r"^    \./run\.sh (.*)$", text, re.MULTILINE)[command]
    flags = shlex.split(flags.replace("DIR", str(folder)), comments=True)
    metric, arch = TASKS[task]
    small = ["--epochs", 1, "--batch-size", 2, "--workers", 0]
    if command == 0:
        small += ["--arch", arch]
    done = run(project, *flags, *small, *others, "--output", output, nproc=0)
    assert done.returncode == 0, done.stderr
    assert 0 <= metrics(output)[-1][metric] <= 1


@pytest.mark.slow
def test_readme_folder_layout_trains(project, tmp_path):
    task, project, text = project
    folder = tmp_path / "own"
    names = re.findall(r"^    DIR/(\S+)$", text, re.MULTILINE)
    lines = re.findall(r"^    (\S+\t.+)$", text, re.MULTILINE)
    assert len(names) >= 5
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name == "classes.txt":
            path.write_text("cat\ndog\n")
        elif name == "train/captions.tsv":
            path.write_text("\n".join(lines))
        elif name == "val/captions.tsv":
            path.write_text("3.jpg\ta bird")
        elif "annotations" in name:
            labels = np.array([[0, 1, 255]], dtype=np.uint8).repeat(100, 0).repeat(50, 1)
            Image.fromarray(labels).save(path)
        else:
            Image.effect_noise((150, 100), 50).convert("RGB").save(path)
    trains(task, project, text, folder, tmp_path / "run")
    if task == "classification":
        trains(task, project, text, folder, tmp_path / "timm", command=1)


@pytest.mark.slow
def test_example_of_array_data_trains(project, source, tmp_path):
    task, project, text = project
    page = (ROOT / "docs" / "tutorials" / "own_data.md").read_text(encoding="utf-8")
    section = page.split(f"### {task.capitalize()}\n")[1]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    original = source.read_text(encoding="utf-8")
    name = ast.parse(code).body[0].name
    (old,) = [node for node in ast.parse(original).body if getattr(node, "name", "") == name]
    lines = original.splitlines(keepends=True)
    replaced = "".join([*lines[: old.lineno - 1], code, *lines[old.end_lineno :]])
    (kind,) = re.findall(r"np\.savez\(path, images=images, (\w+)=", code)
    others = {
        "labels": np.arange(4) % 2,
        "masks": np.zeros((4, 64, 64), dtype=np.uint8),
        "captions": np.array(["one", "two", "three", "three"]),
    }
    images = np.random.default_rng(0).integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)
    for split in ("train", "val"):
        np.savez(tmp_path / f"{split}.npz", images=images, **{kind: others[kind]})
    flags = ()
    if task == "classification":
        # O0, since some CPUs compute in bfloat16 at O1, and predict.py computes in float32.
        flags = ("--class-weights", "--arch", "resnet18_cifar", "--opt-level", "O0")
        replaced, count = apply_diffs(page.split("## Prediction\n")[1], replaced)
        assert count == 1
    else:  # the places that the tutorial names
        name = {"segmentation": "self.side = ", "contrastive": "else read_center_crop\n"}[task]
        assert replaced.count(name) == 1
    source.write_text(replaced, encoding="utf-8")
    trains(task, project, text, tmp_path, tmp_path / "run", *flags)
    if task == "classification":
        loss = predicted_loss(project, tmp_path, images, ["cat", "dog", "cat", "dog"])
        assert loss == pytest.approx(metrics(tmp_path / "run")[-1]["val_loss"], rel=1e-5)


def predicted_loss(project, folder, pictures, names):
    """The mean loss of the probabilities that predict.py finds for pictures, each with its name."""
    (folder / "files").mkdir()
    for number, picture in enumerate(pictures):
        Image.fromarray(picture).save(folder / "files" / f"{number}.png")
    lines = predict(project, folder / "run" / "last.pt", folder / "files", "--top", 2)
    found = [dict(line["found"]) for line in lines]
    return -np.mean([np.log(one[name]) for one, name in zip(found, names, strict=True)])


def apply_diffs(text, source):
    """Apply the blocks of diffs in a text to a source; return it and the number of blocks."""
    blocks = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    for block in blocks:
        lines = block.splitlines()
        removed = "\n".join(line[1:] for line in lines if not line.startswith("+"))
        added = "\n".join(line[1:] for line in lines if not line.startswith("-"))
        assert source.count(removed) == 1, removed
        source = source.replace(removed, added)
    return source, len(blocks)


@pytest.mark.slow
def test_diffs_of_the_readme_train(project, source, tmp_path):
    """With another model, loss and metric, a project trains; the new metric is recorded."""
    task, project, _ = project
    text = (project / "README.md").read_text(encoding="utf-8")
    if task == "classification":  # the tutorial shows the same changes
        page = (ROOT / "docs" / "tutorials" / "own_task.md").read_text(encoding="utf-8")
        original = source.read_text(encoding="utf-8")
        assert apply_diffs(page, original) == apply_diffs(text, original)
    changed, count = apply_diffs(text, source.read_text(encoding="utf-8"))
    assert count == 3
    source.write_text(changed, encoding="utf-8")
    done = run(project, "--epochs", 1, "--steps", 2, "--output", tmp_path / "run", nproc=0)
    assert done.returncode == 0, done.stderr
    new = {"classification": "error", "segmentation": "pixel_accuracy", "contrastive": "chance"}
    assert 0 <= metrics(tmp_path / "run")[-1][f"val_{new[task]}"] <= 1


@pytest.mark.slow
def test_example_of_own_transforms_trains(bake, image_folder, tmp_path):
    project = bake()
    page = (ROOT / "docs" / "tutorials" / "own_data.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(from engine.data import DatasetWrapper.*?)```", page, re.DOTALL)[
        1
    ]
    source = project / "task.py"
    text = source.read_text(encoding="utf-8")
    assert text.count("    return train_set, val_set\n\n\ndef prepare") == 1
    text = text.replace("    return train_set, val_set\n\n\ndef prepare", WITH_TRANSFORMS)
    source.write_text(f"{text}\n\n{code}", encoding="utf-8")
    flags = ("--data", image_folder, "--decode", "cpu", "--workers", 0, "--batch-size", 2)
    flags += ("--arch", "shufflenet_v2_x0_5", "--image-size", 32, "--epochs", 1)
    done = run(project, *flags, "--output", tmp_path / "run", nproc=0)
    assert done.returncode == 0, done.stderr
    assert "transformed" in done.stderr


# The function of the tutorial's edit, and a line that is printed when a sample is transformed.
WITH_TRANSFORMS = """\
    import functools, sys
    call = Augmented.transform.forward

    @functools.cache
    def log():
        print("transformed", file=sys.stderr)

    Augmented.transform.forward = lambda image: log() or call(image)
    return Augmented(train_set), val_set


def prepare"""
