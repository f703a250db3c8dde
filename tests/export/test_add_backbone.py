"""Adding a backbone to a bundle: which files stay, which are replaced, and refusals."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exports import Steps, contents
from installed import needs_ggml
from make_checkpoint import Shape, write_checkpoint
from tiers import slow_but

import stem_edge
from stem_edge.bundle.manifest import GGUF, MANIFEST, TOKEN_COUNTS
from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.errors import ExportError
from stem_edge.export import add_backbone as adding

pytest.importorskip("gguf")
pytestmark = needs_ggml

SHARD = "tables.zarr/records/c/0/0"


def export(checkpoint: Path, out: Path, **options: Any) -> Bundle:
    return stem_edge.export_bundle(checkpoint, out, **options)


def add(checkpoint: Path, out: Path, **options: Any) -> Bundle:
    return export(checkpoint, out, **({"engine": "gguf", "add": True} | options))


@pytest.fixture(scope="module")
def bundles(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A bundle for each engine, with the same tables. Do not change them."""
    folder = tmp_path_factory.mktemp("bundles")
    return {
        engine: export(tiny_checkpoint, folder / engine, engine=engine).path
        for engine in ("onnx", "gguf")
    }


@pytest.fixture
def out(bundles: dict[str, Path], tmp_path: Path) -> Path:
    """A bundle for onnxruntime of one's own."""
    return Path(shutil.copytree(bundles["onnx"], tmp_path / "out"))


@pytest.mark.parametrize(
    ("first", "second"),
    [pytest.param("onnx", "gguf", marks=pytest.mark.slow), ("gguf", "onnx")],
)
def test_both_backbones_are_those_of_whole_exports(
    tiny_checkpoint: Path, bundles: dict[str, Path], tmp_path: Path, first: str, second: str
) -> None:
    out = Path(shutil.copytree(bundles[first], tmp_path / "out"))
    shard = out / SHARD
    place = shard.stat().st_ino
    manifest = add(tiny_checkpoint, out, engine=second).manifest
    assert manifest.engines == ("onnxruntime", "ggml")
    expected = contents(bundles["onnx"]) | contents(bundles["gguf"])
    found = contents(out)
    del found[MANIFEST], expected[MANIFEST]
    assert found == expected
    apart = {engine: open_bundle(path).manifest for engine, path in bundles.items()}
    assert manifest.reports == apart["onnx"].reports | apart["gguf"].reports
    assert (manifest.backbone, manifest.gguf) == (apart["onnx"].backbone, apart["gguf"].gguf)
    assert set(stem_edge.verify(out).values()) == {"ok"}
    assert shard.stat().st_ino == place  # the same file, so a link instead of a copy
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_backbone_is_replaced_and_the_other_stays(tiny_checkpoint: Path, out: Path) -> None:
    add(tiny_checkpoint, out)
    before = contents(out)
    manifest = add(tiny_checkpoint, out, backbone="f16").manifest
    after = contents(out)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {GGUF, MANIFEST}
    assert manifest.gguf is not None
    assert manifest.gguf.weights == "f16"
    add(tiny_checkpoint, out, engine="onnx", backbone="fp32")  # because it has no prefill graph
    assert before.keys() - contents(out).keys() == {"prefill.data"}
    assert set(stem_edge.verify(out).values()) == {"ok"}


