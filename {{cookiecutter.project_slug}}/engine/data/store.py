"""Files at a URL, read in parts through fsspec, with repeated attempts."""

import asyncio
import logging
import os
import random
import re
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from http import HTTPStatus
from typing import Any, BinaryIO

from engine import MAX_BYTES, OutageError, UserError, log_line
from engine.text import printable, redact_addresses

PIECE = 8 * 2**20  # bytes of a range request for a part of a shard
ATTEMPTS = 7  # of a request, in 12 seconds if each fails at once
FIRST_DELAY_S = 0.2  # before the second attempt; doubled before each further one
CONNECT_S, READ_S = 10, 10  # limits of the time in which a server sends nothing
ATTEMPT_S = 60  # limit of an attempt, of at most PIECE bytes or a manifest
TEMPORARY = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)  # others below 500 are not
# Errors of packages that are there for some protocols only. The last one is a redirection to file:.
REFUSALS = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "NonHttpUrlRedirectClientError",
)
MAX_REASON = 200  # characters of what a server says
UPLOAD = "upload the pack again"


class RefusedError(UserError):
    """Access that is forbidden, as to an absent key of a bucket that may not be listed."""


class CallingThread(ThreadPoolExecutor):
    """Executor without threads, for the calls that aiohttp would leave to one, as of names."""

    def submit(self, fn: Callable, /, *args: Any, **kwargs: Any) -> Future:
        """Return the finished call of `fn`."""
        future: Future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # raised where the result is awaited
            future.set_exception(error)
        return future


class Store:
    """Files below a URL, read through fsspec by one thread of one process.

    Its event loop runs in the calling thread, and only while it reads. fsspec's own loop has a
    thread for the whole process: a loader's worker that is forked meanwhile may wait for ever for
    a lock that the thread held.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        protocol = url.partition("://")[0]
        try:
            self.files = _open_files(protocol)
        except ImportError:
            package = "s3fs" if protocol == "s3" else "aiohttp"
            raise UserError(f"--data {url}: pip install fsspec {package}") from None
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(CallingThread())
        # Call it when done: as garbage, it may be collected while the loop of another store runs.
        self.close = weakref.finalize(self, _close, self.loop, self.files, os.getpid())

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return the bytes of a file from `start` to before `end`, or to its end if it is shorter.

        Raises:
            FileNotFoundError: if there is no such file.
            RefusedError: if the server forbids the access (403).
            OutageError: if all attempts fail.
            UserError: if it refuses the request or ignores its range.
        """
        path = f"{self.url}/{name}"
        delay = FIRST_DELAY_S
        for attempt in range(1, ATTEMPTS + 1):
            try:
                data = self._request(path, start, end)
                break
            except (FileNotFoundError, UserError):
                raise
            except Exception as error:  # of aiohttp, botocore, the operating system and others
                if _is_behind_end(error):
                    return b""
                if attempt == ATTEMPTS or _is_final(error):
                    kind = UserError if _is_final(error) else OutageError
                    kind = RefusedError if _is_forbidden(error) else kind
                    raise kind(
                        f"{path} can't be read ({_reason(error)}; attempts: {attempt}); check the "
                        "server and the credentials, and continue with --resume auto"
                    ) from None
                log_line(
                    f"warning: {path}: attempt {attempt} of {ATTEMPTS} failed ({_reason(error)})"
                )
            time.sleep(delay * random.Random().uniform(0.5, 1.0))  # not all processes at once
            delay *= 2
        if start is None or end is None:
            if len(data) > MAX_BYTES:
                raise UserError(f"{path} has more than {MAX_BYTES} bytes; {UPLOAD}")
        elif len(data) > end - start:
            raise UserError(f"{self.url}: the server ignores range requests; use another one")
        return data

    def _request(self, path: str, start: int | None, end: int | None) -> bytes:
        if path.startswith("s3:"):  # always a range: s3fs reads all of the answer
            # fsspec documents the underscore as the prefix of its coroutines, not of private ones.
            request = self.files._cat_file(path, start=start or 0, end=end or MAX_BYTES + 1)
        else:
            request = self._get(path, start, end)
        return self.loop.run_until_complete(asyncio.wait_for(request, ATTEMPT_S))

    async def _get(self, path: str, start: int | None, end: int | None) -> bytes:
        """Return what `read` does; if the answer is longer, not all of it: it may have no end."""
        limit, headers = MAX_BYTES, {}
        if start is not None and end is not None:
            limit, headers = end - start, {"Range": f"bytes={start}-{end - 1}"}
        session = await self.files.set_session()
        async with session.get(path, headers=headers) as response:
            if response.status == HTTPStatus.NOT_FOUND:
                raise FileNotFoundError(path)
            response.raise_for_status()
            part = response.headers.get("Content-Range", "")
            if headers and part and not part.partition(" ")[2].startswith(f"{start}-"):
                asked = headers["Range"].removeprefix("bytes=")
                raise UserError(
                    f"{path}: the server answers the request for bytes {asked} with "
                    f"{printable(part)}; use another one"
                )
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding != "identity":
                raise UserError(
                    f"{path}: the server compresses it ({printable(encoding)}); use another one"
                )
            data = bytearray()
            async for piece in response.content.iter_any():
                data += piece
                if len(data) > limit:
                    break
        return bytes(data)

    def read_part(self, name: str, start: int, length: int) -> bytes:
        """Return a part of a file that must be there. Raises UserError if it is not."""
        try:
            data = self.read(name, start, start + length)
        except FileNotFoundError:
            raise UserError(f"{self.url}/{name} is missing; {UPLOAD}") from None
        if len(data) < length:
            raise UserError(
                f"{self.url}/{name} is truncated, or is another file: it has fewer than "
                f"{start + length} bytes; {UPLOAD}"
            )
        return data

    def download(self, name: str, file: BinaryIO, size: int, expected: str) -> None:
        """Write a file of `size` bytes and the SHA-256 `expected` to an open file.

        Raises:
            OSError: if it can't be written, such as on a full disk.
            UserError: if the file at the URL is another one.
        """
        with suppress(FileNotFoundError):
            found = len(self.read(name, size - 1, size + 1))  # finds another size at once
            if found != 1:
                size_found = "more" if found else "fewer"
                raise UserError(
                    f"{self.url}/{name} is truncated, or is another file: it has {size_found} than "
                    f"{size} bytes; {UPLOAD}"
                )
        digest = sha256()
        for start in range(0, size, PIECE):
            data = self.read_part(name, start, min(PIECE, size - start))
            digest.update(data)
            file.write(data)
        file.flush()
        self._compare(name, digest.hexdigest(), expected)

    def check_start(self, name: str, size: int, expected: str) -> None:
        """Raise UserError unless the first `size` bytes of a file have the SHA-256 `expected`."""
        self._compare(name, sha256(self.read_part(name, 0, size)).hexdigest(), expected)

    def _compare(self, name: str, found: str, expected: str) -> None:
        if found != expected:
            raise UserError(
                f"{self.url}/{name} is damaged or was changed: its checksum differs from that in "
                f"the manifest; {UPLOAD}"
            )


