"""Matrices stored as codes of 2, 4 or 8 bits whose groups have a scale, as compressed-tensors packs them.

Its form is pack-quantized (vLLM's W4A16): codes count from 0 and lie low bits first in words of 32 bits.
Zero points of groups, if there are any, are packed likewise, but along the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np

from stem_edge.errors import CheckpointError
from stem_edge.export.tensor_files.packed_tensor import StoredCodes
from stem_edge.export.tensor_files.stored_tensor import StoredTensor
from stem_edge.numerics.quantize import F32, MIN_BLOCK, U8, unpack_codes

WORDS = {"I32": 4}  # type of packed codes, and bytes of a word
WORD = 32  # bits
BITS = 8, 4, 2  # of a code
SHAPE = {"I64": 8, "I32": 4}  # types of the sizes that a matrix has unpacked


@dataclass(frozen=True)
class GroupedTensor(StoredCodes):
    """Scaled matrix [N, K] in a file, in words of 32 bits, with several scales in a row."""

    zeros: StoredTensor | None = None  # words [ceil(N * bits / 32), groups]
    first: int = 0  # row of the zero points that is the first here

    def part(self, start: int, stop: int) -> GroupedTensor:
        """Return the matrix of rows start..stop."""
        stored, scales = self.stored.part(start, stop), self.row_scales.part(start, stop)
        return replace(self, stored=stored, row_scales=scales, first=self.first + start)

    def columns(self, start: int, stop: int) -> NoReturn:
        """Raise CheckpointError: rows of tables have no groups of this kind."""
        raise CheckpointError(
            f"{self.path}: {self.name} has codes of columns {start} to {stop} in groups; expected floats, "
            "since only products read such groups: export a model whose embeddings are not packed"
        )

    def codes(self, start: int, stop: int) -> U8:
        """Read codes [rows, K] of rows start..stop."""
        return unpack_codes(self.stored.part(start, stop).raw(), self.bits)

    def points(self, start: int, stop: int) -> U8 | None:
        """Read zero points [rows, groups] of rows start..stop; None if all are the middle."""
        if self.zeros is None:
            return None
        count, stop = WORD // self.bits, min(stop, self.shape[0]) + self.first
        word, skipped = divmod(start + self.first, count)
        words = self.zeros.part(word, -(-stop // count)).raw()
        columns = words.reshape(len(words), -1, WORD // 8).swapaxes(0, 1)
        points = unpack_codes(columns.reshape(columns.shape[0], -1), self.bits)
        return np.ascontiguousarray(points[:, skipped : stop - word * count].T)

    def rows(self, start: int, stop: int) -> F32:
        """Read rows start..stop as float32."""
        codes, scales = self.codes(start, stop), self.scales(start, stop)
        points = self.points(start, stop)
        values = codes.reshape(*scales.shape, self.group_size).astype(np.float32)
        values -= np.uint8(1 << (self.bits - 1)) if points is None else points[:, :, None]
        # No warning of what is not finite, because check_finite refuses it later.
        with np.errstate(over="ignore", invalid="ignore"):
            values *= scales[:, :, None]
        return values.reshape(len(codes), self.width)


def grouped(
    stored: StoredTensor, scales: StoredTensor, zeros: StoredTensor | None, shape: StoredTensor
) -> GroupedTensor:
    """Return codes, scales and zero points as a matrix [N, K]. Raises CheckpointError."""
    sizes = shape.integers().tolist() if shape.shape == (2,) else [0, 0]
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
    return GroupedTensor(stored, scales, bits, width, zeros)
