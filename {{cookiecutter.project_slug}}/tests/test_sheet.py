"""engine.sheet: pictures of samples."""

import numpy as np
import torch
from PIL import Image

from engine import sheet
from engine.images import MEAN, STD


def test_samples_are_there_with_their_words(tmp_path):
    mean, std = torch.tensor([MEAN, STD]).view(2, 3, 1, 1)
    colours = torch.rand(5, 3, 1, 1)
    images = ((colours - mean) / std).expand(-1, -1, 32, 32)
    words = [("a", True), ("b", False), ("\u4e03", True), (100 * "long ", True), ("", True)]
    sheet.write(tmp_path / "new" / "sheet.png", images, words)
    with Image.open(tmp_path / "new" / "sheet.png") as picture:
        pixels = np.array(picture)
    cell = (sheet.SMALLEST + 8, sheet.SMALLEST + sheet.LINE + 8)
    assert pixels.shape == (2 * cell[1], sheet.COLUMNS * cell[0], 3)
    for index, colour in enumerate(colours):
        row, column = divmod(index, sheet.COLUMNS)
        left, top = column * cell[0] + 4, row * cell[1] + 4
        inside = pixels[top : top + sheet.SMALLEST, left : left + sheet.SMALLEST]
        assert np.abs(inside - 255 * colour.flatten().numpy()).max() <= 1
        below = pixels[top + sheet.SMALLEST : top + sheet.SMALLEST + sheet.LINE, left:][:, :128]
        is_red = (below[..., 0] > below[..., 1].astype(int) + 100).any()
        assert is_red == (index == 1)
        assert (below < 255).any() == (index != 4)


def test_large_images_are_not_enlarged(tmp_path):
    sheet.write(tmp_path / "sheet.png", torch.zeros(1, 3, 224, 224), [("a", True)])
    with Image.open(tmp_path / "sheet.png") as picture:
        assert picture.size == (4 * 232, 224 + sheet.LINE + 8)
