"""Tensors in files of a checkpoint, read by position when their rows are asked for.

Files are not mapped, because the process would be killed if one were truncated meanwhile; so it is
an error. Only plain numbers are read; the code that opens a file checks that they are within it.
"""

from __future__ import annotations

import math
import threading
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from stem_edge.errors import CheckpointError
from stem_edge.files import disk
from stem_edge.numerics.quantize import F32

# Type -> bytes of a value.
FLOATS = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
INTEGERS = {"I32": 4, "I64": 8}
# Types that are never read, but must be known, because files may hold such tensors, too.
OTHERS = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "U32": 4, "U64": 8, "C64": 8, "C128": 16}
OTHERS |= {f"F8_{kind}": 1 for kind in ("E4M3", "E5M2", "E8M0", "E4M3FNUZ", "E5M2FNUZ")}
VALUE_NBYTES = FLOATS | INTEGERS | OTHERS
_NUMPY = {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "F64": "<f8", "I32": "<i4", "I64": "<i8"}
_NUMPY |= {"U8": "|u1", "I8": "|i1"}
MAX_VALUES = 1 << 48  # of one tensor, more than any file holds
MAX_AXES = 8
PIECE_NBYTES = 1 << 22  # of a file, read at a time for a checksum

HEAD_NBYTES = 512
ZIP = b"PK\x03\x04"
TAR_AT = 257  # offset of a tar archive's magic
_HEADS = {
    ZIP: "a zip archive (torch's .pth and .pt, numpy's .npz, or any other)",
    b"PK\x05\x06": "an empty zip archive",
    b"\x1f\x8b": "a gzip archive",
    b"BZh": "a bzip2 archive",
    b"\xfd7zXZ\0": "an xz archive",
    b"\x28\xb5\x2f\xfd": "a zstandard archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!": "a rar archive",
    b"GGUF": "a GGUF file",
    b"\x93NUMPY": "an array of numpy",
    b"\x89HDF": "an HDF5 file",
    b"\x7fELF": "a program",
    b"#!": "a program",
    b"version https://git-lfs": "the pointer that git-lfs leaves in place of a file",
    b"<": "a web page",
}


def looks_like(head: bytes) -> str | None:
    """Describe a file by its first bytes; None if they are not known."""
    if head[TAR_AT : TAR_AT + 5] == b"ustar":
        return "a tar archive"
    if len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5:
        return "a bare pickle, which can carry code"
    return next((what for start, what in _HEADS.items() if head.startswith(start)), None)


