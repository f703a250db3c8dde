"""Zero points of 4 bits, which graphs store as MatMulNBits reads them: each row ends with a byte.

ONNX has no such padding, so rows with an odd number of blocks need nodes that take it out. All
their inputs are constants: onnxruntime runs them once, while it loads.
"""

from __future__ import annotations

import numpy as np

from stem_edge.graph.ir import Graph

LOW, SHIFT = np.array(15, np.uint8), np.array(4, np.uint8)


def halves(graph: Graph, points: str) -> tuple[str, str]:
    """Emit the lower and the upper zero point of each byte, as uint8."""
    low = graph.add("BitwiseAnd", [points, graph.constant("nibble", LOW)], points + ".low")
    high = _shift(graph, points, "RIGHT", points + ".high")
    return low, high


def doubled(graph: Graph, point: str) -> str:
    """Emit bytes [..., n] that hold each of the zero points twice."""
    upper = _shift(graph, point, "LEFT", point + ".upper")
    return graph.add("BitwiseOr", [point, upper], point + ".twice")


def joined(graph: Graph, low: str, high: str, shape: tuple[int, int], name: str) -> str:
    """Emit the values [rows, groups], uint8, of bytes that held two each; drop the padding."""
    rows, groups = shape
    nbytes = -(-groups // 2)
    apart = [graph.reshape(half, [rows, nbytes, 1], half + ".apart") for half in (low, high)]
    pairs = graph.add("Concat", apart, name + ".pairs", axis=-1)
    flat = graph.reshape(pairs, [rows, 2 * nbytes], name + ".padded")
    return graph.cut(flat, 0, groups, 1, name)


def _shift(graph: Graph, x: str, direction: str, name: str) -> str:
    return graph.add(
        "BitShift", [x, graph.constant("nibble.bits", SHIFT)], name, direction=direction
    )
