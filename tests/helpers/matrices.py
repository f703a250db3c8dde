"""Matrices that are hard to quantize, and tensors of checkpoints that are no file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from stem_edge.export.tensor_files.tensor import Tensor
from stem_edge.numerics.quantize import F32
from stem_edge.numerics.quantizing import Rounded, cut, encode
from stem_edge.tables.packing import range_scales


def in_memory(values: F32) -> Tensor:
    """Return a tensor of a checkpoint over an array."""
    return Tensor(values.shape, lambda start, stop: values[start:stop])


def recorded_in(spans: list[tuple[int, ...]]) -> Callable[[Any], Any]:
    """Return a change for Tensor.reread: each read appends its span to `spans`."""

    def recorded(read: Any, *span: int) -> Any:
        spans.append(span)
        return read(*span)

    return partial(partial, recorded)


def random_matrix(seed: int) -> F32:
    """Make rows of very different scales: one of zeros, one all negative, some with outliers."""
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((12, 256)).astype(np.float32)
    powers = np.array([-30, -8, -1, 0, 0, 0, 0, 0, 1, 8, 30, 37], np.float32)
    matrix *= np.float32(10) ** powers.reshape(-1, 1)
    matrix[4] = 0
    matrix[5] = -np.abs(matrix[5])
    matrix[6, ::16] = 1000
    matrix[7, 3] = np.finfo(np.float32).max
    return matrix


def in_blocks(matrix: F32, bits: int, block: int) -> Rounded:
    """Round to the nearest code, with scales from the range of each block."""
    blocks = cut(matrix, block)
    return Rounded(*encode(blocks, range_scales(blocks, bits), np.float32(1 << (bits - 1)), bits))
