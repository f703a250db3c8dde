"""Gemma 3n from its checkpoint to its logits: several hidden states of a token, all layers take rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance import CONFORMANCE
from exact_models import GEMMA_3N, TOLERANCE_OF_GEMMA, off, published
from formats import export_as, format_with, usual_format
from hf_folders import make_gemma3n, written
from loading import load_fixed
from oracle import dequantized
from prompt_graph import without_prompt_graph
from tiers import slow_but
from whole_model import forward

import stem_edge
from stem_edge.export import exporter
from stem_edge.export.checkpoints.readers import read_checkpoint
from stem_edge.graph.decode import decoding
from stem_edge.graph.formats import SMALL_KINDS, BackboneFormat, WeightType
from stem_edge.graph.prompt_products import prompts
from stem_edge.graph.weight_plan import Blocks, Columns, Floats
from stem_edge.numerics.matrix import whole
from stem_edge.special import dense_twin
from stem_edge.tables.rows import RecordLayout

CHECKPOINT = CONFORMANCE / GEMMA_3N


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("gemma3n"), GEMMA_3N).path


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model with scores so flat that rounding changes little."""
    model = make_gemma3n(vocab_size=310, vocab_size_per_layer_input=300, hidden_size=64)
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight.data *= 0.1
    return written(model, tmp_path_factory.mktemp("random") / "checkpoint")


@pytest.mark.parametrize("kind", slow_but(["int8"], ["int8", "int4"]))
@pytest.mark.usefixtures("exact_products")
def test_quantized_graphs_compute_with_the_weights_they_store(
    random_model: Path, kind: WeightType, tmp_path: Path
) -> None:
    """Compare with the reference on dequantized weights, with activations that are not rounded."""
    format = usual_format(kind, head="fp32")
    options: Any = {"rows": "fp32", "prefill_graph": False}
    bundle = export_as(random_model, tmp_path / "bundle", format, **options)
    ids = np.random.default_rng(0).integers(310, size=40).tolist()
    source, stored = read_checkpoint(random_model), dequantized(bundle)
    assert {"streams.3.altup_in", "layers.5.laurel_out", "layers.0.ple_context"} <= stored.keys()
    expected = forward(source.config, {**source.backbone, **stored}, source.rows, ids)
    with load_fixed(tmp_path / "bundle") as loaded:
        assert off(loaded.logits(ids), expected) < TOLERANCE_OF_GEMMA


@pytest.mark.parametrize(
    ("kind", "least"),
    [
        ("int4", {True: 0.85, False: 0.85}),
        pytest.param("int8", {True: 0.97, False: 0.99}, marks=pytest.mark.slow),
    ],
)
def test_quantized_graphs_are_near_the_model(
    random_model: Path, kind: WeightType, least: dict[bool, float], tmp_path: Path
) -> None:
    """Compare prompts and decoding with the checkpoint; such small models take rounding badly."""
    ids = np.random.default_rng(0).integers(310, size=40).tolist()
    source = read_checkpoint(random_model)
    expected = forward(source.config, source.backbone, source.rows, ids)
    options: dict[str, Any] = {"rows": "int8", "prefill_graph": True, "max_kl": 9}
    export_as(random_model, tmp_path / "bundle", usual_format(kind), **options)
    without_prompt_graph(tmp_path / "bundle", tmp_path / "one graph")
    for prefill, path in ((True, "bundle"), (False, "one graph")):
        with load_fixed(tmp_path / path) as loaded:
            found = loaded.logits(ids)
        assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > least[prefill]


def test_small_matrices_have_eight_bits_and_coefficients_are_floats(random_model: Path) -> None:
    config = read_checkpoint(random_model).config
    format = BackboneFormat(weights="int4", head="int4", block_size=16, prefill=True)
    layout = RecordLayout(
        records=config.records, layers=config.stem_layers, parts=config.row_parts(), row_type="fp32"
    )
    plan = decoding(config, layout, format).plan
    bits = {item.kind: item.bits for item in plan.items if isinstance(item, Blocks)}
    assert {kind for kind, count in bits.items() if count == 8} == set(SMALL_KINDS) - {"assistant"}
    floats = {item.parts[0].rpartition(".")[2] for item in plan.items if isinstance(item, Floats)}
    assert floats == {"altup_router", "altup_predict", "altup_correct"}
    # Prompts multiply all of these as decoding does, and store nothing of layers that are skipped.
    items = prompts(config, layout, format).plan.items
    columns = {item.parts[0].rpartition(".")[2] for item in items if isinstance(item, Columns)}
    assert columns == {"wq", "wo", "gate", "up", "down"}
    named = {part for item in items if isinstance(item, Blocks) for part in item.parts}
    assert {int(name.split(".")[1]) for name in named} == set(range(config.own_kv_layers))


@pytest.mark.slow
def test_a_calibration_text_guides_all_matrices(random_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.npy"
    np.save(text, np.random.default_rng(3).integers(310, size=256))
    bundle = export_as(
        random_model,
        tmp_path / "out",
        format_with(asymmetric=True, quantizer="gptq"),
        calibration=text,
    )
    source = read_checkpoint(random_model)
    for name, matrix in dequantized(bundle).items():
        exact = whole(source.backbone[name])
        found = whole(matrix)
        assert np.abs(found - exact).mean() < 0.15 * np.abs(exact).mean(), name


def test_several_streams_without_per_layer_embeddings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = read_checkpoint(CHECKPOINT)
    config = dense_twin(source.config)
    backbone = {name: source.backbone[name] for name in config.backbone_shapes()}
    dense = replace(source, config=config, backbone=backbone, tables={}, index=None)
    monkeypatch.setattr(exporter, "read_checkpoint", lambda *given: dense)
    stem_edge.export_bundle(CHECKPOINT, tmp_path / "bundle", type="fp32")
    ids = np.random.default_rng(1).integers(310, size=30).tolist()
    expected = forward(config, backbone, {}, ids)
    with stem_edge.load(tmp_path / "bundle") as loaded:
        assert off(loaded.logits(ids), expected) < TOLERANCE_OF_GEMMA


def test_ids_beyond_the_table_have_its_first_row(bundle: Path) -> None:
    with stem_edge.load(bundle) as model:
        plain = model.logits([305, 17])
        assert np.abs(plain - model.logits([305, 17], stem_ids=[0, 17])).max() == 0
        assert np.abs(plain - model.logits([305, 17], stem_ids=[5, 17])).max() > 0.01
