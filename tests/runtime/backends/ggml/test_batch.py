"""Batches on ggml, beside the same sequences alone; tests/blackbox/test_tokens.py has whole answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architectures import SIZES, write
from beside import Beside
from installed import needs_ggml
from loading import load_fixed

import stem_edge
from stem_edge.config import ModelConfig
from stem_edge.runtime import Model
from stem_edge.runtime.backends.ggml.backend import GgmlContext
from stem_edge.runtime.backends.interface import NotFiniteError

pytestmark = needs_ggml
LENGTH = 105
# Rounding of hidden states to 8 bits differs: measured 0.12 of logits up to 4.3 with repacked Q4_K.
TOLERANCE_OF_CODES = 0.3
WIDE = {"dim": 256, "d_ff": 256, "head_dim": 64, "n_heads": 4}


@pytest.fixture
def model(tiny_gguf: Path) -> Iterator[Model]:
    with load_fixed(tiny_gguf, context_length=LENGTH) as loaded:
        yield loaded


def joined(both: Beside, *lengths: int) -> Beside:
    """Let prompts of random tokens join."""
    random = np.random.default_rng(0)
    for length in lengths:
        both.join(random.integers(0, 90, length).tolist())
    return both


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["q4_k_m", "q6_k", "q4_0"])
@pytest.mark.parametrize("repack", [False, True])
def test_kernels_for_any_number_of_tokens(weights: str, repack: bool, tmp_path: Path) -> None:
    write(tmp_path / "checkpoint", ModelConfig(**(SIZES | WIDE)))
    options: dict[str, Any] = {"engine": "ggml", "type": weights, "rows": "fp32"}
    stem_edge.export_bundle(tmp_path / "checkpoint", tmp_path / "bundle", **options)
    with load_fixed(tmp_path / "bundle", repack=repack, threads=1) as model:
        both = joined(Beside(model, 64, TOLERANCE_OF_CODES, 40), *range(1, 41))
        for count in (1, 2, 3, 4, 7, 8, 9, 11, 12, 31, 32, 40):
            both.step(0, count)


def test_a_sequence_that_is_not_finite_is_told_by_its_position(model: Model) -> None:
    both = joined(Beside(model, LENGTH), 30, 2, 17)
    damaged = model.engine.open_context(LENGTH)
    model.engine.step(damaged, np.arange(7))
    assert isinstance(damaged.backend, GgmlContext)
    for array in damaged.backend.kv.kept(7):
        array[...] = 0xFF
    both.batch.join(damaged.backend, 7)
    with pytest.raises(NotFiniteError, match="position 7"):
        positions = np.array([*map(len, both.texts), 7])
        both.batch.begin(0, np.ones(4, np.int64), positions)
        both.batch.finish(model.engine.rows.slots(np.ones(4, np.int64), 4))
    both.batch.leave(3)
    both.step(0, 3)