class SourceFile:
    """File of a checkpoint, open as long as one of its tensors is in use, for any thread.

    Links are followed, because caches of models are folders of links; their targets must be regular
    files.
    """

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError."""
        self.path = path
        try:
            self._descriptor = disk.open_file(path.resolve())
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: missing; copy all files of the model") from error
        except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(
                f"{path}: cannot open ({reason}); copy the model again, as plain files"
            ) from error
        weakref.finalize(self, disk.close, self._descriptor)
        self.nbytes = disk.size(self._descriptor)

    @property
    def head(self) -> bytes:
        """First bytes of the file."""
        return self.read(0, min(HEAD_NBYTES, self.nbytes))

    def read(self, at: int, nbytes: int) -> bytes:
        """Read bytes that the caller knows to be in the file. Raises CheckpointError."""
        return self._fill(np.empty(nbytes, np.uint8), at).tobytes()

    def values(self, at: int, count: int, dtype: str) -> npt.NDArray[Any]:
        """Read values of a numpy type from byte `at` on. Raises CheckpointError."""
        array = np.empty(count, dtype)
        self._fill(array.view(np.uint8), at)
        return array

    def _fill(self, array: npt.NDArray[np.uint8], at: int) -> npt.NDArray[np.uint8]:
        try:
            done = disk.fill(self._descriptor, array.data, at)
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: cannot read from byte {at} on ({error.strerror or error}); check "
                "the disk, or copy the file again"
            ) from error
        if done < len(array):
            raise CheckpointError(
                f"{self.path}: ends at byte {at + done}, but had {self.nbytes} bytes before; it was "
                "changed during the export: wait until it is written, and export again"
            )
        return array


class Checksum:
    """CRC-32 of a part of a file, compared once, before its first value is used."""

    def __init__(self, file: SourceFile, at: int, nbytes: int, crc32: int) -> None:
        self._file, self._at, self._nbytes, self._crc32 = file, at, nbytes, crc32
        self._lock, self._compared = threading.Lock(), False

    def compare(self) -> None:
        """Raise CheckpointError if the part differs."""
        with self._lock:
            if self._compared:
                return
            found = 0
            for at in range(0, self._nbytes, PIECE_NBYTES):
                piece = min(PIECE_NBYTES, self._nbytes - at)
                found = zlib.crc32(self._file.values(self._at + at, piece, "u1").data, found)
            if found != self._crc32:
                raise CheckpointError(
                    f"{self._file.path}: the checksum of {self._nbytes} bytes at byte {self._at} is "
                    f"{found:08x}, expected {self._crc32:08x}; the file is damaged: copy it again"
                )
            self._compared = True


@dataclass(frozen=True, repr=False)
class StoredTensor:
    """Tensor in a file: a Matrix, or matrices [N, K] that are stacked in one [E, N, K]."""

    file: SourceFile
    name: str
    dtype: str
    shape: tuple[int, ...]
    at: int  # byte of the first value
    strides: tuple[int, ...] = ()  # in values; default: rows lie one after another
    checksum: Checksum | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "strides", self.strides or plain_strides(self.shape))

    def __repr__(self) -> str:
        return f"a tensor {list(self.shape)} of {self.dtype}"

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self.file.path

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * VALUE_NBYTES[self.dtype]

    def named(self, name: str) -> StoredTensor:
        """Return the tensor under another name."""
        return replace(self, name=name)

    def part(self, start: int, stop: int) -> StoredTensor:
        """Return the tensor of rows start..stop."""
        rows = max(0, min(stop, self.shape[0]) - start)
        at = self.at + start * self.strides[0] * VALUE_NBYTES[self.dtype]
        return replace(self, shape=(rows, *self.shape[1:]), at=at)

    def columns(self, start: int, stop: int) -> StoredTensor:
        """Return the matrix of columns start..stop."""
        at = self.at + start * self.strides[1] * VALUE_NBYTES[self.dtype]
        return replace(self, shape=(self.shape[0], stop - start), at=at)

    def last(self, place: int) -> StoredTensor:
        """Return the vector of the values at a place of the last axis, of a tensor [N, 1, K]."""
        at = self.at + place * self.strides[-1] * VALUE_NBYTES[self.dtype]
        return replace(self, shape=self.shape[:1], strides=self.strides[:1], at=at)

    def rows(self, start: int, stop: int) -> F32:
        """Read rows start..stop as float32."""
        return self.part(start, stop).all()

    def all(self) -> F32:
        """Read all values as float32."""
        values = self._values()
        if self.dtype == "BF16":  # the upper half of a float32
            return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        # No warning if a float64 overflows, because check_finite refuses infinite values later.
        with np.errstate(over="ignore"):
            return cast(F32, np.ascontiguousarray(values, np.float32))

    def raw(self) -> npt.NDArray[np.uint8]:
        """Read all values of a type of one byte as uint8."""
        return np.ascontiguousarray(self._values()).view(np.uint8)

    def integers(self) -> npt.NDArray[np.int64]:
        """Read all values as int64."""
        return self._values().astype(np.int64)

    def _values(self) -> npt.NDArray[Any]:
        dtype = _NUMPY[self.dtype]
        if 0 in self.shape:
            return np.empty(self.shape, dtype)
        if self.checksum is not None:
            self.checksum.compare()
        found = self.file.values(self.at, extent(self.shape, self.strides), dtype)
        if self.strides == plain_strides(self.shape):
            return found.reshape(self.shape)
        strides = [step * found.itemsize for step in self.strides]
        return np.lib.stride_tricks.as_strided(found, self.shape, strides)


class Joined:
    """Matrix of some tensors, end to end (axis 0) or side by side (axis 1)."""

    def __init__(self, tensors: Sequence[StoredTensor], axis: int) -> None:
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        sizes, shape = [tensor.shape[axis] for tensor in tensors], tensors[0].shape
        self.shape: tuple[int, ...] = (*shape[:axis], sum(sizes), *shape[axis + 1 :])
        self._starts = [0, *accumulate(sizes[:-1])] if axis == 0 else [0] * len(sizes)
        self._tensors, self._axis = tensors, axis

    def rows(self, start: int, stop: int) -> F32:
        """Read rows start..stop as float32."""
        parts = zip(self._starts, self._tensors, strict=True)
        pieces = [tensor.rows(max(start - at, 0), max(stop - at, 0)) for at, tensor in parts]
        return np.concatenate(pieces, self._axis)


def joined(tensors: Sequence[StoredTensor], axis: int) -> StoredTensor | Joined:
    """Return some tensors as one matrix."""
    return tensors[0] if len(tensors) == 1 else Joined(tensors, axis)


def plain_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in values, of a tensor in C order."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Count the values from the first to the last of a tensor, with those in between."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def check_shape(name: str, shape: Sequence[object]) -> tuple[int, ...]:
    """Return a shape that a file claims, if it is possible. Raises ValueError."""
    sizes = tuple(size for size in shape if type(size) is int and 0 <= size <= MAX_VALUES)
    shown = f"[{', '.join(str(size)[:24] for size in shape[:MAX_AXES])}]"
    if len(sizes) != len(shape) or len(sizes) > MAX_AXES:
        raise ValueError(f"tensor {name} has the impossible shape {shown}")
    if math.prod(sizes) > MAX_VALUES:
        raise ValueError(f"tensor {name} {shown} has more than {MAX_VALUES} values")
    return sizes


def check_type(tensor: StoredTensor, types: dict[str, int] = FLOATS) -> StoredTensor:
    """Return the tensor, if it has one of these types. Raises CheckpointError."""
    if tensor.dtype not in types:
        raise CheckpointError(
            f"{tensor.path}: {tensor.name} is {tensor.dtype}; expected one of {', '.join(types)}: "
            "export from weights that are not quantized"
        )
    return tensor
