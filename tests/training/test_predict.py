"""Inference with predict.py: which weights it uses, and errors for unusable files."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest
import torch
from engine import UserError
from engine.data.images import ImageSpec
from parameters import mostly_slow
from PIL import Image
from projects import Project, load_project
from torch import nn

pytestmark = pytest.mark.xdist_group("in_process")


class Model:
    """Models of a project's task, and checkpoints of them."""

    def __init__(self, project: Project) -> None:
        self.task = project.task
        self.arch = "unet" if self.task.METRIC == "val_miou" else "shufflenet_v2_x0_5"
        classes = [*getattr(self.task.Digits, "classes", ())]  # where they have captions, none
        metadata = {"metric": self.task.METRIC, "arch": self.arch}
        self.metadata = metadata | {"data": "", "classes": classes}

    def build(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        classes = self.metadata["classes"]
        return self.task.build_model(self.arch, len(classes))

    def save(self, path: Path, weights: dict, **parts: object) -> Path:
        """Write a checkpoint of these weights; `parts` extend or replace the usual ones."""
        usual = {"model": weights, "optimizer": {"state": {}, "param_groups": []}}
        torch.save(usual | {"metadata": self.metadata} | parts, path)
        return path


@pytest.fixture(params=mostly_slow(["classification", "segmentation", "contrastive"], fast=2))
def generated(request: pytest.FixtureRequest, shared_project: Callable) -> Project:
    """The scripts of a project of each task."""
    return load_project(shared_project(task=request.param))


@pytest.fixture
def model(generated: Project) -> Model:
    return Model(generated)


@pytest.fixture
def checkpoint(model: Model, tmp_path: Path) -> Path:
    return model.save(tmp_path / "best.pt", model.build(1).state_dict())


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder of three images of different formats and sizes, and of a text file."""
    folder = tmp_path / "images"
    (folder / "more").mkdir(parents=True)
    for size, name in ((64, 48), "a.jpg"), ((8, 8), "b.png"), ((30, 90), "more/a.png"):
        Image.effect_noise(size, 100).save(folder / name)
    (folder / "notes.txt").write_text("no image")
    return folder


Predicted = Callable[..., tuple[list[dict], str, int]]


@pytest.fixture
def predicted(
    generated: Project,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    tmp_path_factory: pytest.TempPathFactory,
) -> Predicted:
    """Run predict.py; return its lines, its errors, and its status."""

    def predicted(*words: object) -> tuple[list[dict], str, int]:
        monkeypatch.chdir(tmp_path_factory.mktemp("here"))  # masks are written there
        monkeypatch.setattr(sys, "argv", ["predict.py", *map(str, words), "--json"])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(SystemExit) as end:
            generated.predict.main()
        said = capsys.readouterr()
        return [json.loads(line) for line in said.out.splitlines()], said.err, end.value.code

    return predicted


def test_predicts_all_images_of_a_folder_in_order(
    predicted: Predicted, model: Model, checkpoint: Path, images: Path
) -> None:
    lines, errors, status = predicted(checkpoint, images)
    assert [line["file"] for line in lines] == [
        str(images / name) for name in ("a.jpg", "b.png", "more/a.png")
    ]
    ignored = f"warning: {images}: ignored files of other types: 1 (notes.txt)\n"
    assert (errors, status) == (ignored, 0)
    for line in lines:
        shares = [share for _, share in line["found"]]
        assert shares == sorted(shares, reverse=True)
        assert 0 < sum(shares) < 1.001


def test_flags_may_stand_between_the_checkpoint_and_the_images(
    predicted: Predicted, checkpoint: Path, images: Path
) -> None:
    lines, _, status = predicted(checkpoint, "--device", "cpu", images / "a.jpg")
    assert ([line["file"] for line in lines], status) == ([str(images / "a.jpg")], 0)


def test_callers_keep_their_handling_of_sigpipe(
    predicted: Predicted, checkpoint: Path, images: Path
) -> None:
    """A broken connection would end a notebook, or the process of these tests."""
    predicted(checkpoint, images)
    assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN


@pytest.fixture
def script(shared_project: Callable, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Run the script on images, with its standard output in a file."""
    project = load_project(shared_project(task="classification"))
    model = Model(project)
    path = model.save(tmp_path / "best.pt", model.build(1).state_dict())

    def script(images: Path, output: int | IO[str]) -> subprocess.CompletedProcess:
        command = [sys.executable, "predict.py", path, images]
        options = {"cwd": project.folder, "stderr": subprocess.PIPE, "text": True}
        return subprocess.run(command, stdout=output, **options)

    return script


@pytest.mark.slow
def test_script_ends_silently_when_its_output_is_closed(script: Callable, images: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    ended = script(images, write)
    os.close(write)
    assert (ended.returncode, "Error" in ended.stderr) == (-signal.SIGPIPE, False)


@pytest.mark.slow
def test_full_disk_of_the_output_is_an_error(script: Callable, images: Path) -> None:
    with Path("/dev/full").open("w") as full:
        ended = script(images / "a.jpg", full)
    assert ended.returncode == 2
    assert ended.stderr == "error: a file can't be read or written (No space left on device)\n"


def test_predicts_with_ema_weights_if_saved(
    predicted: Predicted, model: Model, checkpoint: Path, images: Path
) -> None:
    other = model.build(2).state_dict()
    averaged = model.save(images / "averaged.pt", other, ema=model.build(1).state_dict())
    expected, *_ = predicted(checkpoint, images)
    assert predicted(averaged, images)[0] == expected
    assert predicted(model.save(averaged, other), images)[0] != expected


def test_own_prepare_prepares_the_images(
    generated: Project,
    predicted: Predicted,
    checkpoint: Path,
    images: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as one that normalizes by other statistics."""
    prepare = generated.task.prepare

    def prepare_nan(batch: list[torch.Tensor]) -> tuple:
        return prepare([torch.full_like(batch[0], math.nan, dtype=torch.float32), batch[1]])

    assert predicted(checkpoint, images / "b.png")[2] == 0
    monkeypatch.setattr(generated.task, "prepare", prepare_nan)
    _, errors, status = predicted(checkpoint, images / "b.png")
    assert "nan" in errors and status == 1


def test_checkpoint_of_another_task_py_is_a_warning(
    predicted: Predicted, model: Model, images: Path
) -> None:
    """It may build another model of the same weights. Other code of the engine is no reason."""
    state = model.build(1).state_dict()
    files = {"task.py": "0", "main.py": "0", "engine/optim.py": "0"}
    path = model.save(images / "other.pt", state, metadata=model.metadata | {"files": files})
    _, errors, status = predicted(path, images / "a.jpg")
    assert errors == f"warning: {path}: files differ from those that saved it: task.py\n"
    assert status == 0


def test_half_precision_and_channels_last_weights_are_accepted(
    predicted: Predicted, model: Model, checkpoint: Path, images: Path
) -> None:
    half = model.build(1).to(memory_format=torch.channels_last).half()
    half = model.save(images / "half.pt", half.state_dict())
    pairs = zip(predicted(half, images)[0], predicted(checkpoint, images)[0], strict=True)
    for line, expected in pairs:
        shares, wanted = dict(line["found"]), dict(expected["found"])
        common = shares.keys() & wanted.keys()
        assert common
        for name in common:
            assert shares[name] == pytest.approx(wanted[name], abs=0.02)


def test_broken_image_is_reported_and_the_others_are_predicted(
    predicted: Predicted, model: Model, checkpoint: Path, images: Path
) -> None:
    (images / "b.png").write_bytes((images / "b.png").read_bytes()[:50])
    (images / "zero.png").symlink_to("/dev/zero")
    os.mkfifo(images / "c\x1b[2J.jpg")
    Image.new("L", (60_000, 1)).save(images / "long.png")
    lines, errors, status = predicted(checkpoint, images)
    assert [Path(line["file"]).name for line in lines] == ["a.jpg", "long.png", "a.png"]
    found = [line for line in errors.splitlines() if line.startswith("error: ")]
    for name, line in zip(("b.png", r"c\x1b[2J.jpg", "zero.png"), found, strict=True):
        assert line.startswith(f"error: {images}/{name} can't be read as an image (")
    assert status == 1


def test_nan_is_an_error(
    predicted: Predicted, model: Model, checkpoint: Path, images: Path
) -> None:
    weights = model.build(1).state_dict()
    for name in weights:
        if name.endswith("running_var"):
            weights[name].fill_(-1)
    lines, errors, status = predicted(model.save(checkpoint, weights), images)
    assert (lines, status) == ([], 1)
    assert f"error: {images}/a.jpg: the model's output holds nan" in errors
    assert not [*Path().rglob("*.png")]  # a mask


def test_names_are_escaped(
    generated: Project,
    predicted: Predicted,
    model: Model,
    checkpoint: Path,
    images: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    path = (images / "a.jpg").rename(images / "a\x9b2J\n.jpg")
    answer = [("\x1b]0;title\x07", 1.0)]
    monkeypatch.setattr(generated.task.Predictor, "__call__", lambda *_: answer)
    lines, *_ = predicted(checkpoint, path)
    assert lines == [{"file": str(path), "found": [list(*answer)]}]
    monkeypatch.chdir(images)
    monkeypatch.setattr(sys, "argv", ["predict.py", str(checkpoint), str(path)])
    with pytest.raises(SystemExit):
        generated.predict.main()
    escaped = rf"{images}/a\x9b2J\n.jpg: \x1b]0;title\x07 1.000"
    assert capsys.readouterr().out == f"{escaped}\n"


def test_example_image_is_predicted(
    generated: Project, predicted: Predicted, checkpoint: Path
) -> None:
    (line,), errors, status = predicted(checkpoint, generated.folder / "data" / "example.png")
    assert line["found"] and (errors, status) == ("", 0)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:9000])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda model, path: path.unlink(), "there is no such file"),
        (lambda model, path: truncate(path), "it is torn, or not a checkpoint"),
        (
            lambda model, path: torch.save(model.build(1).state_dict(), path),
            "it is not a checkpoint",
        ),
        (
            lambda model, path: model.save(path, {}, metadata={}),
            "it has no metadata of its model and classes",
        ),
        (
            lambda model, path: model.save(path, {}, metadata={"metric": 1}),
            "its metadata is altered",
        ),
        (
            lambda model, path: model.save(path, {}, metadata=model.metadata | {"metric": "val_x"}),
            "it is of another task",
        ),
        (lambda model, path: model.save(path, {}), "its weights do not fit ARCH"),
    ],
    ids=[
        "missing",
        "torn",
        "weights",
        "no_metadata",
        "odd_metadata",
        "other_task",
        "other_weights",
    ],
)
def test_unusable_checkpoints(
    predicted: Predicted,
    model: Model,
    checkpoint: Path,
    images: Path,
    damage: Callable,
    words: str,
) -> None:
    damage(model, checkpoint)
    with pytest.raises(UserError, match=f"^{checkpoint}: {words.replace('ARCH', model.arch)}"):
        predicted(checkpoint, images)


def test_metadata_of_another_model_is_an_error_before_memory_is_allocated(
    generated: Project,
    predicted: Predicted,
    model: Model,
    images: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Altered metadata may name as many classes, or as large a model, as no memory holds."""
    other = {"arch": "lraspp_mobilenet_v3_large" if model.arch == "unet" else "resnet18"}
    altered, classes = [other], model.metadata["classes"]
    if classes:  # images with captions have none
        altered.append({"classes": [*classes, "another"]})
    build, devices = generated.task.build_model, []

    def build_model(*arguments: object, **options: object) -> nn.Module:
        devices.append(torch.get_default_device().type)
        return build(*arguments, **options)

    weights = model.build(1).state_dict()
    monkeypatch.setattr(generated.task, "build_model", build_model)
    for change in altered:
        path = model.save(images / "best.pt", weights, metadata=model.metadata | change)
        with pytest.raises(UserError, match=f"^{path}: its weights do not fit"):
            predicted(path, images)
    assert devices == ["meta"] * len(altered)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_weights_of_another_type_are_an_error(
    predicted: Predicted, model: Model, images: Path, dtype: torch.dtype
) -> None:
    weights = model.build(1).state_dict()
    name = next(iter(weights))
    path = model.save(images / "best.pt", weights | {name: weights[name].to(dtype)})
    with pytest.raises(UserError, match=rf"^{path}: .*{name} is {dtype}, not torch.float32"):
        predicted(path, images)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["none.jpg"], "none.jpg: there is no such file or folder"),
        (["{tmp}"], "holds no images"),
        (["{images}", "--device", "cuda"], "--device cuda: there is no GPU here"),
    ],
)
def test_usage_errors(
    predicted: Predicted, checkpoint: Path, images: Path, tmp_path: Path, flags: list, words: str
) -> None:
    (tmp_path / "empty").mkdir()
    flags = [flag.format(tmp=tmp_path / "empty", images=images) for flag in flags]
    with pytest.raises(UserError, match=words):
        predicted(checkpoint, *flags)


