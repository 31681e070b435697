"""predict.py: which weights predict, and what is said of files that can't serve."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

import predict
import task
from engine.errors import UserError

ARCH = "unet" if task.METRIC == "val_miou" else "shufflenet_v2_x0_5"
CLASSES = [*getattr(task.Digits, "classes", ())]  # where the digits have captions, none
ABOUT = {"metric": task.METRIC, "arch": ARCH, "data": "", "classes": CLASSES}


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return task.build_model(ARCH, *([len(CLASSES)] if CLASSES else []))


def save(path: Path, weights: dict, **parts: object) -> Path:
    """A checkpoint of these weights, and of `parts` beside the usual ones or instead of them."""
    usual = {"model": weights, "optimizer": {"state": {}, "param_groups": []}, "about": ABOUT}
    torch.save(usual | parts, path)
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(tmp_path / "best.pt", build(1).state_dict())


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder of three images of other kinds and sizes, and of a file that is none."""
    folder = tmp_path / "images"
    (folder / "more").mkdir(parents=True)
    for size, name in ((64, 48), "a.jpg"), ((8, 8), "b.png"), ((30, 90), "more/a.png"):
        Image.effect_noise(size, 100).save(folder / name)
    (folder / "notes.txt").write_text("no image")
    return folder


Predicted = Callable[..., tuple[list[dict], str, int]]


@pytest.fixture
def predicted(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    tmp_path_factory: pytest.TempPathFactory,
) -> Predicted:
    """Runs predict.py; returns its lines, its errors, and its status."""

    def predicted(*words: object) -> tuple[list[dict], str, int]:
        monkeypatch.chdir(tmp_path_factory.mktemp("here"))  # masks are written there
        monkeypatch.setattr(sys, "argv", ["predict.py", *map(str, words), "--json"])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(SystemExit) as end:
            predict.main()
        said = capsys.readouterr()
        return [json.loads(line) for line in said.out.splitlines()], said.err, end.value.code

    return predicted


def test_all_images_of_a_folder_in_order(
    predicted: Predicted, checkpoint: Path, images: Path
) -> None:
    lines, errors, status = predicted(checkpoint, images)
    assert [line["file"] for line in lines] == [
        str(images / name) for name in ("a.jpg", "b.png", "more/a.png")
    ]
    assert (errors, status) == ("", 0)
    for line in lines:
        shares = [share for _, share in line["found"]]
        assert shares == sorted(shares, reverse=True)
        assert 0 < sum(shares) < 1.001


def test_it_predicts_with_the_average_if_there_is_one(
    predicted: Predicted, checkpoint: Path, images: Path
) -> None:
    other = build(2).state_dict()
    averaged = save(images / "averaged.pt", other, ema=build(1).state_dict())
    expected, *_ = predicted(checkpoint, images)
    assert predicted(averaged, images)[0] == expected
    assert predicted(save(averaged, other), images)[0] != expected


def test_weights_of_any_type_and_layout_do(
    predicted: Predicted, checkpoint: Path, images: Path
) -> None:
    model = build(1).to(memory_format=torch.channels_last)
    half = save(images / "half.pt", model.half().state_dict())
    pairs = zip(predicted(half, images)[0], predicted(checkpoint, images)[0], strict=True)
    for line, expected in pairs:
        shares, wanted = dict(line["found"]), dict(expected["found"])
        for name in shares.keys() & wanted.keys():
            assert shares[name] == pytest.approx(wanted[name], abs=0.02)


def test_a_broken_image_is_named_and_the_others_are_done(
    predicted: Predicted, checkpoint: Path, images: Path
) -> None:
    (images / "b.png").write_bytes((images / "b.png").read_bytes()[:50])
    lines, errors, status = predicted(checkpoint, images)
    assert len(lines) == 2
    assert errors.startswith(f"error: {images / 'b.png'} can't be read as an image (")
    assert len(errors.splitlines()) == 1
    assert status == 1


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), "there is no such file"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:9000]),
            "it is torn, or not a checkpoint",
        ),
        (lambda path: torch.save(build(1).state_dict(), path), "it is not a checkpoint"),
        (lambda path: save(path, {}, about={}), "it does not say of which model and classes it is"),
        (
            lambda path: save(path, {}, about="x"),
            "it does not say of which model and classes it is",
        ),
        (lambda path: save(path, {}, about=ABOUT | {"metric": "val_x"}), "it is of another task"),
        (lambda path: save(path, {}), f"its weights do not fit {ARCH}"),
    ],
    ids=["missing", "torn", "weights", "no_about", "odd_about", "other_task", "other_weights"],
)
def test_a_checkpoint_that_can_not_predict(
    predicted: Predicted, checkpoint: Path, images: Path, damage: Callable, words: str
) -> None:
    damage(checkpoint)
    with pytest.raises(UserError, match=f"^{checkpoint}: {words}"):
        predicted(checkpoint, images)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["none.jpg"], "none.jpg: there is no such file or folder"),
        (["{tmp}"], "holds no images"),
        (["{images}", "--device", "cuda"], "--device cuda: there is no GPU here"),
    ],
)
def test_flags_that_can_not_be_right(
    predicted: Predicted, checkpoint: Path, images: Path, tmp_path: Path, flags: list, words: str
) -> None:
    (tmp_path / "empty").mkdir()
    flags = [flag.format(tmp=tmp_path / "empty", images=images) for flag in flags]
    with pytest.raises(UserError, match=words):
        predicted(checkpoint, *flags)
