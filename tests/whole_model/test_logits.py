"""Logits of every model, in every way of computing them: those of an independent reference.

Of random STEM models, that is torch_model.py; of Gemmas, transformers, whose logits for the
checkpoints in tests/data/conformance lie beside these. test_conformance.py does the same with
checkpoints of public STEM trainers, without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from architectures import VARIANTS
from conformance import stepwise
from exact_models import (
    GEMMA_3N,
    GEMMAS,
    TOLERANCE_OF_GEMMA,
    Exact,
    exact_stem,
    export_exact,
    off,
    published,
)
from hf_folders import make_gemma3n, written
from installed import bundle_for

import stem_edge
from stem_edge.graph.formats import EngineName
from stem_edge.runtime import Model

SLIDING, FULL = "sliding_attention", "full_attention"
KINDS_OF_3N: dict[str, dict[str, Any]] = {
    "3n, nobody borrows": {"num_kv_shared_layers": 0},
    "3n, other layers": {"layer_types": [FULL, SLIDING, SLIDING, FULL, SLIDING, FULL]},
    "3n, the last of three streams is active": {"altup_num_inputs": 3, "altup_active_idx": 2},
    "3n, the active stream is not scaled": {"altup_correct_scale": False},
    "3n, no sparsity, wide FFNs": {
        "activation_sparsity_pattern": [0.0] * 6,
        "intermediate_size": [160, 192, 160, 192, 64, 160],
    },
    "3n, odd heads, head of its own": {"head_dim": 12, "tie_word_embeddings": False},
}


def random_3n(folder: Path, changes: dict[str, Any]) -> Exact:
    model = make_gemma3n(**{"vocab_size": 310, "vocab_size_per_layer_input": 300} | changes)
    checkpoint = written(model, folder / "checkpoint")
    ids = np.random.default_rng(1).integers(310, size=40).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    path = export_exact(checkpoint, folder / "bundle", ggml=False)
    return Exact(path, [(ids, expected)], TOLERANCE_OF_GEMMA)


class Way(NamedTuple):
    """A way of computing logits."""

    stepwise: bool = False
    slots: int | None = None


WAYS = {
    "at once": Way(),
    "token by token": Way(stepwise=True),
    "with 4 slots": Way(slots=4),
    "with 8 slots": Way(slots=8),
    "token by token with 4 slots": Way(True, 4),
    "token by token with 8 slots": Way(True, 8),
}
ONCE, TOKENS, FEW, *_ = WAYS
ONE_BY_ONE = {ONCE, TOKENS}
# What "all at once" has not.
FAST = {"stem", "dense", "low rank, gate", "hash-moe", "RoPE, linear", "RoPE, llama3", "tied head"}
FAST |= {"soft cap and head bias", "all at once", "mixture of rows", "Engram"}
FAST_3N = {"3n, no sparsity, wide FFNs", "3n, odd heads, head of its own"}
# How each model is made, its ways, and those of them that run in `make test`.
MODELS: dict[str, tuple[Callable[[Path], Exact], set[str], set[str]]] = {
    **{
        name: (
            partial(exact_stem, changes=changes),
            {
                *ONE_BY_ONE,
                "with 8 slots" if "row_window" in changes else FEW,
            }
            - ({FEW} if "ngram_order" in changes else set()),
            {ONCE} if name in FAST else set[str](),
        )
        for name, changes in VARIANTS.items()
    },
    **{name: (partial(published, name=name), {*WAYS}, ONE_BY_ONE) for name in GEMMAS[:2]},
    GEMMA_3N: (partial(published, name=GEMMA_3N), {*WAYS}, {ONCE, "token by token with 4 slots"}),
    **{
        name: (partial(random_3n, changes=changes), ONE_BY_ONE, ONE_BY_ONE)
        for name, changes in KINDS_OF_3N.items()
    },
}


def cells() -> Iterator[Any]:
    """Yield each model with each of its ways."""
    for name, (_, ways, fast) in MODELS.items():
        for way in WAYS:
            if way in ways:
                slow = way not in fast or (name in KINDS_OF_3N and name not in FAST_3N)
                yield pytest.param(name, way, marks=[pytest.mark.slow] * slow)


@pytest.fixture(scope="module")
def exact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exact:
    return MODELS[request.param][0](tmp_path_factory.mktemp("exact"))


def load(exact: Exact, engine: EngineName, **options: Any) -> Model:
    if not bundle_for(exact.path, engine).exists():
        pytest.skip(f"no backbone for {engine}")
    return stem_edge.load(bundle_for(exact.path, engine), engine=engine, **options)


@pytest.mark.parametrize(("exact", "way"), [*cells()], indirect=["exact"])
def test_logits_are_those_of_the_reference(exact: Exact, way: str, engine: EngineName) -> None:
    step, slots = WAYS[way]
    tables = stem_edge.open_bundle(exact.path).manifest.tables
    with load(exact, engine, slots=slots if tables else None) as model:
        for ids, expected in exact.texts:
            found = stepwise(model, ids) if step else model.logits(ids)
            assert off(found, expected) < exact.tolerance


@pytest.mark.parametrize("exact", GEMMAS, indirect=True)
def test_a_greedy_token_is_the_references_best(exact: Exact, engine: EngineName) -> None:
    with load(exact, engine) as model:
        for prompt, expected in exact.texts:
            for length in (1, len(prompt) // 2, len(prompt)):
                (chunk,) = model.generate(prompt[:length], max_new_tokens=1)
                assert chunk.token_ids == [int(expected[length - 1].argmax())]


@pytest.mark.parametrize("exact", GEMMAS, indirect=True)
def test_a_greedy_text_is_that_of_the_whole_logits(exact: Exact, engine: EngineName) -> None:
    prompt = exact.ids[:9]
    with load(exact, engine) as model:
        chunks = list(model.generate(prompt, max_new_tokens=8))
    with stem_edge.load(exact.path, engine="onnxruntime") as model:
        text = prompt
        for token in (token for chunk in chunks for token in chunk.token_ids):
            assert token == int(model.logits(text)[-1].argmax())
            text = [*text, token]


@pytest.mark.parametrize("exact", GEMMAS, indirect=True)
@pytest.mark.parametrize("wanted", [0, 1, 5])
def test_chunks_and_the_positions_that_are_wanted(
    exact: Exact, engine: EngineName, wanted: int
) -> None:
    """Run chunks in which layers that borrow K and V skip the positions before the wanted ones."""
    ids = np.array(exact.ids)
    with load(exact, engine) as model:
        step, context = model.engine.step, model.engine.open_context(len(ids))
        step(context, ids[:17], 0)
        found = step(context, ids[17:40], wanted)
        assert off(found, exact.expected[40 - wanted : 40]) < exact.tolerance
        assert off(step(context, ids[40:], 1), exact.expected[-1:]) < exact.tolerance
