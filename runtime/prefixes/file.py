"""Prefix files: a prompt's token ids, with their keys and values.

A file contains the length of its Header, the Header, the arrays, and the CRC-32C of all bytes before it. Only
tokens that look up their own rows are written. The name of a file tells which model and options it is for
(folder.py). Only the user who wrote a file may read it, because it contains prompts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from google_crc32c import extend

from stem_edge.files import disk
from stem_edge.numerics.quantize import U8
from stem_edge.runtime.backends.context import PromptKey

# Names of prefix files and of temporary files. Other files of the folder are not touched.
PREFIX_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.prefix")
TEMPORARY_NAME = re.compile(r"\.[0-9a-f]{16}\.tmp")
LENGTH_NBYTES, CRC_NBYTES = 8, 4
MOST_HEADER_NBYTES = 1 << 24


class UnusableError(ValueError):
    """A file is not a complete prefix file, or its bytes are damaged."""


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt, the positions where its steps began, and type and shape of each array of keys or values."""

    token_ids: list[int]
    starts: list[int]
    arrays: list[tuple[str, tuple[int, ...]]]


def write_prefix(path: Path, prompt: PromptKey, arrays: Sequence[npt.NDArray[Any]]) -> None:
    """Write a prefix file with mode 0600, replacing an existing one atomically. Raises OSError."""
    shapes = [(array.dtype.str, array.shape) for array in arrays]
    header = msgspec.msgpack.encode(Header(list(prompt.token_ids), list(prompt.starts), shapes))
    disk.write_whole(path, _pieces(header, arrays), durable=True, mode=0o600)


def _pieces(header: bytes, arrays: Sequence[npt.NDArray[Any]]) -> Iterator[bytes]:
    """Yield the contents of a file, its checksum last; keys and values head by head."""
    yield (data := len(header).to_bytes(LENGTH_NBYTES, "little") + header)
    crc = extend(0, data)
    for array in arrays:
        for part in array if array.ndim > 2 else [array]:
            yield (data := part.tobytes())
            crc = extend(crc, data)
    yield crc.to_bytes(CRC_NBYTES, "little")


class PrefixFile:
    """An open file with a cached prompt's ids, keys and values. Raises UnusableError, OSError.

    own: True if no other user can have written the file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.own = is_own(os.fstat(descriptor))
        length = int.from_bytes(self._read(0, LENGTH_NBYTES).tobytes(), "little")
        if length > MOST_HEADER_NBYTES:
            raise UnusableError("not a prefix")
        self._start = LENGTH_NBYTES + length
        try:
            data = self._read(LENGTH_NBYTES, length).data
            self._header = msgspec.msgpack.decode(data, type=Header)
        except ValueError as error:  # of msgspec, too
            raise UnusableError("not a prefix") from error
        self.prompt = PromptKey(self._header.token_ids, {}, self._header.starts)

    def fits(self, views: Sequence[npt.NDArray[Any]]) -> bool:
        """True if the file is complete, and its keys and values have the types and widths of these arrays.

        views [..., tokens, width] may have fewer tokens than the file.
        """
        count, found = len(self.prompt.token_ids), self._header.arrays
        shapes = [(*view.shape[:-2], count, view.shape[-1]) for view in views]
        if found != [(view.dtype.str, shape) for view, shape in zip(views, shapes, strict=True)]:
            return False
        return disk.size(self._descriptor) == self._start + sum(map(_nbytes, found)) + CRC_NBYTES

    def arrays(self) -> Iterator[npt.NDArray[Any]]:
        """Yield the arrays of a file that fits. After the last, raises UnusableError if a byte is damaged.

        Each array overwrites the previous one, because all together would take the memory of another context.
        """
        arrays, at = self._header.arrays, self._start
        buffer = np.empty(max(map(_nbytes, arrays), default=0), np.uint8)
        crc = extend(0, self._read(0, at))
        for kind, shape in arrays:
            data = self._fill(buffer[: _nbytes((kind, shape))], at)
            crc, at = extend(crc, data), at + len(data)
            yield data.view(kind).reshape(shape)
        if crc.to_bytes(CRC_NBYTES, "little") != self._read(at, CRC_NBYTES).tobytes():
            raise UnusableError("damaged")

    def _read(self, offset: int, nbytes: int) -> U8:
        return self._fill(np.empty(nbytes, np.uint8), offset)

    def _fill(self, buffer: U8, offset: int) -> U8:
        if disk.fill(self._descriptor, buffer.data, offset) != len(buffer):
            raise UnusableError("cut short")
        return buffer


def _nbytes(array: tuple[str, tuple[int, ...]]) -> int:
    kind, shape = array
    return np.dtype(kind).itemsize * prod(shape)


def is_own(found: os.stat_result) -> bool:
    """True if this user owns a file or folder, and no other user can write to it."""
    getuid: Callable[[], int] | None = getattr(os, "getuid", None)
    return getuid is None or (found.st_uid == getuid() and not found.st_mode & 0o022)
