"""Tables for analysis: `open_tables(path)[ids, layer]` gives float32 rows.

Rows come straight from memory maps of the shards, by vectorised numpy, without zarr and without
checksums; run `stem-edge verify` first if you do not trust the storage.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt

from stem_edge.bundle.manifest import TABLES
from stem_edge.bundle.opening import bundle_folder
from stem_edge.errors import InputError
from stem_edge.files import disk
from stem_edge.files.plain_files import check_folder, unreadable
from stem_edge.numerics.quantize import F32, I64, U8
from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.shards import ShardGrid
from stem_edge.tables.store import open_table_store
from stem_edge.tables.widening import widen

Ids: TypeAlias = "int | slice | npt.ArrayLike"


class Tables:
    """Read-only tables of a bundle; a context manager. Its arrays are copies and outlive it."""

    def __init__(self, root: Path) -> None:
        self._store = open_table_store(root)
        self.kind = self._store.format.kind  # of what is stored
        self._maps: list[mmap.mmap] = []
        # For each array of records its shards, as views [records, stride] into the maps.
        self._shards: list[list[U8]] = []
        for grid in self._store.grids:
            maps = [map_shard(grid, shard) for shard in range(grid.shards)]
            self._maps += maps
            shapes = ((grid.shard_records(shard), grid.stride) for shard in range(grid.shards))
            self._shards.append(
                [np.ndarray(s, np.uint8, m) for s, m in zip(shapes, maps, strict=True)]
            )

    @property
    def layout(self) -> RecordLayout:
        """Layout of the records that `records` returns."""
        return self._store.format.tables

    @property
    def layers(self) -> tuple[int, ...]:
        """STEM layers, ascending."""
        return self.layout.layers

    @property
    def shape(self) -> tuple[int, int, int]:
        """Numbers of tokens, of STEM layers, and of values in a row."""
        return self._store.format.tokens, len(self.layers), self.layout.row_width

    def __getitem__(self, key: tuple[Ids, int]) -> F32:
        """Rows of ids in a STEM layer (by its number in the model): [n, width], or [width] for one.

        Raises InputError for an id or layer that the tables do not have.
        """
        ids, layer = key
        if layer not in self.layers:
            raise InputError(f"layer {layer} has no table; STEM layers are {self.layers}")
        tokens = self._token_ids(ids)
        rows = self.layout.unpack(self.records(np.atleast_1d(tokens)), self.layers.index(layer))
        return rows if tokens.ndim else rows[0]

    def _token_ids(self, ids: Ids) -> npt.NDArray[np.integer]:
        """Convert to one id or a flat array of ids."""
        if isinstance(ids, slice):
            return np.arange(self._store.format.tokens)[ids]
        try:
            tokens = np.asarray(ids)
        except ValueError:  # lists of different lengths
            tokens = np.empty((0, 0))
        if tokens.shape == (0,):
            tokens = tokens.astype(np.int64)
        # numpy turns True among integers into 1, so look for it before.
        mixed = isinstance(ids, list | tuple) and any(
            isinstance(item, bool | np.bool_) for item in ids
        )
        if tokens.dtype.kind not in "iu" or tokens.ndim > 1 or mixed:
            raise InputError(
                "ids of another kind; expected one integer, a slice or a flat sequence of integers"
            )
        return tokens

    def records(self, token_ids: npt.NDArray[np.integer]) -> U8:
        """Return packed records [n, record_nbytes] of ids [n], in the form that graphs take."""
        if not self._shards:
            raise InputError("these tables are closed; open them again")
        store, tokens = self._store, self._store.format.tokens
        if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < tokens:
            raise InputError(
                f"a token id is not in 0..{tokens - 1}; give ids of the bundle's tokenizer"
            )
        numbers = token_ids.astype(np.int64)
        numbers = numbers if store.index is None else store.index[numbers].astype(np.int64)
        found, first = np.empty((len(numbers), self.layout.record_nbytes), np.uint8), 0
        for array, grid in enumerate(store.grids):
            last = first + grid.layout.records
            here = (numbers >= first) & (numbers < last)
            found[here] = widen(
                grid.layout, self._stored(array, numbers[here] - first), store.format.tables
            )
            first = last
        return found

    def _stored(self, array: int, numbers: I64) -> U8:
        """Return records of one array as they are stored there."""
        grid = self._store.grids[array]
        found = np.empty((len(numbers), grid.layout.record_nbytes), np.uint8)
        shards, places = np.divmod(numbers, grid.records_per_shard)
        for shard in np.unique(shards).tolist():
            checked = self._shards[array][shard][places[shards == shard]]
            found[shards == shard] = grid.without_checksums(checked)
        return found

    def close(self) -> None:
        """Unmap the shards."""
        self._shards.clear()
        for mapped in self._maps:
            mapped.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def map_shard(grid: ShardGrid, shard: int) -> mmap.mmap:
    """Map a checked shard file into memory. Raises BundleError."""
    descriptor = grid.open_shard(shard)
    try:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise unreadable(grid.shard_path(shard), "shard", error) from error
    finally:
        disk.close(descriptor)


def open_tables(path: str | Path) -> Tables:
    """Open the tables of a bundle, or a tables.zarr folder. Raises BundleError."""
    root = bundle_folder(path)
    if os.path.lexists(root / TABLES):
        check_folder(root := root / TABLES)
    return Tables(root)
