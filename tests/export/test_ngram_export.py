"""Tables of n-grams: exported alone, opened, and gathered for a text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import zarr
from ngram_folders import MODELS, deepseek, longcat, qwen
from range_server import serving

import stem_edge
from stem_edge.commands.main import main
from stem_edge.errors import BundleError, CheckpointError, InputError, RowReadError
from stem_edge.export.ngram_export import export_rows

TEXT = np.random.default_rng(4).integers(0, 12, 70)


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    model = MODELS[name](tmp_path / "model")
    export_rows(model.folder, tmp_path / "rows", threads=2)
    with stem_edge.open_rows(tmp_path / "rows") as rows:
        assert len(rows.tables) == len(model.values)
        for number, (table, values) in enumerate(zip(rows.tables, model.values, strict=True)):
            keys = rows.keys(TEXT, table=number)
            expected = values.numpy()[keys].reshape(len(TEXT), -1)
            assert np.array_equal(rows.rows(TEXT, table=table.name), expected)
            rows.prefetch(TEXT[30:], TEXT[:30])
            pieces = [
                rows.rows(TEXT[a:b], TEXT[:a], number) for a, b in [(0, 1), (1, 30), (30, 70)]
            ]
            assert np.array_equal(np.concatenate(pieces), expected)
        assert rows.rows([], TEXT).shape == (0, rows.tables[0].width * rows.tables[0].hash.heads)
        assert rows.counters().bytes_read > 0


def test_rows_of_another_machine(tmp_path: Path) -> None:
    out = export_rows(deepseek(tmp_path / "model").folder, tmp_path / "rows")
    here = tmp_path / "descriptions"
    shutil.copytree(out, here)
    for table in here.glob("layer.*"):
        shutil.rmtree(table / "c")
    with serving(out) as server, stem_edge.open_rows(out) as expected:
        with stem_edge.open_rows(here, url=server.url) as rows:
            for number in range(2):
                assert np.array_equal(
                    rows.rows(TEXT, table=number), expected.rows(TEXT, table=number)
                )
            assert rows.counters().network_reads == len(server.requests)
        server.fault = lambda number, path: "wrong"
        with stem_edge.open_rows(here, url=server.url) as rows, pytest.raises(RowReadError):
            rows.rows(TEXT)


def test_any_zarr_library_opens_them(tmp_path: Path) -> None:
    model = longcat(tmp_path / "model")
    out = export_rows(model.folder, tmp_path / "rows")
    group = zarr.open_group(out, mode="r")
    with stem_edge.open_rows(out) as rows:
        (table,) = rows.tables
    pages = np.asarray(group[table.name])
    used = pages[:, : table.rows_per_page * table.row_nbytes]
    stored = used.reshape(-1, table.row_nbytes)[: table.hash.rows]
    assert np.array_equal(table.values(np.ascontiguousarray(stored)), model.values[0].numpy())


def test_a_damaged_page_is_an_error(tmp_path: Path) -> None:
    out = export_rows(qwen(tmp_path / "model").folder, tmp_path / "rows")
    with stem_edge.open_rows(out) as rows:
        (table,) = rows.tables
    shard = out / table.name / "c" / "0" / "0"
    data = bytearray(shard.read_bytes())
    data[table.page_nbytes * 2] ^= 1
    shard.write_bytes(data)
    with stem_edge.open_rows(out) as rows, pytest.raises(RowReadError, match="crc32c"):
        rows.rows(TEXT)
    shard.write_bytes(data[:-1])
    with pytest.raises(BundleError, match="bytes"):
        stem_edge.open_rows(out)


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="tables-only"):
        stem_edge.open_rows(tmp_path)
    out = export_rows(qwen(tmp_path / "model").folder, tmp_path / "rows")
    with stem_edge.open_rows(out) as rows:
        for table in ("layer.2", 1, -1):
            with pytest.raises(InputError, match="no table"):
                rows.rows([1], table=table)
        with pytest.raises(InputError, match="ids"):
            rows.rows([97])
    group = json.loads((out / "zarr.json").read_text())
    group["attributes"]["stem_edge_ngrams"]["tables"][0]["hash"]["sizes"][0] += 100
    (out / "zarr.json").write_text(json.dumps(group))
    with pytest.raises(BundleError, match="not a table store"):
        stem_edge.open_rows(out)


def test_checkpoints_that_are_not_whole(tmp_path: Path) -> None:
    folder = longcat(tmp_path / "model").folder
    (folder / "model-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot open"):
        export_rows(folder, tmp_path / "rows")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"ngram_exclude_sp_token": True}))
    with pytest.raises(CheckpointError, match="ngram_exclude_sp_token"):
        export_rows(folder, tmp_path / "rows")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="no tables of n-grams"):
        export_rows(folder, tmp_path / "rows")
    assert not (tmp_path / "rows").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = str(qwen(tmp_path / "model").folder), str(tmp_path / "rows")
    assert main(["export", folder, out, "--tables-only", "--rows", "int4"]) == 0
    assert f"{out}: written; gather its rows" in capsys.readouterr().out
    for more in (["--type", "int8"], ["--rows", "fp16"]):
        assert main(["export", folder, out + "2", "--tables-only", *more]) != 0
    said = capsys.readouterr().err
    assert "--type is for bundles" in said and "'fp16'; expected keep" in said
