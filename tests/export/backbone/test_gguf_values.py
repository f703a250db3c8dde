"""Statistics of channels over a calibration text, and ggml's quantizers with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architectures import HASHED, SIZES
from architectures import write as write_variant
from matrices import in_memory
from whole_model import forward

from stem_edge.config import ModelConfig
from stem_edge.export.backbone.gguf_values import TensorSource, encoder
from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.checkpoints.readers import read_checkpoint
from stem_edge.export.quantization.hidden_states import importance_vectors
from stem_edge.ggml import types
from stem_edge.ggml.library import Ggml
from stem_edge.ggml.types import TensorType
from stem_edge.numerics.quantize import F32

gguf = pytest.importorskip("gguf")
IDS = [[5, 9, 200, 5, 31, 7], [80, 81, 82, 5]]
QUIETEST = 0.001  # least energy of a channel, as a share of the mean


def mean_squares(checkpoint: Checkpoint) -> dict[str, F32]:
    """Statistics of every input of the reference model, over all sequences at once."""
    seen: dict[str, list[F32]] = {}
    for ids in IDS:
        see = lambda name, x: seen.setdefault(name, []).append(x)
        forward(checkpoint.config, checkpoint.backbone, checkpoint.rows, ids, see)
    return {name: np.mean(np.concatenate(parts) ** 2, axis=0) for name, parts in seen.items()}


def test_vectors_are_the_mean_squares_of_the_inputs(tiny_checkpoint: Path) -> None:
    checkpoint = read_checkpoint(tiny_checkpoint)
    found, expected = importance_vectors(checkpoint, IDS), mean_squares(checkpoint)
    inputs = {"layers.0.wk": "layers.0.qkv", "layers.1.wo": "layers.1.wo", "head": "head"}
    inputs |= {"layers.0.up": "layers.0.gate", "layers.2.gate": "layers.2.gate"}
    inputs |= {"layers.0.down": "layers.0.down", "layers.2.down": "layers.2.down"}
    for name, source in inputs.items():
        mean = expected[source]
        assert np.allclose(found[name], mean + 0.01 * mean.mean(), rtol=1e-4), name
    assert np.array_equal(found["layers.1.wq"], found["layers.1.wv"])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tied_head": True},
        {"row_rank": 16, "stem_ffn": "stem-gate"},
        HASHED,
        {"stem_layers": ()},
    ],
)
def test_every_matrix_has_one(fields: dict[str, Any], tmp_path: Path) -> None:
    config = ModelConfig(**(SIZES | fields))
    checkpoint = read_checkpoint(write_variant(tmp_path / "checkpoint", config)[0])
    shapes = {n: s for n, s in config.backbone_shapes().items() if len(s) == 2}
    if not config.tied_head:
        del shapes["embedding"]
    found = importance_vectors(checkpoint, IDS)
    assert found.keys() == shapes.keys()
    for name, vector in found.items():
        assert vector.shape == shapes[name][1:] and vector.dtype == np.float32
        assert np.isfinite(vector).all() and vector.min() > 0
        assert vector.min() > QUIETEST * vector.mean()


def quantized(ggml: Ggml, rows: F32, type: TensorType, importance: F32 | None) -> F32:
    tensor = TensorSource("name", in_memory(rows), type, importance)
    coded = encoder(ggml, tensor)(rows).reshape(len(rows), -1)
    found: F32 = gguf.quants.dequantize(coded, gguf.GGMLQuantizationType(type.number))
    return found


@pytest.mark.parametrize("type", [types.Q4_0, types.Q4_K, types.Q5_K, types.Q6_K])
def test_weighted_errors_fall(type: TensorType, ggml: Ggml) -> None:
    random = np.random.default_rng(0)
    rows = random.standard_normal((64, 512), np.float32)
    importance = np.asarray(random.lognormal(0, 2, 512), np.float32)
    plain, weighted = (quantized(ggml, rows, type, vector) for vector in (None, importance))
    errors = [float((importance * (rows - found) ** 2).sum()) for found in (plain, weighted)]
    assert errors[1] < 0.9 * errors[0]
