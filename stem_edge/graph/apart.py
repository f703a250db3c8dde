"""Graphs of steps in which each token has the bits of a step of its own.

Kernels round by the number of tokens: attention over several queries adds up otherwise than over one,
and so do some products. So a graph for a fixed number of tokens has a node for each token in these
places, over the same weights, and keeps all else together. Attention nodes of a layer follow each other:
the next token attends to the keys and values that the one before has added. All of them are outputs,
to be bound to the memory of the cache: onnxruntime would copy what is no output.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from stem_edge.graph import names as io
from stem_edge.graph.attention import K_SCALE, NOTHING
from stem_edge.graph.ir import Graph, Node

ATTENTION = "GroupQueryAttention"
JOINED_TO_PRODUCTS = "Add", "Div", "Mul"
TOKENS = 1  # the axis of most values


def apart(graph: Graph, count: int, products: Collection[str]) -> Graph:
    """Return a graph for `count` tokens of one sequence, with the inputs of a graph for any number.

    products: outputs of those to be computed one token after the other.
    """
    made = replace(graph, nodes=[], tensors=dict(graph.tensors), outputs=dict(graph.outputs))
    tokens = _Tokens(made, count)
    for node in graph.nodes:
        if node.op == ATTENTION and not _keeps_bits(node):
            _attend(made, node, tokens)
        elif node.outputs[0] in products or tokens.go_on(node):
            x, *weights = node.inputs
            for one, result in zip(tokens.of(x), tokens.make(node.outputs[0]), strict=True):
                made.nodes.append(replace(node, inputs=[one, *weights], outputs=[result]))
        else:
            tokens.join(node.inputs)
            made.nodes.append(node)
    tokens.join(graph.outputs)
    return made


def _keeps_bits(node: Node) -> bool:
    """Return whether attention computes queries one by one: kernels of quantized caches do."""
    return len(node.inputs) > K_SCALE and bool(node.inputs[K_SCALE])


def _attend(graph: Graph, node: Node, tokens: _Tokens) -> None:
    """Add a node for each token in place of one for all."""
    q, k, v, *caches, filled, total, cos, sin = node.inputs[:9]
    places, others = node.inputs[9:10], node.inputs[10:]
    result, *updated = node.outputs
    parts, lengths = [tokens.of(x) for x in (q, k, v)], [tokens.lengths(n) for n in (filled, total)]
    positions = [tokens.of(name) for name in places]
    for n, name in enumerate(names := tokens.make(result)):
        added = updated if name == names[-1] else [io.updated_by(one, n) for one in updated]
        graph.outputs |= {one: graph.outputs[of] for one, of in zip(added, updated, strict=True)}
        before, between, after = ([of[n] for of in one] for one in (parts, lengths, positions))
        inputs = [*before, *caches, *between, cos, sin, *after, *others]
        graph.nodes.append(replace(node, inputs=inputs, outputs=[name, *added]))
        caches = added or caches


class _Tokens:
    """Values of single tokens, by the names of the values of all: cut or joined where wanted."""

    def __init__(self, graph: Graph, count: int) -> None:
        self._graph, self._count = graph, count
        self._parts, self._apart = dict[str, list[str]](), set[str]()
        self._constant = set(graph.tensors)

    def of(self, name: str) -> list[str]:
        """Return the value of each token; of one that is absent or of no tokens, itself for each."""
        if not name or name.startswith(NOTHING):
            return [name] * self._count
        if name not in self._parts:
            parts = self._parts[name] = self._names(name)
            self._graph.node("Split", [name], parts, axis=TOKENS, num_outputs=self._count)
        return self._parts[name]

    def make(self, name: str) -> list[str]:
        """Name the values of tokens that are computed apart; they are joined once that is wanted."""
        self._apart.add(name)
        return self._parts.setdefault(name, self._names(name))

    def go_on(self, node: Node) -> bool:
        """Return whether a constant changes a product apart, which onnxruntime makes part of it."""
        x, *others = node.inputs
        constant = self._constant.issuperset(others)
        if constant and x in self._constant:
            self._constant.update(node.outputs)
        return node.op in JOINED_TO_PRODUCTS and constant and x in self._apart

    def join(self, names: Collection[str]) -> None:
        """Emit the values of all tokens, where only those of each are there."""
        for name in [name for name in names if name in self._apart]:
            self._apart.remove(name)
            self._graph.add("Concat", self._parts[name], name, axis=TOKENS)

    def lengths(self, name: str) -> list[str]:
        """Emit the number of tokens that each token's step of its own would be told."""
        if name not in self._parts:
            fewer = range(self._count - 1, 0, -1)
            less = [self._graph.constant(f"int32.{n}", np.array(n, np.int32)) for n in fewer]
            parts = zip(less, self._names(name), strict=False)
            cut = [self._graph.add("Sub", [name, n], part) for n, part in parts]
            self._parts[name] = [*cut, name]
        return self._parts[name]

    def _names(self, name: str) -> list[str]:
        return [f"{name}.token{n}" for n in range(self._count)]
