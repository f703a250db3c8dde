"""Many prompts at a time: order, ends, cancelling, failures of one, refusals; on an engine that is real."""

from __future__ import annotations

import gc
import random
import shutil
import threading
from collections.abc import Iterator, Sequence
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from models import ORT

import stem_edge
from stem_edge.errors import InputError, RowReadError
from stem_edge.runtime import Model

PROMPTS = [[5, 6, 7, start, start + 1, *range(start % 7)] for start in range(10, 250, 22)]
NEW: dict[str, Any] = {"max_new_tokens": 9}


@pytest.fixture
def model(shared: Path) -> Iterator[Model]:
    """Few slots, so that prompts have several chunks."""
    path = models.bundle_of("stem", ORT, shared)
    with stem_edge.load(path, slots=8, sequences=4, threads=1) as model:
        yield model


def alone(model: Model, prompts: Sequence[Any], **options: Any) -> dict[int, list[int]]:
    """Return the tokens of generate for each prompt."""
    return {
        number: [t for chunk in model.generate(prompt, **options) for t in chunk.token_ids]
        for number, prompt in enumerate(prompts)
    }


def together(model: Model, prompts: Any, params: Any = None, **options: Any) -> dict[int, Any]:
    """Return the tokens of generate_many by number, or the error of a sequence that failed."""
    found: dict[int, Any] = {}
    for number, chunk in model.generate_many(prompts, params, **options):
        found.setdefault(number, []).extend(chunk.token_ids)
        if chunk.error is not None:
            found[number] = chunk.error
    return found


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 7}, {"top_k": 5, "seed": 1}])
@pytest.mark.parametrize("sequences", [1, 3])
def test_tokens_and_figures_are_those_of_generate(
    model: Model, sequences: int, sampling: Any
) -> None:
    expected = alone(model, PROMPTS, **NEW, **sampling)
    model.forget_prefixes()
    for exact in (None, True):
        found = together(model, PROMPTS, sequences=sequences, exact=exact, **NEW, **sampling)
        assert found == expected
        stats = model.stats
        assert stats.sequences == len(PROMPTS)
        assert stats.new_tokens == sum(map(len, expected.values()))
        assert stats.row_hits + stats.row_misses == (
            stats.prompt_tokens - stats.cached_tokens + stats.decoded_tokens
        )
    assert f"({len(PROMPTS)} sequences, " in stats.line()


def test_each_has_its_own_params_and_end(model: Model) -> None:
    params = [stem_edge.SamplingParams(max_new_tokens=1 + n % 5) for n in range(len(PROMPTS))]
    stop = model.detokenize(alone(model, PROMPTS[:1], **NEW)[0][1:2])
    params[0] = stem_edge.SamplingParams(max_new_tokens=50, stop=[stop])
    params[3] = stem_edge.SamplingParams(max_new_tokens=90, logprobs=2, temperature=0.5, seed=1)
    wanted = [list(model.generate(*pair)) for pair in zip(PROMPTS, params, strict=True)]
    found: list[Any] = [[] for _ in PROMPTS]
    for number, chunk in model.generate_many(PROMPTS, params):
        found[number].append(chunk)
    for ours, theirs in zip(found, wanted, strict=True):
        assert [(c.text, c.token_ids, c.finish_reason) for c in ours] == [
            (c.text, c.token_ids, c.finish_reason) for c in theirs
        ]
    assert found[0][-1].stop == stop


@pytest.mark.parametrize("exact", [None, True])
def test_sequences_end_in_every_order(model: Model, exact: bool | None) -> None:
    """Those that stay move to the places of others, also of several that end in one step."""
    expected, rng = alone(model, PROMPTS, **NEW), random.Random(3)
    for _ in range(12):
        lengths = [rng.randint(1, 9) for _ in PROMPTS]
        params = [stem_edge.SamplingParams(max_new_tokens=length) for length in lengths]
        found = together(model, PROMPTS, params, exact=exact)
        assert found == {n: expected[n][:length] for n, length in enumerate(lengths)}


