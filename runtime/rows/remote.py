"""Shards on a network disk, in object storage or on a web server, read in ranges through fsspec.

A table store's descriptions and index are in the bundle; only its shards are elsewhere, and where a
record lies in them is arithmetic. Nothing is asked of the other side at opening. When a shard is first
used, its last four bytes are read, too: they tell at the cost of one small request whether the other
side serves ranges, whether the shard has its size, and whether it has the index that follows from the
layout. Each record's crc32c is checked by the row store.

Ranges of a step are read at once by a pool of threads, those that lie close together as one. A request
that fails is repeated after a pause unless the reason will last. fsspec knows credentials and proxies
by its own configuration and environment; a bundle never names either.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from stem_edge.errors import InputError, RowReadError
from stem_edge.files.strict_json import one_line
from stem_edge.numerics.quantize import U8
from stem_edge.runtime.rows.records import Traffic
from stem_edge.runtime.rows.shards import Advice, ByteRange, Fill
from stem_edge.runtime.rows.web_range import LIMIT_SECONDS, read_range
from stem_edge.tables.shards import CRC_NBYTES, ShardGrid
from stem_edge.tables.store import TableStore

THREADS = 32  # requests under way at once
# Pieces with a gap of at most GAP_NBYTES are read as one range, of up to RANGE_NBYTES in all.
GAP_NBYTES, RANGE_NBYTES = 32 << 10, 1 << 20
TRIES = 4  # of a request
PAUSE_SECONDS = 0.2  # before the second; doubled before each further one, and varied
SILENCE_SECONDS = 20.0  # of a web server; not of a request, as slow lines share what there is
# Statuses of HTTP that may pass; others below 500 last.
PASSING = (408, 425, 429)
BEYOND = 416  # the status for a range behind a file's end, where other file systems give no bytes
URL = re.compile(r"[\w.+:-]+://[^\s'\"<>]+")  # in an error's words
LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotImplementedError, ImportError)


class _Range(NamedTuple):
    """Bytes of a shard that one request reads."""

    shard: int
    start: int
    stop: int


class RemoteShards:
    """Shards of a table store below a URL. Raises InputError if nothing here can read it."""

    advice = Advice(
        "check the network and the address",
        "check that the URL is that of this bundle's tables",
        "check that the URL is that of this bundle's tables, and that nothing changed them",
    )

    def __init__(self, tables: TableStore, url: str) -> None:
        self._files, self._root = open_url(url)
        self._url, self.traffic = printable_url(url), Traffic()
        # A name below the URL and a grid for each shard of all arrays.
        self._shards: list[tuple[str, ShardGrid, int]] = [
            (f"{grid.root.name}/c/{shard}/0", grid, shard)
            for grid in tables.grids
            for shard in range(grid.shards)
        ]
        self._checks: dict[int, Future[None]] = {}  # shards that were used, or are being tried
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(THREADS, "stem-edge-remote")
        self._served = False  # whether a shard was read in ranges
        self._closing, self._under_way = threading.Event(), set[Future[bytes]]()

    def name(self, shard: int) -> str:
        return f"{self._url}/{self._shards[shard][0]}"

    def ahead(self, pieces: Sequence[ByteRange]) -> Fill:
        """Start reading pieces. Each can be filled once without another request."""
        if pieces and not self._served:  # otherwise each request may bring a whole shard
            self._check(pieces[0].shard).result()
        for shard in {piece.shard for piece in pieces}:
            self._check(shard)
        started = dict[ByteRange, tuple[int, Future[bytes]]]()
        for wanted, inside in joined(pieces):
            reading = self._pool.submit(self._read, wanted)
            started |= dict.fromkeys(inside, (wanted.start, reading))

        def fill(piece: ByteRange, buffer: U8) -> int:
            start, reading = started.pop(piece, (0, None))
            if reading is None:
                return self.fill(piece, buffer)
            return self._put(piece, buffer, start, reading)

        return fill

    def fill(self, piece: ByteRange, buffer: U8) -> int:
        wanted = _Range(piece.shard, piece.offset, piece.offset + len(buffer))
        return self._put(piece, buffer, piece.offset, self._pool.submit(self._read, wanted))

    def _put(self, piece: ByteRange, buffer: U8, start: int, reading: Future[bytes]) -> int:
        self._check(piece.shard).result()
        at = piece.offset - start
        found = memoryview(reading.result())[at : at + len(buffer)]
        buffer[: len(found)] = np.frombuffer(found, np.uint8)
        return len(found)

    def _check(self, shard: int) -> Future[None]:
        """Start trying a shard that was not used before; one that failed is tried again."""
        with self._lock:
            found = self._checks.get(shard)
            if found is None or (found.done() and (found.cancelled() or found.exception())):
                found = self._checks[shard] = self._pool.submit(self._try_shard, shard)
            return found

    def _try_shard(self, shard: int) -> None:
        """Read the end of a shard, and beyond. Raises RowReadError."""
        _, grid, number = self._shards[shard]
        nbytes = grid.shard_nbytes(number)
        end = self._read(_Range(shard, nbytes - CRC_NBYTES, nbytes + 1))
        expected = grid.index_bytes(number)[-CRC_NBYTES:]
        if end == expected:
            self._served = True
            return
        found = f"{len(end)} bytes" if len(end) != CRC_NBYTES else end.hex()
        raise RowReadError(
            f"{self.name(shard)}: {found} after byte {nbytes - CRC_NBYTES}, expected the four bytes "
            f"{expected.hex()} that end a shard of {nbytes} bytes; {self.advice.short}"
        )

    def _read(self, wanted: _Range) -> bytes:
        """Read a range, fewer bytes only at the shard's end. Raises RowReadError."""
        reason: Exception = ValueError("the table store is closed")
        for attempt in range(TRIES):
            pause = PAUSE_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
            if self._closing.wait(pause if attempt else 0):
                break
            try:
                found = self._request(wanted, repeated=attempt > 0)
            except Exception as error:  # of any kind, as each protocol has its own
                reason = error
                if _lasts(error):
                    break
                continue
            return found
        raise RowReadError(
            f"{self.name(wanted.shard)}: {_words(reason)}, at byte {wanted.start}; {_remedy(reason)}"
        ) from reason

    def _request(self, wanted: _Range, *, repeated: bool) -> bytes:
        shard, start, stop = wanted
        path = f"{self._root}/{self._shards[shard][0]}"
        try:
            if self._files.async_impl:
                found = self._awaited(path, start, stop)
            else:  # which may open a file that reads megabytes ahead
                found = self._files.cat_file(path, start=start, end=stop, cache_type="none")
        except Exception as error:
            if _status(error) != BEYOND:
                raise
            found = b""
        finally:
            with self._lock:
                self.traffic.requests += 1
                self.traffic.repeated += repeated
        with self._lock:
            self.traffic.nbytes += len(found)
        if len(found) > stop - start:
            raise NotImplementedError(
                f"this server serves no ranges: {len(found)} bytes came for {stop - start}"
            )
        return found

    def _awaited(self, path: str, start: int, stop: int) -> bytes:
        """Read a range by a coroutine, which `stop` can end."""
        import asyncio  # here, because it takes 2 MB, which models with tables here do not need

        files = self._files
        if "https" in files.protocol:
            reading = read_range(files, path, start, stop, SILENCE_SECONDS)
        else:
            reading = asyncio.wait_for(files._cat_file(path, start=start, end=stop), LIMIT_SECONDS)
        started = asyncio.run_coroutine_threadsafe(reading, files.loop)
        self._under_way.add(started)
        try:
            if self._closing.is_set():
                started.cancel()
            return started.result()
        finally:
            self._under_way.discard(started)

    def forget(self, piece: ByteRange) -> None:
        """Nothing is kept here."""

    def stop(self) -> None:
        """End requests under way, and refuse others."""
        self._closing.set()
        for started in list(self._under_way):
            started.cancel()

    def close(self) -> None:
        """End requests under way, or wait for those that cannot be ended."""
        self.stop()
        self._pool.shutdown(cancel_futures=True)


