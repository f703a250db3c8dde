"""A whole export: options, determinism, what stays when it fails."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_checkpoint import Shape, write_checkpoint

import stem_edge
from stem_edge import CheckpointError, ExportError
from stem_edge.bundle import open_bundle, verify
from stem_edge.cli import main
from stem_edge.export.lingua import read_checkpoint
from stem_edge.reference import forward, whole


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("backbone", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("tables", ["fp32", "fp16", "int8", "int4"])
def test_every_combination_stays_near_the_checkpoint(
    tiny_checkpoint: Path, tmp_path: Path, backbone: Any, tables: Any
) -> None:
    bundle = stem_edge.export_bundle(
        tiny_checkpoint, tmp_path / "out", backbone=backbone, tables=tables
    )
    # Random weights forgive nothing; these bounds are two to three times what was measured.
    bound = max(
        {"fp32": 1e-4, "int8": 0.3, "int4": 3}[backbone],
        {"fp16": 1e-2, "int8": 0.2, "int4": 2}.get(tables, 0),
    )
    assert 0 < bundle.manifest.report.worst_logit_difference < bound
    assert set(verify(bundle.path).values()) == {"ok"}


def test_report_agrees_with_the_reference_model(tiny_bundle: Path, tiny_checkpoint: Path) -> None:
    report = open_bundle(tiny_bundle).manifest.report
    checkpoint = read_checkpoint(tiny_checkpoint)
    ids = list(report.probe_tokens)
    expected = forward(checkpoint.config, checkpoint.backbone, checkpoint.tables, ids)
    with stem_edge.load(tiny_bundle) as model:
        found = np.abs(model.logits(ids) - expected).max()
    assert report.worst_logit_difference == pytest.approx(found, rel=0.01)


def test_exporting_twice_gives_identical_bytes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for name, threads in (("a", 1), ("b", 3)):
        stem_edge.export_bundle(tiny_checkpoint, tmp_path / name, threads=threads)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_both_layouts_and_the_prefix_give_the_same_bundle(tmp_path: Path) -> None:
    for name, options in {
        "training": {"layout": "training", "parts": 4},
        "consolidated": {"layout": "consolidated"},
        "prefixed": {"layout": "training", "prefix": "lm_transformer."},
    }.items():
        write_checkpoint(tmp_path / name, Shape(), **options)  # type: ignore[arg-type]
        stem_edge.export_bundle(tmp_path / name, tmp_path / f"{name}.out", backbone="fp32")
    expected = contents(tmp_path / "training.out")
    for name in ("consolidated", "prefixed"):
        found = contents(tmp_path / f"{name}.out")
        assert {k: v for k, v in found.items() if k != "manifest.json"} == {
            k: v for k, v in expected.items() if k != "manifest.json"
        }


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_every_float_type_of_a_checkpoint_is_read_exactly(tmp_path: Path, dtype: str) -> None:
    path = write_checkpoint(tmp_path / "checkpoint", Shape(), dtype=dtype, layout="consolidated")
    table = torch.load(path / "consolidated_stem.pth", weights_only=True)
    found = whole(read_checkpoint(path).tables[2])
    assert found.dtype == np.float32
    assert np.array_equal(found, table["stem_embeddings.1.weight"].float().numpy())


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "checkpoint", Shape(tied_head=True))
    bundle = stem_edge.export_bundle(path, tmp_path / "out", backbone="fp32", tables="fp32")
    assert bundle.manifest.model.tied_head
    assert bundle.manifest.report.worst_logit_difference < 1e-4


def test_an_existing_bundle_is_refused_and_replaced_with_force(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    stem_edge.export_bundle(tiny_checkpoint, out, tables="int4")
    before = contents(out)
    with pytest.raises(ExportError, match=r"exists already.*--force"):
        stem_edge.export_bundle(tiny_checkpoint, out)
    assert contents(out) == before
    stem_edge.export_bundle(tiny_checkpoint, out, tables="int8", force=True)
    assert open_bundle(out).manifest.tables.row_type == "int8"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_force_never_replaces_what_is_not_a_bundle(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ExportError, match="not a bundle"):
        stem_edge.export_bundle(tiny_checkpoint, tmp_path, force=True)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("failing_write", [0, 1, 2, 3, 5, 8])
def test_a_full_disk_leaves_the_old_bundle_and_nothing_else(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_write: int
) -> None:
    out = tmp_path / "out"
    stem_edge.export_bundle(tiny_checkpoint, out, tables="int4")
    before, calls = contents(out), iter(range(1000))
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if next(calls) == failing_write:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(ExportError, match=r"disk is full.*nothing was changed"):
        stem_edge.export_bundle(tiny_checkpoint, out, force=True)
    assert contents(out) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_an_interrupt_leaves_nothing(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("stem_edge.export.exporter.write_tables", interrupt)
    with pytest.raises(KeyboardInterrupt):
        stem_edge.export_bundle(tiny_checkpoint, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_refused_with_its_place(tmp_path: Path, bad: float) -> None:
    path = write_checkpoint(tmp_path / "checkpoint", Shape(), layout="consolidated")
    tables = torch.load(path / "consolidated_stem.pth", weights_only=True)
    tables["stem_embeddings.1.weight"][123, 7] = bad
    torch.save(tables, path / "consolidated_stem.pth")
    with pytest.raises(CheckpointError, match=r"table of layer 2: 1 NaN or infinite.*row 123"):
        stem_edge.export_bundle(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backbone": "int3"}, "backbone is 'int3'; expected one of fp32, int8, int4"),
        ({"tables": "q4"}, "tables is 'q4'; expected one of fp32, fp16, int8, int4"),
        ({"block_size": 48}, "block_size is 48"),
        ({"group_size": 7}, "group_size is 7"),
        ({"threads": 0}, "threads is 0"),
    ],
)
def test_bad_options_are_refused(
    tiny_checkpoint: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ExportError, match=message):
        stem_edge.export_bundle(tiny_checkpoint, tmp_path / "out", **options)


def test_a_width_that_no_block_divides_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "checkpoint", Shape(d_ff=72))
    with pytest.raises(ExportError, match="int8 tables do not fit"):
        stem_edge.export_bundle(path, tmp_path / "out")
    with pytest.raises(ExportError, match=r"72 is not a multiple of 16.*fp32"):
        stem_edge.export_bundle(path, tmp_path / "out", tables="fp16")
    stem_edge.export_bundle(path, tmp_path / "out", backbone="fp32", tables="fp16")


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "checkpoint", Shape(vocab_size=250))
    with pytest.raises(CheckpointError, match="the tokenizer has 258 ids, the model 250"):
        stem_edge.export_bundle(path, tmp_path / "out")


def test_special_tokens_reach_the_manifest(tiny_bundle: Path) -> None:
    model = json.loads((tiny_bundle / "manifest.json").read_text())["model"]
    assert (model["bos_id"], model["eos_ids"]) == (256, [257])


def test_a_sliding_window_is_noted_and_ignored_as_the_trainer_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_checkpoint(tmp_path / "checkpoint", Shape())
    params = json.loads((path / "params.json").read_text())
    params["model"]["sliding_window"] = 4
    (path / "params.json").write_text(json.dumps(params))
    bundle = stem_edge.export_bundle(path, tmp_path / "out", backbone="fp32", tables="fp32")
    assert "sliding_window 4 is ignored" in bundle.manifest.report.notes[0]
    assert bundle.manifest.report.worst_logit_difference < 1e-4
    assert main(["inspect", str(bundle.path)]) == 0
    assert "sliding_window 4 is ignored" in capsys.readouterr().out
