"""A small manifest with all fields, and the bundle that it describes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from configs import config
from stores import write_store

from stem_edge.bundle.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    TABLES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    FileEntry,
    Manifest,
    QualityReport,
    encode_manifest,
)
from stem_edge.graph.decode import decoding
from stem_edge.graph.formats import BACKBONE_DATA, BACKBONE_GRAPH, BackboneFormat
from stem_edge.tables.rows import RecordLayout

LAYOUT = RecordLayout(records=10, layers=(1,), parts=((16,),), row_type="int8", group_size=16)
GROUP, ARRAY = f"{TABLES}/zarr.json", f"{TABLES}/records/zarr.json"
SHARDS = [f"{TABLES}/records/c/0/0", f"{TABLES}/records/c/1/0"]
NAMES = sorted([BACKBONE_GRAPH, BACKBONE_DATA, TOKENIZER, TOKENIZER_CONFIG, GROUP, ARRAY, *SHARDS])
REPORT = QualityReport(
    backbone_nbytes=8,
    tables_nbytes=200,
    probe_tokens=(1, 2, 3),
    divergence=0.5,
)


def file_entry(data: bytes) -> FileEntry:
    """Size and checksum of a file with this content."""
    return FileEntry(len(data), hashlib.sha256(data).hexdigest())


def make_manifest(files: dict[str, FileEntry]) -> Manifest:
    return Manifest(
        format_version=FORMAT_VERSION,
        model=config(dim=16, d_ff=16, bos_id=1, eos_ids=(2,)),
        backbone=BackboneFormat(weights="int4", head="int8", block_size=32),
        stored=LAYOUT,
        files=files,
        report=REPORT,
    )


PLANNED = make_manifest({name: FileEntry(1, "0" * 64) for name in NAMES})
WEIGHTS_NBYTES = decoding(PLANNED.model, LAYOUT, PLANNED.backbone).plan.nbytes  # type: ignore[arg-type]


def make_bundle(path: Path) -> Path:
    """Write a bundle of zeros that opens, but does not run."""
    path.mkdir()
    (path / BACKBONE_GRAPH).write_bytes(b"backbone")
    (path / BACKBONE_DATA).write_bytes(bytes(WEIGHTS_NBYTES))
    (path / TOKENIZER).write_bytes(b"{}")
    (path / TOKENIZER_CONFIG).write_bytes(b'{"a": 1}')
    write_store(path / TABLES, LAYOUT, np.zeros((10, LAYOUT.record_nbytes), np.uint8), 6)
    entries = {name: file_entry((path / name).read_bytes()) for name in NAMES}
    (path / MANIFEST).write_bytes(encode_manifest(make_manifest(entries)))
    return path
