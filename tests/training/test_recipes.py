"""The files of recipes/: each parses and trains; and the flags that they are made of."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine import UserError, distributed
from engine.optim import FlipAverage
from idx_files import COUNTS, write_dataset
from PIL import Image, ImageOps
from projects import load_project
from running import flat, metrics, predict, run
from torchvision.models import resnet18

pytestmark = pytest.mark.xdist_group("short")

FASHION_MNIST = ("fashion_mnist_resnet18", "fashion_mnist_wrn")
RECIPES = (*FASHION_MNIST, "finetune", "imagenet_resnet50_90", "imagenet_resnet50_modern")
SMALL = ("--arch", "resnet18", "--image-size", 32, "--batch-size", 4, "--workers", 0)


@pytest.fixture(params=["adam", "sgd"])
def project(request: pytest.FixtureRequest, shared_project) -> Path:
    return shared_project(fused_adam=request.param == "adam")


@pytest.fixture
def default_project(shared_project) -> Path:
    return shared_project()


@pytest.fixture
def idx_folder(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "idx")


@pytest.fixture
def parse(monkeypatch, default_project):
    """Return main.py's flags from a command line; an error raises its message."""

    def stop(message):
        raise UserError(message)

    def parse(*flags):
        monkeypatch.setattr(sys, "argv", ["main.py", *map(str, flags)])
        return load_project(default_project).main.parse_args()

    monkeypatch.setattr(distributed, "stop", stop)
    return parse


