"""Mixup, CutMix, random erasing and automatic augmentation of training samples."""

import random
from itertools import product

import pytest
import task
import torch
from engine import UserError
from engine.data import SeededDataset, augmentation, images
from engine.data.augmentation import DRAWN, AutoAugmentedDataset, MixedDataset, mix
from torch.nn import functional as F

SIZE = 20


class Constant(torch.utils.data.Dataset):
    """Image `index` has this value everywhere, and this label."""

    classes = ("a", "b")

    def __len__(self):
        return 50

    def __getitem__(self, index):
        return torch.full((3, SIZE, SIZE), float(index + 1)), index


def batch_of(dataset, indices=range(8)):
    samples = SeededDataset(dataset, seed=0).__getitems__(list(indices))
    return torch.utils.data.default_collate(samples)


def mixed_batch(mixup=0.0, cutmix=0.0, random_erasing=0.0, seed=0):
    """Return images and targets of a mixed batch, whose image i has the value i + 1."""
    data = SeededDataset(MixedDataset(Constant(), mixup, cutmix, random_erasing), seed)
    pixels, labels, *extra = torch.utils.data.default_collate(data.__getitems__(list(range(8))))
    return mix(pixels, labels, extra)


WEIGHT = torch.tensor(1.0)


@pytest.mark.parametrize(
    "further",
    [
        [3],
        [0.5],
        [True],
        [torch.ones(1)],
        [torch.ones(2)],
        [WEIGHT, WEIGHT],
        [WEIGHT, torch.ones(8)],
        [torch.ones(9)],
        ["a.jpg"],
        [WEIGHT, "a.jpg"],
    ],
)
@pytest.mark.parametrize("mixed", [False, True])
def test_further_elements_of_own_data_are_not_taken_for_a_weight(further, mixed):
    data = [(*Constant()[index], *further) for index in range(8)]
    images, labels, *extra = batch_of(MixedDataset(data, 1.0, 0.0, 0.0) if mixed else data)
    with pytest.raises(
        UserError, match=r"perhaps with the weight of its loss, a float32 scalar such as"
    ):
        mix(images, labels, extra)


def test_mixup_blends_with_the_image_before_by_the_weights_of_the_labels():
    mixed, ((labels, own), (others, rest)) = mixed_batch(mixup=0.8)
    assert labels.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert others.tolist() == [7, 0, 1, 2, 3, 4, 5, 6]
    torch.testing.assert_close(own + rest, torch.ones(8))
    expected = own * (labels + 1) + rest * (others + 1)
    torch.testing.assert_close(mixed, expected[:, None, None, None].expand_as(mixed))
    assert len(own.unique()) == 8 and own.min() > 0  # each sample has its own


def test_cutmix_pastes_a_box_whose_area_is_the_weight_of_its_label():
    mixed, ((labels, own), (others, rest)) = mixed_batch(cutmix=1.0)
    for image, label, other, weight in zip(mixed, labels + 1, others + 1, own, strict=True):
        is_other = image == other
        assert (is_other | (image == label)).all()
        assert weight.item() == pytest.approx(1 - is_other[0].float().mean().item())
        rows, columns = is_other[0].any(1), is_other[0].any(0)
        assert torch.equal(is_other[0], rows[:, None] & columns)  # a rectangle
        assert rows.int().diff().abs().sum() <= 2
    assert (rest > 0).sum() >= 4


def test_erased_boxes_are_zero_and_have_the_area_of_the_paper():
    erased, labels = mixed_batch(random_erasing=0.999)
    assert labels.tolist() == [*range(8)]  # not a list, for which criterion computes another loss
    is_erased = (erased == 0)[:, 0]
    areas = is_erased.float().mean(dim=(1, 2))
    assert (areas > 0).all() and (areas < 0.45).all()
    for one in is_erased:
        assert torch.equal(one, one.any(1)[:, None] & one.any(0))
    assert (mixed_batch(random_erasing=1e-9)[0] != 0).all()


def test_distributions_are_those_of_the_papers():
    random.seed(0)
    data = MixedDataset(Constant(), 0.4, 0, 0.25)
    drawn = torch.stack([data[0][3] for _ in range(4000)])
    own = drawn[:, 0]
    assert own.mean().item() == pytest.approx(0.5, abs=0.02)
    assert own.var().item() == pytest.approx(1 / (4 * (2 * 0.4 + 1)), abs=0.01)  # Beta(0.4, 0.4)
    has_erased = drawn[:, 5:].any(dim=1)
    assert has_erased.float().mean().item() == pytest.approx(0.25, abs=0.03)
    top, bottom, left, right = drawn[has_erased, 5:].unbind(1)
    areas, ratios = (bottom - top) * (right - left), (bottom - top) / (right - left)
    assert areas.min() >= 0.0199 and areas.max() <= 0.3301
    assert ratios.min() >= 0.299 and ratios.max() <= 3.301
    assert drawn.min() >= 0 and drawn.max() <= 1
    both = MixedDataset(Constant(), 0.4, 1.0, 0)
    drawn = torch.stack([both[0][3] for _ in range(1000)])
    is_mixup = drawn[:, 0] < 1
    assert is_mixup.float().mean().item() == pytest.approx(0.5, abs=0.06)
    assert not drawn[is_mixup, 1:].any()
    assert (drawn[~is_mixup, 2] > drawn[~is_mixup, 1]).all()


