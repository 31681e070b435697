"""Packed data that is read by URL: a mirror of its index, and a bounded cache of its shards.

A mirror is a local folder with all files of a pack but its shards, so that the rest of engine.data
reads it as it reads a local pack. A sample whose shard is not in the mirror is read by a range
request. A shard that is used repeatedly is downloaded in the background, and used after its
checksum is compared; the oldest shards of all mirrors make room for it. Only workers of loaders
have a thread for it: the training process, which forks them, waits for its own downloads.
"""

import fcntl
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path

from torch.utils.data import get_worker_info

from engine import (
    SUFFIX,
    UserError,
    distributed,
    log_line,
    open_regular,
    regular_only,
    replacing,
    writing,
)
from engine.data import shards
from engine.data.shards import INDEX, MANIFEST, REMOTE, Manifest, Shard
from engine.data.store import RefusedError, Store

WINDOW = 8  # shards that a stretch of an epoch's order is mixed of
SPARE = 4  # further shards that the cache has room for: of the validation, and being downloaded
FIX = "free some space, give a smaller --cache-size, or another --cache-dir"
MISSES = 3  # samples that are read from a shard before it is downloaded: fewer may be all


class RemoteFolder:
    """Folder of packed data at a URL. A path below it is one in its mirror.

    Args:
        cache_dir: holds the mirrors of all URLs.
        cache_size: bytes that the shards in `cache_dir` may have.
    """

    def __init__(self, url: str, cache_dir: Path, cache_size: int) -> None:
        self.url, self.cache_dir, self.cache_size = url.rstrip("/"), cache_dir, cache_size

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> Path:
        return self.mirror / name

    def is_dir(self) -> bool:
        """Return whether there is a pack at the URL. Raises UserError if not."""
        return self.mirror.is_dir()

    @cached_property
    def mirror(self) -> Path:
        """The mirror, which is created and completed at the first use.

        Raises UserError if there is no pack, it is damaged, or the cache is too small for it.
        """
        with closing(Store(self.url)) as store:
            return self._create(store)

    def _create(self, store: Store) -> Path:
        files = self._read_metadata(store)
        digest = sha256(self.url.encode())
        for name, data in files.items():
            digest.update(f"\n{name} {len(data)}\n".encode() + data)
        mirror = self.cache_dir / digest.hexdigest()[:16]
        os.environ[shards.CACHE] = str(self.cache_dir)
        with writing(self.cache_dir, FIX), _locked(mirror):
            for name, data in files.items():
                path = mirror / name
                path.parent.mkdir(parents=True, exist_ok=True)
                _write(path, data)
                if path.name == MANIFEST:
                    self._complete(store, path.parent)
        return mirror

    def _read_metadata(self, store: Store) -> dict[str, bytes]:
        """Return the manifests, and the files that name the classes of masks, by name."""
        files: dict[str, bytes] = {}
        refusal = None
        for splits in (shards.SPLITS, shards.MASK_SPLITS):
            for name in [f"{split}/{MANIFEST}" for split in splits]:
                try:
                    files[name] = store.read(name)
                    shards.parse_manifest(files[name], f"{self.url}/{name}")
                except FileNotFoundError:
                    continue
                except RefusedError as error:  # S3's answer, unless one may list the bucket
                    refusal = refusal or error
            if files:
                break
        else:
            raise refusal or UserError(
                f"--data {self.url}: there is neither train/{MANIFEST} nor training/{MANIFEST}; "
                "pack the data (python -m engine.data.pack), and upload it"
            )
        if splits == shards.MASK_SPLITS:
            for name in shards.CLASS_FILES:
                try:
                    files[name] = store.read(name)
                except FileNotFoundError:
                    continue
                except RefusedError:
                    log_line(f"{self.url}/{name}: access is forbidden, so it counts as absent")
        return files

    def _complete(self, store: Store, folder: Path) -> None:
        """Add the index of a split, and what `Mirror` needs, to its folder."""
        manifest = shards.read_manifest(folder)
        self._check(manifest)
        index = folder / INDEX
        if not index.is_file() or shards.checksum(index) != manifest.index_sha256:
            with replacing(index) as temporary, temporary.open("wb") as file:
                name = f"{folder.name}/{INDEX}"
                size, expected = manifest.index_size, manifest.index_sha256
                store.download(name, file, size, expected)
        source = {"url": f"{self.url}/{folder.name}", "cache_size": self.cache_size}
        _write(folder / REMOTE, json.dumps(source).encode())

    def _check(self, manifest: Manifest) -> None:
        """Check that the cache has room for what is used at a time, and that the order is mixed."""
        sizes = [shard.bytes for shard in manifest.shards]
        needed = max(manifest.index_size, min(sum(sizes), (WINDOW + SPARE) * max(sizes)))
        if self.cache_size < needed:
            raise UserError(
                f"--cache-size {self.cache_size}: {self.url} needs {needed} bytes, for up to "
                f"{WINDOW + SPARE} shards; give at least as many, or pack with a smaller "
                "--shard-size"
            )
        is_training = manifest.split in (shards.SPLITS[0], shards.MASK_SPLITS[0])
        if is_training and len(sizes) > WINDOW and not manifest.options.get("shuffle"):
            distributed.print_on_rank_zero(
                f"warning: {self.url}/{manifest.split} was packed without --shuffle, and only "
                f"{WINDOW} of its {len(sizes)} shards are mixed at a time: if neighbouring images "
                "are alike, as in folders of classes, so are those of a batch; pack with --shuffle"
            )