def joined(pieces: Sequence[ByteRange]) -> list[tuple[_Range, list[ByteRange]]]:
    """Return the ranges to read, each with the pieces that lie in it."""
    ranges = list[tuple[_Range, list[ByteRange]]]()
    for piece in sorted(set(pieces)):
        stop = piece.offset + piece.nbytes
        if ranges:
            (shard, start, end), inside = ranges[-1]
            near = shard == piece.shard and piece.offset - end <= GAP_NBYTES
            if near and stop - start <= RANGE_NBYTES:
                ranges[-1] = _Range(shard, start, max(end, stop)), [*inside, piece]
                continue
        ranges.append((_Range(piece.shard, piece.offset, stop), [piece]))
    return ranges


def open_url(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it. Raises InputError."""
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
    """Return a URL for messages, without the password and the signature that it may have."""
    scheme, mark, rest = url.rstrip("/").partition("://")
    if not mark:
        return one_line(scheme)
    host = re.split("[/?#]", rest, maxsplit=1)[0]
    if "@" in host:
        rest = rest[host.rindex("@") + 1 :]
    elif re.search(r":\D", host):  # no port, so a password with one of these
        rest = rest.rpartition("@")[2]
    return one_line(f"{scheme}://{re.split('[?#]', rest, maxsplit=1)[0].rstrip('/')}")


def _lasts(error: Exception) -> bool:
    """Return whether a request that failed so would fail again."""
    status = _status(error)
    if status is not None and 400 <= status < 500:
        return status not in PASSING
    return isinstance(error, LASTING)


def _status(error: Exception) -> int | None:
    """Return the status of HTTP that an error of aiohttp, httpx or requests has."""
    answer = getattr(error, "response", None)
    status = getattr(error, "status", getattr(answer, "status_code", None))
    return status if isinstance(status, int) else None


def _words(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    kind = type(error).__name__
    said = one_line(URL.sub(lambda found: printable_url(found[0]), str(error)))
    if isinstance(error, NotImplementedError):
        return said
    if isinstance(error, TimeoutError):
        said = said or f"nothing came for {SILENCE_SECONDS:g} s"
    return f"{said} ({kind})" if said else kind


def _remedy(error: Exception) -> str:
    if isinstance(error, NotImplementedError):
        return "use one that does, or copy the tables into the bundle"
    if isinstance(error, FileNotFoundError):
        return f"{RemoteShards.advice.short}, the folder tables.zarr itself"
    return f"{RemoteShards.advice.unreadable}; credentials are those that fsspec finds"
