"""Activations of matrices that were trained with static ranges: rounded to multiples of a step.

MatMulNBits rounds its input once more, to 127 steps up to the greatest value of each block. Where a
block holds a value of exactly 127, and all others are whole numbers from -127 to 127, that changes
nothing. So inputs are given as such numbers, with 127 behind each block - 1 of them; the weights have a
code of zero there, and the step is a part of their scales. Only -128 becomes -127.
"""

from __future__ import annotations

import numpy as np

from stem_edge.graph.ir import Graph

TOP = 127
Steps = tuple[float, float]  # of the input and of the result of a product; 0: not rounded
NO_STEPS: Steps = (0.0, 0.0)


def capped_width(width: int, block: int) -> int:
    """Return the columns of a matrix [N, width] with a code of zero at the end of each block."""
    return -(-width // (block - 1)) * block


def places(width: int, block: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the column of a capped matrix for each column of the matrix."""
    columns = np.arange(width, dtype=np.int64)
    return columns // (block - 1) * block + columns % (block - 1)


def rounded(graph: Graph, x: str, step: float, result: str = "") -> str:
    """Emit x rounded to multiples of a step from -128 to 127; x itself if the step is 0."""
    if not step:
        return x
    result = result or f"{x}.on_{step!r}"
    scale, zero = graph.float(step), graph.constant("int8.zero", np.array(0, np.int8))
    codes = graph.add("QuantizeLinear", [x, scale, zero], result + ".codes")
    # Not DequantizeLinear, which onnxruntime moves through other nodes and loses the type of.
    whole = graph.add("Cast", [codes], result + ".whole", to=1)
    return graph.add("Mul", [whole, scale], result)


def capped(graph: Graph, x: str, step: float, width: int, block: int) -> str:
    """Emit x [B, T, width] in whole steps, as MatMulNBits keeps them: [B, T, capped width]."""
    result = f"{x}.by_{step!r}"
    zero = graph.constant("int8.zero", np.array(0, np.int8))
    least, top = (graph.constant(f"int8.{n}", np.array(n, np.int8)) for n in (-TOP, TOP))
    codes = graph.add("QuantizeLinear", [x, graph.float(step), zero], result + ".codes")
    codes = graph.add("Clip", [codes, least], result + ".clipped")
    wide = graph.add("Pad", [codes, graph.sizes([0, 1]), top, graph.sizes([-1])], result + ".ended")
    columns = np.full(capped_width(width, block), width, np.int64)
    columns[places(width, block)] = np.arange(width)
    order = graph.constant(f"capped.{width}.{block}", columns)
    laid = graph.add("Gather", [wide, order], result + ".laid", axis=-1)
    return graph.add("Cast", [laid], result, to=1)
