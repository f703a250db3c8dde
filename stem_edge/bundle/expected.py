"""Sizes of a bundle, and kinds of its matrices, before it is exported."""

from __future__ import annotations

from functools import singledispatch

from stem_edge.bundle.footprint import Footprint, gguf_footprint, onnx_footprint
from stem_edge.config import ModelConfig
from stem_edge.graph.decode import decoding, prompts
from stem_edge.graph.formats import (
    MATRIX_KINDS,
    VOCABULARY_KINDS,
    BackboneFormat,
    GgufFormat,
    MatrixKind,
)
from stem_edge.graph.layer import kind_of
from stem_edge.tables.store import TableFormat


@singledispatch
def expected_footprint(
    backbone: BackboneFormat | GgufFormat, model: ModelConfig, tables: TableFormat | None
) -> Footprint:
    """Footprint of the bundle that an export with these types would write. Raises GraphError."""
    raise TypeError(f"{type(backbone).__name__} is no format of a backbone")


@expected_footprint.register
def _(backbone: GgufFormat, model: ModelConfig, tables: TableFormat | None) -> Footprint:
    return gguf_footprint(model, backbone, tables)


@expected_footprint.register
def _(backbone: BackboneFormat, model: ModelConfig, tables: TableFormat | None) -> Footprint:
    layout = tables.tables if tables else None
    data = decoding(model, layout, backbone).plan.nbytes
    prefill = prompts(model, layout, backbone).plan.nbytes if backbone.prefill else 0
    return onnx_footprint(model, backbone, tables, data, prefill)


def kinds_of(model: ModelConfig) -> set[MatrixKind]:
    """Return the kinds of matrices that a model has."""
    shapes = model.backbone_shapes()
    found = {kind_of(name) for name, shape in shapes.items() if len(shape) == 2}
    if "qkv" in found:
        found.add("v")
    return found & set(MATRIX_KINDS) | set(VOCABULARY_KINDS)
