"""Write the seeds in this project's own formats: `python tools/fuzz.py --write-seeds`.

All other files in tests/data/fuzz are written by hand or are findings, and stay as they are.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
from make_checkpoint import Shape, write_checkpoint

import stem_edge
from fuzzing.mutants import join
from fuzzing.running import SEEDS
from stem_edge.edit_files.file import Edit, NewRows, Replacement, encode_edit
from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.shards import ShardGrid, array_metadata
from stem_edge.tables.store import TableFormat, group_metadata
from stem_edge.tables.token_index import encode_index, index_metadata
from stem_edge.tables.zarr_json import encode_metadata

Seed: TypeAlias = tuple[str, str, bytes]  # target, file name, content


def write_seeds() -> None:
    """Write seeds made by small exports and by the writer of each format."""
    with tempfile.TemporaryDirectory() as folder:
        seeds = [*exported(Path(folder)), *stores(), *edits()]
    for target, name, data in seeds:
        (SEEDS / target).mkdir(parents=True, exist_ok=True)
        (SEEDS / target / name).write_bytes(data)
        print(f"{target}/{name}: {len(data)} bytes")


def exported(folder: Path) -> Iterator[Seed]:
    """Yield files of a small checkpoint and of its exports for both engines."""
    shape = Shape(
        dim=32, n_layers=2, n_heads=1, n_kv_heads=1, d_ff=32, stem_layers=(1,), tied_head=True
    )
    checkpoint = write_checkpoint(folder / "checkpoint", shape)
    stem_edge.export_bundle(checkpoint, folder / "onnx", type="int4", rows="int4")
    stem_edge.export_bundle(checkpoint, folder / "gguf", engine="ggml", type="q4_0", rows="fp32")
    for name in ("onnx", "gguf"):
        yield "manifest", f"{name}.json", (folder / name / "manifest.json").read_bytes()


def stores() -> Iterator[Seed]:
    """Yield a table store with every record alike, and one with rare records and an index."""
    layout = RecordLayout(records=5, layers=(0, 2), parts=((16,),), row_type="int8", group_size=16)
    rare = RecordLayout(records=2, layers=(0, 2), parts=((16,),), row_type="int4", group_size=16)
    plain = TableFormat(tokens=5, stored=layout)
    mixed = TableFormat(tokens=4, stored=layout, rare_tables=rare, indexed=True)
    for name, format in (("plain", plain), ("mixed", mixed)):
        files = {"zarr.json": encode_metadata(group_metadata(format))}
        for folder, array_layout in format.arrays().items():
            files |= _array(folder, array_layout)
        if format.indexed:
            files["index/zarr.json"] = encode_metadata(index_metadata(format.tokens))
            files["index/c/0"] = encode_index(np.array([4, 0, 3, 1], np.int32))
        yield "store", f"{name}.store", join(files)
        for path, data in files.items():
            if path.endswith(".json"):
                yield "zarr", f"{name}-{path.replace('/', '-')}", data


def _array(folder: str, layout: RecordLayout) -> dict[str, bytes]:
    grid = ShardGrid(root=Path(folder), layout=layout, records_per_shard=2)
    files = {f"{folder}/zarr.json": encode_metadata(array_metadata(grid))}
    records = np.full((layout.records, layout.record_nbytes), 1, np.uint8)
    for shard in range(grid.shards):
        piece = records[: grid.shard_records(shard)]
        files[f"{folder}/c/{shard}/0"] = grid.append_checksums(piece) + grid.index_bytes(shard)
    return files


def edits() -> Iterator[Seed]:
    """Yield an edit of each kind."""
    made_for = "0f" * 32
    spain = Replacement(source="Spain", target="Germany")
    subset = Replacement(source="a", target="b", scheme="subset", subset=(0, 2), pad=3)
    rows = NewRows(rows={7: (b"\1" * 8, b"\2" * 8), 9: (b"", b"\3")})
    changes = {
        "replacement": Edit(made_for=made_for, layers=(1, 2), change=spain),
        "subset": Edit(made_for=made_for, layers=(1,), change=subset, scope="everywhere"),
        "rows": Edit(made_for=made_for, layers=(1, 2), change=rows, scope="everywhere"),
    }
    for name, edit in changes.items():
        yield "edit", f"{name}.edit", encode_edit(edit)
