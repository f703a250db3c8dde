"""Bundles that are only a manifest, for memory plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from configs import config
from manifests import REPORT

from stem_edge.bundle.manifest import (
    FORMAT_VERSION,
    TABLES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    FileEntry,
    Manifest,
)
from stem_edge.bundle.opening import Bundle
from stem_edge.graph.formats import BACKBONE_DATA, BACKBONE_GRAPH, BackboneFormat
from stem_edge.tables.packing import make_layout

CONTEXT = 512
DATA = BACKBONE_DATA


def make_bundle(vocab_size: int = 20_000, layers: int = 4, **changes: Any) -> Bundle:
    """Describe a model with int4 matrices and int8 rows; `changes` are fields of the manifest."""
    sizes = {"dim": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "d_ff": 256}
    sizes |= {"vocab_size": vocab_size, "n_layers": layers, "max_context": 4096}
    model = config(stem_layers=tuple(range(1, layers)), **sizes)
    embedding = vocab_size * (64 // 2 + 2 * 4 + 1)  # int4, two blocks of 32 with a zero point byte
    names = [BACKBONE_GRAPH, TOKENIZER, TOKENIZER_CONFIG]
    names += [f"{TABLES}/zarr.json", f"{TABLES}/records/zarr.json"]
    files = {name: FileEntry(100, "0" * 64) for name in names}
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        model=model,
        backbone=BackboneFormat(weights="int4", head="int4", block_size=32),
        stored=make_layout(vocab_size, model.stem_layers, model.row_parts(), "int8", 32),
        files=files | {DATA: FileEntry(embedding + 1_000_000, "0" * 64)},
        reports={"onnxruntime": REPORT},
    )
    return Bundle(Path("model"), msgspec.structs.replace(manifest, **changes))


BUNDLE = make_bundle()