def test_numbers_depend_on_seed_and_sample_alone():
    first, _ = mixed_batch(0.8, 1.0, 0.5)
    random.random(), torch.rand(1)
    again, _ = mixed_batch(0.8, 1.0, 0.5)
    other, _ = mixed_batch(0.8, 1.0, 0.5, seed=1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_equals_that_of_probabilities(smoothing):
    _, targets = mixed_batch(mixup=0.8, cutmix=1.0)
    output = torch.randn(8, 10, requires_grad=True)
    probabilities = sum(
        weights[:, None] * F.one_hot(labels, 10).float() for labels, weights in targets
    )
    expected = F.cross_entropy(output, probabilities, label_smoothing=smoothing)
    torch.testing.assert_close(task.criterion(output, targets, smoothing), expected)


def test_class_weights_go_with_their_images():
    weights = torch.arange(1.0, 5.0)
    drawn = torch.tensor([[0.75, *[0.0] * 8]], dtype=DRAWN).repeat(4, 1)
    _, ((_, own), (_, rest)) = mix(torch.ones(4, 3, 2, 2), torch.arange(4), [weights, drawn])
    torch.testing.assert_close(own, 0.75 * weights)
    torch.testing.assert_close(rest, 0.25 * torch.tensor([4.0, 1.0, 2.0, 3.0]))


def test_batches_without_further_elements_are_unchanged():
    pixels, labels = torch.ones(4, 3, 2, 2), torch.arange(4)
    assert mix(pixels, labels, []) == (pixels, labels)
    weights = torch.ones(4)
    assert mix(pixels, labels, [weights]) == (pixels, [(labels, weights)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_memory_format_and_type_are_kept(device, dtype):
    drawn = torch.stack([MixedDataset(Constant(), 0.5, 0.5, 0.9)[0][3] for _ in range(6)])
    pixels = torch.randn(6, 3, 9, 7).to(device, dtype, memory_format=torch.channels_last)
    labels, extra = torch.arange(6, device=device), [torch.ones(6), drawn]
    mixed, _ = mix(pixels, labels, [tensor.to(device) for tensor in extra])
    assert mixed.is_contiguous(memory_format=torch.channels_last)
    assert mixed.shape == pixels.shape


class Files(torch.utils.data.Dataset):
    """One image file, as a folder of images returns it."""

    def __init__(self, path):
        self.path = path

    def __len__(self):
        return 4

    def __getitem__(self, index):
        crop = images.Crop(images.Span(0, 40, 32), images.Span(0, 60, 32), 32)
        return images.read_encoded(str(self.path), lambda *_: crop), index


@pytest.mark.parametrize("policy", augmentation.POLICIES)
def test_auto_augment_changes_crops_of_files_by_the_seed(tmp_path, policy):
    from PIL import Image

    pixels = (torch.rand(40, 60, 3) * 255).byte().numpy()
    Image.fromarray(pixels).save(tmp_path / "image.png")
    data = AutoAugmentedDataset(Files(tmp_path / "image.png"), policy)
    encoded, _ = data.dataset[0]
    plain = images.crop_and_resize(images.decode(encoded), encoded.crop).expand(4, -1, -1, -1)
    batches = {}
    for seed, attempt in product((0, 1), range(2)):
        samples = SeededDataset(data, seed).__getitems__([0, 1, 2, 3])
        batches[seed, attempt] = torch.stack([pixels for pixels, _ in samples])
    assert batches[0, 0].dtype == torch.uint8 and batches[0, 0].shape == (4, 3, 32, 32)
    assert torch.equal(batches[0, 0], batches[0, 1])
    assert not torch.equal(batches[0, 0], batches[1, 0])
    assert not torch.equal(batches[0, 0], plain)


def test_auto_augment_of_float_images_is_an_error():
    """Its colours are those of 0 to 1: others would be clamped."""
    data = AutoAugmentedDataset([(torch.randn(3, 8, 8), 0)], "randaugment")
    with pytest.raises(UserError, match=r"--auto-augment needs uint8 images, not torch\.float32"):
        data[0]


def test_attributes_of_the_data_set_are_kept():
    data = AutoAugmentedDataset(MixedDataset(Constant(), 1, 0, 0), "trivialaugment")
    assert data.classes == ("a", "b") and len(data) == 50
    assert len(batch_of(MixedDataset(Constant(), 1, 0, 0))) == 4
