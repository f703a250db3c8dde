"""Attention in standard ONNX operators; keys and values are written into the KV cache in place."""

from __future__ import annotations

from collections.abc import Sequence

from stem_edge.config import ModelConfig
from stem_edge.graph import names as io
from stem_edge.graph.device import PLACES, mask_name
from stem_edge.graph.ir import Graph, Node


def attention(nodes: Graph, node: Node, config: ModelConfig) -> None:
    """Emit nodes that compute the same outputs as a GroupQueryAttention node.

    Queries are [kv heads, group, T, width]. The heads of a group share keys, which are broadcast over the
    group axis instead of copied. A layer that borrows keys and values reads the lender's cache, which
    already contains the keys and values of this step.
    """
    number, result = int(node.outputs[0].split(".")[1]), node.outputs[0]
    at, own = f"layers.{number}.attend.", config.layer(number)
    width, heads = io.head_width(own), own.n_kv_heads
    q, k, v = _projected(nodes, node, config, number)
    q = _rotated(nodes, q, config, number, at + "q")
    q = nodes.add("Mul", [q, nodes.float(node.attributes["scale"])], at + "q.scaled")
    q = nodes.add("Transpose", [q], at + "q.turned", perm=(0, 2, 1, 3))
    q = nodes.reshape(q, [heads, config.n_heads // heads, 0, width], at + "q.grouped")
    if own.kv_layer == number:
        k = _rotated(nodes, k, config, number, at + "k")
        _scatter(nodes, k, f"{io.KEYS}{number}", heads * width, at + "k.lines")
        _scatter(nodes, v, f"{io.VALUES}{number}", heads * width, at + "v.lines")
    new = io.NEW if own.kv_layer == number else ""
    keys = _turned(nodes, f"{new}{io.KEYS}{own.kv_layer}", (heads, width), (2, 0, 3, 1))
    values = _turned(nodes, f"{new}{io.VALUES}{own.kv_layer}", (heads, width), (2, 0, 1, 3))
    scores = nodes.add("MatMul", [q, keys], at + "scores")
    masked = nodes.add("Add", [scores, mask_name(own.window)], at + "scores.masked")
    weights = nodes.add("Softmax", [masked], at + "scores.weights", axis=-1)
    mixed = nodes.add("MatMul", [weights, values], at + "mixed")
    mixed = nodes.reshape(mixed, [1, config.n_heads, 0, width], at + "mixed.heads")
    mixed = nodes.add("Transpose", [mixed], at + "mixed.turned", perm=(0, 2, 1, 3))
    nodes.reshape(mixed, [0, 0, config.n_heads * width], result)


def _projected(nodes: Graph, node: Node, config: ModelConfig, number: int) -> tuple[str, str, str]:
    """Return the names of layer `number`'s q, k and v [1, T, heads * width]; split them if joined."""
    if node.inputs[1]:
        return node.inputs[0], node.inputs[1], node.inputs[2]
    own = config.layer(number)
    q, kv = (heads * io.head_width(own) for heads in (config.n_heads, own.n_kv_heads))
    starts = {"q": (0, q), "k": (q, q + kv), "v": (q + kv, q + 2 * kv)}
    cut = [
        nodes.cut(node.inputs[0], start, stop, 1, f"layers.{number}.attend.{name}.cut")
        for name, (start, stop) in starts.items()
    ]
    return cut[0], cut[1], cut[2]


def _rotated(nodes: Graph, x: str, config: ModelConfig, number: int, name: str) -> str:
    """Emit layer `number`'s RoPE of x [1, T, heads * width]; return it as [1, T, heads, width].

    In the result, the first and second values of all pairs are in two halves, even if pairs are interleaved
    in x. Scores do not change, because q and k are permuted in the same way.
    """
    width = io.head_width(config.layer(number))
    half = width // 2
    x = nodes.reshape(x, [0, 0, -1, width], name + ".heads")
    if config.rope_interleaved:
        parts = ((0, width, 2), (1, width, 2))
    else:
        parts = ((0, half, 1), (half, width, 1))
    a, b = (nodes.cut(x, *part, f"{name}.{n}") for n, part in zip("ab", parts, strict=True))
    cos, sin = _angles(nodes, io.rope_names(config, config.layer(number)))
    turned = []
    for n, operator, (left, right) in (("first", "Sub", (a, b)), ("second", "Add", (b, a))):
        product = nodes.add("Mul", [left, cos], f"{name}.{n}.cos")
        rest = nodes.add("Mul", [right, sin], f"{name}.{n}.sin")
        turned.append(nodes.add(operator, [product, rest], f"{name}.{n}"))
    return nodes.add("Concat", turned, name + ".rotated", axis=-1)


def _angles(nodes: Graph, tables: Sequence[str]) -> list[str]:
    """Reshape the RoPE tables to [T, 1, width/2], once for all layers; return the new names."""
    names = [f"{table}.heads" for table in tables]
    if not any(node.outputs[0] == names[0] for node in nodes.nodes):
        for table, name in zip(tables, names, strict=True):
            nodes.add("Unsqueeze", [table, nodes.sizes([1])], name)
    return names


def _scatter(nodes: Graph, x: str, cache: str, width: int, name: str) -> None:
    """Emit a write of keys or values x into a cache [P, width], at the step's positions."""
    lines = nodes.reshape(x, [-1, width], name)
    nodes.add("ScatterND", [cache, PLACES, lines], io.NEW + cache)


def _turned(nodes: Graph, cache: str, head: tuple[int, int], perm: tuple[int, ...]) -> str:
    """Emit a cache [P, heads * width], reshaped to [1, P, heads, width] and transposed by `perm`.

    head: number of heads, and width of a head. Layers that read the same cache share the result.
    """
    result = f"seen.{cache}.turned"
    if any(node.outputs[0] == result for node in nodes.nodes):
        return result
    seen = nodes.reshape(cache, [1, -1, *head], f"seen.{cache}")
    return nodes.add("Transpose", [seen], result, perm=perm)
