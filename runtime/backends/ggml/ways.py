"""How ggml runs bundles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from stem_edge.bundle.footprint import footprint_of
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import BackendError
from stem_edge.ggml.check import checked_ggml
from stem_edge.graph.kv import KvType
from stem_edge.runtime.backends.expected import Expected
from stem_edge.runtime.backends.ggml.weights import can_repack
from stem_edge.runtime.backends.ways import CacheDir, EngineWays, Ways


class GgmlWays(EngineWays):
    """See EngineWays."""

    # It uses other attention kernels from `tile` tokens on, and other products for a few tokens.
    tile, few_slots = 64, (16, 48)
    kv_nats: ClassVar[Mapping[KvType, float]] = {"int8": 0.0005, "int4": 0.09}

    @property
    def expected(self) -> Expected:
        from stem_edge.runtime.backends.ggml import expected

        return expected

    def missing(self, cache_dir: CacheDir) -> str:
        try:
            checked_ggml(cache_dir)
        except BackendError as error:
            return str(error)
        return ""

    def kernels(self, bundle: Bundle, cache_dir: CacheDir) -> Ways:
        repacked = footprint_of(bundle.manifest, "ggml").repacked_nbytes
        if repacked and can_repack(checked_ggml(cache_dir)):
            return {"ggml": {}, "ggml repacked": {"repack": True}}
        return {"ggml": {}}
