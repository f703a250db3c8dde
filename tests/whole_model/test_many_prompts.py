"""Many prompts at a time: the tokens of each alone, on every engine."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exact_models import GEMMA, GEMMA_3N, published
from installed import DEMO
from loading import load_fixed
from stores import rows_of
from threads import together as in_threads
from threads import tokens
from tiers import slow_but

import stem_edge
from stem_edge.errors import RowReadError
from stem_edge.graph.formats import EngineName
from stem_edge.runtime.model import Model

COUNTRIES = ["France", "Brazil", "Egypt", "Japan", "Peru", "Kenya", "Italy", "Spain", "Mexico"]
TEXTS = [f"The capital of {name} is" for name in COUNTRIES]
TEXTS += ["What is the currency of Mexico? It is the", "The", "The language of Egypt is " * 8]


DEVICE: Any = {"device_memory": "1GB"}  # the CPU stands in for a device


@pytest.fixture(params=[{}, DEVICE], ids=["cpu", "device"])
def model(request: pytest.FixtureRequest) -> Any:
    """The demo, with room for several contexts."""
    with load_fixed(DEMO, sequences=8, **request.param) as loaded:
        yield loaded


@pytest.mark.parametrize(
    ("options", "exact"),
    [
        ({}, False),
        ({"top_k": 3, "seed": 2, "logprobs": 2}, True),
        pytest.param({}, True, marks=pytest.mark.slow),
        pytest.param({"top_k": 3, "seed": 2, "logprobs": 2}, False, marks=pytest.mark.slow),
        pytest.param({"temperature": 0.8, "seed": 5}, True, marks=pytest.mark.slow),
        pytest.param({"temperature": 0.8, "seed": 5}, False, marks=pytest.mark.slow),
    ],
)
def test_texts_are_those_of_generate(model: Model, options: dict[str, Any], exact: bool) -> None:
    options = options | {"max_new_tokens": 24}
    expected = [list(model.generate(text, **options)) for text in TEXTS]
    found: list[list[Any]] = [[] for _ in TEXTS]
    for number, chunk in model.generate_many(iter(TEXTS), exact=exact, **options):
        found[number].append(chunk)
    if exact:
        assert found == expected
    for ours, theirs in zip(found, expected, strict=True):
        assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
    assert model.stats.sequences == len(TEXTS) and model.stats.tokens_per_step > 3
    assert f"({len(TEXTS)} sequences, " in model.stats.line()


def test_lists_of_texts(model: Model) -> None:
    assert model.generate_texts(TEXTS[:3], max_new_tokens=10) == [
        model.generate_text(text, max_new_tokens=10) for text in TEXTS[:3]
    ]


@pytest.mark.parametrize("slots", [8, None])
def test_tokens_of_both_engines(tiny: Path, engine: EngineName, slots: int | None) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 290) for _ in range(rng.randrange(1, 30))] for _ in range(12)]
    with load_fixed(tiny, engine=engine, slots=slots, sequences=6, threads=1) as model:
        expected = [tokens(model, prompt) for prompt in prompts]
        for exact in (True, False):
            found: list[list[int]] = [[] for _ in prompts]
            many = model.generate_many(prompts, sequences=6, exact=exact, max_new_tokens=12)
            for number, chunk in many:
                found[number] += chunk.token_ids
            assert found == expected


@pytest.mark.parametrize("sequences", slow_but([1, 3], [1, 2, 3, 6]))
@pytest.mark.parametrize("name", slow_but(["demo"], ["demo", GEMMA, GEMMA_3N]))
def test_a_devices_memory_is_that_of_the_plan(name: str, sequences: int, tmp_path: Path) -> None:
    """Each sequence has a context, and takes turns with the others."""
    path = DEMO if name == "demo" else published(tmp_path, name, ggml=False).path
    options = DEVICE | {"sequences": sequences, "warm_start": False}
    needed = stem_edge.memory_plan(path, **options).device
    assert needed is not None
    with load_fixed(path, **options | {"device_memory": needed.total}) as model:
        assert model.plan.device == replace(needed, limit=needed.total)
        backend: Any = model.engine.backend
        before: int = backend.memory.nbytes

        def held() -> int:
            """Bytes of contexts; all arrays fit the plan."""
            backend.memory.collect()
            assert backend.memory.nbytes <= needed.total - needed.weights
            return int(backend.memory.nbytes) - before

        expected = [model.generate_text(text, max_new_tokens=12) for text in TEXTS]
        found, most = [""] * len(TEXTS), 0
        for number, chunk in model.generate_many(TEXTS, max_new_tokens=12):
            found[number] += chunk.text
            most = max(most, held())
        assert found == expected
        assert 0 < most <= needed.total - needed.weights - needed.row_cache
        gc.collect()
        assert held() == 0


@pytest.mark.parametrize("options", [{"speculate": True}, {"draft": DEMO}])
@pytest.mark.parametrize("sequences", slow_but([5], [1, 5]))
def test_guesses_and_batches_on_a_device(options: dict[str, Any], sequences: int) -> None:
    with load_fixed(DEMO, sequences=sequences, **DEVICE, **options) as model:
        expected = [model.generate_text(text, max_new_tokens=12) for text in TEXTS]
        assert model.generate_texts(TEXTS, max_new_tokens=12) == expected


def test_other_calls_on_a_device_do_not_hold_a_batch_up() -> None:
    """Another batch that has not begun, and a generation half way."""
    with load_fixed(DEMO, sequences=5, **DEVICE) as model:
        waiting, half = model.generate_many(TEXTS), model.generate(TEXTS[0])
        next(half)
        expected = [model.generate_text(text, max_new_tokens=12) for text in TEXTS]
        assert model.generate_texts(TEXTS, max_new_tokens=12) == expected
        assert model.stats.tokens_per_step > 2
        waiting.close()
        half.close()


def test_generations_at_the_same_time(model: Model) -> None:
    """Eight threads generate while another runs a batch."""
    prompts = [model.tokenize(text) for text in TEXTS]
    expected = [tokens(model, prompt) for prompt in prompts]

    def many() -> list[list[int]]:
        found: list[list[int]] = [[] for _ in prompts]
        for number, chunk in model.generate_many(prompts, max_new_tokens=12):
            found[number] += chunk.token_ids
        return found

    calls: list[Any] = [partial(tokens, model, prompt) for prompt in prompts[:8]]
    *alone, batch = in_threads([*calls, many])
    assert [alone, batch] == [expected[:8], expected]
    model._prefixes.make_room()
    assert model._prefixes._taken() == 0


def test_a_record_that_cannot_be_read_ends_only_those_that_need_it(tiny_bundle: Path) -> None:
    prompts = [[5, 6, start, start + 1] for start in range(10, 250, 40)]
    with load_fixed(tiny_bundle, slots=8, warm_start=False, sequences=6) as model:
        expected = [tokens(model, prompt) for prompt in prompts]
        used = [[*prompt, *answer[:-1]] for prompt, answer in zip(prompts, expected, strict=True)]
        bad = next(t for t in used[2][5:] if sum(t in one for one in used) < len(used))
        store = rows_of(model).store
        real = type(store).read.__get__(store)

        def read(numbers: Any, whole: Any = None) -> Any:
            if bad in numbers:
                raise RowReadError(f"record {bad} is damaged")
            return real(numbers, whole)

        store.read = read  # type: ignore[method-assign]
        cache = rows_of(model).cache
        cache.forget(np.array([bad]))
        model.forget_prefixes()
        found: dict[int, Any] = {}
        for number, chunk in model.generate_many(prompts, sequences=6, max_new_tokens=12):
            found.setdefault(number, []).extend(chunk.token_ids)
            if chunk.error is not None:
                found[number] = chunk.error
        for number, answer in enumerate(expected):
            if bad in used[number]:
                assert isinstance(found[number], RowReadError)
            else:
                assert found[number] == answer
        with pytest.raises(RowReadError):
            model.generate_texts(prompts, max_new_tokens=12)
