"""Answers under a grammar: tokens without a choice are computed together, and change no other token."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from guessing import Told, answer_of, answered
from models import ORT

import stem_edge
from stem_edge.errors import InputError, RowReadError
from stem_edge.runtime import Model

PROMPT = [5, 6, 7]
# A byte is a token: choices, then 13, 3 and 2 tokens without one.
REGEX = "[a-y][bc]ABCDEFGHIJKLM[a-z]NOP[d-z]QR"
PLACES = 22
GIVEN: dict[str, Any] = {"regex": REGEX, "max_new_tokens": 40}
SAMPLING: list[dict[str, Any]] = [{}, {"temperature": 1.5, "seed": 3}, {"top_k": 4, "seed": 1}]


@pytest.fixture
def path(shared: Path) -> Path:
    return models.bundle_of("stem", ORT, shared)


@pytest.fixture
def model(path: Path) -> Iterator[Model]:
    with stem_edge.load(path, threads=1, slots=16, sequences=4) as model:
        yield model


@pytest.mark.parametrize("sampling", SAMPLING)
def test_forced_tokens_change_no_other(path: Path, model: Model, sampling: Any) -> None:
    with stem_edge.load(path, threads=1, exact=True) as exact:
        plain = answered(exact, PROMPT, **GIVEN, **sampling)
        # A step for each, because here steps of several tokens are not known to round alike.
        assert (exact.stats.decode_steps, exact.stats.drafted_tokens) == (len(plain[1]) - 1, 0)
    assert plain[2] == "stop" and len(plain[0]) == PLACES
    assert answered(model, PROMPT, **GIVEN, **sampling) == plain
    # Steps have 2, 4 or 8 tokens, the first of which is known: 7, 3, 1; 3; 1, and the end.
    stats = model.stats
    assert stats.drafted_tokens == stats.accepted_tokens > 12
    assert stats.decode_steps < len(plain[1]) - 12
    told = Told()
    told.tell(PROMPT + plain[1], 4)
    with stem_edge.load(path, threads=1, speculate=told) as drafting:
        assert answered(drafting, PROMPT, **GIVEN, **sampling) == plain


def test_every_place_where_the_room_ends(model: Model) -> None:
    _, whole, _ = answered(model, PROMPT, **GIVEN)
    for most in range(1, PLACES):
        _, ids, reason = answered(model, PROMPT, **GIVEN | {"max_new_tokens": most})
        assert (ids, reason) == (whole[:most], "length")


def test_log_probabilities_are_those_of_the_model(model: Model) -> None:
    chunks = list(model.generate(PROMPT, **GIVEN, logprobs=2))
    found = [one for chunk in chunks for one in chunk.logprobs or ()]
    text = PROMPT + answer_of(chunks)[1]
    for place, one in enumerate(found, len(PROMPT)):
        (alone,) = model.generate(text[:place], max_new_tokens=1, logprobs=2)
        assert alone.logprobs is not None
        assert [t for t, _ in one.top] == [t for t, _ in alone.logprobs[0].top]
        assert np.allclose(
            [p for _, p in one.top], [p for _, p in alone.logprobs[0].top], atol=1e-4
        )
        assert one.token_id == text[place]


def test_a_forced_token_whose_row_cannot_be_read_ends_where_it_would_alone(
    path: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    with stem_edge.open_tables(path) as tables:
        row = tables[np.array([ord("H")]), tables.layers[0]].tobytes()
    for shard in (copy / "tables.zarr").rglob("c/*/0"):
        shard.write_bytes(shard.read_bytes().replace(row, bytes(len(row))))
    for exact in (True, False):
        with stem_edge.load(copy, threads=1, slots=16, exact=exact) as model:
            text = ""
            with pytest.raises(RowReadError):
                for chunk in model.generate(PROMPT, **GIVEN, logprobs=0):
                    text += chunk.text
            assert text[2:] == "ABCDEFGH"


def test_what_is_refused_at_once(model: Model) -> None:
    for call in (model.generate, model.request, lambda *a, **k: model.generate_many([*a], **k)):
        for options, said in (
            ({"regex": "("}, "regex"),
            ({"logit_bias": {3: 1, model.config.vocab_size: 1}}, "token id"),
        ):
            with pytest.raises(InputError, match=said):
                call(PROMPT, **options)
