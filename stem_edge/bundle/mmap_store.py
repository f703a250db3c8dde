"""zarr Store over memory maps: zarr's own interface to a table store.

    import zarr
    from stem_edge.bundle.mmap_store import MmapStore

    records = zarr.open_group(MmapStore("model/tables.zarr"), mode="r")["records"]

zarr's own stores read a missing shard, and a record that an index calls empty, as zeros, and let
metadata name any codec. This one accepts only what stem_edge.tables.store does, and checks all of it
when it is opened. Needs the extra `stem-edge[zarr]`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from zarr.core.buffer import Buffer, cpu
from zarr.storage import MemoryStore

from stem_edge.bundle.table_arrays import map_shard
from stem_edge.files.plain_files import read_plain
from stem_edge.shown import MAX_SIZE
from stem_edge.tables.store import INDEX, open_table_store


class MmapStore(MemoryStore):
    """Read-only zarr store of a table store. Its files must not be truncated while it is open.

    Raises BundleError for a folder that is not a table store, and for a damaged shard.
    """

    def __init__(self, root: str | Path) -> None:
        root = Path(root)
        store = open_table_store(root)
        keys = ["zarr.json", *(f"{folder}/zarr.json" for folder in store.format.folders())]
        keys += [f"{INDEX}/c/0"] if store.format.indexed else []
        values = dict[str, Buffer]()
        for key in keys:
            values[key] = cpu.Buffer.from_bytes(read_plain(root / key, MAX_SIZE, "file"))
        for name, grid in zip(store.format.arrays(), store.grids, strict=True):
            for number in range(grid.shards):
                shard = np.frombuffer(map_shard(grid, number), np.uint8)
                values[f"{name}/c/{number}/0"] = cpu.Buffer.from_array_like(shard)
        super().__init__(values, read_only=True)

    async def clear(self) -> None:
        self._check_writable()  # which MemoryStore does not do here
