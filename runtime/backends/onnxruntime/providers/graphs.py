"""The graphs of a bundle as sessions are opened over them: built here, their weights in its files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from stem_edge.bundle.manifest import Bundle
from stem_edge.errors import BackendError
from stem_edge.graph import variants
from stem_edge.graph.decode import decoding, prompts
from stem_edge.graph.encoder import encode
from stem_edge.graph.formats import BackboneFormat
from stem_edge.graph.names import Variant


class GraphSource(NamedTuple):
    """A graph as an ONNX file in memory, and the folder of the weights that it names."""

    name: str
    data: bytes
    folder: Path

    def __str__(self) -> str:
        return f"{self.folder} ({self.name})"


def cpu_graphs(bundle: Bundle, *, prefill: bool) -> dict[str, GraphSource]:
    """Graph -> its source, of those for the CPU, in the order of a step."""
    manifest = bundle.manifest
    described = manifest.model, manifest.tables, format_of(bundle)
    made = decoding(*described).graphs
    if prefill:
        made |= prompts(*described).graphs
    return {n: GraphSource(n, encode(graph), bundle.path) for n, graph in made.items()}


def variant_graphs(bundle: Bundle, variant: Variant) -> dict[str, GraphSource]:
    """The same of a variant for accelerators that the model has."""
    manifest = bundle.manifest
    made = variants.graphs(variant, manifest.model, manifest.tables, format_of(bundle))
    return {n: GraphSource(n, encode(graph), bundle.path) for n, graph in made.items()}


def format_of(bundle: Bundle) -> BackboneFormat:
    """How the backbone for onnxruntime is stored. Raises BackendError if there is none."""
    if bundle.manifest.backbone is None:
        raise BackendError(f"{bundle.path}: no backbone for onnxruntime; choose another engine")
    return bundle.manifest.backbone
