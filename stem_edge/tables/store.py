"""The format of a table store on disk: a zarr v3 group.

    tables.zarr/zarr.json        group; its attributes contain a TableFormat
    tables.zarr/records/         array of records (stem_edge.tables.shards)
    tables.zarr/rare_records/    optional: records of rare tokens, with fewer bits
    tables.zarr/index/           optional: array int32 [V] of one chunk, token -> record; the chunk
                                 is little-endian, followed by its crc32c (uint32)

Record numbers continue from the first array to the second. Without an index, token t has record t.
"""

from __future__ import annotations

from functools import cached_property

import msgspec

from stem_edge.limits import MAX_RECORDS
from stem_edge.tables.codecs import form_of
from stem_edge.tables.rows import RecordLayout

ATTRIBUTE = "stem_edge"  # of the group, which contains the format
RECORDS, RARE_RECORDS, INDEX = "records", "rare_records", "index"
CRC_NBYTES, INDEX_ENTRY_NBYTES = 4, 16  # of each record, in its shard


class TableFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """The description of a table store: tokens and record layouts. Raises ValueError if invalid."""

    tokens: int
    # Layout of all records, with the row type of the first array.
    stored: RecordLayout = msgspec.field(name="tables")
    rare_tables: RecordLayout | None = None  # layout of the last records, in the second array
    indexed: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.tokens <= MAX_RECORDS:
            raise ValueError(f"tables of {self.tokens} tokens; expected 1 to {MAX_RECORDS}")
        records, rare, _ = self.stored.records, self.rare_tables, self.tables
        if not self.indexed and self.tokens != records:
            raise ValueError(f"{records} records of {self.tokens} tokens, but no index")
        if rare is None:
            return
        if not self.indexed:
            raise ValueError("rare tables, but no index that says which tokens they are for")
        wanted = msgspec.structs.replace(self.stored, row_type=rare.row_type, records=rare.records)
        if wanted != rare or rare.records >= records or rare.bits >= self.stored.bits:
            raise ValueError(f"rare tables {rare} do not widen to those of {self.stored}")

    @cached_property
    def tables(self) -> RecordLayout:
        """Layout of records in memory, where frequent and rare tokens have the same row type."""
        types = [layout.row_type for layout in (self.stored, self.rare_tables) if layout]
        return msgspec.structs.replace(self.stored, row_type=form_of(*types))

    @property
    def kind(self) -> str:
        """Name of the stored type, as in `stem-edge export --rows`."""
        return "mixed" if self.rare_tables else self.stored.row_type

    def arrays(self) -> dict[str, RecordLayout]:
        """Return name -> layout of each array of records, in the order of record numbers."""
        if (rare := self.rare_tables) is None:
            return {RECORDS: self.stored}
        frequent = self.stored.records - rare.records
        return {RECORDS: msgspec.structs.replace(self.stored, records=frequent), RARE_RECORDS: rare}

    def folders(self) -> list[str]:
        return [*self.arrays(), *([INDEX] if self.indexed else [])]

    @property
    def index_nbytes(self) -> int:
        """Bytes of the index from tokens to records; 0 without an index."""
        return 4 * self.tokens if self.indexed else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays on flash."""
        overhead = CRC_NBYTES + INDEX_ENTRY_NBYTES
        arrays = self.arrays().values()
        return self.index_nbytes + sum(a.records * (a.record_nbytes + overhead) for a in arrays)
