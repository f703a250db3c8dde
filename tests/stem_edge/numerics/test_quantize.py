"""Block quantization: codes, scales, and agreement with onnxruntime."""

import numpy as np
import pytest
from matrices import random_matrix
from onnxruntime.capi import _pybind_state

from stem_edge.numerics.quantize import F32, U8, fitting_block
from stem_edge.numerics.quantizing import dequantize_blocks, quantize_blocks

BITS = (2, 4, 8)
BLOCKS = (16, 32, 128)


def rows(*values: list[float]) -> F32:
    return np.array(values, np.float32)


def test_four_bit_codes_are_packed_low_nibble_first() -> None:
    codes, scales = quantize_blocks(rows([*range(-8, 8)]), bits=4, block=16)
    assert codes.tobytes().hex() == "1032547698badcfe"
    assert scales.tolist() == [[1.0]]


def test_eight_bit_codes_lie_around_128() -> None:
    values = [-64, -63.5, -0.5, 0, 0.5, 1, 63, 63.5, *[0] * 8]
    codes, scales = quantize_blocks(rows(values), bits=8, block=16)
    assert codes.tolist() == [[0, 1, 127, 128, 129, 130, 254, 255, *[128] * 8]]
    assert scales.tolist() == [[0.5]]


@pytest.mark.parametrize("bits", BITS)
def test_greatest_magnitude_has_code_zero_whatever_its_sign(bits: int) -> None:
    values = rows([8, 7, -7, *[0] * 13], [-8, -7, 7, *[0] * 13])
    codes, scales = quantize_blocks(values, bits, block=16)
    assert scales.ravel().tolist() == [-8 / 2 ** (bits - 1), 8 / 2 ** (bits - 1)]
    assert codes[0].tolist() == codes[1].tolist()
    assert codes[0, 0] & (2**bits - 1) == 0


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("seed", range(3))
def test_error_is_at_most_half_a_step(bits: int, block: int, seed: int) -> None:
    matrix = random_matrix(seed)
    found = dequantize_blocks(*quantize_blocks(matrix, bits, block), bits)
    exact = matrix.astype(np.float64).reshape(12, -1, block)
    half = 2 ** (bits - 1)
    step = np.abs(exact).max(axis=2, keepdims=True) / half
    # Codes are -half..half-1 steps, so larger values are clipped.
    cut = np.abs(exact) - (half - 1) * step
    error = np.abs(found.reshape(exact.shape) - exact)
    assert (error <= np.maximum(step / 2, cut) + 1e-4 * step).all()


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("block", BLOCKS)
def test_codes_agree_with_onnxruntime(bits: int, block: int) -> None:
    matrix = random_matrix(4)
    expected_codes, expected_scales = onnxruntime_blocks(matrix, bits, block)
    codes, scales = quantize_blocks(matrix, bits, block)
    assert np.array_equal(scales, expected_scales)
    found, expected = (unpacked(c, bits) for c in (codes, expected_codes))
    # Values near a half may round either way, because the kernel adds the zero point first.
    assert np.abs(found - expected).max() <= 1
    assert np.mean(found != expected) < 1e-3


def onnxruntime_blocks(matrix: F32, bits: int, block: int) -> tuple[U8, F32]:
    n, k = matrix.shape
    codes = np.zeros((n, k // block, block * bits // 8), np.uint8)
    scales = np.zeros(n * k // block, np.float32)
    zeros = np.zeros(n * -(-k // block * bits // 8), np.uint8)
    quantize = {4: _pybind_state.quantize_matmul_4bits, 8: _pybind_state.quantize_matmul_8bits}
    quantize[bits](codes, np.ascontiguousarray(matrix.T), scales, zeros, block, n, k, True)
    return codes.reshape(n, -1), scales.reshape(n, -1)


def unpacked(codes: U8, bits: int) -> F32:
    ones = np.ones((len(codes), 1), np.float32)
    return dequantize_blocks(codes, ones, bits)


@pytest.mark.parametrize(
    ("width", "wanted", "block"),
    [
        *[(256, 32, 32), (256, 256, 256), (256, 512, 256), (256, 100, 64), (16, 16, 16)],
        *[(96, 64, 32), (48, 32, 16), (8192, 128, 128), (11008, 128, 128)],
        *[(24, 32, 0), (17, 64, 0), (8, 8, 0), (256, 15, 0), (256, 0, 0), (256, -32, 0)],
    ],
)
def test_fitting_block(width: int, wanted: int, block: int) -> None:
    assert fitting_block(width, wanted) == block
