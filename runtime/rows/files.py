"""Reads byte ranges of local table shard files; remote.py reads them over a network.

`pread` reports a bad disk as an error, while a memory map would crash the process. On Linux,
posix_fadvise(WILLNEED) starts many reads at once; elsewhere a thread pool does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from stem_edge.files import disk
from stem_edge.numerics.quantize import U8
from stem_edge.runtime.rows.rows import RowCounters
from stem_edge.tables.shards import ShardGrid

# Enough to keep a phone's flash busy; going from 8 to 32 gained little where it was measured.
POOL_THREADS = 8


class ByteRange(NamedTuple):
    shard: int  # number of the shard, counted through all arrays
    offset: int
    nbytes: int


class ShardFiles:
    """The open table shard files of a bundle. Threads may read concurrently."""

    distant = False  # True if bytes come over a network
    # Advice for bytes that cannot be read, are too few, or are damaged.
    if_unreadable = "check the storage device"
    if_short = "the file was truncated while open: copy it again"
    if_damaged = "the file is damaged: run stem-edge verify, then copy or export the bundle again"

    def __init__(self, grids: Sequence[ShardGrid]) -> None:
        self._opened, self._nbytes = list[int](), 0
        self._pool: ThreadPoolExecutor | None = None
        self._paths = [str(grid.shard_path(n)) for grid in grids for n in range(grid.shards)]
        try:
            for grid in grids:
                for shard in range(grid.shards):
                    self._opened.append(grid.open_shard(shard))
        except BaseException:
            self.close()
            raise
        if not hasattr(os, "posix_fadvise"):
            self._pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="stem-edge-read")

    def name(self, shard: int) -> str:
        return self._paths[shard]

    def read(self, pieces: Sequence[ByteRange], buffers: Sequence[U8]) -> list[int | OSError]:
        """Fill buffers; return bytes read (fewer only at a shard's end), or an error, for each."""
        self._nbytes += sum([piece.nbytes for piece in pieces])
        if len(pieces) > 1:
            if self._pool is not None:
                return list(self._pool.map(self._fill, pieces, buffers))
            self.ahead(pieces)
        return list(map(self._fill, pieces, buffers))

    def _fill(self, piece: ByteRange, buffer: U8) -> int | OSError:
        try:
            return disk.fill(self._opened[piece.shard], buffer.data, piece.offset)
        except OSError as error:
            return error

    def ahead(self, pieces: Sequence[ByteRange]) -> None:
        """Ask the OS to start reading these byte ranges. Returns immediately; guarantees nothing."""
        if hasattr(os, "posix_fadvise"):
            for piece in pieces:
                self._advise(piece, os.POSIX_FADV_WILLNEED)

    def before_retry(self, piece: ByteRange) -> None:
        """Drop a damaged byte range from the OS's page cache, so that the next read goes to the disk."""
        if hasattr(os, "posix_fadvise"):  # elsewhere its cached copy is read again
            self._advise(piece, os.POSIX_FADV_DONTNEED)

    def _advise(self, piece: ByteRange, advice: int) -> None:
        with contextlib.suppress(OSError):  # some file systems take no advice
            os.posix_fadvise(self._opened[piece.shard], piece.offset, piece.nbytes, advice)

    def counters(self) -> RowCounters:
        return RowCounters(bytes_read=self._nbytes)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        while self._opened:  # popped, so that closing twice cannot close a descriptor in new use
            disk.close(self._opened.pop())

    def __del__(self) -> None:
        self.close()  # because a model can be dropped without closing it
