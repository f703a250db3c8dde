"""Tables for people who analyse them: `open_tables(path)[ids, layer]` gives float32 rows.

Rows come straight out of memory maps of the shards, in vectorised numpy, without zarr and without
checksums: run `stem-edge verify` first where the storage is not trusted. For zarr's own interface
open the store with stem_edge.mmap_store.MmapStore.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt

from stem_edge.bundle import TABLES
from stem_edge.errors import InputError
from stem_edge.quantize import F32, U8
from stem_edge.rows import RecordLayout
from stem_edge.shards import open_grid

Ids: TypeAlias = "int | slice | npt.ArrayLike"


class Tables:
    """The tables of a bundle, read only. A context manager; its arrays are copies and outlive it."""

    def __init__(self, root: Path) -> None:
        self._grid = open_grid(root)
        self._maps: list[mmap.mmap] = []
        self._shards: list[U8] = []  # [records, record_nbytes] each, views into the maps
        for shard in range(self._grid.shards):
            self._grid.check_shard(shard)
            with self._grid.shard_path(shard).open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._maps.append(mapped)
            shape = (self._grid.shard_records(shard), self.layout.record_nbytes)
            strides = (self._grid.stride, 1)
            self._shards.append(np.ndarray(shape, np.uint8, mapped, strides=strides))

    @property
    def layout(self) -> RecordLayout:
        """How the records are packed."""
        return self._grid.layout

    @property
    def layers(self) -> tuple[int, ...]:
        """The STEM layers."""
        return self.layout.layers

    @property
    def shape(self) -> tuple[int, int, int]:
        """Tokens, STEM layers, d_ff."""
        return self.layout.vocab_size, len(self.layers), self.layout.d_ff

    def __getitem__(self, key: tuple[Ids, int]) -> F32:
        """Rows of ids in a STEM layer (by its number in the model): [n, d_ff], or [d_ff] of one.

        Raises InputError for an id or layer that the tables do not have.
        """
        ids, layer = key
        if layer not in self.layers:
            raise InputError(f"layer {layer} has no table; STEM layers are {self.layers}")
        tokens = self._token_ids(ids)
        rows = self.layout.unpack(self.records(np.atleast_1d(tokens)), self.layers.index(layer))
        return rows if tokens.ndim else rows[0]

    def _token_ids(self, ids: Ids) -> npt.NDArray[np.integer]:
        """One id or a flat array of them."""
        if isinstance(ids, slice):
            return np.arange(self.layout.vocab_size)[ids]
        try:
            tokens = np.asarray(ids)
        except ValueError:  # lists of different lengths
            tokens = np.empty((0, 0))
        if tokens.shape == (0,):
            tokens = tokens.astype(np.int64)
        if tokens.dtype.kind not in "iu" or tokens.ndim > 1:
            raise InputError("ids must be one integer, a slice or a flat sequence of integers")
        return tokens

    def records(self, token_ids: npt.NDArray[np.integer]) -> U8:
        """Packed records [n, record_nbytes] of ids [n]."""
        if not self._shards:
            raise InputError("these tables are closed; open them again")
        vocabulary = self.layout.vocab_size
        if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < vocabulary:
            raise InputError(f"a token id is not in 0..{vocabulary - 1}")
        token_ids = token_ids.astype(np.int64)
        found = np.empty((len(token_ids), self.layout.record_nbytes), np.uint8)
        shards, places = np.divmod(token_ids, self._grid.records_per_shard)
        for shard in np.unique(shards).tolist():
            found[shards == shard] = self._shards[shard][places[shards == shard]]
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


def open_tables(path: str | Path) -> Tables:
    """Open the tables of a bundle, or a tables.zarr folder. Raises BundleError."""
    root = Path(path)
    return Tables(root / TABLES if (root / TABLES).is_dir() else root)
