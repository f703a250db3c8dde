"""Hidden states of a calibration text in each layer, and quantization with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from installed import DATA
from make_checkpoint import Shape, write_checkpoint

from stem_edge.bundle.prefill_check import PROBE_TOKENS
from stem_edge.export.checkpoints import hugging_face
from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.checkpoints.head_padding import pad_heads
from stem_edge.export.checkpoints.lingua import read_checkpoint
from stem_edge.export.quantization.calibration import SEQUENCE_TOKENS, probe_ids, sequences
from stem_edge.export.quantization.hidden_states import HiddenStates
from stem_edge.export.quantization.quantizers import Calibrated, head_positions
from stem_edge.export.tokenizers.tokenizer import convert_tokenizer
from stem_edge.numerics.matrix import ArrayMatrix, Matrix, whole
from stem_edge.numerics.quantize import F32, dequantize_blocks
from stem_edge.numerics.reference import forward

IDS = [[5, 9, 200, 5, 31, 7], [80, 81, 82, 5]]


BYTES = convert_tokenizer("bytes", None, add_bos=True)


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Path) -> Checkpoint:
    return read_checkpoint(tiny_checkpoint)


def observed(checkpoint: Checkpoint, stored: dict[str, F32] | None = None) -> dict[str, F32]:
    """Inputs of all products, over all sequences, as the reference model has them."""
    seen: dict[str, list[F32]] = {}
    backbone: dict[str, Matrix] = {**checkpoint.backbone}
    backbone |= {name: ArrayMatrix(array) for name, array in (stored or {}).items()}
    see = lambda name, x: seen.setdefault(name, []).append(x)
    for ids in IDS:
        forward(checkpoint.config, backbone, checkpoint.rows, ids, see)
    return {name: np.concatenate(parts) for name, parts in seen.items()}


@pytest.mark.parametrize("replaced", [False, True])
def test_every_layer_sees_what_the_reference_model_sees(
    checkpoint: Checkpoint, replaced: bool
) -> None:
    stored = {"layers.0.wo": np.zeros(checkpoint.backbone["layers.0.wo"].shape, np.float32)}
    states, seen = HiddenStates(checkpoint, IDS), dict[str, list[F32]]()
    see = lambda name, x: seen.setdefault(name, []).append(x)
    while states.layer < checkpoint.config.n_layers:
        states.observe(see)
        states.advance(stored if replaced and states.layer == 0 else {})
    states.observe_head(see)
    expected = observed(checkpoint, stored if replaced else None)
    if replaced:  # because the layer was observed before anything in it was replaced
        expected |= {n: x for n, x in observed(checkpoint).items() if n.startswith("layers.0.")}
    assert seen.keys() == expected.keys()
    for name, parts in seen.items():
        assert np.allclose(np.concatenate(parts), expected[name], atol=1e-5), name


def test_several_streams_are_seen_up_to_the_head() -> None:
    source = hugging_face.read_checkpoint(DATA / "conformance" / "gemma3n-text")
    states, seen = HiddenStates(source, IDS), dict[str, list[F32]]()
    see = lambda name, x: seen.setdefault(name, []).append(x)
    while states.layer < source.config.n_layers:
        states.observe(see)
        states.advance({})
    states.observe_head(see)
    expected = observed(source)
    assert {"streams.3.altup_out", "layers.5.laurel_out", "layers.0.laurel_in"} < seen.keys()
    assert seen.keys() == expected.keys()
    for name, parts in seen.items():
        assert np.allclose(np.concatenate(parts), expected[name], atol=1e-5), name


PRODUCTS = {
    "layers.0.qkv": ("qkv", ["wq", "wk", "wv"]),
    "layers.0.wo": ("wo", ["wo"]),
    "layers.0.gate": ("gate", ["gate"]),
    "layers.0.up": ("up", ["up"]),
    "layers.0.down": ("down", ["down"]),
}


@pytest.mark.parametrize("gptq", [False, True])
@pytest.mark.parametrize("dim", [64, 48])  # heads of 16, and of 12 that are padded to 16
def test_the_next_layer_sees_the_quantized_hidden_states(
    tmp_path: Path, dim: int, gptq: bool
) -> None:
    source = read_checkpoint(write_checkpoint(tmp_path / "checkpoint", Shape(dim=dim)))
    config, states = source.config, HiddenStates(source, IDS)
    calibrated = Calibrated(states, config, asymmetric=False, gptq=gptq)
    at = {n: source.backbone[f"layers.0.{n}"] for n in config.layer_shapes(0)}
    padded, kept = pad_heads(config, 0, at), dict[str, F32]()
    for name, (kind, parts) in PRODUCTS.items():
        exact = np.concatenate([whole(padded[part]) for part in parts])
        block = 16
        work = calibrated.worker(name, kind, 8, block)
        pieces = [work(rows) for rows in np.array_split(exact, 3)]
        for blocks in pieces:
            calibrated.keep(name, dequantize_blocks(*blocks[:2], 8))
        kept[name] = np.concatenate([dequantize_blocks(*blocks[:2], 8) for blocks in pieces])
        assert np.abs(kept[name] - exact).max() < 0.05 * np.abs(exact).max()
    seen: list[F32] = []
    calibrated.worker("layers.1.qkv", "qkv", 8, 16)  # starts computing the next layer
    assert states.layer == 1
    states.observe(lambda name, x: seen.append(x) if name == "layers.1.qkv" else None)
    exact_inputs = observed(source)["layers.1.qkv"]
    difference = np.abs(np.concatenate(seen) - exact_inputs).max()
    assert 0 < difference < 0.1 * np.abs(exact_inputs).max()


def test_positions_in_padded_heads(tmp_path: Path) -> None:
    shape = Shape(dim=48, n_heads=4, n_kv_heads=2)
    config = read_checkpoint(write_checkpoint(tmp_path / "checkpoint", shape)).config
    places = head_positions(config, 0)
    assert {name: (len(p), n) for name, (p, n) in places.items()} == {
        "wq": (48, 64),
        "wk": (24, 32),
        "wv": (24, 32),
        "wo": (48, 64),
    }
    assert places["wo"][0][:13].tolist() == [*range(12), 16]


def test_sequences_come_from_all_over_the_text() -> None:
    text = np.arange(10_000)
    found = sequences(text, 3 * SEQUENCE_TOKENS, 4096)
    assert [len(ids) for ids in found] == [SEQUENCE_TOKENS] * 3
    used = 10_000 - PROBE_TOKENS  # because the text that judges the result must not guide it
    assert (found[0][0], found[-1][-1]) == (0, used - 1)
    assert probe_ids(text, BYTES, 4096) == list(range(used, 10_000))
    everything = [token for ids in sequences(text, 1 << 20, 8) for token in ids]
    assert everything == list(range(used))


@pytest.mark.parametrize(
    ("length", "tokens", "expected"), [(7, 100, [7]), (90, 7, [7]), (1, 1, [1])]
)
def test_short_texts_and_small_wishes(length: int, tokens: int, expected: list[int]) -> None:
    assert [len(ids) for ids in sequences(np.arange(length), tokens, 4096)] == expected


def test_only_what_later_layers_read_is_kept(tiny_checkpoint: Path) -> None:
    source = read_checkpoint(tiny_checkpoint)
    states = HiddenStates(source, IDS)
    while states.layer < source.config.n_layers:
        states.advance({})
    assert all(not tokens.kv and tokens.ple is None for tokens in states._tokens)
