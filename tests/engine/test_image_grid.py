"""engine.monitoring.image_grid and fonts: images with captions, headings and a legend."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine.data.images import MEAN, STD
from engine.monitoring import fonts, image_grid
from engine.monitoring.fonts import LINE_HEIGHT, choose_font
from engine.monitoring.image_grid import (
    COLUMNS,
    MIN_WIDTH,
    save_image_grid,
    save_panels,
)
from matplotlib import font_manager
from PIL import Image


def test_grid_has_each_image_with_its_caption(tmp_path):
    mean, std = torch.tensor([MEAN, STD]).view(2, 3, 1, 1)
    colours = torch.rand(5, 3, 1, 1)
    images = ((colours - mean) / std).expand(-1, -1, 32, 32)
    captions = [("a", True), ("b", False), ("\u4e03", True), (100 * "long ", True), ("", True)]
    save_image_grid(tmp_path / "new" / "grid.png", images, captions)
    with Image.open(tmp_path / "new" / "grid.png") as picture:
        pixels = np.array(picture)
    cell = (MIN_WIDTH + 8, MIN_WIDTH + LINE_HEIGHT + 8)
    assert pixels.shape == (2 * cell[1], COLUMNS * cell[0], 3)
    for index, colour in enumerate(colours):
        row, column = divmod(index, COLUMNS)
        left, top = column * cell[0] + 4, row * cell[1] + 4
        inside = pixels[top : top + MIN_WIDTH, left : left + MIN_WIDTH]
        assert np.abs(inside - 255 * colour.flatten().numpy()).max() <= 1
        below = pixels[top + MIN_WIDTH : top + MIN_WIDTH + LINE_HEIGHT, left:][:, :128]
        is_red = (below[..., 0] > below[..., 1].astype(int) + 100).any()
        assert is_red == (index == 1)
        assert (below < 255).any() == (index != 4)


@pytest.mark.parametrize(("channels", "shown"), [(1, [0, 0, 0]), (2, [0, 0, 0]), (5, [0, 1, 2])])
def test_images_of_other_channels_are_shown(channels, shown):
    images = torch.randn(2, channels, 4, 4)
    expected = image_grid.to_pixels(images[:, shown])
    assert torch.equal(image_grid.to_pixels(images), expected)


def test_large_image_is_not_enlarged(tmp_path):
    save_image_grid(tmp_path / "grid.png", torch.zeros(1, 3, 224, 224), [("a", True)])
    with Image.open(tmp_path / "grid.png") as picture:
        assert picture.size == (232, 224 + LINE_HEIGHT + 8)


def test_caption_of_many_lines_and_characters_is_cut(tmp_path):
    name = "\n" * 10**6 + "".join(map(chr, range(0x20000, 0x2A000)))
    save_image_grid(tmp_path / "grid.png", torch.zeros(1, 3, 128, 128), [(name, True)])
    with Image.open(tmp_path / "grid.png") as picture:
        assert picture.size == (136, 128 + 8 * LINE_HEIGHT + 8)
    shown, _ = choose_font(name.strip()[:3])
    assert shown == r"\U00020000\U00020001\U00020002"


def test_second_line_of_a_caption_is_black_and_all_captions_have_its_height(tmp_path):
    captions = [("wrong\nis right", False), ("right", True)]
    save_image_grid(tmp_path / "grid.png", torch.zeros(2, 3, 128, 128), captions)
    with Image.open(tmp_path / "grid.png") as picture:
        assert picture.size == (2 * 136, 128 + 2 * LINE_HEIGHT + 8)
        pixels = np.array(picture).astype(int)
    first = pixels[132 : 132 + LINE_HEIGHT, 4:132]
    second = pixels[132 + LINE_HEIGHT : 132 + 2 * LINE_HEIGHT, 4:132]
    is_red = [(line[..., 0] > line[..., 1] + 100).any() for line in (first, second)]
    assert is_red == [True, False] and (second < 100).any()


def test_panels_have_headings_and_a_legend(tmp_path):
    rows = [[torch.full((3, 32, 48), value, dtype=torch.uint8) for value in (0, 90)]]
    legend = [(f"class {number}", (200, 30 * number, 0)) for number in range(4)]
    save_panels(tmp_path / "new" / "panels.png", rows, ["image", "truth"], legend)
    with Image.open(tmp_path / "new" / "panels.png") as picture:
        pixels = np.array(picture)
    width, height = 4 * 48 + 4, 4 * 32 + 4
    assert pixels.shape == (height + 3 * LINE_HEIGHT + 8, 2 * width + 4, 3)  # two per row
    for column in range(2):
        assert (pixels[:LINE_HEIGHT, column * width : (column + 1) * width] < 100).any()
        assert (pixels[LINE_HEIGHT + 9, column * width + 9] == 90 * column).all()
    for _, colour in legend:
        assert (pixels[height + LINE_HEIGHT :] == colour).all(axis=-1).any()


def test_text_that_is_too_long_ends_with_an_ellipsis():
    picture = Image.new("RGB", (300, LINE_HEIGHT), "white")
    fonts.draw_text(picture, (0, 0), 100 * "W", 120)
    columns = (np.array(picture).min(axis=(0, 2)) < 200).nonzero()[0]
    assert 90 < columns.max() < 120


@pytest.mark.parametrize("name", ["Straße", "кошка", "γάτα", "قطة", "naïve: 0.93 …"])
def test_scripts_of_the_bundled_font(name):
    text, font = choose_font(name)
    assert text == name and "DejaVuSans" in font.path


def test_other_scripts_use_an_installed_font_or_escapes(monkeypatch):
    plain = str(Path(choose_font("a")[1].path))
    has = {plain: frozenset("ab"), "bold": frozenset("ab七"), "broken": frozenset("八")}
    listed = [SimpleNamespace(fname=name, name=name, style="normal", weight=400) for name in has]
    truetype = fonts.ImageFont.truetype

    def load(path, size):
        if path == "broken":
            raise OSError("invalid pixel size")
        return truetype(plain, size) if path == plain else path

    monkeypatch.setattr(fonts, "_characters", has.get)
    monkeypatch.setattr(fonts.ImageFont, "truetype", load)
    monkeypatch.setattr(font_manager.fontManager, "ttflist", listed)
    fonts._find_font.cache_clear()
    assert choose_font("a七") == ("a七", "bold")
    assert choose_font("a八")[0] == r"a\u516b"
    fonts._find_font.cache_clear()


def test_boxes_of_the_last_resort_font_are_not_used():
    assert not fonts._find_font(frozenset("\U0001f0ff"))  # no character


def test_pictures_need_no_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert choose_font("ä七")[0] == r"ä\u4e03"
    save_image_grid(tmp_path / "grid.png", torch.zeros(1, 3, 32, 32), [("七", True)])


def test_pictures_are_not_written_through_a_link(tmp_path):
    elsewhere = tmp_path / "pictures"
    elsewhere.mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "validation").symlink_to(elsewhere)
    with pytest.raises(OSError, match="validation is a link"):
        image_grid.image_path(tmp_path / "run", 1)


@pytest.mark.parametrize("suffix", [".png", ".csv"])
def test_files_of_the_validation_are_not_written_through_a_link(tmp_path, suffix):
    (tmp_path / "validation").mkdir()
    assert image_grid.image_path(tmp_path, 1).name == "epoch_001.png"
    (tmp_path / "validation" / f"epoch_001{suffix}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=rf"epoch_001\{suffix} is a link"):
        image_grid.image_path(tmp_path, 1)
    os.mkfifo(tmp_path / "validation" / f"epoch_002{suffix}")
    with pytest.raises(OSError, match=rf"epoch_002\{suffix} is a FIFO"):
        image_grid.image_path(tmp_path, 2)


def test_links_that_appear_later_are_replaced(tmp_path):
    """Whoever else can write to the folder may make one at any time."""
    (tmp_path / "elsewhere").write_text("a text")
    paths = [tmp_path / "grid.png", tmp_path / "panels.png"]
    for path in paths:
        path.symlink_to(tmp_path / "elsewhere")
    image = torch.zeros(3, 32, 32, dtype=torch.uint8)
    save_image_grid(paths[0], image[None].float(), [("a", True)])
    save_panels(paths[1], [[image, image, image]], ["a", "b", "c"], [("d", [0, 0, 0])])
    assert (tmp_path / "elsewhere").read_text() == "a text"
    assert [Image.open(path).format for path in paths] == ["PNG", "PNG"]
