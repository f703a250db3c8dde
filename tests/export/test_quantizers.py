"""Exports with every quantization of the backbone: stored types, and reproducibility."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from formats import export_as, format_with
from make_checkpoint import Shape, write_checkpoint

from stem_edge.bundle.opening import Bundle
from stem_edge.export.checkpoints.readers import read_checkpoint
from stem_edge.export.job.plan import plan_of
from stem_edge.export.job.recipe import Recipe
from stem_edge.graph.formats import (
    BACKBONE_GRAPH,
    MATRIX_KINDS,
    SMALL_KINDS,
    BackboneFormat,
    QuantizerName,
)


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
        ({"bits": {"up": 32, "gate": 8}, "asymmetric": True}, {"up": 32, "gate": 8}),
        ({"bits": {"v": 8}}, {"v": 8}),
        ({"bits": {"qkv": 8, "v": 4}}, {"qkv": 8, "v": 4}),
    ],
)
def test_kinds_of_matrices_have_their_bits(
    tiny_checkpoint: Path, tmp_path: Path, options: dict[str, Any], changed: dict[str, int]
) -> None:
    bundle = export_as(tiny_checkpoint, tmp_path / "out", format_with(**options))
    absent = {"project": 4} | dict.fromkeys(SMALL_KINDS, 8)  # of a STEM model with full tables
    expected = {kind: 4 for kind in MATRIX_KINDS if kind not in (*absent, "v")} | changed
    format = format_of(bundle)
    apart = {"v": format.bits("v")} if format.bits("v") != format.bits("qkv") else {}
    assert bits_in_graphs(bundle) == expected | apart
    values = {"v": changed.get("v", expected["qkv"])}
    assert {kind: format.bits(kind) for kind in MATRIX_KINDS} == expected | absent | values


@pytest.mark.parametrize(
    ("type", "quantizer"),
    [("int4", "gptq"), ("fp32", "rtn"), ("near-lossless", "rtn"), ("balanced", "gptq")],
)
def test_the_quantizer_of_each_type(tiny_checkpoint: Path, type: str, quantizer: str) -> None:
    format = plan_of(read_checkpoint(tiny_checkpoint), Recipe(type=type)).format
    assert isinstance(format, BackboneFormat)
    assert (format.quantizer, format.asymmetric) == (quantizer, quantizer == "gptq")


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
    quantizers: tuple[QuantizerName, ...] = ("rtn", "gptq")
    for quantizer in quantizers:
        format = format_with(asymmetric=asymmetric, quantizer=quantizer)
        bundle = export_as(path, tmp_path / quantizer, format, rows="fp32", calibration=text)
        divergence.append(bundle.manifest.report.divergence)
    assert divergence[1] < divergence[0]
