"""Graphs of a bundle for accelerators."""

from __future__ import annotations

from stem_edge.bundle.opening import Bundle
from stem_edge.graph.device import variants
from stem_edge.graph.names import Variant
from stem_edge.runtime.backends.onnxruntime.providers.graphs import GraphSource, format_of, sources


def variant_graphs(bundle: Bundle, variant: Variant) -> dict[str, GraphSource]:
    """Return the graphs of a variant for accelerators by name; the model must have the variant."""
    manifest = bundle.manifest
    graphs = variants.graphs(variant, manifest.model, manifest.tables, format_of(bundle))
    return sources(bundle, graphs)
