"""Classification: validation counts each sample once, however processes divide the set."""

import inspect
import pickle
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from engine import UserError
from engine.data import DatasetWrapper
from engine.data.augmentation import MixedDataset
from engine.data.class_weights import WeightedDataset, balanced_weights
from fresh import UNCHANGED
from PIL import Image
from processes import Processes
from projects import Project, evaluate, load_project
from sklearn.utils.class_weight import compute_sample_weight
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

CPU = torch.device("cpu")
pytestmark = pytest.mark.xdist_group("in_process")


@pytest.fixture
def project(shared_project: Callable) -> Project:
    return load_project(shared_project(task="classification"))


def build(project: Project) -> nn.Module:
    """Return a model with batch norm, in float64, in which the division into batches is exact."""
    torch.manual_seed(0)
    return project.task.build_model("shufflenet_v2_x0_5", 10).double()


def double(batch: list) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = torch.utils.data.default_collate(batch)
    return images.double(), labels


def evaluate_shard(folder: Path, size: int) -> dict[str, float]:
    """Return what each rank computes on the first `size` validation samples."""
    project = load_project(folder)
    task = project.task
    rank = dist.get_rank()
    val_set = Subset(task.Digits(train=False), range(size))
    shard = range(rank, size, dist.get_world_size())
    batches = DataLoader(val_set, 4, sampler=shard, collate_fn=double)
    model = build(project)
    for buffer in model.buffers():  # as if each rank had gone its own way in training
        buffer.add_(rank)
    metrics = task.Metrics(10, torch.device("cpu"), Namespace(report=False))
    evaluate(project, model, metrics, batches)  # the next evaluation resets the metrics
    return evaluate(project, model, metrics, batches)


