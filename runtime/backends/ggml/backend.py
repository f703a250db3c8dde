"""The backbone on ggml: a graph for each shape of a step, over weights in the mapped file.

Data that outlives a step lies in memory owned by Python, which ggml's tensors point into: weights
in the mapped file, rows in the slots of the row cache, keys and values, and the hidden state
between the layers before the first row and the others. Intermediate results share scratch memory. A
step fills inputs, runs its graph and reads logits.

| file | has |
|---|---|
| graph.py | wrappers of ggml's arenas, graphs and buffers, and the KV cache |
| weights.py, slots.py | the memory that tensors of weights and rows point into |
| layers.py | a layer as operators |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError
from stem_edge.ggml import types as ggml_types
from stem_edge.ggml.gguf_tensors import GgufWeights
from stem_edge.ggml.library import Ggml
from stem_edge.ggml.types import TensorType
from stem_edge.graph.names import EARLY, layer_graphs
from stem_edge.numerics.quantize import F32, U8
from stem_edge.numerics.rope import frequency_factors
from stem_edge.runtime.backends.ggml.graph import (
    Arena,
    Columns,
    Graph,
    KvCache,
    Memory,
    Processor,
    Scratch,
    Tensor,
    rounded,
)
from stem_edge.runtime.backends.ggml.layers import Layer, LayerInputs, emit_head
from stem_edge.runtime.backends.ggml.slots import BlockSlots
from stem_edge.runtime.backends.ggml.weights import Weights
from stem_edge.runtime.backends.interface import check_logits
from stem_edge.system.memory import return_freed_memory

OPERATORS_PER_LAYER, OPERATORS_AROUND = 64, 64


class GgmlModel:
    """A loaded backbone.gguf and the slots that its rows are read from.

    kv_type: F16 or F32, of keys and values. Raises BackendError.
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

    def close(self) -> None:
        """Release the model; it is freed once no context uses it any more."""
        self._model = None
        return_freed_memory()


@dataclass(frozen=True)
class _Step:
    """A graph with its inputs and outputs."""

    graph: Graph
    token_ids: Tensor | None
    layers: LayerInputs | None
    logits: Columns | None


