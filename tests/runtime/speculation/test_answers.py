"""Guesses, right or wrong, change no token of an answer, wherever it ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from constraints import constrain
from edit_oracle import swap
from exact_models import exact_stem
from guessing import CHEAP, ToldSpeculation, answer_of, answered
from installed import bundle_for
from loading import load_fixed
from prefix_bits import after_prompt
from tiers import slow_but
from toy_engine import ToyLoader, toy_engine

from stem_edge.errors import RowReadError
from stem_edge.graph.formats import EngineName
from stem_edge.runtime import Model
from stem_edge.runtime.backends.engines import ENGINES
from stem_edge.runtime.batching.request import Request
from stem_edge.runtime.decoding import sample_tokens
from stem_edge.runtime.generation import Answer, Chunk
from stem_edge.runtime.grammars.grammar import Grammar
from stem_edge.runtime.sampling import TokenLogprobs
from stem_edge.runtime.sampling_params import SamplingParams
from stem_edge.runtime.speculation.speculation import Speculation
from stem_edge.runtime.stats import Recorder

MODELS: dict[str, dict[str, Any]] = {
    "stem": {},
    "window": {"sliding_window": 60, "window_layers": (0, 2)},
}
NEW = 60
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.5, "seed": 7},
    "few": {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "seed": 3},
    "penalized": {"repetition_penalty": 1.3},
    "both": {"repetition_penalty": 1.1, "temperature": 1.0, "seed": 1},
}


@pytest.fixture(scope="module", params=slow_but(["window"], MODELS))
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"max_context": 1024} | MODELS[request.param]
    return exact_stem(tmp_path_factory.mktemp("guessed"), changes, tokens=4).path


@pytest.fixture
def model(bundle: Path, engine: EngineName) -> Iterator[Model]:
    with load_fixed(bundle_for(bundle, engine), engine=engine, threads=1) as loaded:
        yield loaded


# A window's cache drops some of it, or of the answer.
PROMPT = [7, *b"Some text, and the same text, and the same. " * 6]


@pytest.mark.parametrize("wrong", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_tokens_are_those_of_plain_decoding(model: Model, sampling: str, wrong: int) -> None:
    options = SAMPLING[sampling] | {"max_new_tokens": NEW}
    plain = answered(model, PROMPT, **options)
    told = ToldSpeculation(PROMPT + plain[1], wrong)
    assert answered(model, PROMPT, told, **options) == plain
    assert model.stats.drafted_tokens and (model.stats.accepted_tokens > 0) == (wrong > 1)


def test_guesses_from_the_text_itself(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "onnxruntime", toy_engine(ToyLoader))
    # Its tokens follow from the token before alone, so they repeat soon.
    with load_fixed(tiny_bundle, threads=1) as model:
        plain = answered(model, PROMPT[:30], max_new_tokens=90)
        speculation = Speculation(CHEAP, 7)
        assert answered(model, PROMPT[:30], speculation, max_new_tokens=90) == plain
        stats = model.stats
        assert stats.accepted_tokens > 40 > stats.decode_steps
        assert stats.decode_steps + stats.accepted_tokens == stats.new_tokens - 1


def test_steps_take_as_many_tokens_as_were_guessed(model: Model) -> None:
    plain = answered(model, PROMPT, max_new_tokens=41)
    told = ToldSpeculation(PROMPT + plain[1], sizes=[7])
    assert answered(model, PROMPT, told, max_new_tokens=41) == plain
    # The first token comes from the prompt; the last step has room for four tokens after its first.
    assert (model.stats.decode_steps, model.stats.accepted_tokens) == (5, 35)
    assert model.stats.drafted_tokens == 35


def test_every_place_where_the_room_ends(model: Model) -> None:
    _, whole, _ = answered(model, PROMPT, max_new_tokens=20)
    for most in range(1, len(whole)):
        told = ToldSpeculation(PROMPT + whole, 7, sizes=[7])
        _, ids, reason = answered(model, PROMPT, told, max_new_tokens=most)
        assert (ids, reason) == (whole[:most], "length")


def test_every_place_where_an_end_token_comes(model: Model) -> None:
    options: dict[str, Any] = {"temperature": 3.0, "seed": 0, "max_new_tokens": 20}
    _, whole, _ = answered(model, PROMPT, **options)
    for end in whole:
        answer = Answer(PROMPT, SamplingParams(**options), {end})
        context = model.engine.open_context(400)
        with model._lookups(PROMPT) as lookups:
            told = ToldSpeculation(PROMPT + whole, sizes=[7]).told
            record = Recorder(model.stats, model.engine.rows)
            found = list(sample_tokens(model.engine, context, answer, lookups, record, told))
        expected = whole[: whole.index(end) + 1]
        assert [sampled.token_id for sampled in found] == expected
        assert [sampled.finish_reason for sampled in found] == [None] * (len(found) - 1) + ["stop"]
        assert answer.seen == PROMPT + expected  # no token was chosen after it
        assert context.position == len(PROMPT) + len(found) - 1


def test_every_place_where_a_stop_text_comes(model: Model) -> None:
    options: dict[str, Any] = {"temperature": 3.0, "seed": 2, "max_new_tokens": 24}
    text, whole, _ = answered(model, PROMPT, **options)
    for place in range(0, len(text) - 2, 2):
        options["stop"] = [text[place : place + 2]]
        expected = answered(model, PROMPT, **options)
        told = ToldSpeculation(PROMPT + whole, sizes=[7])
        assert answered(model, PROMPT, told, **options) == expected


def test_logprobs_are_those_of_plain_decoding(model: Model) -> None:
    options: dict[str, Any] = {"logprobs": 3, "max_new_tokens": 60}
    found = list[list[TokenLogprobs]]()
    _, ids, _ = answered(model, PROMPT, max_new_tokens=60)
    for speculation in (None, ToldSpeculation(PROMPT + ids, 4)):
        model.speculate(speculation)
        chunks = model.generate(PROMPT, **options)
        found.append([one for chunk in chunks for one in chunk.logprobs or ()])
    alone, guessed = ([[one.logprob, *dict(one.top).values()] for one in ones] for ones in found)
    assert [one.token_id for one in found[1]] == ids
    assert np.abs(np.array(alone) - np.array(guessed)).max() < 1e-4


def test_guessed_tokens_look_up_edited_rows(model: Model) -> None:
    plain = answered(model, PROMPT, max_new_tokens=60)
    common = max((c for c in plain[1] if c < 128), key=plain[1].count)
    target = "Q" if chr(common) != "Q" else "R"
    with model.edited(swap(model, chr(common), target, scope="everywhere")):
        edited = answered(model, PROMPT, max_new_tokens=60)
        told = ToldSpeculation(PROMPT + edited[1], 5)
        assert answered(model, PROMPT, told, max_new_tokens=60) == edited != plain


def test_an_answer_that_is_left_leaves_nothing(model: Model) -> None:
    plain = answered(model, PROMPT, max_new_tokens=30)
    more = PROMPT + plain[1][:9]
    expected = after_prompt(model, more, fresh=True).logits
    for left in range(1, 12):
        model.speculate(ToldSpeculation(PROMPT + plain[1], 6, sizes=[7]))
        chunks = model.generate(PROMPT, max_new_tokens=30)
        for _ in range(left):
            next(chunks)
        chunks.close()
        assert (after_prompt(model, more).logits == expected).all()


def test_a_row_that_only_a_guess_needs_may_be_unreadable(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = answered(model, PROMPT, max_new_tokens=30)
    rows, bad = model.engine.rows, next(n for n in range(260) if n not in PROMPT + plain[1])
    fetch = rows.fetch

    def failing(stem_ids: Any, whole: int | None = None) -> Any:
        if bad in stem_ids:
            raise RowReadError("damaged")
        return fetch(stem_ids, whole)

    monkeypatch.setattr(rows, "fetch", failing)
    told = ToldSpeculation(PROMPT + [bad if n % 3 == 0 else t for n, t in enumerate(plain[1])])
    assert answered(model, PROMPT, told, max_new_tokens=30) == plain


def test_rows_of_guesses_are_read_before_the_token_is_handed_out(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load_fixed(bundle, threads=1, slots=16, warm_start=False) as model:
        asked, fetched = list[list[int]](), list[list[int]]()
        rows = model.engine.rows
        submit, fetch = rows.submit, rows.fetch

        def submitted(stem_ids: Any, whole: int | None = None) -> None:
            asked.append(stem_ids.tolist())
            submit(stem_ids, whole)

        def fetching(stem_ids: Any, whole: int | None = None) -> Any:
            fetched.append(stem_ids.tolist())
            return fetch(stem_ids, whole)

        plain = answered(model, PROMPT, max_new_tokens=40)
        monkeypatch.setattr(rows, "submit", submitted)
        monkeypatch.setattr(rows, "fetch", fetching)
        told = ToldSpeculation(PROMPT + plain[1], 5)
        assert answered(model, PROMPT, told, max_new_tokens=40) == plain
        assert asked == fetched
        assert {len(ids) for ids in fetched[-10:]} > {1, 2}


@pytest.mark.parametrize("slots", [4, 5, 7])
def test_a_step_has_no_more_tokens_than_slots(bundle: Path, slots: int) -> None:
    with load_fixed(bundle, threads=1, slots=slots) as model:
        plain = answered(model, PROMPT, max_new_tokens=60)
        told = ToldSpeculation(PROMPT + plain[1], 9, sizes=[7])
        assert answered(model, PROMPT, told, max_new_tokens=60) == plain
        assert model.stats.drafted_tokens <= (slots - 1) * model.stats.decode_steps


def test_a_context_that_is_full(bundle: Path) -> None:
    with load_fixed(bundle, threads=1, context_length=len(PROMPT) + 11) as model:
        plain = answered(model, PROMPT)
        told = ToldSpeculation(PROMPT + plain[1], 9, sizes=[7])
        assert answered(model, PROMPT, told) == plain
        assert (len(plain[1]), plain[2]) == (12, "length")


def test_a_seed_gives_the_same_guesses_and_tokens(model: Model) -> None:
    options: dict[str, Any] = {"temperature": 0.4, "seed": 5, "max_new_tokens": 200}
    found = [
        (answered(model, PROMPT, Speculation(CHEAP, 7), **options), model.stats.drafted_tokens)
    ]
    found += [
        (answered(model, PROMPT, Speculation(CHEAP, 7), **options), model.stats.drafted_tokens)
    ]
    assert found[0] == found[1] and found[0][1] > 0


def test_positions_within_a_window_can_always_be_gone_back_to(model: Model) -> None:
    context, ids = model.engine.open_context(700), np.arange(700) % 250
    model.engine.step(context, ids[:100])
    rejected = 0
    while context.room > 8:
        before = context.position
        model.engine.step(context, ids[before : before + 8], 8)
        context.rewind(before + 8 - rejected)
        assert context.position == before + 8 - rejected
        rejected = (rejected + 1) % 8
    at = context.position
    logits = model.engine.step(context, ids[at : at + 1]).copy()
    fresh = model.engine.open_context(700)
    *_, expected = model.engine.process(fresh, ids[: at + 1].tolist())
    assert np.abs(logits - expected).max() < 1e-3


def test_a_lone_request_joins_another_after_any_step(bundle: Path, engine: EngineName) -> None:
    """Its keys and values are copied with what guesses, right or wrong, have left of them."""
    options: dict[str, Any] = {"threads": 1, "sequences": 4}
    with load_fixed(bundle_for(bundle, engine), engine=engine, **options) as model:
        check_joining(model)


def check_joining(model: Model) -> None:
    other = answered(model, PROMPT[:9], max_new_tokens=6)
    plain = answered(model, PROMPT, max_new_tokens=NEW)
    model.speculate(ToldSpeculation(PROMPT + plain[1], 5))
    joined = 0
    for units in range(3, 16, 2):
        scheduler = model.scheduler(2)
        first = model.request(PROMPT, max_new_tokens=NEW)
        second = model.request(PROMPT[:9], max_new_tokens=6)
        scheduler.submit(first)
        chunks = [chunk for _ in range(units) for _, chunk in scheduler.step()]
        scheduler.submit(second)
        found: dict[Request, list[Chunk]] = {first: chunks, second: []}
        while scheduler.busy:
            for request, chunk in scheduler.step():
                found[request].append(chunk)
            joined += first.decoding is None and not first.ended
        scheduler.close()
        assert [answer_of(found[one]) for one in (first, second)] == [plain, other]
    assert joined > 20


def test_tokens_without_a_choice_change_no_other(model: Model) -> None:
    text = "10-90 4|9 20 21 22 23 24 25 26 27 28 29 30 31 32 1-250 40 41 42 50-60 1-250 70 71"
    for seed in range(4):
        options: dict[str, Any] = {"temperature": 2.0, "seed": seed}
        options["grammar"] = Grammar("lark", text)
        constrain(model, forces=False)
        plain = answered(model, PROMPT, **options)
        constrain(model)
        assert answered(model, PROMPT, **options) == plain
        assert model.stats.accepted_tokens == 15 and plain[2] == "stop"
