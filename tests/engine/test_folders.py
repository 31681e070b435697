"""engine.data.folders: lists of image files, and reports of what is ignored."""

import contextlib
import errno
import os
import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import task
from engine import UserError
from engine.data import files, folders, shards
from engine.data.folders import list_classes, list_flat, list_images
from torchvision.datasets import ImageFolder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two classes with a file in each and in a subfolder; nothing is read from the files."""
    for name in ("cat/1.jpg", "cat/old/2.PNG", "cat/a.webp", "dog/3.jpeg"):
        (tmp_path / "train" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / name).touch()
    return tmp_path / "train"


def add(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def test_samples_are_those_of_torchvision_in_the_same_order(root):
    add(root, "cat/old.jpg", "cat/old/even/older.jpg", "cat-2/1.jpg", "B/x.tif")
    (root / "dog" / "more").symlink_to(root.parent / "elsewhere")
    add(root.parent / "elsewhere", "4.jpg", "deep/5.jpg")
    expected = ImageFolder(root)
    assert list_classes(root) == (expected.samples, expected.classes)


def test_entries_without_images_are_reported_and_are_no_classes(root, capsys):
    (root / "empty").mkdir()
    add(root, ".ipynb_checkpoints/1.jpg", "cat/._1.jpg", "notes/a.txt", "cat/b.heic", "top.jpg")
    samples, classes = list_classes(root)
    assert classes == ["cat", "dog"] and len(samples) == 4
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    for words in (
        f"warning: {root}: ignored ",
        "hidden files and folders: 2 (.ipynb_checkpoints, cat/._1.jpg)",
        "files of other types: 2 (cat/b.heic, notes/a.txt)",
        "class folders without images: 2 (empty, notes)",
        "files outside the class folders: 1 (top.jpg)",
    ):
        assert words in said


def test_validation_reports_absent_classes_and_ignores_the_same_entries(root, capsys):
    val = root.with_name("val")
    add(val, "dog/1.jpg", "dog/._1.jpg", ".ipynb_checkpoints/1.jpg", "notes/a.txt")
    samples, classes = list_classes(val, ["cat", "dog"])
    assert (samples, classes) == ([(str(val / "dog" / "1.jpg"), 1)], ["cat", "dog"])
    assert "classes without images: 1 (cat)" in capsys.readouterr().err
    add(val, "cow/1.jpg")
    with pytest.raises(UserError, match="val has classes that train/ does not have: cow;"):
        list_classes(val, ["cat", "dog"])


def test_class_in_another_unicode_form_is_named(root):
    """macOS writes é as two characters; both names look the same."""
    val = root.with_name("val")
    add(val, "e\u0301lan/1.jpg")
    with pytest.raises(UserError, match="same letters in another Unicode form: rename it"):
        list_classes(val, ["\u00e9lan"])


@pytest.mark.parametrize("read", [list_classes, list_images])
def test_unreadable_folder_is_an_error(root, capsys, monkeypatch, read):
    """Otherwise a run trains and validates on fewer samples, and verify reports no error."""
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith(("dog", "lost+found")):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    def exists(path):
        if "lost+found" in path.parts:
            raise PermissionError(13, "Permission denied", path)
        return path.exists()

    monkeypatch.setattr(os, "scandir", refuse)
    monkeypatch.setattr(shards, "exists", exists)
    with pytest.raises(UserError, match=r"dog can't be read \(Permission denied\)") as error:
        read(root)
    assert error.value.status == 2
    (root / "dog").rename(root / "lost+found")
    assert read(root)
    assert "folders of the file system: 1 (lost+found)" in capsys.readouterr().err


@pytest.fixture
def outage(monkeypatch) -> list[OSError]:
    """Errors of the next attempts to list the class "dog"."""
    errors: list[OSError] = []
    scandir = os.scandir

    def fail(path):
        if errors and str(path).endswith("dog"):
            raise errors.pop()
        return scandir(path)

    monkeypatch.setattr(files, "PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(os, "scandir", fail)
    return errors


@pytest.mark.parametrize("number", [errno.EIO, errno.EHOSTDOWN, errno.ENOTCONN, errno.EMFILE])
def test_folder_whose_disk_does_not_answer_is_read_again(root, outage, number):
    """Without it, a run would train and validate on fewer samples."""
    expected = list_classes(root)
    outage += [OSError(number, os.strerror(number))] * 2
    assert list_classes(root) == expected
    assert not outage


@pytest.mark.parametrize("read", [list_classes, list_images])
@pytest.mark.parametrize("number", [errno.EIO, errno.EHOSTDOWN])
def test_folder_whose_disk_never_answers_is_an_error(root, outage, read, number):
    outage += [OSError(number, os.strerror(number))] * 3
    message = re.escape(f"dog can't be read ({os.strerror(number)})")
    with pytest.raises(UserError, match=message) as error:
        read(root)
    assert error.value.status == 1  # the job may be restarted


def test_link_whose_disk_does_not_answer_is_no_file(root, monkeypatch):
    is_dir = mock.Mock(side_effect=OSError(errno.ESTALE, "Stale"))
    entries = [SimpleNamespace(name="zebra", path="zebra", is_dir=is_dir)]
    monkeypatch.setattr(files, "PAUSES_S", ())
    monkeypatch.setattr(os, "scandir", lambda _: contextlib.nullcontext(entries))
    with pytest.raises(UserError, match=r"can't be read \(Stale\)"):
        list_classes(root)


def test_links_that_loop_or_repeat_files_are_not_followed(root, capsys):
    expected = list_classes(root)
    (root / "cat" / "loop").symlink_to(root / "cat")
    (root / "cat" / "old" / "up").symlink_to("..")
    (root / "cat" / "all").symlink_to(root)
    (root / "cat" / "other").symlink_to(root / "dog")
    (root / "dog" / "top").symlink_to("/")
    (root / "dog" / "self").symlink_to("self")
    (root / "up").symlink_to("..")
    (root / "here").symlink_to(".")
    add(root.parent / "val" / "dog", "9.jpg")
    assert list_classes(root) == expected
    said = capsys.readouterr().err
    assert "links to folders that are read already: 5 (cat/all, cat/loop, cat/other and 2" in said
    assert "class folders without images: 2 (here, up)" in said


@pytest.mark.parametrize("target", ["train/cat", "elsewhere"])
def test_two_classes_that_are_one_folder_are_an_error(root, target):
    """Its images would have two labels. A link to a folder elsewhere is a class like others."""
    names = list_classes(root)[1]
    add(root.parent / "elsewhere", "4.jpg")
    (root / "lynx").symlink_to(root.parent / "elsewhere")
    assert list_classes(root)[1] == sorted([*names, "lynx"])
    (root / "puma").symlink_to(root / ".." / target)
    first = Path(target).name.replace("elsewhere", "lynx")
    with pytest.raises(UserError, match=f"^{root}: {first} and puma are the same folder, so"):
        list_classes(root)


def test_long_scan_reports_its_progress(root, capsys, monkeypatch):
    monkeypatch.setattr(folders, "REPORT_EVERY_S", -1.0)
    list_classes(root)
    assert f"{root}: 2 images so far, reading {root}/cat/old\n" in capsys.readouterr().err


def test_names_are_escaped_in_reports(root, capsys):
    (root / "a\x1b[2J\nb").mkdir()
    list_classes(root)
    assert r"without images: 1 (a\x1b[2J\nb)" in capsys.readouterr().err


def test_only_rank_0_reports(root, capsys, monkeypatch):
    (root / "empty").mkdir()
    monkeypatch.setenv("RANK", "1")
    list_classes(root)
    assert capsys.readouterr().err == ""


def test_images_below_a_folder(root):
    add(root, "cat/._1.jpg")
    names = [os.path.relpath(path, root) for path in list_images(root)]
    assert names == ["cat/1.jpg", "cat/a.webp", "cat/old/2.PNG", "dog/3.jpeg"]


def test_segmentation_ignores_hidden_files_and_subfolders(tmp_path, capsys):
    add(tmp_path, "1.JPG", "._1.png", ".ipynb_checkpoints/1.png", "more/2.png", "Thumbs.db")
    assert list_flat(tmp_path, [".jpg"]) == [tmp_path / "1.JPG"]
    said = capsys.readouterr().err
    assert "hidden files and folders: 2" in said and "subfolders: 1 (more)" in said


@pytest.mark.parametrize("names", [[], ["cat/a.txt"], ["1.jpg"]])
def test_folder_without_images_is_an_error(tmp_path, names):
    add(tmp_path, *names)
    with pytest.raises(UserError, match="holds no images"):
        task.Images(tmp_path, task.center_crop)
