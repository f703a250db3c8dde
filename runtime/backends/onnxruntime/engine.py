"""What a load asks of onnxruntime before it is imported."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from stem_edge.runtime.backends.engine import Engine

if TYPE_CHECKING:
    from stem_edge.runtime.backends.onnxruntime.ways import OnnxRuntimeWays


class OnnxRuntimeEngine(Engine):
    """onnxruntime, on the CPU or on an accelerator."""

    name = backbone = "onnxruntime"
    module = "stem_edge.runtime.backends.onnxruntime.loader"
    install = "pip install onnxruntime"
    lacks = ("repack",)

    @property
    def installed(self) -> bool:
        return find_spec("onnxruntime") is not None

    @property
    def ways(self) -> OnnxRuntimeWays:
        from stem_edge.runtime.backends.onnxruntime.ways import OnnxRuntimeWays

        return OnnxRuntimeWays()
