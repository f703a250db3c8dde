"""Tables as arrays, for analysis: `open_tables(path)[ids, layer]` returns float32 rows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from stem_edge.bundle.manifest import MANIFEST, TABLES
from stem_edge.bundle.opening import bundle_folder
from stem_edge.errors import BundleError, InputError
from stem_edge.files.plain_files import check_folder
from stem_edge.numerics.quantize import F32, U8
from stem_edge.runtime.rows.files import ShardFiles
from stem_edge.runtime.rows.store import RowStore
from stem_edge.runtime.token_ids import checked_ids
from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.shards import open_table_store

Ids: TypeAlias = "int | slice | Sequence[int] | npt.NDArray[np.integer]"


class Tables:
    """The tables of a bundle, read-only. A context manager. Returned arrays are copies."""

    def __init__(self, root: Path) -> None:
        tables = open_table_store(root)
        self._store = RowStore(tables, ShardFiles(tables.grids))
        self.kind = tables.format.kind  # the stored type
        self.layout: RecordLayout = self._store.layout  # of the records that `records` returns

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of the layers that have a table (STEM layers), ascending."""
        return self.layout.layers

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the tables: (tokens, STEM layers, values in a row)."""
        return self._store.tokens, len(self.layers), self.layout.row_width

    def __getitem__(self, key: tuple[Ids, int]) -> F32:
        """Return `tables[ids, layer]`: rows [n, width] of token ids, or one row [width] for one id.

        Raises InputError for an id or layer that the tables do not have.
        """
        ids, layer = key
        if layer not in self.layers:
            raise InputError(f"layer {layer} has no table; STEM layers are {self.layers}")
        if isinstance(ids, slice):
            ids = range(self._store.tokens)[ids]
        several = isinstance(ids, Sequence) or np.ndim(ids) > 0
        records = self.records(ids if several else [np.asarray(ids).item()])
        rows = self.layout.unpack(records, self.layers.index(layer))
        return rows if several else rows[0]

    def records(self, token_ids: Any) -> U8:
        """Return the stored records of token ids [n]: uint8 [n, record_nbytes]."""
        ids = np.array(checked_ids(token_ids, self._store.tokens), np.int64)
        return self._store.read(self._store.records_of(ids))

    def close(self) -> None:
        """Release the files."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_tables(path: str | Path) -> Tables:
    """Open the tables of a bundle, or a tables.zarr folder. Raises BundleError."""
    root = bundle_folder(path)
    if os.path.lexists(root / TABLES):
        check_folder(root := root / TABLES)
    elif os.path.lexists(root / MANIFEST):
        raise BundleError(f"{root}: a bundle of a dense model, which has no tables")
    return Tables(root)
