"""python -m engine.data.pack: packed image folders, read as the folders are."""

import copy
import errno
import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from argparse import Namespace
from hashlib import sha256
from io import FileIO
from multiprocessing.pool import ThreadPool
from pathlib import Path
from threading import Barrier
from typing import Any
from unittest import mock

import numpy as np
import pytest
import task
import template_task_contrastive as task_contrastive
import template_task_segmentation as task_segmentation
import torch
from engine import UserError, open_regular
from engine.checkpoint.compatibility import compare_data, describe_data
from engine.data import (
    ResumableDistributedSampler,
    SeededDataset,
    files,
    pack,
    packing,
    shards,
    verify,
)
from engine.data.captions import list_captions
from engine.data.files import FileError, read_file
from engine.data.folders import list_images
from engine.data.images import read_image, read_labels
from engine.data.loading import build_loader
from engine.data.shards import START
from fresh import TEMPLATE, UNCHANGED
from PIL import Image

CPU = torch.device("cpu")
LARGE = "--short-side=1000"  # no image is resized
MANY = "--shard-size=20KB"  # several shards


def write_images(folder: Path, count: int = 10) -> Path:
    """Write a data set of two classes; its images have 60 to 200 pixels a side."""
    numbers = np.random.default_rng(0)
    for split in ("train", "val"):
        for index in range(count):
            path = folder / split / ("cat", "dog")[index % 2] / f"{index}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = numbers.integers(0, 256, (6, 6, 3), dtype=np.uint8)
            width, height = numbers.integers(60, 200, 2).tolist()
            Image.fromarray(pixels).resize((width, height)).save(path, quality=95)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"))


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "engine.data.pack", *map(str, arguments)]


