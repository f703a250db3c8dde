"""Decodes matrices that are stored as packed codes of 2, 4 or 8 bits with scales.

| form | codes | scales |
|---|---|---|
| gemma (QuantizedLinear and QuantizedEmbedding of transformers) | low bits first in bytes, 8 bits signed | one for each row, or for each part of a row |
| pack-quantized of compressed-tensors (vLLM's W4A16) | low bits first in words of 32 bits | one for each group; zero points, if there are any, are packed along the rows |

Codes are unsigned, except gemma's 8 bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np

from stem_edge.errors import CheckpointError
from stem_edge.export.tensor_files.tensor import Codes, Tensor, bytes_of, codes_of
from stem_edge.numerics.matrix import Matrix
from stem_edge.numerics.quantize import F32, MIN_BLOCK, U8, unpack_codes

PACKED = {"U8": 1, "I8": 1}  # types of stored codes, and bytes of each
WORDS = {"I32": 4}  # type of packed codes, and bytes of a word
WORD = 32  # bits
BITS = 8, 4, 2  # of a code
SHAPE = {"I64": 8, "I32": 4}  # types of the tensor that holds the unpacked shape


def is_grouped(matrix: Matrix) -> bool:
    """Return True for a matrix from `grouped`: codes in 32-bit words, with a scale per group."""
    return isinstance(matrix, Tensor) and matrix.dtype in WORDS and codes_of(matrix) is not None


def packed(stored: Tensor, scales: Tensor, width: int) -> Tensor:
    """Return the matrix [N, width] of codes packed in bytes. Raises CheckpointError."""
    rows, nbytes = (*stored.shape, 0, 0)[:2]
    sizes = {-(-width * bits // 8): bits for bits in BITS}
    bits = sizes.get(nbytes, 0)
    if bits == 0 or len(stored.shape) != 2 or (bits == 8) != (stored.dtype == "I8"):
        raise CheckpointError(
            f"{stored.path}: {stored.name} is {stored.dtype} {list(stored.shape)}; expected codes of 2, "
            f"4 or 8 bits for {width} columns, as transformers' gemma quantization packs them"
        )
    parts = (*scales.shape, 0, 0)[1]
    if len(scales.shape) != 2 or scales.shape[0] != rows or not parts or width % parts:
        raise CheckpointError(
            f"{scales.path}: {scales.name} is {list(scales.shape)}; expected [{rows}, 1], or a number "
            f"of scales in a row that divides {width}"
        )

    def read(start: int, stop: int) -> U8:
        found = bytes_of(stored, start, stop)
        return found ^ np.uint8(0x80) if bits == 8 else unpack_codes(found, bits)[:, :width]

    return _coded(stored, width, Codes(bits, width // parts, read, scales.rows))


def grouped(stored: Tensor, scales: Tensor, zeros: Tensor | None, shape: Tensor) -> Tensor:
    """Return the matrix [N, K] of codes packed in 32-bit words. Raises CheckpointError."""
    sizes = shape.numbers().astype(np.int64).tolist() if shape.shape == (2,) else [0, 0]
    rows, width = sizes
    words = (*stored.shape, 0, 0)[:2]
    bits = {width * bits // WORD: bits for bits in BITS}.get(words[1], 0)
    if bits == 0 or len(stored.shape) != 2 or words[0] != rows or width * bits % WORD:
        raise CheckpointError(
            f"{stored.path}: {stored.name} is {list(stored.shape)}; expected words of 32 bits with codes "
            f"of 2, 4 or 8 bits for a matrix {sizes}, as {shape.name} says"
        )
    groups = (*scales.shape, 0, 0)[1]
    group = width // groups if groups and width % groups == 0 else 0
    if len(scales.shape) != 2 or scales.shape[0] != rows or not group or group % MIN_BLOCK:
        raise CheckpointError(
            f"{scales.path}: {scales.name} is {list(scales.shape)}; expected [{rows}, groups], with "
            f"groups of a multiple of {MIN_BLOCK} of the {width} columns"
        )
    expected = (-(-rows * bits // WORD), groups)
    if zeros is not None and zeros.shape != expected:
        raise CheckpointError(
            f"{zeros.path}: {zeros.name} is {list(zeros.shape)}; expected {list(expected)}"
        )

    def read(start: int, stop: int) -> U8:
        return unpack_codes(bytes_of(stored, start, stop), bits)

    def points(start: int, stop: int) -> U8:
        count, stop = WORD // bits, min(stop, rows)
        word, skipped = divmod(start, count)
        words = bytes_of(cast(Tensor, zeros), word, -(-stop // count))
        columns = words.reshape(len(words), -1, WORD // 8).swapaxes(0, 1)
        found = unpack_codes(columns.reshape(columns.shape[0], -1), bits)
        return np.ascontiguousarray(found[:, skipped : stop - word * count].T)

    return _coded(stored, width, Codes(bits, group, read, scales.rows, points if zeros else None))


def _coded(stored: Tensor, width: int, codes: Codes) -> Tensor:
    """Return the matrix [N, width] that codes decode to, with the name of tensor `stored`."""

    def rows(start: int, stop: int) -> F32:
        scales, found = codes.scales(start, stop), codes.read(start, stop)
        values = found.reshape(*scales.shape, codes.group_size).astype(np.float32)
        middle = np.uint8(1 << (codes.bits - 1))
        values -= middle if codes.points is None else codes.points(start, stop)[:, :, None]
        # No warning of what is not finite, because check_finite refuses it later.
        with np.errstate(over="ignore", invalid="ignore"):
            values *= scales[:, :, None]
        return values.reshape(len(found), width)

    matrix = stored.computed(rows, (stored.shape[0], width))
    return replace(matrix, nbytes=stored.shape[0] * width * codes.bits // 8, codes=codes)
