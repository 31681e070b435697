"""Packed data by URL, from a real server that is slow, cuts connections and returns errors."""

import errno
import fcntl
import gzip
import json
import os
import resource
import shutil
import threading
import time
from argparse import Namespace
from contextlib import suppress
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from unittest.mock import Mock

import pytest
import task
import torch
from engine import OutageError, UserError, cli
from engine.data import (
    ResumableDistributedSampler,
    SeededDataset,
    decode_crops,
    idx,
    remote,
    shard_order,
    shards,
    store,
)
from engine.data.files import FileError
from engine.data.loading import TrainLoader, build_loader
from engine.data.remote import Mirror, RemoteFolder
from engine.data.store import Store
from fresh import UNCHANGED
from nginx import NGINX, FaultyProxy, serving
from parameters import mostly_slow
from test_pack import (  # noqa: F401 - fixtures, too
    LARGE,
    alarm,
    alter_label,
    caption_datasets,
    captions_folder,
    contents,
    mask_datasets,
    masks_folder,
    require_equal_samples,
    run_pack,
    write_images,
)

CPU = torch.device("cpu")
needs_nginx = pytest.mark.skipif(NGINX is None, reason="nginx is missing (apt-get install nginx)")
pytest.importorskip("aiohttp")
MANY = 10**9  # bytes of a cache that holds everything


@pytest.fixture
def packed(tmp_path, run_pack) -> Path:  # noqa: F811
    """A pack of 40 images in 27 shards, and as many for validation."""
    out = tmp_path / "served" / "packed"
    out.mkdir(parents=True)
    run_pack(write_images(tmp_path / "in", 40), out, LARGE, "--shard-size=16KB", "--shuffle")
    assert len([*(out / "train").glob("*.tar")]) > remote.WINDOW
    return out


