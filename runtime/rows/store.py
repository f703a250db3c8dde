"""The row store: numbers -> records, read from flash and checked. Knows offsets, not policy.

Two ways to read behind one interface. `pread` (default) reports a bad disk as an error. `mmap` copies
from a memory map; a file that is cut while it is mapped kills the process by SIGBUS, so it is an
opt-in. Both check each record's crc32c.

On Linux the prefetch *is* the advice call: posix_fadvise(WILLNEED) on every record makes the kernel
read at full queue depth while the caller computes, and the read that follows finds the pages. Where
there is no such call, a small pool of threads reads instead.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple, Self, get_args

import numpy as np
import numpy.typing as npt

from stem_edge.errors import BundleError, InputError, RowReadError
from stem_edge.files import disk
from stem_edge.numerics.quantize import U8
from stem_edge.runtime.rows.flash import EmulatedFlash
from stem_edge.system.memory import own_pages
from stem_edge.tables.shards import CRC_NBYTES, ShardGrid, crc32c
from stem_edge.tables.store import TableFormat, TableStore, open_table_store

ReadMode = Literal["pread", "mmap"]
READ_MODES: tuple[ReadMode, ...] = get_args(ReadMode)
# Enough to keep a phone's flash busy; more gained little where it was measured (design: 8 -> 32).
POOL_THREADS = 8


class _Shard(NamedTuple):
    """An open shard file."""

    path: Path
    array: int
    stride: int  # bytes from one record to the next
    file: int
    mapped: mmap.mmap | None


class _Place(NamedTuple):
    """Where a record and its checksum lie."""

    number: int
    shard: _Shard
    offset: int


class RowStore:
    """Reads records of one table store. Threads may read at once; a context manager that closes.

    Raises BundleError when a shard has a wrong size or index, RowReadError from `read`.
    """

    def __init__(
        self, tables: TableStore, reads: ReadMode = "pread", flash: EmulatedFlash | None = None
    ) -> None:
        self._format, self._flash = tables.format, flash
        self.layout = tables.format.tables  # of the records that are read
        self.tokens = tables.format.tokens  # that have a record
        self.index = tables.index  # record of each token; None: the one of its own number
        self.bytes_read = 0  # of records and their checksums, since opening
        self._pool: ThreadPoolExecutor | None = None
        # Every shard of every array, and the number of its first record: both in order.
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
        opened = _Shard(path, array, grid.stride, descriptor, None)
        self._shards.append(opened)
        if not mapped:
            return
        try:
            mapping = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise BundleError(
                f"{path}: cannot map this shard into memory "
                f'({error.strerror or error}); load with reads="pread", which maps nothing, or '
                "raise the limit of memory (ulimit -v)"
            ) from error
        self._shards[-1] = opened._replace(mapped=mapping)

    def records_of(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Numbers of the records [T] that hold the rows of tokens [T]."""
        return tokens if self.index is None else self.index[tokens].astype(np.int64)

    def advise(self, numbers: npt.NDArray[np.int64]) -> None:
        """Ask the system to start reading these records; returns at once, promises nothing."""
        if not hasattr(os, "posix_fadvise"):
            return
        for number in numbers.tolist():
            shard, offset = self._place(number)[1:]
            with contextlib.suppress(OSError):  # a file system may not take advice
                os.posix_fadvise(shard.file, offset, shard.stride, os.POSIX_FADV_WILLNEED)

    def read(self, numbers: npt.NDArray[np.int64]) -> U8:
        """Records uint8 [n, record_nbytes] of these numbers [n]; ascending ones read fastest.

        Raises RowReadError naming shard and offset when a record is unreadable or damaged; then no
        record of the call is returned.
        """
        started = time.perf_counter()
        sealed = own_pages((len(numbers), self.layout.record_nbytes + CRC_NBYTES), np.uint8)
        jobs = list(zip(numbers.tolist(), sealed, strict=True))
        if self._pool is not None and len(jobs) > 1:
            nbytes = sum(self._pool.map(lambda job: self._read_one(*job), jobs))
        else:
            if len(jobs) > 1:
                self.advise(numbers)
            nbytes = sum(self._read_one(number, buffer) for number, buffer in jobs)
        if self._flash is not None:
            self._flash.wait(started, len(jobs), nbytes)
        self.bytes_read += nbytes
        return sealed[:, :-CRC_NBYTES]

    def _read_one(self, number: int, buffer: U8) -> int:
        """Fill the buffer with a record; returns the bytes read."""
        at = self._place(number)
        if at.shard.array == 0:
            self._read_sealed(at, buffer)
        else:
            sealed = np.empty(at.shard.stride, np.uint8)
            self._read_sealed(at, sealed)
            self._format.widen(sealed[None, :-CRC_NBYTES], buffer[None, :-CRC_NBYTES])
        return at.shard.stride

    def _read_sealed(self, at: _Place, buffer: U8) -> None:
        """Fill the buffer. What fails once may be a bus that was disturbed: it is read once more."""
        if self._try_sealed(at, buffer) is None:
            return
        if hasattr(os, "posix_fadvise"):  # from the medium, and not the system's copy of the last
            with contextlib.suppress(OSError):
                shard = at.shard
                os.posix_fadvise(shard.file, at.offset, shard.stride, os.POSIX_FADV_DONTNEED)
        if reason := self._try_sealed(at, buffer):
            raise RowReadError(f"{at.shard.path}: record {at.number} at byte {at.offset}: {reason}")

    def _try_sealed(self, at: _Place, buffer: U8) -> str | None:
        """Fill the buffer; returns why that failed, and what to do."""
        try:
            count = self._fill(at, buffer)
        except OSError as error:
            return f"{error.strerror or error}; check the storage device"
        if count != len(buffer):
            return f"{count} of {len(buffer)} bytes; the file was cut while open: copy it again"
        expected = int.from_bytes(buffer[-CRC_NBYTES:].tobytes(), "little")
        found = crc32c(buffer[:-CRC_NBYTES])
        if found == expected:
            return None
        return (
            f"its crc32c is {found:08x}, expected {expected:08x}; the file is damaged: run "
            "stem-edge verify, then copy or export the bundle again"
        )

    def _place(self, number: int) -> _Place:
        """Raises InputError for a number that is none, ValueError once the store is closed."""
        if not self._shards:
            raise ValueError("the table store is closed")
        if not 0 <= number < self.layout.records:
            raise InputError(
                f"record {number} is not in 0..{self.layout.records - 1}; give numbers of this store"
            )
        which = bisect_right(self._starts, number) - 1
        shard = self._shards[which]
        return _Place(number, shard, (number - self._starts[which]) * shard.stride)

    def _fill(self, at: _Place, buffer: U8) -> int:
        """Read into the buffer; returns the bytes read, fewer only at the end of the file."""
        if at.shard.mapped is not None:
            # bytes and not a view: a view that a traceback keeps alive would bar close().
            piece = at.shard.mapped[at.offset : at.offset + len(buffer)]
            buffer[: len(piece)] = np.frombuffer(piece, np.uint8)
            return len(piece)
        return disk.fill(at.shard.file, buffer.data, at.offset)

    def close(self) -> None:
        """Close all files; further reads fail."""
        if self._pool is not None:
            self._pool.shutdown()
        while self._shards:  # closing twice must not close what got this number since
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
) -> RowStore:
    """Open the table store in the folder `root`, which must be of this format."""
    tables = open_table_store(root)
    if tables.format != format:
        raise BundleError(
            f"{root}: its records are {tables.format}, the manifest says {format}; the files are "
            "of different bundles: export again"
        )
    return RowStore(tables, reads, flash)