def start(*arguments: object, **options) -> subprocess.Popen:
    """Start the program as a user does."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command(*arguments), cwd=TEMPLATE, **pipes, **options)


@pytest.fixture
def run_pack(monkeypatch):
    """Run the program in this process; return its exit status."""

    def run_pack(*arguments: object, workers: int = 1) -> int:
        flags = [*map(str, arguments), f"--workers={workers}"]
        monkeypatch.setattr(sys, "argv", ["pack", *flags])
        try:
            pack.main()
        except SystemExit as end:
            return int(end.code)
        return 0

    return run_pack


def contents(folder: Path) -> dict[str, bytes]:
    files = filter(Path.is_file, folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def datasets(folder: Path) -> tuple[task.Images, task.Images]:
    args = Namespace(data=folder, decode="cpu", eval_only=False, **UNCHANGED)
    return task.read_datasets(args)


def test_samples_are_those_of_the_folder(folder, tmp_path, run_pack):
    assert run_pack(folder, tmp_path / "out", LARGE, MANY) == 0
    for original, packed in zip(datasets(folder), datasets(tmp_path / "out"), strict=True):
        assert (packed.classes, packed.labels) == (original.classes, original.labels)
        torch.manual_seed(0)
        expected = list(original)
        torch.manual_seed(0)
        for sample, other in zip(packed, expected, strict=True):
            assert sample[0].data == other[0].data and sample[0].crop == other[0].crop
        packed.reorder_classes(["dog", "cat"])
        assert packed.labels == [1 - label for label in original.labels]
    assert len(list((tmp_path / "out" / "train").glob("*.tar"))) > 1


def test_fingerprint_has_the_labels_of_the_folder(folder, tmp_path, run_pack):
    """So a run resumes with the packed form of its data; with --shuffle, the order is another."""
    saved = describe_data(dict(zip(shards.SPLITS, datasets(folder), strict=True)))
    for flags, changes in (([], {}), (["--shuffle"], {"train": "other labels"})):
        assert run_pack(folder, tmp_path / str(flags), LARGE, *flags) == 0
        packed = datasets(tmp_path / str(flags))
        own = describe_data(dict(zip(shards.SPLITS, packed, strict=True)))
        assert compare_data(saved, own) == changes
        assert saved["fingerprints"]["val"].keys() == {"labels", "file names"}
        assert own["fingerprints"]["val"].keys() == {"labels", "pack"}


def test_larger_images_are_resized_and_others_copied(folder, tmp_path, run_pack):
    assert run_pack(folder, tmp_path / "out", "--short-side=100") == 0
    sizes = set()
    for (path, _), (other, _) in zip(
        datasets(folder)[0].samples, datasets(tmp_path / "out")[0].samples, strict=True
    ):
        image, resized = read_image(path), read_image(other)
        shorter = min(image.shape[1:])
        sizes.add(shorter > 100)
        if shorter <= 100:
            assert read_file(path) == read_file(other)
            continue
        assert min(resized.shape[1:]) == 100
        ratio = max(image.shape[1:]) / shorter
        assert max(resized.shape[1:]) == pytest.approx(100 * ratio, abs=0.5)
        assert (resized.float().mean() - image.float().mean()).abs() < 2
    assert sizes == {True, False}


def test_copied_file_keeps_its_exif_data(tmp_path, run_pack):
    root = write_images(tmp_path / "in", 2)
    path = root / "train" / "cat" / "0.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation
    with Image.open(path) as image:
        image.save(path, exif=exif)
    assert b"\xff\xe1" in path.read_bytes()
    run_pack(root, tmp_path / "out")
    assert read_file(datasets(tmp_path / "out")[0].samples[0][0]) == path.read_bytes()


def test_bytes_are_the_same_with_any_number_of_workers(folder, tmp_path, run_pack):
    for workers in (1, 3):
        run_pack(folder, tmp_path / str(workers), "--short-side=100", MANY, workers=workers)
    found = contents(tmp_path / "1")
    assert found == contents(tmp_path / "3")
    assert {Path(name).name for name in found} >= {"pack.json", "index.bin", "shard-00001.tar"}


def test_shards_have_the_layout_of_webdataset(folder, tmp_path, run_pack):
    run_pack(folder, tmp_path / "out", LARGE, MANY)
    found = []
    for path in sorted((tmp_path / "out" / "train").glob("*.tar")):
        assert path.stat().st_size <= 20_000 + tarfile.RECORDSIZE  # padding
        with tarfile.open(path) as tar:
            members = [(member.name, tar.extractfile(member).read()) for member in tar]
        for image, label in zip(members[::2], members[1::2], strict=True):
            key = image[0].removesuffix(".jpg")
            assert label[0] == f"{key}.cls" and key == f"{len(found):09d}"
            found.append((image[1], int(label[1])))
    train_set = datasets(folder)[0]
    assert found == [(Path(path).read_bytes(), label) for path, label in train_set.samples]


def test_index_has_at_most_32_bytes_a_sample(folder, tmp_path, run_pack):
    run_pack(folder, tmp_path / "out", LARGE, MANY)
    size = (tmp_path / "out" / "train" / "index.bin").stat().st_size
    assert (size - shards.HEADER_LENGTH) / 10 <= 32


@pytest.mark.slow
def test_killed_pack_is_continued_with_the_same_bytes(tmp_path, run_pack):
    root = write_images(tmp_path / "in", 300)
    flags = ("--short-side=50", "--shard-size=10KB")
    run_pack(root, tmp_path / "whole", *flags)
    out = tmp_path / "out"
    kills = 0
    for shard in ("shard-00002.tar", "shard-00020.tar"):
        process = start(root, out, *flags, "--workers=2", start_new_session=True)
        deadline = time.monotonic() + 60
        while not (out / "train" / shard).exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if (out / "train" / "progress.json").exists():
            kills += 1
            with pytest.raises(UserError, match="not packed completely: run the command"):
                datasets(out)
    assert kills == 2
    with (out / "train" / "index.bin").open("ab") as index:
        index.write(b"a part of a record")
    assert run_pack(root, out, *flags, "--verify") == 0
    assert contents(out) == contents(tmp_path / "whole")


def test_folder_is_locked_until_its_pack_is_complete(folder, tmp_path):
    """By the first one, also after it has read what it wrote."""
    out, options = tmp_path / "out", packing.Options(1000, 90, 20_000, False)
    packers = pack.plan(folder, out, options)
    for packer in packers:
        packer.run(1)
        with pytest.raises(UserError, match="train is being packed by another process"):
            pack.plan(folder, out, options)
    pack.pack(packers, 1, 0)
    assert all(packer.is_complete for packer in pack.plan(folder, out, options))


def test_pack_needs_no_locks(folder, tmp_path, run_pack, monkeypatch, capsys):
    """A file system may have none."""
    missing = OSError(errno.ENOSYS, "Function not implemented")
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=missing))
    assert run_pack(folder, tmp_path / "out", LARGE) == 0
    assert "can't be locked (Function not implemented): pack it once" in capsys.readouterr().err


def test_pack_that_another_process_continues_before_the_lock_is_kept(folder, tmp_path, monkeypatch):
    options = packing.Options(1000, 90, 20_000, False)

    def flock(*arguments: Any) -> None:
        monkeypatch.undo()
        pack.plan(folder, tmp_path / "out", options)[0].run(1)
        fcntl.flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", flock)
    packers = pack.plan(folder, tmp_path / "out", options)
    pack.pack(packers, 1, 0)
    assert len(datasets(tmp_path / "out")[0]) == 10


def test_disk_needs_no_memory_maps(folder, tmp_path, run_pack, monkeypatch):
    """FUSE with direct I/O has none."""
    assert run_pack(folder, tmp_path / "packed") == 0
    whole = shards.Pack(tmp_path / "packed" / "train")
    refused = OSError(errno.ENODEV, os.strerror(errno.ENODEV))
    monkeypatch.setattr(np, "memmap", mock.Mock(side_effect=refused))
    assert (shards.Pack(whole.folder).records == whole.records).all()


def test_complete_pack_is_left_unchanged(folder, tmp_path, run_pack, capsys):
    run_pack(folder, tmp_path / "out", LARGE)
    times = [path.stat().st_mtime_ns for path in sorted((tmp_path / "out").rglob("*"))]
    run_pack(folder, tmp_path / "out", LARGE)
    said = capsys.readouterr().err
    assert "train is complete: its files have the same names, sizes and times of mod" in said
    assert times == [path.stat().st_mtime_ns for path in sorted((tmp_path / "out").rglob("*"))]


def test_other_options_or_files_are_an_error(tmp_path, run_pack):
    root, out = write_images(tmp_path / "in"), tmp_path / "out"
    run_pack(root, out, LARGE)
    with pytest.raises(UserError, match="another pack: --quality 80 instead of 90; give the same"):
        run_pack(root, out, LARGE, "--quality=80")
    (root / "train" / "cat" / "0.jpg").unlink()
    with pytest.raises(UserError, match="another pack: its files had other names"):
        run_pack(root, out, LARGE)
    with pytest.raises(UserError, match="holds something else; name a new folder"):
        run_pack(root, root, LARGE)
    other = tmp_path / "other" / "train"
    other.mkdir(parents=True)
    (other / "index.bin").touch()  # of a packing that was killed at once
    assert run_pack(root, other.parent, LARGE) == 0
    shutil.rmtree(other)
    other.mkdir()
    (other / "notes.txt").touch()
    with pytest.raises(UserError, match="holds something else; name a new folder"):
        run_pack(root, other.parent, LARGE)


@pytest.mark.parametrize("is_complete", [True, False])
def test_changed_file_of_the_same_size_is_an_error(tmp_path, run_pack, is_complete):
    root, out = write_images(tmp_path / "in", 4), tmp_path / "out"
    image = root / "train" / "cat" / "0.bmp"
    Image.new("RGB", (40, 40), "red").save(image)
    (root / "train" / "cat" / "0.jpg").unlink()
    if is_complete:
        run_pack(root, out)
    else:
        image.write_bytes(b"no image")
        with pytest.raises(UserError, match="1 files can't be read"):
            run_pack(root, out)
    image.write_bytes(image.read_bytes()[::-1])
    os.utime(image, ns=(0, 10**18))
    with pytest.raises(UserError, match=r"train was packed from files with other times of modif"):
        run_pack(root, out)


def test_pack_without_times_may_be_of_other_files(folder, tmp_path, run_pack):
    run_pack(folder, tmp_path / "out", LARGE)
    (tmp_path / "out" / "train" / "times.txt").unlink()
    with pytest.raises(UserError, match="train was packed from files with other times of modif"):
        run_pack(folder, tmp_path / "out", LARGE)


def test_bytes_do_not_depend_on_times(folder, tmp_path, run_pack):
    copied = shutil.copytree(folder, tmp_path / "in", copy_function=shutil.copyfile)
    for root in (folder, copied):
        run_pack(root, tmp_path / "packed" / root.name, LARGE)
    found, expected = (contents(tmp_path / "packed" / one.name) for one in (copied, folder))
    for name in ("train/times.txt", "val/times.txt"):
        assert found.pop(name) != expected.pop(name)
    assert found == expected


@pytest.mark.slow
def test_full_disk_is_an_error_and_the_pack_continues(folder, tmp_path, run_pack):
    out = tmp_path / "out"
    limit = 15_000  # of a file, less than a shard: as with a full disk, writing more is an OSError

    def restrict() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    flags = (LARGE, "--shard-size=30KB")
    process = start(folder, out, *flags, "--workers=1", preexec_fn=restrict)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 2 and "Traceback" not in said
    assert "can't be written (File too large); complete shards are kept: correct this" in said
    assert not list(out.rglob("*.tmp"))
    assert run_pack(folder, out, *flags) == 0
    run_pack(folder, tmp_path / "whole", *flags)
    assert contents(out) == contents(tmp_path / "whole")


def test_unreadable_files_are_listed_and_never_dropped_silently(tmp_path, run_pack, capsys):
    root, out = write_images(tmp_path / "in"), tmp_path / "out"
    broken = [root / "train" / "cat" / "2.jpg", root / "val" / "dog" / "1.jpg"]
    broken[0].write_bytes(broken[0].read_bytes()[:300])
    broken[1].write_text("no image")
    with pytest.raises(UserError, match="2 files can't be read; .* --skip-broken 2"):
        run_pack(root, out, LARGE)
    said = capsys.readouterr().err
    assert all(f"{path} can't be read as an image" in said for path in broken)
    with pytest.raises(UserError, match="not packed completely"):
        datasets(out)
    assert run_pack(root, out, LARGE, "--skip-broken=2") == 0
    assert "train: 9 samples in 1 shards, 1 unreadable files" in capsys.readouterr().err
    assert json.loads((out / "train" / "pack.json").read_text())["broken"] == ["cat/2.jpg"]
    train_set = datasets(out)[0]
    expected = [label for path, label in datasets(root)[0].samples if path != str(broken[0])]
    assert train_set.labels == expected


# Masks and captions


@pytest.fixture
def masks_folder(tmp_path) -> Path:
    """Images of 60 to 200 pixels a side, with masks of the labels 0 and 1, in blocks."""
    numbers = np.random.default_rng(0)
    root = tmp_path / "pairs"
    for split in shards.MASK_SPLITS:
        for index in range(6):
            width, height = numbers.integers(60, 200, 2).tolist()
            labels = Image.fromarray(numbers.integers(0, 2, (3, 3), dtype=np.uint8))
            labels = labels.resize((width, height), Image.Resampling.NEAREST)
            pixels = np.asarray(labels)[..., None].repeat(3, 2) * 200
            for kind, picture, suffix in (
                ("images", Image.fromarray(pixels), "jpg"),
                ("annotations", labels, "png"),
            ):
                path = root / kind / split / f"{index}.{suffix}"
                path.parent.mkdir(parents=True, exist_ok=True)
                picture.save(path)
    (root / "classes.txt").write_text("black\nwhite\n")
    return root


def mask_datasets(folder: Path) -> tuple[task_segmentation.Pairs, task_segmentation.Pairs]:
    args = Namespace(data=folder, ignore_index=None, eval_only=False)
    return task_segmentation.build_datasets(args)


def require_equal_samples(first, second) -> None:
    torch.manual_seed(0)
    samples = [first[index] for index in range(len(first))]
    torch.manual_seed(0)
    others = [second[index] for index in range(len(second))]
    assert len(samples) == len(others)
    for sample, other in zip(samples, others, strict=True):
        assert all(map(torch.equal, sample, other))


def test_packed_masks_are_those_of_the_folder(masks_folder, tmp_path, run_pack):
    out = tmp_path / "out"
    assert run_pack(masks_folder, out, LARGE, MANY) == 0
    further = [set(), {"image size"}]  # of training and validation
    sets = zip(mask_datasets(masks_folder), mask_datasets(out), further, strict=True)
    for original, packed, others in sets:
        assert packed.classes == ["black", "white"]
        assert original.fingerprint.keys() == {"file names"} | others
        assert packed.fingerprint.keys() == {"pack"} | others
        require_equal_samples(packed, original)
    assert run_pack(out, "--verify") == 0
    with tarfile.open(out / "training" / "shard-00000.tar") as tar:
        assert tar.getnames()[:2] == ["000000000.jpg", "000000000.mask.png"]
    with pytest.raises(UserError, match=r"another task: with .mask.png, not .cls"):
        shards.Pack(out / "training", "cls")


def test_masks_are_resized_with_their_images(masks_folder, tmp_path, run_pack):
    assert run_pack(masks_folder, tmp_path / "out", "--short-side=40") == 0
    for image_path, mask_path in mask_datasets(tmp_path / "out")[0].files:
        image, labels = read_image(image_path), read_labels(mask_path)
        assert min(labels.shape) == 40 and labels.shape == image.shape[1:]
        assert set(labels.unique().tolist()) <= {0, 1}
        is_same = (image[0] > 100) == (labels == 1)
        assert is_same.float().mean() > 0.95  # all but edges of the blocks


def test_mask_of_another_size_is_listed(masks_folder, tmp_path, run_pack, capsys):
    Image.new("L", (9, 9)).save(masks_folder / "annotations" / "training" / "3.png")
    with pytest.raises(UserError, match="1 files can't be read"):
        run_pack(masks_folder, tmp_path / "out")
    assert "training/3.png differ in size; make them alike" in capsys.readouterr().err


@pytest.fixture
def captions_folder(tmp_path) -> Path:
    """Images of which each second one has two captions."""
    root = write_images(tmp_path / "captioned", 6)
    for split in ("train", "val"):
        lines = []
        for index in range(6):
            name = f"{('cat', 'dog')[index % 2]}/{index}.jpg"
            lines += [f"{name}\t{text} {index}" for text in ("a fish", "größer")[: 1 + index % 2]]
        (root / split / "captions.tsv").write_text("\n".join(lines), encoding="utf-8")
    return root


def caption_datasets(folder: Path) -> tuple[task_contrastive.Pairs, task_contrastive.Pairs]:
    return task_contrastive.build_datasets(Namespace(data=folder, eval_only=False))


def test_packed_captions_are_those_of_the_folder(captions_folder, tmp_path, run_pack):
    out = tmp_path / "out"
    assert run_pack(captions_folder, out, LARGE, MANY) == 0
    for original, packed, count in zip(
        caption_datasets(captions_folder), caption_datasets(out), (9, 6), strict=True
    ):
        assert len(packed) == count
        require_equal_samples(packed, original)
    train_set, val_set = caption_datasets(out)
    assert train_set.fingerprint.keys() == {"pack"}
    original = caption_datasets(captions_folder)[1].fingerprint
    assert val_set.fingerprint == {name: original[name] for name in ("captions", "image size")}
    assert original.keys() == {"captions", "file names", "image size"}
    assert task_contrastive.candidates(None, str(out)) == [f"a fish {index}" for index in range(6)]
    assert len(list_images(out)) == 12
    assert run_pack(out, "--verify") == 0
    (out / "more").mkdir()
    shutil.copy(captions_folder / "val" / "cat" / "0.jpg", out / "more" / "0.jpg")
    assert list_images(out)[12:] == [str(out / "more" / "0.jpg")]


def test_unusual_names_of_captioned_images_are_packed(captions_folder, tmp_path, run_pack):
    """The tar file's members have usual names, each of one block, and different ones."""
    for split in ("train", "val"):
        table = captions_folder / split / "captions.tsv"
        text = table.read_text(encoding="utf-8")
        for old, new in (("cat/0.jpg", "cat/0.größe"), ("dog/1.jpg", "dog/1.txt")):
            (captions_folder / split / old).rename(captions_folder / split / new)
            text = text.replace(old, new)
        table.write_text(text, encoding="utf-8")
    out = tmp_path / "out"
    assert run_pack(captions_folder, out, LARGE, MANY) == 0
    for original, packed in zip(
        caption_datasets(captions_folder), caption_datasets(out), strict=True
    ):
        assert len(original) == len(packed) == len([*packed])
    with tarfile.open(out / "train" / "shard-00000.tar") as shard:
        assert shard.getnames()[:4] == [
            "000000000.image",
            "000000000.txt",
            "000000001.image",
            "000000001.txt",
        ]


