"""GPTQ (arXiv 2210.17323): rounding a matrix column by column, while the columns that are still to
come make up for what each rounding does to the products with typical inputs.

With H the sum of x x^T over typical inputs and U the upper Cholesky factor of its inverse, the error
e of column j, divided by U[j, j], is subtracted from every later column k as e U[j, k].
"""

from __future__ import annotations

import numpy as np

from stem_edge.errors import ExportError
from stem_edge.numerics.block_search import grid_scales, search_scales
from stem_edge.numerics.quantize import F32, U8, Blocks, cut, pack_codes, reciprocals

# Share of the mean diagonal that is added to the diagonal, as in the paper, because inputs that
# the calibration text never had must not be taken for impossible.
DAMPING = 0.01
DAMPING_STEP = 10.0  # factor of more damping when rounding errors leave no Cholesky factor
SMALL = 256  # triangles up to this size are inverted at once
TILE_COLUMNS = 128  # columns whose corrections are applied to the rest of the matrix at once


def inverse_factor(hessian: F32) -> F32:
    """Return the upper triangular U [K, K] with U^T U = (H + damping)^-1, H [K, K] = sum of x x^T.

    Takes three times the memory of H beside it. Raises ExportError if H is not finite.
    """
    if not np.isfinite(hessian).all():
        raise ExportError(
            "the calibration text drives hidden states beyond float32; training diverged or the "
            "weights are damaged: export an earlier step, or try --quantizer search"
        )
    mean = float(np.diagonal(hessian).mean(dtype=np.float64)) or 1.0
    # Rows and columns are reversed, so that H = L L^T becomes H = R R^T with an upper R, whose
    # inverse is U: one factorization instead of two and an inversion.
    damped = hessian[::-1, ::-1] / np.float32(mean)
    diagonal, damping = np.einsum("kk->k", damped), DAMPING  # a view of the diagonal
    diagonal += np.float32(damping)
    while True:
        try:
            lower = np.linalg.cholesky(damped)
            break
        except np.linalg.LinAlgError:
            diagonal += np.float32(damping * (DAMPING_STEP - 1))
            damping *= DAMPING_STEP
    del damped, diagonal
    return np.ascontiguousarray(_inverse(lower)[::-1, ::-1])


def _inverse(lower: F32) -> F32:
    """Invert a lower triangle [K, K] by halves, which leaves nearly all work to products."""
    size = len(lower)
    if size <= SMALL:
        return np.tril(np.linalg.inv(lower)).astype(np.float32)
    first, second, inverse = slice(0, size // 2), slice(size // 2, size), np.zeros_like(lower)
    inverse[first, first] = _inverse(lower[first, first])
    inverse[second, second] = _inverse(lower[second, second])
    beside = lower[second, first] @ inverse[first, first]
    inverse[second, first] = -inverse[second, second] @ beside
    return inverse


def solve(matrix: F32, factor: F32, bits: int, block: int, *, asymmetric: bool = False) -> Blocks:
    """Quantize rows [n, K]; factor: inverse_factor of their inputs' H.

    The scales of a block are searched when its first column is reached, because earlier corrections
    change its values; but blocks that training left on a grid of 4 bits are kept. Rows do not depend
    on each other.
    """
    rest, width = matrix.copy(), matrix.shape[1]
    codes = np.empty((width, len(matrix)), np.uint8)
    scales, zeros = np.empty((2, width // block, len(matrix)), np.float32)
    trained = np.zeros_like(scales)
    if bits == 4:
        trained = np.ascontiguousarray(grid_scales(cut(matrix, block)).T)
    step = max(TILE_COLUMNS, block)
    for start in range(0, width, step):
        here = slice(start, min(start + step, width))
        groups = slice(start // block, here.stop // block)
        tile = np.ascontiguousarray(rest[:, here].T)
        exact, own = np.ascontiguousarray(matrix[:, here].T), trained[groups]
        into = codes[here], scales[groups], zeros[groups]
        errors = _solve_tile(tile, factor[here, here], exact, own, into, bits, asymmetric)
        rest[:, here.stop :] -= errors.T @ factor[here, here.stop :]
    packed = pack_codes(np.ascontiguousarray(zeros.T).astype(np.uint8), bits)
    return Blocks(
        pack_codes(np.ascontiguousarray(codes.T), bits),
        np.ascontiguousarray(scales.T),
        packed if asymmetric else None,
    )


def _solve_tile(
    tile: F32,
    factor: F32,
    exact: F32,
    trained: F32,
    into: tuple[U8, F32, F32],
    bits: int,
    asymmetric: bool,
) -> F32:
    """Quantize a tile of columns, transposed to [t, n], into views of codes, scales and zero points.

    exact [t, n]: the columns before corrections, of which blocks with a trained scale are made.
    Returns their errors [t, n], each divided by its diagonal entry of the factor.
    """
    codes, scales, zeros = into
    width, block = len(tile), len(tile) // len(scales)
    errors = np.empty_like(tile)
    # Weight of a column's squared error in the loss that is left after all corrections.
    weights = np.asarray(1 / np.diagonal(factor) ** 2, np.float32).reshape(-1, block)
    top = np.float32((1 << bits) - 1)
    for column in range(width):
        group = column // block
        if column % block == 0:
            values = np.ascontiguousarray(tile[column : column + block].T)[:, None]
            found = search_scales(values, bits, weights[group, None], asymmetric=asymmetric)
            scales[group], zeros[group] = (each[:, 0] for each in found)
            kept = trained[group] != 0
            np.copyto(scales[group], trained[group], where=kept)
            np.copyto(zeros[group], 1 << (bits - 1), where=kept)
            inverse = reciprocals(scales[group])
            scales[group][inverse == 0] = 0
        code = np.rint(np.where(kept, exact[column], tile[column]) * inverse)
        code += zeros[group]
        np.clip(code, 0, top, out=code)
        codes[column] = code
        error = tile[column] - (code - zeros[group]) * scales[group]
        error /= factor[column, column]
        errors[column] = error
        tile[column + 1 :] -= factor[column, column + 1 :, None] * error
    return errors
