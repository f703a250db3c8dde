"""The table writer: the same bytes whatever the threads and pieces, many shards, all of them right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import stem_edge
from stem_edge.export import tables as module
from stem_edge.export.report import ErrorMeter, errors
from stem_edge.reference import ArrayMatrix
from stem_edge.rows import RowType, make_layout

V, LAYERS, D_FF = 101, (1, 4), 64
TABLES = {
    layer: np.random.default_rng(layer).normal(size=(V, D_FF)).astype(np.float32)
    for layer in LAYERS
}


def write(root: Path, row_type: RowType, threads: int) -> ErrorMeter:
    meter, done = ErrorMeter(), list[int]()
    grid = module.make_grid(root, make_layout(V, LAYERS, D_FF, row_type, 32))
    sources = {layer: ArrayMatrix(table) for layer, table in TABLES.items()}
    entries = module.write_metadata(grid)
    for shard in range(grid.shards):
        entries |= module.write_shard(grid, shard, sources, meter, threads, done.append)
    assert {path for path in root.rglob("*") if path.is_file()} == set(entries)
    assert sum(done) == V * D_FF * len(LAYERS) * 4
    return meter


@pytest.mark.parametrize("row_type", ["fp32", "fp16", "int8", "int4"])
@pytest.mark.parametrize("shard_nbytes", [1 << 27, 10_000, 1])
def test_rows_come_back_from_any_number_of_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row_type: RowType, shard_nbytes: int
) -> None:
    monkeypatch.setattr(module, "SHARD_NBYTES", shard_nbytes)
    monkeypatch.setattr(module, "PIECE_NBYTES", 5000)
    meter = write(tmp_path / "t.zarr", row_type, 3)
    worst = errors([meter.totals()])["tables"].worst
    with stem_edge.open_tables(tmp_path / "t.zarr") as tables:
        for layer, table in TABLES.items():
            error = np.abs(tables[:, layer] - table).max() / np.abs(table).max(axis=1).min()
            assert error <= max(2 * worst, 1e-3 if row_type == "fp16" else 0)


def test_threads_and_pieces_do_not_change_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = []
    for number, (threads, piece) in enumerate([(1, 1 << 24), (4, 3000), (2, 1)]):
        monkeypatch.setattr(module, "PIECE_NBYTES", piece)
        reports.append(errors([write(tmp_path / str(number), "int8", threads).totals()])["tables"])
    shards = [(tmp_path / str(n) / "records/c/0/0").read_bytes() for n in range(3)]
    assert shards[0] == shards[1] == shards[2]
    assert len(set(reports)) == 1
