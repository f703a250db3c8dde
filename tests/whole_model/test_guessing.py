"""Greedy answers with guesses, on models of every kind: those of plain decoding but for near ties."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance import CASES
from exact_models import GEMMA, GEMMA_3N, published
from guessing import CHEAP, ToldSpeculation
from installed import DEMO, bundle_for
from tiers import slow_but

import stem_edge
from stem_edge.graph.formats import EngineName
from stem_edge.runtime import Model
from stem_edge.runtime.speculation.speculation import Speculation

MODELS = slow_but([GEMMA], [*CASES, GEMMA_3N, GEMMA])
PROMPT, NEW = 20, 24
FP32_TIE, INT4_TIE = 1e-3, 0.1  # most that rounding moves a logit here


@pytest.fixture(scope="module", params=MODELS)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("guessing"), request.param).path


def differs(
    model: Model, prompt: Sequence[int], speculation: Speculation | None, tie: float
) -> bool:
    """Tell whether guesses change a greedy answer, which they may where two logits nearly tie."""
    model.speculate(None)
    options: dict[str, Any] = {"max_new_tokens": NEW, "logprobs": 2}
    plain = [one for c in model.generate(prompt, **options) for one in c.logprobs or ()]
    ids = [one.token_id for one in plain]
    model.speculate(speculation or ToldSpeculation([*prompt, *ids], 5))
    found = [one for c in model.generate(prompt, **options) for one in c.logprobs or ()]
    for one, other in zip(plain, found, strict=False):
        if one.token_id != other.token_id:
            assert one.top[0][1] - one.top[1][1] < tie
            return True
    assert len(found) == len(plain)
    return False


def test_models_of_every_kind(bundle: Path, engine: EngineName) -> None:
    if not bundle_for(bundle, engine).exists():
        pytest.skip(f"no backbone for {engine}")
    drafted = changed = 0
    with stem_edge.load(bundle_for(bundle, engine), engine=engine, threads=1) as model:
        rng = np.random.default_rng(0)
        for _ in range(6):
            prompt = rng.integers(0, min(90, model.config.vocab_size), PROMPT).tolist()
            changed += differs(model, prompt, None, FP32_TIE)
            drafted += model.stats.drafted_tokens
    assert drafted > 20 and changed <= 1


@pytest.mark.parametrize(
    "kv", ["fp32", *(pytest.param(kv, marks=pytest.mark.slow) for kv in ("fp16", "int8"))]
)
def test_the_demo(kv: Any) -> None:
    changed, drafted = 0, 0
    texts = ("The capital of {} is", "What is the currency of {}? It is the", "{} borders")
    names = ("France", "Mexico", "Spain", "Egypt", "Peru")
    with stem_edge.load(DEMO, threads=1, kv=kv) as model:
        for prompt in (text.format(name) for text in texts for name in names):
            ids = model.tokenize(prompt)
            for speculation in (None, Speculation(CHEAP, 7)):
                changed += differs(model, ids, speculation, INT4_TIE)
                drafted += model.stats.drafted_tokens
    assert drafted > 100 and changed <= 2