def test_files_are_copied_where_links_fail(
    tiny_checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*paths: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    linked = Path(shutil.copytree(out, out.with_name("linked")))
    add(tiny_checkpoint, linked)
    monkeypatch.setattr(os, "link", link)
    add(tiny_checkpoint, out)
    assert contents(out) == contents(linked)
    shard = out / SHARD
    data = shard.read_bytes()
    shard.write_bytes(data[:1000] + bytes([data[1000] ^ 1]) + data[1001:])
    before = contents(out)
    with pytest.raises(ExportError, match=r"sha256 is .*, expected .*; the file is damaged"):
        add(tiny_checkpoint, out)
    assert contents(out) == before


def test_counts_of_the_bundle_stay(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for name, text in (("a", "one two"), ("b", "three three")):
        (tmp_path / name).write_text(text * 20)
    out = tmp_path / "out"
    export(tiny_checkpoint, out, calibration=tmp_path / "a")
    before = (out / TOKEN_COUNTS).read_bytes()
    manifest = add(tiny_checkpoint, out, calibration=tmp_path / "b").manifest
    assert (out / TOKEN_COUNTS).read_bytes() == before
    assert manifest.gguf is not None
    assert manifest.gguf.importance


@pytest.mark.slow
@pytest.mark.parametrize("tables", ["fp32", "fp16", "int4", "mixed"])
def test_tables_of_every_type_are_recognised(
    tiny_checkpoint: Path, tmp_path: Path, tables: Any
) -> None:
    (tmp_path / "text").write_text("some text that says which tokens are frequent")
    text = tmp_path / "text"
    bundle = export(tiny_checkpoint, tmp_path / "out", tables=tables, calibration=text)
    assert add(tiny_checkpoint, bundle.path, backbone="q8_0").manifest.tables == (
        bundle.manifest.tables
    )
    other = write_checkpoint(tmp_path / "other", Shape(), seed=1)
    with pytest.raises(ExportError, match="its tables are not those of"):
        add(other, bundle.path)


@pytest.mark.parametrize("noise", [0.02, 1])
def test_a_step_of_training_later_is_another_checkpoint(tmp_path: Path, noise: float) -> None:
    path = write_checkpoint(tmp_path / "checkpoint", Shape(), layout="consolidated")
    out = export(path, tmp_path / "out", backbone="fp32").path
    before = contents(out)
    tables = torch.load(path / "consolidated_stem.pth", weights_only=True)
    table = tables["stem_embeddings.1.weight"]
    step = (
        noise * table.std() * torch.randn(table.shape, generator=torch.Generator().manual_seed(0))
    )
    tables["stem_embeddings.1.weight"] = table + step
    torch.save(tables, path / "consolidated_stem.pth")
    with pytest.raises(
        ExportError, match=r"the row of token 0 in layer 2 is off by .*without --add"
    ):
        add(path, out)
    assert contents(out) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "out"]


def test_another_model_or_tokenizer_is_refused_by_name(
    tiny_checkpoint: Path, out: Path, tmp_path: Path
) -> None:
    before = contents(out)
    other = write_checkpoint(tmp_path / "other", Shape(rope_theta=500.0, max_seqlen=64))
    message = r"of another model than .*other: rope_theta is 10000.0, not 500.0; max_context is 128"
    with pytest.raises(ExportError, match=message):
        add(other, out)
    tokenizer = json.loads((out / "tokenizer.json").read_text())
    tokenizer["added_tokens"][0]["lstrip"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(out / "tokenizer_config.json", tmp_path / "tokenizer_config.json")
    with pytest.raises(ExportError, match=r"tokenizer\.json: is not the tokenizer of"):
        add(tiny_checkpoint, out, tokenizer=tmp_path / "tokenizer.json")
    assert contents(out) == before


def test_a_stored_row_of_nan_is_refused(tmp_path: Path) -> None:
    assert adding._mean_error(np.zeros(3, np.float32), np.zeros(3, np.float32)) == 0
    nan = adding._mean_error(np.full(3, np.nan, np.float32), np.ones(3, np.float32))
    assert not nan <= 1


ALL_STEPS = ["kept", "backbone"]


@pytest.mark.parametrize("step", slow_but(["kept"], ALL_STEPS))
def test_an_interrupted_addition_goes_on(
    tiny_checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    expected = Path(shutil.copytree(out, out.with_name("expected")))
    add(tiny_checkpoint, expected)
    before, steps = contents(out), Steps(monkeypatch)
    steps.interrupt(step, lambda: add(tiny_checkpoint, out))
    assert contents(out) == before
    add(tiny_checkpoint, out)
    assert steps.done == ALL_STEPS[ALL_STEPS.index(step) :]
    assert contents(out) == contents(expected)


def test_what_was_done_for_another_bundle_is_not_used(
    tiny_checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted job links to files of a bundle that has since been replaced."""
    Steps(monkeypatch).interrupt("backbone", lambda: add(tiny_checkpoint, out))
    aside = out.with_name("aside")
    export(tiny_checkpoint, aside, backbone="fp32", tables="fp32")
    shutil.rmtree(out)
    shutil.copytree(aside, out)
    manifest = add(tiny_checkpoint, out).manifest
    assert manifest.tables is not None
    assert manifest.tables.row_type == "fp32"
    assert set(stem_edge.verify(out).values()) == {"ok"}


@pytest.mark.parametrize("failing_write", slow_but([1], [0, 1, 2]))
def test_a_full_disk_leaves_the_bundle(
    tiny_checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch, failing_write: int
) -> None:
    before, calls = contents(out), iter(range(1000))

    def fsync(descriptor: int) -> None:
        if next(calls) == failing_write:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(ExportError, match=r"disk is full.*continue from there"):
            add(tiny_checkpoint, out)
    assert contents(out) == before
    add(tiny_checkpoint, out)
    assert set(stem_edge.verify(out).values()) == {"ok"}


def test_a_dense_model(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "checkpoint", Shape(stem_layers=()))
    out = export(path, tmp_path / "out", backbone="fp32").path
    assert add(path, out).manifest.engines == ("onnxruntime", "ggml")
    assert set(stem_edge.verify(out).values()) == {"ok"}
