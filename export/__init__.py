"""Exports checkpoints to bundles."""

from stem_edge.export.exporter import export_bundle

__all__ = ["export_bundle"]