@pytest.mark.parametrize(
    ("byte", "message"),
    [(b"\xff", ".*utf-8"), (b"\0", "it is empty or too long .* a NUL character")],
)
def test_packed_caption_that_is_not_a_text_is_an_error(
    captions_folder, tmp_path, run_pack, byte, message
):
    out = tmp_path / "out"
    assert run_pack(captions_folder, out, LARGE, MANY) == 0
    text = "größer".encode()
    manifest = json.loads((out / "train" / "pack.json").read_text())
    for shard in manifest["shards"]:
        path = out / "train" / shard["name"]
        path.write_bytes(path.read_bytes().replace(text, byte * len(text)))
        shard["start_sha256"] = sha256(path.read_bytes()[:START]).hexdigest()
    (out / "train" / "pack.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=rf"can't be read as a caption \({message}"):
        [*list_captions(out / "train", 99)]


def test_packed_caption_longer_than_the_longest_is_an_error(captions_folder, tmp_path, run_pack):
    assert run_pack(captions_folder, tmp_path / "out") == 0
    path = tmp_path / "out" / "train" / "pack.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"longest": 3}))
    with pytest.raises(UserError, match="it is empty or too long for pack.json"):
        [*list_captions(tmp_path / "out" / "train", 99)]


def test_huge_or_endless_file_of_captions_is_an_error(captions_folder):
    os.truncate(captions_folder / "train" / "captions.tsv", 2**40)
    with pytest.raises(UserError, match=r"captions.tsv can't be read .it has \d+ bytes, more"):
        caption_datasets(captions_folder)
    (captions_folder / "train" / "captions.tsv").unlink()
    (captions_folder / "train" / "captions.tsv").symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"captions.tsv can't be read .it is not a regular file"):
        caption_datasets(captions_folder)


