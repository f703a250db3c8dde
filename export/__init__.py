"""Exports checkpoints to bundles, the folders that the runtime loads."""

from stem_edge.export.exporter import export_bundle

__all__ = ["export_bundle"]
