"""Costs of kinds of tensors: those that a bundle has, and recipes that keep a bound."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_folders import make_gemma
from installed import DATA

import stem_edge
from stem_edge.commands.eval import export_options
from stem_edge.commands.main import main
from stem_edge.errors import InputError
from stem_edge.export.checkpoints.readers import read_checkpoint
from stem_edge.measuring.quality.kinds import KindCost, KindCosts, kind_costs, recipes
from stem_edge.numerics.distributions import divergence
from stem_edge.numerics.reference import forward

IDS = np.random.default_rng(1).integers(90, size=48)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose scores are flat, so that quantization changes logits a little."""
    folder = tmp_path_factory.mktemp("kinds")
    model = make_gemma(vocab_size=307, vocab_size_per_layer_input=307, hidden_size=64)
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight.data *= 0.1
    model.save_pretrained(folder)
    shutil.copy(DATA / "conformance" / "gemma4-text" / "tokenizer.json", folder)
    np.save(folder / "ids.npy", IDS)
    return folder


@pytest.fixture(scope="module")
def costs(gemma: Path) -> KindCosts:
    return kind_costs(gemma, gemma / "ids.npy", progress=False)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("down", {"bits": {"down": 4}}),
        pytest.param("embedding", {"bits": {"embedding": 4}}, marks=pytest.mark.slow),
        pytest.param("ple_out", {"bits": {"ple_out": 4}}, marks=pytest.mark.slow),
        ("rows", {"tables": "int4"}),
    ],
)
def test_costs_are_those_of_a_bundle(
    gemma: Path, costs: KindCosts, tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    exact: dict[str, Any] = {"backbone": "fp32", "tables": "fp32", "quantizer": None}
    if "bits" in options:
        exact["quantizer"] = "search"
    stem_edge.export_bundle(gemma, tmp_path / "out", **exact | options, prefill_graph=False)
    source, ids = read_checkpoint(gemma), IDS.tolist()
    expected = forward(source.config, source.backbone, source.rows, ids)
    with stem_edge.load(tmp_path / "out") as model:
        found = divergence(expected, model.logits(ids)).mean()
    (cost,) = [each for each in costs.kinds if each.kind == kind]
    assert cost.nats[4] == pytest.approx(found, rel=0.2)  # kernels round activations


def test_every_kind_is_measured(costs: KindCosts) -> None:
    """The usual recipe has 8 bits in the matrices of per-layer embeddings, and in rows."""
    assert [each.kind for each in costs.kinds] == [
        *("embedding", "head", "qkv", "wo", "gate", "up", "down"),
        *("ple_context", "ple_gate", "ple_out", "rows"),
    ]
    assert all(0 < each.nats[8] < each.nats[4] / 10 for each in costs.kinds)
    wide = {kind for kind, bits in costs.default.bits.items() if bits == 8}
    assert wide == {"ple_context", "ple_gate", "ple_out", "rows"}
    assert costs.within is not None
    assert costs.within.nats <= costs.default.nats


def test_streams_are_measured(tmp_path: Path) -> None:
    ids = tmp_path / "ids.npy"
    np.save(ids, np.arange(3, 27))
    checkpoint = DATA / "conformance" / "gemma3n-text"
    found = {each.kind: each.nats for each in kind_costs(checkpoint, ids, tokens=24).kinds}
    for kind in ("altup_in", "altup_out", "laurel_in"):  # laurel_out is too narrow to quantize
        assert 0 < found[kind][8] < found[kind][4]


def test_recipes_give_bits_where_they_gain_most() -> None:
    kinds = [
        KindCost("a", 100, {4: 0.1, 8: 0.0}),
        KindCost("b", 10, {4: 0.05, 8: 0.0}),
        KindCost("c", 1000, {4: 0.01, 8: 0.001}),
    ]
    found = [tuple(bits.values()) for bits in recipes(kinds, 0.12)]
    assert found == [(4, 8, 4), (8, 8, 4), (8, 8, 8)]
    assert [tuple(bits.values()) for bits in recipes(kinds, 0.0)] == [(8, 8, 8)]
    assert next(recipes(kinds, 1.0)) == {"a": 4, "b": 4, "c": 4}


def test_options_of_an_export() -> None:
    usual = {"gate": 4, "ple_out": 8, "rows": 8}
    assert export_options(usual, usual) == []
    assert export_options({"gate": 8, "ple_out": 4, "rows": 4}, usual) == [
        "--bits gate=8,ple_out=4",
        "--tables int4",
    ]


@pytest.mark.slow
def test_the_command(gemma: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["eval", str(gemma), "--text", str(gemma / "ids.npy")]
    assert main([*command, "--kinds"]) == 0
    printed = capsys.readouterr().out
    assert "ple_gate" in printed
    assert f"export {gemma} OUT" in printed
    assert main([*command, "--kinds", "--max-kl", "0"]) == 0
    assert "8 bits everywhere cost more" in capsys.readouterr().out
    assert main([*command, "--max-kl", "1"]) != 0
    assert "--max-kl is a bound for --kinds" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    [
        *("--lines", "--window 9", "--stride 9", "--against x", "--worst 1", "--edit x"),
        *("--engine ggml", "--repack", "--providers cuda", "--provider-library a=b"),
        *("--device-memory 1GB", "--host-slots 1", "--against-engine ggml", "--prefill-graph"),
        *("--memory 1GB", "--threads 1", "--threads 1 --window 9"),
    ],
)
def test_options_that_a_checkpoint_has_no_use_for(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "checkpoint", "--text", "x", "--kinds", *option.split()]) != 0
    said = capsys.readouterr().err
    assert all(word in said for word in option.split() if word.startswith("--"))
    assert "--kinds is for checkpoints; leave one out" in said and "--text" not in said


def test_what_is_refused(
    gemma: Path, tiny_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match="expected 0 nats or more"):
        kind_costs(gemma, gemma / "ids.npy", max_kl=-1)
    assert main(["eval", str(tiny_bundle), "--text", str(gemma / "ids.npy"), "--kinds"]) != 0
    assert "what a checkpoint could become" in capsys.readouterr().err
