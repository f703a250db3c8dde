"""Quantized rows and matrices, on each engine: logits of the reference that computes with what a bundle stores."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from formats import export_as, format_with
from installed import needs_ggml
from models import DEVICE, GGML, ORT
from oracle import NumpyReference
from safetensors.numpy import load_file, save_file
from tiers import slow_but
from ways import many

import stem_edge
from stem_edge.export.job.table_plan import ExportRows
from stem_edge.graph import linear
from stem_edge.graph.formats import BackboneFormat, WeightType
from stem_edge.numerics.distributions import divergence

FOUR, EIGHT = (format_with(bits, asymmetric=True) for bits in ("int4", "int8"))
ROWS: list[tuple[str, str, ExportRows]] = [
    ("hash-moe", ORT, "int4"), ("mixture", ORT, "int8"), ("mixture", GGML, "fp16"), ("gate", DEVICE, "fp16"),
    ("gate", DEVICE, "int4"), ("gate", GGML, "int4"), ("stem", ORT, "fp16"), ("windows", ORT, "int4"),
    ("windows", DEVICE, "int8"), ("stem", GGML, "int8"), ("engram", ORT, "int8"),
    ("ngrams", ORT, "int4"), ("gemma4", ORT, "int8"),
]  # fmt: skip
MATRICES: list[tuple[str, BackboneFormat]] = [
    ("stem-plus", FOUR),  # whose matrix of embedding and head is stored once
    ("windows", EIGHT),
    ("windows", format_with("int4", bits={"down": 8, "wo": 32})),
    ("windows", format_with("int8", bits={"v": 4})),
    ("gemma3", FOUR),
    ("gemma4", format_with("int8")),
]

BLOCKS: list[tuple[WeightType, int, bool]] = [
    ("int4", 32, True), ("int8", 64, True), ("int4", 64, False), ("int4", 128, True), ("int8", 32, True),
]  # fmt: skip
EXACT: list[tuple[str, BackboneFormat, bool]] = [
    ("windows", format_with(weights, block_size=size, asymmetric=asymmetric), False)
    for weights, size, asymmetric in BLOCKS
]
EXACT += [("windows", format_with("int4", bits={"down": 8, "wo": 32}), False)]
# Whose matrix of embedding and head is stored once.
EXACT += [("stem-plus", format, True) for format in (FOUR, EIGHT, format_with("fp32"))]


def reference(name: str, bundle: Any, shared: Path) -> NumpyReference:
    """Return the reference of a bundle, whose logits are near the checkpoint's, but not the same."""
    found, ids = NumpyReference(models.checkpoint_of(name, shared)), models.prompts(name)[0]
    exact = found.logits(ids)
    found.use(bundle)
    stored = found.logits(ids)
    assert np.abs(stored - exact).max() > models.KINDS[name].tolerance / 10
    assert divergence(exact, stored).mean() < 0.4
    return found


@pytest.mark.parametrize(
    ("name", "engine", "rows"),
    [pytest.param(*one, marks=needs_ggml if one[1] == GGML else ()) for one in ROWS],
)
def test_rows(name: str, engine: str, rows: ExportRows, shared: Path, tmp_path: Path) -> None:
    options: Any = models.EXACT[GGML if engine == GGML else ORT] | {"rows": rows, "max_kl": 9.0}
    path = models.checkpoint_of(name, shared)
    bundle = stem_edge.export_bundle(path, tmp_path / "bundle", **options)
    check(name, engine, bundle, reference(name, bundle, shared))


