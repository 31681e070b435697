"""task: images of any kind are read as PIL reads them."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional

import task
from engine.errors import UserError


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        *(("RGB", "a.jpg"), ("L", "a.jpg"), ("CMYK", "a.jpg")),
        *(("RGB", "a.png"), ("RGBA", "a.png"), ("P", "a.png"), ("1", "a.png")),
    ],
)
def test_an_image_has_the_pixels_that_pil_gives(tmp_path, mode, name):
    noise = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    Image.fromarray(noise).convert(mode).save(tmp_path / name)
    image = task.read_image(str(tmp_path / name))
    assert image.dtype == torch.uint8
    with Image.open(tmp_path / name) as expected:
        assert torch.equal(image, functional.pil_to_tensor(expected.convert("RGB")))


def test_images_are_normalised_on_the_device(device):
    images = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    prepared = task.prepare(images)
    expected = functional.normalize(images.float() / 255, task.MEAN, task.STD)
    torch.testing.assert_close(prepared, expected)
    assert prepared.is_contiguous(memory_format=torch.channels_last)
    assert task.prepare(prepared) is prepared


def test_a_torn_image_is_named_with_the_reason(tmp_path):
    path = tmp_path / "torn.jpg"
    Image.new("RGB", (200, 200)).save(path)
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(UserError, match=r"torn.jpg can't be read as an image \([\w ]+\); mend"):
        task.read_image(str(path))
