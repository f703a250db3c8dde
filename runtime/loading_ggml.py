"""Loading a bundle on ggml, whose tensors are where the manifest says that they are."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from stem_edge.bundle import GGUF, Bundle
from stem_edge.errors import BackendError, InputError
from stem_edge.ggml_check import checked_ggml
from stem_edge.gguf_schema import kv_type
from stem_edge.gguf_tensors import locate
from stem_edge.rows import RecordLayout
from stem_edge.runtime.backend_ggml import GgmlBackend
from stem_edge.runtime.ggml_model import GgmlModel
from stem_edge.runtime.ggml_slots import BlockSlots
from stem_edge.runtime.plan import Loading
from stem_edge.runtime.prefetch import ANY_NUMBER
from stem_edge.runtime.slots import Slots

MOST_THREADS = 512  # GGML_MAX_N_THREADS


class GgmlLoader:
    """See stem_edge.runtime.engines.EngineLoader; arguments as of stem_edge.load."""

    fills_while_opening = True
    step_tokens = ANY_NUMBER

    def __init__(
        self, bundle: Bundle, threads: int, *, repack: bool, cache_dir: str | Path | None
    ) -> None:
        if threads > MOST_THREADS:
            raise InputError(f"threads is {threads}; ggml takes at most {MOST_THREADS}")
        if bundle.manifest.gguf is None:
            raise BackendError(f"{bundle.path}: no {GGUF}; choose another engine")
        self._kv_type = kv_type(bundle.manifest.gguf.weights)
        self._config, self._threads, self._repack = bundle.manifest.model, threads, repack
        nbytes, weights = bundle.manifest.files[GGUF].nbytes, bundle.manifest.gguf.weights
        self._file = locate(bundle.file(GGUF), nbytes, self._config, weights)
        self._ggml = checked_ggml(cache_dir)

    def describe(self, loading: Loading) -> Loading:
        """See EngineLoader.describe."""
        return dataclasses.replace(loading, repack=self._repack)

    def make_slots(self, layout: RecordLayout, count: int) -> BlockSlots:
        """See EngineLoader.make_slots."""
        return BlockSlots(layout, count)

    def open(self, slots: Slots | None) -> GgmlBackend:
        """See EngineLoader.open."""
        if slots is not None and not isinstance(slots, BlockSlots):
            raise BackendError("ggml reads its own kind of slots; make them with make_slots")
        model = GgmlModel(
            self._ggml,
            self._config,
            self._file,
            slots,
            self._threads,
            self._kv_type,
            repack=self._repack,
        )
        return GgmlBackend(model)
