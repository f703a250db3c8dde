"""Reads table shards from object storage, web servers or network disks, with fsspec.

Only shards are remote; descriptions and indexes are in the bundle. All ranges of a step are
requested in parallel. fsspec takes credentials and proxies from its own configuration and the
environment, never from a bundle. A URL can add fsspec's disk cache (blockcache::https://...).
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np

from stem_edge.errors import InputError
from stem_edge.numerics.quantize import U8
from stem_edge.runtime.rows.files import ByteRange
from stem_edge.runtime.rows.rows import READ_AT_ONCE, RowCounters
from stem_edge.shown import one_line
from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.shards import TableStore

LIBRARY_NBYTES = 10_500_000  # memory of connections and their libraries (measured)
LIMIT_SECONDS = 60.0  # of one range
PAUSE_SECONDS = 0.5  # before a range is read again
NOT_FOUND = 404  # the status of HTTP
URL = re.compile(r"[\w.+:-]+://[^\s'\"<>]+")  # in an error message


class RemoteShards:
    """Table shards below a URL. Methods: see ShardFiles. Raises InputError for an unusable URL."""

    distant = True
    if_unreadable = "check the address, and if it is a URL, the network and fsspec's credentials"
    if_short = "check that the URL is that of this bundle's tables, the folder tables.zarr itself"
    if_damaged = "check that the URL is that of this bundle's tables, and that nothing changed them"

    def __init__(self, tables: TableStore, url: str) -> None:
        from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

        files, self._root = open_url(url)
        self._url, self._counted = printable_url(url), RowCounters()
        # By default, fsspec files read megabytes ahead of each record. A URL with "::" asks for a cache.
        self._options = {} if files.async_impl or "::" in url else {"cache_type": "none"}
        self._files = files if files.async_impl else AsyncFileSystemWrapper(files, False)
        # Name below the URL, and size, of each shard of all arrays.
        self._shards = [
            (f"{grid.root.name}/c/{shard}/0", grid.shard_nbytes(shard))
            for grid in tables.grids
            for shard in range(grid.shards)
        ]
        self._closing, self._under_way = threading.Event(), set[Future[Any]]()

    def name(self, shard: int) -> str:
        return f"{self._url}/{self._shards[shard][0]}"

    def read(self, pieces: Sequence[ByteRange], buffers: Sequence[U8]) -> list[int | OSError]:
        wanted = list(dict.fromkeys(pieces))
        reading = asyncio.run_coroutine_threadsafe(self._read_all(wanted), self._files.loop)
        self._under_way.add(reading)
        if self._closing.is_set():  # after the add, or a close in between misses it
            reading.cancel()
        try:
            answers = dict(zip(wanted, reading.result(), strict=True))
        except CancelledError:
            return [OSError("the table store is closed")] * len(pieces)
        finally:
            self._under_way.discard(reading)
        return [_put(answers[piece], buffer) for piece, buffer in zip(pieces, buffers, strict=True)]

    async def _read_all(self, pieces: list[ByteRange]) -> list[bytes | BaseException]:
        found = await asyncio.gather(*map(self._read_one, pieces), return_exceptions=True)
        nbytes = sum(len(answer) for answer in found if isinstance(answer, bytes))
        self._counted += RowCounters(network_bytes=nbytes, network_reads=len(pieces))
        return found

    async def _read_one(self, piece: ByteRange) -> bytes:
        name, nbytes = self._shards[piece.shard]
        path, start, stop = f"{self._root}/{name}", piece.offset, piece.offset + piece.nbytes
        if "https" in self._files.protocol:
            # HTTPFile reads only the range, even from a server that ignores ranges.
            from fsspec.implementations.http import HTTPFile

            session = await self._files.set_session()
            options = {"size": nbytes, "cache_type": "none", "loop": self._files.loop}
            file = HTTPFile(self._files, path, session, 1, **options, **self._files.kwargs)
            reading = file.async_fetch_range(start, stop)
        else:
            reading = self._files._cat_file(path, start=start, end=stop, **self._options)
        found: bytes = await asyncio.wait_for(reading, LIMIT_SECONDS)
        return found[: piece.nbytes]

    def ahead(self, pieces: Sequence[ByteRange]) -> None:
        """Do nothing: remote files have no OS cache to fill."""

    def before_retry(self, piece: ByteRange) -> None:
        """Sleep a moment, because a network fault may outlast one read."""
        self._closing.wait(PAUSE_SECONDS)

    def counters(self) -> RowCounters:
        return self._counted

    def close(self) -> None:
        """Make reads fail soon, including running ones."""
        self._closing.set()
        for reading in list(self._under_way):
            reading.cancel()


def _put(answer: bytes | BaseException, buffer: U8) -> int | OSError:
    """Copy a response to a buffer and return its size; convert an exception to OSError."""
    if isinstance(answer, bytes):
        buffer[: len(answer)] = np.frombuffer(answer, np.uint8)
        return len(answer)
    return OSError(_words(answer))


def reading_nbytes(layout: RecordLayout) -> int:
    """Return how many bytes of memory remote reading needs in addition to a step's records."""
    return LIBRARY_NBYTES + 3 * READ_AT_ONCE * layout.record_nbytes


def open_url(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it. Raises InputError."""
    try:
        from fsspec.core import url_to_fs
    except ModuleNotFoundError as error:
        raise InputError(
            f"tables at {printable_url(url)} need fsspec; pip install 'stem-edge[remote]'"
        ) from error
    try:
        files, root = url_to_fs(url)
    except (ImportError, ValueError, OSError) as error:
        raise InputError(
            f"tables at {printable_url(url)}: fsspec cannot open this kind of address "
            f"({_words(error)}); install what it asks for, or check the address"
        ) from error
    return files, str(root).rstrip("/")


def printable_url(url: str) -> str:
    """Return a URL for messages, without passwords and signatures."""
    scheme, mark, rest = url.rstrip("/").partition("://")
    if not mark:
        return one_line(scheme)
    host = re.split("[/?#]", rest, maxsplit=1)[0]
    if "@" in host:
        rest = rest[host.rindex("@") + 1 :]
    elif re.search(r":\D", host):  # not a port, so part of a password that contains /, ? or #
        rest = rest.rpartition("@")[2]
    return one_line(f"{scheme}://{re.split('[?#]', rest, maxsplit=1)[0].rstrip('/')}")


def _words(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError) or getattr(error, "status", None) == NOT_FOUND:
        return "there is no such file"
    said = one_line(URL.sub(lambda found: printable_url(found[0]), str(error)))
    if "support range requests" in said:
        return "this server serves no ranges"
    if isinstance(error, TimeoutError):
        said = said or f"nothing came for {LIMIT_SECONDS:g} s"
    return f"{said} ({type(error).__name__})" if said else type(error).__name__
