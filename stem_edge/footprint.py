"""Bytes that a bundle takes on flash, part by part: of one that exists, or of one still to be made."""

from __future__ import annotations

from dataclasses import dataclass

from stem_edge.bundle import (
    BACKBONE_DATA,
    PREFILL_DATA,
    WEIGHT_BITS,
    BackboneFormat,
    Manifest,
    WeightType,
)
from stem_edge.config import ModelConfig
from stem_edge.graph_io import head_width
from stem_edge.quantize import fitting_block
from stem_edge.rows import RecordLayout
from stem_edge.shards import CRC_NBYTES

FLOAT = 4
# Beside each record, the index of its shard: offset and length.
INDEX_NBYTES = 16


@dataclass(frozen=True)
class Footprint:
    """A bundle by what decides its memory and speed. All sizes in bytes."""

    model: ModelConfig
    backbone: BackboneFormat
    tables: RecordLayout | None
    backbone_nbytes: int  # weights of the graphs that decode, embedding and head included
    prefill_nbytes: int  # weights of the prefill graph; 0 without one

    @property
    def embedding_nbytes(self) -> int:
        """Of the embedding, which is read in place, a row a token."""
        return matrix_nbytes(
            self.model.vocab_size,
            self.model.dim,
            self.backbone.head,
            self.backbone.block_size,
            gathered=True,
        )

    @property
    def step_nbytes(self) -> int:
        """Weights that a decode step reads: all but the embedding."""
        return max(0, self.backbone_nbytes - self.embedding_nbytes)

    @property
    def tables_nbytes(self) -> int:
        """Of the table store, to within the size of its descriptions."""
        if self.tables is None:
            return 0
        return self.tables.vocab_size * (self.tables.record_nbytes + CRC_NBYTES + INDEX_NBYTES)

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
        manifest.tables,
        manifest.files[BACKBONE_DATA].nbytes,
        manifest.files[PREFILL_DATA].nbytes if manifest.backbone.prefill else 0,
    )


def expected_footprint(
    model: ModelConfig, backbone: BackboneFormat, tables: RecordLayout | None
) -> Footprint:
    """Of a bundle that an export with these types would write; its own alignment not counted."""
    shapes = {n: s for n, s in _stored_shapes(model).items() if len(s) == 2}
    layers = [shape for name, shape in shapes.items() if name.startswith("layers.")]
    matrices = sum(matrix_nbytes(*each, backbone.weights, backbone.block_size) for each in layers)
    whole = (model.vocab_size, model.dim, backbone.head, backbone.block_size)
    head, embedding = matrix_nbytes(*whole), matrix_nbytes(*whole, gathered=True)
    norms = sum(FLOAT * s[0] for s in model.backbone_shapes().values() if len(s) == 1)
    # Of prompts: one byte a weight, a scale for each output.
    prefill = norms + sum(rows * (width + FLOAT) for rows, width in layers)
    return Footprint(
        model,
        backbone,
        tables,
        matrices + head + embedding + norms,
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


def matrix_nbytes(
    rows: int, width: int, kind: WeightType, block_size: int, *, gathered: bool = False
) -> int:
    """A stored matrix [rows, width]: codes, scales, and zero points if rows are gathered from it."""
    bits = WEIGHT_BITS[kind]
    nbytes = rows * width * bits // 8
    if bits != 32:
        groups = width // (fitting_block(width, block_size) or width)
        nbytes += rows * groups * FLOAT
        nbytes += rows * -(-groups * bits // 8) if gathered else 0
    return nbytes
