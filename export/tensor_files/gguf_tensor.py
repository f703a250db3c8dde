"""Lazy tensors of GGUF files: read as stored bytes, as floats, or as codes of 4 and 8 bits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from stem_edge.export.tensor_files.source_file import SourceFile
from stem_edge.export.tensor_files.tensor import Codes, Read, Stored, Tensor, remembering
from stem_edge.ggml.types import TensorType
from stem_edge.numerics.matrix import Matrix
from stem_edge.numerics.quantize import F32, U8

TILE_NBYTES = 1 << 18  # bytes decoded at once, so that they stay in the CPU's cache
# Bits of a code in block types that consist of a float16 scale, an offset (Q4_1 only) and codes.
BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
OFFSET = "Q4_1"
MIDDLE = np.float32(8)  # code whose value is the offset in Codes


def gguf_tensor(
    file: SourceFile, name: str, type: TensorType, shape: tuple[int, ...], at: int
) -> Tensor:
    """Return a lazy tensor of a GGUF file. at: offset of its first value."""
    *inner, width = shape[1:] or (1,)
    each = math.prod(inner) * type.row_nbytes(width)

    def read(start: int, stop: int) -> U8:
        count = max(0, min(stop, shape[0]) - start)
        data = file.values(at + start * each, count * each, "u1")
        return data.reshape(count, *inner, type.row_nbytes(width))

    def rows(start: int, stop: int) -> F32:
        codes = read(start, stop)
        return decoded(codes.reshape(-1, codes.shape[-1]), type).reshape(-1, *shape[1:])

    return Tensor(shape, rows, name, file.path, type.name, stored=Stored(type, read))


def stacked_matrix(tensor: Tensor, number: int) -> Tensor:
    """Return one matrix [N, K] of a tensor [E, N, K]: index `number` of the first axis."""

    def change(read: Read[Any]) -> Read[Any]:
        return lambda start, stop: read(number, number + 1)[0][start:stop]

    return replace(tensor.reread(1, change), shape=tensor.shape[1:])


def with_codes(matrix: Matrix) -> Tensor | None:
    """Return a GGUF matrix as codes with scales; None unless it is Q4_0, Q4_1 or Q8_0."""
    stored = matrix.stored if isinstance(matrix, Tensor) else None
    if not isinstance(matrix, Tensor) or stored is None or stored.type.name not in BITS:
        return None
    kind, width, bits = stored.type, matrix.shape[1], BITS[stored.type.name]
    read = remembering(stored.read)

    def cut(start: int, stop: int) -> U8:
        return read(start, stop).reshape(-1, kind.nbytes)

    def floats(start: int, stop: int, at: int) -> F32:
        found = np.ascontiguousarray(cut(start, stop)[:, at : at + 2]).view("<f2")
        return found.astype(np.float32).reshape(-1, width // kind.block)

    def codes(start: int, stop: int) -> U8:
        blocks = cut(start, stop)[:, kind.nbytes - kind.block * bits // 8 :]
        if bits == 8:
            return (blocks ^ np.uint8(0x80)).reshape(-1, width)
        halves = np.concatenate([blocks & np.uint8(15), blocks >> np.uint8(4)], axis=1)
        return halves.reshape(-1, width)

    def offsets(start: int, stop: int) -> F32:
        return floats(start, stop, 2) + MIDDLE * floats(start, stop, 0)

    found = Codes(
        bits,
        kind.block,
        codes,
        lambda start, stop: floats(start, stop, 0),
        offsets=offsets if kind.name == OFFSET else None,
        scale_type="fp16",
    )
    return replace(matrix, codes=found, stored=None)


def coded_rows(table: Tensor, width: int) -> Tensor:
    """Return a table as codes if it is Q4_0 or Q8_0 and `width` is a multiple of 32; else unchanged."""
    codes = None if (coded := with_codes(table)) is None else coded.codes
    fits = codes is not None and codes.offsets is None and width % codes.group_size == 0
    return coded if fits and coded is not None else table


def decoded(codes: U8, type: TensorType) -> F32:
    import gguf  # imported only here, because the import takes long

    number = gguf.GGMLQuantizationType(type.number)
    step = max(1, TILE_NBYTES // codes.shape[1])
    tiles = [codes[start : start + step] for start in range(0, len(codes), step)] or [codes]
    with np.errstate(all="ignore"):  # check_finite refuses infinite values later
        # Each tile is passed as one row, because gguf loops over rows in Python.
        values = [
            gguf.quants.dequantize(tile.reshape(1, -1), number).reshape(len(tile), -1)
            for tile in tiles
        ]
    return np.ascontiguousarray(np.concatenate(values), np.float32)