def test_packed_caption_that_is_too_long_is_an_error(
    captions_folder, tmp_path, run_pack, monkeypatch
):
    run_pack(captions_folder, tmp_path / "out")
    monkeypatch.setattr(task_contrastive, "LENGTH", 9)
    with pytest.raises(UserError, match="train: the text has 10 bytes, more than 9"):
        task_contrastive.list_captions(tmp_path / "out" / "train", task_contrastive.LENGTH)


def test_pack_of_a_pack_is_an_error(folder, tmp_path, run_pack):
    run_pack(folder, tmp_path / "out")
    with pytest.raises(UserError, match="is packed already; name the folder"):
        run_pack(tmp_path / "out", tmp_path / "again")


# Damage


@pytest.fixture
def out(folder, tmp_path, run_pack) -> Path:
    assert run_pack(folder, tmp_path / "out", LARGE, MANY) == 0
    return tmp_path / "out"


@pytest.mark.parametrize(("size", "warns"), [(56, False), (57, True)])
def test_packed_images_that_are_enlarged_are_reported(
    folder, tmp_path, run_pack, capsys, size, warns
):
    """Validation crops 7/8 of the shorter side, which has 64 pixels, not 65."""
    assert run_pack(folder, tmp_path / "out", "--short-side", "64") == 0
    capsys.readouterr()
    for root in (folder, tmp_path / "out"):
        flags = UNCHANGED | {"model_options": {"image": {"size": size}}}
        task.build_datasets(Namespace(data=root, decode="cpu", eval_only=False, **flags))
    logged = f"{tmp_path / 'out' / 'val'} is packed with --short-side 64, and validation enlarges"
    assert [logged in line for line in capsys.readouterr().err.splitlines()] == [True] * warns


