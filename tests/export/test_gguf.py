"""Exports for ggml: the contents of backbone.gguf, and how it is written."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from architectures import SIZES, VARIANTS, write
from installed import needs_ggml
from make_checkpoint import Shape, write_checkpoint
from tiers import slow_but
from whole_model import forward

import stem_edge
from stem_edge.bundle.manifest import MANIFEST
from stem_edge.bundle.opening import Bundle
from stem_edge.commands.main import main
from stem_edge.config import ModelConfig
from stem_edge.export.checkpoints.readers import read_checkpoint
from stem_edge.export.job import plan
from stem_edge.ggml.gguf_schema import gguf_name
from stem_edge.ggml.gguf_tensors import planned_tensors
from stem_edge.graph.formats import GGUF, GGUF_TYPES
from stem_edge.numerics.matrix import whole

gguf = pytest.importorskip("gguf")
pytestmark = needs_ggml

# About three times the errors measured with random weights.
DIVERGENCE = {"f32": 1e-6, "f16": 1e-5, "q8_0": 1e-3, "q6_k": 3e-3, "q5_k_m": 1e-2, "q4_k_m": 3e-2}


def export(checkpoint: Path, out: Path, **options: Any) -> Bundle:
    return stem_edge.export_bundle(checkpoint, out, **({"engine": "ggml"} | options))


def tensors_are_as_planned(bundle: Bundle) -> None:
    """An independent reader finds the plan's tensors, and each where the plan says that it lies."""
    manifest, reader = bundle.manifest, gguf.GGUFReader(bundle.file(GGUF))
    assert manifest.gguf is not None
    planned = planned_tensors(manifest.model, manifest.gguf.weights)
    start = manifest.files[GGUF].nbytes - planned[-1].end
    assert reader.data_offset == start
    assert [
        (t.name, t.tensor_type.value, tuple(t.shape.tolist()), int(t.data_offset), int(t.n_bytes))
        for t in reader.tensors
    ] == [(t.name, t.type.number, t.shape[::-1], start + t.offset, t.nbytes) for t in planned]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose rows fit the blocks of all types."""
    shape = Shape(dim=256, d_ff=512)
    return write_checkpoint(tmp_path_factory.mktemp("wide") / "checkpoint", shape)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token ids, as the checkpoints' bytes."""
    path = tmp_path_factory.mktemp("text") / "text.npy"
    np.save(path, np.random.default_rng(0).integers(0, 256, 1000))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("type", GGUF_TYPES)
def test_every_type_is_a_backbone_near_the_checkpoint(
    wide: Path, tmp_path: Path, type: str
) -> None:
    bundle = export(wide, tmp_path / "out", type=type, rows="fp32")
    manifest, path = bundle.manifest, bundle.file(GGUF)
    tensors_are_as_planned(bundle)
    assert set(stem_edge.verify(bundle.path).values()) == {"ok"}
    assert (manifest.format.engine, manifest.backbone) == ("ggml", None)
    report = manifest.report
    assert report.backbone_nbytes == path.stat().st_size
    assert 0 < report.divergence < DIVERGENCE.get(type, 0.1)
    assert not list(bundle.path.glob("*.onnx*"))
    source = read_checkpoint(wide).backbone
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert stored.keys() == {gguf_name(name) for name in source}
    for name, matrix in source.items():
        tensor, original = stored[gguf_name(name)], whole(matrix)
        found = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        lost = np.abs(found - original).max() / np.abs(original).max()
        assert lost <= (0 if type == "f32" or original.ndim == 1 else 0.15)


@pytest.mark.parametrize(
    "name",
    slow_but(["windows"], ["dense", "low rank", "hash-moe", "tied head", "windows"]),
)
def test_kinds_of_models(tmp_path: Path, name: str) -> None:
    folder, ids, expected = write(tmp_path / "c", ModelConfig(**(SIZES | VARIANTS[name])))
    bundle = export(folder, tmp_path / "out", type="f32", rows="fp32")
    tensors_are_as_planned(bundle)
    assert bundle.manifest.report.divergence < 1e-7
    with stem_edge.load(bundle.path, engine="ggml") as model:
        assert np.abs(model.logits(ids) - expected).max() < 1e-4


def test_a_text_weights_no_router(tmp_path: Path) -> None:
    folder, _, _ = write(tmp_path / "c", ModelConfig(**(SIZES | VARIANTS["mixture of rows"])))
    export(folder, tmp_path / "out", type="q4_0", max_kl=9)


def test_what_the_file_says(wide: Path, tmp_path: Path) -> None:
    bundle = export(wide, tmp_path / "out")
    fields = gguf.GGUFReader(bundle.file(GGUF)).fields
    model = bundle.manifest.model
    found = {key: fields[key].contents() for key in fields if not key.startswith("GGUF.")}
    expected = {
        "general.architecture": "stem",
        "general.name": "checkpoint",
        "general.file_type": 15,
        "general.quantization_version": 2,
        "general.alignment": 32,
    }
    assert {key: found[key] for key in expected} == expected
    assert msgspec.json.decode(found["stem.config"], type=ModelConfig) == model


@pytest.mark.slow
def test_a_text_weights_the_channels(wide: Path, tmp_path: Path, text: Path) -> None:
    options: dict[str, Any] = {"type": "q4_0", "rows": "fp32"}
    few: dict[str, Any] = {"calibration": text}
    with pytest.MonkeyPatch.context() as patch:  # no export goes without a text by itself
        patch.setattr(plan, "UNWEIGHTED", GGUF_TYPES)
        plain = export(wide, tmp_path / "plain", **options)
    weighted = export(wide, tmp_path / "weighted", **few, **options)
    formats = [bundle.manifest.gguf for bundle in (plain, weighted)]
    assert [format and format.importance for format in formats] == [False, True]
    assert plain.file(GGUF).read_bytes() != weighted.file(GGUF).read_bytes()
    ids = list(weighted.manifest.report.probe_tokens)
    source, squares = read_checkpoint(wide), []
    expected = forward(source.config, source.backbone, source.rows, ids)
    for bundle in (plain, weighted):
        with stem_edge.load(bundle.path) as model:
            squares.append(np.square(model.logits(ids) - expected).mean())
    assert squares[1] < squares[0]


def test_the_command(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["export", str(tiny_checkpoint), str(out), "--engine", "ggml"]
    assert main([*arguments, "--type", "q8_0"]) == 0
    assert "q8_0" in capsys.readouterr().out
    before = (out / MANIFEST).read_bytes()
    assert main([*arguments, "--type", "q6_k", "--force", "--prefill-graph"]) == 1
    assert "prefill-graph: for the engine onnx" in capsys.readouterr().err
    assert (out / MANIFEST).read_bytes() == before
    assert main([*arguments, "--type", "f16", "--force"]) == 0
    assert "f16" in (told := capsys.readouterr().out)
    assert f"generate {out} 'Once" in told
    chat = Path(shutil.copytree(out, tmp_path / "chat"))
    (chat / "chat_template.jinja").write_text("{{ messages }}")
    assert main([*arguments, "--force", "--tokenizer", str(chat / "tokenizer.json")]) == 0
    assert f"try it: stem-edge run {out}\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    told = capsys.readouterr().out
    for name in ("onnxruntime, or ggml", *GGUF_TYPES):
        assert name in told
