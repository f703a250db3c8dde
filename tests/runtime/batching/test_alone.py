"""A request that runs alone: in its context, with guesses, until another one begins."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from constraints import constrain
from guessing import CHEAP, ToldSpeculation
from interrupts import interrupted
from tiers import slow_but
from toy_batches import ToyBatch, check_given_back, together, toy_model

import stem_edge
from stem_edge.errors import BackendError, RowReadError, StemEdgeError
from stem_edge.runtime import batching, decoding
from stem_edge.runtime.backends.interface import StepCosts
from stem_edge.runtime.batching.request import Request
from stem_edge.runtime.batching.scheduler import Scheduler
from stem_edge.runtime.generation import Chunk
from stem_edge.runtime.grammars.grammar import Grammar
from stem_edge.runtime.model import Model

LONE, OTHER = [97, 6, 7, 98], [97, 9]
NEW = 24
Toy = tuple[Model, Any]
TOY = {"slots": 16, "sequences": 6}
# Options of the lone one. Others: greedy, for a few tokens.
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seed": {"temperature": 1.5, "seed": 5},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "logprobs": {"logprobs": 2},
    "one token": {"max_new_tokens": 1},
    "grammar": {"grammar": Grammar("lark", "10-90 4|9 20 21 22 23 24 25 26 27 28 1-250 40 41")},
    "grammar, seed": {
        "grammar": Grammar("lark", "20 21 22 23 24 25 26 27 1-90 1-90 30 31"), "temperature": 2.0,
        "seed": 2,
    },
}  # fmt: skip


def told(model: Model, prompt: list[int], options: Any, wrong: int = 5) -> list[Chunk]:
    """Let the model guess an answer, mostly right; return it as generate gives it."""
    model.speculate(None)
    chunks = list(model.generate(prompt, **options))
    ids = [token for chunk in chunks for token in chunk.token_ids]
    model.speculate(ToldSpeculation(prompt + ids, wrong))
    return chunks


def run(
    scheduler: Scheduler, units: int = 1 << 30, found: dict[Request, list[Chunk]] | None = None
) -> dict[Request, list[Chunk]]:
    """Step so often, or until nothing is left; return the chunks of each request."""
    found = {} if found is None else found
    while scheduler.busy and units:
        units -= 1
        for request, chunk in scheduler.step():
            found.setdefault(request, []).append(chunk)
    return found


@pytest.mark.parametrize(
    ("case", "edited"),
    slow_but([*product(CASES, [False]), ("greedy", True)], product(CASES, [False, True])),
)
def test_chunks_are_those_of_generate_whenever_another_comes(
    toy: Toy, case: str, edited: bool
) -> None:
    model, backend = toy
    constrain(model)
    options = {"max_new_tokens": NEW} | CASES[case]
    edit = stem_edge.make_edit(model.bundle.path, "a", "b", scope="everywhere")
    with model.edited(*[edit] * edited):
        other = list(model.generate(OTHER, max_new_tokens=4))
        expected = told(model, LONE, options)
        tokens = sum(len(chunk.token_ids) for chunk in expected)
        for units in range(tokens + 2):
            scheduler = model.scheduler(3)
            backend.units.clear()
            first = model.request(LONE, **options)
            scheduler.submit(first)
            found = run(scheduler, units)
            alone = first.ended
            second = model.request(OTHER, max_new_tokens=4)
            scheduler.submit(second)
            run(scheduler, found=found)
            assert found == {first: expected, second: other}
            scheduler.close()
            check_given_back(model, backend)
            if alone:
                break
        assert alone and units - 1 < max(2, tokens / 2)  # units of several tokens


def test_stop_texts(toy: Toy) -> None:
    model, _ = toy
    text = "".join(chunk.text for chunk in told(model, LONE, {"max_new_tokens": NEW}))
    guesses = model.stepping.speculation
    for place in range(0, len(text) - 2, 3):
        options: dict[str, Any] = {"max_new_tokens": NEW, "stop": [text[place : place + 2]]}
        expected = told(model, LONE, options)
        model.speculate(guesses)  # right ones beyond the stop text
        scheduler = model.scheduler(3)
        request = model.request(LONE, **options)
        scheduler.submit(request)
        assert run(scheduler) == {request: expected}
        scheduler.close()


def test_a_step_takes_many_tokens_and_joins_with_one(toy: Toy) -> None:
    model, backend = toy
    told(model, LONE, {"max_new_tokens": NEW}, wrong=1 << 30)
    model.forget_prefixes()
    scheduler = model.scheduler(3)
    scheduler.submit(model.request(LONE, max_new_tokens=NEW))
    backend.units.clear()
    run(scheduler, 3)
    prompt, *steps = backend.units
    assert prompt == (LONE, [0])
    assert [len(tokens) for tokens, _ in steps] == [8, 2]  # 7 guesses, then 1
    scheduler.submit(model.request(OTHER, max_new_tokens=2))
    scheduler.step()
    (tokens, positions) = backend.units[-1]
    assert (len(tokens), positions) == (1, [len(LONE) + 10])
    stats = model.stats
    assert (stats.accepted_tokens, stats.decode_steps, stats.new_tokens) == (8, 3, 12)
    run(scheduler)
    scheduler.close()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("same", [False, True])
def test_exact_guesses_only_where_bits_stay(tiny_bundle: Path, exact: bool, same: bool) -> None:
    with toy_model(tiny_bundle, slots=16, sequences=3) as (model, _):
        told(model, LONE, {"max_new_tokens": NEW})
        assert model.stepping.speculation is not None
        model.stepping.speculation.costs = StepCosts(seconds=1.0, times=CHEAP.times, same_bits=same)
        for _ in model.generate_many([LONE], exact=exact, max_new_tokens=NEW):
            pass
        assert (model.stats.drafted_tokens > 0) == (same or not exact)
        constrain(model)
        model.speculate(None)
        grammar = Grammar("lark", "1-90 20 21 22 23")
        for _ in model.generate_many([LONE], exact=exact, grammar=grammar):
            pass
        assert model.stats.drafted_tokens == (0 if exact else 3)


@pytest.mark.parametrize("guessing", [True, False])
def test_cancelling_at_any_unit(toy: Toy, guessing: bool) -> None:
    model, backend = toy
    expected = told(model, LONE, {"max_new_tokens": NEW})
    if not guessing:
        model.speculate(None)
    ids = [token for chunk in expected for token in chunk.token_ids]
    ended, units = False, 0
    while not ended:
        scheduler, request = model.scheduler(3), model.request(LONE, max_new_tokens=NEW)
        scheduler.submit(request)
        found = run(scheduler, units).get(request, [])
        tokens = [token for chunk in found for token in chunk.token_ids]
        assert tokens == ids[: len(tokens)]
        ended = request.ended
        computed = len(backend.units)
        scheduler.cancel(request)
        assert scheduler.step() == [] and not scheduler.busy
        assert request.ended and len(backend.units) == computed
        scheduler.close()
        check_given_back(model, backend)
        units += 1
    assert units > 3


def test_cancelled_ones_are_dropped_within_a_unit(toy: Toy) -> None:
    """In the queue behind others, and in a prompt of many chunks."""
    model, _ = toy
    scheduler = model.scheduler(1)
    long = [*range(1, 60)]
    first, *others = [model.request(long, max_new_tokens=9) for _ in range(4)]
    for request in (first, *others):
        scheduler.submit(request)
    scheduler.step()
    assert not first.prompt_computed and len(first.steps) > 1
    scheduler.cancel(others[1])
    scheduler.step()
    assert others[1].ended and not others[0].ended and scheduler.waiting == 2
    scheduler.cancel(first)
    scheduler.step()
    assert first.ended and others[0].steps  # the next one has begun
    found = run(scheduler)
    assert set(found) == {others[0], others[2]}
    scheduler.close()


@pytest.mark.parametrize("units", range(7))
def test_a_closed_scheduler_gives_everything_back(toy: Toy, units: int) -> None:
    model, backend = toy
    told(model, LONE, {"max_new_tokens": NEW})
    scheduler, request = model.scheduler(3), model.request(LONE, max_new_tokens=NEW)
    scheduler.submit(request)
    run(scheduler, units)
    scheduler.close()
    assert request.ended and not scheduler.busy
    del scheduler
    check_given_back(model, backend)


def test_a_row_that_cannot_be_read(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs nothing as a guess's; as a token's, it ends the answer where generate ends."""
    model, _ = toy
    expected = told(model, LONE, {"max_new_tokens": NEW}, wrong=3)
    ids = [token for chunk in expected for token in chunk.token_ids]
    rows = model.engine.rows
    fetch = rows.fetch
    for bad in {*ids, *(token ^ 1 for token in ids)} - set(LONE):

        def failing(stem_ids: Any, whole: int | None = None, bad: int = bad) -> Any:
            if bad in stem_ids:
                raise RowReadError("damaged")
            return fetch(stem_ids, whole)

        monkeypatch.setattr(rows, "fetch", failing)
        scheduler, request = model.scheduler(3), model.request(LONE, max_new_tokens=NEW)
        scheduler.submit(request)
        chunks = run(scheduler)[request]
        monkeypatch.undo()
        scheduler.close()
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        assert tokens == (ids[: ids.index(bad) + 1] if bad in ids[:-1] else ids)[: len(tokens)]
        assert isinstance(chunks[-1].error, RowReadError) == (bad in ids[:-1])


