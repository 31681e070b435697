"""Files that are damaged, hostile or gone: errors with their names, --skip-broken, verify."""

import contextlib
import errno
import fcntl
import io
import multiprocessing
import os
import random
import shutil
import struct
import subprocess
import sys
import time
import zlib
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import task
import template_task_contrastive as task_contrastive
import template_task_segmentation as task_segmentation
import torch
from engine import OutageError, UserError, open_regular
from engine.data import SeededDataset, files, images, masks, packing, verify
from engine.data import skipping as skipping_module
from engine.data.files import FileError, read_file
from engine.data.loading import build_loader
from engine.data.skipping import RECORD, SkippingDataset, only_readable, skip_broken
from fresh import TEMPLATE
from PIL import Image
from torchvision import tv_tensors

CPU = torch.device("cpu")


def write_bomb(path: Path, width: int = 50_000, height: int = 50_000) -> None:
    """Write a PNG of a few bytes, and gigabytes of pixels."""
    Image.new("L", (1, 1)).save(path, "PNG")
    data = bytearray(path.read_bytes())
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    path.write_bytes(data)


HOSTILE = {
    "device": (lambda path: path.symlink_to("/dev/zero"), "it is not a regular file"),
    "fifo": (os.mkfifo, "it is not a regular file"),
    "folder": (Path.mkdir, "it is not a regular file"),
    "gone": (lambda path: path.symlink_to("nothing"), "No such file or directory"),
    "loop": (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
    "text": (lambda path: path.write_text("no image"), "cannot identify image file"),
    "postscript": (lambda path: path.write_text("%!PS-Adobe-3.0 EPSF"), "cannot identify"),
    "huge": (lambda path: (path.touch(), os.truncate(path, 2**40)), "more than 1073741824"),
    "bomb": (write_bomb, "could be decompression bomb DOS attack."),
    "large": (partial(write_bomb, height=1790), "it has 89500000 pixels, more than 89478485"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_file_is_an_error_with_its_name(tmp_path, kind):
    make, reason = HOSTILE[kind]
    path = tmp_path / "a\nb.jpg"
    make(path)
    readers = images.read_image, partial(task_segmentation.read_labels), task.read_center_crop
    for read in (*readers, task_contrastive.read_center_crop):
        with pytest.raises(FileError) as caught:
            read(path)
        message = str(caught.value)
        assert message.startswith(rf"{tmp_path}/a\nb.jpg can't be read as a")
        assert reason in message and "_io" not in message
    assert task_segmentation.odd_sizes((path, path)) == ""


@pytest.mark.parametrize("suffix", [".ppm", ".jpg"])
def test_file_of_thousands_of_comments_is_an_error(tmp_path, suffix):
    path = tmp_path / f"many{suffix}"
    if suffix == ".ppm":
        path.write_bytes(b"P3 1 1 255\n" + b"#\n" * (images.MAX_PARTS + 1) + b"1 2 3\n")
    else:
        Image.new("RGB", (8, 8)).save(path)
        exif = b"\xff\xe1" + b"\0\x08Exif\0\0"
        path.write_bytes(b"\xff\xd8" + exif * (images.MAX_PARTS + 1) + path.read_bytes()[2:])
    with pytest.raises(FileError, match="has more than 10000 comments or Exif segments"):
        images.read_image(path)


def test_progressive_file_with_hundreds_of_scans_is_an_error(tmp_path):
    """Each scan decodes all pixels again: a small file can take minutes."""
    path = tmp_path / "a.jpg"
    Image.new("RGB", (64, 64), "red").save(path, progressive=True)
    data, marker = path.read_bytes(), b"\xff\xda"
    start = data.index(marker)
    scan = data[start : data.index(b"\xff\xc4", start)]  # up to the tables of the next one
    path.write_bytes(data[:start] + images.MAX_SCANS * scan + data[start:])
    with pytest.raises(FileError, match="it has more than 200 scans"):
        images.read_image(path)
    path.write_bytes(data[:-2] + images.MAX_SCANS * (b"\xff\x01" + scan) + data[-2:])
    with pytest.raises(FileError, match="it has more than 200 scans"):  # a marker without length
        images.read_image(path)
    path.write_bytes(data[:-2] + b"\xff\x02\xff\xff" + images.MAX_SCANS * scan + data[-2:])
    with pytest.raises(FileError, match="it has more than 200 scans"):  # no marker to libjpeg
        images.read_image(path)
    comment = b"\xff\xfe\x08\x00" + marker * 1023  # 2,048 bytes, with the length's two
    path.write_bytes(data[:2] + comment + data[2:] + marker * 1000)  # such as a video
    images.read_image(path)


@pytest.mark.parametrize(
    ("side", "count"),
    [
        (16, images.MAX_TILES + 1),  # PIL takes 15 microseconds for each
        (8000, 40),  # each strip is half of the image, and is decoded
    ],
)
def test_thousands_of_strips_or_pixels_in_them_are_an_error(tmp_path, side, count):
    path = tmp_path / "a.tif"
    fields = {256: side, 257: side, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: side // 2, 279: 1}
    entries = b"".join(
        struct.pack("<HHII", tag, *((1, count) if tag == 273 else (4, 1)), value)
        for tag, value in sorted(fields.items())
    )
    start = 8 + count
    directory = struct.pack("<H", len(fields)) + entries + bytes(4)
    path.write_bytes(b"II*\0" + struct.pack("<I", start) + bytes(count) + directory)
    with pytest.raises(FileError, match=f"it has {count} strips or tiles of "):
        images.read_image(path)


def test_file_that_is_far_larger_than_its_pixels_is_an_error(tmp_path):
    """A batch holds the files of its images: a sparse one of 1 GiB takes no space on the disk."""
    path = tmp_path / "a.png"
    Image.new("RGB", (8, 8)).save(path)
    os.truncate(path, 2**26)
    images.read_image(path)
    os.truncate(path, 2**26 + 2**11)
    with pytest.raises(FileError, match=r"a.png can't .*it has 67110912 bytes, far more than"):
        images.read_image(path)


def test_exif_data_of_jpeg_files_are_not_read(tmp_path):
    """PIL before 13 takes gigabytes for values that all refer to the same bytes."""
    path = tmp_path / "a.jpg"
    Image.new("RGB", (8, 8)).save(path, exif=b"Exif\0\0II*\0" + bytes(16))
    with mock.patch.object(Image, "open", wraps=Image.open) as opened:
        images.read_image(path)
    assert opened.call_count == 2  # for the header, and for the pixels
    assert all(b"\xff\xe1" not in call.args[0].getvalue() for call in opened.call_args_list)


@pytest.mark.parametrize(
    ("size", "width", "height", "message"),
    [
        ((16, 16), 30_000, 30_000, "it has 900000000 pixels, more than"),
        ((16, 16), 5_000_000, 16, "it has tiles of 5000000 × 16 pixels"),
        ((20_000, 1), 16, 20_000, "it has 400000000 pixels, more than"),  # of 1,250 tiles
    ],
)
def test_tiles_that_are_larger_than_their_image_are_an_error(
    tmp_path, size, width, height, message
):
    path = tmp_path / "a.tif"
    fields = {256: size[0], 257: size[1], 258: 8, 259: 8, 262: 1, 277: 1, 322: width, 323: height}
    fields |= {324: 8 + 2 + 12 * 10 + 4, 325: 1}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, fields[tag]) for tag in sorted(fields))
    path.write_bytes(b"II*\0" + struct.pack("<IH", 8, len(fields)) + entries + bytes(5))
    with pytest.raises(FileError, match=message):
        images.read_image(path)


def test_large_bmp_file_with_masks_of_its_channels_is_read(tmp_path):
    """Its field for the compression is not 0."""
    size = 4 * 2100 * 2100
    head = struct.pack("<2sIHHI", b"BM", 66 + size, 0, 0, 66)
    head += struct.pack("<IiiHHIIiiII", 40, 2100, 2100, 1, 32, 3, size, 0, 0, 0, 0)
    head += struct.pack("<III", 0xFF0000, 0xFF00, 0xFF)
    (tmp_path / "a.bmp").write_bytes(head + bytes(size))
    assert images.read_image(tmp_path / "a.bmp").shape == (3, 2100, 2100)


def test_compressed_bmp_file_of_many_pixels_is_an_error(tmp_path):
    path = tmp_path / "a.bmp"
    Image.new("L", (4096, 4096)).save(path)
    data = bytearray(path.read_bytes())
    data[30] = 1  # RLE8
    path.write_bytes(data[:1100])
    with pytest.raises(FileError, match="it is a compressed BMP file of more than 4194304 pixels"):
        images.read_image(path)


def test_verify_finds_masks_of_another_size(tmp_path):
    for kind, size in (("images", (8, 8)), ("annotations", (8, 6))):
        (tmp_path / kind / "training").mkdir(parents=True)
        Image.new("L", size).save(tmp_path / kind / "training" / "1.png")
    (tmp_path / "classes.txt").write_text("0 road\n")
    (message,) = verify.find_broken(verify.list_reads(tmp_path, None), 1)
    assert "1.png has 8 × 8 pixels and its mask 8 × 6; make them alike" in message


def test_list_of_classes_without_masks_is_ignored_by_verify(tmp_path):
    """As training ignores it."""
    (tmp_path / "train" / "cat").mkdir(parents=True)
    Image.new("L", (8, 8)).save(tmp_path / "train" / "cat" / "1.png")
    (tmp_path / "classes.txt").write_text("\n" * 1000)
    reads = verify.list_reads(tmp_path, None)
    assert len(reads) == 1 and not list(verify.find_broken(reads, 1))


@pytest.mark.parametrize("kind", ["images", "annotations"])
def test_two_files_of_one_name_are_an_error(tmp_path, kind):
    for name in ("images", "annotations"):
        (tmp_path / name / "training").mkdir(parents=True)
        (tmp_path / name / "training" / "a.png").touch()
    (tmp_path / kind / "training" / "a.PNG").touch()
    with pytest.raises(UserError, match=f"{kind}/training has a.PNG beside a.png; keep one of"):
        masks.list_masks(tmp_path, "training")


def test_more_classes_than_a_mask_can_show_are_an_error():
    with pytest.raises(UserError, match="a mask has 8 bits: it can't show 256 classes"):
        task_segmentation.make_palette(256)
    with pytest.raises(UserError, match="it can't show 256 classes"):  # before the training
        task_segmentation.Metrics(256, torch.device("cpu"), None)
    assert len(task_segmentation.make_palette(255)) == 256
    numbers = torch.tensor([1, 0, 255])
    assert masks.renumber(numbers, ["a", "b"], ["x", "b", "a"]).tolist() == [1, 2, 255]
    with pytest.raises(UserError, match="the checkpoint has 256 classes; masks have up to 255"):
        masks.renumber(numbers, ["a", "b"], ["a", "b", *map(str, range(254))])


@pytest.mark.parametrize("kind", ["JPEG", "PPM"])
def test_mask_of_another_format_is_an_error(tmp_path, kind):
    """JPEG changes the values, and PIL scales those of PGM."""
    Image.new("L", (8, 8)).save(tmp_path / "a.png", format=kind)
    with pytest.raises(FileError, match="a.png can't be read as a mask"):
        images.read_labels(tmp_path / "a.png")


def test_name_of_a_class_may_have_characters_that_end_a_line_elsewhere(tmp_path):
    names = ["a\u2028b", "c\x0cd", "e\x85f"]
    (tmp_path / "classes.txt").write_bytes("\r\n".join(names).encode())
    assert masks.read_classes(tmp_path, None)[0] == names


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp", "gif", "bmp", "ppm"])
def test_altered_bytes_raise_no_other_error(tmp_path, suffix):
    chance = random.Random(0)
    path = tmp_path / f"image.{suffix}"
    Image.effect_noise((40, 30), 50).convert("RGB").save(path)
    intact = path.read_bytes()
    for _ in range(60):
        data = bytearray(intact)
        for _ in range(chance.choice((1, 3, 20))):
            data[chance.randrange(chance.choice((30, len(data))))] = chance.choice((0, 127, 255))
        path.write_bytes(data[: chance.choice((len(data), chance.randrange(len(data))))])
        with contextlib.suppress(FileError):
            images.read_image(path)


def test_file_is_read_up_to_its_size(tmp_path):
    (tmp_path / "a").write_bytes(b"data")
    assert read_file(tmp_path / "a") == b"data"
    assert read_file("/proc/self/pagemap") == b""  # it has no end


@pytest.mark.parametrize("size", [(60_000, 1), (1, 60_000)])
def test_long_image_takes_little_memory(tmp_path, size):
    path = tmp_path / "long.png"
    Image.new("RGB", size, "red").save(path)
    for read in (task.read_center_crop, task_contrastive.read_center_crop):
        crop = read(path)
        assert crop.shape == (3, 224, 224) and (crop[0] == 255).all()
    image = tv_tensors.Image(images.read_image(path))
    mask = tv_tensors.Mask(torch.zeros(size[::-1], dtype=torch.uint8))
    image, mask = task_segmentation.augment(image, mask)
    assert image.shape == (3, 512, 512) and mask.shape == (512, 512)


# --skip-broken


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eight images of one class, each of another grey; 2, 3 and 6 are damaged."""
    folder = tmp_path / "data" / "cat"
    folder.mkdir(parents=True)
    for number in range(8):
        Image.new("RGB", (30, 20), (10 * number,) * 3).save(folder / f"{number}.png")
    for number in (2, 6):
        path = folder / f"{number}.png"
        path.write_bytes(path.read_bytes()[:-20])
    (folder / "3.png").write_bytes(b"")
    return folder


def skipping(folder: Path, limit: int) -> SkippingDataset:
    return skip_broken(task.Images(folder.parent, task.center_crop), limit, folder.parent / "run")


def greys(dataset: SeededDataset, workers: int, batch_size: int = 4) -> list[list[int]]:
    loader = build_loader(
        dataset, sampler=range(8), batch_size=batch_size, workers=workers, device=CPU
    )
    return [(batch[0].flatten(1)[:, 0] // 10).tolist() for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_samples_are_replaced_by_the_next_and_listed(folder, capfd, workers):
    dataset = skipping(folder, 3)
    for _ in range(2):
        assert greys(SeededDataset(dataset, 0), workers) == [[0, 1, 4, 4], [4, 5, 7, 7]]
    listed = (folder.parent / "run" / RECORD).read_text().splitlines()
    assert sorted(listed) == [str(folder / f"{number}.png") for number in (2, 3, 6)]
    warnings = capfd.readouterr().err.splitlines()
    assert len(warnings) == 3  # in the first epoch
    assert all(line.startswith(f"warning: {folder}") for line in warnings)
    assert warnings[-1].endswith("skipped, 3 of at most 3")
    assert dataset.classes == ["cat"]


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_of_the_readable_samples_has_each_once(folder, workers):
    """Batches are shorter, or absent if no sample of them is left."""
    dataset = only_readable(skipping(folder, 3), 0)
    assert greys(dataset, workers, batch_size=2) == [[0, 1], [4, 5], [7]]
    listed = (folder.parent / "run" / RECORD).read_text().splitlines()
    assert sorted(listed) == [str(folder / f"{number}.png") for number in (2, 3, 6)]
    with pytest.raises(FileError, match="2.png|3.png"):
        greys(only_readable(skipping(folder, 0), 0), 0)
    (folder.parent / "run" / RECORD).unlink()
    with pytest.raises(UserError, match="lists 2 more, as many as --skip-broken"):
        greys(only_readable(skipping(folder, 2), 0), 0)


def test_file_counts_once_however_its_folder_is_named(folder, monkeypatch):
    """A run may be resumed from another folder."""
    monkeypatch.chdir(folder)
    for data in (Path(".."), folder.parent):
        images = task.Images(data, task.center_crop)
        greys(SeededDataset(skip_broken(images, 3, folder.parent / "run", data), 0), 0)
    assert len((folder.parent / "run" / RECORD).read_text().splitlines()) == 3


def test_files_of_other_data_do_not_count(folder, tmp_path):
    """Such as those of an evaluation, which shares the record."""
    other = shutil.copytree(folder.parent, tmp_path / "other")
    for data in (folder.parent, other, folder.parent):
        images = task.Images(data, task.center_crop)
        greys(SeededDataset(skip_broken(images, 3, tmp_path / "run", data), 0), 0)


def test_files_of_a_data_set_with_other_folders_count(folder, tmp_path):
    """Such as one that reads a list of files in --data."""
    images = task.Images(folder.parent, task.center_crop)
    with pytest.raises(UserError, match="lists 2 more, as many as --skip-broken"):
        greys(SeededDataset(skip_broken(images, 2, tmp_path / "run", tmp_path), 0), 0)


def test_files_that_can_be_skipped_are_decoded_on_the_cpu(folder):
    """The GPU would decode them after the batch is made."""
    dataset = task.Images(folder.parent, task.center_crop, "gpu")
    dataset = skip_broken(dataset, 3, folder.parent / "run")
    assert greys(SeededDataset(dataset, 0), 0) == [[0, 1, 4, 4], [4, 5, 7, 7]]
    assert greys(only_readable(dataset, 0), 0) == [[0, 1], [4, 5, 7]]


def test_one_unreadable_file_too_many_is_an_error(folder):
    with pytest.raises(UserError, match=r"6.png can't be read .* lists 2 more, as many as --skip-"):
        greys(SeededDataset(skipping(folder, 2), 0), 0)
    assert len((folder.parent / "run" / RECORD).read_text().splitlines()) == 2
    with pytest.raises(FileError, match="2.png|3.png"):
        greys(SeededDataset(skipping(folder, 0), 0), 0)


def test_record_needs_no_locks(folder, monkeypatch):
    """Lustre has none unless it is mounted with them."""
    missing = OSError(errno.ENOSYS, "Function not implemented")
    monkeypatch.setattr(fcntl, "lockf", mock.Mock(side_effect=missing))
    greys(SeededDataset(skipping(folder, 3), 0), 0)
    assert len((folder.parent / "run" / RECORD).read_text().splitlines()) == 3


def test_record_on_a_full_disk_is_written_later(folder, monkeypatch, capfd):
    dataset = skipping(folder, 3)
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with monkeypatch.context() as patch:
        patch.setattr(skipping_module, "open", full, raising=False)
        assert dataset.read(2) is None
        assert dataset.read(3) is None
        assert "2 of at most 3; the disk of " in capfd.readouterr().err
        with pytest.raises(UserError, match="lists 1 more, as many as --skip-broken .* full"):
            greys(SeededDataset(skipping(folder, 1), 0), 0)
    record = folder.parent / "run" / RECORD
    assert dataset.read(6) is None
    assert record.read_text().split() == [str(folder / f"{number}.png") for number in (2, 3, 6)]
    assert dataset.read(2) is None
    assert "skipped, 3 of at most 3\n" in capfd.readouterr().err
    assert len(record.read_text().split()) == 3


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EHOSTDOWN, errno.ENOTCONN])
def test_file_is_read_again_if_its_disk_does_not_answer(folder, monkeypatch, capfd, number):
    monkeypatch.setattr(files, "PAUSES_S", (0.0, 0.0))
    errors = [OSError(number, os.strerror(number))] * 2

    def open_or_fail(*args):
        if errors:
            raise errors.pop()
        return open_regular(*args)

    monkeypatch.setattr(files, "open_regular", open_or_fail)
    path = folder / "1.png"
    assert images.read_image(path).max() == 10
    assert capfd.readouterr().err.count(f"warning: {path}: {os.strerror(number)}; reading") == 2
    errors += [OSError(number, os.strerror(number))] * 3
    is_damage = number == errno.EIO  # possibly; --skip-broken skips it
    with pytest.raises(
        FileError if is_damage else OutageError,
        match=f"1.png can't be read .*{os.strerror(number)}",
    ) as error:
        images.read_image(path)
    assert error.value.status == (2 if is_damage else 1)


@pytest.fixture
def outage(monkeypatch):
    """All files are on a disk that does not answer."""
    monkeypatch.setattr(files, "PAUSES_S", ())
    error = OSError(errno.EHOSTDOWN, os.strerror(errno.EHOSTDOWN))
    monkeypatch.setattr(files, "open_regular", mock.Mock(side_effect=error))


@pytest.mark.usefixtures("outage")
def test_outage_is_no_error_of_a_file(folder):
    """Otherwise a pack leaves the file out."""
    path = folder / "1.png"
    options = packing.Options(short_side=64, quality=90, shard_size=2**20)
    with pytest.raises(OutageError, match=r"1.png can't be read \(Host is down\)"):
        packing.encode(0, packing.Source(str(path), [0], b""), options)
    with pytest.raises(OutageError):
        skipping(folder, 3).read(0)
    assert not (folder.parent / "run" / RECORD).exists()
    (message,) = verify.find_broken([partial(images.read_image, path)], 1)
    assert "1.png can't be read (Host is down)" in message


def test_mask_is_read_again_if_its_disk_does_not_answer(folder, monkeypatch):
    monkeypatch.setattr(files, "PAUSES_S", (0.0,))
    errors = [OSError(errno.ESTALE, "Stale")]
    read_once = files._read_once

    def read_or_fail(path):
        if errors:
            raise errors.pop()
        return read_once(path)

    monkeypatch.setattr(files, "_read_once", read_or_fail)
    path = folder / "mask.png"
    Image.new("L", (3, 2), 7).save(path)
    assert images.read_labels(path).tolist() == [[7, 7, 7], [7, 7, 7]]
    assert not errors


def test_end_of_a_worker_while_a_file_is_read_is_no_error_of_the_file(folder):
    """torch raises it in the main thread, wherever that is, such as while a picture is drawn."""
    dataset = SeededDataset(task.Images(folder.parent, task.center_crop), 0)
    others = {*multiprocessing.active_children()}
    batches = iter(build_loader(dataset, sampler=[0] * 100, workers=1, device=CPU))
    next(batches)
    (worker,) = {*multiprocessing.active_children()} - others
    with (
        pytest.raises(RuntimeError, match="DataLoader worker .* is killed by signal"),
        files.naming_errors(folder / "1.png", "an image"),
    ):
        worker.kill()
        time.sleep(10)


def test_listed_file_is_skipped_under_a_lower_limit(folder):
    """As in a run that is resumed with another --skip-broken."""
    greys(SeededDataset(skipping(folder, 3), 0), 0)
    assert skipping(folder, 1).read(2) is None


def test_record_that_is_a_link_is_an_error(folder):
    """Names of files would be lines of any file that it leads to."""
    record = folder.parent / "run" / RECORD
    record.parent.mkdir()
    (folder.parent / "target").touch()
    record.symlink_to(folder.parent / "target")
    with pytest.raises(UserError, match=rf"{RECORD} can't be written \(Too many levels of symb"):
        greys(SeededDataset(skipping(folder, 3), 0), 0)
    assert record.read_text() == ""


def test_message_is_one_line_but_for_that_of_a_worker():
    """Torch passes a worker's message alone, below lines of its own."""
    assert (
        str(FileError("\x1b]0;x.png\n is no mask", "\x1b]0;x.png\n"))
        == r"\x1b]0;x.png\n is no mask"
    )
    assert (
        str(FileError("Caught FileError\nit can't be read")) == "Caught FileError\nit can't be read"
    )


def test_name_of_a_file_does_not_control_the_terminal(folder):
    (folder / "2.png").rename(folder / "\x1b]0;x\x07\x1c2.png")
    reads = verify.list_reads(folder.parent, None)
    assert any(
        r"\x1b]0;x\x07\x1c2.png can't be read" in one for one in verify.find_broken(reads, 1)
    )
    for _ in range(2):
        greys(SeededDataset(skipping(folder, 3), 0), 0)
    listed = (folder.parent / "run" / RECORD).read_text()
    assert listed.replace("\n", "").isprintable()
    assert listed.count("\n") == 3


def test_line_of_the_record_is_one_file(folder):
    (folder / "2.png").rename(folder / "2\n3.png")
    greys(SeededDataset(skipping(folder, 3), 0), 0)
    listed = (folder.parent / "run" / RECORD).read_text().splitlines()
    assert rf"{folder}/2\n3.png" in listed and len(listed) == 3


def test_skipping_dataset_can_be_sent_to_workers(folder, monkeypatch):
    import pickle

    monkeypatch.setitem(sys.modules, "task", task)  # other tests load a project's
    copy = pickle.loads(pickle.dumps(skipping(folder, 3)))
    assert len(copy) == 8 and copy.classes == ["cat"]


def test_file_that_vanishes_during_training_is_named(folder):
    dataset = task.Images(folder.parent, task.center_crop)
    (folder / "0.png").unlink()
    with pytest.raises(FileError, match=r"0.png can't be read as an image \(No such file"):
        dataset[0]


# python -m engine.data.verify


def run_verify(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["verify", *map(str, arguments), "--threads=2"])
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    with pytest.raises(SystemExit) as end:
        verify.main()
    return int(end.value.code)


def test_verify_names_all_unreadable_files(folder, monkeypatch, capsys):
    (folder / "pipe").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe.png")
    assert run_verify(monkeypatch, folder.parent) == 1
    said = capsys.readouterr()
    names = ("2.png", "3.png", "6.png", "pipe.png")
    lines = said.out.splitlines()
    assert [line.split(" can't")[0] for line in lines] == [str(folder / name) for name in names]
    assert "9 files, 4 unreadable" in said.err
    for name in names:
        (folder / name).unlink()
    assert run_verify(monkeypatch, folder) == 0
    assert "5 files, 0 unreadable" in capsys.readouterr().err


@pytest.mark.slow
def test_verify_prints_one_line_for_each_file(tmp_path):
    """PIL warns of the first image, which can be decoded, and logs an error about the second."""
    content = io.BytesIO()
    Image.new("RGB", (8, 8)).save(content, "PNG")
    header, rest = content.getvalue()[:33], content.getvalue()[33:]
    animation = b"acTL" + bytes(8)  # of no frames
    chunk = struct.pack(">I", 8) + animation + struct.pack(">I", zlib.crc32(animation))
    (tmp_path / "animated.png").write_bytes(header + chunk + rest)
    Image.new("RGB", (8, 8)).save(tmp_path / "samples.tif")
    entries = [struct.pack("<HHII", 277, 3, 1, samples) for samples in (3, 99)]  # of each pixel
    tiff = (tmp_path / "samples.tif").read_bytes()
    (tmp_path / "samples.tif").write_bytes(tiff.replace(*entries))
    command = [sys.executable, "-B", "-m", "engine.data.verify", str(tmp_path)]
    done = subprocess.run(command, cwd=TEMPLATE, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.startswith(f"{tmp_path}/samples.tif can't be read as an image")
    assert done.stderr == "2 files, 1 unreadable\n"


def test_verify_of_a_missing_or_empty_folder_is_an_error(tmp_path, monkeypatch):
    for folder in (tmp_path, tmp_path / "none"):
        monkeypatch.setattr(sys, "argv", ["verify", str(folder)])
        with pytest.raises(UserError, match="holds no images|there is no such folder"):
            verify.main()


def test_number_of_threads_is_limited(tmp_path, monkeypatch, capsys):
    for number in ("-3", "0", "100000"):
        monkeypatch.setattr(sys, "argv", ["verify", str(tmp_path), "--threads", number])
        with pytest.raises(SystemExit):
            verify.main()
        assert (
            f"--threads: '{number}' is not a whole number from 1 to 1024" in capsys.readouterr().err
        )
