"""Batches on ggml beside the logits of whole texts; tests/blackbox/test_tokens.py has other answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architectures import SIZES, write
from installed import needs_ggml
from loading import load_fixed

import stem_edge
from stem_edge.config import ModelConfig

# Rounding of hidden states to 8 bits differs: measured 0.12 of logits up to 4.3.
TOLERANCE_OF_CODES = 0.3
WIDE = {"dim": 256, "d_ff": 256, "head_dim": 64, "n_heads": 4}


@needs_ggml
@pytest.mark.slow
@pytest.mark.parametrize("weights", ["q4_k_m", "q6_k", "q4_0", "q8_0", "f16"])
def test_kernels_for_any_number_of_tokens(weights: str, tmp_path: Path) -> None:
    """Sequences end one after the other, so that steps have 40, 39, ... and 1 of them."""
    write(tmp_path / "checkpoint", ModelConfig(**(SIZES | WIDE)))
    options: dict[str, Any] = {"engine": "ggml", "type": weights, "rows": "fp32"}
    stem_edge.export_bundle(tmp_path / "checkpoint", tmp_path / "bundle", **options)
    rng, found = np.random.default_rng(0), dict[int, list[tuple[int, float]]]()
    texts = [rng.integers(0, 90, 1 + n % 22).tolist() for n in range(40)]
    params = [stem_edge.SamplingParams(max_new_tokens=n, logprobs=0) for n in range(2, 42)]
    with load_fixed(tmp_path / "bundle", threads=1, sequences=40) as model:
        for number, chunk in model.generate_many(texts, params, sequences=40):
            pairs = [(one.token_id, one.logprob) for one in chunk.logprobs or ()]
            found.setdefault(number, []).extend(pairs)
        assert model.stats.tokens_per_step > 8
        for text, answer in zip(texts, (found[n] for n in range(40)), strict=True):
            ids = [token for token, _ in answer]
            logits = model.logits([*text, *ids])[len(text) - 1 : -1].astype(np.float64)
            logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
            expected = logits[np.arange(len(ids)), ids]
            assert np.abs(expected - [p for _, p in answer]).max() < 2 * TOLERANCE_OF_CODES
