"""Emits AltUp and LAuReL as graph nodes. AltUp: a token has several hidden states, the streams.

A layer computes only the active stream. Streams are [B, T, streams * dim] between graphs, [B, T, streams,
dim] between the layers of a graph. stem_edge.numerics.altup has the same computation in numpy.
"""

from __future__ import annotations

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.graph.ir import CONTRIB, Graph
from stem_edge.graph.layer import NORM, LayerGraph
from stem_edge.graph.linear import Products
from stem_edge.graph.special.ple import ple
from stem_edge.numerics.altup import LEAST_SQUARE


def expanded(products: Products, config: ModelConfig, x: str, result: str) -> str:
    """Emit the streams of embedded tokens x [B, T, dim]: x and its projections, side by side."""
    graph, count, dim = products.graph, config.streams - 1, config.dim
    names = tuple(f"streams.{stream}.altup_in" for stream in range(1, config.streams))
    others = products.product("altup_in", "altup_in", x, names, (count * dim, dim))
    others = _matched(graph, graph.reshape(others, [0, 0, count, dim], "altup_in.cut"), x, dim)
    flat = graph.reshape(others, [0, 0, count * dim], "altup_in.flat")
    return graph.add("Concat", [x, flat], result, axis=-1)


def merged(products: Products, config: ModelConfig, x: str) -> str:
    """Emit the mean of the streams x [B, n, streams * dim], after projecting all but the first."""
    graph, count, dim = products.graph, config.streams - 1, config.dim
    streams = [f"streams.{stream}" for stream in range(config.streams)]
    # num_outputs instead of sizes: see ple.contexts.
    graph.node("Split", [x], streams, axis=-1, num_outputs=config.streams)
    first, *others = streams
    made = [
        products.product(f"{one}.altup_out", "altup_out", one, (f"{one}.altup_out",), (dim, dim))
        for one in others
    ]
    joined = graph.add("Concat", made, "altup_out.joined", axis=-1)
    cut = graph.reshape(joined, [0, 0, count, dim], "altup_out.cut")
    cut = _matched(graph, cut, first, dim)
    total = graph.add("ReduceSum", [cut, graph.sizes([2])], "altup_out.sum", keepdims=0)
    total = graph.add("Add", [first, total], "altup_out.total")
    return graph.add("Mul", [total, graph.float(1 / config.streams)], "altup_out.mean")


