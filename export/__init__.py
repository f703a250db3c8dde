"""Checkpoint -> bundle. May import torch and onnx; the runtime never does."""

from stem_edge.export.exporter import export_bundle
from stem_edge.export.gguf_dense import export_dense_gguf

__all__ = ["export_bundle", "export_dense_gguf"]