def _open_files(protocol: str) -> Any:
    """Return a file system of fsspec, with coroutines. Raises ImportError if a package is missing.

    It is not shared: its connections belong to one event loop.
    """
    import fsspec

    options: dict[str, Any] = {"asynchronous": True, "skip_instance_cache": True}
    if protocol == "s3":
        # One attempt: Store.read counts and reports them.
        client: dict[str, Any] = {"retries": {"total_max_attempts": 1}}
        client |= {"connect_timeout": CONNECT_S, "read_timeout": READ_S}
        return fsspec.filesystem("s3", config_kwargs=client, **options)
    import aiohttp

    logging.getLogger("aiohttp.client").setLevel(logging.ERROR)  # quotes a malformed ~/.netrc
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=READ_S)
    session = {"timeout": timeout, "trust_env": True}  # proxies and ~/.netrc
    # A few bytes may unpack to gigabytes.
    session |= {"auto_decompress": False, "headers": {"Accept-Encoding": "identity"}}
    return fsspec.filesystem(protocol, client_kwargs=session, **options)


def _close(loop: asyncio.AbstractEventLoop, files: Any, process: int) -> None:
    """Close the connections of a Store, in the process that opened them."""

    async def close() -> None:
        session = await files.set_session()
        await session.close()

    if os.getpid() == process and not loop.is_running():  # a daemon thread's may run at exit
        request = close()
        try:
            loop.run_until_complete(request)
        except Exception:  # collected as garbage while another store reads; nothing depends on it
            request.close()
        loop.close()


def _is_behind_end(error: Exception) -> bool:
    """Return whether `error` is the answer to a range that starts behind the end of a file."""
    response = getattr(error.__cause__, "response", None)  # of botocore, below s3fs's error
    code = response["Error"].get("Code") if isinstance(response, dict) else ""
    status = getattr(error, "status", 0)
    return status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or code in ("InvalidRange", "416")


def _is_forbidden(error: Exception) -> bool:
    is_forbidden = getattr(error, "status", 0) == HTTPStatus.FORBIDDEN
    return is_forbidden or isinstance(error, PermissionError)


def _is_final(error: Exception) -> bool:
    """Return whether another attempt would fail, too: the error is no temporary one."""
    status = getattr(error, "status", -1)
    if isinstance(error, PermissionError) or type(error).__name__ in REFUSALS:
        return True
    is_loop = status == 0  # of aiohttp's TooManyRedirects
    return is_loop or (400 <= status < 500 and status not in TEMPORARY)


def _reason(error: Exception) -> str:
    status = getattr(error, "status", "")
    if status == 0:
        return "too many redirects"
    message = getattr(error, "message", "") or str(error) or type(error).__name__
    message = re.sub(r"(://[^\s?]*\?)[^\s)]+", r"\1…", message)  # a redirect's may be a signature
    return printable(redact_addresses(f"{status} {message}".strip())[:MAX_REASON])
