"""Sizes in bytes of a bundle's parts: weights, tables, KV cache, slots of the row cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from stem_edge.bundle.manifest import Manifest
from stem_edge.config import ModelConfig
from stem_edge.errors import InputError
from stem_edge.graph.formats import (
    ASSISTANT_DATA,
    BACKBONE_DATA,
    PREFILL_DATA,
    BackboneFormat,
    GgufFormat,
)
from stem_edge.graph.kv import CACHES, KvChoice, KvType, kv_obstacle
from stem_edge.graph.names import kv_capacity
from stem_edge.layers import Layer
from stem_edge.numerics.quantize import fitting_block
from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.store import TableFormat

FLOAT, HALF = 4, 2
# Backbones for onnxruntime below this size are not prepared: they load fast, and in little memory, anyway. A
# prepared backbone is larger than the weights, because it contains every matrix plain and packed.
LEAST_PREPARED, PREPARED_OVER_DATA = 64 << 20, 2.2
# Bookkeeping of the row cache (runtime/rows/cache.py): bytes of a slot and of a bucket; least number of buckets.
SLOT_BOOKKEEPING_NBYTES, BUCKET_NBYTES, LEAST_BUCKETS = 37, 8, 1 << 18


@dataclass(frozen=True)
class Footprint:
    """Sizes in bytes of a bundle's parts on one engine, to compute how much memory a load takes."""

    model: ModelConfig
    backbone: BackboneFormat | GgufFormat
    table_format: TableFormat | None
    backbone_nbytes: int  # weights of the decoding graph, with embedding and head
    step_nbytes: int  # weights that a decode step reads
    prefill_nbytes: int  # weights of the prefill graph; 0 without one
    slot_nbytes: int  # a slot of the row cache, with its bookkeeping
    usual_kv: KvType  # default type of keys and values
    kv: KvType  # chosen type of keys and values
    token_nbytes: Callable[[KvType, Layer], int]  # KV cache bytes of a token in a layer
    obstacle: Callable[[KvType], str]  # why a type is not supported, with a remedy; else ""
    windows: bool = True  # True if layers with a window cache only the tokens in the window
    assistant_nbytes: int = 0  # memory of the draft model

    @property
    def tables(self) -> RecordLayout | None:
        return self.table_format.tables if self.table_format else None

    @property
    def tables_nbytes(self) -> int:
        """Bytes of the table store, not counting its metadata files."""
        return self.table_format.nbytes if self.table_format else 0

    @property
    def flash_nbytes(self) -> int:
        """Bytes of backbone and tables on flash, without the small tokenizer and manifest."""
        return self.backbone_nbytes + self.prefill_nbytes + self.tables_nbytes

    @property
    def prepared_nbytes(self) -> int:
        """Approximate bytes of the weights after repacking for this processor; 0 without repacking."""
        own = self.backbone_nbytes + self.prefill_nbytes
        prepared = self.backbone.packed and own > LEAST_PREPARED
        return int(PREPARED_OVER_DATA * (self.step_nbytes + self.prefill_nbytes)) if prepared else 0

    def kv_nbytes(self, tokens: int) -> int:
        nbytes = self.conv_nbytes(tokens)
        for layer in self.model.layers[: self.model.own_kv_layers]:
            kept = kv_capacity(layer.window if self.windows else 0, tokens)
            nbytes += self.token_nbytes(self.kv, layer) * kept
        return nbytes

    def conv_nbytes(self, tokens: int) -> int:
        """Bytes of the cached inputs of convolutions, which only Engram models have."""
        values = tokens * self.model.dim * len(self.model.conv_layers)
        return values * (FLOAT if self.kv == "fp32" else FLOAT // 2)

    def with_kv(self, kv: KvChoice) -> Footprint:
        """Return the footprint with keys and values of this type; "auto": the engine's default.

        Raises InputError for a type that the backbone does not support.
        """
        if kv == "auto":
            kv = self.usual_kv
        if reason := self.obstacle(kv):
            raise InputError(f"kv is {kv!r}: {reason}")
        return replace(self, kv=kv)


def footprint_of(manifest: Manifest) -> Footprint:
    tables = manifest.table_format
    match manifest.format:
        case GgufFormat() as gguf:
            return gguf_footprint(manifest.model, gguf, tables)
        case backbone:
            prefill = manifest.files[PREFILL_DATA].nbytes if manifest.has_prefill else 0
            data = manifest.files[BACKBONE_DATA].nbytes
            found = onnx_footprint(manifest.model, backbone, tables, data, prefill)
            return replace(found, assistant_nbytes=_assistant_nbytes(manifest))


def _assistant_nbytes(manifest: Manifest) -> int:
    """Return the memory that the bundle's draft model takes, in bytes; 0 without a draft model."""
    if (found := manifest.assistant) is None:
        return 0
    from stem_edge.graph.special.assistant import scored  # for such bundles alone

    model, nbytes = found.model, manifest.files[ASSISTANT_DATA].nbytes
    if found.clusters:
        nbytes -= _embedding_nbytes(model, found.format)
    return max(0, nbytes) + FLOAT * scored(found) * (model.dim if found.clusters else 1)


def onnx_footprint(
    model: ModelConfig,
    backbone: BackboneFormat,
    tables: TableFormat | None,
    data: int,
    prefill: int,
) -> Footprint:
    """Return a footprint for onnxruntime. data, prefill: bytes of decode and prefill weights."""
    # Of an embedding of its own, a step reads only a row.
    step = data if backbone.tied else max(0, data - _embedding_nbytes(model, backbone))
    slot = array_slot_nbytes(tables.tables) if tables else 0
    return Footprint(
        model=model,
        backbone=backbone,
        table_format=tables,
        backbone_nbytes=data,
        step_nbytes=step,
        prefill_nbytes=prefill,
        slot_nbytes=slot + SLOT_BOOKKEEPING_NBYTES,
        usual_kv="fp32",
        kv="fp32",
        token_nbytes=lambda kv, layer: CACHES[kv].nbytes(layer),
        obstacle=partial(kv_obstacle, backbone),
    )


def gguf_footprint(model: ModelConfig, gguf: GgufFormat, tables: TableFormat | None) -> Footprint:
    """Return the footprint of a bundle for ggml, without the header of the GGUF file."""
    from stem_edge.ggml import gguf_schema  # for such bundles alone

    sizes = gguf_schema.backbone_nbytes(model, gguf.weights)
    slot = gguf_schema.slot_nbytes(tables.tables) if tables else 0
    total, kv = sum(sizes.values()), gguf_schema.usual_kv(gguf.weights)
    return Footprint(
        model=model,
        backbone=gguf,
        table_format=tables,
        backbone_nbytes=total,
        step_nbytes=total - (0 if model.tied_head else sizes["embedding"]),
        prefill_nbytes=0,
        slot_nbytes=slot + SLOT_BOOKKEEPING_NBYTES,
        usual_kv=kv,
        kv=kv,
        token_nbytes=gguf_schema.kv_nbytes,
        obstacle=partial(gguf_schema.kv_obstacle, model),
    )


def array_slot_nbytes(layout: RecordLayout) -> int:
    """Bytes of a row cache slot on onnxruntime: codes, float32 scales, and zero points."""
    zero_points = -(-layout.part_groups() * layout.bits // 8) if layout.quantized else 0
    return len(layout.layers) * (layout.codes_nbytes + layout.groups * FLOAT) + zero_points


def _embedding_nbytes(model: ModelConfig, backbone: BackboneFormat) -> int:
    """Bytes of the stored embedding: codes and, if it is quantized, scales and zero points."""
    rows, width, bits = model.vocab_size, model.dim, backbone.bits("embedding")
    nbytes = rows * width * bits // 8
    if bits == 32:
        return nbytes
    groups = width // (fitting_block(width, backbone.block_size) or width)
    return nbytes + rows * (groups * FLOAT + -(-groups * bits // 8))
