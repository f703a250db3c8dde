"""Answers under a constraint: tokens without a choice are processed together, and change no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from constraints import constrain
from guessing import ToldSpeculation, answer_of, answered
from toy_batches import check_given_back, toy_model

from stem_edge.errors import BackendError, InputError
from stem_edge.runtime.decoding import Stepping
from stem_edge.runtime.grammars.grammar import Grammar
from stem_edge.runtime.model import Model

PROMPT = [5, 6, 7]
# Two choices, then 13 tokens without one, a choice, 3, a choice, and 2 at the end.
TEXT = "10-90 4|9 20 21 22 23 24 25 26 27 28 29 30 31 32 1-250 40 41 42 50-60 70 71"
PLACES = len(TEXT.split())
GIVEN: dict[str, Any] = {"grammar": Grammar("lark", TEXT), "max_new_tokens": 40}
SAMPLING: list[dict[str, Any]] = [{}, {"temperature": 1.5, "seed": 3}, {"top_k": 4, "seed": 1}]


@pytest.fixture
def toy(tiny_bundle: Path) -> Iterator[tuple[Model, Any]]:
    with toy_model(tiny_bundle, slots=16, sequences=4) as made:
        yield made
        check_given_back(*made)


@pytest.mark.parametrize("sampling", SAMPLING)
def test_forced_tokens_change_no_other(toy: tuple[Model, Any], sampling: Any) -> None:
    model, _ = toy
    constrain(model, forces=False)
    plain = answered(model, PROMPT, **GIVEN, **sampling)
    assert plain[2] == "stop" and len(plain[1]) == PLACES
    assert (model.stats.decode_steps, model.stats.drafted_tokens) == (PLACES - 1, 0)
    grammars = constrain(model)
    assert answered(model, PROMPT, **GIVEN, **sampling) == plain
    # A step up to the second choice, three for 13 tokens, one for 3, and one for 2. Steps have 2, 4 or 8
    # tokens, the first of which is known, and tell the one after: 7 and 1, 3 and 1, 1; 3; 1 and 1.
    stats = model.stats
    assert (stats.decode_steps, stats.drafted_tokens, stats.accepted_tokens) == (6, 15, 15)
    assert [one.masked for one in grammars.opened] == [4]
    told = ToldSpeculation(PROMPT + plain[1], 4)
    assert answered(model, PROMPT, told, **GIVEN, **sampling) == plain
    model.speculate(None)


def test_every_place_where_the_room_ends(toy: tuple[Model, Any]) -> None:
    model, _ = toy
    constrain(model)
    _, whole, _ = answered(model, PROMPT, **GIVEN)
    for most in range(1, PLACES):
        _, ids, reason = answered(model, PROMPT, **GIVEN | {"max_new_tokens": most})
        assert (ids, reason) == (whole[:most], "length")


def test_an_end_token_ends_and_is_not_accepted(tiny_bundle: Path) -> None:
    with toy_model(tiny_bundle) as (model, _):
        (end,) = model.config.eos_ids
        grammars = constrain(model)
        for text, accepted in ((f"3 4 {end} 5", 2), (f"3|4 {end}", 1)):
            _, ids, reason = answered(model, PROMPT, grammar=Grammar("lark", text))
            assert (ids[-1], reason, grammars.opened[-1].at) == (end, "stop", accepted)


def test_log_probabilities_are_those_of_the_model(toy: tuple[Model, Any]) -> None:
    model, _ = toy
    constrain(model)
    options = GIVEN | {"logprobs": 2}
    chunks = list(model.generate(PROMPT, **options))
    found = [one for chunk in chunks for one in chunk.logprobs or ()]
    text = PROMPT + answer_of(chunks)[1]
    for place, one in enumerate(found, len(PROMPT)):
        (alone,) = model.generate(text[:place], max_new_tokens=1, logprobs=2)
        assert alone.logprobs is not None
        assert one.top == alone.logprobs[0].top
        assert one.token_id == text[place]


def test_exact_processes_them_one_by_one(toy: tuple[Model, Any]) -> None:
    model, _ = toy
    constrain(model)
    expected = answered(model, PROMPT, **GIVEN)
    model.stepping = Stepping(exact=True)
    assert answered(model, PROMPT, **GIVEN) == expected
    assert (model.stats.decode_steps, model.stats.drafted_tokens) == (PLACES - 1, 0)


def test_a_forced_token_that_fails_ends_where_it_would_alone(toy: tuple[Model, Any]) -> None:
    model, backend = toy
    whole = answered(model, PROMPT, max_new_tokens=1)[1]
    for bad in range(20, 33):

        def fail(ids: list[int], bad: int = bad) -> None:
            if bad in ids[len(PROMPT) :]:
                raise BackendError("not this one")

        found = list[list[int]]()
        for forces in (False, True):
            constrain(model, forces=forces)
            backend.before, tokens = fail, list[int]()
            with pytest.raises(BackendError, match="not this one"):
                for chunk in model.generate(PROMPT, **GIVEN | {"logprobs": 0}):
                    tokens += chunk.token_ids
            backend.before = lambda ids: None
            found.append(tokens)
        assert found[0] == found[1] and whole


def test_what_is_refused_at_once(toy: tuple[Model, Any]) -> None:
    model, _ = toy

    class Refusing:
        def open(self, grammar: Grammar) -> Any:
            raise InputError("no such grammar")

    vars(model)["_grammars"] = Refusing()
    for call in (model.generate, model.request, lambda *a, **k: model.generate_many([*a], **k)):
        for options, said in (
            ({"regex": "a"}, "no such grammar"),
            ({"logit_bias": {3: 1, model.config.vocab_size: 1}}, "token id"),
        ):
            with pytest.raises(InputError, match=said):
                call(PROMPT, **options)
