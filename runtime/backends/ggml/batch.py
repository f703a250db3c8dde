"""Sequences that decode together: products over all their tokens, attention for each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stem_edge.errors import BackendError
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.ggml.context import GgmlContext
from stem_edge.runtime.backends.ggml.kv_cache import KvCache
from stem_edge.runtime.backends.ggml.model import GgmlModel
from stem_edge.runtime.backends.ggml.steps import Steps
from stem_edge.runtime.backends.interface import BackendBatch, BackendContext


class GgmlBatch(BackendBatch):
    """KV caches of contexts, which are not to take steps of their own until they have left.

    A token's logits can differ in rounding from those that it has alone: kernels are chosen by the
    number of tokens of a step. On x86 with AVX-512 they were the same bits with weights in Q8_0,
    Q5_0 and Q4_0, and with K-quants up to 7 tokens (repacked Q4_K: up to 3), but not in F32 or F16.
    """

    copies = False

    def __init__(self, model: GgmlModel) -> None:
        self._steps, self._caches = Steps(model), list[KvCache]()

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

    def finish(self, slot_ids: npt.NDArray[np.int32], top: int = 0) -> F32:
        """Complete a step; `top` changes nothing, because all logits are in host memory."""
        return self._steps.finish(slot_ids, len(slot_ids))
