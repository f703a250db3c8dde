"""Emits parts of FFNs that few models have: weighted sums, sparse gates, mixtures of rows."""

from __future__ import annotations

from stem_edge.graph.ir import CONTRIB
from stem_edge.graph.layer import LayerGraph


def weighted(layer: LayerGraph, parts: list[str], name: str) -> list[str]:
    """Emit W x * (1 - s) and row * s for a trained share s. parts: names of W x and row."""
    graph, at, number = layer.graph, layer.at + name, layer.vector("mix")
    numbers = graph.add("Neg", [number], f"{at}.mix.negative"), number
    shares = [graph.add("Sigmoid", [one], f"{one}.share") for one in numbers]
    pairs = zip(parts, shares, strict=True)
    return [graph.add("Mul", [part, share], f"{share}.of.{name}") for part, share in pairs]


def sparse(layer: LayerGraph, gate: str) -> str:
    """Emit a sparse gate [B, T, d_ff]: relu(gate - mean - cutoff * std), mean and std over d_ff."""
    graph, at, axis = layer.graph, layer.at + "cut", layer.graph.sizes([-1])
    mean = graph.add("ReduceMean", [gate, axis], at + ".mean", keepdims=1)
    above = graph.add("Sub", [gate, mean], at + ".above")
    # The standard deviation is the L2 norm over sqrt(d_ff).
    length = graph.add("ReduceL2", [above, axis], at + ".length", keepdims=1)
    share = graph.float(layer.shape.cutoff / layer.shape.d_ff**0.5)
    least = graph.add("Mul", [length, share], at + ".least")
    return graph.add("Relu", [graph.add("Sub", [above, least], at + ".rest")], at)


def mixture(layer: LayerGraph, x: str, rows: str, values: int) -> str:
    """Sum a token's k rows [B, T, values]: -> [B, T, values / k], with weights softmax(router x)."""
    graph, at, count = layer.graph, layer.at + "row.mixture", layer.config.row_experts
    width, router = values // count, layer.matrix("router")
    scores = graph.node("FusedMatMul", [x, router], [at + ".scores"], CONTRIB, transB=1)
    shares = graph.add("Softmax", [scores], at + ".shares", axis=-1)
    shares = graph.reshape(shares, [0, 0, 1, count], at + ".line")
    rows = graph.reshape(rows, [0, 0, count, width], at + ".rows")
    # One small product per token, so that its bits do not depend on the number of tokens.
    mixed = graph.add("MatMul", [shares, rows], at + ".mixed")
    return graph.reshape(mixed, [0, 0, width], at)
