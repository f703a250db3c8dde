"""Types of tensors that a checkpoint in a GGUF file has, and that its backbone for ggml can keep."""

from __future__ import annotations

from dataclasses import replace

from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.job.options import ExportOptions
from stem_edge.export.tensor_files.gguf_tensor import Coded
from stem_edge.ggml.gguf_schema import short_types, tensor_types
from stem_edge.graph.formats import GGUF_TYPES, GgufFormat


def keep_stored_types(source: Checkpoint, options: ExportOptions) -> ExportOptions:
    """Choose the types of the checkpoint's own matrices, if no others are asked for.

    Matrices that an adapter changed have none, so such a model is quantized as others are.
    """
    if not isinstance(options.format, GgufFormat) or options.backbone is not None:
        return options
    matrices = {name: m for name, m in source.backbone.items() if len(m.shape) == 2}
    found = {name: m.type for name, m in matrices.items() if isinstance(m, Coded)}
    if not found or len(found) < len(matrices):
        return options
    for mixture in GGUF_TYPES:
        planned = tensor_types(source.config, mixture)
        if all(planned[name] == kind for name, kind in found.items()):
            return replace(options, stored=mixture)
    return replace(options, stored=short_types(found))