class GgmlContext:
    """KV cache and graphs of one generation."""

    earliest = 0

    def __init__(self, model: GgmlModel, length: int) -> None:
        self.length, self._model, self._config = length, model, model.config
        self._kv = KvCache(model.ggml, self._config, model.kv_type, length)
        self._scratch = Scratch(model.ggml)
        self._hidden = Columns(model.ggml, self._config.dim, 0)
        # (before the first row, of a prompt) -> the last shape and its graph
        self._steps: dict[tuple[bool, bool], tuple[tuple[int, ...], _Step]] = {}
        self._factors = frequency_factors(self._config.layer(0).rope)
        early = layer_graphs(self._config).get(EARLY, range(0))
        self._layers = {True: early, False: range(len(early), self._config.n_layers)}
        self._position, self._count = 0, 0

    @property
    def nbytes(self) -> int:
        return self._kv.nbytes

    def begin(
        self, token_ids: npt.NDArray[np.int64], position: int, *, prefill: bool = False
    ) -> None:
        """Start a step; `prefill` changes nothing, because prompts and decoding share graphs."""
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
        if logits or self._layers[False]:
            step = self._step(logits, early=False)
            self._run(step, slot_ids)
            result = step.logits
        self._kv.fill(self._position + self._count)
        if result is None:
            return np.empty((0, self._config.vocab_size), np.float32)
        return check_logits(result.values, self._position + self._count - logits)

    def _run(self, step: _Step, slot_ids: npt.NDArray[np.int32] | None) -> None:
        inputs, graph = step.layers, step.graph
        if inputs is not None:
            positions = np.arange(self._position, self._position + self._count, dtype=np.int64)
            graph.set(inputs.positions, positions.astype(np.int32))
            graph.set(inputs.own_cells, positions)
            for window, tensor in inputs.masks.items():
                graph.set(tensor, _mask(positions, inputs.cells, window))
            if inputs.factors is not None and self._factors is not None:
                graph.set(inputs.factors, self._factors)
            if inputs.slot_ids is not None and slot_ids is not None:
                graph.set(inputs.slot_ids, np.ascontiguousarray(slot_ids, np.int32))
        graph.run()

    def _step(self, logits: int, *, early: bool) -> _Step:
        """Return the graph for the step's shape, which often is that of the previous step."""
        cells = min(self._kv.cells, rounded(self._position + self._count))
        shape, kind = (self._count, cells, logits), (early, self._count > 1)
        known = self._steps.get(kind)
        if known is not None and known[0] == shape:
            return known[1]
        step = self._build(cells, logits, early=early)
        # Forget the other graphs first, because an interrupt inside place, which may move the
        # scratch memory, must not leave graphs that point into the old one.
        others, self._steps = self._steps, {}
        if not self._scratch.place(step.graph):
            self._steps = others
        self._steps[kind] = (shape, step)
        return step

    def _build(self, cells: int, logits: int, *, early: bool) -> _Step:
        model, config, count = self._model, self._config, self._count
        layers = self._layers[early]
        graph = Graph(model.processor, OPERATORS_PER_LAYER * len(layers) + OPERATORS_AROUND)
        hidden = self._hidden.tensor(graph, count)
        token_ids = graph.input(ggml_types.I32, count) if early else None
        inputs = self._inputs(graph, layers, cells, early=early) if layers else None
        x = hidden
        if token_ids is not None:
            x = graph.op("get_rows", model.weights.tensors["embedding"], token_ids)
        for number in layers:
            if inputs is not None:
                slots = model.slots.get(number, [])
                layer = Layer(graph, config, model.weights, number, slots, count)
                x = layer.emit(x, inputs, self._kv)
        if early:
            graph.emit(graph.op("cpy", x, hidden))
            return _Step(graph, token_ids, inputs, None)
        graph.emit(x)
        return _Step(graph, None, inputs, self._emit_logits(graph, x, logits))

    def _emit_logits(self, graph: Graph, x: Tensor, count: int) -> Columns | None:
        """Add the head over the last `count` tokens of x [dim, T]; None if there are none."""
        if not count:
            return None
        line = self._config.dim * ggml_types.F32.nbytes
        start = (self._count - count) * line
        wanted = graph.op("view_2d", x, self._config.dim, count, line, start)
        logits = emit_head(graph, self._config, self._model.weights, wanted, count)
        result = Columns(graph.ggml, self._config.vocab_size, count)
        result.take(logits)
        graph.emit(logits)
        return result

    def _inputs(self, graph: Graph, layers: range, cells: int, *, early: bool) -> LayerInputs:
        count, factors = self._count, self._factors
        windows = {self._config.window(number) for number in layers}
        takes_rows = not early and bool(self._model.slots)
        return LayerInputs(
            cells=cells,
            positions=graph.input(ggml_types.I32, count),
            own_cells=graph.input(ggml_types.I64, count),
            masks={w: graph.input(ggml_types.F16, cells, count) for w in sorted(windows)},
            slot_ids=graph.input(ggml_types.I32, count) if takes_rows else None,
            factors=None if factors is None else graph.input(ggml_types.F32, len(factors)),
        )


def _mask(positions: npt.NDArray[np.int64], cells: int, window: int) -> npt.NDArray[np.float16]:
    """Return a mask [T, cells]: 0 if a token attends to a cell, else -inf. window: 0 for none."""
    mask = np.full((len(positions), cells), -np.inf, np.float16)
    for row, position in zip(mask, positions.tolist(), strict=True):
        row[max(0, position + 1 - window) if window else 0 : position + 1] = 0
    return mask