def train(project: Path, output: Path, *flags: object) -> list[dict[str, float]]:
    done = run(project, "--output", output, *flags, nproc=0, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    return metrics(output)


@pytest.mark.parametrize("task", ["segmentation", "contrastive"])
def test_other_tasks_have_no_recipes(shared_project, task: str) -> None:
    assert not (shared_project(task=task) / "recipes").exists()


def test_recipes_parse(project: Path, monkeypatch, image_folder: Path, idx_folder: Path) -> None:
    """Each value is that of the file, and each has its own output folder."""
    assert {path.stem for path in (project / "recipes").iterdir()} == set(RECIPES)
    outputs = set()
    for name in RECIPES:
        path = project / "recipes" / f"{name}.json"
        data = idx_folder if name in FASHION_MNIST else image_folder
        monkeypatch.setattr(sys, "argv", ["main.py", "--config", str(path), "--data", str(data)])
        args = vars(load_project(project).main.parse_args())
        recipe = json.loads(path.read_text())
        for key in recipe.keys() - {"data", "output", "image_size"}:
            assert args[key] == recipe[key], (name, key)
        assert str(args["output"]) == recipe["output"] == f"runs/{name}"
        outputs.add(args["output"])
    assert len(outputs) == len(RECIPES)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_trains(
    project: Path, tmp_path: Path, image_folder: Path, idx_folder: Path, recipe: str
) -> None:
    """Two steps on a smaller model and smaller images."""
    flags = ["--config", f"recipes/{recipe}.json", "--steps", 2, *SMALL]
    if recipe in FASHION_MNIST:
        flags += ["--data", idx_folder, "--arch", "wrn10_1"]
    else:
        flags += ["--data", image_folder]
    if recipe == "imagenet_resnet50_modern":
        flags += ["--eval-size", 40]
    if recipe == "finetune":
        torch.save(resnet18().state_dict(), tmp_path / "weights.pt")
        flags += ["--weights", tmp_path / "weights.pt"]
    rows = train(project, tmp_path / "run", *flags)
    assert rows[-1]["step"] == 2 and 0 < rows[-1]["train_loss"] < 20


@pytest.mark.slow
def test_idx_files_are_learned(default_project: Path, tmp_path: Path, idx_folder: Path) -> None:
    """The brightness of an image says its class; --class-weights and --report need the labels."""
    flags = ("--data", idx_folder, "--arch", "wrn10_1", "--epochs", 12, "--batch-size", 8)
    flags += ("--lr", 0.02, "--workers", 1, "--class-weights", "--report", "--eval-every", 12)
    rows = train(default_project, tmp_path / "run", *flags)
    assert rows[-1]["step"] == 12 * COUNTS["train"] // 8
    assert rows[-1]["val_accuracy"] > 0.3
    metadata = torch.load(tmp_path / "run" / "last.pt", weights_only=True)["metadata"]
    image = metadata["model_options"]["image"]
    assert (image["size"], image["crop_fraction"]) == (28, 1.0)
    file = tmp_path / "image.png"
    Image.new("L", (28, 28), 23 * 9 + 12).save(file)
    [answer] = predict(default_project, tmp_path / "run" / "last.pt", file)
    assert len(answer["found"]) == 5


@pytest.mark.slow
def test_growing_images_resume_bit_identically(
    default_project: Path, tmp_path: Path, image_folder: Path
) -> None:
    """In the middle of an epoch, too; epochs 1 and 2 have images of 32 pixels, epoch 3 of 64."""
    flags = ("--data", image_folder, "--arch", "shufflenet_v2_x0_5", "--image-size", "32:64")
    flags += ("--epochs", 3, "--batch-size", 4, "--workers", 1, "--eval-size", 48)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(default_project, whole, *flags)
    for steps in (8, 14):
        train(default_project, parts, *flags, "--steps", steps, "--resume", "auto")
    train(default_project, parts, *flags, "--resume", "auto")
    ours, theirs = (torch.load(run / "last.pt", weights_only=True) for run in (parts, whole))
    for part in ("model", "optimizer"):
        values = dict(flat(ours[part]))
        for name, other in flat(theirs[part]):
            value = values[name]
            same = torch.equal(value, other) if torch.is_tensor(value) else value == other
            assert same, name
    image = ours["metadata"]["model_options"]["image"]
    assert (image["size"], image["eval_size"]) == (64, 48)


class Made(torch.nn.Module):
    """Model that applies a function to the mean of each half of an image: (N, 2)."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function

    def forward(self, images: torch.Tensor) -> object:
        halves = images.mean((1, 2)).unflatten(1, (2, -1)).mean(2)
        return self.function(halves)


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x: {"logits": x}, "a dict"),
        (lambda x: x[:, :, None, None], r"a tensor \(1, 2, 1, 1\)"),
    ],
    ids=["dict", "masks"],
)
def test_flip_average_needs_a_tensor_of_outputs(function: Callable, kind: str) -> None:
    with pytest.raises(UserError, match=rf"--flip-tta needs a model that returns .*{kind}"):
        FlipAverage(Made(function))(torch.zeros(1, 3, 2, 2))
    with pytest.raises(UserError, match="--flip-tta needs a model of one tensor of .*not a tuple"):
        FlipAverage(Made(function))((torch.zeros(1, 3, 2, 2), torch.zeros(1)))


def test_flip_average_of_outputs_that_are_no_logits() -> None:
    """One number, as in a regression, and several independent ones."""
    images = torch.tensor([[1.0, 1.0, 3.0, 3.0]]).expand(3, 4, 4)[None]
    both = FlipAverage(Made(lambda x: x))(images)
    assert torch.equal(both, torch.tensor([[2.0, 2.0]]))
    one = FlipAverage(Made(lambda x: x[:, :1]))(images)
    assert torch.equal(one, torch.tensor([[2.0]]))


def test_flip_average_copies_the_output_that_a_cuda_graph_overwrites() -> None:
    output = torch.zeros(1, 2)
    averaged = FlipAverage(Made(output.copy_))(torch.tensor([[[[1.0, 3.0]]]]))
    assert torch.equal(averaged, torch.tensor([[2.0, 2.0]]))


@pytest.mark.slow
def test_flip_average_is_the_mean_of_both_predictions(
    default_project: Path, tmp_path: Path, image_folder: Path
) -> None:
    """In predict.py and in --eval-only."""
    output = tmp_path / "run"
    flags = ("--data", image_folder, *SMALL, "--arch", "shufflenet_v2_x0_5")
    train(default_project, output, *flags, "--epochs", 4)
    file, mirrored = image_folder / "val" / "red" / "1.png", tmp_path / "mirrored.png"
    with Image.open(file) as image:
        ImageOps.mirror(image).save(mirrored)
    one, other, both = (
        dict(predict(default_project, output / "last.pt", path, *flip)[0]["found"])
        for path, flip in ((file, ()), (mirrored, ()), (file, ("--flip-tta",)))
    )
    assert one["red"] != pytest.approx(other["red"], abs=1e-5)
    odds = {name: math.sqrt(one[name] * other[name]) for name in one}  # of the mean logits
    assert both["red"] == pytest.approx(odds["red"] / sum(odds.values()), abs=1e-5)
    losses = []
    for extra in ((), ("--flip-tta",), ("--eval-size", 48)):
        folder = tmp_path / f"eval{len(losses)}"
        evaluated = ("--eval-only", "--resume", output / "last.pt", "--output", folder)
        done = run(default_project, *flags, *evaluated, *extra, nproc=0, CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 0, done.stderr
        losses.append(json.loads((folder / "eval.json").read_text())["metrics"]["val_loss"])
    assert len(set(losses)) == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--image-size", "32:64"), "are for --data"),
        (("--dummy", "--eval-size", 64), "are for --data"),
        (("--data", "IDX", "--image-size", "28:32"), "are not for IDX files"),
        (("--data", "IDX", "--eval-size", 20_000), "--eval-size 20000: use at most 4096"),
        (("--data", "IDX", "--interpolation", "bicubic"), "are not for IDX files"),
        (("--data", "IDX", "--decode", "gpu"), "--decode gpu is for the JPEG files"),
        (
            ("--data", "folder", "--decode", "gpu", "--skip-broken", 1),
            "--skip-broken needs files that the CPU decodes; leave out --decode gpu",
        ),
        (("--image-size", "64:32"), "'64:32' is not a number of pixels"),
        (("--image-size", "4097"), "'4097' is not a number of pixels up to 4096"),
    ],
)
def test_contradicting_flags_are_refused(parse, idx_folder: Path, flags, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(*(idx_folder if flag == "IDX" else flag for flag in flags))


def test_shapes_are_static_for_growing_images_only(parse, image_folder: Path) -> None:
    """Compiled kernels are then made once for each size."""
    data = ("--data", image_folder)
    assert parse(*data, "--image-size", "64:128").static_shapes
    assert not parse(*data, "--image-size", "64").static_shapes
    assert not parse(*data).static_shapes


def test_flip_probability_reaches_the_crops(default_project: Path) -> None:
    task = load_project(default_project).task
    flips = {
        hflip: {task.random_crop(50, 60, hflip=hflip).flip for _ in range(40)} for hflip in (0, 0.5)
    }
    assert flips == {0: {False}, 0.5: {False, True}}
