"""Reads GGUF files, version 2 or 3: keys when a file is opened, rows of tensors when needed.

A file is a header (counts, keys, the list of tensors) and the values of the tensors one after another,
each at a multiple of general.alignment, up to the end of the file (ggml's docs/gguf.md). Sizes in the
header are checked against the file before use.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from stem_edge.errors import CheckpointError
from stem_edge.export.tensor_files.gguf_tensor import gguf_tensor
from stem_edge.export.tensor_files.json import one_line, reason_of
from stem_edge.export.tensor_files.source_file import SourceFile, looks_like
from stem_edge.export.tensor_files.tensor import Tensor, check_shape
from stem_edge.ggml.types import KEPT_TYPES

MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT, ALIGNMENTS = 32, tuple(1 << n for n in range(3, 17))
MAX_HEADER_NBYTES = 1 << 28  # a header with 260,000 tokens has 12 MB
MAX_TENSORS, MAX_KEYS, MAX_AXES = 1 << 16, 1 << 14, 4
MAX_NAME_NBYTES, MAX_TEXT_NBYTES = 1 << 10, 1 << 24
MAX_VALUES = 1 << 22  # in all arrays of a file; a string takes about a hundred bytes of memory
PIECE_NBYTES = 1 << 20  # read at a time
# GGUF's number of a value type -> numpy's name of the type.
NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "u1"}
NUMBERS |= {10: "<u8", 11: "<i8", 12: "<f8"}
FLOAT, BOOL, TEXT, ARRAY = 6, 7, 8, 9

Value: TypeAlias = Any  # bool, int, float, str, or a list of one of these


class GgufFile(NamedTuple):
    path: Path
    keys: dict[str, Value]
    tensors: dict[str, Tensor]


def open_gguf(path: Path) -> GgufFile:
    file = SourceFile(path)
    try:
        found = _read(file)
    except (ValueError, struct.error) as error:
        raise CheckpointError(
            f"{path}: not a GGUF file that can be read ({reason_of(error)}); it is truncated or "
            "damaged: copy it again"
        ) from error
    if (count := found.keys.get("split.count")) not in (None, 0, 1):
        raise CheckpointError(
            f"{path}: one of {one_line(count)} files of a split model; expected one file: join them with "
            "llama-gguf-split --merge"
        )
    return found


def _read(file: SourceFile) -> GgufFile:
    if not file.head.startswith(MAGIC):
        what = looks_like(file.head) or f"bytes {file.head[:8].hex(' ')}"
        raise ValueError(f"it is {what}")
    header = _Header(file)
    header.take(len(MAGIC))
    version = header.number("<I")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        raise ValueError(
            f"version {version}; expected 2 or 3{', not of big-endian machines' if swapped else ''}"
        )
    tensors = header.count("tensors", MAX_TENSORS)
    keys = _keys(header, header.count("keys", MAX_KEYS))
    alignment = keys.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment not in ALIGNMENTS:
        raise ValueError(
            f"general.alignment is {one_line(alignment)}; expected a power of 2 from 8"
        )
    entries = [_entry(header) for _ in range(tensors)]
    start = -(-header.at // alignment) * alignment
    return GgufFile(file.path, keys, _placed(file, entries, start, alignment))


class _Header:
    """Reader of a header's fields in file order; reads the file piece by piece."""

    def __init__(self, file: SourceFile) -> None:
        self._file, self._data = file, bytearray()
        self.at = self._values = 0  # offset of the next byte; values in arrays so far

    def take(self, nbytes: int) -> bytearray:
        """Return the next `nbytes` bytes. Raises ValueError beyond the file's end or a size limit."""
        start, end = self.at, self.at + nbytes
        if end > self._file.nbytes:
            raise ValueError(
                f"its header would go on to byte {end}, the file ends at {self._file.nbytes}"
            )
        if end > MAX_HEADER_NBYTES:
            raise ValueError(f"its header is larger than {MAX_HEADER_NBYTES} bytes")
        while end > (read := len(self._data)):
            self._data += self._file.read(read, min(PIECE_NBYTES, self._file.nbytes - read))
        self.at = end
        return self._data[start:end]

    def number(self, format: str) -> Any:
        """Read the next number. format: its type, as for the struct module."""
        return struct.unpack(format, self.take(struct.calcsize(format)))[0]

    def count(self, what: str, most: int) -> int:
        """Read a number of items. Raises ValueError if it is greater than `most`."""
        found: int = self.number("<Q")
        if found > most:
            raise ValueError(f"{found} {what}; expected at most {most}")
        return found

    def text(self, what: str, most: int) -> str:
        """Read the next string, of at most `most` bytes. what: its name, for messages."""
        length = int.from_bytes(self.take(8), "little")
        if length > most:
            raise ValueError(f"{what} of {length} bytes at byte {self.at}; expected at most {most}")
        return self.take(length).decode()

    def value(self, key: str) -> Value:
        """Read the next value: its type, its length if any, and its content. key: for messages."""
        kind: int = self.number("<I")
        if kind != ARRAY:
            return self._values_of(key, kind, 1)[0]
        kind = self.number("<I")
        count = self.count(f"values of {key}", MAX_VALUES - self._values)
        self._values += count
        return self._values_of(key, kind, count)

    def _values_of(self, key: str, kind: int, count: int) -> list[Value]:
        if kind == TEXT:
            return [self.text(f"a text in {key}", MAX_TEXT_NBYTES) for _ in range(count)]
        if kind not in NUMBERS:
            raise ValueError(f"{key} has the unknown type {kind}; expected numbers or texts")
        dtype = np.dtype(NUMBERS[kind])
        values = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        if kind == FLOAT and count == 1:  # shortest decimal number: 1e-5, not 9.99999e-06
            return [float(str(values[0]))]
        plain: list[Value] = (values.astype(bool) if kind == BOOL else values).tolist()
        return plain


