"""Attention in standard ONNX: the step's keys and values are appended to the cache."""

from __future__ import annotations

from collections.abc import Sequence

from stem_edge.config import ModelConfig
from stem_edge.graph import names as io
from stem_edge.graph.ir import Graph, Node
from stem_edge.graph.names import mask_name

ATTENTION = "GroupQueryAttention"


def attention(nodes: Graph, node: Node, config: ModelConfig) -> None:
    """Emit nodes that are equivalent to a GroupQueryAttention node, with the same outputs.

    Query heads that share keys get an axis of their own, [kv heads, group, T, width], so that keys
    are broadcast over it instead of copied. A layer that borrows keys and values finds those of the
    step in the cache.
    """
    number, result = int(node.outputs[0].split(".")[1]), node.outputs[0]
    at, own = f"layers.{number}.attend.", config.layer(number)
    width, heads = io.head_width(own), own.n_kv_heads
    q, k, v = projected(nodes, node, config, number)
    q = _rotated(nodes, q, config, number, at + "q", at + "q.rotated")
    q = nodes.add("Mul", [q, nodes.float(node.real("scale"))], at + "q.scaled")
    q = nodes.add("Transpose", [q], at + "q.turned", perm=(0, 2, 1, 3))
    q = nodes.reshape(q, [heads, config.n_heads // heads, 0, width], at + "q.grouped")
    if own.kv_layer == number:
        k = _rotated(nodes, k, config, number, at + "k", f"{io.NEW}{io.KEYS}{number}")
        v = nodes.reshape(v, [0, 0, heads, width], f"{io.NEW}{io.VALUES}{number}")
    else:
        k = v = ""
    keys = _seen(nodes, k, f"{io.KEYS}{own.kv_layer}", (2, 0, 3, 1))
    values = _seen(nodes, v, f"{io.VALUES}{own.kv_layer}", (2, 0, 1, 3))
    scores = nodes.add("MatMul", [q, keys], at + "scores")
    masked = nodes.add("Add", [scores, mask_name(own.window)], at + "scores.masked")
    weights = nodes.add("Softmax", [masked], at + "scores.weights", axis=-1)
    mixed = nodes.add("MatMul", [weights, values], at + "mixed")
    mixed = nodes.reshape(mixed, [1, config.n_heads, 0, width], at + "mixed.heads")
    mixed = nodes.add("Transpose", [mixed], at + "mixed.turned", perm=(0, 2, 1, 3))
    nodes.reshape(mixed, [0, 0, config.n_heads * width], result)


def projected(nodes: Graph, node: Node, config: ModelConfig, number: int) -> tuple[str, str, str]:
    """Return q, k and v [B, T, heads * width] of a layer, split if the node has them packed."""
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


def _rotated(nodes: Graph, x: str, config: ModelConfig, number: int, name: str, result: str) -> str:
    """Apply a layer's RoPE to x, and return it as heads [1, T, heads, width].

    Interleaved pairs come out as halves. That does not change the scores, because it permutes q and
    k alike.
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
    return nodes.add("Concat", turned, result, axis=-1)


def _angles(nodes: Graph, tables: Sequence[str]) -> list[str]:
    """Return cosines and sines [T, 1, width/2]; emit them once for all layers."""
    names = [f"{table}.heads" for table in tables]
    if not any(node.outputs[0] == names[0] for node in nodes.nodes):
        for table, name in zip(tables, names, strict=True):
            nodes.add("Unsqueeze", [table, nodes.sizes([1])], name)
    return names


def _seen(nodes: Graph, new: str, cache: str, perm: tuple[int, ...]) -> str:
    """Append the step's keys or values [1, T, heads, width], if any, and transpose; once for all."""
    joined, result = f"seen.{cache}", f"seen.{cache}.turned"
    if any(node.outputs[0] == result for node in nodes.nodes):
        return result
    if new:
        cache = nodes.add("Concat", [cache, new], joined, axis=1)
    return nodes.add("Transpose", [cache], result, perm=perm)
