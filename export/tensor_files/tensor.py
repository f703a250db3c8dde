"""Lazy tensors of a checkpoint: each has a shape and functions that read its rows when needed.

The code that opens a file checks that its tensors lie within the file.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from stem_edge.errors import CheckpointError
from stem_edge.export.tensor_files.source_file import SourceFile
from stem_edge.ggml.types import TensorType
from stem_edge.numerics.matrix import Matrix
from stem_edge.numerics.quantize import F32, U8
from stem_edge.tables.rows import ScaleType

FLOATS, INTEGERS = ("BF16", "F16", "F32", "F64"), ("I32", "I64")
# Stored type -> numpy's type of its values, or of their bytes. Tensors of other types are not read.
_NUMPY = {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "F64": "<f8", "I32": "<i4", "I64": "<i8"}
_NUMPY |= {"U8": "|u1", "I8": "|i1", "F8_E4M3": "|u1", "F8_E8M0": "|u1"}
MAX_VALUES = 1 << 48  # of one tensor, more than any file holds
MAX_AXES = 8

Rows = TypeVar("Rows", bound=npt.NDArray[Any])
Read: TypeAlias = Callable[[int, int], Rows]  # rows start..stop


@dataclass(frozen=True)
class Codes:
    """Quantized codes of a matrix [N, K], with one scale for each group of columns in a row."""

    bits: int
    group_size: int
    read: Read[U8]  # [n, K], a code in each byte
    scales: Read[F32]  # [n, groups]
    offsets: Read[F32] | None = None  # [n, groups], values of the code 2**(bits-1); None: 0
    scale_type: ScaleType = "fp32"  # smallest type that holds the scales exactly


@dataclass(frozen=True)
class Stored:
    """Stored bytes of a matrix's rows, in one of ggml's types."""

    type: TensorType
    read: Read[U8]  # [n, bytes of a row]


@dataclass(frozen=True, repr=False)
class Tensor:
    """Lazy matrix [N, K] or vector of a checkpoint, or stacked matrices [E, N, K]."""

    shape: tuple[int, ...]
    rows: Read[F32]
    name: str = ""  # in its file
    path: Path = Path()
    dtype: str = "F32"
    raw: Read[Any] | None = None  # rows as numbers of the file's own type
    codes: Codes | None = None
    stored: Stored | None = None

    def __repr__(self) -> str:
        return f"a tensor {list(self.shape)} of {self.dtype}"

    def numbers(self, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        """Read rows (default: all) as the file's dtype. Raises TypeError for computed tensors."""
        if self.raw is None:
            raise TypeError(f"{self.name} is computed")
        found: npt.NDArray[Any] = self.raw(start, self.shape[0] if stop is None else stop)
        return found

    def computed(self, rows: Read[F32], shape: tuple[int, ...] | None = None) -> Tensor:
        """Return a copy with float32 rows from the function `rows`. shape: of the copy; None: unchanged."""
        shape = self.shape if shape is None else shape
        return replace(self, shape=shape, rows=rows, raw=None, codes=None, stored=None)

    def reread(self, count: int, change: Callable[[Read[Any]], Read[Any]]) -> Tensor:
        """Return a tensor of `count` rows whose reading functions are replaced.

        change: called with each reading function (rows, codes, stored bytes); returns its replacement.
        """
        codes, stored = self.codes, self.stored
        if codes is not None:
            codes = replace(
                codes,
                read=change(codes.read),
                scales=change(codes.scales),
                offsets=codes.offsets and change(codes.offsets),
            )
        return replace(
            self,
            shape=(count, *self.shape[1:]),
            rows=change(self.rows),
            raw=self.raw and change(self.raw),
            codes=codes,
            stored=stored and replace(stored, read=change(stored.read)),
        )

    def part(self, start: int, stop: int) -> Tensor:
        count = max(0, min(stop, self.shape[0]) - start)
        return self.reread(count, lambda read: lambda a, b: read(start + a, start + min(b, count)))

    def columns(self, width: int) -> list[Tensor]:
        """Divide the matrix into matrices of `width` columns. They share one read of each row.

        Raises CheckpointError if columns that share a scale would be separated.
        """
        count, total = self.shape
        shared = self.reread(count, remembering)
        return [
            replace(
                shared.computed(_cut(shared.rows, first, first + width), (count, width)),
                codes=shared.codes and self._some_codes(shared.codes, first, width),
            )
            for first in range(0, total, width)
        ]

    def _some_codes(self, codes: Codes, first: int, width: int) -> Codes:
        size, total = codes.group_size, self.shape[1]
        if size < total and width % size:
            raise CheckpointError(
                f"{self.path}: {self.name} has {total // size} scales for {total} columns; expected "
                f"one, or one for each {width}"
            )
        last = max(first // size + 1, (first + width) // size)
        return replace(
            codes,
            group_size=min(size, width),
            read=_cut(codes.read, first, first + width),
            scales=_cut(codes.scales, first // size, last),
        )


def remembering(read: Read[Rows]) -> Read[Rows]:
    """Return a function that reads like `read`, and caches the last result of each thread."""
    last = threading.local()

    def again(start: int, stop: int) -> Rows:
        if getattr(last, "span", None) != (start, stop):
            last.found, last.span = read(start, stop), (start, stop)
        return cast(Rows, last.found)

    return again


def _cut(read: Read[Rows], first: int, last: int) -> Read[Rows]:
    """Return a function that reads columns first..last."""
    return lambda start, stop: cast(Rows, read(start, stop)[:, first:last])


def bytes_of(tensor: Tensor, start: int, stop: int) -> U8:
    """Read rows start..stop of a matrix as bytes of the file's dtype [n, bytes of a row]."""
    return np.ascontiguousarray(tensor.numbers(start, stop)).view(np.uint8)


def codes_of(matrix: Matrix) -> Codes | None:
    return matrix.codes if isinstance(matrix, Tensor) else None


def joined(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """Concatenate tensors lazily along axis 0 (rows) or 1 (columns)."""
    if len(tensors) == 1:
        return tensors[0]
    sizes, shape = [tensor.shape[axis] for tensor in tensors], tensors[0].shape
    starts = [0, *accumulate(sizes[:-1])] if axis == 0 else [0] * len(sizes)

    def rows(start: int, stop: int) -> F32:
        parts = zip(starts, tensors, strict=True)
        pieces = [tensor.rows(max(start - at, 0), max(stop - at, 0)) for at, tensor in parts]
        return np.concatenate(pieces, axis)

    return tensors[0].computed(rows, (*shape[:axis], sum(sizes), *shape[axis + 1 :]))


def file_tensor(
    file: SourceFile,
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    at: int,
) -> Tensor:
    """Return a lazy tensor of plain numbers in a file. at: offset of the first value."""
    sizes = shape or (1,)

    def raw(start: int, stop: int) -> npt.NDArray[Any]:
        part = max(0, min(stop, sizes[0]) - start), *sizes[1:]
        kind = np.dtype(_NUMPY[dtype])
        first = at + start * math.prod(sizes[1:]) * kind.itemsize
        return file.values(first, math.prod(part), kind).reshape(part)

    def rows(start: int, stop: int) -> F32:
        values = raw(start, stop)
        if dtype == "BF16":  # the upper half of a float32
            return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        # No warning if a float64 overflows, because check_finite refuses infinite values later.
        with np.errstate(over="ignore"):
            return cast(F32, np.ascontiguousarray(values, np.float32))

    return Tensor(shape, rows, name, file.path, dtype, raw)


def check_shape(name: str, shape: Sequence[object]) -> tuple[int, ...]:
    """Return a header's `shape` as a tuple. Raises ValueError for invalid or too large sizes."""
    sizes = tuple(size for size in shape if type(size) is int and 0 <= size <= MAX_VALUES)
    shown = f"[{', '.join(str(size)[:24] for size in shape[:MAX_AXES])}]"
    if len(sizes) != len(shape) or len(sizes) > MAX_AXES:
        raise ValueError(f"tensor {name} has the impossible shape {shown}")
    if math.prod(sizes) > MAX_VALUES:
        raise ValueError(f"tensor {name} {shown} has more than {MAX_VALUES} values")
    return sizes


def check_type(tensor: Tensor, types: Collection[str] = FLOATS) -> Tensor:
    """Return the tensor. Raises CheckpointError unless its type is one of `types`."""
    if tensor.dtype not in types:
        raise CheckpointError(
            f"{tensor.path}: {tensor.name} is {tensor.dtype}; expected one of {', '.join(types)}: "
            "export from weights that are not quantized"
        )
    return tensor
