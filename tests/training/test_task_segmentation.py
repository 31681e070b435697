"""Segmentation: metrics, transforms of images and masks, models, and errors of data files."""

import os
import sys
from argparse import Namespace

import numpy as np
import pytest
import template_task_segmentation as task
import torch
import torch.distributed as dist
from apex_native.parallel import SyncBatchNorm, convert_syncbn_model
from engine import UserError
from engine.checkpoint.compatibility import compare_data, describe_data, is_same_val_data
from engine.checkpoint.pretrained import load_pretrained
from engine.data import DatasetWrapper, verify
from engine.data.files import FileError
from engine.data.images import normalize
from engine.data.skipping import skip_broken
from engine.diagnostics.first_step import check_trainable
from PIL import Image
from processes import Processes
from projects import Project, evaluate, load_project
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, Subset
from torchvision import tv_tensors

CPU = torch.device("cpu")
IGNORED = task.IGNORED
pytestmark = pytest.mark.xdist_group("in_process")


@pytest.fixture
def project(shared_project) -> Project:
    """The scripts of a project of this task, whose task.py it is."""
    return load_project(shared_project(task="segmentation"))


class Canvases(torch.utils.data.Dataset):
    """The digits for validation in float64, each canvas with other pixels that are ignored."""

    def __init__(self, size: int) -> None:
        self.digits, self.size = Subset(task.Digits(train=False), range(size)), size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image, mask = self.digits[index]
        mask[: 5 * index] = IGNORED
        return image.double() / 255, mask


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return task.build_model("unet", 11).double()


def evaluate_shard(folder, size: int) -> tuple[dict[str, float], torch.Tensor]:
    """Return what each rank computes on `size` canvases, and the confusion matrix."""
    project, canvases = load_project(folder), Canvases(size)
    shard = range(dist.get_rank(), size, dist.get_world_size())
    batches = DataLoader(canvases, 2, sampler=shard)
    metrics = task.Metrics(11, CPU, Namespace())
    evaluate(project, build(), metrics, batches)  # the next evaluation resets the metrics
    results = evaluate(project, build(), metrics, batches)
    return results, metrics.confusion


@pytest.mark.parametrize("size", [1, 7])
@torch.no_grad()
def test_miou_equals_that_of_one_process(processes: Processes, project: Project, size: int) -> None:
    images, masks = map(torch.stack, zip(*Canvases(size), strict=True))
    scores = build().eval()(images)
    counted = masks != IGNORED
    truth, predicted = masks[counted].numpy(), scores.argmax(1)[counted].numpy()
    ious = []
    for number in range(11):
        union = ((truth == number) | (predicted == number)).sum()
        if union:
            ious.append(((truth == number) & (predicted == number)).sum() / union)
    losses = torch.nn.functional.cross_entropy(
        scores, masks.long(), ignore_index=IGNORED, reduction="none"
    )
    for results, confusion in processes(evaluate_shard, project.folder, size):
        assert results["val_miou"] == pytest.approx(np.mean(ious), rel=1e-12)
        assert results["val_loss"] == pytest.approx(losses[counted].mean().item(), rel=1e-6)
        assert confusion.sum() == counted.sum()


def test_absent_classes_are_excluded_from_miou():
    metrics = task.Metrics(3, CPU, Namespace())
    scores = torch.tensor([[9.0, 0, 0], [9, 0, 0], [0, 9, 0], [0, 9, 0]]).T.reshape(1, 3, 2, 2)
    metrics.update(scores, torch.tensor([[[0, 1], [1, IGNORED]]]))
    assert torch.equal(metrics.iou().isnan(), torch.tensor([False, False, True]))
    assert metrics.iou()[:2].tolist() == [0.5, 0.5]


def test_segmentation_loss_ignores_pixels_and_adds_the_auxiliary_loss():
    masks = torch.tensor([[[0, IGNORED], [2, IGNORED]]], dtype=torch.uint8)
    out, aux = torch.randn(2, 1, 3, 2, 2)
    entropy = torch.nn.CrossEntropyLoss()
    targets = torch.tensor([0, 2])
    first, second = (entropy(scores[0, :, :, 0].T, targets) for scores in (out, aux))
    torch.testing.assert_close(task.criterion(out, masks), first)
    torch.testing.assert_close(
        task.criterion({"out": out, "aux": aux}, masks), first + 0.5 * second
    )
    assert task.criterion(out, torch.full_like(masks, IGNORED)) == 0


