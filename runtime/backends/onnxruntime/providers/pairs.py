"""Which products take a step of one token with two rows: see stem_edge.graph.pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

import numpy as np
import onnxruntime as ort

from stem_edge.graph.encoder import encode
from stem_edge.graph.ir import CONTRIB, Graph, Node
from stem_edge.graph.pairs import in_pairs
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.interface import MOST, SIZES
from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU_NAME

BITS = 4  # of matrices whose kernels for one token are others, and take no less time than those for two
# Codes of a layer from which on pairs cost at most about 4 % of a step: about three nodes of 7 us, where a
# layer of 1.4 MB took 7 to 12 % longer (SmolLM2-135M), and one of 30 MB no more than the noise.
LAYER_NBYTES = 4 << 20
TRIED_BLOCKS = 16  # of the matrix that is tried
TRIED_ROWS = 64


def paired(graphs: dict[str, Graph], layers: int) -> dict[str, Graph]:
    """Return the graphs that decode, with products in pairs where they need that and it costs little."""
    products = {output: (name, node) for name, output, node in _products(graphs)}
    nbytes = sum(graphs[name].tensors[node.inputs[1]].nbytes for name, node in products.values())
    if nbytes < LAYER_NBYTES * layers:
        return graphs
    chosen = {output for output, (_, node) in products.items() if rounds_alone(*_kind(node))}
    return {name: in_pairs(graph, chosen) for name, graph in graphs.items()} if chosen else graphs


def _products(graphs: Mapping[str, Graph]) -> Iterator[tuple[str, str, Node]]:
    """Yield the graph, the output and the node of each product that may be taken in pairs."""
    for name, graph in graphs.items():
        for node in graph.nodes:
            if node.op == "MatMulNBits" and node.size("bits") == BITS:
                yield name, node.outputs[0], node


def _kind(node: Node) -> tuple[int, bool]:
    return node.size("block_size"), len(node.inputs) > 3


@cache
def rounds_alone(block: int, asymmetric: bool) -> bool:
    """Return whether a token has other bits alone than twice, and those of twice in steps of SIZES.

    block: values that share a scale. asymmetric: with zero points.
    """
    session, width = _product(block, asymmetric), TRIED_BLOCKS * block
    x = np.random.default_rng(0).standard_normal((MOST, width), np.float32)

    def products(rows: F32) -> F32:
        return np.asarray(session.run(None, {"x": rows})[0])

    alone = np.concatenate([products(x[n : n + 1]) for n in range(MOST)])
    twice = np.concatenate([products(x[n : n + 1].repeat(2, 0))[:1] for n in range(MOST)])
    alike = all(np.array_equal(products(x[:size]), twice[:size]) for size in SIZES)
    return alike and not np.array_equal(alone, twice)


def _product(block: int, asymmetric: bool) -> ort.InferenceSession:
    """Open a product with a matrix of noise [TRIED_ROWS, TRIED_BLOCKS * block]."""
    rng, shape, width = np.random.default_rng(1), (TRIED_ROWS, TRIED_BLOCKS), TRIED_BLOCKS * block
    codes = rng.integers(0, 256, (*shape, block * BITS // 8), np.uint8)
    points = rng.integers(0, 256, TRIED_ROWS * TRIED_BLOCKS * BITS // 8, np.uint8)
    graph = Graph()
    inputs = [graph.input("x", np.float32, ["T", width]), graph.constant("codes", codes)]
    inputs.append(graph.constant("scales", rng.random(shape, np.float32).ravel()))
    inputs += [graph.constant("points", points)] if asymmetric else []
    sizes = {"K": width, "N": TRIED_ROWS, "bits": BITS, "block_size": block, "accuracy_level": 4}
    product = graph.node("MatMulNBits", inputs, ["y"], CONTRIB, **sizes)
    graph.output(product, np.float32, ["T", TRIED_ROWS])
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(encode(graph), options, providers=[CPU_NAME])