def _keys(header: _Header, count: int) -> dict[str, Value]:
    keys: dict[str, Value] = {}
    for _ in range(count):
        key = header.text("a key", MAX_NAME_NBYTES)
        if key in keys:
            raise ValueError(f"the key {one_line(key)} is there twice")
        keys[key] = header.value(one_line(key))
    return keys


def _entry(header: _Header) -> tuple[str, tuple[int, ...], int, int]:
    """Read the next entry of the list of tensors: name, shape, type number and offset."""
    name = header.text("the name of a tensor", MAX_NAME_NBYTES)
    axes: int = header.number("<I")
    if not 1 <= axes <= MAX_AXES:
        raise ValueError(f"tensor {one_line(name)} has {axes} axes; expected 1 to {MAX_AXES}")
    sizes = struct.unpack(f"<{axes}Q", header.take(8 * axes))
    type, offset = struct.unpack("<IQ", header.take(12))
    # Reversed, because GGUF lists the contiguous axis first.
    return name, check_shape(one_line(name), sizes[::-1]), type, offset


def _placed(
    file: SourceFile,
    entries: list[tuple[str, tuple[int, ...], int, int]],
    start: int,
    alignment: int,
) -> dict[str, Tensor]:
    """Check the tensors' offsets, and return name -> tensor. start: offset of the first value."""
    tensors: dict[str, Tensor] = {}
    at = end = 0
    for name, shape, number, offset in entries:
        shown = one_line(name)
        kind = KEPT_TYPES.get(number)
        if name in tensors:
            raise ValueError(f"tensor {shown} is there twice")
        if kind is None:
            raise ValueError(f"tensor {shown} is of type {number}, which is not known here")
        if shape[-1] % kind.block or 0 in shape or (not shape[1:] and kind.block > 1):
            raise ValueError(
                f"tensor {shown} {list(shape)} cannot be {kind.name}, whose blocks are parts of rows"
            )
        if offset != at:
            raise ValueError(f"tensor {shown} is at byte {start + offset}, not {start + at}")
        end = at + math.prod(shape[:-1]) * kind.row_nbytes(shape[-1])
        if start + end > file.nbytes:
            raise ValueError(
                f"tensor {shown} ends at byte {start + end}, the file at {file.nbytes}"
            )
        tensors[name] = gguf_tensor(file, name, kind, shape, start + at)
        at = -(-end // alignment) * alignment
    if entries and file.nbytes > start + at:
        raise ValueError(f"{file.nbytes - start - at} bytes are stray after its last tensor")
    return tensors