@pytest.mark.parametrize("arch", ["lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large"])
def test_torchvision_models_keep_their_auxiliary_head(arch):
    output = task.build_model(arch, 4)(torch.randn(2, 3, 64, 64))
    assert output["out"].shape == (2, 4, 64, 64)
    assert ("aux" in output) == arch.startswith("deeplab")


def test_batch_of_one_is_refused_for_global_pooling_with_batch_norm():
    """DeepLab's pooling does, whatever the size of the image."""
    model = task.build_model("deeplabv3_resnet50", 4)
    images, masks = torch.randn(2, 3, 64, 64), torch.zeros(2, 64, 64, dtype=torch.uint8)
    with pytest.raises(UserError, match="of 1 .*: Expected more than 1 value.*--batch-size"):
        check_trainable(model, task.criterion, task.prepare, [images[:1], masks[:1]])
    check_trainable(model, task.criterion, task.prepare, [images, masks])


@pytest.mark.parametrize("size", [(1, 3000), (3000, 1), (1, 1), (500, 300)])
def test_letterbox_of_any_shape(size):
    image, mask = torch.zeros(3, *size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    image, mask = task.letterbox(tv_tensors.Image(image), tv_tensors.Mask(mask), 64)
    assert image.shape[1:] == mask.shape == (64, 64)
    shorter = max(1, 64 * min(size) // max(size))
    assert (mask == 1).sum() == 64 * shorter
    assert (mask == task.IGNORED).sum() == 64 * (64 - shorter)


@pytest.mark.parametrize("transform", [task.letterbox, task.augment])
def test_masks_are_resized_as_their_images_are(transform):
    """An object at the top has as many rows of labels as of bright pixels, on average."""
    torch.manual_seed(0)
    excess = []
    for rows in range(700, 796):
        mask = (torch.arange(1536) < rows)[:, None].expand(-1, 600).byte()
        image = (255 * mask).expand(3, -1, -1)
        image, mask = transform(tv_tensors.Image(image), tv_tensors.Mask(mask))
        bright, labels = image[0, :, 100], mask[:, 100]
        if {0, 1} <= {*labels.tolist()}:
            excess.append(((labels == 1).sum() - bright[labels != IGNORED].sum() / 255).item())
    assert len(excess) > 8 and abs(np.mean(excess)) < 0.1


def test_segmentation_models_pytorch_model():
    pytest.importorskip("segmentation_models_pytorch")
    model = task.build_model("smp:deeplabv3plus:tu-xception41", 4)
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 4, 64, 64)


@pytest.mark.parametrize(
    "arch",
    [
        pytest.param("deeplabv3plus:tu-xception65", marks=pytest.mark.slow),
        "deeplabv3plus:tu-mobilenetv3_small_075",  # with other activations than ReLU
        "deeplabv3plus:tu-regnety_002",
        pytest.param("unet:tu-densenet121", marks=pytest.mark.slow),
    ],
)
def test_split_timm_norms_are_equivalent(arch, tmp_path):
    """So that SyncBN reaches all of them, and leaves the activations that they end in."""
    smp = pytest.importorskip("segmentation_models_pytorch")
    whole = smp.create_model(*arch.split(":"), encoder_weights=None, classes=4)
    images = torch.randn(2, 3, 64, 64)
    kinds = [type(part) for part in whole.modules() if isinstance(part, _BatchNorm)]
    assert len(set(kinds)) == 2
    torch.save(whole.state_dict(), tmp_path / "whole.pt")
    model = task.build_model(f"smp:{arch}", 4)
    load_pretrained(model, str(tmp_path / "whole.pt"), arch, [], lambda _: model)
    norms = [part for part in model.modules() if isinstance(part, _BatchNorm)]
    assert [type(norm) for norm in norms] == [torch.nn.BatchNorm2d] * len(kinds)
    for train in (True, False):  # with the statistics of the batch, then with the running ones
        outputs = []
        for one in (whole, model):
            torch.manual_seed(0)  # of dropout
            outputs.append(one.train(train)(images))
        torch.testing.assert_close(*outputs, rtol=0, atol=0)
    converted = convert_syncbn_model(model)
    norms = [part for part in converted.modules() if isinstance(part, _BatchNorm)]
    assert [type(norm) for norm in norms] == [SyncBatchNorm] * len(kinds)
    torch.testing.assert_close(converted(images), outputs[0], rtol=0, atol=0)


@pytest.mark.slow
def test_deeplab_with_xception_uses_the_dilatable_encoder(capsys, monkeypatch):
    pytest.importorskip("segmentation_models_pytorch")
    model = task.build_model("smp:deeplabv3plus:xception", 4)
    said = capsys.readouterr()
    assert said.err == (
        "--arch smp:deeplabv3plus:xception: with tu-xception65, as smp's own xception can't be "
        "dilated\n"
    )
    expected = task.build_model("smp:deeplabv3plus:tu-xception65", 4).state_dict()
    assert model.state_dict().keys() == expected.keys()
    task.build_model("smp:unet:xception", 4)
    monkeypatch.setenv("RANK", "1")
    task.build_model("smp:deeplabv3plus:xception", 4)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("encoder", ["tu-densenet121", "tu-hrnet_w18_small", "none"])
def test_unsuitable_encoder_is_an_error(encoder):
    """The error is of many kinds, and may have no words."""
    pytest.importorskip("segmentation_models_pytorch")
    with pytest.raises(UserError, match=rf"smp:deeplabv3plus:{encoder} can't be made \(.+\); name"):
        task.build_model(f"smp:deeplabv3plus:{encoder}", 4)


@pytest.mark.parametrize("transform", [task.augment, task.letterbox])
@pytest.mark.parametrize("size", [(300, 700), (700, 300), (40, 60)])
def test_mask_and_image_are_transformed_together(transform, size):
    """The image's value is 8 times the mask's; their edges are blurred in the image alone."""
    mask = torch.zeros(size, dtype=torch.uint8)
    mask[size[0] // 3 :, size[1] // 4 :] = 30
    image = (8 * mask).expand(3, -1, -1)
    image, mask = transform(tv_tensors.Image(image), tv_tensors.Mask(mask))
    assert image.shape == (3, 512, 512)
    assert mask.shape == (512, 512)
    assert set(mask.unique().tolist()) <= {0, 30, IGNORED}
    expected = torch.where(mask == IGNORED, torch.tensor(task.GREY[0]), 8 * mask.int())
    assert ((image[0] - expected).abs() > 1).float().mean() < 0.15


# A folder of ADE20K's layout


@pytest.fixture
def folder(tmp_path):
    """Three classes; labels 0 and 255 in each mask, and 1 or 2."""
    for split, count in (("training", 4), ("validation", 2)):
        for kind in ("images", "annotations"):
            (tmp_path / kind / split).mkdir(parents=True)
        for number in range(count):
            labels = np.zeros((20, 30), dtype=np.uint8)
            labels[5:15], labels[:, :2] = 1 + number % 2, 255
            Image.fromarray(labels).save(tmp_path / "annotations" / split / f"{number}.png")
            image = Image.fromarray(labels * 90).convert("RGB")
            image.save(tmp_path / "images" / split / f"{number}.jpg")
    (tmp_path / "classes.txt").write_text("sky\ntree\nhouse\n")
    return tmp_path


def build_datasets(folder, ignore_index=None):
    return task.build_datasets(Namespace(data=folder, ignore_index=ignore_index, eval_only=False))


def test_scores_of_another_image_size_are_not_compared(folder, monkeypatch):
    def describe():
        train, val = build_datasets(folder)
        return describe_data({"train": train, "val": val})

    saved = describe()
    assert is_same_val_data(saved, describe())
    monkeypatch.setattr(task, "SIZE", 256)
    assert is_same_val_data(saved, describe()) is False
    assert compare_data(saved, describe()) == {"val": "other image size"}
    del saved["fingerprints"]["val"]["image size"]  # of an earlier version
    assert is_same_val_data(saved, describe())


@pytest.mark.parametrize(
    ("ignore_index", "classes", "values"),
    [
        (None, ["sky", "tree", "house"], {0, 1, IGNORED}),
        (255, ["sky", "tree", "house"], {0, 1, IGNORED}),
        (0, ["tree", "house"], {0, IGNORED}),
        (1, ["sky", "house"], {0, IGNORED}),
        (254, ["sky", "tree", "house"], {0, 1, IGNORED}),
    ],
)
def test_ignored_label_is_not_a_class(folder, ignore_index, classes, values):
    if ignore_index == 254:  # as 255, it has no name
        path = folder / "annotations" / "validation" / "0.png"
        labels = np.array(Image.open(path))
        labels[-1] = 254
        Image.fromarray(labels).save(path)
    _, val_set = build_datasets(folder, ignore_index)
    assert val_set.classes == classes
    assert set(val_set[0][1].unique().tolist()) == values


def test_labels_follow_another_order_of_the_classes(folder):
    _, val_set = build_datasets(folder)
    before = val_set[0][1]
    val_set.reorder_classes(["tree", "house", "sky"])
    changed = {0: 2, 1: 0, 2: 1, IGNORED: IGNORED}
    assert val_set.classes == ["tree", "house", "sky"]
    assert torch.equal(val_set[0][1], before.clone().apply_(changed.get))


def test_ade20k_class_list(folder):
    lines = ("Idx\tRatio\tTrain\tVal\tName\t\t", "1\t0.15\t11664\t1172\twall\t\t")
    text = "\n".join((*lines, "2\t0.1\t6046\t612\tbuilding, edifice\t\t"))
    (folder / "objectInfo150.txt").write_text(text)
    (folder / "classes.txt").unlink()
    _, val_set = build_datasets(folder)
    assert val_set.classes == ["wall", "building, edifice"]
    assert set(val_set[1][1].unique().tolist()) == {1, IGNORED}


def refused(folder, *words, ignore_index=None, index=None):
    with pytest.raises(UserError) as caught:
        train_set, _ = build_datasets(folder, ignore_index)
        train_set[index]
    for word in words:
        assert str(word) in str(caught.value)


def test_images_of_all_types_have_masks(folder):
    image = folder / "images" / "training" / "0.jpg"
    Image.open(image).save(image.with_suffix(".webp"))
    image.unlink()
    assert len(build_datasets(folder)[0]) == 4


def test_unpaired_images_and_masks_are_errors(folder):
    masks = folder / "annotations" / "training"
    (masks / "0.png").rename(masks / "a.png")
    refused(folder, masks, "1 of NAME: 0;")
    (folder / "images" / "training" / "0.jpg").unlink()
    refused(folder, folder / "images" / "training", "1 of NAME: a;")


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.full((20, 30), 7, np.uint8), ("the label 7", "3 classes")),
        (np.zeros((20, 30, 3), np.uint8), ("not RGB",)),
        (np.zeros((20, 30), np.uint16), ("not I;16",)),
    ],
    ids=["label", "colours", "16-bit"],
)
def test_invalid_mask_is_an_error(folder, array, words):
    path = folder / "annotations" / "training" / "2.png"
    Image.fromarray(array).save(path)
    refused(folder, path, *words, index=2)


