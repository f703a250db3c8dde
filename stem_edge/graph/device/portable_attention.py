"""Attention in standard ONNX: the step's keys and values are appended to the cache."""

from __future__ import annotations

from stem_edge.config import ModelConfig
from stem_edge.graph import names as io
from stem_edge.graph.ir import Graph, Node
from stem_edge.graph.names import mask_name

COS, SIN = "rope_cos.heads", "rope_sin.heads"


def attention(nodes: Graph, node: Node, config: ModelConfig, layer: int, scale: float) -> None:
    """Emit nodes that are equivalent to a GroupQueryAttention node, with the same outputs.

    Query heads that share keys get an axis of their own, [kv heads, group, T, width], so that keys
    are broadcast over it instead of copied.
    """
    at, result = f"layers.{layer}.attend.", node.outputs[0]
    width, group = io.head_width(config.layer(0)), config.n_heads // config.n_kv_heads
    q, k, v = _projected(nodes, node, config, at)
    q = _rotated(nodes, q, config, config.n_heads, at + "q", at + "q.rotated")
    q = nodes.add("Mul", [q, nodes.float(scale)], at + "q.scaled")
    q = nodes.add("Transpose", [q], at + "q.turned", perm=(0, 2, 1, 3))
    q = nodes.reshape(q, [config.n_kv_heads, group, 0, width], at + "q.grouped")
    k = _rotated(nodes, k, config, config.n_kv_heads, at + "k", f"{io.NEW}{io.KEYS}{layer}")
    v = nodes.reshape(v, [0, 0, config.n_kv_heads, width], f"{io.NEW}{io.VALUES}{layer}")
    keys = _seen(nodes, k, f"{io.KEYS}{layer}", (2, 0, 3, 1))
    values = _seen(nodes, v, f"{io.VALUES}{layer}", (2, 0, 1, 3))
    scores = nodes.add("MatMul", [q, keys], at + "scores")
    masked = nodes.add("Add", [scores, mask_name(config.window(layer))], at + "scores.masked")
    weights = nodes.add("Softmax", [masked], at + "scores.weights", axis=-1)
    mixed = nodes.add("MatMul", [weights, values], at + "mixed")
    mixed = nodes.reshape(mixed, [1, config.n_heads, 0, width], at + "mixed.heads")
    mixed = nodes.add("Transpose", [mixed], at + "mixed.turned", perm=(0, 2, 1, 3))
    nodes.reshape(mixed, [0, 0, config.n_heads * width], result)


def _projected(nodes: Graph, node: Node, config: ModelConfig, at: str) -> tuple[str, str, str]:
    """Return q, k and v [1, T, heads * width], split if the node has them packed."""
    if node.inputs[1]:
        return node.inputs[0], node.inputs[1], node.inputs[2]
    width = io.head_width(config.layer(0))
    q, kv = config.n_heads * width, config.n_kv_heads * width
    starts = {"q": (0, q), "k": (q, q + kv), "v": (q + kv, q + 2 * kv)}
    cut = [
        nodes.cut(node.inputs[0], start, stop, 1, f"{at}{name}.cut")
        for name, (start, stop) in starts.items()
    ]
    return cut[0], cut[1], cut[2]


def _rotated(nodes: Graph, x: str, config: ModelConfig, heads: int, name: str, result: str) -> str:
    """Apply RoPE to x, and return it as heads [1, T, heads, width].

    Interleaved pairs come out as halves. That does not change the scores, because it permutes q and
    k alike.
    """
    width = io.head_width(config.layer(0))
    half = width // 2
    x = nodes.reshape(x, [0, 0, heads, width], name + ".heads")
    if config.rope_interleaved:
        parts = ((0, width, 2), (1, width, 2))
    else:
        parts = ((0, half, 1), (half, width, 1))
    a, b = (nodes.cut(x, *part, f"{name}.{n}") for n, part in zip("ab", parts, strict=True))
    cos, sin = _angles(nodes)
    turned = []
    for n, operator, (left, right) in (("first", "Sub", (a, b)), ("second", "Add", (b, a))):
        product = nodes.add("Mul", [left, cos], f"{name}.{n}.cos")
        rest = nodes.add("Mul", [right, sin], f"{name}.{n}.sin")
        turned.append(nodes.add(operator, [product, rest], f"{name}.{n}"))
    return nodes.add("Concat", turned, result, axis=-1)


def _angles(nodes: Graph) -> tuple[str, str]:
    """Return cosines and sines [T, 1, width/2]; emit them once for all layers."""
    if not any(node.outputs[0] == COS for node in nodes.nodes):
        for table, name in ((io.ROPE_COS, COS), (io.ROPE_SIN, SIN)):
            nodes.add("Unsqueeze", [table, nodes.sizes([1])], name)
    return COS, SIN


def _seen(nodes: Graph, new: str, cache: str, perm: tuple[int, ...]) -> str:
    """Append the step's keys or values [1, T, heads, width] to the cache, and transpose."""
    joined = nodes.add("Concat", [cache, new], f"seen.{cache}", axis=1)
    return nodes.add("Transpose", [joined], f"seen.{cache}.turned", perm=perm)
