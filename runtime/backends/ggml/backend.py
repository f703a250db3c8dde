"""The backbone on ggml: a graph for each shape of a step, over weights in the mapped file.

Python owns all memory that outlives a step, and ggml's tensors point into it: weights in the mapped file, rows in the
row cache's slots, keys and values, and the hidden states that the early layers pass to the layers that need rows.
Intermediate results share scratch memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from stem_edge.ggml import types as ggml_types
from stem_edge.graph.names import EARLY, LATE, REST, layer_graphs
from stem_edge.numerics.quantize import F32, I32, I64
from stem_edge.numerics.rope import rope_tables_at
from stem_edge.runtime.backends.ggml.graph import GgmlGraph, HeldVectors, Scratch, Tensor
from stem_edge.runtime.backends.ggml.kv_cache import KvCache
from stem_edge.runtime.backends.ggml.layer import Attended, Cells, GgmlLayer, LayerInputs
from stem_edge.runtime.backends.ggml.layers import emit_embedding, emit_head, emit_layer
from stem_edge.runtime.backends.ggml.weights import GgmlModel
from stem_edge.runtime.backends.interface import BackendPlaces
from stem_edge.system.memory import return_freed_memory
from stem_edge.tables.windows import spread

OPERATORS_AROUND = 64
MOST_GRAPHS = 8  # for decoding, and for a prompt between decoding steps
OPERATORS_PER_LAYER, OPERATORS_PER_CACHE = 96, 16  # most of a layer; more for each sequence


@dataclass(frozen=True)
class _Step:
    graph: GgmlGraph
    token_ids: Tensor | None
    inputs: LayerInputs  # without `sequences`, which hold the caches
    cells: Sequence[Mapping[int, Cells]]  # of each sequence: window -> cells
    logits: HeldVectors | None

    @classmethod
    def over(
        cls,
        graph: GgmlGraph,
        inputs: LayerInputs,
        token_ids: Tensor | None = None,
        logits: HeldVectors | None = None,
    ) -> _Step:
        cells = [one.cells for one in inputs.sequences]
        return cls(graph, token_ids, replace(inputs, sequences=()), cells, logits)


class GgmlBackend:
    """A backbone loaded on ggml; see Backend. A step has several tokens of one sequence, or one of each of several."""

    def __init__(self, model: GgmlModel) -> None:
        self.model, self._config = model, model.config
        self._layers = layer_graphs(self._config)
        self.scratch = Scratch(model.ggml)
        self._hidden = HeldVectors(model.ggml, self._config.dim, 0)
        # (before the first row, several tokens of a sequence, references to caches) -> last shape and its graph.
        # The graph points into the caches' memory, but does not keep the caches alive.
        self._graphs: dict[tuple[object, ...], tuple[tuple[int, ...], _Step]] = {}
        self._caches: Sequence[KvCache] = ()

    def open_context(self, length: int) -> KvCache:
        return KvCache(self.model.ggml, self._config, self.model.kv_type, length)

    def open_places(self, size: int, length: int) -> BackendPlaces:
        """Return an object without memory: ggml decodes sequences in a batch without a shared KV cache.

        ggml chooses kernels by the number of tokens, so a batch can round logits differently than a
        single-token step. On x86 with AVX-512, the bits were the same with Q8_0, Q5_0 and Q4_0 weights,
        and with K-quants up to 7 tokens, but not with F32 or F16.
        """
        return BackendPlaces()

    def open_drafter(self, context: KvCache) -> None:
        """Return None: ggml does not run the draft model of a bundle (Gemma 4's assistant)."""

    def begin(
        self,
        contexts: Sequence[KvCache],
        token_ids: I64,
        positions: Sequence[int],
        *,
        prefill: bool = False,
        apart: bool = False,
    ) -> None:
        """Start a step. ggml ignores `prefill` (use a graph for prompts) and `apart` (same bits as single-token steps)."""
        places = np.add.outer(positions, np.arange(token_ids.shape[1]))
        for kv, own in zip(contexts, places, strict=True):
            kv.make_room(int(own[0]), len(own))
        self._caches, self._positions, self._count = contexts, places.ravel(), places.size
        if self._count > self._hidden.count:
            self._graphs.clear()  # first, because these graphs point into the hidden states
            self._hidden = HeldVectors(self.model.ggml, self._config.dim, self._count)
        step = self._step(0, early=True)
        if step.token_ids is not None:
            step.graph.set(step.token_ids, token_ids.ravel().astype(np.int32))
        self._run(step, None)

    def finish(self, slot_ids: I32, logits: int) -> F32:
        result, logits = None, logits * len(self._caches)
        if logits or LATE in self._layers:
            step = self._step(logits, early=False)
            self._run(step, slot_ids)
            result = step.logits
        for kv, places in zip(self._caches, self._places, strict=True):
            kv.fill(int(places[-1]) + 1)
        self._caches = ()
        if result is None:
            return np.empty((0, self._config.vocab_size), np.float32)
        return _capped(result.values, self._config.logit_softcap)

    def close(self) -> None:
        """Release the model; its memory is freed once no step is running."""
        self.__dict__.clear()
        return_freed_memory()

    @property
    def _places(self) -> npt.NDArray[np.int64]:
        """Positions of the step's tokens, [sequences, tokens of each sequence]."""
        return self._positions.reshape(len(self._caches), -1)

    def _run(self, step: _Step, slot_ids: npt.NDArray[np.int32] | None) -> None:
        inputs, graph = step.inputs, step.graph
        graph.set(inputs.ones, np.ones(self._count, np.int32))
        for kv, one, positions in zip(self._caches, step.cells, self._places, strict=True):
            for window, cells in one.items():
                ring = kv.rings[window]
                graph.set(cells.own, positions % ring.capacity)
                graph.set(cells.mask, ring.mask(positions, cells.count))
        for rope, turns in inputs.rope_tables.items():
            tables = rope_tables_at(rope, self._positions)
            for tensor, table in zip(turns, tables, strict=True):
                graph.set(tensor, self._spread(table))
        if inputs.slot_ids is not None and slot_ids is not None:
            if inputs.row_shares is not None:
                slot_ids, shares = self._spread_rows(slot_ids)
                graph.set(inputs.row_shares, shares)
            graph.set(inputs.slot_ids, np.ascontiguousarray(slot_ids, np.int32))
        graph.run()

    def _spread_rows(self, slots: I32) -> tuple[I32, F32]:
        """Convert slot ids for models in which a token uses the mean of several rows.

        slots [T, window]: row cache slots of the rows in each token's mean; -1: no row. Returns the slots [R] of the
        rows of all tokens, in the order of the text, and the weight [T, R] of each row in each token's mean.
        """
        sequences = len(self._caches)
        line, shares = spread(slots.reshape(sequences, -1, slots.shape[-1]))
        whole = np.zeros((sequences, shares.shape[1], *line.shape), np.float32)
        for number, own in enumerate(shares):
            whole[number, :, number] = own
        return line.ravel(), whole.reshape(self._count, -1)

    def _spread(self, table: F32) -> F32:
        """Return a RoPE table [T, head_dim / 2] as [T, head_dim]: each entry is repeated for both values of a pair."""
        if self._config.rope_interleaved:
            return np.repeat(table, 2, axis=1)
        return np.tile(table, (1, 2))

    def _step(self, logits: int, *, early: bool) -> _Step:
        """Return the graph of the layers before the first with rows (`early`), or of all others.

        It is built again only if a step has another shape. logits: number of tokens of all
        sequences whose logits are requested.
        """
        ends = (self._places[:, -1] + 1).tolist()
        cells = [
            {window: ring.attended(end) for window, ring in kv.rings.items()}
            for kv, end in zip(self._caches, ends, strict=True)
        ]
        shape = (self._count, logits, *(count for one in cells for count in one.values()))
        kind = (early, self._count > len(self._caches), *map(weakref.ref, self._caches))
        known = self._graphs.get(kind)
        if known is not None and known[0] == shape:
            return known[1]
        step = self._build_early(cells) if early else self._build_late(cells, logits)
        # Forget the other graphs first, because an interrupt inside place, which may move the
        # scratch memory, must not leave graphs that point into the old one.
        others, self._graphs = self._graphs, {}
        if not self.scratch.place(step.graph):
            others.pop(kind, None)
            self._graphs = dict([*others.items()][1 - MOST_GRAPHS :])
        self._graphs[kind] = (shape, step)
        return step

    def _build_early(self, cells: Sequence[dict[int, int]]) -> _Step:
        """Build the graph of the embedding and of the layers before the first layer with rows.

        cells: for each sequence, window -> number of KV cache cells that its tokens attend to.
        """
        model, layers = self.model, self._layers.get(EARLY, range(0))
        graph = self._graph(layers)
        hidden = self._hidden.tensor(graph, self._count)
        token_ids = graph.input(ggml_types.I32, self._count)
        inputs = self._inputs(graph, layers, cells, hidden, rows=False)
        x = emit_embedding(graph, self._config, model.weights, token_ids)
        x = self._emit(graph, layers, inputs, x)
        graph.emit(graph.op("cpy", x, hidden))
        return _Step.over(graph, inputs, token_ids)

    def _build_late(self, cells: Sequence[dict[int, int]], logits: int) -> _Step:
        """Build the graph of the first layer with rows, of all later layers, and of the head.

        logits: number of last tokens with logits. If it is 0, the graph has no head and only stores
        keys and values. cells: for each sequence, window -> number of KV cache cells to attend to.
        """
        late, rest = (self._layers.get(name, range(0)) for name in (LATE, REST))
        layers = [*late, *(rest if logits else ())]
        graph = self._graph(layers)
        hidden = self._hidden.tensor(graph, self._count)
        inputs = self._inputs(graph, layers, cells, hidden)
        x = self._emit(graph, late, inputs, hidden)
        if not logits:
            return _Step.over(graph, inputs)
        skipped, dim = self._count - logits, self._config.dim
        x = graph.columns(x, ggml_types.F32, dim, skipped, logits)
        if rest:
            x = self._emit(graph, rest, inputs.last(graph, dim, logits), x)
        product = emit_head(graph, self._config, self.model.weights, x, logits)
        result = HeldVectors(graph.ggml, self._config.vocab_size, logits)
        result.take(product)
        graph.emit(product)
        return _Step.over(graph, inputs, logits=result)

    def _graph(self, layers: Sequence[int]) -> GgmlGraph:
        per_layer = OPERATORS_PER_LAYER + OPERATORS_PER_CACHE * len(self._caches)
        return GgmlGraph(self.model.processor, per_layer * len(layers) + OPERATORS_AROUND)

    def _emit(self, graph: GgmlGraph, layers: range, inputs: LayerInputs, x: Tensor) -> Tensor:
        """Add layers to the graph; return the hidden states after them. x [dim, T]: before them."""
        model = self.model
        for number in layers:
            slots = model.slots.get(number, [])
            layer = GgmlLayer(graph, self._config, model.weights, number, slots, inputs)
            x = emit_layer(layer, model.weights, x)
        return x

    def _inputs(
        self,
        graph: GgmlGraph,
        layers: Sequence[int],
        cells: Sequence[dict[int, int]],
        embedded: Tensor,
        *,
        rows: bool = True,
    ) -> LayerInputs:
        count, described = self._count, [self._config.layer(number) for number in layers]
        windows = sorted({layer.window for layer in described})
        ropes = {layer.rope: (ggml_types.F32, layer.rope.width, count) for layer in described}
        takes_rows = rows and bool(self.model.slots)
        window = self._config.row_window
        looked_up, tokens = count + len(cells) * max(0, window - 1), count // len(cells)

        def attended(cells: int) -> Cells:
            own = graph.input(ggml_types.I64, tokens)
            return Cells(cells, own, graph.input(ggml_types.F16, cells, tokens))

        return LayerInputs(
            count=count,
            ones=graph.input(ggml_types.I32, count),
            sequences=[
                Attended(kv, {w: attended(one[w]) for w in windows})
                for kv, one in zip(self._caches, cells, strict=True)
            ],
            slot_ids=graph.input(ggml_types.I32, looked_up) if takes_rows else None,
            row_shares=graph.input(ggml_types.F32, looked_up, count)
            if takes_rows and window
            else None,
            rope_tables={
                rope: (graph.input(*shape), graph.input(*shape)) for rope, shape in ropes.items()
            },
            embedded=embedded,
        )


def _capped(logits: F32, cap: float) -> F32:
    """Apply the soft cap to logits in place; do nothing if the cap is 0.

    Done in numpy, because ggml's tanh takes milliseconds for a whole vocabulary.
    """
    if cap:
        np.divide(logits, np.float32(cap), out=logits)
        np.multiply(np.tanh(logits, out=logits), np.float32(cap), out=logits)
    return logits