class AltUp:
    """AltUp: predicts a token's streams (hidden states) before a layer, corrects them after it."""

    def __init__(self, layer: LayerGraph, streams: str) -> None:
        self._layer, self._graph, self._at = layer, layer.graph, layer.at + "altup"
        self._count, self._dim = layer.config.streams, layer.config.dim
        # Placed once, because prediction and correction read them.
        self._norm = layer.vector("altup_norm")
        self._router = layer.matrix("altup_router")
        self._streams = self._predicted(streams)
        self.active = self._one(self._streams, ".active")  # [B, T, dim], for the layer

    def corrected(self, computed: str, context: str) -> str:
        """Emit a token's hidden states after the layer: predictions, corrected by its result.

        computed: the layer's result [B, T, dim]. context: the value to compute per-layer embeddings
        from, which are added to all hidden states but the first; "": there are none.
        """
        graph, at = self._graph, self._at
        factors = self._product(self._routed(computed, ".computed"), "altup_correct")
        factors = graph.add("Add", [factors, graph.float(1.0)], at + ".factors")
        change = graph.add("Sub", [computed, self.active], at + ".change")
        columns = graph.reshape(factors, [0, 0, self._count, 1], at + ".columns")
        if not context:
            rows = graph.reshape(change, [0, 0, 1, self._dim], at + ".rows")
        else:
            added = ple(self._layer, self._gated(factors, change), context)
            rows = graph.add("Concat", [change, added], at + ".joined", axis=-1)
            rows = graph.reshape(rows, [0, 0, 2, self._dim], at + ".rows")
            columns = self._with_ones(columns)
        # One product adds both, because arrays of all streams are large.
        changes = graph.add("MatMul", [columns, rows], at + ".changes")
        return graph.add("Add", [self._streams, changes], at + ".corrected")

    def _gated(self, factors: str, change: str) -> str:
        """Emit the gate's input for per-layer embeddings: the corrected active hidden state.

        change [B, T, dim]: made by the layer. factors [B, T, streams]: for each hidden state.
        """
        graph, at, config = self._graph, self._at, self._layer.config
        place = graph.sizes([config.active_stream])
        own = graph.add("Gather", [factors, place], at + ".factor", axis=2)
        own = graph.add("Mul", [own, change], at + ".own")
        active = graph.add("Add", [self.active, own], at + ".gated")
        if not config.ple_gate_scale:
            return active
        return graph.add("Mul", [active, self._layer.vector("ple_gate_scale")], at + ".scaled")

    def _with_ones(self, columns: str) -> str:
        """Append a column to `columns` [B, T, streams, 1]: 0 for stream 0, 1 for all others."""
        left, right = np.zeros((1, 2), np.float32), np.zeros((self._count, 2), np.float32)
        left[0, 0], right[1:, 1] = 1, 1
        graph, at = self._graph, self._at
        wide = graph.add("Mul", [columns, graph.constant("streams.left", left)], at + ".left")
        return graph.add("Add", [wide, graph.constant("streams.right", right)], at + ".both")

    def _predicted(self, streams: str) -> str:
        graph, at, count = self._graph, self._at, self._count
        before = self._one(streams, ".before")
        mixing = self._product(self._routed(before, ".before"), "altup_predict")
        # Plus the identity matrix, because predictions are added to their inputs.
        itself = graph.constant("streams.itself", np.eye(count, dtype=np.float32).ravel())
        mixing = graph.add("Add", [mixing, itself], at + ".mixing")
        mixing = graph.reshape(mixing, [0, 0, count, count], at + ".mixing.square")
        return graph.add("MatMul", [mixing, streams], at + ".predicted")

    def _one(self, streams: str, end: str) -> str:
        number = self._layer.config.active_stream
        place = self._graph.constant("streams.active", np.array(number, np.int64))
        return self._graph.add("Gather", [streams, place], self._at + end, axis=2)

    def _routed(self, x: str, end: str) -> str:
        """Emit AltUp's router of x: [B, T, dim] -> [B, T, streams]. end: suffix of nodes' names."""
        graph, at, config = self._graph, self._at + end, self._layer.config
        normed = graph.add(NORM, [x, self._norm], at + ".normed", axis=-1, epsilon=config.norm_eps)
        routed = self._times(normed, self._router, at + ".router")
        routed = graph.add("Mul", [routed, graph.float(1 / config.dim)], at + ".small")
        return graph.add("Tanh", [routed], at + ".routed")

    def _product(self, x: str, name: str) -> str:
        return self._times(x, self._layer.matrix(name), self._layer.at + name + ".out")

    def _times(self, x: str, weight: str, name: str) -> str:
        return self._graph.node("FusedMatMul", [x, weight], [name], CONTRIB, transB=1)


def laurel(layer: LayerGraph, x: str, residual: str, delta: str) -> str:
    """Emit (residual + delta + x + norm(low-rank projection of x)) / sqrt(2), all [B, T, dim]."""
    graph, at = layer.graph, layer.at + "laurel"
    low = layer.product("laurel_in", "laurel_in", x, ("laurel_in",))
    wide = layer.product("laurel_out", "laurel_out", low, ("laurel_out",))
    wide = layer.rms_norm(at + "_norm", wide, "laurel_norm", layer.config.norm_eps)
    beside = graph.add("Add", [x, wide], at)
    total = graph.add("Add", [residual, delta], at + ".attended")
    total = graph.add("Add", [total, beside], at + ".sum")
    return graph.add("Mul", [total, graph.float(0.5**0.5)], at + ".half")


def _matched(graph: Graph, x: str, like: str, dim: int) -> str:
    """Scale x [B, T, n, dim]: each vector gets the L2 norm of its token's `like` [B, T, dim]."""
    least = graph.float((LEAST_SQUARE * dim) ** 0.5)
    length = graph.add("Max", [_length(graph, x), least], x + ".least")
    wanted = graph.reshape(_length(graph, like), [0, 0, 1, 1], like + ".wanted")
    ratio = graph.add("Div", [wanted, length], x + ".ratio")
    return graph.add("Mul", [x, ratio], x + ".matched")


def _length(graph: Graph, x: str) -> str:
    return graph.add("ReduceL2", [x, graph.sizes([-1])], x + ".length", keepdims=1)