@pytest.mark.parametrize("size", [1, 7, 25])
@torch.no_grad()
def test_evaluation_equals_that_of_one_process(
    processes: Processes, project: Project, size: int
) -> None:
    task = project.task
    images, labels = double([task.Digits(train=False)[index] for index in range(size)])
    output = build(project).eval()(images)
    loss = nn.functional.cross_entropy(output.float(), labels, reduction="sum").item() / size
    accuracy = (output.argmax(1) == labels).sum().item() / size
    for results in processes(evaluate_shard, project.folder, size):
        assert results[task.METRIC] == accuracy
        assert results["val_loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("flags", [(), ("--eval-size", "96"), ("--arch", "timm:resnet18")])
def test_edited_images_hold_with_any_flags(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """An owner may edit IMAGES; what it says is recorded, and flags change the rest."""
    edited = project.task.IMAGES._replace(size=64, crop_fraction=1.0)
    monkeypatch.setattr(project.task, "IMAGES", edited)
    monkeypatch.setattr(sys, "argv", ["main.py", "--data", str(tmp_path), *flags])
    image = project.main.parse_args().model_options["image"]
    assert (image["size"], image["crop_fraction"]) == (64, 1.0)
    assert image["eval_size"] == (96 if "--eval-size" in flags else None)
    monkeypatch.setattr(project.task, "IMAGES", edited._replace(mean=(0.5, 0.5, 0.5)))
    is_timm = "--arch" in flags  # whose models convert their inputs
    with nullcontext() if is_timm else pytest.raises(UserError, match="mean and std of IMAGES"):
        assert project.main.parse_args().model_options["image"]["mean"] == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("changes", [{}, {"size": 64, "crop_fraction": 1.0}])
def test_images_of_a_checkpoint_do_not_depend_on_later_edits(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict
) -> None:
    """A checkpoint records what differs from the defaults of ImageSpec."""
    task = project.task
    spec = task.IMAGES._replace(**changes)
    metadata = {"data": "d", "classes": ["a"], "model_options": {"image": changes}}
    monkeypatch.setattr(task, "IMAGES", task.IMAGES._replace(size=96, interpolation="bicubic"))
    predict = task.Predictor(nn.Linear(1, 1), metadata, Namespace(top=5, flip_tta=False))
    assert predict.read.keywords == {"spec": spec}
    batch = task.dummy_batch(1, torch.device("cpu"), **metadata["model_options"])
    assert batch[0].shape == (1, 3, spec.size, spec.size)


@pytest.mark.parametrize("is_data", [True, False])
def test_an_own_model_needs_no_options(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_data: bool
) -> None:
    """``build_model(arch, num_classes)`` is enough with images of the default size."""
    flags = ["--data", str(tmp_path)] if is_data else []
    monkeypatch.setattr(sys, "argv", ["main.py", *flags])
    assert project.main.parse_args().model_options == {}


def test_one_class_is_an_error(
    project: Project, monkeypatch: pytest.MonkeyPatch, image_folder: Path
) -> None:
    """As that of a folder that holds the classes' folders."""
    (image_folder / "train").rename(image_folder / "images")
    (image_folder / "train").mkdir()
    (image_folder / "images").rename(image_folder / "train" / "images")
    monkeypatch.setattr(sys, "argv", ["main.py", "--data", str(image_folder)])
    args = project.main.parse_args()
    with pytest.raises(UserError, match="one class, images: it takes train/CLASS/.*, or IDX files"):
        project.task.read_datasets(args)


@pytest.mark.parametrize("flags", [(), ("--image-size", "48"), ("--arch", "timm:resnet18")])
def test_edited_images_leave_the_size_of_the_digits(
    project: Project, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    edited = project.task.IMAGES._replace(size=64, crop_fraction=1.0)
    monkeypatch.setattr(project.task, "IMAGES", edited)
    monkeypatch.setattr(sys, "argv", ["main.py", *flags])
    image, _ = project.task.read_datasets(project.main.parse_args())[1][0]
    assert image.shape[-1] == (48 if "--image-size" in flags else 32)


class Inverted(DatasetWrapper):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = self.dataset[index]
        return 255 - image, label


@pytest.mark.parametrize("is_evaluation", [False, True])
def test_an_edit_of_the_last_line_of_read_datasets_is_for_evaluations_too(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_evaluation: bool
) -> None:
    for folder in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / folder).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / folder / "1.png")
    flags = ["--eval-only", "--resume", "best.pt"] if is_evaluation else []
    monkeypatch.setattr(sys, "argv", ["main.py", "--data", str(tmp_path), *flags])
    args = project.main.parse_args()
    *lines, last = inspect.getsource(project.task.read_datasets).splitlines()
    assert last.startswith("    return ")
    last = f"    train_set, val_set = {last.removeprefix('    return ')}"
    edited = [*lines, last, "    return Inverted(train_set), Inverted(val_set)"]
    names = vars(project.task) | {"Inverted": Inverted}
    exec("\n".join(edited), names)
    assert all(isinstance(one, Inverted) for one in names["read_datasets"](args))


def loader_of_validation(project: Project, data: Path, skip_broken: int = 0) -> DataLoader:
    """Return the validation's loader of main.py for this rank."""
    args = data_arguments(data, skip_broken)
    format = torch.contiguous_format
    return project.main.build_data(args, CPU, format, SimpleNamespace()).val_loader


def data_arguments(data: Path, skip_broken: int = 0, workers: int = 0) -> Namespace:
    """Return the flags that main.build_data needs."""
    args = Namespace(data=data, dummy=False, decode="cpu", eval_only=False, **UNCHANGED)
    args.skip_broken, args.output, args.report = skip_broken, data / "run", False
    args.seed, args.epochs, args.batch_size, args.workers, args.timeout = 0, 1, 2, workers, 60
    return args


class OneFile(Dataset):
    """Samples of one file, which is opened at the first of them, as is usual for HDF5."""

    classes = ("a", "b")

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, None

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.file is None:
            self.file = self.path.open("rb")
        self.file.seek(index)
        return torch.full((3, 8, 8), self.file.read(1)[0], dtype=torch.uint8), index % 2


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_a_data_set_opens_is_not_shared_by_the_workers(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workers: int
) -> None:
    """Forked workers would move one another's position in a file that is open already."""
    path = tmp_path / "samples"
    path.write_bytes(bytes(range(40)))
    data_sets = OneFile(path), OneFile(path)
    monkeypatch.setattr(project.task, "build_datasets", lambda _: data_sets)
    monkeypatch.setattr(project.main, "require_same_data", lambda *_: None)
    monkeypatch.setattr(dist, "get_rank", lambda *_: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 1)
    args = data_arguments(tmp_path, workers=workers)
    data = project.main.build_data(args, CPU, torch.contiguous_format, None)
    assert data.sample[0][:, 0, 0, 0].tolist() == [0, 1]
    assert data.val_sample[0][:, 0, 0, 0].tolist() == [*range(0, 40, 5)]
    assert [data_set.file is None for data_set in data_sets] == [workers > 0] * 2


def evaluate_folder(folder: Path, data: Path, skip_broken: int) -> dict[str, float]:
    """Return what each rank computes on a folder, with the loader of main.py."""
    project = load_project(folder)
    batches = loader_of_validation(project, data, skip_broken)
    torch.manual_seed(0)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 2))
    metrics = project.task.Metrics(2, torch.device("cpu"), Namespace(report=False))
    return evaluate(project, model, metrics, batches)