@pytest.mark.parametrize("error", [MemoryError, BackendError])
def test_an_error_while_another_runs_too(toy: Toy, error: type[Exception]) -> None:
    model, backend = toy
    other = list(model.generate(OTHER, max_new_tokens=4))
    told(model, LONE, {"max_new_tokens": NEW})

    def fail(ids: list[int]) -> None:
        if len(ids) > len(LONE) + 12 and ids[: len(LONE)] == LONE:
            raise error("too long")

    for units in range(9):
        scheduler, first = model.scheduler(3), model.request(LONE, max_new_tokens=NEW)
        backend.before = fail
        scheduler.submit(first)
        found = run(scheduler, units)
        second = model.request(OTHER, max_new_tokens=4)
        scheduler.submit(second)
        run(scheduler, found=found)
        backend.before = lambda ids: None
        assert isinstance(found[first][-1].error, StemEdgeError)
        assert found[second] == other
        scheduler.close()
        check_given_back(model, backend)


@pytest.mark.parametrize(
    ("copies", "contexts", "beside"),
    [(True, 3, True), (True, 2, False), (False, 2, True), (False, 1, False)],
)
def test_another_waits_where_there_is_no_memory(
    tiny_bundle: Path, copies: bool, contexts: int, beside: bool
) -> None:
    """Keys and values stay within the plan, and the lone one goes on alone."""
    with toy_model(tiny_bundle, copies=copies, slots=16, sequences=contexts) as (model, backend):
        length, limit = model.plan.context_length, model._prefixes.limit
        assert limit == contexts * backend.nbytes_of(length)
        new, taken = length - 20, list[int]()
        endless: Any = {"logit_bias": dict.fromkeys(model.config.eos_ids, -100.0)}
        expected = told(model, LONE, endless | {"max_new_tokens": new}, wrong=1 << 30)
        other = list(model.generate(OTHER, max_new_tokens=4))
        assert sum(len(chunk.token_ids) for chunk in expected) == new
        scheduler = model.scheduler(3)
        first = model.request(LONE, max_new_tokens=new, **endless)
        second = model.request(OTHER, max_new_tokens=4)
        backend.before = lambda ids: taken.append(backend.nbytes)
        scheduler.submit(first)
        found = run(scheduler, 4)
        scheduler.submit(second)
        while not second.prompt_computed:
            run(scheduler, 1, found)
        assert first.ended == (not beside)
        run(scheduler, found=found)
        assert found == {first: expected, second: other}
        assert max(taken) <= limit
        scheduler.close()
        check_given_back(model, backend)


