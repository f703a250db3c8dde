"""The backbone on ggml: a graph for each shape of a step, over weights in the mapped file.

Data that outlives a step lies in memory owned by Python, which ggml's tensors point into: weights
in the mapped file, rows in the slots of the row cache, keys and values, and the hidden state
between the layers before the first row and the others. Intermediate results share scratch memory. A
step fills inputs, runs its graph and reads logits.

| file | has |
|---|---|
| graph.py | wrappers of ggml's arenas, graphs and buffers |
| weights.py, slots.py | weights and rows, and the memory that their tensors point into |
| kv_cache.py | keys and values, and which of them a token sees |
| layer.py, attention.py | a layer as operators |
| layers.py | FFNs, experts and per-layer embeddings; all layers, embedding and head |
| steps.py | steps of one sequence or several, and their graphs |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from stem_edge.errors import BackendError
from stem_edge.numerics.quantize import F32, U8
from stem_edge.runtime.backends.ggml.kv_cache import KvCache
from stem_edge.runtime.backends.ggml.steps import GgmlSteps
from stem_edge.runtime.backends.ggml.weights import GgmlModel
from stem_edge.runtime.backends.interface import BackendBatch, BackendContext, Resumes
from stem_edge.system.memory import return_freed_memory


class GgmlBatch(BackendBatch):
    """KV caches of contexts. A context must take no step alone until it has left.

    A token's logits can be rounded differently than in a step alone: ggml chooses kernels by the
    number of tokens of a step. On x86 with AVX-512 they were the same bits with weights in Q8_0,
    Q5_0 and Q4_0, and with K-quants up to 7 tokens, but not in F32 or F16.
    """

    def __init__(self, model: GgmlModel) -> None:
        self._steps, self._caches = GgmlSteps(model), list[KvCache]()

    def join(self, context: BackendContext, tokens: int) -> None:
        if not isinstance(context, GgmlContext):
            raise BackendError("ggml cannot batch this context; open it with this backend")
        context.rest()  # because the batch has memory for its steps
        self._steps.forget()
        self._caches.append(context.kv)

    def leave(self, place: int) -> None:
        self._steps.forget()  # because graphs keep the caches that they attend to
        last = self._caches.pop()
        if place < len(self._caches):
            self._caches[place] = last

    def begin(
        self, first: int, token_ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> None:
        self._steps.begin(self._caches[first : first + len(token_ids)], token_ids, positions)

    def finish(self, slot_ids: npt.NDArray[np.int32]) -> F32:
        return self._steps.finish(slot_ids, len(slot_ids))


class GgmlContext(BackendContext):
    """KV cache and graphs of one generation."""

    def __init__(self, model: GgmlModel, length: int) -> None:
        self.length = length
        self.kv = KvCache(model.ggml, model.config, model.kv_type, length)
        self.steps = GgmlSteps(model)

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes

    def nbytes_of(self, tokens: int) -> int:
        return self.kv.nbytes_of(tokens)

    @property
    def earliest(self) -> int:
        return self.kv.earliest

    def resumes(self, tokens: int) -> Resumes:
        return (
            "steps"  # kernels are chosen by the number of tokens of a step, and round differently
        )

    @property
    def settled(self) -> int:
        return self.kv.earliest  # because a token's cell follows from its position

    def rest(self) -> None:
        self.steps.rest()

    def kept(self, tokens: int) -> list[U8]:
        """Return views [tokens, bytes of a token]."""
        return self.kv.kept(tokens)

    def restore(self, arrays: Iterable[npt.NDArray[Any]], tokens: int) -> None:
        self.kv.restore(arrays, tokens)

    def together(self, position: int) -> int:
        return self.length - position

    def begin(
        self,
        token_ids: npt.NDArray[np.int64],
        position: int,
        *,
        prefill: bool = False,
        apart: bool = False,
    ) -> None:
        """Start a step; `prefill` and `apart` change nothing, because all steps share graphs."""
        self.steps.begin([self.kv], token_ids, np.arange(position, position + len(token_ids)))

    def finish(self, slot_ids: npt.NDArray[np.int32], logits: int) -> F32:
        return self.steps.finish(slot_ids, logits)


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