def shard_of_validation(folder: Path, data: Path) -> list[int]:
    return list(loader_of_validation(load_project(folder), data).sampler)


def test_validation_shards_cover_each_sample_once(
    processes: Processes, project: Project, image_folder: Path
) -> None:
    shards = processes(shard_of_validation, project.folder, image_folder)
    assert sorted(index for shard in shards for index in shard) == list(range(10))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_unreadable_files_are_left_out_of_the_validation(
    processes: Processes, project: Project, image_folder: Path
) -> None:
    """No other sample takes their place."""
    broken = sorted((image_folder / "val" / "red").iterdir())[1:4]
    for path in broken:
        path.write_bytes(b"no image")
    with_broken = processes(evaluate_folder, project.folder, image_folder, 3)
    for path in broken:
        path.unlink()
    without = processes(evaluate_folder, project.folder, image_folder, 0)
    assert with_broken[0] == pytest.approx(without[0])


def weighted_datasets(project: Project, folder: Path) -> tuple:
    flags = UNCHANGED | {"class_weights": True}
    args = Namespace(data=folder, decode="cpu", eval_only=False, **flags)
    return project.task.build_datasets(args)


def test_evaluation_has_the_validation_data_alone(project: Project, image_folder: Path) -> None:
    """Whatever the flags of the training: a growing image size would resize its crops."""
    flags = UNCHANGED | {"image_size": "16:32", "epochs": 4, "mixup": 0.2}
    args = Namespace(data=image_folder, decode="cpu", eval_only=True, **flags)
    train_set, val_set = project.task.build_datasets(args)
    assert train_set is val_set


def test_class_weights_are_those_of_scikit_learn(project: Project, image_folder: Path) -> None:
    for path in sorted((image_folder / "train" / "red").iterdir())[:9]:
        path.unlink()
    train_set, val_set = weighted_datasets(project, image_folder)
    labels = [label for _, label, _ in train_set]
    assert labels == [0] * 12 + [1] * 3
    weights = torch.stack([weight for *_, weight in train_set])
    assert weights.tolist() == pytest.approx(compute_sample_weight("balanced", labels))
    assert len(val_set[0]) == 2  # validation has none
    pixels = torch.randint(255, (15, 3, 8, 8), dtype=torch.uint8)
    inputs, targets = project.task.prepare([pixels, torch.tensor(labels), weights])
    output = nn.Linear(192, 2)(inputs.flatten(1))
    expected = nn.functional.cross_entropy(
        output, targets[0][0], weight=torch.tensor([15 / 24, 15 / 6])
    )  # torch divides by the sum of the weights, which is 15 for the whole set
    assert project.task.criterion(output, targets).item() == pytest.approx(expected.item())


def test_weighted_loss_is_the_mean_of_that_of_parts(project: Project) -> None:
    """As DistributedDataParallel and --accumulate average it."""
    output, labels = torch.randn(8, 3), torch.tensor([0, 0, 0, 0, 0, 1, 2, 2])
    weights = balanced_weights(labels)
    whole = project.task.criterion(output, [(labels, weights)], 0.1)
    parts = zip(output.split(4), labels.split(4), weights.split(4), strict=True)
    losses = [project.task.criterion(o, [(part, w)], 0.1) for o, part, w in parts]
    assert whole.item() == pytest.approx(torch.stack(losses).mean().item())


def test_samples_without_a_label_count_for_the_mean(project: Project) -> None:
    """Other processes may have more of them; all of a batch are no division by zero."""
    output = torch.randn(4, 3)
    labels = torch.tensor([-100, 1, 2, -100])
    expected = nn.functional.cross_entropy(output[1:3], labels[1:3], label_smoothing=0.1) / 2
    torch.testing.assert_close(project.task.criterion(output, labels, 0.1), expected)
    assert project.task.criterion(output, torch.full((4,), -100)) == 0


