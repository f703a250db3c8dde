"""Gemma 4's own drafter: what it drafts is what transformers drafts, and no answer depends on it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from gemma_pairs import CLUSTERS, Pair, V, make_pair
from guessing import Shorter, answered
from tiers import slow_but

import stem_edge
from stem_edge.errors import BackendError
from stem_edge.graph.special.assistant import drafting
from stem_edge.graph.weight_plan import Named
from stem_edge.runtime import Model

PROMPT = np.random.default_rng(3).integers(3, 300, 40).tolist()


class Exported(NamedTuple):
    """A pair in transformers, and its bundle without any quantization."""

    pair: Pair
    path: Path


@pytest.fixture(scope="module", params=slow_but([CLUSTERS], [CLUSTERS, 0]))
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp("pair")
    pair, exact = make_pair(folder, clusters=request.param), {"type": "fp32", "rows": "fp32"}
    stem_edge.export_bundle(folder / "t", folder / "b", assistant=folder / "a", **exact)  # type: ignore[arg-type]
    return Exported(pair, folder / "b")


def transformers_drafts(pair: Pair, prompt: list[int], answer: list[int]) -> tuple[int, int]:
    """Return how many tokens transformers drafts for an answer, up to 3 for a step, and how many come true."""
    drafted = right = 0
    done = 1  # the first token comes from the prompt
    while (room := len(answer) - done - 1) > 0:
        size = 3 if room >= 3 else 1
        drafts, actual = pair.drafts([*prompt, *answer[:done]], size), answer[done:]
        same = next((n for n in range(size) if drafts[n] != actual[n]), size)
        drafted, right, done = drafted + size, right + same, done + same + 1
    return drafted, right


def test_drafts_are_those_of_transformers(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where windows have dropped tokens, and after drafts that were refused."""
    Shorter(monkeypatch)
    rng, expected, found = np.random.default_rng(0), list[int](), list[int]()
    with stem_edge.load(exported.path, threads=1, speculate=3) as model:
        for length in (20, 61, 290):
            prompt = rng.integers(3, 300, length).tolist()
            first = answered(model, prompt, max_new_tokens=1)[1]
            drafts = exported.pair.drafts([*prompt, *first], 2)
            answer = answer_with(model, prompt, [*first, *drafts])
            drafted, right = transformers_drafts(exported.pair, prompt, answer)
            if drafted == model.stats.drafted_tokens:  # else a window left less room
                expected.append(right)
                found.append(model.stats.accepted_tokens)
    assert found == expected and len(found) > 1 and sum(found) > 2


def answer_with(model: Model, prompt: list[int], start: list[int]) -> list[int]:
    """Return an answer of 5 tokens that begins so; its seed is found by trying."""
    bias: Any = dict.fromkeys(start, 100)
    for seed in range(2000):
        ids = answered(
            model, prompt, max_new_tokens=5, logit_bias=bias, temperature=8.0, seed=seed
        )[1]
        if ids[: len(start)] == start and len(ids) == 5:
            return ids
    raise AssertionError("no seed gives it")


ANSWERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 3},
    "penalized": {"repetition_penalty": 1.3, "top_k": 20, "temperature": 1.0, "seed": 3},
    "other rows": {"stem_ids": [*PROMPT[1:], 5]},
    "stopped": {"stop": ["e"], "temperature": 2.0, "seed": 5},
    "to the end of the context": {"max_new_tokens": 2000},
}


@pytest.mark.parametrize("kv", slow_but(["fp32"], ["fp32", "int8", "int4"]))
def test_answers_are_those_of_plain_decoding(
    exported: Exported, kv: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts that are computed and that are kept, alone and together."""
    Shorter(monkeypatch)
    found: list[Any] = []
    options: Any = {"threads": 1, "context_length": 256, "sequences": 2, "kv": kv}
    for speculate in (False, True):
        with stem_edge.load(exported.path, speculate=speculate, **options) as model:
            answers = [
                answered(model, prompt, **{"max_new_tokens": 60} | given)
                for given in ANSWERS.values()
                for prompt in ((PROMPT,) if "stem_ids" in given else (PROMPT, PROMPT * 2))
            ]
            assert model.stats.cached_tokens and bool(model.stats.drafted_tokens) == speculate
            prompts = [PROMPT, PROMPT[5:], PROMPT[::-1]]
            found.append((answers, model.generate_texts(prompts, max_new_tokens=16, sequences=2)))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("options", "there"),
    [
        ({}, False),  # because not prepared
        ({"speculate": False}, False),
        ({"speculate": True}, True),
        ({"speculate": 1}, True),
    ],
)
def test_its_memory_is_in_the_plan_where_it_is_loaded(
    exported: Exported, options: dict[str, Any], there: bool
) -> None:
    plain = stem_edge.memory_plan(exported.path, slots=300, threads=1, speculate=False)
    found = stem_edge.memory_plan(exported.path, slots=300, threads=1, **options)
    most = (exported.path / "assistant.data").stat().st_size + 4 * V * 17
    assert 0 < found.weights - plain.weights <= most if there else found.weights == plain.weights


@pytest.mark.parametrize(
    ("token", "said"), [(-1, "assistant drafts token -1; "), (1 << 30, "assistant at position")]
)
def test_tokens_that_are_none_are_an_error(
    token: int, said: str, exported: Exported, tmp_path: Path
) -> None:
    """Their numbers come from a file, and the rows of drafts are looked up before anything checks them."""
    path = shutil.copytree(exported.path, tmp_path / "bundle")
    manifest = stem_edge.open_bundle(path).manifest
    assert manifest.assistant is not None and manifest.backbone is not None
    plan = drafting(manifest.assistant, manifest.model, manifest.backbone)[1]
    if (order := next((one for one in plan.items if isinstance(one, Named)), None)) is None:
        pytest.skip("without clusters, all tokens are scored")
    with (path / plan.file).open("r+b") as file:
        file.seek(order.tensor.offset)
        file.write(np.full(V, token, np.int32).tobytes())
    with pytest.raises(BackendError, match=said):
        stem_edge.load(path, threads=1, speculate=True)
