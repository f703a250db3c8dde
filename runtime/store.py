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
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple, Self, get_args

import numpy as np
import numpy.typing as npt

from stem_edge import disk
from stem_edge.errors import BundleError, InputError, RowReadError
from stem_edge.quantize import I32, U8
from stem_edge.rows import RecordLayout
from stem_edge.runtime.flash import EmulatedFlash
from stem_edge.runtime.machine import own_pages
from stem_edge.shards import CRC_NBYTES, ShardGrid, crc32c
from stem_edge.table_store import TableFormat, TableStore, open_table_store

ReadMode = Literal["pread", "mmap"]
READ_MODES: tuple[ReadMode, ...] = get_args(ReadMode)
# Enough to keep a phone's flash busy; more gained little where it was measured (design: 8 -> 32).
POOL_THREADS = 8


class _Place(NamedTuple):
    """Where a record and its checksum lie."""

    number: int
    array: int
    shard: int
    offset: int
    nbytes: int


class RowStore:
    """Reads records of one table store. Threads may read at once; a context manager that closes.

    Raises BundleError when a shard has a wrong size or index, RowReadError from `read`.
    """

    def __init__(
        self, tables: TableStore, reads: ReadMode = "pread", flash: EmulatedFlash | None = None
    ) -> None:
        if reads not in READ_MODES:
            raise InputError(f"reads is {reads!r}; expected one of {', '.join(READ_MODES)}")
        self._tables, self._flash = tables, flash
        self._files: list[list[int]] = [[] for _ in tables.grids]  # of each array
        self._maps: list[list[mmap.mmap]] = [[] for _ in tables.grids]
        self._pool: ThreadPoolExecutor | None = None
        self.bytes_read = 0  # of records and their checksums, since opening
        try:
            for array, grid in enumerate(tables.grids):
                for shard in range(grid.shards):
                    self._open_shard(array, grid, shard, mapped=reads == "mmap")
        except BaseException:
            self.close()
            raise
        if not hasattr(os, "posix_fadvise"):
            self._pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="stem-edge-read")

    def _open_shard(self, array: int, grid: ShardGrid, shard: int, *, mapped: bool) -> None:
        descriptor = grid.open_shard(shard)
        self._files[array].append(descriptor)
        if not mapped:
            return
        try:
            self._maps[array].append(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
        except OSError as error:
            raise BundleError(
                f"{grid.shard_path(shard)}: cannot map this shard into memory "
                f'({error.strerror or error}); load with reads="pread", which maps nothing, or '
                "raise the limit of memory (ulimit -v)"
            ) from error

    @property
    def layout(self) -> RecordLayout:
        """Byte layout of the records that are read."""
        return self._tables.format.tables

    @property
    def tokens(self) -> int:
        """Tokens that have a record."""
        return self._tables.format.tokens

    @property
    def index(self) -> I32 | None:
        """Record of each token; None: the one of its own number."""
        return self._tables.index

    def records_of(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Numbers of the records [T] that hold the rows of tokens [T]."""
        return tokens if self.index is None else self.index[tokens].astype(np.int64)

    def advise(self, numbers: npt.NDArray[np.int64]) -> None:
        """Ask the system to start reading these records; returns at once, promises nothing."""
        if not hasattr(os, "posix_fadvise"):
            return
        for number in numbers.tolist():
            at = self._place(number)
            file = self._file(at)
            with contextlib.suppress(OSError):  # a file system may not take advice
                os.posix_fadvise(file, at.offset, at.nbytes, os.POSIX_FADV_WILLNEED)

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
        if at.array == 0:
            self._read_sealed(at, buffer)
        else:
            sealed = np.empty(at.nbytes, np.uint8)
            self._read_sealed(at, sealed)
            self._tables.format.widen(sealed[None, :-CRC_NBYTES], buffer[None, :-CRC_NBYTES])
        return at.nbytes

    def _read_sealed(self, at: _Place, buffer: U8) -> None:
        """Fill the buffer. What fails once may be a bus that was disturbed: it is read once more."""
        if self._try_sealed(at, buffer) is None:
            return
        self._forget_pages(at)
        if reason := self._try_sealed(at, buffer):
            path = self._tables.grids[at.array].shard_path(at.shard)
            raise RowReadError(f"{path}: record {at.number} at byte {at.offset}: {reason}")

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

    def _forget_pages(self, at: _Place) -> None:
        """Have the next read come from the medium, and not from the system's copy of the last."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._file(at), at.offset, at.nbytes, os.POSIX_FADV_DONTNEED)

    def _place(self, number: int) -> _Place:
        if not 0 <= number < self.layout.records:
            raise InputError(
                f"record {number} is not in 0..{self.layout.records - 1}; give numbers of this store"
            )
        array, row = self._tables.grid_of(number)
        grid = self._tables.grids[array]
        shard, place = divmod(row, grid.records_per_shard)
        return _Place(number, array, shard, place * grid.stride, grid.stride)

    def _fill(self, at: _Place, buffer: U8) -> int:
        """Read into the buffer; returns the bytes read, fewer only at the end of the file."""
        if self._maps[at.array]:
            # bytes and not a view: a view that a traceback keeps alive would bar close().
            piece = self._maps[at.array][at.shard][at.offset : at.offset + len(buffer)]
            buffer[: len(piece)] = np.frombuffer(piece, np.uint8)
            return len(piece)
        return disk.fill(self._file(at), buffer.data, at.offset)

    def _file(self, at: _Place) -> int:
        """Descriptor of a shard. Raises ValueError once the store is closed."""
        if not (files := self._files[at.array]):
            raise ValueError("the table store is closed")
        return files[at.shard]

    def close(self) -> None:
        """Close all files; further reads fail."""
        if self._pool is not None:
            self._pool.shutdown()
        for mapped in chain(*self._maps):
            mapped.close()
        for files in self._files:
            while files:  # closing twice must not close what got this number since
                disk.close(files.pop())

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
