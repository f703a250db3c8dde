"""A zarr Store over memory maps, for those who want zarr's own interface to a table store.

    import zarr
    from stem_edge.mmap_store import MmapStore

    records = zarr.open_group(MmapStore("model/tables.zarr"), mode="r")["records"]

zarr's LocalStore opens, seeks and copies at every request; this one maps a file when it is first
asked for and hands out views. Needs the extra `stem-edge[zarr]`.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import LocalStore

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype

    from stem_edge.quantize import U8


class MmapStore(LocalStore):
    """A read-only store over the files below a folder. A file must not be cut while it is mapped."""

    def __init__(self, root: str | Path, *, read_only: bool = True) -> None:
        if not read_only:
            raise ValueError("MmapStore is read-only; write with zarr.storage.LocalStore")
        super().__init__(root, read_only=True)
        self._views: dict[str, U8] = {}

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """The bytes of a key, or of a range of it, as a view; None if there is no such key."""
        return self.get_sync(key, prototype=prototype, byte_range=byte_range)

    def get_sync(
        self,
        key: str,
        *,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """`get` without an event loop."""
        try:
            view = self._view(key)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None
        kind = (prototype or default_buffer_prototype()).buffer
        return kind.from_array_like(view[_span(byte_range, len(view))])

    def _view(self, key: str) -> U8:
        if key not in self._views:
            with (Path(self.root) / key).open("rb") as file:
                # An empty file cannot be mapped.
                empty = not file.seek(0, 2)
                data = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            # Two threads may both come here; one map more than needed is harmless.
            self._views[key] = np.frombuffer(data, np.uint8)
        return self._views[key]

    def close(self) -> None:
        """Drop the maps; each is unmapped when its last view is gone."""
        self._views.clear()
        super().close()


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
