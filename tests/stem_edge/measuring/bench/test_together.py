"""Figures of sequences that decode together, and runs of the demo that follow texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from installed import DEMO

import stem_edge
from stem_edge.errors import InputError
from stem_edge.measuring.bench.stem import Following, decode_guessing, decode_together, step_costs
from stem_edge.measuring.bench.together import Arrival, FollowedText, Together, lengths, texts_of
from stem_edge.runtime import Model
from stem_edge.runtime.backends.interface import StepCosts
from stem_edge.runtime.decoding import Stepping
from stem_edge.runtime.rows.records import RowCounters
from stem_edge.runtime.speculation.speculation import Speculation

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with stem_edge.load(DEMO, sequences=5, speculate=False, warm_start=False) as loaded:
        # Made up, because a busy machine cannot measure them.
        costs = StepCosts(seconds=1e-3, times={1: 1.0, 2: 1.1, 4: 1.2, 8: 1.3}, same_bits=False)
        loaded.speculate(Speculation(costs, 4))
        # Reads rows, which starts a thread that no test then leaks.
        loaded.generate_text(PROMPT, max_new_tokens=2)
        yield loaded


def together(count: int, *arrivals: tuple[float, int, int]) -> Together:
    return Together(count, None, {}, 0.0, [Arrival(*arrival) for arrival in arrivals])


def test_figures_are_those_of_the_time_in_which_all_decode() -> None:
    run = together(
        2,
        *[(1, 0, 5), (2, 0, 5), (3, 1, 7)],  # sequence 1 begins at 3
        *[(4, 0, 5), (5, 1, 5), (6, 0, 6), (7, 1, 8)],  # and ends at 7
        *[(11, 0, 5), (12, 2, 9)],  # sequence 2 joins at 12
    )
    found = run.figures()
    assert found["tokens_per_second"] == 4 / (7 - 3)
    assert found["distinct_rows_per_step"] == (1 + 2) / 2
    assert found["distinct_rows_per_token"] == 3 / 4
    assert found["first_token_seconds"] == 12 - 7
    assert found["longest_wait_seconds"] == 11 - 6
    assert "allowed_gain" not in found
    assert replace(run, costs={2: 1.25}).figures()["allowed_gain"] == 1.6


def test_figures_of_one_sequence() -> None:
    found = together(1, (2, 0, 5), (3, 0, 5), (4, 0, 6)).figures()
    assert found["tokens_per_second"] == 1 and found["distinct_rows_per_step"] == 1
    assert found["first_token_seconds"] == 2
    assert "longest_wait_seconds" not in found


def test_rows_are_counted_while_all_decode() -> None:
    counts = iter([RowCounters(misses=3, bytes_read=10), RowCounters(misses=7, bytes_read=50)])
    run = Together(1, lambda: next(counts))
    run.chosen(0, 1)
    run.chosen(0, 2)
    found = run.figures()
    assert (found["rows_read_per_token"], found["flash_bytes_per_token"]) == (4, 40)


def test_sequences_that_were_not_together() -> None:
    run = together(2, (1, 0, 5), (2, 1, 5), (3, 1, 5), (4, 2, 5))
    with pytest.raises(InputError, match=r"2 sequences did not decode together.*more --memory"):
        run.figures()


def test_texts_are_pieces_of_the_ids_and_outlive_the_last() -> None:
    ids = list(range(1000))
    new = lengths(3, prompt_tokens=20, new_tokens=10)
    assert new[:2] == [16, 16] and new[2:] == [10, 1]
    texts = texts_of(ids, 3, 20, 10)
    assert [len(text.prompt) for text in texts] == [20] * 4
    assert [len(text.answer) for text in texts] == new
    joined = [text.prompt + text.answer for text in texts]
    assert [text[0] for text in joined] == [0, 36, 72, 102]
    assert all(text == list(range(text[0], text[0] + len(text))) for text in joined)
    assert texts_of(ids, 1, 20, 10, begin=50) == [FollowedText(ids[50:70], ids[70:80])]


def test_few_ids_repeat() -> None:
    for text in texts_of([1, 2, 3], 8, 20, 10, begin=5):
        joined = text.prompt + text.answer
        assert len(text.prompt) == 20
        assert all((b - a) % 3 == 1 for a, b in pairwise(joined))


def test_following_takes_the_texts_tokens_and_tells_the_models_own(model: Model) -> None:
    prompt = model.tokenize(PROMPT)
    chunks = list(model.generate(prompt, max_new_tokens=6))
    greedy = [token for chunk in chunks for token in chunk.token_ids]
    seen: list[tuple[int, int]] = []
    text = (*prompt, greedy[0], greedy[1], 7, 8)
    params = Following(
        max_new_tokens=4, text=text, chosen=lambda token, own: seen.append((token, own))
    )
    found = [token for chunk in model.generate(prompt, params) for token in chunk.token_ids]
    assert found == [*greedy[:2], 7, 8]
    assert [token for token, _ in seen] == found
    assert [own for _, own in seen[:3]] == greedy[:3]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_sequences_of_the_demo_decode_together(model: Model, count: int) -> None:
    ids = model.tokenize("The capital of Peru is Lima. Spain borders France. " * 4)
    texts = texts_of(ids, count, 8, 6)
    run = decode_together(model, texts, count)
    chosen: dict[int, list[int]] = {}
    for _, sequence, token in run.arrivals:
        chosen.setdefault(sequence, []).append(token)
    assert chosen[count - 1] == texts[count - 1].answer
    assert all(
        tokens == texts[sequence].answer[: len(tokens)] for sequence, tokens in chosen.items()
    )
    found = run.figures()
    assert found["tokens_per_second"] > 0 and found["first_token_seconds"] > 0
    assert 1 <= found["distinct_rows_per_step"] <= count
    assert (count > 1) == (count in chosen) == ("longest_wait_seconds" in found)
    assert found.get("allowed_gain") == {1: None, 2: 2 / 1.1, 4: 4 / 1.2}[count]


def test_guesses_of_the_demo_are_those_of_the_text(model: Model) -> None:
    ids = model.tokenize("one two three four five six seven eight. ")
    text = FollowedText(ids, (ids[1:] * 3)[:40])
    plain, guessing = decode_guessing(model, text, 0), decode_guessing(model, text, 1)
    assert plain.drafted == plain.accepted == 0 and plain.seconds > 0
    assert len(plain.own) == len(guessing.own) == 40
    assert 0 < guessing.accepted <= guessing.drafted
    figures = guessing.figures()
    assert figures["step_of_2"] == 1.1 and "step_of_1" not in figures
    assert model.stepping.speculation is not None


@pytest.mark.parametrize(("sure", "expected"), [(True, {2: 1.5}), (False, {})])
def test_costs_are_known_where_nothing_is_guessed(
    model: Model, monkeypatch: pytest.MonkeyPatch, sure: bool, expected: dict[int, float]
) -> None:
    costs = StepCosts(seconds=1.0, times={1: 1.0, 2: 1.5}, same_bits=False, sure=sure)
    monkeypatch.setattr(model, "stepping", Stepping(costs=costs))
    assert step_costs(model) == expected
