"""Products of one token that round as those of several tokens do.

Some kernels multiply one token by other code than two or more, and round otherwise. So a step of one token
takes such products with two rows, both the token's: it has the bits then that the token has beside guesses,
in a batch and in a prompt. This costs little, as both rows share the matrix that is read.

All else has one row. A value is cut, or doubled, where a node needs the other form.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from stem_edge.graph import names as io
from stem_edge.graph.ir import Graph, Node

PAIR = ".pair"  # ends the name of a value that has two rows where a step has one token
TOKENS = 1  # the axis of most values
ALONE = (
    "FusedMatMul",
    "GroupQueryAttention",
    "MatMulNBits",
    "MoE",
    "QMoE",
    "ScatterND",
    "Shape",
)  # they take and give one row
BROADCAST = "Add", "Div", "Mul", "Sub"


def in_pairs(graph: Graph, products: Collection[str]) -> Graph:
    """Return a graph with the same inputs and outputs, in which `products`, by their outputs, have two rows."""
    made = replace(graph, nodes=[], tensors=dict(graph.tensors))
    rows = _Rows(made)
    for node in graph.nodes:
        rows.take(node, node.outputs[0] in products)
    for name in graph.outputs:
        rows.single(name)
    return made


class _Rows:
    """Values of a graph, by the names that they had, in one or both of their forms."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        # Value -> input that has as many tokens, of those that a graph computes from hidden states or slots.
        of_tokens = (io.HIDDEN, io.EMBEDDED, io.SLOT_IDS, io.ROW_SHARES)
        self._tokens = dict.fromkeys(of_tokens, io.HIDDEN)
        self._single, self._paired = set(graph.inputs) | set(graph.tensors), set[str]()

    def take(self, node: Node, paired: bool) -> None:
        """Add a node, whose products have two rows if `paired`."""
        if node.op == "Gather" and node.inputs[1] == io.WANTED:
            self._choose(node)
            return
        tokens = [self._tokens[name] for name in node.inputs if name in self._tokens]
        twofold = [name for name in node.inputs if name in self._paired - self._single]
        if paired or (twofold and node.op not in ALONE):
            self._double(node, all_inputs=node.op not in BROADCAST)
        else:
            self._emit(node, [self.single(name) for name in node.inputs], node.outputs)
            self._single.update(node.outputs)
        if tokens:
            self._tokens |= dict.fromkeys(filter(None, node.outputs), tokens[0])

    def single(self, name: str) -> str:
        """Return a value with one row for each token."""
        if name in self._paired and name not in self._single:
            count = self._count(self._tokens[name])
            bounds = [self._graph.sizes([0]), count, self._graph.sizes([TOKENS])]
            self._graph.add("Slice", [name + PAIR, *bounds], name)
            self._single.add(name)
        return name

    def _pair(self, name: str) -> str:
        """Return a value with two rows if there is one token; itself where no token changes it."""
        if name not in self._tokens:
            return name
        if name not in self._paired:
            chosen = self._places(self._tokens[name])
            self._graph.add("Gather", [name, chosen], name + PAIR, axis=TOKENS)
            self._paired.add(name)
        return name + PAIR

    def _double(self, node: Node, all_inputs: bool) -> None:
        inputs = [self._pair(n) if all_inputs or n in self._paired else n for n in node.inputs]
        self._emit(node, inputs, [name and name + PAIR for name in node.outputs])
        self._paired.update(filter(None, node.outputs))

    def _choose(self, node: Node) -> None:
        """Add what takes the wanted tokens: from here on, these are the tokens."""
        x, (result,) = node.inputs[0], node.outputs
        if x in self._tokens:
            self._tokens[result] = io.WANTED
        self._emit(node, [self.single(x), io.WANTED], node.outputs)
        self._single.add(result)

    def _emit(self, node: Node, inputs: list[str], outputs: list[str]) -> None:
        self._graph.nodes.append(replace(node, inputs=inputs, outputs=outputs))

    def _count(self, tokens: str) -> str:
        """Emit the number [1] of tokens."""
        axis, name = (0 if tokens == io.WANTED else TOKENS), f"{tokens}.count"
        if name not in self._single:
            self._graph.add("Shape", [tokens], name, start=axis, end=axis + 1)
            self._single.add(name)
        return name

    def _places(self, tokens: str) -> str:
        """Emit the tokens' places, twice that of the only token of the only sequence."""
        graph, name, count = self._graph, f"{tokens}.places", self._count(tokens)
        if name in self._single:
            return name
        sequences = graph.add("Shape", [io.HIDDEN], f"{name}.sequences", start=0, end=1)
        whole = graph.add("Mul", [count, sequences], f"{name}.whole")
        least = graph.add("Sub", [graph.sizes([3]), whole], f"{name}.least")
        length = graph.add("Max", [count, least], f"{name}.length")
        scalar = graph.add("Squeeze", [length], f"{name}.scalar")
        zero, one = (graph.constant(f"int64.{n}", np.array(n, np.int64)) for n in (0, 1))
        upwards = graph.add("Range", [zero, scalar, one], f"{name}.range")
        graph.add(
            "Mod", [upwards, graph.add("Max", [count, graph.sizes([1])], f"{name}.some")], name
        )
        self._single.add(name)
        return name
