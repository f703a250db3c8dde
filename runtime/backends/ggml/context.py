"""A sequence alone, and how far its KV cache can go back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from stem_edge.numerics.quantize import F32, U8
from stem_edge.runtime.backends.ggml.kv_cache import KvCache
from stem_edge.runtime.backends.ggml.model import GgmlModel
from stem_edge.runtime.backends.ggml.steps import Steps
from stem_edge.runtime.backends.interface import BackendContext, Resumes


class GgmlContext(BackendContext):
    """KV cache and graphs of one generation."""

    def __init__(self, model: GgmlModel, length: int) -> None:
        self.length = length
        self.kv = KvCache(model.ggml, model.config, model.kv_type, length)
        self.steps = Steps(model)

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

    def begin(
        self, token_ids: npt.NDArray[np.int64], position: int, *, prefill: bool = False
    ) -> None:
        """Start a step; `prefill` changes nothing, because prompts and decoding share graphs."""
        self.steps.begin([self.kv], token_ids, np.arange(position, position + len(token_ids)))

    def finish(self, slot_ids: npt.NDArray[np.int32], logits: int, top: int = 0) -> F32:
        """Complete a step; `top` changes nothing, because all logits are in host memory."""
        return self.steps.finish(slot_ids, logits)
