"""The row store: token ids -> records, read from flash and checked. Knows offsets, not policy.

Two ways to read behind one interface. `pread` (default) reports a bad disk as an error. `mmap` copies
from a memory map; a file that is cut while it is mapped kills the process by SIGBUS, so it is an
opt-in. Both check each record's crc32c.

On Linux the prefetch *is* the advice call: posix_fadvise(WILLNEED) on every record makes the kernel
read at full queue depth while the caller computes, and the read that follows finds the pages. Where
there is no such call, a small pool of threads reads instead.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, Self, get_args

import numpy as np
import numpy.typing as npt

from stem_edge.errors import BundleError, InputError, RowReadError
from stem_edge.quantize import U8
from stem_edge.rows import RecordLayout
from stem_edge.runtime.flash import EmulatedFlash
from stem_edge.runtime.machine import own_pages
from stem_edge.shards import CRC_NBYTES, ShardGrid, crc32c, open_grid

ReadMode = Literal["pread", "mmap"]
READ_MODES: tuple[ReadMode, ...] = get_args(ReadMode)
# Enough to keep a phone's flash busy; more gained little where it was measured (design: 8 -> 32).
POOL_THREADS = 8


class RowStore:
    """Reads records of one table store. Threads may read at once; a context manager that closes.

    Raises BundleError when a shard has a wrong size or index, RowReadError from `read`.
    """

    def __init__(
        self, grid: ShardGrid, reads: ReadMode = "pread", flash: EmulatedFlash | None = None
    ) -> None:
        if reads not in READ_MODES:
            raise InputError(f"reads is {reads!r}; expected one of {', '.join(READ_MODES)}")
        self._grid, self._flash = grid, flash
        self._files: list[io.FileIO] = []
        self._maps: list[mmap.mmap] = []
        self._pool: ThreadPoolExecutor | None = None
        self._seek_lock = threading.Lock()
        self.bytes_read = 0  # of records and their checksums, since opening
        try:
            for shard in range(grid.shards):
                grid.check_shard(shard)
                self._open_shard(grid.shard_path(shard), mapped=reads == "mmap")
        except BaseException:
            self.close()
            raise
        if not hasattr(os, "posix_fadvise"):
            self._pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="stem-edge-read")

    def _open_shard(self, path: Path, *, mapped: bool) -> None:
        try:
            file = io.FileIO(path)
            self._files.append(file)
            if mapped:
                self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except OSError as error:
            raise BundleError(
                f"{path}: cannot open this shard ({error.strerror}); check permissions and the "
                "limits of open files and memory (ulimit -n, ulimit -v)"
            ) from error

    @property
    def layout(self) -> RecordLayout:
        """Byte layout of the records."""
        return self._grid.layout

    def advise(self, token_ids: npt.NDArray[np.int64]) -> None:
        """Ask the system to start reading these records; returns at once, promises nothing."""
        if not hasattr(os, "posix_fadvise"):
            return
        for token in token_ids.tolist():
            shard, offset = self._place(token)
            with contextlib.suppress(OSError):  # a file system may not take advice
                os.posix_fadvise(
                    self._files[shard].fileno(), offset, self._grid.stride, os.POSIX_FADV_WILLNEED
                )

    def read(self, token_ids: npt.NDArray[np.int64]) -> U8:
        """Records uint8 [n, record_nbytes] of the ids [n]; ascending ids read fastest.

        Raises RowReadError naming shard and offset when a record is unreadable or damaged; then no
        record of the call is returned.
        """
        started = time.perf_counter()
        sealed = own_pages((len(token_ids), self._grid.stride), np.uint8)
        jobs = list(zip(token_ids.tolist(), sealed, strict=True))
        if self._pool is not None and len(jobs) > 1:
            list(self._pool.map(lambda job: self._read_one(*job), jobs))
        else:
            if len(jobs) > 1:
                self.advise(token_ids)
            for token, buffer in jobs:
                self._read_one(token, buffer)
        if self._flash is not None:
            self._flash.wait(started, len(jobs), sealed.nbytes)
        self.bytes_read += sealed.nbytes
        return sealed[:, :-CRC_NBYTES]

    def _read_one(self, token: int, buffer: U8) -> None:
        shard, offset = self._place(token)
        try:
            count = self._fill(shard, offset, buffer)
        except OSError as error:
            raise self._error(token, f"{error.strerror}; check the storage device") from error
        if count != len(buffer):
            raise self._error(token, f"{count} of {len(buffer)} bytes; the file was cut while open")
        expected = int.from_bytes(buffer[-CRC_NBYTES:].tobytes(), "little")
        found = crc32c(buffer[:-CRC_NBYTES])
        if found != expected:
            raise self._error(
                token,
                f"its crc32c is {found:08x}, expected {expected:08x}; the file is damaged: run "
                "stem-edge verify, then copy or export the bundle again",
            )

    def _error(self, token: int, reason: str) -> RowReadError:
        shard, offset = self._place(token)
        path = self._grid.shard_path(shard)
        return RowReadError(f"{path}: record of token {token} at byte {offset}: {reason}")

    def _place(self, token: int) -> tuple[int, int]:
        """Shard and byte offset of a token's record."""
        if not 0 <= token < self.layout.vocab_size:
            raise InputError(f"token id {token} is not in 0..{self.layout.vocab_size - 1}")
        shard, place = divmod(token, self._grid.records_per_shard)
        return shard, place * self._grid.stride

    def _fill(self, shard: int, offset: int, buffer: U8) -> int:
        """Read into the buffer; returns the bytes read, fewer only at the end of the file."""
        if self._maps:
            # bytes and not a view: a view that a traceback keeps alive would bar close().
            piece = self._maps[shard][offset : offset + len(buffer)]
            buffer[: len(piece)] = np.frombuffer(piece, np.uint8)
            return len(piece)
        view, done = buffer.data, 0
        while done < len(buffer):
            count = self._read_at(self._files[shard], offset + done, view[done:])
            if not count:
                break
            done += count
        return done

    def _read_at(self, file: io.FileIO, offset: int, view: memoryview) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(file.fileno(), [view], offset)
        with self._seek_lock:  # Windows has no positional read; threads share the file's position
            file.seek(offset)
            return file.readinto(view) or 0

    def close(self) -> None:
        """Close all files; further reads fail."""
        if self._pool is not None:
            self._pool.shutdown()
        for mapped in self._maps:
            mapped.close()
        for file in self._files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_store(
    root: Path,
    layout: RecordLayout,
    reads: ReadMode = "pread",
    flash: EmulatedFlash | None = None,
) -> RowStore:
    """Open the table store in the folder `root`, whose records must have this layout."""
    grid = open_grid(root)
    if grid.layout != layout:
        raise BundleError(
            f"{root}: its records are {grid.layout}, the manifest says {layout}; the files are of "
            "different bundles: export again"
        )
    return RowStore(grid, reads, flash)
