"""Checkpoint -> bundle. May import torch and onnx; the runtime never does."""

from stem_edge.export.exporter import export_bundle

__all__ = ["export_bundle"]
