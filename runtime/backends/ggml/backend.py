"""The backbone on ggml: a graph for each shape of a step, over weights in the mapped file.

Data that outlives a step lies in memory owned by Python, which ggml's tensors point into: weights
in the mapped file, rows in the slots of the row cache, keys and values, and the hidden state
between the layers before the first row and the others. Intermediate results share scratch memory. A
step fills inputs, runs its graph and reads logits.

| file | has |
|---|---|
| graph.py | wrappers of ggml's arenas, graphs and buffers |
| kv_cache.py | keys and values, and which of them a token sees |
| weights.py, slots.py | the memory that tensors of weights and rows point into |
| layer.py, attention.py, ffn.py | a layer as operators |
| layers.py | all layers, embedding and head |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError
from stem_edge.ggml import types as ggml_types
from stem_edge.ggml.gguf_tensors import GgufWeights
from stem_edge.ggml.library import Ggml
from stem_edge.ggml.types import TensorType
from stem_edge.graph.names import EARLY, LATE, REST, layer_graphs
from stem_edge.numerics.quantize import F32, U8
from stem_edge.numerics.rope import rope_tables
from stem_edge.runtime.backends.ggml.graph import (
    Arena,
    Columns,
    Graph,
    Memory,
    Processor,
    Scratch,
    Tensor,
)
from stem_edge.runtime.backends.ggml.kv_cache import KvCache
from stem_edge.runtime.backends.ggml.layer import Cells, LayerGraph, LayerInputs
from stem_edge.runtime.backends.ggml.layers import emit_embedding, emit_head, emit_layer
from stem_edge.runtime.backends.ggml.slots import BlockSlots
from stem_edge.runtime.backends.ggml.weights import Weights
from stem_edge.runtime.backends.interface import BackendBatch, Resumes, check_logits
from stem_edge.runtime.backends.plain_batch import PlainBatch
from stem_edge.system.memory import return_freed_memory

OPERATORS_PER_LAYER, OPERATORS_AROUND = 96, 64


class GgmlModel:
    """A loaded backbone.gguf and the slots that its rows are read from.

    kv_type: of keys and values, one of gguf_schema.KV_TENSORS. Raises BackendError.
    """

    def __init__(
        self,
        ggml: Ggml,
        config: ModelConfig,
        file: GgufWeights,
        slots: BlockSlots | None,
        threads: int,
        kv_type: TensorType,
        *,
        repack: bool = False,
    ) -> None:
        self.ggml, self.config, self.kv_type = ggml, config, kv_type
        self.processor = Processor(ggml, threads)
        self.weights = Weights(ggml, config, file, repack=repack)
        self.slots: dict[int, list[Tensor]] = {}  # STEM layer -> slots of each part of its rows
        if slots is not None:
            count = len(slots.layout.layers) * len(slots.layout.parts)
            self._arena, self._memory = Arena(ggml, count), list[Memory]()
            for layer, parts in zip(slots.layout.layers, slots.rows, strict=True):
                shapes = zip(slots.layout.parts, parts, strict=True)
                self.slots[layer] = [self._placed(slots, *part) for part in shapes]

    def _placed(self, slots: BlockSlots, shape: tuple[int, ...], rows: U8) -> Tensor:
        """Return a tensor [..., count] over the slots of a part of a layer's rows."""
        memory = Memory(self.ggml, rows.reshape(-1))
        tensor = self._arena.tensor(slots.type, *reversed(shape), slots.count)
        memory.place(tensor)
        self._memory.append(memory)
        return tensor


class GgmlBackend:
    """Opens contexts over a loaded model."""

    def __init__(self, model: GgmlModel) -> None:
        self._model: GgmlModel | None = model

    def open_context(self, length: int) -> GgmlContext:
        """Return an empty context for up to `length` tokens. Raises BackendError after `close`."""
        if self._model is None:
            raise BackendError("this backbone is closed; load the bundle again")
        return GgmlContext(self._model, length)

    def open_batch(self, size: int, length: int) -> BackendBatch:
        """Return an empty batch."""
        return PlainBatch()

    def close(self) -> None:
        """Release the model; it is freed once no context uses it any more."""
        self._model = None
        return_freed_memory()


@dataclass(frozen=True)
class _Step:
    """A graph with its inputs and outputs."""

    graph: Graph
    token_ids: Tensor | None
    layers: LayerInputs
    logits: Columns | None


