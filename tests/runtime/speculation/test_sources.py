"""Which source guesses: the one that pays most, by what its drafts cost and how often they are right."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stem_edge.errors import BackendError
from stem_edge.runtime.speculation.drafts import ModelDrafts
from stem_edge.runtime.speculation.gate import Gate
from stem_edge.runtime.speculation.guesses import GatedGuesses
from stem_edge.runtime.speculation.text_drafts import TextDrafts

STEP = 1.0  # seconds
TIMES = {2: 1.1, 4: 1.2, 8: 1.4}
DEAR = {2: 1.44, 4: 2.43, 8: 4.02}


class Fake(ModelDrafts):
    """Drafts 1, 2, 3, ...; the next token is right as often as it was told."""

    def __init__(self, seconds: float, right: int = 7) -> None:
        super().__init__(self.drafted, seconds)
        self.right, self.calls = right, 0

    def drafted(self, seen: Sequence[int], count: int) -> list[int]:
        self.calls += 1
        return [len(seen) + n if n < self.right else -1 for n in range(count)]


def follow(guesses: GatedGuesses, tokens: int) -> list[int]:
    """Let a text grow in which token n is n; return the drafts of each step."""
    seen, sizes = [0], list[int]()
    while len(seen) < tokens:
        drafts = guesses.after(seen, 7)
        sizes.append(len(drafts))
        right = next((n for n, draft in enumerate(drafts) if draft != len(seen) + n), len(drafts))
        seen += range(len(seen), len(seen) + right + 1)
    return sizes


@pytest.mark.parametrize(
    ("cheap", "dear", "chosen"),
    [
        (Fake(0.01, 7), Fake(0.2, 7), 0),
        (Fake(0.01, 0), Fake(0.1, 7), 1),  # wrong guesses cost a step, so dearer right ones win
        (Fake(0.01, 1), Fake(0.05, 7), 1),
        (Fake(0.01, 7), Fake(0.01, 1), 0),
    ],
)
def test_the_source_that_pays_most(cheap: Fake, dear: Fake, chosen: int) -> None:
    follow(GatedGuesses(Gate(TIMES, 7), [TextDrafts(), cheap, dear], STEP), 400)
    calls = cheap.calls, dear.calls
    assert calls[chosen] > 4 * calls[1 - chosen]


def test_none_where_none_pays() -> None:
    """Sources are tried again now and then, as a text changes."""
    wrong, dear = Fake(0.01, 0), Fake(1.0)
    sizes = follow(GatedGuesses(Gate(TIMES, 7), [TextDrafts(), wrong, dear], STEP), 400)
    assert 0 < wrong.calls < 60 and dear.calls == 0 and sizes.count(0) > 340


def test_as_many_drafts_as_come_true() -> None:
    sizes = follow(GatedGuesses(Gate(TIMES, 7), [TextDrafts(), Fake(0.02, 3)], STEP), 400)
    assert sizes[-20:].count(3) > 15


def test_longer_drafts_are_tried_where_short_ones_are_right() -> None:
    sizes = follow(GatedGuesses(Gate(DEAR, 7), [TextDrafts(), Fake(0.03)], STEP), 200)
    assert sizes[0] == 1 and set(sizes[-10:]) == {7}


def test_an_answer_of_64_tokens_hardly_pays_for_drafts_that_are_all_wrong() -> None:
    sizes = follow(GatedGuesses(Gate(DEAR, 7), [TextDrafts(), Fake(0.03, 0)], STEP), 64)
    assert sum(size > 0 for size in sizes) > 1  # one wrong draft proves nothing
    spent = sum(DEAR.get(size + 1, 1.0) + 0.03 * size for size in sizes)
    assert spent < 1.03 * len(sizes)


def test_one_that_fails_is_not_asked_again() -> None:
    class Failing(Fake):
        def drafted(self, seen: Sequence[int], count: int) -> list[int]:
            super().drafted(seen, count)
            raise BackendError("broken")

    failing, other = Failing(0.01), Fake(0.02)
    guesses = GatedGuesses(Gate(TIMES, 7), [TextDrafts(), failing, other], STEP)
    follow(guesses, 60)
    assert failing.calls == 1 and other.calls > 3
