"""N-gram tables on flash: a zarr v3 group, read here without zarr.

OUT/zarr.json      group; its attributes contain an NgramFormat
OUT/<table>/       array of records (stem_edge.tables.shards); a record is a page (rows.py)
OUT/classes/       if token ids are mapped to classes before hashing: int32 [V], one chunk
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from stem_edge.errors import BundleError
from stem_edge.numerics.quantize import I32
from stem_edge.tables.ngrams.rows import NgramTable
from stem_edge.tables.shards import TableStore, open_grid
from stem_edge.tables.token_index import read_index
from stem_edge.tables.zarr_json import read_group, read_json

ATTRIBUTE = "stem_edge_ngrams"  # of the group, which contains the format
CLASSES = "classes"
MAX_TABLES = 64


class NgramFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The description of a folder of n-gram tables. Raises ValueError for invalid fields."""

    tables: tuple[NgramTable, ...]

    def __post_init__(self) -> None:
        names = {table.name for table in self.tables}
        if not 0 < len(self.tables) <= MAX_TABLES or len(names) < len(self.tables):
            raise ValueError(f"{len(self.tables)} tables; expected 1 to {MAX_TABLES}, named apart")
        if len({(table.hash.vocab_size, table.hash.classes) for table in self.tables}) > 1:
            raise ValueError("tables of different vocabularies")

    @property
    def classes(self) -> tuple[int, int] | None:
        """(number of ids, number of classes); None if the hashes do not map ids to classes."""
        keys = self.tables[0].hash
        return None if keys.classes is None else (keys.vocab_size, keys.classes)

    @property
    def nbytes(self) -> int:
        """Bytes of all tables on flash, without the zarr.json files."""
        return sum(table.format.nbytes for table in self.tables)


class NgramStore(msgspec.Struct, frozen=True):
    format: NgramFormat
    tables: tuple[TableStore, ...]  # of pages
    class_of: I32 | None  # of each id


def is_ngrams(root: Path) -> bool:
    """Return True if a folder contains n-gram tables, even if they are damaged."""
    path = root / "zarr.json"
    return path.is_file() and ATTRIBUTE in str(read_json(path).get("attributes"))


def open_ngrams(root: Path) -> NgramStore:
    """Open n-gram tables. Raises BundleError if they differ from what an export writes."""
    if not (root / "zarr.json").is_file():
        raise BundleError(
            f"{root}: no tables of n-grams here; stem-edge export --tables-only makes them"
        )
    format = read_group(root, ATTRIBUTE, NgramFormat)
    tables = list[TableStore]()
    for table in format.tables:
        grid = open_grid(root / table.name, table.format.stored)
        tables.append(TableStore(table.format, (grid,), None))
    class_of = read_index(root / CLASSES, *format.classes) if format.classes else None
    return NgramStore(format, tuple(tables), class_of)