@pytest.mark.parametrize("split", ["training", "validation"])
def test_masks_of_another_size_are_errors_at_startup(folder, split, monkeypatch):
    monkeypatch.setenv("RANK", "2")  # the first one of another machine, which has its own files
    monkeypatch.setenv("LOCAL_RANK", "0")
    for number in range(2):
        path = folder / "annotations" / split / f"{number}.png"
        Image.fromarray(np.zeros((20, 31 + number), np.uint8)).save(path)
    words = [f"{n}.jpg has 30 × 20 pixels and its mask {31 + n} × 20" for n in range(2)]
    refused(folder, folder / "images" / split, *words)


def test_mask_of_another_size_is_an_error_when_read(folder, monkeypatch):
    """Before the first one has listed them all."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    path = folder / "annotations" / "training" / "2.png"
    Image.fromarray(np.zeros((20, 31), np.uint8)).save(path)
    words = "2.jpg has 30 × 20 pixels and its mask 31 × 20"
    refused(folder, folder / "images" / "training", words, index=2)


def test_images_of_the_same_name_are_an_error(folder):
    Image.new("RGB", (30, 20)).save(folder / "images" / "training" / "0.png")
    refused(folder, folder / "images" / "training", "0.jpg beside 0.png; keep one")


def test_truncated_mask_is_an_error(folder):
    path = folder / "annotations" / "training" / "2.png"
    path.write_bytes(path.read_bytes()[:60])
    refused(folder, path, "fix or remove", index=2)


@pytest.mark.parametrize("kind", ["images", "annotations"])
def test_broken_file_does_not_stop_the_start(folder, kind):
    """It may be one to skip."""
    for path in (folder / kind / "training").glob("0.*"):
        path.unlink()
        os.mkfifo(path)
    train_set, _ = build_datasets(folder)
    with pytest.raises(FileError, match=f"{kind}/training/0.* not a regular file"):
        train_set[0]


def test_picture_is_predicted_before_files_are_written(folder, tmp_path):
    """With FSDP, all processes run the model together: an error of one must come after that."""
    (tmp_path / "validation").symlink_to("/dev/null")
    _, val_set = build_datasets(folder)
    model = task.build_model("unet", 3)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(OSError, match="is a link"):
        task.show(model, val_set, task.Metrics(3, CPU, Namespace()), tmp_path)
    assert calls == [1]


class Normalized(DatasetWrapper):
    """A data set of the same images as floats."""

    def __getitem__(self, index):
        image, mask = self.dataset[index]
        return normalize(image[None])[0], mask


def test_picture_of_float_images_is_that_of_uint8(folder, tmp_path):
    _, val_set = build_datasets(folder)
    model = task.build_model("unet", 3)
    metrics = task.Metrics(3, CPU, Namespace())
    one = task.show(model, val_set, metrics, tmp_path / "uint8")
    two = task.show(model, Normalized(val_set), metrics, tmp_path / "floats")
    assert one.read_bytes() == two.read_bytes()


def test_masks_of_floats_are_an_error():
    batch = [torch.zeros(1, 3, 4, 4, dtype=torch.uint8), torch.full((1, 4, 4), 1 / 255)]
    with pytest.raises(UserError, match="masks of a data set must be integers, the class of each"):
        task.prepare(batch)


def test_names_of_classes_may_be_tuples_as_those_of_imagenet(folder, tmp_path):
    _, val_set = build_datasets(folder)
    val_set.classes = [(name, "another name") for name in val_set.classes]
    metrics = task.Metrics(3, CPU, Namespace())
    path = task.show(task.build_model("unet", 3), val_set, metrics, tmp_path)
    assert "('tree', 'another name')" in path.with_suffix(".csv").read_text()


def test_formulas_in_class_names_are_quoted(folder, tmp_path):
    (folder / "classes.txt").write_text("=1+1\ntree\nhouse\n")
    _, val_set = build_datasets(folder)
    metrics = task.Metrics(3, CPU, Namespace())
    path = task.show(task.build_model("unet", 3), val_set, metrics, tmp_path / "run")
    rows = path.with_suffix(".csv").read_text().splitlines()
    assert rows[1].startswith("'=1+1,,#")
    with Image.open(path) as picture:  # three panels of 512 pixels, a heading and a legend
        assert picture.size == (3 * 516 + 4, 2 * 516 + 16 + 16 + 8)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must hold 1 to 255 names, one in each line"),
        ("".join(f"{number}\n" for number in range(256)), "must hold 1 to 255 names"),
        ("sky\n\nhouse\n", "is blank"),
        ("sky\ntree\nhouse\ntree\n", "is a duplicate"),
    ],
    ids=["empty", "long", "blank", "duplicate"],
)
def test_invalid_class_list_is_an_error(folder, text, words):
    (folder / "classes.txt").write_text(text)
    refused(folder, "classes.txt", words)


@pytest.mark.parametrize("name", ["classes.txt", "objectInfo150.txt"])
def test_class_list_without_an_end_or_of_gigabytes_is_an_error(folder, name):
    (folder / "classes.txt").unlink()
    (folder / name).symlink_to("/dev/zero")
    refused(folder, folder / name, "can't be read (it is not a regular file)")
    (folder / name).unlink()
    (folder / name).touch()
    os.truncate(folder / name, 2**40)
    refused(folder, folder / name, "it has 1099511627776 bytes, more than 67108864")


def test_class_list_encoding_and_trailing_blank_lines(folder):
    (folder / "classes.txt").write_bytes("sky\ntree\nmaïs\n".encode("latin-1"))
    refused(folder, "classes.txt is not UTF-8")
    (folder / "classes.txt").write_text("sky\ntree\nhouse\n\n")
    assert build_datasets(folder)[0].classes == ["sky", "tree", "house"]


@pytest.mark.parametrize("split", ["training", "validation"])
def test_masks_with_only_ignored_pixels_are_an_error(folder, split):
    masks = folder / "annotations" / split
    for path in masks.iterdir():
        Image.fromarray(np.full((20, 30), 2 if path.stem == "0" else 255, np.uint8)).save(path)
    build_datasets(folder)
    refused(folder, masks, "(label 2 or 255)", "--ignore-index", ignore_index=2)
    for path in masks.iterdir():
        Image.fromarray(np.full((20, 30), 255, np.uint8)).save(path)
    refused(folder, masks, "every pixel", "(label 255)")


def test_ignore_index_that_leaves_no_class_is_an_error(folder):
    (folder / "classes.txt").write_text("sky\n")
    refused(folder, folder, "only label with a name, 0, is ignored", ignore_index=0)
    (folder / "classes.txt").unlink()
    (folder / "objectInfo150.txt").write_text("Idx\tRatio\tTrain\tVal\tName\t\t\n")
    refused(folder, folder, "only label with a name, 0, is ignored")


def test_missing_files_are_errors(folder):
    refused(folder, "--ignore-index 256", "from 0 to 255", ignore_index=256)
    refused(None, "--ignore-index", ignore_index=0)
    (folder / "classes.txt").unlink()
    refused(folder, folder / "classes.txt")
    for path in (folder / "images" / "training").iterdir():
        path.unlink()
    (folder / "classes.txt").write_text("sky\n")
    refused(folder, folder / "images" / "training", "holds no images")
    (folder / "images" / "training").rmdir()
    refused(folder, folder / "images" / "training", "there is no folder")


def write_masks(folder, count, labels):
    """Replace the training set by `count` images and masks, which have these labels."""
    for kind in ("images", "annotations"):
        for path in (folder / kind / "training").iterdir():
            path.unlink()
    mask = Image.fromarray(np.array([labels], dtype=np.uint8))
    for number in range(count):
        mask.save(folder / "annotations" / "training" / f"{number}.png")
        mask.convert("RGB").save(folder / "images" / "training" / f"{number}.png")


@pytest.mark.parametrize(
    ("count", "labels", "absent"),
    [
        (4, [0, 255], "4 of 4 training masks has the label 1 (tree), 2 (house); ignored: 255"),
        (4, [0, 1], "4 of 4 training masks has the label 2 (house); ignored: 255"),
        (4, [0, 1, 2], ""),
        (4, [0, 7], ""),  # an error in training
        (101, [0, 255], "51 of 101 training masks has the label 1 (tree), 2 (house)"),
        (101, [0, 1], ""),  # a sample may lack a rare class
    ],
)
def test_classes_that_no_mask_has_are_a_warning(folder, capsys, count, labels, absent):
    write_masks(folder, count, labels)
    build_datasets(folder)
    said = capsys.readouterr().err
    assert (f"warning: no pixel of {absent}" in said) if absent else not said


def test_broken_masks_do_not_count_for_absent_classes(folder, capsys):
    write_masks(folder, 4, [0, 1])
    (folder / "annotations" / "training" / "2.png").write_bytes(b"")
    build_datasets(folder)
    assert "no pixel of 3 of 4 training masks has the label 2 (house)" in capsys.readouterr().err


def test_invalid_masks_are_skipped_and_found_by_verify(
    folder, tmp_path_factory, monkeypatch, capsys
):
    masks = folder / "annotations" / "training"
    Image.fromarray(np.full((20, 30), 7, np.uint8)).save(masks / "0.png")
    Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(masks / "1.png")
    train_set, _ = build_datasets(folder)
    skipping = skip_broken(train_set, 2, tmp_path_factory.mktemp("run"))
    torch.manual_seed(0)
    third = train_set[2]
    for index in range(2):
        torch.manual_seed(0)
        torch.testing.assert_close(skipping[index], third, rtol=0, atol=0)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    capsys.readouterr()
    for flags, expected in (
        ((), ["0.png holds the label 7", "1.png is no mask"]),
        (("--ignore-index", "7"), ["1.png is no mask"]),
    ):
        monkeypatch.setattr(sys, "argv", ["verify", str(folder), *flags])
        with pytest.raises(SystemExit) as end:
            verify.main()
        said = capsys.readouterr()
        found = said.out.splitlines()
        assert end.value.code == 1
        assert len(found) == len(expected)
        for line, words in zip(found, expected, strict=True):
            assert words in line
        assert "classes.txt" not in said.err  # it is no ignored file


# predict.py


class Bright(torch.nn.Module):
    """The class 1 where an image is bright, and 0 elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": torch.stack([torch.zeros_like(images[:, 0]), self.weight * images[:, 0]], 1)}


