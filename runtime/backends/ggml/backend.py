"""The backbone on ggml: a graph for each shape of a step, over weights in the mapped file.

Data that outlives a step lies in memory owned by Python, which ggml's tensors point into: weights
in the mapped file, rows in the slots of the row cache, keys and values, and the hidden state
between the layers before the first row and the others. Intermediate results share scratch memory. A
step fills inputs, runs its graph and reads logits.

| file | has |
|---|---|
| graph.py | wrappers of ggml's arenas, graphs and buffers |
| model.py, weights.py, slots.py | weights and rows, and the memory that their tensors point into |
| kv_cache.py | keys and values, and which of them a token sees |
| layer.py, attention.py, ffn.py | a layer as operators |
| layers.py | all layers, embedding and head |
| steps.py | steps of one sequence or several, and their graphs |
| context.py, batch.py | a sequence alone, and sequences that decode together |
"""

from __future__ import annotations

from stem_edge.errors import BackendError
from stem_edge.runtime.backends.ggml.batch import GgmlBatch
from stem_edge.runtime.backends.ggml.context import GgmlContext
from stem_edge.runtime.backends.ggml.model import GgmlModel
from stem_edge.system.memory import return_freed_memory


class GgmlBackend:
    """Opens contexts and batches over a loaded model; both raise BackendError after `close`."""

    def __init__(self, model: GgmlModel) -> None:
        self._loaded: GgmlModel | None = model

    @property
    def _model(self) -> GgmlModel:
        if self._loaded is None:
            raise BackendError("this backbone is closed; load the bundle again")
        return self._loaded

    def open_context(self, length: int) -> GgmlContext:
        """Return an empty context for up to `length` tokens."""
        return GgmlContext(self._model, length)

    def open_batch(self, size: int, length: int) -> GgmlBatch:
        """Return an empty batch; its contexts say for how many tokens."""
        return GgmlBatch(self._model)

    def close(self) -> None:
        """Release the model; it is freed once no context uses it any more."""
        self._loaded = None
        return_freed_memory()
