"""Exports whose backbone has a given format, which no option can name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from stem_edge.bundle.opening import Bundle
from stem_edge.export.exporter import export_with
from stem_edge.export.job.plan import plain_format
from stem_edge.export.job.recipe import Recipe
from stem_edge.graph.formats import (
    WEIGHT_BITS,
    BackboneFormat,
    MatrixKind,
    QuantizerName,
    WeightType,
)

TYPE_OF_BITS = {bits: name for name, bits in WEIGHT_BITS.items()}


def format_with(
    weights: WeightType = "int4",
    *,
    head: WeightType | None = None,
    bits: Mapping[MatrixKind, int] | None = None,
    block_size: int = 16,
    asymmetric: bool = False,
    quantizer: QuantizerName = "rtn",
) -> BackboneFormat:
    """Return a format for onnxruntime. bits: of kinds of matrices that differ from the others."""
    return BackboneFormat(
        weights=weights,
        head=head or weights,
        block_size=block_size,
        kinds={kind: TYPE_OF_BITS[count] for kind, count in (bits or {}).items()},
        asymmetric=asymmetric,
        quantizer=quantizer,
        kv_peaks=True,
    )


def export_as(checkpoint: Path, out: Path, format: BackboneFormat, **options: Any) -> Bundle:
    """Export a checkpoint with a backbone of this format."""
    return export_with(checkpoint, out, Recipe(type=format, **options))


def usual_format(weights: WeightType, **changes: Any) -> BackboneFormat:
    """Return the format of an export with one type of matrices, in blocks of 16, with changes."""
    return replace(plain_format(weights), **({"block_size": 16} | changes))