@pytest.mark.parametrize("digits", [True, False])
@pytest.mark.parametrize("size", [(60, 90), (700, 300)])
@torch.no_grad()
def test_predicted_masks_align_with_the_image(tmp_path, digits, size):
    height, width = size
    bright = np.zeros((height, width, 3), np.uint8)
    bright[height // 3 :, : width // 2] = 255
    images = [tmp_path / "in" / name for name in ("a.png", "more/a.png", "a.bmp")]
    for path in images:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(bright).save(path)
    args = Namespace(images=images, output=tmp_path / "out")
    classes = [*task.Digits.classes] if digits else ["dark", "bright"]
    predict = task.Predictor(Bright(), {"data": "", "classes": classes}, args)
    assert predict.side == (task.Digits.side if digits else task.SIZE)
    for path in images[:2]:
        found = predict(path)
        assert [name for name, _ in found] == classes[:2]
        assert found[1][1] == pytest.approx(1 / 3, abs=0.03)
    for name in ("a.png", "more/a.png"):
        mask = Image.open(tmp_path / "out" / "masks" / name)
        assert (mask.mode, mask.size) == ("P", (width, height))
        assert ((np.array(mask) == 1) != (bright[..., 0] > 0)).mean() < 0.04
        assert mask.getpalette()[3:6] == task.make_palette(len(classes))[1].tolist()
        assert Image.open(tmp_path / "out" / "overlays" / name).size == (width, height)
    with pytest.raises(UserError, match="a.bmp: .* is of another image of that name"):
        predict(images[2])
    with pytest.raises(UserError, match="holds something already"):
        task.Predictor(Bright(), {"data": "", "classes": classes}, args)


@pytest.mark.parametrize(
    ("data", "samples", "side"),
    [("", 90, task.Digits.side), ("", 20, task.SIZE), ("folder", 90, task.SIZE)],
)
def test_only_the_digits_are_predicted_at_their_own_size(tmp_path, data, samples, side):
    # An owner's data set, built without --data, has no folder either.
    metadata = {"data": data, "classes": [*task.Digits.classes], "samples": {"val": samples}}
    args = Namespace(images=[tmp_path / "image.png"], output=tmp_path / "out")
    assert task.Predictor(Bright(), metadata, args).side == side


@pytest.mark.parametrize(
    ("trained", "side"), [("300", 300), ("", task.SIZE), ("0", task.SIZE), ("9" * 5000, task.SIZE)]
)
def test_images_are_predicted_at_the_size_of_the_training(tmp_path, trained, side):
    """Not at that of a later edit of SIZE, but for the size of anyone's checkpoint."""
    metadata = {"data": "folder", "classes": [*task.Digits.classes], "samples": {"val": 9}}
    metadata["fingerprints"] = {"val": {"image size": trained}}
    args = Namespace(images=[tmp_path / "image.png"], output=tmp_path / "out")
    assert task.Predictor(Bright(), metadata, args).side == side


@pytest.mark.parametrize("source", ["hf-hub:someone/model", "local-dir:/tmp"])
def test_encoder_from_elsewhere_is_an_error(source: str) -> None:
    pytest.importorskip("segmentation_models_pytorch")
    with pytest.raises(UserError, match="is not the name of an encoder"):
        task.build_model(f"smp:unet:tu-{source}", 4)