class GgmlContext:
    """KV cache and graphs of one generation."""

    def __init__(self, model: GgmlModel, length: int) -> None:
        self.length, self._model, self._config = length, model, model.config
        self._kv = KvCache(model.ggml, self._config, model.kv_type, length)
        self._scratch = Scratch(model.ggml)
        self._hidden = Columns(model.ggml, self._config.dim, 0)
        # (before the first row, of a prompt) -> the last shape and its graph
        self._steps: dict[tuple[bool, bool], tuple[tuple[int, ...], _Step]] = {}
        self._layers = layer_graphs(self._config)
        self._position, self._count = 0, 0

    @property
    def nbytes(self) -> int:
        return self._kv.nbytes

    def nbytes_of(self, tokens: int) -> int:
        return self._kv.nbytes_of(tokens)

    @property
    def earliest(self) -> int:
        return self._kv.earliest

    def resumes(self, tokens: int) -> Resumes:
        return (
            "steps"  # kernels are chosen by the number of tokens of a step, and round differently
        )

    @property
    def settled(self) -> int:
        return self._kv.earliest  # because a token's cell follows from its position

    def rest(self) -> None:
        self._steps = {}  # first, because these graphs point into what is freed
        self._scratch = Scratch(self._model.ggml)
        self._hidden = Columns(self._model.ggml, self._config.dim, 0)

    def kept(self, tokens: int) -> list[U8]:
        """Return views [tokens, bytes of a token]."""
        return self._kv.kept(tokens)

    def restore(self, arrays: Iterable[npt.NDArray[Any]], tokens: int) -> None:
        self._kv.restore(arrays, tokens)

    def begin(
        self, token_ids: npt.NDArray[np.int64], position: int, *, prefill: bool = False
    ) -> None:
        """Start a step; `prefill` changes nothing, because prompts and decoding share graphs."""
        self._kv.make_room(position, len(token_ids))
        self._position, self._count = position, len(token_ids)
        if self._count > self._hidden.count:
            self._steps.clear()  # first, because these graphs point into the hidden states
            self._hidden = Columns(self._model.ggml, self._config.dim, self._count)
        step = self._step(0, early=True)
        if step.token_ids is not None:
            step.graph.set(step.token_ids, token_ids.astype(np.int32))
        self._run(step, None)

    def finish(self, slot_ids: npt.NDArray[np.int32], logits: int, top: int = 0) -> F32:
        """Complete a step; `top` changes nothing, because all logits are in host memory."""
        result = None
        if logits or LATE in self._layers:
            step = self._step(logits, early=False)
            self._run(step, slot_ids)
            result = step.logits
        self._kv.fill(self._position + self._count)
        if result is None:
            return np.empty((0, self._config.vocab_size), np.float32)
        found = check_logits(result.values, self._position + self._count - logits)
        return _capped(found, self._config.logit_softcap)

    def _run(self, step: _Step, slot_ids: npt.NDArray[np.int32] | None) -> None:
        inputs, graph = step.layers, step.graph
        positions = np.arange(self._position, self._position + self._count, dtype=np.int64)
        graph.set(inputs.ones, np.ones(self._count, np.int32))
        for window, cells in inputs.cells.items():
            ring = self._kv.rings[window]
            graph.set(cells.own, positions % ring.capacity)
            graph.set(cells.mask, ring.mask(positions, cells.count))
        for rope, turns in inputs.turns.items():
            tables = rope_tables(rope, self._position + self._count, self._position)
            for tensor, table in zip(turns, tables, strict=True):
                graph.set(tensor, self._spread(table))
        if inputs.slot_ids is not None and slot_ids is not None:
            graph.set(inputs.slot_ids, np.ascontiguousarray(slot_ids, np.int32))
        graph.run()

    def _spread(self, table: F32) -> F32:
        """Return a RoPE table [T, head_dim / 2] with a value for each member of a pair."""
        if self._config.rope_interleaved:
            return np.repeat(table, 2, axis=1)
        return np.tile(table, (1, 2))

    def _step(self, logits: int, *, early: bool) -> _Step:
        """Return the graph for the step's shape, which often is that of the previous step."""
        tokens = self._position + self._count
        cells = {window: ring.attended(tokens) for window, ring in self._kv.rings.items()}
        shape, kind = (self._count, logits, *cells.values()), (early, self._count > 1)
        known = self._steps.get(kind)
        if known is not None and known[0] == shape:
            return known[1]
        step = self._build_early(cells) if early else self._build_late(cells, logits)
        # Forget the other graphs first, because an interrupt inside place, which may move the
        # scratch memory, must not leave graphs that point into the old one.
        others, self._steps = self._steps, {}
        if not self._scratch.place(step.graph):
            self._steps = others
        self._steps[kind] = (shape, step)
        return step

    def _build_early(self, cells: Mapping[int, int]) -> _Step:
        """Build the graph from token ids to the hidden states before the first row."""
        model, layers = self._model, self._layers.get(EARLY, range(0))
        graph = self._graph(layers)
        hidden = self._hidden.tensor(graph, self._count)
        token_ids = graph.input(ggml_types.I32, self._count)
        inputs = self._inputs(graph, layers, cells, hidden, rows=False)
        x = emit_embedding(graph, self._config, model.weights, token_ids)
        x = self._emit(graph, layers, inputs, x)
        graph.emit(graph.op("cpy", x, hidden))
        return _Step(graph, token_ids, inputs, None)

    def _build_late(self, cells: Mapping[int, int], logits: int) -> _Step:
        """Build the graph from these hidden states to the logits of the last tokens.

        Without logits it only stores keys and values.
        """
        late, rest = (self._layers.get(name, range(0)) for name in (LATE, REST))
        layers = [*late, *(rest if logits else ())]
        graph = self._graph(layers)
        hidden = self._hidden.tensor(graph, self._count)
        inputs = self._inputs(graph, layers, cells, hidden)
        x = self._emit(graph, late, inputs, hidden)
        if not logits:
            return _Step(graph, None, inputs, None)
        skipped, dim = self._count - logits, self._config.dim
        x = graph.columns(x, ggml_types.F32, dim, skipped, logits)
        if rest:
            x = self._emit(graph, rest, inputs.last(graph, dim, logits), x)
        return _Step(graph, None, inputs, self._emit_logits(graph, x, logits))

    def _graph(self, layers: Sequence[int]) -> Graph:
        return Graph(self._model.processor, OPERATORS_PER_LAYER * len(layers) + OPERATORS_AROUND)

    def _emit(self, graph: Graph, layers: range, inputs: LayerInputs, x: Tensor) -> Tensor:
        """Return x [dim, T] after these layers."""
        model = self._model
        for number in layers:
            slots = model.slots.get(number, [])
            layer = LayerGraph(graph, self._config, model.weights, number, slots, inputs)
            x = emit_layer(layer, model.weights, x, self._kv)
        return x

    def _emit_logits(self, graph: Graph, x: Tensor, count: int) -> Columns:
        """Add the head over x [dim, count]."""
        logits = emit_head(graph, self._config, self._model.weights, x, count)
        result = Columns(graph.ggml, self._config.vocab_size, count)
        result.take(logits)
        graph.emit(logits)
        return result

    def _inputs(
        self,
        graph: Graph,
        layers: Sequence[int],
        cells: Mapping[int, int],
        embedded: Tensor,
        *,
        rows: bool = True,
    ) -> LayerInputs:
        count, described = self._count, [self._config.layer(number) for number in layers]
        attended = {
            window: Cells(
                cells[window],
                own=graph.input(ggml_types.I64, count),
                mask=graph.input(ggml_types.F16, cells[window], count),
            )
            for window in sorted({layer.window for layer in described})
        }
        ropes = {layer.rope: (ggml_types.F32, layer.rope.width, count) for layer in described}
        takes_rows = rows and bool(self._model.slots)
        return LayerInputs(
            count=count,
            ones=graph.input(ggml_types.I32, count),
            cells=attended,
            slot_ids=graph.input(ggml_types.I32, count) if takes_rows else None,
            turns={
                rope: (graph.input(*shape), graph.input(*shape)) for rope, shape in ropes.items()
            },
            embedded=embedded,
        )


def _capped(logits: F32, cap: float) -> F32:
    """Apply a soft cap in place, if there is one.

    Not by ggml, whose tanh takes milliseconds for a vocabulary; numpy's takes a fraction of one.
    """
    if cap:
        np.divide(logits, np.float32(cap), out=logits)
        np.multiply(np.tanh(logits, out=logits), np.float32(cap), out=logits)
    return logits
