"""Scale search: never worse than the scale of the block's range."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from matrices import in_blocks, random_matrix

from stem_edge.numerics.block_search import search_blocks
from stem_edge.numerics.quantize import F32
from stem_edge.numerics.quantizing import (
    Rounded,
    dequantize_blocks,
    quantize_asymmetric,
)

CASES = [(bits, block) for bits in (4, 8) for block in (16, 32, 128)]


def nearest(matrix: F32, bits: int, block: int, *, asymmetric: bool) -> Rounded:
    if asymmetric:
        return quantize_asymmetric(matrix, bits, block)
    return in_blocks(matrix, bits, block)


def stored(blocks: Rounded, bits: int) -> F32:
    return dequantize_blocks(blocks.codes, blocks.scales, bits, blocks.zero_points)


def losses(matrix: F32, found: F32, block: int, weights: F32 | None = None) -> F32:
    """Weighted squared error of each block over its greatest magnitude's square, float64."""
    exact = matrix.astype(np.float64).reshape(len(matrix), -1, block)
    peak = np.maximum(np.abs(exact).max(axis=2, keepdims=True), 1e-300)
    error = ((found.reshape(exact.shape) - exact) / peak) ** 2
    if weights is not None:
        error *= weights.reshape(-1, block)
    return np.asarray(error.sum(axis=2))


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize(("bits", "block"), CASES)
@pytest.mark.parametrize("seed", range(3))
def test_no_block_loses_more_than_by_rounding(
    bits: int, block: int, seed: int, asymmetric: bool
) -> None:
    rng = np.random.default_rng(seed)
    matrix = random_matrix(seed)
    matrix[8, :128] = 3.5  # all alike
    matrix[9] = np.abs(matrix[9]) + 100 * np.abs(matrix[9]).max()  # far from zero
    for weights in (None, (rng.random(256) ** 4).astype(np.float32)):
        found = search_blocks(matrix, bits, block, weights, asymmetric=asymmetric)
        usual = nearest(matrix, bits, block, asymmetric=asymmetric)
        lost, allowed = (losses(matrix, stored(b, bits), block, weights) for b in (found, usual))
        assert (lost <= allowed * (1 + 1e-4) + 1e-12).all()
        assert np.isfinite(found.scales).all()


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize(("block", "most"), [(32, 0.93), (128, 0.91)])
def test_normal_values_lose_a_tenth_less(block: int, most: float, asymmetric: bool) -> None:
    matrix = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    found = search_blocks(matrix, 4, block, asymmetric=asymmetric)
    usual = nearest(matrix, 4, block, asymmetric=asymmetric)
    lost, allowed = (losses(matrix, stored(b, 4), block).sum() for b in (found, usual))
    assert lost < most * allowed


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_and_what_is_too_small_become_zero(bits: int, asymmetric: bool) -> None:
    matrix = np.zeros((2, 32), np.float32)
    matrix[1, :2] = 1e-44, -1e-40
    found = search_blocks(matrix, bits, 16, asymmetric=asymmetric)
    assert not found.scales.any()
    assert not stored(found, bits).any()


def bfloat16(values: F32) -> F32:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


ROUNDED: dict[str, Callable[[F32], F32]] = {
    "float32": lambda values: values,
    "bfloat16": bfloat16,
    "float16": lambda values: values.astype(np.float16).astype(np.float32),
}


@pytest.mark.parametrize("rounded", ROUNDED)
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("codes", [(0, 16), (1, 16), (3, 13), (7, 10)])
def test_weights_on_a_grid_of_four_bits_come_out_as_they_are(
    codes: tuple[int, int], asymmetric: bool, rounded: str
) -> None:
    """Training for int4 leaves them; whatever codes a block has, its own scale is found.

    Those that were rounded when they were saved come out as multiples that round to the same.
    """
    random = np.random.default_rng(0)
    drawn = random.integers(*codes, (16, 8, 32)).astype(np.float32) - 8
    scales = random.uniform(0.01, 0.1, (16, 8, 1)).astype(np.float16).astype(np.float32)
    matrix = ROUNDED[rounded]((drawn * scales).reshape(16, 256))
    for weights in (None, random.uniform(0.1, 1, 256).astype(np.float32)):
        found = stored(search_blocks(matrix, 4, 32, weights, asymmetric=asymmetric), 4)
        assert (ROUNDED[rounded](found) == matrix).all()