def test_verify_finds_a_flipped_byte(out, run_pack, capsys):
    assert run_pack(out, "--verify") == 0
    path = out / "val" / "shard-00001.tar"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert run_pack(out, "--verify") == 1
    said = capsys.readouterr()
    assert said.out.count("\n") == 1
    assert f"{path} is damaged: its checksum differs; copy the pack again" in said.out


def test_verify_of_images_reads_those_of_a_pack(out, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["verify", str(out), "--threads=2"])
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    with pytest.raises(SystemExit) as end:
        verify.main()
    assert end.value.code == 0
    assert "20 files, 0 unreadable" in capsys.readouterr().err


def test_threads_that_open_a_shard_at_once_read_it(out, monkeypatch):
    images = shards.Pack(out / "val").images()[:2]  # both in one shard
    assert Path(images[0]).parent == Path(images[1]).parent
    both_opened = Barrier(2)

    def open_slowly(path: str) -> FileIO:
        file = open_regular(path)
        both_opened.wait(20)
        return file

    expected = list(map(read_file, images))
    files._open_shard.cache_clear()
    monkeypatch.setattr(files, "open_regular", open_slowly)
    with ThreadPool(2) as pool:
        assert pool.map(read_file, images, chunksize=1) == expected


def truncate(out: Path) -> None:
    path = out / "train" / "shard-00001.tar"
    os.truncate(path, path.stat().st_size - 512)


