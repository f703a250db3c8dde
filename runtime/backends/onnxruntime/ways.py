"""How onnxruntime runs bundles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from stem_edge.bundle.opening import Bundle
from stem_edge.graph.kv import KvType
from stem_edge.runtime.backends.expected import Expected
from stem_edge.runtime.backends.interface import LEAST_CHUNK
from stem_edge.runtime.backends.onnxruntime.prepared import prepacked
from stem_edge.runtime.backends.ways import CacheDir, EngineWays, Ways


class OnnxRuntimeWays(EngineWays):
    """See EngineWays."""

    few_slots = LEAST_CHUNK, 64
    kv_nats: ClassVar[Mapping[KvType, float]] = {"int8": 0.0025, "int4": 0.22}

    @property
    def expected(self) -> Expected:
        from stem_edge.runtime.backends.onnxruntime import expected

        return expected

    def kernels(self, bundle: Bundle, cache_dir: CacheDir) -> Ways:
        decoding: Ways = {"": {"prefill_graph": False}}
        prompts: Ways = {"prefill graph": {"prefill_graph": True}}
        return decoding | prompts if bundle.manifest.has_prefill else decoding

    def ways(self, bundle: Bundle, cache_dir: CacheDir) -> Ways:
        worth_it = prepacked.place(bundle, cache_dir).is_worth_it
        return {"prepared": {"prepare": True}} if worth_it else {}
