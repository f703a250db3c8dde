"""Exporting checkpoints to bundles."""

from stem_edge.export.dense_gguf import export_dense_gguf
from stem_edge.export.exporter import export_bundle

__all__ = ["export_bundle", "export_dense_gguf"]