@pytest.fixture
def server(packed, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(store, "FIRST_DELAY_S", 0.01)
    folder = tmp_path / "nginx"
    folder.mkdir()
    remote.open_mirror.cache_clear()
    with serving(packed.parent, folder) as server:
        yield server


def datasets(data) -> tuple[task.Images, task.Images]:
    args = Namespace(data=data, decode="cpu", eval_only=False, **UNCHANGED)
    return task.read_datasets(args)


def cached(cache: Path) -> list[Path]:
    return sorted(cache.glob("*/*/shard-*.tar"))


@needs_nginx
def test_samples_are_those_of_the_local_pack(server, packed, tmp_path):
    url = RemoteFolder(f"{server.url}/packed/", tmp_path / "cache", MANY)
    for original, other in zip(datasets(packed), datasets(url), strict=True):
        assert (other.classes, other.labels) == (original.classes, original.labels)
        for _ in range(2):
            torch.manual_seed(0)
            expected = [original[index] for index in range(len(original))]
            torch.manual_seed(0)
            for index, sample in enumerate(expected):
                found = other[index]
                assert found[0].data == sample[0].data and found[1] == sample[1]
    assert cached(tmp_path / "cache")
    for path in cached(tmp_path / "cache"):
        assert path.read_bytes() == (packed / path.parent.name / path.name).read_bytes()
    parts = [line for line in server.requests() if "shard" in line]
    assert parts and all('HTTP/1.1" 206 ' in line for line in parts)


@needs_nginx
@pytest.mark.parametrize(
    ("folder", "read"),
    [("masks_folder", mask_datasets), ("captions_folder", caption_datasets)],
    ids=["masks", "captions"],
)
def test_masks_and_captions_are_those_of_the_local_pack(
    request,
    server,
    tmp_path,
    run_pack,  # noqa: F811
    folder,
    read,
):
    packed = tmp_path / "served" / "pairs"
    assert run_pack(request.getfixturevalue(folder), packed, LARGE, "--shard-size=16KB") == 0
    url = RemoteFolder(f"{server.url}/pairs", tmp_path / "cache", MANY)
    for original, other in zip(read(packed), read(url), strict=True):
        assert getattr(other, "classes", None) == getattr(original, "classes", None)
        assert other.fingerprint == original.fingerprint
        require_equal_samples(other, original)
    assert any("/pairs/" in line and "shard" in line for line in server.requests())


@needs_nginx
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_same_as_without_a_cache_and_after_a_resume(
    server, packed, tmp_path, workers
):
    def batches(cache: str, size: int, start: int = 0) -> list:
        train_set, _ = datasets(RemoteFolder(f"{server.url}/packed", tmp_path / cache, size))
        seeded = SeededDataset(train_set, 3)
        sampler = ResumableDistributedSampler(seeded, 3, num_replicas=1, rank=0)
        sampler.set_epoch(1, start)
        options = {"batch_size": 4, "epochs": 2, "workers": workers, "device": CPU}
        return list(TrainLoader(seeded, sampler, **options))

    expected = batches("one", MANY)
    assert len(expected) == 10
    largest = max(path.stat().st_size for path in packed.rglob("*.tar"))
    smallest = (remote.WINDOW + remote.SPARE) * largest
    for found, start in ((batches("two", smallest), 0), (batches("one", MANY, 12), 12)):
        for one, other in zip(expected[start // 4 :], found, strict=True):
            assert all(map(torch.equal, one, other))


def test_order_is_mixed_from_a_window_of_shards_and_complete():
    sizes = [50, 60, 40] * 10
    shard_of = torch.repeat_interleave(torch.arange(30), torch.tensor(sizes))
    orders = []
    for seed in (0, 0, 1):
        orders.append(shard_order(sizes, torch.Generator().manual_seed(seed)))
    assert torch.equal(orders[0], orders[1]) and not torch.equal(orders[0], orders[2])
    assert torch.equal(orders[0].sort().values, torch.arange(1500))
    for start in range(0, 1500, 100):
        used = shard_of[orders[0][start : start + 100]].unique()
        assert remote.WINDOW - 2 <= len(used) <= remote.WINDOW + 5
    few = shard_order([50] * 8, torch.Generator().manual_seed(0))
    first = few[:80] // 50
    assert len(first.unique()) == 8  # all shards from the start


@pytest.mark.parametrize(("before", "after"), [(1, 3), (4, 2), (2, 2)])
def test_no_sample_is_lost_or_repeated_on_another_number_of_processes(before, after):
    class Sharded(list):
        shard_sizes = [7, 9, 8] * 8

    data = SeededDataset(Sharded(range(192)), 0)

    def read(world_size: int, start: int, steps: int) -> list[int]:
        found = []
        for rank in range(world_size):
            sampler = ResumableDistributedSampler(data, 5, num_replicas=world_size, rank=rank)
            sampler.set_epoch(2, start)
            found += list(sampler)[:steps]
        return found

    consumed = read(before, 0, 12 // before * 3)
    rest = read(after, len(consumed), 192)
    assert len(consumed) == 36
    assert sorted(consumed + rest) == list(range(192))


def test_shards_sizes_must_be_those_of_the_samples():
    class Filtered(list):
        shard_sizes = [7, 9]

    sampler = ResumableDistributedSampler(SeededDataset(Filtered(range(10)), 0), 5, 1, 0)
    with pytest.raises(ValueError, match="16 samples in shards, but 10"):
        list(sampler)


@needs_nginx
def test_cache_is_bounded_and_the_oldest_shards_make_room(server, packed, tmp_path):
    sizes = [path.stat().st_size for path in (packed / "train").glob("*.tar")]
    limit = (remote.WINDOW + remote.SPARE) * max(sizes)
    cache = tmp_path / "cache"
    train_set, val_set = datasets(RemoteFolder(f"{server.url}/packed", cache, limit))
    for _ in range(2):
        for dataset in (train_set, val_set):
            for index in range(len(dataset)):
                for _ in range(remote.MISSES):
                    dataset[index]
                files = cache.glob("*/*/shard-*")
                assert sum(path.stat().st_size for path in files) <= limit
    assert sum(sizes) * 2 > limit
    assert len(cached(cache)) >= remote.WINDOW


def test_packs_of_the_user_make_no_room(tmp_path):
    """The folder for the cache may hold them, too."""
    shards = [tmp_path / owner / "train" / "shard-00000.tar" for owner in ("user", "cache")]
    for shard in shards:
        shard.parent.mkdir(parents=True)
        shard.write_bytes(bytes(1000))
    (shards[1].parent / "remote.json").touch()
    assert remote.make_room(tmp_path, 500, tmp_path / "new")
    assert [shard.exists() for shard in shards] == [True, False]


@needs_nginx
def test_too_small_cache_is_an_error(server, tmp_path):
    data = RemoteFolder(f"{server.url}/packed", tmp_path / "cache", 30_000)
    with pytest.raises(UserError, match="--cache-size 30000: .* needs .* bytes"):
        datasets(data)


@needs_nginx
@pytest.mark.parametrize("damage", ["truncated", "overwritten"])
def test_damaged_shard_in_the_cache_is_read_by_url_again(server, packed, tmp_path, capsys, damage):
    data = RemoteFolder(f"{server.url}/packed", tmp_path / "cache", MANY)
    train_set, _ = datasets(data)
    for _ in range(remote.MISSES):
        train_set[0]
    (shard,) = cached(tmp_path / "cache")
    if damage == "truncated":
        os.truncate(shard, 10)
    else:
        shard.write_bytes(bytes(shard.stat().st_size))
    for _ in range(remote.MISSES):
        assert train_set[0][0].data == datasets(packed)[0][0][0].data
    assert shard.stat().st_size == (packed / "train" / shard.name).stat().st_size
    assert capsys.readouterr().err == f"warning: {shard} is damaged: it is read by URL again\n"


@needs_nginx
def test_refused_files_of_other_layouts_count_as_absent(server, tmp_path, run_pack, masks_folder):  # noqa: F811
    run_pack(masks_folder, tmp_path / "served" / "pairs", LARGE)
    url = RemoteFolder(f"{server.url}/unlisted/pairs", tmp_path / "cache", MANY)
    for original, other in zip(mask_datasets(masks_folder), mask_datasets(url), strict=True):
        assert len(other) == len(original) and other.classes == original.classes


@needs_nginx
def test_files_of_a_mirror_are_not_written_again(server, packed, tmp_path):
    """Other processes read them meanwhile, and not every disk replaces a file at once."""
    folder = RemoteFolder(f"{server.url}/packed", tmp_path / "cache", MANY)
    times = []
    for _ in range(2):
        datasets(RemoteFolder(folder.url, folder.cache_dir, MANY))
        files = sorted(path for path in folder.cache_dir.rglob("*.json"))
        times.append([(path, path.stat().st_mtime_ns, path.stat().st_ino) for path in files])
    assert len(files) == 4 and times[0] == times[1]


@needs_nginx
def test_damaged_index_in_the_cache_is_downloaded_again(server, packed, tmp_path):
    mirror = RemoteFolder(f"{server.url}/packed", tmp_path / "cache", MANY).mirror
    index = mirror / "train" / "index.bin"
    index.write_bytes(bytes(index.stat().st_size))
    datasets(RemoteFolder(f"{server.url}/packed", tmp_path / "cache", MANY))
    assert index.read_bytes() == (packed / "train" / "index.bin").read_bytes()


@needs_nginx
def test_failing_requests_are_repeated(server, packed, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "READ_S", 1)
    proxy = FaultyProxy(server.port, ["error", "", "cut", "refuse", "stall", "", "cut"] * 3)
    train_set, _ = datasets(RemoteFolder(f"{proxy.url}/packed", tmp_path / "cache", MANY))
    expected = datasets(packed)[0]
    for index in range(12):
        assert train_set[index][0].data == expected[index][0].data
    assert not proxy.faults
    proxy.close()


@needs_nginx
def test_connections_are_closed_when_the_metadata_and_a_shard_are_read(
    server, tmp_path, monkeypatch
):
    """As garbage, they would be collected while another store reads, or at the end."""
    opened = []

    class Recorded(Store):
        def __init__(self, url: str) -> None:
            super().__init__(url)
            opened.append(self)

    monkeypatch.setattr(remote, "Store", Recorded)
    mirror = Mirror(RemoteFolder(f"{server.url}/packed", tmp_path / "cache", MANY) / "train")
    for _ in range(remote.MISSES):
        mirror.read("shard-00000.tar", 0, 512)
    assert (mirror.folder / "shard-00000.tar").exists()
    assert [one.loop.is_closed() for one in opened] == [True, False, True]


def test_password_of_a_proxy_is_not_in_messages(monkeypatch, capsys):
    monkeypatch.setattr(store.time, "sleep", lambda _: None)
    monkeypatch.setenv("http_proxy", "bob:hunter2secret@127.0.0.1:9")
    with pytest.raises(UserError, match="…@127.0.0.1:9; attempts: 7") as error:
        Store("http://example.invalid/x").read("a")
    assert "secret" not in str(error.value) + capsys.readouterr().err
    message = f"{'a ' * 80}http://bob:hunter2secret{'x' * 40}@host"  # which is cut
    assert "secret" not in store._reason(OSError(message))


@needs_nginx
def test_server_that_stays_away_is_an_error_after_a_limited_number_of_attempts(
    server, tmp_path, capsys
):
    proxy = FaultyProxy(server.port, ["error"] * 100)
    data = RemoteFolder(f"{proxy.url}/packed", tmp_path / "cache", MANY)
    with pytest.raises(OutageError, match=r"pack.json can't be read \(503 Busy; attempts: 7\)"):
        datasets(data)
    assert len(proxy.faults) == 100 - store.ATTEMPTS
    log = capsys.readouterr().err
    assert log.count("pack.json: attempt ") == store.ATTEMPTS - 1
    assert "pack.json: attempt 1 of 7 failed (503 Busy)" in log
    proxy.close()
    with pytest.raises(OutageError, match=r"127.0.0.1.* attempts: 7\)"):
        datasets(RemoteFolder(f"{proxy.url}/packed", tmp_path / "cache", MANY))


def test_missing_credentials_are_an_error_at_the_first_attempt(monkeypatch):
    store, attempts = Store("http://127.0.0.1:1/data"), []

    class NoCredentialsError(Exception):
        """As botocore names it."""

    def request(path, *_):
        attempts.append(path)
        raise NoCredentialsError("Unable to locate credentials")

    monkeypatch.setattr(store, "_request", request)
    with pytest.raises(UserError, match="Unable to locate credentials; attempts: 1"):
        store.read("train/pack.json")
    assert attempts == ["http://127.0.0.1:1/data/train/pack.json"]


@pytest.mark.parametrize("code", ["InvalidRange", "416"])
def test_range_behind_the_end_on_s3_is_empty(monkeypatch, code):
    request = Mock(side_effect=s3_error(code))
    monkeypatch.setattr(store, "_open_files", lambda _: Mock(_cat_file=request))
    assert Store("s3://bucket/x").read("a.tar", 10, 20) == b""
    request.assert_called_once()


@pytest.mark.parametrize(
    ("url", "error"),
    [("s3://bucket/x", "AuthorizationHeaderMalformed"), ("http://[fe80::1]:8000/x", "")],
)
def test_invalid_request_is_repeated_and_an_error(monkeypatch, url, error):
    """s3fs reports it as it does a range behind the end, and so does connect()."""
    monkeypatch.setattr(store, "ATTEMPTS", 2)
    monkeypatch.setattr(store, "FIRST_DELAY_S", 0.01)
    if error:
        files = Mock(_cat_file=Mock(side_effect=s3_error(error)))
        monkeypatch.setattr(store, "_open_files", lambda _: files)
    for part in ((), (10, 20)):
        with pytest.raises(UserError, match=r"; attempts: 2\)"):
            Store(url).read("a.tar", *part)


def test_file_on_s3_is_read_up_to_the_limit(monkeypatch):
    class Endless:
        async def _cat_file(self, path: str, start: int, end: int) -> bytes:
            assert (start, end) == (0, 1001)
            return bytes(end - start)

    monkeypatch.setattr(store, "MAX_BYTES", 1000)
    monkeypatch.setattr(store, "ATTEMPTS", 1)
    monkeypatch.setattr(store, "_open_files", lambda _: Endless())
    with pytest.raises(UserError, match="s3://bucket/x/pack.json has more than 1000 bytes"):
        Store("s3://bucket/x").read("pack.json")


def s3_error(code: str) -> OSError:
    """Return what s3fs raises for an answer of S3."""
    error = OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    error.__cause__ = type("ClientError", (Exception,), {"response": {"Error": {"Code": code}}})()
    return error


@needs_nginx
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing", "neither train/pack.json nor training/pack.json"),
        ("private", r"403 Forbidden; attempts: 1\)"),
        ("whole/packed", "the server ignores range requests"),
    ],
)
def test_unusable_url_is_an_error(server, tmp_path, path, message):
    with pytest.raises(UserError, match=message) as caught:
        datasets(RemoteFolder(f"{server.url}/{path}", tmp_path / "cache", MANY))
    assert caught.value.status == 2  # another start would not help


def test_nothing_is_read_by_url_before_the_data(tmp_path):
    """The flags are checked first, without a limit of time."""
    folder = RemoteFolder("http://127.0.0.1:1/data", tmp_path / "cache", MANY)
    assert not idx.is_idx(folder) and not (tmp_path / "cache").exists()


def test_malformed_netrc_is_not_printed(monkeypatch, tmp_path, capfd, caplog):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password my s3cret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(store, "FIRST_DELAY_S", 0.01)
    with pytest.raises(UserError, match="can't be read"):
        Store("http://127.0.0.1:1/data").read("train/pack.json")
    assert "s3cret" not in capfd.readouterr().err + caplog.text


def test_local_data_is_not_taken_for_a_mirror(packed, tmp_path, monkeypatch):
    """A mirror makes room in the folder above it, and names a URL."""
    monkeypatch.setenv(shards.CACHE, str(tmp_path / "cache"))
    (packed / "train" / shards.REMOTE).write_text('{"url": "http://127.0.0.1:1", "cache_size": 0}')
    others = sorted(packed.rglob("shard-*"))
    train_set, _ = datasets(packed)
    assert not train_set.samples.shard_sizes
    train_set[0]
    others[0].unlink()
    with pytest.raises(UserError, match="shard-00000.tar can't be read"):
        datasets(packed)
    assert sorted(packed.rglob("shard-*")) == others[1:]


class Hostile(BaseHTTPRequestHandler):
    """Server whose answers have no end, are compressed, or lead to themselves or to a file."""

    encodings: ClassVar[set[str]] = set()  # that were asked for

    def do_GET(self) -> None:
        self.encodings.add(self.headers["Accept-Encoding"])
        kind = self.path.split("/")[1]
        signed = "ftp://host/pack.json?key=me&signature=SECRET"
        target = {"loop": self.path, "file": "file:///" + "a" * 5000, "signed": signed}.get(kind)
        self.send_response(302 if target else 206 if kind in ("range", "other") else 200)
        if target:
            self.send_header("Location", target)
        if kind == "gzip":
            self.send_header("Content-Encoding", "gzip")
        if kind == "other":
            self.send_header("Content-Range", "bytes 0-94/1000")
        self.end_headers()
        bomb = gzip.compress(bytes(2**20))
        with suppress(OSError):  # until the client closes the connection
            while not target:
                self.wfile.write(bomb if kind == "gzip" else bytes(2**16))

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def hostile():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hostile)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("kind", "part", "message"),
    [
        ("endless", (), "/endless/pack.json has more than 1000000 bytes"),
        ("range", (5, 100), "the server ignores range requests"),
        ("other", (5, 100), "the request for bytes 5-99 with bytes 0-94/1000; use another one"),
        ("gzip", (), r"pack.json: the server compresses it \(gzip\)"),
        ("gzip", (5, 100), r"pack.json: the server compresses it \(gzip\)"),
        ("loop", (), r"pack.json can't be read \(too many redirects; attempts: 1\)"),
        ("signed", (), r"pack.json can't be read \(ftp://host/pack.json\?…; attempts: 1\)"),
        ("file", (), r"pack.json can't be read \(file:///a{192}; attempts: 1\)"),
    ],
)
def test_answers_of_a_hostile_server_are_read_up_to_a_limit(
    hostile, monkeypatch, kind, part, message
):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(store, "MAX_BYTES", 10**6)
    monkeypatch.setattr(store, "ATTEMPT_S", 5)
    monkeypatch.setattr(store, "FIRST_DELAY_S", 0.01)
    files = Store(f"{hostile}/{kind}")
    with pytest.raises(UserError, match=message):
        files.read("pack.json", *part)
    assert Hostile.encodings == {"identity"}


