"""A bundle of the 1B shape that is a manifest only, for memory plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from stem_edge.bundle.manifest import (
    BACKBONE_GRAPH,
    FORMAT_VERSION,
    TABLES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    Bundle,
    FileEntry,
    Manifest,
)
from stem_edge.bundle.quality_report import QualityReport
from stem_edge.config import ModelConfig
from stem_edge.graph.decode import BACKBONE_DATA
from stem_edge.graph.formats import BackboneFormat
from stem_edge.tables.rows import make_layout

CONTEXT = 512
DATA = BACKBONE_DATA


def make_bundle(vocab_size: int = 20_000, layers: int = 4, **changes: Any) -> Bundle:
    config = ModelConfig(
        vocab_size=vocab_size,
        dim=64,
        n_layers=layers,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        d_ff=256,
        stem_layers=tuple(range(1, layers)),
        norm_eps=1e-5,
        rope_theta=10_000.0,
        max_context=4096,
    )
    embedding = vocab_size * (64 // 2 + 2 * 4 + 1)  # int4, two blocks of 32 with a zero point byte
    names = [BACKBONE_GRAPH, TOKENIZER, TOKENIZER_CONFIG]
    names += [f"{TABLES}/zarr.json", f"{TABLES}/records/zarr.json"]
    files = {name: FileEntry(100, "0" * 64) for name in names}
    report = QualityReport(
        checkpoint_nbytes=0,
        backbone_nbytes=0,
        tables_nbytes=0,
        errors={},
        probe_tokens=(),
        worst_logit_difference=0.0,
        greatest_logit=0.0,
        divergence=0.0,
    )
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        model=config,
        backbone=BackboneFormat(weights="int4", head="int4", block_size=32),
        tables=make_layout(vocab_size, config.stem_layers, config.row_parts(), "int8", 32),
        files=files | {DATA: FileEntry(embedding + 1_000_000, "0" * 64)},
        reports={"onnxruntime": report},
    )
    return Bundle(Path("model"), msgspec.structs.replace(manifest, **changes))


BUNDLE = make_bundle()
