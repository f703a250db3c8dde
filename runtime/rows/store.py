"""The row store: reads records by number from flash and checks them. Knows offsets, not policy.

There are two ways to read. `pread`, the default, reports a bad disk as an error. `mmap` copies from a
memory map, and is opt-in because truncating a mapped file kills the process with SIGBUS. Both check
each crc32c.

Tokens of a prompt may need only the first rows of their records, which are then read alone; the rest
of such a record is zeros.

On Linux one thread keeps flash busy: posix_fadvise(WILLNEED) on every record makes the kernel read at
full queue depth, and the reads that follow find the pages in memory. Where that call is missing, a
small pool of threads reads instead.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple, Self, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from stem_edge.errors import BundleError, InputError, RowReadError
from stem_edge.files import disk
from stem_edge.numerics.quantize import U8
from stem_edge.runtime.rows.emulated_flash import EmulatedFlash
from stem_edge.system.memory import own_pages
from stem_edge.tables.shards import CRC_NBYTES, ShardGrid
from stem_edge.tables.store import TableFormat, TableStore, open_table_store

ReadMode = Literal["pread", "mmap"]
Flags: TypeAlias = npt.NDArray[np.bool_]
READ_MODES: tuple[ReadMode, ...] = get_args(ReadMode)
# Enough to keep a phone's flash busy; going from 8 to 32 gained little where it was measured.
POOL_THREADS = 8


class _Shard(NamedTuple):
    """An open shard file."""

    path: Path
    array: int
    grid: ShardGrid
    file: int
    mapped: mmap.mmap | None


class _Job(NamedTuple):
    """A record to read."""

    number: int
    whole: bool  # False: only the rows that prompts need
    buffer: U8  # [record_nbytes + CRC_NBYTES]


class _Place(NamedTuple):
    """Position of a record and its checksum."""

    number: int
    shard: _Shard
    offset: int


class RowStore:
    """Records of one table store. Threads may read at once; as a context manager, it closes.

    Raises BundleError when a shard has a wrong size or index.
    """

    def __init__(
        self,
        tables: TableStore,
        reads: ReadMode = "pread",
        flash: EmulatedFlash | None = None,
        prompt_rows: int = 0,
    ) -> None:
        self._format, self._flash = tables.format, flash
        self.layout = tables.format.tables  # of records as `read` returns them
        self._prompt_rows, grid = prompt_rows, tables.grids[0]
        # True if the first rows of a record can be read alone.
        self.splits = 0 < self._nbytes(grid, whole=False) < grid.stride
        self.tokens = tables.format.tokens  # count of tokens that have a record
        self.index = tables.index  # token -> record; None: the record of its own number
        self.bytes_read = 0  # records and their checksums, since opening
        self._pool: ThreadPoolExecutor | None = None
        # All shards of all arrays in order, and the number of each one's first record.
        self._shards, self._starts = list[_Shard](), list[int]()
        try:
            first = 0
            for array, grid in enumerate(tables.grids):
                for shard in range(grid.shards):
                    self._starts.append(first)
                    self._open_shard(array, grid, shard, mapped=reads == "mmap")
                    first += grid.shard_records(shard)
        except BaseException:
            self.close()
            raise
        if not hasattr(os, "posix_fadvise"):
            self._pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="stem-edge-read")

    def _open_shard(self, array: int, grid: ShardGrid, shard: int, *, mapped: bool) -> None:
        path, descriptor = grid.shard_path(shard), grid.open_shard(shard)
        opened = _Shard(path, array, grid, descriptor, None)
        self._shards.append(opened)
        if not mapped:
            return
        try:
            mapping = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise BundleError(
                f"{path}: cannot map this shard into memory "
                f'({error.strerror or error}); load with reads="pread", which maps nothing, or '
                "raise the limit on virtual memory (ulimit -v)"
            ) from error
        self._shards[-1] = opened._replace(mapped=mapping)

    def records_of(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Numbers [T] of the records that hold the rows of tokens [T]."""
        return tokens if self.index is None else self.index[tokens].astype(np.int64)

    def _nbytes(self, grid: ShardGrid, *, whole: bool) -> int:
        """Return the bytes to read of a record, with checksums."""
        if whole:
            return grid.stride
        pieces = -(-self._prompt_rows * grid.pieces // len(self.layout.layers))
        return pieces * grid.piece_stride

    def _advise(self, jobs: list[_Job]) -> None:
        """Ask the system to start reading these records; returns at once, guarantees nothing."""
        if not hasattr(os, "posix_fadvise"):
            return
        for number, whole, _ in jobs:
            shard, offset = self._place(number)[1:]
            nbytes = self._nbytes(shard.grid, whole=whole)
            with contextlib.suppress(OSError):  # some file systems take no advice
                os.posix_fadvise(shard.file, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def read(self, numbers: npt.NDArray[np.int64], whole: Flags | None = None) -> U8:
        """Read records uint8 [n, record_nbytes] by their numbers [n]; ascending ones read fastest.

        whole [n]: False where only the first rows are needed; default: all True. Raises
        RowReadError, naming shard and offset, if any record is unreadable or damaged.
        """
        started = time.perf_counter()
        # A record in one piece is read together with the checksum that follows it.
        buffers = own_pages((len(numbers), self.layout.record_nbytes + CRC_NBYTES), np.uint8)
        flags = [True] * len(numbers) if whole is None else whole.tolist()
        jobs = list(map(_Job, numbers.tolist(), flags, buffers))
        if self._pool is not None and len(jobs) > 1:
            nbytes = sum(self._pool.map(self._read_one, jobs))
        else:
            if len(jobs) > 1:
                self._advise(jobs)
            nbytes = sum(map(self._read_one, jobs))
        if self._flash is not None:
            self._flash.wait(started, len(jobs), nbytes)
        self.bytes_read += nbytes
        return buffers[:, :-CRC_NBYTES]

    def _read_one(self, job: _Job) -> int:
        """Fill the buffer with a record; return the bytes read."""
        place = self._place(job.number)
        grid = place.shard.grid
        nbytes = self._nbytes(grid, whole=job.whole)
        if place.shard.array == 0 and grid.pieces == 1:
            self._read_checked(place, job.buffer)
            return nbytes
        checked = np.empty(nbytes, np.uint8)
        self._read_checked(place, checked)
        found = grid.without_checksums(checked[None])
        if place.shard.array == 0:
            job.buffer[: found.size] = found
        else:  # rare records, whose codes are narrower in the file
            narrow = np.zeros((1, grid.layout.record_nbytes), np.uint8)
            narrow[:, : found.size] = found
            self._format.widen(narrow, job.buffer[None, :-CRC_NBYTES])
        return nbytes

    def _read_checked(self, place: _Place, buffer: U8) -> None:
        """Fill the buffer; try once more if that fails, because a bus may have been disturbed."""
        if self._try(place, buffer) is None:
            return
        shard = place.shard
        if hasattr(os, "posix_fadvise"):  # otherwise its cached copy would be read again
            with contextlib.suppress(OSError):
                os.posix_fadvise(shard.file, place.offset, len(buffer), os.POSIX_FADV_DONTNEED)
        if reason := self._try(place, buffer):
            raise RowReadError(
                f"{shard.path}: record {place.number} at byte {place.offset}: {reason}"
            )

    def _try(self, place: _Place, buffer: U8) -> str | None:
        """Fill the buffer; on failure, return the reason and what to do."""
        try:
            count = self._fill(place, buffer)
        except OSError as error:
            return f"{error.strerror or error}; check the storage device"
        if count != len(buffer):
            return (
                f"only {count} of {len(buffer)} bytes were read; the file was truncated while open: "
                "copy it again"
            )
        if (damaged := place.shard.grid.first_damaged(buffer[None])) is None:
            return None
        return (
            f"{damaged[1]}; the file is damaged: run stem-edge verify, then copy or export the "
            "bundle again"
        )

    def _place(self, number: int) -> _Place:
        """Find a record. Raises InputError for an unknown number, ValueError after `close`."""
        if not self._shards:
            raise ValueError("the table store is closed")
        if not 0 <= number < self.layout.records:
            raise InputError(
                f"record {number} is not in 0..{self.layout.records - 1}; give numbers of this store"
            )
        which = bisect_right(self._starts, number) - 1
        shard = self._shards[which]
        return _Place(number, shard, (number - self._starts[which]) * shard.grid.stride)

    def _fill(self, place: _Place, buffer: U8) -> int:
        """Read into the buffer; return the bytes read, fewer only at the end of the file."""
        shard, offset = place.shard, place.offset
        if shard.mapped is not None:
            # Bytes rather than a view, because a view kept alive by a traceback would block close().
            piece = shard.mapped[offset : offset + len(buffer)]
            buffer[: len(piece)] = np.frombuffer(piece, np.uint8)
            return len(piece)
        return disk.fill(shard.file, buffer.data, offset)

    def close(self) -> None:
        """Close all files; later reads fail."""
        if self._pool is not None:
            self._pool.shutdown()
        while self._shards:  # popped, so that closing twice cannot close a descriptor in new use
            shard = self._shards.pop()
            if shard.mapped is not None:
                shard.mapped.close()
            disk.close(shard.file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_store(
    root: Path,
    format: TableFormat,
    reads: ReadMode = "pread",
    flash: EmulatedFlash | None = None,
    prompt_rows: int = 0,
) -> RowStore:
    """Open the table store in the folder `root`. Raises BundleError if its format differs.

    prompt_rows: rows of a record that a prompt needs (ModelConfig); 0: all.
    """
    tables = open_table_store(root)
    if tables.format != format:
        raise BundleError(
            f"{root}: its records are {tables.format}, expected {format} as in the manifest; the "
            "files are of different bundles: export again"
        )
    return RowStore(tables, reads, flash, prompt_rows)