def change_index(out: Path) -> None:
    path = out / "train" / "index.bin"
    data = bytearray(path.read_bytes())
    data[shards.HEADER_LENGTH] ^= 1
    path.write_bytes(data)


def remove_shard(out: Path) -> None:
    (out / "train" / "shard-00000.tar").unlink()


def mix_splits(out: Path) -> None:
    (out / "val" / "shard-00000.tar").replace(out / "train" / "shard-00000.tar")


def mix_indices(out: Path) -> None:
    (out / "val" / "index.bin").replace(out / "train" / "index.bin")


def damage_manifest(out: Path) -> None:
    (out / "train" / "pack.json").write_text("{}")


def change_content(out: Path) -> None:
    """Change a byte of an image, as if the shard were of a pack of other images of equal size."""
    with (out / "train" / "shard-00001.tar").open("r+b") as file:
        file.seek(5 * 512 + 100)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def enlarge_manifest(out: Path) -> None:
    os.truncate(out / "train" / "pack.json", 2**40)  # a sparse file


def change_format(out: Path) -> None:
    path = out / "train" / "pack.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"shard-00001.tar has \d+ bytes instead of \d+; copy the pack again"),
        (change_index, "index.bin is damaged: its checksum differs"),
        (remove_shard, "shard-00000.tar can't be read .No such file"),
        (mix_splits, "shard-00000.tar does not belong to the pack of pack.json beside it"),
        (change_content, "shard-00001.tar does not belong to the pack of pack.json beside it"),
        (mix_indices, "index.bin does not belong to the pack"),
        (damage_manifest, "pack.json is damaged, or of another version"),
        (enlarge_manifest, r"pack.json can't be read .it has \d+ bytes, more than"),
        (change_format, "pack.json has format 2, not 1; pack anew"),
    ],
)
def test_damaged_pack_is_an_error_before_training(out, damage, message):
    damage(out)
    with pytest.raises(UserError, match=message):
        datasets(out)


def change_shard(**changes: object):
    return lambda manifest: manifest["shards"][0].update(changes)


