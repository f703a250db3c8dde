"""What an export does for the engine that is to run its bundle."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from stem_edge.export.backbone.gguf import check_runnable, write_gguf_backbone
from stem_edge.export.backbone.onnx import write_onnx
from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.job.files import Output
from stem_edge.export.job.job import Job
from stem_edge.ggml.check import checked_ggml
from stem_edge.graph.formats import BackboneFormat, EngineName, GgufFormat
from stem_edge.numerics.quantize import F32


class Engine(NamedTuple):
    """Steps of an export that are other for each engine."""

    write: Callable[[Job, Output, dict[str, F32]], None]  # the backbone; with the peaks of inputs
    check_installed: Callable[[], object] = lambda: None
    check: Callable[[Checkpoint], None] = lambda source: None  # refuses what it cannot run


ENGINES: dict[EngineName, Engine] = {
    BackboneFormat.engine: Engine(write_onnx),
    GgufFormat.engine: Engine(write_gguf_backbone, checked_ggml, check_runnable),
}