@pytest.mark.weekly
def test_model_is_exported(
    generated: Project,
    model: Model,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    path = tmp_path / "model.pt2"
    monkeypatch.setattr(sys, "argv", ["predict.py", str(checkpoint), "--export", str(path)])
    generated.predict.main()
    assert capsys.readouterr().out.startswith(f"{path}: outputs as the model's")
    inputs = generated.predict.sample_inputs({}, 4)
    exported = torch.export.load(path).module()(inputs)
    expected = model.build(1).eval()(inputs)
    torch.testing.assert_close(exported, expected, rtol=1e-3, atol=1e-3)


def test_export_has_the_size_of_inference(shared_project: Callable) -> None:
    predict = load_project(shared_project(task="classification")).predict
    options = {"image": {"size": 64, "eval_size": 96}}
    assert predict.sample_inputs(options, 2).shape == (2, 3, 96, 96)


@pytest.mark.parametrize("name", ["batch_size", "arch"])
def test_export_with_altered_model_options_is_an_error(
    generated: Project, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    metadata = model.metadata | {"model_options": {name: "altered"}}
    path = model.save(tmp_path / "best.pt", model.build(1).state_dict(), metadata=metadata)
    command = ["predict.py", str(path), "--export", str(tmp_path / "model.pt2")]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(UserError, match=r"use the task\.py that it was trained with"):
        generated.predict.main()
    assert not (tmp_path / "model.pt2").exists()


def test_images_or_export_are_needed(
    generated: Project, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def error(parser: object, message: str) -> None:
        raise UserError(message)

    monkeypatch.setattr("engine.cli.ArgumentParser.error", error)
    for arguments in ([], ["a.png", "--export", "model.onnx"]):
        monkeypatch.setattr(sys, "argv", ["predict.py", str(checkpoint), *arguments])
        with pytest.raises(UserError, match="give either image files or --export FILE"):
            generated.predict.parse_args()
    monkeypatch.setattr(
        sys, "argv", ["predict.py", str(checkpoint), "--export", os.path.relpath(checkpoint)]
    )
    with pytest.raises(UserError, match="is the checkpoint itself"):
        generated.predict.parse_args()
    for flags in (["--flip-tta"], ["--json"], ["--device", "cpu"], ["--top", "3"]):
        arguments = ["predict.py", str(checkpoint), "--export", "model.onnx", *flags]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(UserError, match=flags[0]):
            generated.predict.parse_args()
    monkeypatch.setattr(sys, "argv", ["predict.py", "", "a.png"])
    with pytest.raises(UserError, match="argument checkpoint: .*empty"):
        generated.predict.parse_args()


@pytest.mark.slow
def test_timm_model_is_predicted_with_the_images_of_its_checkpoint(
    shared_project: Callable,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    tmp_path: Path,
    images: Path,
) -> None:
    """Also if another version of timm would have other ones; the exported file takes the same."""
    pytest.importorskip("timm", reason="timm is not installed")
    project = load_project(shared_project(task="classification"))
    flags = ["--arch", "timm:vit_tiny_patch16_224", "--image-size", "64", "--data", str(images)]
    monkeypatch.setattr(sys, "argv", ["main.py", *flags, "--drop-path", "0.1"])
    args = project.main.parse_args()
    args.model_options["image"]["mean"] = (0.1, 0.2, 0.3)
    model = project.task.build_model(args.arch, 2, **args.model_options).eval()
    metadata = {"metric": project.task.METRIC, "arch": args.arch, "data": str(images)}
    metadata |= {"classes": ["cat", "dog"], "model_options": args.model_options}
    parts = {"optimizer": {"state": {}, "param_groups": []}, "metadata": metadata}
    torch.save({"model": model.state_dict()} | parts, tmp_path / "best.pt")
    monkeypatch.setattr(
        sys, "argv", ["predict.py", str(tmp_path / "best.pt"), str(images / "a.jpg"), "--json"]
    )
    with pytest.raises(SystemExit):
        project.predict.main()
    found = dict(json.loads(capsys.readouterr().out)["found"])
    crop = project.task.read_center_crop(images / "a.jpg", ImageSpec(**args.model_options["image"]))
    assert crop.shape == (3, 64, 64)
    inputs, _ = project.task.prepare([crop[None], torch.zeros(1)])
    expected = model(inputs).softmax(dim=1)[0].tolist()
    assert [found["cat"], found["dog"]] == pytest.approx(expected, rel=1e-5)

    export = tmp_path / "model.pt2"
    command = ["predict.py", str(tmp_path / "best.pt"), "--export", str(export)]
    monkeypatch.setattr(sys, "argv", command)
    project.predict.main()
    program = torch.export.load(export).module()
    torch.testing.assert_close(program(inputs), model(inputs), rtol=1e-4, atol=1e-5)
