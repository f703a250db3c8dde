"""Drafts, right or wrong, change no token of an answer, however it is sampled and wherever it ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import models
import pytest
from guessing import Told, answered
from installed import needs_ggml
from models import GGML, ORT

import stem_edge
from stem_edge.errors import InputError
from stem_edge.runtime import Model

# A window's cache drops some of it, or of the answer.
PROMPT = [7, *b"Some text, and the same text, and the same. " * 6]
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.5, "seed": 7},
    "few": {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "seed": 3},
    "penalized": {"repetition_penalty": 1.3},
    "both": {"repetition_penalty": 1.1, "temperature": 1.0, "seed": 1},
}


@pytest.fixture
def told() -> Told:
    """Drafts of the model: none, until a test tells them."""
    return Told()


@pytest.fixture(params=[ORT, pytest.param(GGML, marks=needs_ggml)])
def model(told: Told, shared: Path, request: pytest.FixtureRequest) -> Iterator[Model]:
    path = models.bundle_of("windows", request.param, shared)
    options: Any = {"engine": request.param, "threads": 1, "sequences": 2, "speculate": told}
    with stem_edge.load(path, **options) as model:
        yield model


@pytest.mark.parametrize("wrong", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_tokens_are_those_of_plain_decoding(
    model: Model, told: Told, sampling: str, wrong: int
) -> None:
    options: Any = {"max_new_tokens": 60, **SAMPLING[sampling]}
    plain = answered(model, PROMPT, **options)
    assert model.stats.drafted_tokens == 0
    told.tell(PROMPT + plain[1], wrong)
    assert answered(model, PROMPT, **options) == plain
    assert model.stats.drafted_tokens > model.stats.accepted_tokens


def test_steps_take_as_many_tokens_as_were_drafted(model: Model, told: Told) -> None:
    plain = answered(model, PROMPT, max_new_tokens=41)
    told.tell(PROMPT + plain[1], sizes=[7])
    assert answered(model, PROMPT, max_new_tokens=41) == plain
    # The first token comes from the prompt; the last step has room for four tokens after its first.
    assert (model.stats.decode_steps, model.stats.accepted_tokens) == (5, 35)
    assert model.stats.drafted_tokens == 35


def test_every_place_where_an_answer_ends(model: Model, told: Told) -> None:
    options: dict[str, Any] = {"temperature": 3.0, "seed": 2}
    text, whole, _ = answered(model, PROMPT, **options, max_new_tokens=24)
    told.tell(PROMPT + whole, 7, sizes=[7])
    for most in range(1, len(whole)):
        _, ids, reason = answered(model, PROMPT, **options, max_new_tokens=most)
        assert (ids, reason) == (whole[:most], "length")
    for place in range(0, len(text) - 2, 2):
        stop: Any = {"stop": [text[place : place + 2]], "max_new_tokens": 24}
        told.tell(())
        expected = answered(model, PROMPT, **options, **stop)
        told.tell(PROMPT + whole, sizes=[7])
        assert answered(model, PROMPT, **options, **stop) == expected


def test_a_context_that_is_full(model: Model, told: Told) -> None:
    length = model.plan.context_length
    prompt = (PROMPT * 9)[: length - 9]
    plain = answered(model, prompt, max_new_tokens=40)
    assert (len(plain[1]), plain[2]) == (10, "length")
    told.tell(prompt + plain[1], sizes=[7])
    assert answered(model, prompt, max_new_tokens=40) == plain


def test_drafted_tokens_look_up_edited_rows(model: Model, told: Told) -> None:
    plain = answered(model, PROMPT, max_new_tokens=60)
    written = max((token for token in plain[1] if 32 < token < 127), key=plain[1].count)
    edit = stem_edge.make_edit(
        model.bundle, chr(written), "Q" if written != 81 else "R", scheme="swap", scope="everywhere"
    )
    with model.edited(edit):
        edited = answered(model, PROMPT, max_new_tokens=60)
        told.tell(PROMPT + edited[1], 5)
        assert answered(model, PROMPT, max_new_tokens=60) == edited != plain


def test_an_answer_that_is_left_or_joined_by_another(model: Model, told: Told) -> None:
    plain = answered(model, PROMPT, max_new_tokens=24)
    told.tell(PROMPT + plain[1], sizes=[7])
    for count in range(1, 5):
        chunks = model.generate(PROMPT, max_new_tokens=24)
        for _ in range(count):
            next(chunks)
        chunks.close()
    found: dict[int, list[int]] = {}
    for number, chunk in model.generate_many(iter([PROMPT, PROMPT]), max_new_tokens=24):
        found.setdefault(number, []).extend(chunk.token_ids)
    assert found == {0: plain[1], 1: plain[1]}


@pytest.mark.parametrize("drafts", [[999, -1, 3], [5, 260]])
def test_drafts_that_are_no_tokens(drafts: list[int], shared: Path) -> None:
    path, found = (
        models.bundle_of("windows", ORT, shared),
        list[tuple[str, list[int], str | None]](),
    )
    for speculate in (False, lambda seen, room: drafts):
        with stem_edge.load(path, threads=1, speculate=speculate) as model:
            found.append(answered(model, PROMPT, max_new_tokens=9))
    assert found[0] == found[1]
    for wrong in (None, "ab", [1.5], {5, 6}):
        drafting = stem_edge.load(path, speculate=lambda *_: cast(Any, wrong))  # noqa: B023
        with drafting as model, pytest.raises(InputError, match="the draft function returned"):
            answered(model, PROMPT, max_new_tokens=9)
