"""GPTQ on matrices whose best rounding is known, or measured by their products."""

from __future__ import annotations

import numpy as np
import pytest
from matrices import in_blocks

from stem_edge.export.quantization.gptq import solve, typical_inputs
from stem_edge.numerics.block_search import search_blocks
from stem_edge.numerics.quantize import F32
from stem_edge.numerics.quantizing import (
    Rounded,
    dequantize_blocks,
    quantize_asymmetric,
)

K, N, T = 256, 96, 2048


def correlated(seed: int) -> F32:
    """Inputs [T, K] that lie near a space of few dimensions, as hidden states do."""
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((K, K)) * (np.arange(1, K + 1) ** -0.8)[:, None]
    return (rng.standard_normal((T, K)) @ mix).astype(np.float32)


def matrix(seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal((N, K)).astype(np.float32)


def loss(x: F32, exact: F32, blocks: Rounded, bits: int) -> float:
    """Mean squared error of the products with x, relative to them."""
    stored = dequantize_blocks(blocks.codes, blocks.scales, bits, blocks.zero_points)
    return float(((x @ (stored - exact).T) ** 2).mean() / ((x @ exact.T) ** 2).mean())


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize(("bits", "block"), [(4, 16), (4, 32), (4, 128), (4, 256), (8, 32)])
def test_products_with_correlated_inputs_lose_far_less(
    bits: int, block: int, asymmetric: bool
) -> None:
    x, exact = correlated(0), matrix()
    usual = quantize_asymmetric(exact, bits, block) if asymmetric else in_blocks(exact, bits, block)
    hessian = x.T @ x
    diagonal = np.diagonal(hessian).copy()
    searched = search_blocks(exact, bits, block, diagonal, asymmetric=asymmetric)
    solved = solve(exact, [typical_inputs(hessian)], bits, block, asymmetric=asymmetric)
    rtn, search, found = (loss(x, exact, blocks, bits) for blocks in (usual, searched, solved))
    assert search < rtn
    assert found < 0.5 * rtn


@pytest.mark.parametrize("asymmetric", [False, True])
def test_blocks_on_a_grid_are_kept(asymmetric: bool) -> None:
    """Only the others make up for each other's rounding."""
    x, exact = correlated(0), matrix()
    scales = np.random.default_rng(1).uniform(0.05, 0.1, (N, 4, 1)).astype(np.float16)
    codes = np.clip(np.rint(exact[:, :128].reshape(N, 4, 32) / scales), -8, 7)
    trained = (codes * scales.astype(np.float32)).astype(np.float32)
    exact[:, :128] = trained.astype(np.float16).reshape(N, 128)  # rounded, so not exact
    found = solve(exact, [typical_inputs(x.T @ x)], 4, 32, asymmetric=asymmetric)
    stored = dequantize_blocks(found.codes, found.scales, 4, found.zero_points)
    assert np.array_equal(stored[:, :128], trained.reshape(N, 128))
    assert loss(x, exact, found, 4) < loss(x, exact, in_blocks(exact, 4, 32), 4)
