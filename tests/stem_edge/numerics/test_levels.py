"""Blocks of 4 bits with an offset: what GGUF files hold is kept, all else is near."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from stem_edge.export.quantization.quantizers import with_offsets
from stem_edge.numerics.quantize import F32
from stem_edge.numerics.quantizing import dequantize_blocks


def kept(matrix: F32, block: int = 32) -> F32:
    found = with_offsets(matrix, block)
    assert found.zero_points is None and found.offsets is not None
    return dequantize_blocks(found.codes, found.scales, 4) + found.offsets.repeat(block, axis=1)


def stored(kind: str, seed: int = 0) -> F32:
    """Make rows of a GGUF file, with blocks that do not use all of their codes."""
    random = np.random.default_rng(seed)
    type = gguf.GGMLQuantizationType[kind]
    _, nbytes = gguf.GGML_QUANT_SIZES[type]
    blocks = random.integers(256, size=(64, nbytes), dtype=np.uint8)
    blocks[:, :4] = random.normal(0, 0.01, (64, 2)).astype(np.float16).view(np.uint8)
    blocks[:9, -16:] &= 0x33  # codes 0 to 3
    return np.asarray(gguf.quants.dequantize(blocks, type), np.float32).reshape(16, -1)


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K"])
def test_what_a_file_holds_is_kept(kind: str) -> None:
    matrix = stored(kind)
    assert np.abs(kept(matrix) - matrix).max() < 1e-6 * np.abs(matrix).max()


def test_other_values_go_to_the_nearest_of_16_levels() -> None:
    matrix = np.random.default_rng(1).normal(size=(40, 96)).astype(np.float32)
    blocks = matrix.reshape(40, 3, 32)
    step = (blocks.max(axis=2) - blocks.min(axis=2)) / 15
    error = np.abs(kept(matrix) - matrix).reshape(blocks.shape).max(axis=2)
    assert (error <= step / 2 + 1e-6).all() and (error > step / 8).all()
