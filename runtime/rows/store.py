"""The row store: reads records by number and checks them. Knows offsets, not policy.

Files are read by `pread`, which reports a bad disk as an error, or copied from a memory map (`mmap`),
which is opt-in because truncating a mapped file kills the process with SIGBUS. Where only the first
rows of a record are wanted, the rest is zeros.

On Linux posix_fadvise(WILLNEED) on every record lets the kernel read at full queue depth, and the
reads that follow find the pages in memory. Elsewhere a small pool of threads reads.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from stem_edge.errors import BundleError, InputError, RowReadError
from stem_edge.numerics.quantize import I64, U8
from stem_edge.runtime.rows.records import EMPTY, READ_AT_ONCE, Flags, Records, RowCounters
from stem_edge.runtime.rows.shards import ByteRange, Fill, ShardFiles, Shards
from stem_edge.system.memory import pages_to_fill
from stem_edge.tables.shards import CRC_NBYTES, ShardGrid
from stem_edge.tables.store import TableFormat, TableStore, open_table_store

if TYPE_CHECKING:
    from stem_edge.runtime.rows.emulated_flash import EmulatedFlash

# Enough to keep a phone's flash busy; going from 8 to 32 gained little where it was measured.
POOL_THREADS = 8


class _Job(NamedTuple):
    """A record to read."""

    number: int
    grid: ShardGrid
    piece: ByteRange  # of its bytes and checksums, whole or only the rows that prompts need
    buffer: U8  # [record_nbytes + CRC_NBYTES]


class RowStore(Records):
    """Records of one table store. Threads may read at once; as a context manager, it closes."""

    def __init__(
        self,
        tables: TableStore,
        shards: Shards,
        flash: EmulatedFlash | None = None,
        prompt_rows: int = 0,
    ) -> None:
        self._format, self._shards, self._flash = tables.format, shards, flash
        self.layout = tables.format.tables  # of records as `read` returns them
        self._prompt_rows, grid = prompt_rows, tables.grids[0]
        # True if the first rows of a record can be read alone.
        self.splits = 0 < self._first_nbytes(grid) < grid.stride
        self.tokens = tables.format.tokens  # count of tokens that have a record
        # Token -> record; None: record i is token i's. EMPTY, as the last index, stands for none.
        self._index = None if tables.index is None else np.append(tables.index, np.int32(EMPTY))
        self.bytes_read = 0  # from flash: records and their checksums, since opening
        self.traffic = shards.traffic  # over a network; None if the shards are on flash
        self.distant = shards.traffic is not None
        # All shards of all arrays in order, with the bytes of a record's first rows, and of a whole
        # one with checksums; and the number of each one's first record.
        self._grids = list[tuple[ShardGrid, tuple[int, int]]]()
        self._starts, first = list[int](), 0
        for grid in tables.grids:
            sizes = self._first_nbytes(grid), grid.stride
            for shard in range(grid.shards):
                self._grids.append((grid, sizes))
                self._starts.append(first)
                first += grid.shard_records(shard)
        self._pool: ThreadPoolExecutor | None = None
        if not hasattr(os, "posix_fadvise"):
            self._pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="stem-edge-read")

    def _first_nbytes(self, grid: ShardGrid) -> int:
        """Return the bytes of a record's first rows, with checksums."""
        pieces = -(-self._prompt_rows * grid.pieces // len(self.layout.layers))
        return pieces * grid.piece_stride

    def records_of(self, row_ids: I64) -> I64:
        return row_ids if self._index is None else self._index[row_ids].astype(np.int64)

    def read(self, numbers: I64, whole: Flags | None = None) -> U8:
        """Read records uint8 [n, record_nbytes] by their numbers [n]; ascending ones read fastest.

        whole [n]: False where only the first rows are needed; default: all True. Raises
        RowReadError, naming shard and offset, if any record is unreadable or damaged.
        """
        started = time.perf_counter()
        # A record in one piece is read together with the checksum that follows it.
        buffers = pages_to_fill((len(numbers), self.layout.record_nbytes + CRC_NBYTES))
        flags = [True] * len(numbers) if whole is None else whole.tolist()
        jobs = list(map(self._job, numbers.tolist(), flags, buffers))
        # Over a network in parts, because answers are held beside the records.
        step = READ_AT_ONCE if self.traffic is not None else max(1, len(jobs))
        for at in range(0, len(jobs), step):
            self._read_jobs(jobs[at : at + step])
        nbytes = sum([job.piece.nbytes for job in jobs])
        if self._flash is not None:
            self._flash.wait(started, len(jobs), nbytes)
        self.bytes_read += nbytes if self.traffic is None else 0
        return buffers[:, :-CRC_NBYTES]

    def ahead(self, numbers: I64, whole: Flags) -> None:
        if self.traffic is None:
            nothing = np.empty((len(numbers), 0), np.uint8)
            jobs = map(self._job, numbers.tolist(), whole.tolist(), nothing)
            self._shards.ahead([job.piece for job in jobs])

    def _read_jobs(self, jobs: list[_Job]) -> None:
        fill = self._shards.ahead([job.piece for job in jobs])
        if self._pool is not None and len(jobs) > 1:
            list(self._pool.map(partial(self._read_one, fill), jobs))
            return
        for job in jobs:
            self._read_one(fill, job)

    def _job(self, number: int, whole: bool, buffer: U8) -> _Job:
        """Find a record. Raises InputError for an unknown number, ValueError after `close`."""
        if not self._starts:
            raise ValueError("the table store is closed")
        if not 0 <= number < self.layout.records:
            raise InputError(
                f"record {number} is not in 0..{self.layout.records - 1}; give numbers of this store"
            )
        shard = bisect_right(self._starts, number) - 1
        grid, sizes = self._grids[shard]
        offset = (number - self._starts[shard]) * sizes[True]
        return _Job(number, grid, ByteRange(shard, offset, sizes[whole]), buffer)

    def _read_one(self, fill: Fill, job: _Job) -> None:
        """Fill the buffer with a record."""
        grid = job.grid
        widened = grid.layout.row_type != self.layout.row_type
        if grid.pieces == 1 and not widened:
            self._read_checked(fill, job, job.buffer)
            return
        checked = np.empty(job.piece.nbytes, np.uint8)
        self._read_checked(fill, job, checked)
        record = grid.without_checksums(checked[None])
        if widened:
            from stem_edge.tables.widening import widen  # for rare tables alone

            stored = np.zeros((1, grid.layout.record_nbytes), np.uint8)
            stored[:, : record.size] = record
            record = widen(grid.layout, stored, self.layout)
        job.buffer[: record.size] = record

    def _read_checked(self, fill: Fill, job: _Job, buffer: U8) -> None:
        """Fill the buffer; try once more if that fails, because a bus may have been disturbed."""
        if self._try(fill, job, buffer) is None:
            return
        self._shards.forget(job.piece)
        if reason := self._try(self._shards.fill, job, buffer):
            shard, offset, _ = job.piece
            raise RowReadError(
                f"{self._shards.name(shard)}: record {job.number} at byte {offset}: {reason}"
            )

    def _try(self, fill: Fill, job: _Job, buffer: U8) -> str | None:
        """Fill the buffer; on failure, return the reason and what to do."""
        try:
            count = fill(job.piece, buffer)
        except OSError as error:
            return f"{error.strerror or error}; {self._shards.advice.unreadable}"
        if count != len(buffer):
            return f"only {count} of {len(buffer)} bytes were read; {self._shards.advice.short}"
        if (damaged := job.grid.first_damaged(buffer[None])) is None:
            return None
        return f"{damaged[1]}; {self._shards.advice.damaged}"

    def counters(self) -> RowCounters:
        if (traffic := self.traffic) is None:
            return RowCounters(bytes_read=self.bytes_read)
        return RowCounters(network_bytes=traffic.nbytes, network_reads=traffic.requests)

    def stop(self) -> None:
        self._shards.stop()

    def close(self) -> None:
        """Close all shards; later reads fail."""
        if self._pool is not None:
            self._pool.shutdown()
        self._starts.clear()
        self._shards.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_store(
    root: Path,
    format: TableFormat,
    flash: EmulatedFlash | None = None,
    prompt_rows: int = 0,
    url: str | None = None,
) -> RowStore:
    """Open the table store in the folder `root`. Raises BundleError if its format differs.

    prompt_rows: rows of a record that a prompt needs (ModelConfig); 0: all. url: where its shards
    are, if not in the folder. Raises BundleError when a shard has a wrong size or index, and
    InputError for a url that nothing here can read.
    """
    tables = open_table_store(root)
    if tables.format != format:
        raise BundleError(
            f"{root}: its records are {tables.format}, expected {format} as in the manifest; the "
            "files are of different bundles: export again"
        )
    return RowStore(tables, open_shards(tables, url), flash, prompt_rows)


def open_shards(tables: TableStore, url: str | None) -> Shards:
    """Open shards in the store's folder, or below a url. Raises BundleError, InputError."""
    if url is None:
        return ShardFiles(tables.grids)
    from stem_edge.runtime.rows.remote import RemoteShards  # for tables elsewhere alone

    return RemoteShards(tables, url)
