"""RoPE in the memory of a provider: shared by contexts, computed as far as they have come."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from configs import config
from device_parts import on_device

from stem_edge.layers import LayerKind
from stem_edge.runtime.backends.onnxruntime.context import OrtContext
from stem_edge.runtime.backends.onnxruntime.loaded import ROPE_BLOCK, RopeArrays, padded_ropes
from stem_edge.runtime.backends.onnxruntime.memory import DeviceMemory
from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU

# Heads that are padded, and two kinds of rotation.
KIND = LayerKind(layers=(0,), rope_theta=77.0)
MODEL = config(head_dim=20, layer_kinds=(KIND,))
LENGTH = 3 * ROPE_BLOCK + 7


@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_they_are_the_tables_as_far_as_asked_for(
    kind: str, dtype: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = DeviceMemory(CPU)
    monkeypatch.setattr(memory, "kind", kind)
    arrays = RopeArrays(MODEL, memory, dtype, LENGTH)
    whole = padded_ropes(MODEL, LENGTH)
    assert len(whole) == 4
    for positions in (1, ROPE_BLOCK, ROPE_BLOCK + 1, LENGTH):
        arrays.fill(positions)
        for name, value in arrays.values().items():
            expected: npt.NDArray[Any] = whole[name].astype(dtype)[:positions]
            assert np.array_equal(value.numpy()[:positions], expected)


def test_little_is_computed_for_a_short_text_in_a_long_context() -> None:
    arrays = RopeArrays(MODEL, DeviceMemory(CPU), np.float32, 1 << 20)
    arrays.fill(9)
    assert not any(value.numpy()[ROPE_BLOCK:].any() for value in arrays.values().values())


def test_contexts_share_them_unless_one_is_longer() -> None:
    with on_device("fp32") as parts:
        contexts = [parts.backend.open_context(length) for length in (32, 16, 64, 32)]
        ropes = [context._graphs.ropes for context in contexts if isinstance(context, OrtContext)]
        assert ropes[0] is ropes[1] and ropes[2] is ropes[3] and ropes[1] is not ropes[2]
        held = parts.memory.nbytes
        short = sum(array.nbytes for array in ropes[0]._arrays.values())
        kv = sum(array.nbytes for context in contexts[:2] for array in context.kv.arrays)  # type: ignore[attr-defined]
        del contexts[:2], ropes
        gc.collect()
        parts.memory.collect()
        assert parts.memory.nbytes == held - kv - short