@pytest.mark.parametrize(("name", "format"), MATRICES)
def test_matrices(name: str, format: BackboneFormat, shared: Path, tmp_path: Path) -> None:
    """A device's operators round no activations; the CPU's usually round those of each block to int8."""
    path = models.checkpoint_of(name, shared)
    bundle = export_as(path, tmp_path / "bundle", format, max_kl=9.0)
    expected = reference(name, bundle, shared)
    check(name, DEVICE, bundle, expected)
    ids = models.prompts(name)[0]
    with stem_edge.load(bundle.path, threads=1) as model:
        assert divergence(expected.logits(ids), model.logits(ids)).mean() < 0.3


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize(("name", "format", "pieces"), slow_but([*EXACT[:2], *EXACT[-3:]], EXACT))
def test_matrices_on_the_cpu(
    name: str,
    format: BackboneFormat,
    pieces: bool,
    shared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Large heads are multiplied in pieces, which begin where mappings can begin."""
    if pieces:
        monkeypatch.setattr(linear, "SPLIT_VALUES", 20 * 48)
        monkeypatch.setattr(linear, "LARGE_ALIGNMENT", 16 * 48)
    options: Any = {"prefill_graph": False, "max_kl": 9.0}
    bundle = export_as(models.checkpoint_of(name, shared), tmp_path / "out", format, **options)
    check(name, ORT, bundle, reference(name, bundle, shared), models.prompts(name)[1:3])


def loud(scaled: dict[str, Any], channels: Any) -> None:
    """Make some channels of a norm and of a layer's rows a hundred times as large, and the next matrix small."""
    for source, *targets in (
        ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("mlp.stem_table", "mlp.down_proj"),
    ):
        scaled[f"model.layers.1.{source}.weight"][..., channels] *= 100
        for target in targets:
            scaled[f"model.layers.1.{target}.weight"][:, channels] /= 100


def loud_token(scaled: dict[str, Any], channels: Any) -> None:
    scaled["model.layers.2.mlp.stem_table.weight"][7] *= 1000


@pytest.mark.parametrize("change", [loud, loud_token])
def test_loud_channels_and_tokens_leave_prompts_exact(
    change: Any, shared: Path, tmp_path: Path
) -> None:
    """The graph for prompts rounds activations to 8 bits with one scale for each token."""
    path = Path(shutil.copytree(models.checkpoint_of("stem", shared), tmp_path / "checkpoint"))
    text = np.random.default_rng(9).integers(10, 250, 2000)
    np.save(tmp_path / "text.npy", text)
    ids, off = [*text[:100].tolist(), 7, 9, 8, 7], list[float]()
    for number in range(2):
        if number:
            tensors = load_file(path / "model.safetensors")
            change(tensors, [5, 17, 40])
            save_file(tensors, path / "model.safetensors", {"format": "pt"})
        options: Any = {"rows": "fp32", "prefill_graph": True, "calibration": tmp_path / "text.npy"}
        out = stem_edge.export_bundle(path, tmp_path / str(number), type="int8", **options)
        expected = NumpyReference(path).logits(ids)[:100]
        with stem_edge.load(out.path, threads=1) as model:
            off.append(float(divergence(expected, model.logits(ids)[:100]).mean()))
    assert 0 < off[0] < 2e-3 and off[1] < 1.5 * off[0], off


def check(name: str, engine: str, bundle: Any, expected: NumpyReference, texts: Any = None) -> None:
    """Compare logits of texts, and of the next token of each after a step with the others."""
    device: Any = {"device_memory": "4GB"} if engine == DEVICE else {"engine": engine}
    with stem_edge.load(bundle.path, threads=1, sequences=3, **device) as model:
        texts, tolerance = texts or models.prompts(name), models.KINDS[name].tolerance
        for ids in texts:
            found, logits = model.logits(ids), expected.logits(ids)
            assert np.abs(found - logits).max() < tolerance
        for number, answer in many(model, texts, max_new_tokens=3, logprobs=1).items():
            logits = expected.logits([*texts[number], *answer.ids])[len(texts[number]) - 1 : -1]
            peak = logits.max(axis=1)
            total = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=1))
            chosen = logits[np.arange(len(answer.ids)), answer.ids]
            assert np.abs(chosen - total - answer.logprobs).max() < 2 * tolerance
