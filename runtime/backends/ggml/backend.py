"""The backbone on ggml: a graph for each shape of a step, over weights in the mapped file.

Python owns all memory that outlives a step, and ggml's tensors point into it: weights in the mapped file, rows in the
row cache's slots, keys and values, and the hidden states that the early layers pass to the layers that need rows.
Intermediate results share scratch memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stem_edge.numerics.quantize import F32, I32, I64
from stem_edge.runtime.backends.ggml.kv_cache import KvCache
from stem_edge.runtime.backends.ggml.steps import GgmlSteps
from stem_edge.runtime.backends.ggml.weights import GgmlModel
from stem_edge.runtime.backends.interface import BackendPlaces
from stem_edge.system.memory import return_freed_memory


class GgmlBackend:
    """A backbone loaded on ggml; see Backend."""

    def __init__(self, model: GgmlModel) -> None:
        self._steps = GgmlSteps(model)

    def open_context(self, length: int) -> KvCache:
        model = self._steps.model
        return KvCache(model.ggml, model.config, model.kv_type, length)

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
        self._steps.begin(contexts, token_ids.ravel(), places.ravel())

    def finish(self, slot_ids: I32, logits: int) -> F32:
        return self._steps.finish(slot_ids, logits)

    def close(self) -> None:
        """Release the model; its memory is freed once no step is running."""
        self.__dict__.pop("_steps", None)
        return_freed_memory()
