"""How onnxruntime runs bundles."""

from __future__ import annotations

from stem_edge.runtime.backends.expected import Expected
from stem_edge.runtime.backends.ways import EngineWays


class OnnxRuntimeWays(EngineWays):
    """See EngineWays."""

    @property
    def expected(self) -> Expected:
        from stem_edge.runtime.backends.onnxruntime import expected

        return expected