def test_kept_prompts_give_way_as_it_grows(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stem_edge.runtime.prefixes.prefix.STEP_TOKENS", 8)
    with toy_model(tiny_bundle, slots=16) as (model, backend):
        endless: Any = {"logit_bias": dict.fromkeys(model.config.eos_ids, -100.0)}
        new = model.plan.context_length - 20
        told(model, LONE, endless | {"max_new_tokens": new}, wrong=1 << 30)
        for _ in model.generate([*range(1, 80)], max_new_tokens=1):
            pass
        model._prefixes.make_room()
        taken = list[int]()
        backend.before = lambda ids: taken.append(backend.nbytes)
        scheduler = model.scheduler(3)
        scheduler.submit(model.request(LONE, max_new_tokens=new, **endless))
        run(scheduler, 3)
        assert len(model._prefixes._kept) == 1
        run(scheduler)
        assert not model._prefixes._kept
        assert max(taken) <= model._prefixes.limit < backend.nbytes_of(79 + new)
        scheduler.close()
        check_given_back(model, backend)


def test_where_copying_fails_it_goes_on_alone(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with toy_model(tiny_bundle, slots=16, sequences=3) as (model, backend):
        other = list(model.generate(OTHER, max_new_tokens=4))
        expected = told(model, LONE, {"max_new_tokens": NEW})
        scheduler, first = model.scheduler(3), model.request(LONE, max_new_tokens=NEW)

        def join(*_: Any) -> None:
            raise MemoryError

        monkeypatch.setattr(ToyBatch, "join", join)
        second = model.request(OTHER, max_new_tokens=4)
        scheduler.submit(first)
        found = run(scheduler, 3)
        scheduler.submit(second)
        run(scheduler, found=found)
        assert found == {first: expected, second: other}
        scheduler.close()
        check_given_back(model, backend)


def test_figures_of_a_request(toy: Toy) -> None:
    model, _ = toy
    shared = [*range(1, 41)]
    told(model, [*shared, 50], {"max_new_tokens": NEW})
    scheduler = model.scheduler(3)
    request = model.request([*shared, 60], max_new_tokens=NEW)
    scheduler.submit(request)
    assert (request.prompt_tokens, request.prompt_computed, request.new_tokens) == (41, False, 0)
    run(scheduler)
    assert request.cached_tokens == model.stats.cached_tokens > 30 and request.prompt_computed
    assert request.new_tokens == model.stats.new_tokens > 1
    assert 0 < request.prompt_seconds < 60 and 0 < request.decode_seconds < 60
    scheduler.close()


@pytest.mark.parametrize("step", slow_but([17], [5, 17]))
def test_an_interrupt_anywhere_leaves_nothing_behind(tiny_bundle: Path, step: int) -> None:
    with toy_model(tiny_bundle, slots=16, sequences=3) as (model, backend):
        told(model, LONE, {"max_new_tokens": 8}, wrong=3)
        expected = together(model, [LONE, OTHER], sequences=1, max_new_tokens=8)
        at = 0
        while interrupted(
            lambda: together(model, [LONE, OTHER], sequences=1, max_new_tokens=8), at, within
        ):
            check_given_back(model, backend)
            at += step
        assert at > 150
        assert together(model, [LONE, OTHER], sequences=1, max_new_tokens=8) == expected


def within(code: CodeType) -> bool:
    path = Path(code.co_filename)
    return path.parent == Path(batching.__file__).parent or path == Path(decoding.__file__)
