"""Graphs of steps in which the tokens of one sequence attend as they do in steps of their own.

Attention over several queries adds up in another order than over one. So a graph for a fixed number of
tokens has an attention node for each token, over the same weights, and keeps all else together. Attention
nodes of a layer follow each other: the next token attends to the keys and values that the one before has
added. All of these are outputs, to be bound to the memory of the cache: onnxruntime would copy what is no
output. Products round alike with any even number of rows (Rows in runtime/backends/onnxruntime/loaded.py).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stem_edge.graph import names as io
from stem_edge.graph.attention import K_SCALE, NOTHING
from stem_edge.graph.ir import Graph, Node

ATTENTION = "GroupQueryAttention"
TOKENS = 1  # the axis of most values


def apart(graph: Graph, count: int) -> Graph:
    """Return a graph for `count` tokens of one sequence, with the inputs of a graph for any number."""
    made = replace(graph, nodes=[], tensors=dict(graph.tensors), outputs=dict(graph.outputs))
    tokens = _Tokens(made, count)
    for node in graph.nodes:
        if node.op == ATTENTION and not _keeps_bits(node):
            _attend(made, node, tokens)
        else:
            made.nodes.append(node)
    return made


def _keeps_bits(node: Node) -> bool:
    """True if attention computes queries one by one, as kernels of quantized caches do."""
    return len(node.inputs) > K_SCALE and bool(node.inputs[K_SCALE])


def _attend(graph: Graph, node: Node, tokens: _Tokens) -> None:
    """Add a node for each token in place of one for all."""
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
    """Values of single tokens, by the names of the values of all."""

    def __init__(self, graph: Graph, count: int) -> None:
        self._graph, self._count, self._parts = graph, count, dict[str, list[str]]()

    def of(self, name: str) -> list[str]:
        """Return the value of each token; an empty name stands for itself at each token."""
        if not name or name.startswith(NOTHING):
            return [name] * self._count
        if name not in self._parts:
            parts = self._parts[name] = self.names(name)
            self._graph.node("Split", [name], parts, axis=TOKENS, num_outputs=self._count)
        return self._parts[name]

    def lengths(self, name: str) -> list[str]:
        """Return for each token the length input that it would have in a single-token step."""
        if name not in self._parts:
            fewer = range(self._count - 1, 0, -1)
            less = [self._graph.constant(f"int32.{n}", np.array(n, np.int32)) for n in fewer]
            parts = zip(less, self.names(name), strict=False)
            cut = [self._graph.add("Sub", [name, n], part) for n, part in parts]
            self._parts[name] = [*cut, name]
        return self._parts[name]

    def names(self, name: str) -> list[str]:
        """Return names for the values of the tokens."""
        return [f"{name}.token{n}" for n in range(self._count)]