def test_prompts_are_taken_in_order_as_places_become_free(model: Model) -> None:
    taken, ended, begun = 0, 0, list[int]()

    def endless() -> Iterator[list[int]]:
        nonlocal taken
        while True:
            taken += 1
            yield PROMPTS[taken % len(PROMPTS)]

    many = model.generate_many(endless(), sequences=3, **NEW)
    for number, chunk in many:
        begun += [number] * (number not in begun)
        ended += chunk.finish_reason is not None
        assert taken <= ended + 3
        if ended == 20:
            break
    many.close()
    assert begun == sorted(begun)


def test_a_token_of_each_comes_between_chunks_of_a_long_prompt(model: Model) -> None:
    """One that runs goes on while a prompt of 30 steps is computed."""
    long, order = [*range(10, 250)], list[int]()
    for number, _ in model.generate_many(iter([[5, 6], long]), max_new_tokens=40, sequences=2):
        order.append(number)
    assert order.index(1) > 5 and order[order.index(1) :].count(0) > 2


def test_a_bad_prompt_fails_alone_where_prompts_come_one_by_one(model: Model) -> None:
    expected = alone(model, [[1, 2], [3, 4]], **NEW)
    found = together(model, iter([[1, 2], [999], [3, 4]]), **NEW)
    assert (found[0], found[2]) == (expected[0], expected[1])
    assert str(found[1]).startswith("prompt 1: token id 999")

    def prompts() -> Iterator[list[int]]:
        yield [1, 2]
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        together(model, prompts(), **NEW)
    assert together(model, [[1, 2]], **NEW) == {0: expected[0]}


@pytest.mark.parametrize("answer", [False, True])
def test_a_record_that_cannot_be_read_ends_only_those_that_need_it(
    answer: bool, shared: Path, tmp_path: Path
) -> None:
    """A token of the prompt has it, or one that is generated beside others."""
    path = Path(shutil.copytree(models.bundle_of("stem", ORT, shared), tmp_path / "copy"))
    prompts = [[5, 6, start, start + 1] for start in range(10, 250, 40)]
    with stem_edge.load(path, threads=1) as model:
        expected = alone(model, prompts, **NEW)
    used = [{*prompt, *expected[number][:-1]} for number, prompt in enumerate(prompts)]
    texts = [{*expected[n]} - {*prompts[n]} if answer else {*prompts[n]} for n in range(6)]
    alike = [set().union(*used[:n], *used[n + 1 :]) for n in range(6)]
    at = next(n for n in range(2, 6) if texts[n] & used[n] - alike[n])
    bad = min(texts[at] & used[at] - alike[at])
    with stem_edge.open_tables(path) as tables:
        row = tables[np.array([bad]), tables.layers[0]].tobytes()
    (shard,) = (
        f for f in (path / "tables.zarr").rglob("*") if f.is_file() and row in f.read_bytes()
    )
    data = shard.read_bytes()
    shard.write_bytes(data.replace(row, bytes(len(row))))
    with stem_edge.load(path, slots=16, sequences=6, threads=1) as model:
        for exact, size in ((None, 8), (True, 8), (None, 4), (None, 2)):
            found = together(model, prompts, exact=exact, sequences=size, **NEW)
            assert isinstance(found.pop(at), RowReadError)
            assert found == {number: tokens for number, tokens in expected.items() if number != at}
        with pytest.raises(RowReadError):
            model.generate_texts(prompts, **NEW)
        assert together(model, prompts[:2], **NEW) == {n: expected[n] for n in (0, 1)}


