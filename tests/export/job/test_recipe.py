"""Options of an export, and those that are refused by name before anything is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import stem_edge
from stem_edge.errors import ExportError
from stem_edge.export.checkpoints.readers import read_checkpoint
from stem_edge.export.job.plan import plan_of
from stem_edge.export.job.recipe import Recipe
from stem_edge.export.job.table_plan import RowStorage

GGML = {"engine": "ggml"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"type": "int3"}, "type is 'int3'; expected one of small, balanced, near-lossless, keep"),
        ({"rows": "q4"}, "rows is 'q4'; expected one of fp32, fp16, int8, int4"),
        ({"threads": 0}, "threads is 0"),
        ({"threads": 100_000}, "threads is 100000; expected 1 to .* CPUs; leave it out"),
        ({"max_kl": -0.1}, "max_kl is -0.1; expected 0 nats or more"),
        ({"max_kl": float("nan")}, "max_kl is nan"),
        ({"engine": "torch"}, "engine is 'torch'; expected one of onnxruntime, ggml"),
        ({"type": "q4_0"}, "with the engine onnxruntime; q4_0 needs --engine ggml"),
        (GGML | {"type": "q2"}, "type is 'q2'; expected one of .*f32, f16, q8_0, .* engine ggml$"),
        (GGML | {"type": "int4"}, "with the engine ggml; int4 needs --engine onnxruntime"),
        (GGML | {"prefill_graph": True}, "^prefill_graph: for the engine onnxruntime only"),
        (GGML | {"assistant": "there"}, "^assistant: for the engine onnxruntime only"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=message):
        stem_edge.export_bundle(tmp_path / "no checkpoint", tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "weights", "nats"),
    [
        ({}, "int4", 0.033),
        ({"type": "small"}, "int4", 0.1),
        ({"type": "near-lossless"}, "int8", None),
        ({"type": "int4"}, "int4", None),
        (GGML, "q4_k_m", None),
        (GGML | {"type": "small"}, "q4_0", None),
        (GGML | {"type": "near-lossless"}, "q8_0", None),
        (GGML | {"type": "q6_k"}, "q6_k", None),
    ],
)
def test_a_type_is_one_name(
    tiny_checkpoint: Path, options: dict[str, Any], weights: str, nats: float | None
) -> None:
    found = plan_of(read_checkpoint(tiny_checkpoint), Recipe(**options))
    assert found.format.engine == options.get("engine", "onnxruntime")
    assert (found.format.weights, found.nats) == (weights, nats)


@pytest.mark.parametrize(
    ("rows", "group"), [(None, 128), ("int4", 32), ("int8", 128), ("fp16", 128), ("mixed", 128)]
)
def test_rows_have_groups_of_their_type(tiny_checkpoint: Path, rows: Any, group: int) -> None:
    found = plan_of(read_checkpoint(tiny_checkpoint), Recipe(rows=rows))
    assert found.rows == RowStorage(rows or "int8", group)
