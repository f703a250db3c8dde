"""Exports with every quantization of the backbone: stored types, and reproducibility."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from exports import contents
from make_checkpoint import Shape, write_checkpoint

import stem_edge
from stem_edge.bundle.expected import expected_footprint
from stem_edge.bundle.footprint import footprint_of
from stem_edge.bundle.manifest import BACKBONE_GRAPH
from stem_edge.bundle.opening import Bundle
from stem_edge.commands.main import main
from stem_edge.errors import ExportError
from stem_edge.export.job.options import QUANTIZERS
from stem_edge.graph.formats import MATRIX_KINDS, SMALL_KINDS, BackboneFormat, MatrixKind


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token ids, as the tiny checkpoint's bytes."""
    path = tmp_path_factory.mktemp("text") / "text.npy"
    np.save(path, np.random.default_rng(0).integers(0, 256, 3000))
    return path


def format_of(bundle: Bundle) -> BackboneFormat:
    """Read the manifest's description of the backbone for onnxruntime."""
    assert bundle.manifest.backbone is not None
    return bundle.manifest.backbone


def bits_in_graphs(bundle: Bundle) -> dict[str, int]:
    """Bits of the first product of each kind."""
    found: dict[str, int] = {}
    for node in onnx.load(bundle.file(BACKBONE_GRAPH), load_external_data=False).graph.node:
        last = node.name.rsplit(".", 1)[-1]
        kind = {"logits": "head", "hidden": "embedding"}.get(last, last)
        if kind in MATRIX_KINDS and node.op_type in ("MatMulNBits", "GatherBlockQuantized"):
            (bits,) = (a.i for a in node.attribute if a.name == "bits")
            found.setdefault(kind, bits)
        elif kind in MATRIX_KINDS and node.op_type in ("FusedMatMul", "Gather"):
            found.setdefault(kind, 32)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({}, {}),
        ({"head": "int8"}, {"head": 8, "embedding": 8}),
        ({"bits": {"head": 8, "down": 32}}, {"head": 8, "down": 32}),
        ({"head": "int8", "bits": {"embedding": 4, "qkv": 8}}, {"head": 8, "qkv": 8}),
        ({"bits": {"wo": 4, "up": 32, "gate": 8}, "asymmetric": True}, {"up": 32, "gate": 8}),
        ({"bits": {"v": 8}}, {"v": 8}),
        ({"bits": {"qkv": 8, "v": 4}}, {"qkv": 8, "v": 4}),
    ],
)
def test_kinds_of_matrices_have_their_bits(
    tiny_checkpoint: Path, tmp_path: Path, options: dict[str, Any], changed: dict[str, int]
) -> None:
    bundle = stem_edge.export_bundle(tiny_checkpoint, tmp_path / "out", backbone="int4", **options)
    absent = {"project": 4} | dict.fromkeys(SMALL_KINDS, 8)  # of a STEM model with full tables
    expected = {kind: 4 for kind in MATRIX_KINDS if kind not in (*absent, "v")} | changed
    manifest, format = bundle.manifest, format_of(bundle)
    apart = {"v": format.bits("v")} if format.values_apart(0) else {}
    assert bits_in_graphs(bundle) == expected | apart
    values = {"v": changed.get("v", expected["qkv"])}
    assert {kind: format.bits(kind) for kind in MATRIX_KINDS} == expected | absent | values
    found = footprint_of(manifest)
    size = expected_footprint(manifest.model, format, manifest.table_format)
    assert found.backbone_nbytes == size.backbone_nbytes


def test_an_override_that_changes_nothing_is_not_stored(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    bits: dict[MatrixKind, int] = {"head": 4, "down": 4}
    stem_edge.export_bundle(tiny_checkpoint, tmp_path / "a", backbone="int4", bits=bits)
    stem_edge.export_bundle(tiny_checkpoint, tmp_path / "b", backbone="int4")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_kind_of_matrix_that_the_model_has_not(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"no matrix of the kind 'project'.*down, embedding"):
        stem_edge.export_bundle(tiny_checkpoint, tmp_path / "out", bits={"project": 8})
    assert not (tmp_path / "out").exists()


def test_the_command_has_the_options(
    tiny_checkpoint: Path, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["--bits", "head=8,down=8", "--no-asymmetric", "--quantizer", "rtn"]
    arguments += ["--backbone", "int4"]
    arguments += ["--calibration", str(text), "--calibration-tokens", "64"]
    assert main(["export", str(tiny_checkpoint), str(out), *arguments]) == 0
    format = format_of(stem_edge.open_bundle(out))
    assert format.kinds == {"head": "int8", "down": "int8"}
    assert (format.asymmetric, format.quantizer) == (False, "rtn")
    with pytest.raises(SystemExit):
        main(["export", str(tiny_checkpoint), str(out), "--bits", "head"])
    assert "'head' is not like head=8,down=8" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "gptq"),
        ({"backbone": "fp32"}, "rtn"),
        ({"quality": "near-lossless"}, "rtn"),
        ({"backbone": "int8", "bits": {"down": 4}}, "gptq"),
        ({"quantizer": "rtn"}, "rtn"),
    ],
)
def test_the_quantizer_that_is_usual(
    tiny_checkpoint: Path, tmp_path: Path, options: dict[str, Any], expected: str
) -> None:
    bundle = stem_edge.export_bundle(tiny_checkpoint, tmp_path / "out", **options)
    assert format_of(bundle).quantizer == expected
    four = "int4" in {*format_of(bundle).matrices.values(), format_of(bundle).weights}
    assert format_of(bundle).asymmetric == (four or "bits" in options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dim", "tied", "asymmetric"),
    [(64, False, False), (48, True, True)],  # 48, so that heads are padded
)
def test_gptq_diverges_less_than_rounding(
    tmp_path: Path, text: Path, dim: int, tied: bool, asymmetric: bool
) -> None:
    path = write_checkpoint(tmp_path / "checkpoint", Shape(dim=dim, tied_head=tied))
    divergence = []
    for quantizer in QUANTIZERS:
        bundle = stem_edge.export_bundle(
            path,
            tmp_path / quantizer,
            backbone="int4",
            tables="fp32",
            block_size=16,
            asymmetric=asymmetric,
            quantizer=quantizer,
            calibration=text,
        )
        divergence.append(bundle.manifest.report.divergence)
    assert divergence[1] < divergence[0]


def test_a_width_that_no_block_divides_can_be_left_alone(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "checkpoint", Shape(d_ff=72))
    with pytest.raises(ExportError, match=r"72 is not a multiple of 16.*--bits down=32"):
        stem_edge.export_bundle(path, tmp_path / "out", tables="fp16")
    bundle = stem_edge.export_bundle(
        path, tmp_path / "out", tables="fp16", bits={"down": 32}, prefill_graph=False
    )
    assert bits_in_graphs(bundle)["gate"] == 4