@pytest.mark.parametrize("prompts", [PROMPTS, repeat([1, 2])], ids=["list", "endless"])
@pytest.mark.parametrize("taken", [0, 1, 30])
def test_calls_that_are_left_or_whose_model_is_closed(
    model: Model, prompts: Any, taken: int
) -> None:
    expected = alone(model, PROMPTS[:3], **NEW)
    many = model.generate_many(prompts, **NEW)
    assert len(list(islice(many, taken))) == taken
    assert taken == 0 or model.kv_nbytes > 0
    many.close()
    many = model.generate_many(prompts, **NEW)
    list(islice(many, taken))
    del many
    gc.collect()
    model.forget_prefixes()
    assert model.kv_nbytes == 0
    assert together(model, PROMPTS[:3], **NEW) == expected
    many = model.generate_many(prompts, **NEW)
    list(islice(many, taken))
    model.close()
    with pytest.raises(InputError, match="this model is closed"):
        list(many)


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ([[1], [999]], {}, "prompt 1: token id 999 at position 0"),
    ([[1], [1] * 600], {}, "prompt 1: the prompt has"),
    (["a", ""], {}, "prompt 1: the prompt is empty"),
    ("a text", {}, "give a list of prompts"),
    ([1, 2], {}, "prompt 0: token ids must be a flat sequence"),
    ([[1]], {"sequences": 0}, "sequences is 0; expected 1 to 128"),
    ([[1]], {"params": [stem_edge.SamplingParams()], "seed": 1}, "not both"),
    ([[1], [2]], {"params": [stem_edge.SamplingParams()]}, "prompt 1 has no params"),
    ([[1]], {"max_tokens": 1}, "no option max_tokens"),
]


@pytest.mark.parametrize(("prompts", "options", "said"), REFUSED)
def test_what_is_refused(model: Model, prompts: Any, options: Any, said: str) -> None:
    with pytest.raises((InputError, TypeError), match=said):
        model.generate_many(prompts, **options)


def stepped(scheduler: Any, found: dict[Any, list[int]], steps: int = 1 << 30) -> None:
    """Step until nothing is left, and add the tokens of each request."""
    while scheduler.busy and steps:
        steps -= 1
        for request, chunk in scheduler.step():
            assert chunk.error is None
            found.setdefault(request, []).extend(chunk.token_ids)


@pytest.mark.parametrize("victim", [0, 2, 4])
def test_cancelling_at_any_step_leaves_the_others_as_alone(model: Model, victim: int) -> None:
    expected = alone(model, PROMPTS[:5], **NEW)
    for at in range(0, 40, 4):
        scheduler = model.scheduler(3)
        requests = [model.request(prompt, **NEW) for prompt in PROMPTS[:5]]
        for request in requests:
            scheduler.submit(request)
        found: dict[Any, list[int]] = {}
        stepped(scheduler, found, at)
        requests[victim].cancelled = True
        if all(request.ended for request in requests if request is not requests[victim]):
            stepped(scheduler, found, 1)
            assert not scheduler.busy  # nothing is computed for the one that was cancelled
        before = len(found.get(requests[victim], ()))
        stepped(scheduler, found)
        scheduler.close()
        for number, request in enumerate(requests):
            if number != victim:
                assert found[request] == expected[number]
        tokens = found.get(requests[victim], [])
        assert len(tokens) == before and tokens == expected[victim][:before]


def test_no_more_decode_at_a_time_than_asked(model: Model) -> None:
    scheduler, found = model.scheduler(2), dict[Any, list[int]]()
    requests = [model.request(prompt, **NEW) for prompt in PROMPTS[:6]]
    for request in requests:
        scheduler.submit(request)
    while scheduler.busy:
        stepped(scheduler, found, 1)
        assert sum(not request.ended for request in found) <= 2
    scheduler.close()
    assert [found[request] for request in requests] == [*alone(model, PROMPTS[:6], **NEW).values()]


def test_threads_submit_and_cancel_while_one_steps(model: Model) -> None:
    expected = alone(model, PROMPTS, **NEW)
    scheduler, found, whole = model.scheduler(4), dict[Any, list[int]](), 0
    asked: list[tuple[int, Any]] = []

    def submit(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(8):
            number = rng.randrange(len(PROMPTS))
            request = model.request(PROMPTS[number], **NEW)
            asked.append((number, request))
            scheduler.submit(request)
            if rng.random() < 0.4:
                rng.choice(asked)[1].cancelled = True

    threads = [threading.Thread(target=submit, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or scheduler.busy:
        stepped(scheduler, found, 1)
    for number, request in asked:
        tokens = found.get(request, [])
        assert tokens == expected[number][: len(tokens)]
        assert request.cancelled or len(tokens) == len(expected[number])
        whole += len(tokens) == len(expected[number])
    assert whole > 10
    scheduler.close()
    with pytest.raises(InputError, match="this scheduler is closed"):
        scheduler.submit(model.request([1]))
