"""Exporting checkpoints to bundles. May import torch, which the runtime never does."""

from stem_edge.export.dense_gguf import export_dense_gguf
from stem_edge.export.exporter import export_bundle

__all__ = ["export_bundle", "export_dense_gguf"]