MANIFESTS = {
    "id of another type": lambda manifest: manifest.update(id=5),
    "id that is empty": lambda manifest: manifest.update(id=""),
    "missing key": lambda manifest: manifest.pop("longest"),
    "unknown key": lambda manifest: manifest.update(more=1),
    "missing key of a shard": lambda manifest: manifest["shards"][0].pop("sha256"),
    "samples of another type": lambda manifest: manifest.update(samples="x"),
    "true for a number": lambda manifest: manifest.update(next=True),
    "negative number": lambda manifest: manifest.update(longest=-1),
    "huge number": lambda manifest: manifest.update(next=2**63),
    "another sum of samples": lambda manifest: manifest.update(samples=9),
    "no samples": lambda manifest: manifest.update(samples=0, shards=[]),
    "shards of another type": lambda manifest: manifest.update(shards=[[1]]),
    "number as a shard's name": change_shard(name=5),
    "shard with a NUL in its name": change_shard(name="a\0b"),
    "shard in another folder": change_shard(name="../val/shard-00000.tar"),
    "shard with another number": change_shard(name="shard-00001.tar"),
    "null for classes": lambda manifest: manifest.update(classes=None),
    "string for classes": lambda manifest: manifest.update(classes="ab"),
    "classes that are no strings": lambda manifest: manifest.update(classes=[1, 2]),
    "classes that can't be hashed": lambda manifest: manifest.update(classes=[{}, []]),
    "more classes than memory": lambda manifest: manifest.update(classes=[*map(str, range(50000))]),
    "class that is there twice": lambda manifest: manifest.update(classes=["cat", "cat"]),
    "class that is half a surrogate pair": lambda manifest: manifest.update(classes=["\ud800"]),
    "options of another type": lambda manifest: manifest.update(options=5),
    "option of another type": lambda manifest: manifest.update(options={"short_side": "big"}),
}


def require_error(out: Path, run_pack, message: str) -> None:
    """Check that training and --verify end with the same error."""
    for read in (lambda: datasets(out), lambda: run_pack(out, "--verify")):
        with pytest.raises(UserError, match=message):
            read()


def test_manifest_with_other_contents_is_one_error(out, run_pack):
    path = out / "train" / "pack.json"
    manifest = json.loads(path.read_text())
    texts = {"deep nesting": "[" * 100_000, "null": "null", "list": "[1]", "bad UTF-8": "\xff"}
    for name, change in MANIFESTS.items():
        changed = copy.deepcopy(manifest)
        change(changed)
        texts[name] = json.dumps(changed)
    accepted = []
    for name, text in texts.items():
        path.write_text(text, encoding="latin-1")
        try:
            require_error(out, run_pack, f"{path} is damaged, or of another version; copy the")
        except pytest.fail.Exception:
            accepted.append(name)
    assert accepted == []


def test_damaged_progress_is_an_error(folder, tmp_path, run_pack):
    path = tmp_path / "train" / "progress.json"
    path.parent.mkdir()
    path.write_text("[" * 100_000)
    with pytest.raises(UserError, match=f"{path} is damaged; delete {path.parent} and pack anew"):
        run_pack(folder, tmp_path)


def alter_label(folder: Path, label: int) -> None:
    """Alter the last label in the index of a pack, and the index's checksum."""
    index, path = folder / "index.bin", folder / "pack.json"
    data = index.read_bytes()
    records = np.frombuffer(data, shards.RECORD, offset=shards.HEADER_LENGTH).copy()
    records["label"][-1] = label
    index.write_bytes(data[: shards.HEADER_LENGTH] + records.tobytes())
    manifest = json.loads(path.read_text()) | {"index_sha256": shards.checksum(index)}
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("split", ["train", "val"])
def test_label_without_a_class_is_an_error_before_training(out, run_pack, split):
    alter_label(out / split, 1)
    datasets(out)
    alter_label(out / split, 2)
    message = f"{out / split}/index.bin has label 2, but only 2 classes; copy the"
    require_error(out, run_pack, message)


