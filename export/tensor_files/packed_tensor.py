"""Matrices stored as codes of 2, 4 or 8 bits with a scale for each row, as Gemma's QAT models have them.

transformers defines the form (QuantizedLinear and QuantizedEmbedding of integrations/gemma_quant.py):
codes of 2 and 4 bits count from 0 and lie low bits first in bytes; codes of 8 bits are signed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from stem_edge.errors import CheckpointError
from stem_edge.export.tensor_files.stored_tensor import StoredTensor
from stem_edge.numerics.matrix import Matrix
from stem_edge.numerics.quantize import F32, U8, unpack_codes
from stem_edge.tables.rows import ScaleType

PACKED = {"U8": 1, "I8": 1}  # types of stored codes, and bytes of each


@runtime_checkable
class Scaled(Matrix, Protocol):
    """Matrix [N, K] that is stored as codes with scales for each row, or for groups of its columns."""

    @property
    def bits(self) -> int:
        """Bits of a code."""

    @property
    def group_size(self) -> int:
        """Values that share a scale."""

    @property
    def scale_type(self) -> ScaleType:
        """Type that holds the scales exactly."""

    def codes(self, start: int, stop: int) -> U8:
        """Codes [rows, K] of rows start..stop, one in a byte."""

    def scales(self, start: int, stop: int) -> F32:
        """Scales [rows, groups] of rows start..stop."""

    def points(self, start: int, stop: int) -> U8 | None:
        """Codes [rows, groups] that stand for 0; None: 2**(bits-1) everywhere."""


@dataclass(frozen=True)
class StoredCodes:
    """Codes in a file, with their scales: what all Scaled matrices of files share."""

    stored: StoredTensor  # [N, some columns of packed codes]
    row_scales: StoredTensor  # [N, groups]
    bits: int
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.stored.shape[0], self.width

    @property
    def group_size(self) -> int:
        """Values that share a scale."""
        return self.width // self.row_scales.shape[1]

    @property
    def scale_type(self) -> ScaleType:
        """Type that holds the scales exactly."""
        return "fp32"

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self.stored.path

    @property
    def name(self) -> str:
        """Name of the codes in the file."""
        return self.stored.name

    @property
    def nbytes(self) -> int:
        """Bytes of the codes."""
        return self.shape[0] * self.width * self.bits // 8

    def scales(self, start: int, stop: int) -> F32:
        """Read scales [rows, groups] of rows start..stop."""
        return self.row_scales.rows(start, stop)


@dataclass(frozen=True)
class PackedTensor(StoredCodes):
    """Columns first..first+width of a Scaled matrix in a file.

    Its scales are one for each row, or one for each part of a row.
    """

    first: int = 0

    def part(self, start: int, stop: int) -> PackedTensor:
        """Return the matrix of rows start..stop."""
        stored, scales = self.stored.part(start, stop), self.row_scales.part(start, stop)
        return replace(self, stored=stored, row_scales=scales)

    def columns(self, start: int, stop: int) -> PackedTensor:
        """Return the matrix of columns start..stop, which have one scale in a row."""
        parts = self.row_scales.shape[1]
        each = self.width // parts
        if parts > 1 and (start % each or stop - start != each):
            raise CheckpointError(
                f"{self.path}: {self.row_scales.name} has {parts} scales for {self.width} columns; "
                f"expected one, or one for each {stop - start}"
            )
        scales = self.row_scales
        if parts > 1:
            scales = scales.columns(start // each, start // each + 1)
        return replace(self, row_scales=scales, first=self.first + start, width=stop - start)

    def codes(self, start: int, stop: int) -> U8:
        """Read codes [rows, width] of rows start..stop."""
        count = 8 // self.bits
        first, last = self.first // count, -(-(self.first + self.width) // count)
        packed = self.stored.columns(first, last).part(start, stop).raw()
        if self.bits == 8:
            return packed.view(np.uint8) ^ np.uint8(0x80)
        skipped = self.first - first * count
        return unpack_codes(packed, self.bits)[:, skipped : skipped + self.width]

    def points(self, start: int, stop: int) -> None:
        """Return None: the middle stands for 0."""

    def rows(self, start: int, stop: int) -> F32:
        """Read rows start..stop as float32."""
        values = self.codes(start, stop).astype(np.float32) - np.float32(1 << (self.bits - 1))
        scales = self.scales(start, stop)
        # No warning of what is not finite, because check_finite refuses it later.
        with np.errstate(over="ignore", invalid="ignore"):
            values *= np.repeat(scales, self.width // scales.shape[1], axis=1)
        return values


def packed(stored: StoredTensor, scales: StoredTensor, width: int) -> PackedTensor:
    """Return codes and scales as a matrix of this many columns. Raises CheckpointError."""
    rows, nbytes = (*stored.shape, 0, 0)[:2]
    sizes = {-(-width * bits // 8): bits for bits in (8, 4, 2)}
    bits = sizes.get(nbytes, 0)
    if bits == 0 or len(stored.shape) != 2 or (bits == 8) != (stored.dtype == "I8"):
        raise CheckpointError(
            f"{stored.path}: {stored.name} is {stored.dtype} {list(stored.shape)}; expected codes of 2, "
            f"4 or 8 bits for {width} columns, as transformers' gemma quantization packs them"
        )
    if (
        len(scales.shape) != 2
        or scales.shape[0] != rows
        or not scales.shape[1]
        or width % scales.shape[1]
    ):
        raise CheckpointError(
            f"{scales.path}: {scales.name} is {list(scales.shape)}; expected [{rows}, 1], or a number "
            f"of scales in a row that divides {width}"
        )
    return PackedTensor(stored, scales, bits, width)
