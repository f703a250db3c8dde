"""What a load asks of ggml before it is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stem_edge.runtime.backends.engine import Engine

if TYPE_CHECKING:
    from stem_edge.runtime.backends.ggml.ways import GgmlWays


class GgmlEngine(Engine):
    """ggml, on the CPU."""

    name = backbone = "ggml"
    module = "stem_edge.runtime.backends.ggml.loader"
    install = "pip install 'stem-edge[gguf]' (it compiles for some minutes: docs/engines.md)"
    lacks = ("provider", "device_memory")

    @property
    def installed(self) -> bool:
        from stem_edge.ggml.installed import library_path

        return library_path() is not None

    @property
    def ways(self) -> GgmlWays:
        from stem_edge.runtime.backends.ggml.ways import GgmlWays

        return GgmlWays()
