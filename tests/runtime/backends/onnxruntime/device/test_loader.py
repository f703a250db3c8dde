"""Loading on a device, which the CPU stands in for: what runs, and what lies where."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from installed import DEMO
from loading import load_fixed

import stem_edge
from stem_edge.errors import InputError, MemoryPlanError, OutOfMemoryError

PROMPT = "The capital of France"
NEW = 24
SIZE = "60MB"


def text(**options: Any) -> str:
    with load_fixed(DEMO, **options) as model:
        return model.generate_text(PROMPT, max_new_tokens=NEW)


@pytest.fixture(scope="module")
def expected() -> str:
    with load_fixed(DEMO) as model:
        return model.generate_text(PROMPT, max_new_tokens=NEW)


@pytest.mark.parametrize("options", ({}, {"overlap": False}, {"resident": True}))
def test_the_text_is_that_of_the_cpu(options: dict[str, Any], expected: str) -> None:
    assert text(device_memory=SIZE, **options) == expected


def test_figures_say_where_it_ran() -> None:
    with load_fixed(DEMO, device_memory=SIZE) as model:
        assert model.stats.provider == "cpu" and model.stats.line().startswith("onnxruntime: ")
        elsewhere = replace(model.stats, provider="webgpu")
        assert elsewhere.line().startswith("onnxruntime on webgpu: ")


def test_a_limit_that_was_asked_for_is_kept() -> None:
    least = stem_edge.memory_plan(DEMO, device_memory="30MB", slots=16).device
    assert least is not None
    with load_fixed(DEMO, device_memory=least.total, slots=16) as model:
        assert model.generate_text(PROMPT, max_new_tokens=4)
        begun = []
        with pytest.raises(OutOfMemoryError, match=r"for the KV cache of \d+ tokens.* are allowed"):
            for _ in range(1000):  # each with a KV cache of its own
                begun.append(model.generate(PROMPT))
                next(begun[-1])
        begun.clear()
        assert model.generate_text(PROMPT, max_new_tokens=4)


def test_too_little_device_memory_is_refused() -> None:
    with pytest.raises(MemoryPlanError, match=r"memory of the device \(cpu\) of 1 MB"):
        load_fixed(DEMO, device_memory="1MB")


def test_ggml_has_no_devices(tiny_gguf: Path) -> None:
    with pytest.raises(InputError, match="device_memory"):
        load_fixed(tiny_gguf, device_memory=SIZE)
    with pytest.raises(InputError, match="device_memory"):
        stem_edge.memory_plan(tiny_gguf, device_memory=SIZE)
