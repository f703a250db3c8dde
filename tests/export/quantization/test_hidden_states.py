"""Hidden states of a calibration text in each layer, and quantization with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from make_checkpoint import Shape, write_checkpoint
from whole_model import forward

from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.checkpoints.head_padding import pad_heads
from stem_edge.export.checkpoints.lingua import read_checkpoint
from stem_edge.export.quantization.calibration import (
    JUDGED_TOKENS,
    SEQUENCE_TOKENS,
    judged_ids,
    sequences,
)
from stem_edge.export.quantization.gptq import solve, typical_inputs
from stem_edge.export.quantization.hidden_states import HiddenStates
from stem_edge.export.quantization.quantizers import calibrated
from stem_edge.graph.formats import BackboneFormat
from stem_edge.numerics.matrix import ArrayMatrix, whole
from stem_edge.numerics.quantize import F32

IDS = [[5, 9, 200, 5, 31, 7], [80, 81, 82, 5]]


def observed(checkpoint: Checkpoint) -> dict[str, F32]:
    """Inputs of all products, over all sequences, as the reference model has them."""
    seen: dict[str, list[F32]] = {}
    see = lambda name, x: seen.setdefault(name, []).append(x)
    for ids in IDS:
        forward(checkpoint.config, checkpoint.backbone, checkpoint.rows, ids, see)
    return {name: np.concatenate(parts) for name, parts in seen.items()}


@pytest.mark.parametrize("dim", [64, 48])  # heads of 16, and of 12 that are padded to 16
def test_a_product_is_quantized_for_the_inputs_that_it_has(tmp_path: Path, dim: int) -> None:
    """Of any layer, though the ones before it were not asked for."""
    source = read_checkpoint(write_checkpoint(tmp_path / "checkpoint", Shape(dim=dim)))
    config, seen = source.config, observed(source)
    format = BackboneFormat(weights="int4", head="int4", block_size=16, asymmetric=True)
    quantizer = calibrated(HiddenStates(source, IDS), config, format)
    for name in ("layers.1.wo", "layers.1.down", "layers.2.v"):
        at, _, part = name.rpartition(".")
        matrix = {"v": "wv"}.get(part, part)
        layer = {n: source.backbone[f"{at}.{n}"] for n in config.layer_shapes(int(at[-1]))}
        exact = whole(pad_heads(config, int(at[-1]), layer)[matrix])
        x = seen[f"{at}.qkv" if part == "v" else name]
        if part == "wo":
            x = whole(pad_heads(config, 1, {"wo": ArrayMatrix(x)})["wo"])
        found = quantizer(name, part, 4, 16)(exact)
        expected = solve(exact, [typical_inputs(x.T @ x)], 4, 16, asymmetric=True)
        assert np.mean(found.codes != expected.codes) < 0.01


def test_sequences_come_from_all_over_the_text() -> None:
    text = np.arange(10_000)
    found = sequences(text, 3 * SEQUENCE_TOKENS, 4096)
    assert [len(ids) for ids in found] == [SEQUENCE_TOKENS] * 3
    used = 10_000 - JUDGED_TOKENS  # because the text that judges the result must not guide it
    assert (found[0][0], found[-1][-1]) == (0, used - 1)
    assert judged_ids(text, 4096) == list(range(used, 10_000))
    everything = [token for ids in sequences(text, 1 << 20, 8) for token in ids]
    assert everything == list(range(used))
