"""Where the bytes of shards come from: files of the bundle here, other places in remote.py."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

from stem_edge.files import disk
from stem_edge.numerics.quantize import U8
from stem_edge.runtime.rows.records import Traffic
from stem_edge.tables.shards import ShardGrid

# Devices that emulated_flash.py knows.
FlashName = Literal["ufs4", "ufs2", "nvme", "emmc", "sdcard"]


class ByteRange(NamedTuple):
    """Some bytes of a shard."""

    shard: int  # counted through all arrays
    offset: int
    nbytes: int


class Advice(NamedTuple):
    """Advice for a piece that cannot be read, is too short, or is damaged."""

    unreadable: str
    short: str
    damaged: str


# Fills a buffer with a piece; returns the bytes read, fewer only at the end of the shard.
Fill: TypeAlias = Callable[[ByteRange, U8], int]


class Shards(Protocol):
    """Bytes of the shards of a table store. Several threads may read at once."""

    advice: Advice

    @property
    def traffic(self) -> Traffic | None:
        """Bytes and requests that came over a network; None if the shards are on flash."""

    def name(self, shard: int) -> str:
        """Name a shard in messages."""

    def ahead(self, pieces: Sequence[ByteRange]) -> Fill:
        """Start reading pieces; return what fills buffers with them, and raises OSError."""

    def fill(self, piece: ByteRange, buffer: U8) -> int:
        """Fill a buffer [nbytes] with a piece. Raises OSError."""

    def forget(self, piece: ByteRange) -> None:
        """Drop copies of a piece that was damaged, so that it is read from where it is kept."""

    def stop(self) -> None:
        """Let reads over a network fail soon, those under way, too."""

    def close(self) -> None:
        """Release files and threads; later reads fail."""


class _Opened(NamedTuple):
    """An open shard file."""

    path: str
    file: int


class ShardFiles:
    """Shards in the bundle's folder, all of them open. Raises BundleError."""

    advice = Advice(
        "check the storage device",
        "the file was truncated while open: copy it again",
        "the file is damaged: run stem-edge verify, then copy or export the bundle again",
    )
    traffic = None

    def __init__(self, grids: Sequence[ShardGrid]) -> None:
        self._opened = list[_Opened]()
        try:
            for grid in grids:
                for shard in range(grid.shards):
                    opened = _Opened(str(grid.shard_path(shard)), grid.open_shard(shard))
                    self._opened.append(opened)
        except BaseException:
            self.close()
            raise

    def name(self, shard: int) -> str:
        return self._opened[shard].path

    def ahead(self, pieces: Sequence[ByteRange]) -> Fill:
        """Ask the system to start reading; returns at once, guarantees nothing."""
        if len(pieces) > 1 and hasattr(os, "posix_fadvise"):
            for shard, offset, nbytes in pieces:
                with contextlib.suppress(OSError):  # some file systems take no advice
                    file = self._opened[shard].file
                    os.posix_fadvise(file, offset, nbytes, os.POSIX_FADV_WILLNEED)
        return self.fill

    def fill(self, piece: ByteRange, buffer: U8) -> int:
        return disk.fill(self._opened[piece.shard].file, buffer.data, piece.offset)

    def forget(self, piece: ByteRange) -> None:
        if hasattr(os, "posix_fadvise"):  # otherwise its cached copy would be read again
            shard, offset, nbytes = piece
            with contextlib.suppress(OSError):
                file = self._opened[shard].file
                os.posix_fadvise(file, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def stop(self) -> None:
        """Reads of files end by themselves."""

    def close(self) -> None:
        while self._opened:  # popped, so that closing twice cannot close a descriptor in new use
            disk.close(self._opened.pop().file)
