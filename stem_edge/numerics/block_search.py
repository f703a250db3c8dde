"""Search for scales and zero points that give a block less error than those from its min and max.

As in llama.cpp's k-quants, the search tries some scales around the usual one, refines each to the
least-squares scale for its codes, and chooses the best. Errors can be weighted by input channel,
because a channel with large inputs needs more exact weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from stem_edge.numerics.quantize import F32
from stem_edge.numerics.quantizing import Rounded, cut, encode, extremes, pack_codes, reciprocals

# Candidates: by how many codes the range is wider than the block's own range. A negative offset
# leaves codes unused; a positive one clips the greatest values, so that smaller values are more exact.
OFFSETS = np.array([0, -1, -0.5, 0.5, 1, 1.5, 2, 3], np.float32)
REFITS = 2  # rounds of new codes and a new scale after the best candidate
# FEW: values of a block that are tested first. NEAR: their largest relative distance from a code. Both the
# value and the value that determines the scale may be rounded to bfloat16, by 2**-8 each.
FEW, NEAR = 4, 2**-6.9
BFLOAT16_HALF = 0x8000  # half of a bfloat16's last place, in the bits of a float32
TIE = 1e-10  # relative width by which an interval shrinks to exclude its ends
TILE_VALUES = 1 << 16  # searched at a time, so that they stay in the CPU's cache


def search_blocks(
    matrix: F32, bits: int, block: int, weights: F32 | None = None, *, asymmetric: bool = False
) -> Rounded:
    """Quantize [N, K] so that the weighted sum of squared errors in each block is small.

    weights: importance [K] of the input channels, at least 0; None: all equal. The error is
    never greater than that of round to nearest, up to float32 rounding.
    """
    blocks = cut(matrix, block)
    by_block = None if weights is None else cut(weights[None], block)[0]
    scales, zeros, _ = search_scales(blocks, bits, by_block, asymmetric=asymmetric)
    codes, scales = encode(blocks, scales, zeros, bits)
    packed = pack_codes(zeros.astype(np.uint8), bits) if asymmetric else None
    return Rounded(codes, scales, packed)


def least_error_scales(blocks: F32, bits: int) -> F32:
    """Return the scales [N, G] with the least squared error for symmetric blocks [N, G, block]."""
    return search_scales(blocks, bits)[0]


def search_scales(
    blocks: F32, bits: int, weights: F32 | None = None, *, asymmetric: bool = False
) -> tuple[F32, F32, npt.NDArray[np.bool_]]:
    """Return scales, zero points and a mask, each [N, G], for quantizing blocks [N, G, block].

    weights: importance [G, block] of the values. Symmetric blocks get the zero point 2**(bits-1), and blocks of
    zeros the scale 0. The mask is True for blocks that 4-bit codes represent exactly (grid_scales).
    """
    rows, groups, block = blocks.shape
    scales, zeros = np.empty((2, rows, groups), np.float32)
    on_grid = np.zeros((rows, groups), bool)
    if weights is not None:
        # If all weights of a block are zero, any scale would do, so they become ones.
        greatest = weights.max(axis=1, keepdims=True)
        ones = np.ones_like(weights)
        weights = np.divide(weights, greatest, out=ones, where=greatest > 0)
    step = max(1, TILE_VALUES // (groups * block))
    for start in range(0, rows, step):
        here = slice(start, min(start + step, rows))
        peaks = np.abs(extremes(blocks[here]))
        # Scaled to -1..1, because squares of the values themselves may overflow float32.
        units = np.asarray(blocks[here] / np.where(peaks > 0, peaks, 1)[:, :, None], np.float32)
        best = _Best(units, weights, bits)
        candidates = (_asymmetric if asymmetric else _symmetric)(units, bits)
        best.consider(*(usual := next(candidates)))
        for candidate in candidates:
            best.consider(*candidate)
        for _ in range(REFITS):
            best.consider(reciprocals(best.scales), best.zeros if asymmetric else usual[1])
        best.settle(*usual)
        scales[here], zeros[here] = best.scales * peaks, best.zeros
        if bits == 4:
            trained = grid_scales(blocks[here])
            on_grid[here] = trained != 0
            np.copyto(scales[here], trained, where=on_grid[here])
            np.copyto(zeros[here], usual[1] if not asymmetric else 8, where=on_grid[here])
    return scales, zeros, on_grid


def grid_scales(blocks: F32) -> F32:
    """Return each block's scale [N, G] if all values are multiples -8 to 7 of that scale, else 0.

    Training for 4 bits produces such blocks, and a search finds their scale only approximately.
    Values may deviate from the multiples by the rounding of the float type they were saved in.
    """
    peaks = extremes(blocks)
    found, rounded = np.zeros_like(peaks), np.zeros_like(peaks)
    for code in range(8, 0, -1):  # magnitude of the code of the greatest value
        scale = peaks / np.float32(-code)
        inverse = reciprocals(scale)
        # Few blocks of other weights pass this, so the tests below cost almost nothing.
        few = blocks[:, :, :FEW] * inverse[:, :, None]
        codes = np.rint(few)
        near = (np.abs(few - codes) <= NEAR * np.abs(codes)).all(axis=2)
        near &= (inverse != 0) & (found == 0)
        values, own = blocks[near], scale[near]
        codes = np.rint(values * inverse[near][:, None])
        fits = (codes.max(axis=1, initial=0) < 8) & ((codes == 0) == (values == 0)).all(axis=1)
        exact = (codes * own[:, None] == values).all(axis=1)
        found[near] = np.where(fits & exact, own, 0)
        if (rest := fits & ~exact).any():
            near[near] = rest
            other = _rounded_scale(values[rest], codes[rest], own[rest])
            rounded[near] = np.where(rounded[near] != 0, rounded[near], other)
    np.copyto(found, rounded, where=found == 0)
    return found


def _rounded_scale(values: F32, codes: F32, near: F32) -> F32:
    """Return scales [n] for which codes * scale rounds to values [n, block]; 0 where none exists.

    Each value allows an interval of scales. The result is the middle of their intersection, as
    float16 if that is still inside. near [n]: approximate scales.
    """
    bits = np.abs(values).view(np.int32)
    union = np.bitwise_or.reduce(bits, axis=1, keepdims=True)
    # The last bit in use shows the rounding: to bfloat16, float16 or float32.
    half = np.clip((union & -union) // 2, 1, BFLOAT16_HALF)
    ties = 1 - TIE * (bits // (2 * half) % 2)  # ties round to even values, never to odd ones
    counts = np.where(codes == 0, np.nan, np.abs(codes).astype(np.float64))
    least = np.fmax.reduce((bits - half).view(np.float32) / counts / ties, axis=1)
    most = np.fmin.reduce((bits + half).view(np.float32) / counts * ties, axis=1)
    middle = (least + most) / 2
    with np.errstate(over="ignore"):
        short = middle.astype(np.float16).astype(np.float64)
    scale = np.where((least <= short) & (short <= most), short, middle)
    return np.asarray(np.where(least <= most, np.copysign(scale, near), 0), np.float32)


def _symmetric(units: F32, bits: int) -> Iterator[tuple[F32, F32]]:
    """Yield candidates for symmetric blocks: inverse scales [N, G], and a common zero point [1]."""
    half = np.full(1, 1 << (bits - 1), np.float32)
    sign = -np.sign(extremes(units))
    for offset in OFFSETS:
        yield sign * (half + offset), half


def _asymmetric(units: F32, bits: int) -> Iterator[tuple[F32, F32]]:
    top = np.float32((1 << bits) - 1)
    low, high = np.minimum(units.min(axis=2), 0), np.maximum(units.max(axis=2), 0)
    width = np.where(high > low, high - low, np.float32(1))
    for offset in OFFSETS:
        inverse = (top + offset) / width
        # Half of the offset goes to each end, so that both are clipped alike.
        yield inverse, np.clip(np.rint(-low * inverse - offset / 2), 0, top)


class _Best:
    """Best scales found so far for blocks of `units` [N, G, block], which are scaled to -1..1.

    With units u, weights w and d = codes - zero point, the best scale is sum(w u d) / sum(w d d).
    Its error is smallest where the gain sum(w u d)**2 / sum(w d d) is greatest.
    """

    def __init__(self, units: F32, weights: F32 | None, bits: int) -> None:
        self._units, self._weights = units, weights
        self._weighted = units if weights is None else units * weights
        self._top = np.float32((1 << bits) - 1)
        self._codes, self._scratch = np.empty_like(units), np.empty_like(units)
        self._gain = np.full(units.shape[:2], -1, np.float32)
        self.scales, self.zeros = np.zeros((2, *units.shape[:2]), np.float32)

    def consider(self, inverse: F32, zero: F32) -> None:
        """Try an inverse scale [N, G] and a zero point for each block; store them if errors drop.

        The stored scale is not 1 / inverse, but the least-squares scale for the same codes.
        """
        codes = self._code(inverse, zero)
        weighted = codes
        if self._weights is not None:
            weighted = np.multiply(codes, self._weights, out=self._scratch)
        product = np.einsum("ngb,ngb->ng", self._weighted, codes)
        square = np.einsum("ngb,ngb->ng", weighted, codes)
        scale = np.divide(product, square, out=np.zeros_like(product), where=square > 0)
        gain = scale * product
        self._take(gain > self._gain, scale, zero)
        np.maximum(gain, self._gain, out=self._gain)

    def settle(self, inverse: F32, zero: F32) -> None:
        """Try inverse scales and zero points without refining them; store them where errors drop.

        This compares errors. `consider` uses sums, whose rounding hides very small errors.
        """
        best = self._loss(reciprocals(self.scales), self.scales, self.zeros)
        scale = reciprocals(inverse)
        self._take(self._loss(inverse, scale, zero) < best, scale, zero)

    def _take(self, where: npt.NDArray[np.bool_], scale: F32, zero: F32) -> None:
        np.copyto(self.scales, scale, where=where)
        np.copyto(self.zeros, zero, where=where)

    def _code(self, inverse: F32, zero: F32) -> F32:
        """Return codes minus zero points for inverse scales. The next call overwrites the array."""
        codes = np.multiply(self._units, inverse[:, :, None], out=self._codes)
        np.rint(codes, out=codes)
        # Instead of np.clip, which takes twice as long if the limits are arrays.
        np.maximum(codes, -zero[..., None], out=codes)
        np.minimum(codes, (self._top - zero)[..., None], out=codes)
        return codes

    def _loss(self, inverse: F32, scale: F32, zero: F32) -> F32:
        error = self._code(inverse, zero)
        error *= scale[:, :, None]
        error -= self._units
        error *= error
        error *= 1 if self._weights is None else self._weights
        return np.asarray(error.sum(axis=2), np.float32)
