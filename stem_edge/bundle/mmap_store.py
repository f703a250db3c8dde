"""zarr Store over memory maps: zarr's own interface to a table store.

    import zarr
    from stem_edge.bundle.mmap_store import MmapStore

    records = zarr.open_group(MmapStore("model/tables.zarr"), mode="r")["records"]

zarr's LocalStore opens, seeks and copies at every request; this one maps a file at the first and
returns views. Needs the extra `stem-edge[zarr]`.

zarr reads a missing shard, and a record that an index calls empty, as zeros, and lets metadata name
any codec. So this store accepts only what stem_edge.tables.store does: descriptions are compared
when it is opened, size and index of a shard when it is mapped, and other files have no key.
"""

from __future__ import annotations

import mmap
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import LocalStore

from stem_edge.errors import InputError
from stem_edge.files import disk
from stem_edge.files.plain_files import damaged, open_plain
from stem_edge.tables.store import INDEX, TableStore, open_table_store

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype

    from stem_edge.numerics.quantize import U8


class MmapStore(LocalStore):
    """Read-only zarr store of a table store. Its files must not be truncated while mapped.

    Raises BundleError for a folder that is not a table store, and for a damaged shard.
    """

    def __init__(self, root: str | Path, *, read_only: bool = True) -> None:
        if not read_only:
            raise ValueError("MmapStore is read-only; write with zarr.storage.LocalStore")
        super().__init__(root, read_only=True)
        self._store = open_table_store(Path(root))
        self._descriptions = _descriptions(self._store)
        self._views: dict[str, U8] = {}
        self._lock, self._closed = threading.Lock(), False

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """Return the bytes of a key, or a range of them, as a view; None without such a key."""
        return self.get_sync(key, prototype=prototype, byte_range=byte_range)

    def get_sync(
        self,
        key: str,
        *,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """Do what `get` does, without an event loop."""
        view = self._views.get(key)
        if view is None and (view := self._map(key)) is None:
            return None
        kind = (prototype or default_buffer_prototype()).buffer
        return kind.from_array_like(view[_span(byte_range, len(view))])

    def _descriptor(self, key: str) -> int | None:
        """Open the file of a key; None if a table store has no such file."""
        if key in self._descriptions:
            return open_plain(Path(self.root) / key, "file")
        folder, _, place = key.partition("/c/")
        number, _, column = place.partition("/")
        for name, grid in zip(self._store.format.arrays(), self._store.grids, strict=True):
            known = folder == name and number.isdecimal() and column == "0"
            if known and len(number) < 10 and int(number) < grid.shards:
                return grid.open_shard(int(number))
        return None

    def _map(self, key: str) -> U8 | None:
        """Map the file of a key and keep the map; None if there is no such key."""
        if (descriptor := self._descriptor(key)) is None:
            return None
        try:
            view = np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), np.uint8)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise damaged(Path(self.root) / key, f"cannot map this file ({error})") from error
        finally:
            disk.close(descriptor)
        # Two threads may both come here, and a needless map is harmless. The lock is needed because
        # zarr's threads may still be reading when the store is closed.
        with self._lock:
            if self._closed:
                raise InputError(f"{self.root}: this store is closed; open it again")
            self._views[key] = view
        return view

    def close(self) -> None:
        """Drop the maps, each unmapped when its last view is gone. Later reads raise InputError."""
        with self._lock:
            self._closed = True
            self._views.clear()
        super().close()


def _descriptions(store: TableStore) -> set[str]:
    """Keys of all files except shards."""
    keys = ["zarr.json", *(f"{folder}/zarr.json" for folder in store.format.folders())]
    return {*keys, *([f"{INDEX}/c/0"] if store.format.indexed else [])}


def _span(byte_range: ByteRequest | None, nbytes: int) -> slice:
    match byte_range:
        case None:
            return slice(None)
        case RangeByteRequest(start=start, end=end):
            return slice(start, end)
        case OffsetByteRequest(offset=offset):
            return slice(offset, None)
        case SuffixByteRequest(suffix=suffix):
            return slice(max(0, nbytes - suffix), None)
        case _:
            raise TypeError(f"unknown byte range {byte_range!r}")
