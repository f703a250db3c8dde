"""Journal of packed matrices, so that preparing goes on after it was interrupted or killed.

A line is written when a matrix is whole. Its bytes may still be lost if the power goes, so they are
compared with a checksum before they are used.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

PIECE_NBYTES = 8 << 20


class PackedMatrix(msgspec.Struct, frozen=True):
    """A packed matrix in a file of weights."""

    file: str
    product: str
    packed: dict[str, str]  # names of tensors -> where their packed forms are
    end: int  # of the file behind it
    checksum: int  # of the bytes between the one before it and the end


class PackingJournal:
    """Matrices that are packed, by this attempt or earlier ones. Their files lie beside it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found = {(one.file, one.product): one for one in _matrices(path)}

    def kept(self, name: str, product: str, start: int) -> PackedMatrix | None:
        """Return a matrix that was packed before, if its bytes from `start` on are whole."""
        one = self._found.get((name, product))
        whole = one is not None and self._checksum(name, start, one.end) == one.checksum
        return one if whole else None

    def add(self, name: str, product: str, packed: Mapping[str, str], start: int, end: int) -> None:
        """Add a matrix that is whole. Raises OSError."""
        checksum = self._checksum(name, start, end)
        line = msgspec.json.encode(PackedMatrix(name, product, dict(packed), end, checksum))
        with self._path.open("ab") as journal:
            journal.write(line + b"\n")

    def _checksum(self, name: str, start: int, end: int) -> int:
        found = 0
        with self._path.with_name(name).open("rb") as file:
            file.seek(start)
            for at in range(start, end, PIECE_NBYTES):
                found = zlib.crc32(file.read(min(PIECE_NBYTES, end - at)), found)
        return found


def _matrices(path: Path) -> Iterator[PackedMatrix]:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as journal:
        for line in journal:
            with contextlib.suppress(ValueError):  # a line that was not finished
                yield msgspec.json.decode(line, type=PackedMatrix)
