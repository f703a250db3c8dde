"""Graphs for steps of several tokens that compute the same bits as single-token steps.

Attention kernels sum in a different order for several queries than for one. So these graphs, for a fixed number of
tokens, have an attention node for each token; all other nodes compute the tokens together. The attention nodes of a
layer run one after another, because a token attends to the keys and values of earlier tokens. Each node's updated
cache is a graph output, bound to the cache's memory, to save a copy. Matrix products round each token alike for any
even number of tokens, to which single tokens are padded (Rows in runtime/backends/onnxruntime/loaded.py).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stem_edge.graph import names as io
from stem_edge.graph.attention import K_SCALE
from stem_edge.graph.ir import Graph, Node
from stem_edge.graph.parts.heads import NOTHING

ATTENTION = "GroupQueryAttention"
TOKENS = 1  # the token axis of values [B, T, ...]


def apart(graph: Graph, count: int) -> Graph:
    """Return a copy of a graph for exactly `count` tokens, with one attention node per token."""
    made = replace(graph, nodes=[], tensors=dict(graph.tensors), outputs=dict(graph.outputs))
    tokens = _Tokens(made, count)
    for node in graph.nodes:
        # Kernels over quantized keys and values compute query by query anyway.
        if node.op == ATTENTION and len(node.inputs) <= K_SCALE:
            _attend(made, node, tokens)
        else:
            made.nodes.append(node)
    return made


def _attend(graph: Graph, node: Node, tokens: _Tokens) -> None:
    """Add an attention node for each token, in place of `node`, which is for all tokens."""
    q, k, v, *caches, filled, total, cos, sin = node.inputs[:9]
    places, others = node.inputs[9:10], node.inputs[10:]
    result, *updated = node.outputs
    parts, lengths = [tokens.of(x) for x in (q, k, v)], [tokens.lengths(n) for n in (filled, total)]
    positions = [tokens.of(name) for name in places]
    for n, name in enumerate(names := tokens.names(result)):
        added = updated if name == names[-1] else [io.updated_by(one, n) for one in updated]
        graph.outputs |= {one: graph.outputs[of] for one, of in zip(added, updated, strict=True)}
        before, between, after = ([of[n] for of in one] for one in (parts, lengths, positions))
        inputs = [*before, *caches, *between, cos, sin, *after, *others]
        graph.nodes.append(replace(node, inputs=inputs, outputs=[name, *added]))
        caches = added or caches
    graph.add("Concat", names, result, axis=TOKENS)


class _Tokens:
    """Splits graph values into one value per token. Each value is split only once."""

    def __init__(self, graph: Graph, count: int) -> None:
        self._graph, self._count, self._parts = graph, count, dict[str, list[str]]()

    def of(self, name: str) -> list[str]:
        """Split a value by token; return the parts' names. A value without tokens is repeated."""
        if not name or name.startswith(NOTHING):
            return [name] * self._count
        if name not in self._parts:
            parts = self._parts[name] = self.names(name)
            self._graph.node("Split", [name], parts, axis=TOKENS, num_outputs=self._count)
        return self._parts[name]

    def lengths(self, name: str) -> list[str]:
        """Emit the input `name`, seqlens_k or total_length, as it would be after each token; return names."""
        if name not in self._parts:
            fewer = range(self._count - 1, 0, -1)
            less = [self._graph.constant(f"int32.{n}", np.array(n, np.int32)) for n in fewer]
            parts = zip(less, self.names(name), strict=False)
            cut = [self._graph.add("Sub", [name, n], part) for n, part in parts]
            self._parts[name] = [*cut, name]
        return self._parts[name]

    def names(self, name: str) -> list[str]:
        """Return the names of a split value's parts, one for each token."""
        return [f"{name}.token{n}" for n in range(self._count)]