class Mirror:
    """Reading of the shards of a split whose mirror is `folder`, in one process."""

    def __init__(self, folder: Path) -> None:
        source = json.loads((folder / REMOTE).read_bytes())
        self.folder, self.cache_dir = folder, folder.parent.parent
        self.cache_size = source["cache_size"]
        self.store = Store(source["url"])
        self.shards = {shard.name: shard for shard in shards.read_manifest(folder).shards}
        self.misses: Counter[str] = Counter()
        self.compared: set[str] = set()  # shards in the cache whose start is that of the pack
        self.thread: threading.Thread | None = None
        self.error: UserError | None = None  # of a download

    def read(self, name: str, offset: int, length: int) -> bytearray:
        """Return a part of a shard.

        Raises UserError if a shard is missing, changed or can't be downloaded.
        """
        if self.error:
            raise self.error
        shard = self.shards[name]
        data = self._read_cached(shard, offset, length)
        if data is None:
            if name not in self.misses:
                self.store.check_start(name, min(shards.START, shard.bytes), shard.start_sha256)
            self._count_miss(name)
            data = bytearray(self.store.read_part(name, offset, length))
        return data

    def _read_cached(self, shard: Shard, offset: int, length: int) -> bytearray | None:
        """Return a part of a shard in the cache, or None; remove a damaged file."""
        path = self.folder / shard.name
        with suppress(FileNotFoundError):
            # Not kept open: the space of a file that is removed would not be free.
            with open_regular(path) as file:
                data = bytearray(length)
                is_intact = self._is_intact(file.fileno(), shard)
                if is_intact and os.preadv(file.fileno(), [data], offset) == length:
                    return data
            log_line(f"warning: {path} is damaged: it is read by URL again")
            path.unlink()
        return None

    def _is_intact(self, descriptor: int, shard: Shard) -> bool:
        """Return whether a file in the cache has the size and the start of a shard."""
        if os.fstat(descriptor).st_size != shard.bytes:
            return False
        if shard.name not in self.compared:
            start = os.pread(descriptor, shards.START, 0)
            if sha256(start).hexdigest() != shard.start_sha256:
                return False
            self.compared.add(shard.name)
        return True

    def _count_miss(self, name: str) -> None:
        """Download a shard after MISSES of its samples were not in the cache, one at a time."""
        self.misses[name] += 1
        if self.misses[name] % MISSES or (self.thread and self.thread.is_alive()):
            return
        shard = self.shards[name]
        if get_worker_info() is None:  # a thread's locks would be held for ever in a forked worker
            self._download(shard)
            return
        self.thread = threading.Thread(target=self._download, args=(shard,), daemon=True)
        self.thread.start()

    def _download(self, shard: Shard) -> None:
        path = self.folder / shard.name
        part = path.with_name(path.name + SUFFIX)
        try:
            with (
                writing(self.cache_dir, FIX),
                closing(Store(self.store.url)) as store,  # a store is read by one thread
                open(regular_only(str(part), os.O_RDWR | os.O_CREAT), "r+b") as file,
            ):
                if self._reserve(file.fileno(), shard, path, part):
                    store.download(shard.name, file, shard.bytes, shard.sha256)
                    os.fsync(file.fileno())
                    part.replace(path)
        except UserError as error:
            self.error = error
            part.unlink(missing_ok=True)

    def _reserve(self, descriptor: int, shard: Shard, path: Path, part: Path) -> bool:
        """Return whether this process is to download a shard, after its space is allocated.

        Not if another one does or has done it, or if those being downloaded fill the cache.
        """
        with _locked(self.cache_dir):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_own = os.path.samestat(os.fstat(descriptor), part.stat())
            except OSError:
                return False
            if path.exists() or not is_own:
                return False
            if not make_room(self.cache_dir, self.cache_size - shard.bytes, part):
                part.unlink()
                return False
            os.ftruncate(descriptor, 0)  # of a download that was interrupted
            os.posix_fallocate(descriptor, 0, shard.bytes)
            return True


@lru_cache(16)
def open_mirror(folder: str, process: int) -> Mirror | None:
    """Return the mirror in `folder` for a process, by its id; None if the folder is none.

    Connections and threads do not survive a fork.
    """
    return Mirror(Path(folder)) if shards.is_mirror(Path(folder)) else None


def make_room(cache_dir: Path, limit: int, keep: Path) -> bool:
    """Delete the oldest shards until those in `cache_dir`, without `keep`, have `limit` bytes.

    Returns whether that is possible: shards that are being downloaded are not deleted.
    """
    files = []
    for path in cache_dir.glob("*/*/shard-*"):
        with suppress(FileNotFoundError):  # renamed by its download
            if path != keep and (path.parent / REMOTE).is_file():  # not a user's own pack
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
    excess = sum(size for _, size, _ in files) - limit
    for _, size, path in sorted(files):
        if excess > 0 and not (path.suffix == SUFFIX and _is_locked(path)):
            with suppress(PermissionError):  # another user's, in a shared cache
                path.unlink(missing_ok=True)
                excess -= size
    return excess <= 0


def _is_locked(path: Path) -> bool:
    with suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _write(path: Path, data: bytes) -> None:
    """Write a file of a mirror, unless it is there: others may read it, as it is, meanwhile."""
    if not path.is_file() or path.read_bytes() != data:
        with replacing(path) as temporary:
            temporary.write_bytes(data)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a cache or a mirror, one process at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "ab", opener=regular_only) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:  # a process that was forked meanwhile would keep it
            fcntl.flock(file, fcntl.LOCK_UN)
