"""Opens files of a checkpoint, and reads values by position when they are needed.

Files are not mapped, because the system would kill the process if a mapped file were truncated. A read
of a truncated file only raises an error.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stem_edge.errors import CheckpointError
from stem_edge.files import disk

HEAD_NBYTES = 512
CHANGED = (
    "was changed during the export; nothing was written: wait until training or copying has ended, "
    "and export again"
)
ZIP = b"PK\x03\x04"
TAR_AT = 257  # offset of a tar archive's magic
_HEADS = {
    ZIP: "a zip archive (torch's .pth and .pt, numpy's .npz, or any other)",
    b"\x1f\x8b": "a gzip archive",
    b"GGUF": "a GGUF file",
    b"version https://git-lfs": "the pointer that git-lfs leaves in place of a file",
    b"<": "a web page",
}


def looks_like(head: bytes) -> str | None:
    """Return the kind of a file, such as "a GGUF file", by its first bytes; None if unknown."""
    if head[TAR_AT : TAR_AT + 5] == b"ustar":
        return "a tar archive"
    if len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5:
        return "a bare pickle, which can carry code"
    kinds = _HEADS if head else {b"": "empty"}
    return next((what for start, what in kinds.items() if head.startswith(start)), None)


class SourceFile:
    """Open file of a checkpoint; thread-safe. It is closed when no tensor uses it any more.

    Links are followed, because caches of models consist of links. The target must be a regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = disk.open_file(path.resolve())
        except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(
                f"{path}: cannot open ({reason}); copy all files of the model, as plain files"
            ) from error
        weakref.finalize(self, disk.close, self._descriptor)
        status = os.fstat(self._descriptor)
        self.nbytes, self._mtime_ns = status.st_size, status.st_mtime_ns

    @property
    def head(self) -> bytes:
        return self.read(0, min(HEAD_NBYTES, self.nbytes))

    def read(self, at: int, nbytes: int) -> bytes:
        """Read `nbytes` bytes at offset `at`. Raises CheckpointError, also past the file's end."""
        return self.values(at, nbytes, "u1").tobytes()

    def values(self, at: int, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Read `count` values of a numpy type at offset `at`. Raises CheckpointError."""
        array = np.empty(count, dtype)
        try:
            done = disk.fill(self._descriptor, array.view(np.uint8).data, at)
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: cannot read from byte {at} on ({error.strerror or error}); check "
                "the disk, or copy the file again"
            ) from error
        if done < array.nbytes or os.fstat(self._descriptor).st_mtime_ns != self._mtime_ns:
            raise CheckpointError(f"{self.path}: {CHANGED}")
        return array
