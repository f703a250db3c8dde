"""A whole export: options, determinism, what stays when it fails."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from exports import contents
from make_checkpoint import Shape, write_checkpoint
from tiers import slow_but
from whole_model import forward

import stem_edge
from stem_edge.bundle.checksums import verify
from stem_edge.bundle.opening import open_bundle
from stem_edge.commands.main import main
from stem_edge.errors import CheckpointError, ExportError
from stem_edge.export import exporter
from stem_edge.export.checkpoints.lingua import read_checkpoint
from stem_edge.export.quantization import streams
from stem_edge.numerics.distributions import divergence


@pytest.mark.parametrize(
    ("backbone", "tables"),
    slow_but(
        [("fp32", "fp16"), ("int8", "int4"), ("int4", "int4")],
        product(["fp32", "int8", "int4"], ["fp32", "fp16", "int8", "int4"]),
    ),
)
def test_every_combination_stays_near_the_checkpoint(
    tiny_checkpoint: Path, tmp_path: Path, backbone: Any, tables: Any
) -> None:
    bundle = stem_edge.export_bundle(tiny_checkpoint, tmp_path / "out", type=backbone, rows=tables)
    # Errors are large with random weights; the bounds are about twice the measured ones.
    bound = {"fp32": 1e-7, "int8": 6e-4, "int4": 0.04}[backbone]
    bound += {"int8": 2e-5, "int4": 3e-3}.get(tables, 0)
    assert 0 < bundle.manifest.report.divergence < bound
    assert set(verify(bundle.path).values()) == {"ok"}


def test_report_agrees_with_the_reference_model(tiny_bundle: Path, tiny_checkpoint: Path) -> None:
    report = open_bundle(tiny_bundle).manifest.report
    checkpoint = read_checkpoint(tiny_checkpoint)
    ids = list(report.probe_tokens)
    expected = forward(checkpoint.config, checkpoint.backbone, checkpoint.tables, ids)
    with stem_edge.load(tiny_bundle) as model:
        found = divergence(expected, model.logits(ids)).mean()
    assert report.divergence == pytest.approx(found, rel=0.01)


def test_exporting_twice_gives_identical_bytes(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the number of threads matters nor the size of the pieces that they work on."""
    stem_edge.export_bundle(tiny_checkpoint, tmp_path / "once", threads=1)
    monkeypatch.setattr(streams, "PIECE_VALUES", 4096)
    stem_edge.export_bundle(tiny_checkpoint, tmp_path / "again", threads=3)
    assert contents(tmp_path / "again") == contents(tmp_path / "once")


def test_both_layouts_and_the_prefix_give_the_same_bundle(tmp_path: Path) -> None:
    for name, options in {
        "training": {"layout": "training", "parts": 4},
        "consolidated": {"layout": "consolidated"},
        "prefixed": {"layout": "training", "prefix": "lm_transformer."},
    }.items():
        write_checkpoint(tmp_path / name, Shape(), **options)  # type: ignore[arg-type]
        stem_edge.export_bundle(tmp_path / name, tmp_path / f"{name}.out", type="fp32")
    expected = contents(tmp_path / "training.out")
    for name in ("consolidated", "prefixed"):
        found = contents(tmp_path / f"{name}.out")
        assert {k: v for k, v in found.items() if k != "manifest.json"} == {
            k: v for k, v in expected.items() if k != "manifest.json"
        }


def test_an_existing_bundle_is_refused_and_replaced_with_force(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    stem_edge.export_bundle(tiny_checkpoint, out, type="fp32", rows="int4")
    before = contents(out)
    with pytest.raises(ExportError, match=r"already exists.*--force"):
        stem_edge.export_bundle(tiny_checkpoint, out)
    assert contents(out) == before
    stem_edge.export_bundle(tiny_checkpoint, out, type="fp32", rows="int8", force=True)
    tables = open_bundle(out).manifest.tables
    assert tables is not None
    assert tables.row_type == "int8"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left"), ValueError])
def test_an_export_that_ends_early_leaves_nothing(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    def fail(*_: object) -> None:
        assert (tmp_path / ".stem-edge-out" / "tables.zarr").is_dir()
        raise error

    monkeypatch.setattr(exporter, "accept", fail)
    with pytest.raises((KeyboardInterrupt, ValueError, ExportError)):
        stem_edge.export_bundle(tiny_checkpoint, tmp_path / "out", type="fp32")
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "checkpoint", Shape(vocab_size=250))
    with pytest.raises(CheckpointError, match="the tokenizer has 258 ids, but the model only 250"):
        stem_edge.export_bundle(path, tmp_path / "out")


def test_a_divergence_above_the_limit_leaves_the_old_bundle(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    stem_edge.export_bundle(tiny_checkpoint, out, type="fp32", rows="fp32", max_kl=1e-6)
    before = contents(out)
    arguments = [str(tiny_checkpoint), str(out), "--rows", "int4", "--force", "--max-kl", "1e-6"]
    assert main(["export", *arguments]) == 3
    assert contents(out) == before
    message = capsys.readouterr().err.splitlines()[-1]
    assert f"{tiny_checkpoint}: the exported model's mean divergence" in message
    assert (
        "--max-kl allows 1e-06; take more bits (--type near-lossless or fp32, --rows int8)"
        in message
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    with pytest.raises(ExportError, match="nothing was exported"):
        stem_edge.export_bundle(tiny_checkpoint, tmp_path / "new", type="int8", max_kl=1e-6)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_a_sliding_window_is_noted_and_ignored_as_the_trainer_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_checkpoint(tmp_path / "checkpoint", Shape())
    params = json.loads((path / "params.json").read_text())
    params["model"]["sliding_window"] = 4
    (path / "params.json").write_text(json.dumps(params))
    bundle = stem_edge.export_bundle(path, tmp_path / "out", type="fp32", rows="fp32")
    assert "sliding_window 4 is ignored" in bundle.manifest.report.notes[0]
    assert bundle.manifest.report.divergence < 1e-7
    assert main(["inspect", str(bundle.path)]) == 0
    assert "sliding_window 4 is ignored" in capsys.readouterr().out
