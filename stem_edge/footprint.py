"""Bytes that a bundle takes on flash, part by part: of one that exists, or of one still to be made."""

from __future__ import annotations

from dataclasses import dataclass

from stem_edge.bundle import (
    BACKBONE_DATA,
    PREFILL_DATA,
    VOCABULARY_KINDS,
    WEIGHT_BITS,
    BackboneFormat,
    Manifest,
    MatrixKind,
    WeightType,
)
from stem_edge.config import ModelConfig
from stem_edge.graph_io import head_width
from stem_edge.quantize import fitting_block
from stem_edge.rows import RecordLayout
from stem_edge.table_store import TableFormat

FLOAT = 4


@dataclass(frozen=True)
class Footprint:
    """A bundle by what decides its memory and speed. All sizes in bytes."""

    model: ModelConfig
    backbone: BackboneFormat
    table_format: TableFormat | None
    backbone_nbytes: int  # weights of the graphs that decode, embedding and head included
    prefill_nbytes: int  # weights of the prefill graph; 0 without one

    @property
    def embedding_nbytes(self) -> int:
        """Of the embedding, which is read in place, a row a token."""
        return _kind_nbytes(self.backbone, "embedding", self.model.vocab_size, self.model.dim)

    @property
    def step_nbytes(self) -> int:
        """Weights that a decode step reads: all but the embedding."""
        return max(0, self.backbone_nbytes - self.embedding_nbytes)

    @property
    def tables(self) -> RecordLayout | None:
        """Of a record in memory; None of a dense model."""
        return self.table_format.tables if self.table_format else None

    @property
    def tables_nbytes(self) -> int:
        """Of the table store, to within the size of its descriptions."""
        return self.table_format.nbytes if self.table_format else 0

    @property
    def flash_nbytes(self) -> int:
        """Of backbone and tables; tokenizer and manifest are small."""
        return self.backbone_nbytes + self.prefill_nbytes + self.tables_nbytes

    def kv_nbytes(self, tokens: int) -> int:
        """Keys and values of so many tokens, in float32."""
        model = self.model
        return 2 * model.n_layers * model.n_kv_heads * head_width(model) * FLOAT * tokens


def footprint_of(manifest: Manifest) -> Footprint:
    """Of a bundle that exists."""
    return Footprint(
        manifest.model,
        manifest.backbone,
        manifest.table_format,
        manifest.files[BACKBONE_DATA].nbytes,
        manifest.files[PREFILL_DATA].nbytes if manifest.backbone.prefill else 0,
    )


def expected_footprint(
    model: ModelConfig, backbone: BackboneFormat, tables: TableFormat | None
) -> Footprint:
    """Of a bundle that an export with these types would write; its own alignment not counted."""
    shapes = {n: s for n, s in _stored_shapes(model).items() if len(s) == 2}
    layers = {name: shape for name, shape in shapes.items() if name.startswith("layers.")}
    matrices = sum(_kind_nbytes(backbone, _kind(n), *shape) for n, shape in layers.items())
    # A tied head is stored beside the embedding: it is read by products, not by rows.
    for kind in VOCABULARY_KINDS:
        matrices += _kind_nbytes(backbone, kind, model.vocab_size, model.dim)
    norms = sum(FLOAT * s[0] for s in model.backbone_shapes().values() if len(s) == 1)
    # Of prompts: one byte a weight, a scale for each output.
    prefill = norms + sum(rows * (width + FLOAT) for rows, width in layers.values())
    return Footprint(
        model,
        backbone,
        tables,
        matrices + norms,
        prefill if backbone.prefill else 0,
    )


def _stored_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes with heads padded to a width that the attention operator takes."""
    padded, width = head_width(model), model.head_dim
    stored = {}
    for name, shape in model.backbone_shapes().items():
        part = name.rsplit(".", 1)[-1]
        if part in ("wq", "wk", "wv"):
            shape = (shape[0] // width * padded, shape[1])
        elif part == "wo":
            shape = (shape[0], shape[1] // width * padded)
        stored[name] = shape
    return stored


def kinds_of(model: ModelConfig) -> set[MatrixKind]:
    """Kinds of matrices that a model has."""
    shapes = model.backbone_shapes()
    found = {_kind(name) for name, shape in shapes.items() if len(shape) == 2}
    return found | set(VOCABULARY_KINDS)


def _kind(name: str) -> MatrixKind:
    part = name.rsplit(".", 1)[-1]
    kind: MatrixKind = "qkv" if part in ("wq", "wk", "wv") else part  # type: ignore[assignment]
    return kind


def _kind_nbytes(backbone: BackboneFormat, kind: MatrixKind, rows: int, width: int) -> int:
    zero_points = backbone.asymmetric or kind == "embedding"
    stored, block = backbone.type_of(kind), backbone.block_size
    return matrix_nbytes(rows, width, stored, block, zero_points=zero_points)


def matrix_nbytes(
    rows: int, width: int, stored: WeightType, block_size: int, *, zero_points: bool = False
) -> int:
    """A stored matrix [rows, width]: codes, scales and, if there are any, zero points."""
    bits = WEIGHT_BITS[stored]
    nbytes = rows * width * bits // 8
    if bits != 32:
        groups = width // (fitting_block(width, block_size) or width)
        nbytes += rows * groups * FLOAT
        nbytes += rows * -(-groups * bits // 8) if zero_points else 0
    return nbytes
