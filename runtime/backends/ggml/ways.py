"""How ggml runs bundles."""

from __future__ import annotations

from pathlib import Path

from stem_edge.errors import BackendError
from stem_edge.ggml.check import checked_ggml
from stem_edge.runtime.backends.expected import Expected
from stem_edge.runtime.backends.ways import EngineWays


class GgmlWays(EngineWays):
    """See EngineWays."""

    tile = (
        64  # it uses other attention kernels from so many tokens on, and other products for a few
    )

    @property
    def expected(self) -> Expected:
        from stem_edge.runtime.backends.ggml import expected

        return expected

    def missing(self, cache_dir: str | Path | None) -> str:
        try:
            checked_ggml(cache_dir)
        except BackendError as error:
            return str(error)
        return ""