@needs_nginx
@pytest.mark.parametrize(
    "damage", mostly_slow(["changed", "missing", "truncated", "longer", "repacked"], fast=2)
)
def test_damaged_shard_is_an_error(server, packed, tmp_path, damage):
    train_set, _ = datasets(RemoteFolder(f"{server.url}/packed", tmp_path / "cache", MANY))
    path = packed / "train" / "shard-00000.tar"
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(
            {
                "truncated": content[: len(content) // 2],
                "longer": content + bytes(512),
                "changed": content[:-700] + b"x" * 700,
                "repacked": (packed / "val" / path.name).read_bytes(),
            }[damage]
        )
    expected = {
        "missing": "is missing",
        "changed": "its checksum differs",
        "truncated": "truncated",
        "longer": "another file: it has more than",
        "repacked": "another file|checksum|can't be read as an image",
    }[damage]
    last = train_set.samples.pack.manifest.shards[0].samples - 1
    with pytest.raises(UserError, match=rf"shard-00000.tar.*({expected})"):
        for _ in range(20):
            train_set[last]
    assert not cached(tmp_path / "cache")


@needs_nginx
def test_changed_shard_is_an_error_before_any_of_its_samples(server, packed, tmp_path):
    train_set, _ = datasets(RemoteFolder(f"{server.url}/packed", tmp_path / "cache", MANY))
    path = packed / "train" / "shard-00000.tar"
    content = bytearray(path.read_bytes())
    content[5 * 512 + 100] ^= 1  # as if it were of a pack of other images of equal size
    path.write_bytes(content)
    last = train_set.samples.pack.manifest.shards[0].samples - 1
    with pytest.raises(UserError, match="shard-00000.tar is damaged or was changed"):
        train_set[last]


@needs_nginx
def test_full_disk_is_an_error(server, tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    cache = tmp_path / "cache"
    train_set, _ = datasets(RemoteFolder(f"{server.url}/packed", cache, MANY))
    with pytest.raises(
        UserError, match=r"\(No space left on device\); .*--cache-size.*--cache-dir"
    ):
        for _ in range(20):
            train_set[0]
    assert not list(cache.glob("*/*/shard-*"))


@needs_nginx
@pytest.mark.parametrize("name", ["index.bin", "shard-00000.tar"])
def test_partial_write_is_an_error(server, packed, tmp_path, name):
    """As on a full disk: part of the data is written, and only a further attempt fails."""
    content = (packed / "train" / name).read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) - 100, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"), (tmp_path / name).open("wb") as file:
            Store(f"{server.url}/packed/train").download(
                name, file, len(content), sha256(content).hexdigest()
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@needs_nginx
def test_partial_read_from_the_cache_is_a_miss(server, packed, tmp_path, monkeypatch):
    mirror = Mirror(RemoteFolder(f"{server.url}/packed", tmp_path / "cache", MANY) / "train")
    for _ in range(remote.MISSES):
        mirror.read("shard-00000.tar", 0, 512)
    assert cached(tmp_path / "cache")
    monkeypatch.setattr(os, "preadv", lambda *_: 100)
    expected = (packed / "train" / "shard-00000.tar").read_bytes()[:512]
    assert mirror.read("shard-00000.tar", 0, 512) == expected


@needs_nginx
def test_interrupted_download_starts_again_and_a_running_one_is_kept(server, packed, tmp_path):
    train_set, _ = datasets(RemoteFolder(f"{server.url}/packed", tmp_path / "cache", MANY))
    folder = train_set.samples.pack.folder
    part = folder / "shard-00000.tar.tmp"
    part.write_bytes(b"x" * 100_000)  # longer than the shard
    mirror = Mirror(folder)
    for _ in range(remote.MISSES):
        mirror.read("shard-00000.tar", 0, 512)
    expected = (packed / "train" / "shard-00000.tar").read_bytes()
    assert (folder / "shard-00000.tar").read_bytes() == expected and not part.exists()

    other = folder / "shard-00001.tar.tmp"
    with other.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for _ in range(remote.MISSES):
            mirror.read("shard-00001.tar", 0, 512)
        assert other.exists() and not (folder / "shard-00001.tar").exists()


@needs_nginx
def test_training_process_starts_no_thread_before_it_forks_workers(server, tmp_path):
    before = set(threading.enumerate())
    train_set, _ = datasets(RemoteFolder(f"{server.url}/packed", tmp_path / "cache", MANY))
    for _ in range(remote.MISSES):
        train_set[0]
    assert cached(tmp_path / "cache")
    assert set(threading.enumerate()) == before


@needs_nginx
def test_answer_that_takes_too_long_is_an_error(server, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "ATTEMPT_S", 0.2)
    monkeypatch.setattr(store, "ATTEMPTS", 2)
    proxy = FaultyProxy(server.port, ["stall"] * 4)
    with pytest.raises(UserError, match=r"pack.json can't be read \(TimeoutError; attempts: 2\)"):
        datasets(RemoteFolder(f"{proxy.url}/packed", tmp_path / "cache", MANY))
    proxy.close()


@needs_nginx
def test_another_pack_at_the_url_has_another_mirror(server, packed, tmp_path, run_pack):  # noqa: F811
    data = RemoteFolder(f"{server.url}/packed", tmp_path / "cache", MANY)
    before = data.mirror
    assert RemoteFolder(f"{server.url}/packed/", tmp_path / "cache", MANY).mirror == before
    for path in sorted(packed.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    run_pack(write_images(tmp_path / "other", 20), packed, LARGE)
    after = RemoteFolder(f"{server.url}/packed", tmp_path / "cache", MANY)
    assert after.mirror != before and len(datasets(after)[0]) == 20


@needs_nginx
def test_slow_index_delays_no_other_pack(server, packed, tmp_path, monkeypatch, alarm):  # noqa: F811
    shutil.copytree(packed, packed.with_name("other"))
    download = Store.download

    def slow(self, *args):
        monkeypatch.setattr(Store, "download", download)
        assert RemoteFolder(f"{server.url}/other", tmp_path / "cache", MANY).is_dir()
        download(self, *args)

    monkeypatch.setattr(Store, "download", slow)
    assert RemoteFolder(f"{server.url}/packed", tmp_path / "cache", MANY).is_dir()
    assert len([*(tmp_path / "cache").glob("*/train/index.bin")]) == 2


@needs_nginx
def test_page_of_a_proxy_in_place_of_a_manifest_is_an_error_with_its_url(server, packed, tmp_path):
    (packed / "train" / "pack.json").write_text("<html>Please log in</html>")
    data = RemoteFolder(f"{server.url}/packed", tmp_path / "cache", MANY)
    with pytest.raises(UserError, match=f"{data.url}/train/pack.json is damaged"):
        datasets(data)
    assert not (tmp_path / "cache").exists()


@needs_nginx
def test_index_of_another_pack_is_an_error(server, packed, tmp_path):
    (packed / "train" / "index.bin").write_bytes((packed / "val" / "index.bin").read_bytes())
    with pytest.raises(UserError, match="train/index.bin is damaged or was changed"):
        datasets(RemoteFolder(f"{server.url}/packed", tmp_path / "cache", MANY))


@needs_nginx
def test_label_without_a_class_is_an_error(server, packed, tmp_path):
    alter_label(packed / "val", 2)
    with pytest.raises(UserError, match="val/index.bin has label 2, but only 2 classes"):
        datasets(RemoteFolder(f"{server.url}/packed", tmp_path / "cache", MANY))


def test_fifo_in_a_mirror_is_an_error(packed, alarm):  # noqa: F811
    folder = packed / "train"
    source = {"url": "http://127.0.0.1:1/data", "cache_size": MANY}
    (folder / shards.REMOTE).write_text(json.dumps(source))
    (folder / "shard-00000.tar").unlink()
    os.mkfifo(folder / "shard-00000.tar")
    with pytest.raises(OSError, match="it is not a regular file"):
        Mirror(folder).read("shard-00000.tar", 0, 512)


@needs_nginx
def test_first_batch_from_a_slow_server_needs_no_whole_shard(server, tmp_path):
    data = RemoteFolder(f"{server.url}/slow/packed", tmp_path / "cache", MANY)
    started = time.monotonic()
    seeded = SeededDataset(datasets(data)[1], 0)
    options = {"batch_size": 8, "workers": 0, "device": CPU}
    pixels, labels = next(iter(build_loader(seeded, sampler=range(len(seeded)), **options)))
    assert pixels.shape == (8, 3, 224, 224)
    assert time.monotonic() - started < 20


@needs_nginx
def test_unreadable_image_is_named_by_its_url(server, tmp_path, monkeypatch):
    url = f"{server.url}/packed"
    train_set, _ = datasets(RemoteFolder(url, tmp_path / "cache", MANY))
    monkeypatch.setattr(Mirror, "read", lambda *arguments: bytearray(b"no image"))
    message = rf"^{url}/train/shard-\d+.tar/\d+\+\d+ can't be read as an image"
    with pytest.raises(FileError, match=message) as error:
        decode_crops(train_set[0])
    assert error.value.path.startswith(url)


@needs_nginx
def test_pack_that_is_not_shuffled_is_reported(server, packed, tmp_path, run_pack, capsys):  # noqa: F811
    out = packed.parent / "sorted"
    run_pack(tmp_path / "in", out, LARGE, "--shard-size=16KB")
    datasets(RemoteFolder(f"{server.url}/packed", tmp_path / "cache", MANY))
    assert "warning" not in capsys.readouterr().err
    datasets(RemoteFolder(f"{server.url}/sorted", tmp_path / "cache", MANY))
    assert "/sorted/train was packed without --shuffle" in capsys.readouterr().err


def test_shuffled_pack_has_the_same_samples_in_another_order(packed, tmp_path, run_pack):  # noqa: F811
    run_pack(tmp_path / "in", tmp_path / "sorted", LARGE)
    for (one, other), is_same in zip(
        zip(datasets(packed), datasets(tmp_path / "sorted"), strict=True),
        (False, True),
        strict=True,
    ):
        found, expected = (
            [(bytes(sample.data), label) for sample, label in map(dataset.__getitem__, range(40))]
            for dataset in (one, other)
        )
        assert sorted(found) == sorted(expected) and (found == expected) is is_same
    run_pack(tmp_path / "in", tmp_path / "again", LARGE, "--shard-size=16KB", "--shuffle")
    assert contents(tmp_path / "again") == contents(packed)


def test_locations():
    assert cli.data_location("data/x") == Path("data/x")
    assert cli.data_location("s3://bucket/a") == "s3://bucket/a"
    for text in ("ftp://host/x", "https://user:word@host/x", "https://host/x?key=1"):
        with pytest.raises(Exception, match="must be https") as raised:
            cli.data_location(text)
        assert text not in str(raised.value)  # it may have a password
    with pytest.raises(Exception, match="only --data takes"):
        cli.local_path("https://host/x.jpg")


def test_missing_package_is_an_error(monkeypatch):
    import fsspec

    def fail(protocol, **options):
        raise ImportError

    monkeypatch.setattr(fsspec, "filesystem", fail)
    with pytest.raises(UserError, match="--data s3://bucket/x: pip install fsspec s3fs"):
        store.Store("s3://bucket/x")


def test_s3_goes_through_fsspec(packed, tmp_path, monkeypatch):
    """With its file system of local files in place of s3fs, which needs a server."""
    import fsspec

    class Files:
        async def _cat_file(self, path: str, start: int | None, end: int | None) -> bytes:
            name = packed.parent / path.removeprefix("s3://bucket/")
            return fsspec.filesystem("file").cat_file(str(name), start=start, end=end)

    monkeypatch.setattr(store, "_open_files", lambda protocol: Files())
    train_set, _ = datasets(RemoteFolder("s3://bucket/packed", tmp_path / "cache", MANY))
    expected = datasets(packed)[0]
    for index in range(40):
        assert train_set[index][0].data == expected[index][0].data
    source = json.loads((train_set.samples.pack.folder / shards.REMOTE).read_text())
    assert source["url"] == "s3://bucket/packed/train"
