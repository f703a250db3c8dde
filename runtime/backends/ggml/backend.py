"""The backbone on ggml: a graph for each shape of a step, over weights in the mapped file.

Python owns all memory that outlives a step, and ggml's tensors point into it: weights in the mapped file, rows in the
row cache's slots, keys and values, and the hidden states that the early layers pass to the layers that need rows.
Intermediate results share scratch memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stem_edge.errors import BackendError
from stem_edge.numerics.quantize import F32, I32, I64, U8
from stem_edge.runtime.backends.ggml.kv_cache import KvCache
from stem_edge.runtime.backends.ggml.steps import GgmlSteps
from stem_edge.runtime.backends.ggml.weights import GgmlModel
from stem_edge.runtime.backends.interface import BackendContext, BackendPlaces, Resumes
from stem_edge.system.memory import return_freed_memory


class GgmlContext(BackendContext):
    def __init__(self, model: GgmlModel, length: int) -> None:
        self.length = length
        self.kv = KvCache(model.ggml, model.config, model.kv_type, length)

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes

    def nbytes_of(self, tokens: int) -> int:
        return self.kv.nbytes_of(tokens)

    @property
    def earliest(self) -> int:
        return self.kv.earliest

    def resumes(self, tokens: int) -> Resumes:
        # ggml chooses kernels by the number of tokens in a step, and they round differently.
        return "steps"

    @property
    def settled(self) -> int:
        return self.kv.earliest  # because a token's position determines its cell

    def rest(self) -> None:
        """Do nothing. Other engines free the last step's logits here; on ggml, logits belong to a graph."""

    def kept(self, tokens: int) -> list[U8]:
        """Return views of the first `tokens` tokens' keys and values: for each layer, two [tokens, bytes per token]."""
        return self.kv.kept(tokens)

    def restore(self, arrays: Iterable[npt.NDArray[Any]], tokens: int) -> None:
        self.kv.restore(arrays, tokens)

    def together(self, position: int) -> int:
        return self.length - position


class GgmlBackend:
    """A backbone loaded on ggml; see Backend. Raises BackendError after `close`."""

    def __init__(self, model: GgmlModel) -> None:
        self._open: GgmlSteps | None = GgmlSteps(model)

    @property
    def _steps(self) -> GgmlSteps:
        if self._open is None:
            raise BackendError("this backbone is closed; load the bundle again")
        return self._open

    def open_context(self, length: int) -> GgmlContext:
        return GgmlContext(self._steps.model, length)

    def open_places(self, size: int, length: int) -> BackendPlaces:
        """Return an object without memory: ggml decodes sequences in a batch without a shared KV cache.

        ggml chooses kernels by the number of tokens, so a batch can round logits differently than a
        single-token step. On x86 with AVX-512, the bits were the same with Q8_0, Q5_0 and Q4_0 weights,
        and with K-quants up to 7 tokens, but not with F32 or F16.
        """
        return BackendPlaces()

    def open_drafter(self, context: GgmlContext) -> None:
        """Return None: ggml does not run the draft model of a bundle (Gemma 4's assistant)."""

    def begin(
        self,
        contexts: Sequence[GgmlContext],
        token_ids: I64,
        positions: Sequence[int],
        *,
        prefill: bool = False,
        apart: bool = False,
    ) -> None:
        """Start a step. ggml ignores `prefill` (use a graph for prompts) and `apart` (same bits as single-token steps)."""
        places = np.add.outer(positions, np.arange(token_ids.shape[1]))
        self._steps.begin([context.kv for context in contexts], token_ids.ravel(), places.ravel())

    def finish(self, slot_ids: I32, logits: int) -> F32:
        return self._steps.finish(slot_ids, logits)

    def close(self) -> None:
        """Release the model; its memory is freed once no step is running."""
        self._open = None
        return_freed_memory()
