"""Products of packed codes with whole steps, on this processor's kernels: without torch, for others, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gemma_checkpoint import describe, write_gemma
from msgspec.structs import replace

from stem_edge.export.backbone.weight_file import WeightFile
from stem_edge.export.checkpoints.readers import read_checkpoint
from stem_edge.export.job.files import create_file
from stem_edge.export.quantization.quantizers import nearest
from stem_edge.export.quantization.streams import MatrixReader
from stem_edge.graph import names as io
from stem_edge.graph.encoder import encode
from stem_edge.graph.formats import BackboneFormat, MatrixKind, WeightType
from stem_edge.graph.ir import Graph
from stem_edge.graph.special.steps import SteppedProducts
from stem_edge.graph.weight_plan import WeightPlan
from stem_edge.numerics.matrix import whole
from stem_edge.runtime.backends.onnxruntime.providers.session import (
    WHOLE_STEPS,
    GraphSource,
    new_session,
)

SMALL: dict[str, Any] = {
    "vocab_size": 300, "vocab_size_per_layer_input": 300, "head_dim": 16, "global_head_dim": 32,
    "intermediate_size": 48, "num_attention_heads": 2, "hidden_size_per_layer_input": 16,
    "num_hidden_layers": 7, "num_kv_shared_layers": 2,
}  # fmt: skip
NAME = "layers.0.gate"


# A part of a block, whole blocks and 2, 12 and 20 columns beyond them, whole ones and most of a block.
WIDTHS = (16, 96, 256, 1536, 2560, 2000)


@pytest.mark.parametrize(
    ("name", "bits", "width"),
    [(NAME, bits, width) for bits in (2, 4, 8) for width in WIDTHS]
    + [(io.LOGITS, 2, width) for width in WIDTHS],
)
def test_products_of_whole_numbers_are_exact(
    name: str, bits: int, width: int, tmp_path: Path
) -> None:
    stated = describe("gemma-4-e2b", packed=True, **SMALL, hidden_size=width)
    rules = stated["quantization_config"]["module_quant_configs"]
    stated["quantization_config"]["module_quant_configs"] = {"mlp": {"num_bits": bits}} | rules
    source = read_checkpoint(write_gemma(tmp_path / "packed", stated))
    kind: MatrixKind
    kind, part, place = ("gate", NAME, NAME) if name == NAME else ("head", "embedding", "head")
    matrix, (step, _) = source.backbone[part], source.config.ranges[place]
    config = replace(source.config, ranges={place: (step, 0.0)})
    types: dict[int, WeightType] = {2: "int2", 4: "int4", 8: "int8"}
    format = BackboneFormat(weights=types[bits], head="int2", block_size=128)
    graph, plan = Graph(), WeightPlan("g.data")
    x = graph.input("x", np.float32, [1, "T", width])
    graph.output(name, np.float32, [1, "T", matrix.shape[0]])
    products = SteppedProducts(graph, plan, format, config)
    assert products.product(name, kind, x, (part,), (len(whole(matrix)), width)) == name
    weights = MatrixReader(1, lambda _: None)
    with create_file(tmp_path / plan.file) as file:
        WeightFile(file, source.backbone, weights, nearest(format)).write(plan)
    whole_steps = np.random.default_rng(0).integers(-127, 128, (1, 9, width))
    session = new_session(GraphSource("g", encode(graph), tmp_path), 1, settings=WHOLE_STEPS)
    (found,) = session.run(None, {"x": (whole_steps * step).astype(np.float32)})
    expected = whole_steps * np.float64(step) @ whole(matrix).T.astype(np.float64)
    np.testing.assert_allclose(found, expected, atol=5e-5 * np.abs(expected).max(), rtol=0)
