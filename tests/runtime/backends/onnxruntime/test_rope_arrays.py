"""RoPE tables: shared by contexts, computed as far as they have come."""

from __future__ import annotations

import numpy as np
from configs import config

from stem_edge.layers import LayerKind
from stem_edge.runtime.backends.onnxruntime.loaded import (
    ROPE_BLOCK,
    RopeArrays,
    padded_ropes,
)

# Heads that are padded, and two kinds of rotation.
KIND = LayerKind(layers=(0,), rope_theta=77.0)
MODEL = config(head_dim=20, layer_kinds=(KIND,))
LENGTH = 3 * ROPE_BLOCK + 7


def test_they_are_the_tables_as_far_as_asked_for() -> None:
    arrays = RopeArrays(MODEL, LENGTH)
    whole = padded_ropes(MODEL, LENGTH)
    assert len(whole) == 4
    for positions in (1, ROPE_BLOCK, ROPE_BLOCK + 1, LENGTH):
        arrays.fill(positions)
        for name, value in arrays.values().items():
            assert np.array_equal(value.numpy()[:positions], whole[name][:positions])


def test_little_is_computed_for_a_short_text_in_a_long_context() -> None:
    arrays = RopeArrays(MODEL, 1 << 20)
    arrays.fill(9)
    assert not any(value.numpy()[ROPE_BLOCK:].any() for value in arrays.values().values())