@pytest.fixture
def alarm():
    """Raise an error after 60 s: to open a FIFO would take for ever."""

    def fail(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", ["pack.json", "index.bin", "shard-00001.tar"])
def test_file_that_is_not_regular_is_an_error(out, run_pack, alarm, name):
    path = out / "train" / name
    original = path.rename(out / name)
    message = rf"{path} can't be read \(it is not a regular file\); copy the pack again"
    for target in (None, "/dev/zero"):
        path.symlink_to(target) if target else os.mkfifo(path)
        require_error(out, run_pack, message)
        path.unlink()
    path.symlink_to(original)
    assert len(datasets(out)[0]) == 10 and run_pack(out, "--verify") == 0


@pytest.mark.parametrize("is_link", [True, False])
def test_index_that_became_a_fifo_or_link_is_an_error_when_packing_continues(
    out, folder, run_pack, alarm, is_link
):
    path = out / "train" / "index.bin"
    (out / "train" / "pack.json").rename(out / "train" / "progress.json")
    moved = path.rename(out / "index.bin")
    path.symlink_to(moved) if is_link else os.mkfifo(path)
    with pytest.raises(UserError, match=f"{path} is not a regular file; delete {path.parent}"):
        run_pack(folder, out, LARGE, MANY)


def test_file_of_class_names_outside_the_folder_is_not_packed(masks_folder, tmp_path, run_pack):
    (tmp_path / "secret").write_text("black\nwhite\n")
    (masks_folder / "classes.txt").unlink()
    (masks_folder / "classes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=r"classes\.txt is a link to a file outside of"):
        run_pack(masks_folder, tmp_path / "out")
    assert not (tmp_path / "out" / "classes.txt").exists()


@pytest.mark.parametrize("is_link", [True, False])
def test_fifo_or_link_is_replaced_by_the_file_of_class_names(
    masks_folder, tmp_path, run_pack, alarm, is_link
):
    (tmp_path / "precious").write_text("precious")
    path = tmp_path / "out" / "classes.txt"
    path.parent.mkdir()
    path.symlink_to(tmp_path / "precious") if is_link else os.mkfifo(path)
    assert run_pack(masks_folder, path.parent) == 0
    assert not path.is_symlink() and path.read_text() == "black\nwhite\n"
    assert (tmp_path / "precious").read_text() == "precious"


def test_pack_with_the_files_of_a_mirror_is_checked_too(out, alarm):
    """Its shards are not there, and its index is read without a check of its size."""
    (out / "train" / "remote.json").write_text("{}")
    (out / "train" / "index.bin").unlink()
    os.mkfifo(out / "train" / "index.bin")
    with pytest.raises(UserError, match=r"index.bin can't be read \(it is not a regular file\)"):
        datasets(out)


def test_shard_that_becomes_a_fifo_during_training_is_named(out, alarm):
    train_set = datasets(out)[0]
    path = out / "train" / "shard-00000.tar"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(FileError, match=r"can't be read as an image \(it is not a regular file\)"):
        list(train_set)


def test_damaged_image_in_a_shard_is_named(out):
    train_set = datasets(out)[0]
    path = out / "train" / "shard-00000.tar"
    data = bytearray(path.read_bytes())
    start = data.index(b"\xff\xd8\xff")
    data[start : start + 100] = bytes(100)
    path.write_bytes(data)
    with pytest.raises(FileError, match=r"shard-00000.tar/\d+\+\d+ can't be read as an image"):
        list(train_set)


def test_shard_that_is_truncated_during_training_is_named(out):
    train_set = datasets(out)[0]
    os.truncate(out / "train" / "shard-00000.tar", 2048)
    with pytest.raises(FileError, match=r"can't be read as an image \(its shard is too short\)"):
        list(train_set)


# Training


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_read_shards(out, context, monkeypatch):
    monkeypatch.setitem(sys.modules, "task", task)  # other tests load a project's
    dataset = SeededDataset(datasets(out)[1], 0)

    def load(workers: int, **options: object) -> tuple[torch.Tensor, ...]:
        order = range(len(dataset))
        loader = build_loader(
            dataset, workers=workers, device=CPU, sampler=order, batch_size=4, **options
        )
        images, labels = zip(*loader, strict=True)
        return torch.cat(images), torch.cat(labels)

    images, labels = load(2, multiprocessing_context=context)
    assert labels.tolist() == dataset.dataset.labels
    assert torch.equal(images, load(0)[0])


def test_resume_with_other_processes_reads_each_sample_once(out):
    """The order is a function of the position in the epoch, for shards as for files."""
    dataset = SeededDataset(datasets(out)[0], 0)

    def read(start_sample: int, world_size: int, count: int) -> list[str]:
        ranks = []
        for rank in range(world_size):
            sampler = ResumableDistributedSampler(dataset, 0, world_size, rank)
            sampler.set_epoch(3, start_sample)
            ranks.append([dataset[index][0].path for index in sampler][: count // world_size])
        return [path for step in zip(*ranks, strict=True) for path in step]

    paths = read(0, 2, 4) + read(4, 3, 6)
    assert sorted(paths) == sorted(path for path, _ in dataset.dataset.samples)
    assert paths == read(0, 1, 10)


def test_flags_are_checked(run_pack, tmp_path, capsys):
    for flags in (
        ["--shard-size=0"],
        ["--shard-size=1XB"],
        ["--quality=101"],
        ["--short-side=2000"],
    ):
        assert run_pack(tmp_path, tmp_path / "out", *flags) == 2
    assert run_pack(tmp_path) == 2
    assert "name both DATA and OUT, or give --verify" in capsys.readouterr().err
    with pytest.raises(UserError, match="has neither train/ nor val/"):
        run_pack(tmp_path, tmp_path / "out")
    with pytest.raises(UserError, match="no pack"):
        run_pack(tmp_path, "--verify")
