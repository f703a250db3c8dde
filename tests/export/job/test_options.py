"""Options of an export, and those that are refused by name before anything is read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import stem_edge
from stem_edge.errors import ExportError, InputError
from stem_edge.export.job.options import ExportOptions
from stem_edge.export.job.recipe import Target

GGUF = {"engine": "gguf"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backbone": "int3"}, "backbone is 'int3'; expected one of fp32, int8, int4"),
        ({"tables": "q4"}, "tables is 'q4'; expected one of fp32, fp16, int8, int4"),
        ({"block_size": 48}, "block_size is 48; expected one of 16, 32, 64, 128, 256"),
        ({"group_size": 7}, "group_size is 7"),
        ({"threads": 0}, "threads is 0"),
        ({"max_kl": -0.1}, "max_kl is -0.1; expected 0 nats or more"),
        ({"max_kl": float("nan")}, "max_kl is nan"),
        ({"bits": {"tail": 8}}, "a kind of matrix in bits is 'tail'; expected one of embedding"),
        ({"bits": {"head": 5}}, "bits of head is 5; expected one of 32, 8, 4"),
        ({"quantizer": "magic"}, "quantizer is 'magic'; expected one of rtn, gptq"),
        ({"quality": "best"}, "quality is 'best'; expected one of small, balanced, near-lossless"),
        ({"quality": "small", "size": "1GB"}, "quality and size: each chooses the types"),
        ({"size": "1GB", "backbone": "int8"}, "size and backbone: each chooses the types"),
        ({"size": "much"}, "size 'much' is not understood"),
        ({"calibration_tokens": 0}, "calibration_tokens is 0; expected at least 1"),
        ({"backbone": "fp32", "quantizer": "rtn"}, "fp32 backbone"),
        ({"backbone": "fp32", "asymmetric": True}, "fp32 backbone"),
        ({"engine": "torch"}, "engine is 'torch'; expected one of onnx, gguf"),
        (
            {"engine": "onnx", "backbone": "q4_0"},
            r"'q4_0'; expected one of fp32, int8, int4 with the engine onnx; q4_0 needs the engine",
        ),
        (
            GGUF | {"backbone": "q2"},
            "backbone is 'q2'; expected one of f32, f16, q8_0, .* engine gguf$",
        ),
        (
            GGUF | {"backbone": "int4"},
            r"'int4'; expected one of f32, .*q4_0 with the engine gguf; int4 needs the engine onnx",
        ),
        ({"backbone": "q4_0", "head": "int8"}, "^head: for the engine onnx"),
        (GGUF | {"bits": {"head": 8}}, "^bits: "),
        (GGUF | {"block_size": 128}, "^block_size: "),
        (GGUF | {"asymmetric": True}, "^asymmetric: "),
        (GGUF | {"quantizer": "rtn", "prefill_graph": False}, "^quantizer, prefill_graph: for the"),
        (GGUF | {"quality": "small"}, "^quality: for the engine onnx only"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((ExportError, InputError), match=message):
        stem_edge.export_bundle(tmp_path / "no checkpoint", tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "engine", "weights"),
    [
        ({}, "onnxruntime", "int4"),
        ({"backbone": "int8"}, "onnxruntime", "int8"),
        ({"backbone": "q8_0"}, "ggml", "q8_0"),
        (GGUF, "ggml", "q4_k_m"),
        ({"engine": "onnx"}, "onnxruntime", "int4"),
        ({"quality": "near-lossless"}, "onnxruntime", "int8"),
    ],
)
def test_the_engine_follows_from_the_type(
    options: dict[str, Any], engine: str, weights: str
) -> None:
    found = ExportOptions(**options)
    assert (found.runs_on, found.format.weights) == (engine, weights)


@pytest.mark.parametrize(
    ("options", "target"),
    [
        ({}, Target(nats=0.042)),
        ({"quality": "small"}, Target(nats=0.1)),
        ({"quality": "small", "max_kl": 0.01}, Target(nats=0.1)),
        ({"max_kl": 0.01}, Target(nats=0.005)),
        ({"size": "2MB", "max_kl": 0.01}, Target(nbytes=2_000_000)),
        ({"quality": "near-lossless"}, None),
        ({"backbone": "int4"}, None),
        ({"backbone": "int4", "max_kl": 0.01}, None),
        (GGUF, None),
    ],
)
def test_types_are_chosen_for_one_target(options: dict[str, Any], target: Target | None) -> None:
    assert ExportOptions(**options).target == target


def test_usual_types_that_are_far_are_tried_with_8_bits() -> None:
    closer = ExportOptions().closer(0.6)
    assert closer is not None and closer.quality == "near-lossless"


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({}, 0.5),
        ({"accept_far": True}, math.inf),
        ({"max_kl": 0.1}, 0.1),
        ({"max_kl": 2.0, "accept_far": True}, 2.0),
    ],
)
def test_the_farthest_that_is_kept(options: dict[str, Any], bound: float) -> None:
    assert ExportOptions(**options).bound == bound


@pytest.mark.parametrize(
    ("options", "nats", "aim"),
    [
        ({"max_kl": 0.04}, 0.07, 0.2),  # 0.7 of what is left of 0.5
        ({"max_kl": 0.04, "aim": 0.2}, 0.05, 0.0),
        ({"max_kl": 0.04, "aim": 0.0}, 0.05, None),
        ({"max_kl": 0.04, "quality": "small"}, 0.05, None),
        ({"max_kl": 0.04, "size": "2MB"}, 0.05, None),
        ({"max_kl": 0.04, "backbone": "int8"}, 0.05, None),
        ({"backbone": "int8"}, 0.6, None),
        ({"quality": "small"}, 0.6, None),
    ],
)
def test_types_closer_to_the_limit(options: dict[str, Any], nats: float, aim: float | None) -> None:
    closer = ExportOptions(**options).closer(nats)
    assert (None if closer is None else closer.aim) == (None if aim is None else pytest.approx(aim))