@pytest.mark.parametrize("labels", [None, ["cat", "dog", "cat"], [0, 1, 0, 1]])
def test_data_without_labels_has_no_class_weights(labels: list[str] | None) -> None:
    data = type("Data", (list,), {} if labels is None else {"labels": labels})(range(3))
    with pytest.raises(UserError, match="--class-weights: the training data needs an attribute"):
        WeightedDataset(data)


def test_labels_of_a_data_frame_have_class_weights() -> None:
    """The part of a column that a split selects keeps its index, which does not begin at 0."""

    class Column(dict):
        ndim = 1

        def tolist(self) -> list[int]:
            return [*self.values()]

    data = type("Data", (list,), {"labels": Column({7: 0, 9: 0, 8: 1})})(range(3))
    assert WeightedDataset(data).weights.tolist() == [0.75, 0.75, 1.5]


def test_collate_fn_gets_no_element_that_it_does_not_expect() -> None:
    data = type("Data", (list,), {"labels": [0, 1, 0], "collate_fn": list})(range(3))
    for kind, options, flag in (
        (WeightedDataset, (), "--class-w"),
        (MixedDataset, (1, 0, 0), "--m"),
    ):
        with pytest.raises(UserError, match=f"{flag}.*the data set's collate_fn does not expect"):
            kind(data, *options)


def test_ignored_samples_have_no_class_weight() -> None:
    weights = balanced_weights([0, 0, 0, 1, -100])
    assert weights.tolist() == pytest.approx([2 / 3, 2 / 3, 2 / 3, 2, 0])


def test_samples_with_weights_of_their_own_have_no_class_weights() -> None:
    data = type("Data", (list,), {"labels": [0, 1]})([(torch.zeros(3), 0, torch.tensor(2.0))] * 2)
    with pytest.raises(UserError, match="--class-weights: the training samples have weights of"):
        WeightedDataset(data)[0]


def test_labels_of_a_byte_are_counted_beyond_its_values(project: Project) -> None:
    metrics = project.task.Metrics(2, torch.device("cpu"), Namespace(report=False))
    metrics.update(torch.tensor([[1.0, 0.0]]).expand(300, 2), torch.zeros(300, dtype=torch.uint8))
    assert metrics.totals[1:].tolist() == [300.0, 300.0]


def test_weights_and_probabilities_of_samples_to_validate_on_are_an_error(project: Project) -> None:
    metrics = project.task.Metrics(2, torch.device("cpu"), Namespace(report=False))
    batch = [torch.zeros(2, 3, 8, 8), torch.tensor([0, 1]), torch.tensor([1.0, 2.0])]
    for targets in (project.task.prepare(batch)[1], torch.eye(2)):
        with pytest.raises(UserError, match=r"is \(image, class number\), without "):
            metrics.update(torch.zeros(2, 2), targets)


@torch.no_grad()
def test_names_of_classes_may_be_numbers(project: Project, tmp_path: Path) -> None:
    task = project.task
    val_set = task.Digits(train=False)
    val_set.classes = list(range(10))
    metrics = task.Metrics(10, torch.device("cpu"), Namespace(report=True))
    metrics.update(torch.eye(10), torch.arange(10))
    task.show(build(project).float(), val_set, metrics, tmp_path)
    assert (tmp_path / "class_report.csv").read_text().splitlines()[10].startswith("9,")


def test_weighted_dataset_has_the_attributes_of_its_data_set(
    project: Project, image_folder: Path
) -> None:
    train_set, _ = weighted_datasets(project, image_folder)
    copy = pickle.loads(pickle.dumps(train_set))  # for the processes that load data
    copy.reorder_classes(["red", "blue"])
    assert (copy.classes, copy[0][1], len(copy)) == (["red", "blue"], 1, 24)
    assert copy.decode == "cpu"


def test_labels_of_a_folder_follow_another_order_of_its_classes(
    project: Project, image_folder: Path
) -> None:
    task = project.task
    images = task.Images(image_folder / "val", task.center_crop)
    before = [(path, images.classes[label]) for path, label in images.samples]
    assert images.classes == ["blue", "red"]
    images.reorder_classes(["red", "blue"])
    assert [(path, images.classes[label]) for path, label in images.samples] == before
    assert images[0][1] == images.classes.index("blue") == 1
