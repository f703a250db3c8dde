"""Which products of 4 bits take a step of one token with two rows: see stem_edge.graph.special.pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

import numpy as np
import onnxruntime as ort

from stem_edge.graph.encoder import encode
from stem_edge.graph.ir import CONTRIB, Graph, Node
from stem_edge.graph.special.pairs import in_pairs
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.interface import MOST, SIZES
from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU
from stem_edge.runtime.backends.onnxruntime.providers.session import WHOLE_STEPS, new_session

TRIED_BLOCKS = 16  # of the matrix that is tried
TRIED_ROWS = 64


def paired(
    graphs: Mapping[str, Graph], products: Iterable[Node], whole_steps: bool
) -> dict[str, Graph]:
    """Return graphs in which those of these products that round a token alone otherwise have two rows.

    whole_steps: as in open_session.
    """
    chosen = {node.outputs[0] for node in products if rounds_alone(*_kind(node), whole_steps)}
    return {name: in_pairs(graph, chosen) for name, graph in graphs.items()}


def _kind(node: Node) -> tuple[int, bool]:
    return node.size("block_size"), len(node.inputs) > 3


@cache
def rounds_alone(block: int, asymmetric: bool, whole_steps: bool = False) -> bool:
    """Return whether a token has other bits alone than twice, and those of twice in steps of SIZES.

    block: values that share a scale. asymmetric: with zero points.
    """
    session, width = _product(block, asymmetric, whole_steps), TRIED_BLOCKS * block
    x = np.random.default_rng(0).standard_normal((MOST, width), np.float32)

    def products(rows: F32) -> F32:
        return np.asarray(session.run(None, {"x": rows})[0])

    alone = np.concatenate([products(x[n : n + 1]) for n in range(MOST)])
    twice = np.concatenate([products(x[n : n + 1].repeat(2, 0))[:1] for n in range(MOST)])
    alike = all(np.array_equal(products(x[:size]), twice[:size]) for size in SIZES)
    return alike and not np.array_equal(alone, twice)


def _product(block: int, asymmetric: bool, whole_steps: bool) -> ort.InferenceSession:
    """Open a product with a matrix of noise [TRIED_ROWS, TRIED_BLOCKS * block]."""
    rng, shape, width = np.random.default_rng(1), (TRIED_ROWS, TRIED_BLOCKS), TRIED_BLOCKS * block
    codes = rng.integers(0, 256, (*shape, block // 2), np.uint8)
    points = rng.integers(0, 256, TRIED_ROWS * TRIED_BLOCKS // 2, np.uint8)
    graph = Graph()
    inputs = [graph.input("x", np.float32, ["T", width]), graph.constant("codes", codes)]
    inputs.append(graph.constant("scales", rng.random(shape, np.float32).ravel()))
    inputs += [graph.constant("points", points)] if asymmetric else []
    sizes = {"K": width, "N": TRIED_ROWS, "bits": 4, "block_size": block, "accuracy_level": 4}
    product = graph.node("MatMulNBits", inputs, ["y"], CONTRIB, **sizes)
    graph.output(product, np.float32, ["T", TRIED_ROWS])
    return new_session(encode(graph), 1, [CPU], WHOLE_STEPS if whole_steps else {})
