"""Reads records of a table store by number, and checks them. Caches nothing."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeAlias

import numpy as np

from stem_edge.errors import BundleError, InputError, RowReadError
from stem_edge.numerics.quantize import I64, U8
from stem_edge.runtime.rows.files import ByteRange, ShardFiles
from stem_edge.runtime.rows.rows import EMPTY, READ_AT_ONCE, FlashName, RowCounters
from stem_edge.tables.shards import ShardGrid, TableStore, damage, open_table_store
from stem_edge.tables.store import CRC_NBYTES, TableFormat

if TYPE_CHECKING:
    from stem_edge.runtime.rows.remote import RemoteShards

Shards: TypeAlias = "ShardFiles | RemoteShards"


class RowStore:
    """Reads the records of one table store. Threads may read concurrently. A context manager."""

    def __init__(self, tables: TableStore, shards: Shards) -> None:
        self._shards, self.distant = shards, shards.distant
        self.layout = tables.format.tables  # of records as `read` returns them
        self.tokens = tables.format.tokens  # row ids below this number are token ids
        # Token id -> record number; None if they are equal. The last element maps EMPTY (-1) to EMPTY.
        self._index = None if tables.index is None else np.append(tables.index, np.int32(EMPTY))
        # Of each shard: its array, and the number of its first record.
        self._grids, self._starts, first = list[ShardGrid](), list[int](), 0
        for grid in tables.grids:
            for shard in range(grid.shards):
                self._grids.append(grid)
                self._starts.append(first)
                first += grid.shard_records(shard)

    def records_of(self, row_ids: I64) -> I64:
        return row_ids if self._index is None else self._index[row_ids].astype(np.int64)

    def read(self, numbers: I64) -> U8:
        """Read records by number: uint8 [n, record_nbytes]. Ascending numbers [n] are read fastest.

        Raises RowReadError, naming shard and offset, if a record is unreadable or damaged.
        """
        pieces = list(map(self._piece, numbers.tolist()))
        # A record is read together with the checksum that follows it.
        buffers = np.empty((len(pieces), self.layout.record_nbytes + CRC_NBYTES), np.uint8)
        # Network reads are split into parts, because responses take memory in addition to the records.
        step = READ_AT_ONCE if self.distant else max(1, len(pieces))
        for at in range(0, len(pieces), step):
            part = slice(at, at + step)
            self._read(numbers[part].tolist(), pieces[part], buffers[part])
        return buffers[:, :-CRC_NBYTES]

    def ahead(self, numbers: I64) -> None:
        """Ask the OS to start reading records. Returns immediately; guarantees nothing."""
        self._shards.ahead(list(map(self._piece, numbers.tolist())))

    def _piece(self, number: int) -> ByteRange:
        if not self._starts:
            raise InputError("the table store is closed; open it again")
        shard = bisect_right(self._starts, number) - 1
        stride = self._grids[shard].stride
        return ByteRange(shard, (number - self._starts[shard]) * stride, stride)

    def _read(self, numbers: list[int], pieces: Sequence[ByteRange], buffers: U8) -> None:
        """Read byte ranges into buffers; retry failed reads. numbers: record numbers for messages."""
        grids = [self._grids[piece.shard] for piece in pieces]
        plain = [grid.layout.row_type == self.layout.row_type for grid in grids]
        read = [
            buffer if direct else np.empty(piece.nbytes, np.uint8)
            for buffer, direct, piece in zip(buffers, plain, pieces, strict=True)
        ]
        found = self._shards.read(pieces, read)
        for at, (grid, number) in enumerate(zip(grids, numbers, strict=True)):
            if self._fault(found[at], read[at]):
                self._read_again(number, pieces[at], read[at])
            if not plain[at]:
                from stem_edge.tables.widening import widen  # only for rare tables

                record = read[at][None, :-CRC_NBYTES]
                buffers[at, :-CRC_NBYTES] = widen(grid.layout, record, self.layout)[0]

    def _read_again(self, number: int, piece: ByteRange, buffer: U8) -> None:
        """Retry a failed read once, because the fault may be temporary. Raises RowReadError."""
        self._shards.before_retry(piece)
        (found,) = self._shards.read([piece], [buffer])
        if fault := self._fault(found, buffer):
            where = f"{self._shards.name(piece.shard)}: record {number} at byte {piece.offset}"
            raise RowReadError(f"{where}: {fault}")

    def _fault(self, found: int | OSError, buffer: U8) -> str:
        """Return a message for a failed read, or "". found: number of bytes read, or the error."""
        if isinstance(found, OSError):
            return f"{found.strerror or found}; {self._shards.if_unreadable}"
        if found != len(buffer):
            return f"only {found} of {len(buffer)} bytes were read; {self._shards.if_short}"
        said = damage(buffer)
        return said and f"{said}; {self._shards.if_damaged}"

    def counters(self) -> RowCounters:
        return self._shards.counters()

    def close(self) -> None:
        self._starts.clear()
        self._shards.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_store(
    root: Path,
    format: TableFormat,
    flash: FlashName | None = None,
    url: str | None = None,
) -> RowStore:
    """Open a table store folder. Raises BundleError if it is damaged or not in `format`.

    flash: device whose speed is emulated. url: location of the shards, if not in the folder. Raises
    InputError for a url that fsspec cannot open.
    """
    tables = open_table_store(root)
    if tables.format != format:
        raise BundleError(
            f"{root}: its records are {tables.format}, expected {format} as in the manifest; the "
            "files are of different bundles: export again"
        )
    return RowStore(tables, open_shards(tables, url, flash))


def open_shards(tables: TableStore, url: str | None, flash: FlashName | None = None) -> Shards:
    """Open shards in the store's folder, or below a URL. Raises BundleError, InputError."""
    if url is not None:
        from stem_edge.runtime.rows.remote import RemoteShards  # only for remote tables

        return RemoteShards(tables, url)
    if flash is not None:
        from stem_edge.runtime.rows.emulated_flash import SlowFiles  # only for measurements

        return SlowFiles(tables.grids, flash)
    return ShardFiles(tables.grids)
