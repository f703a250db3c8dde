"""What is drafted: from which source, how many tokens, and when none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stem_edge.errors import BackendError
from stem_edge.runtime.speculation.guesses import BestGuesses, Costs
from stem_edge.runtime.speculation.model_drafts import ModelDrafts
from stem_edge.runtime.speculation.text_drafts import TextDrafts

TIMES = {2: 1.1, 4: 1.2, 8: 1.4}
DEAR = {2: 1.44, 4: 2.43, 8: 4.02}  # measured: AVX2 with int4
NEVER = {2: 2.0, 4: 4.0, 8: 8.0}
NEW = list(range(1000, 1400))  # tokens that never occur again


class Fake(ModelDrafts):
    """Drafts 1, 2, 3, ...; the first `right` of a step are right where token n of a text is n."""

    def __init__(self, seconds: float, right: int = 7) -> None:
        super().__init__(self.drafted, seconds)
        self.right, self.calls = right, 0

    def drafted(self, seen: Sequence[int], count: int) -> list[int]:
        self.calls += 1
        return [len(seen) + n if n < self.right else -1 for n in range(count)]


def follow(
    text: Sequence[int],
    *sources: ModelDrafts,
    times: dict[int, float] = TIMES,
    attention: float = 0.0,
    room: int = 7,
) -> list[int]:
    """Let an answer grow to a text; return the number of drafts of each step."""
    guesses = BestGuesses(Costs(times, 7, attention), [TextDrafts(), *sources], 1.0)
    known, sizes = 1, list[int]()
    while known < len(text):
        drafts = guesses(text[:known], room)
        pairs = zip(drafts, text[known:], strict=False)
        known += next((n for n, (a, b) in enumerate(pairs) if a != b), len(drafts)) + 1
        sizes.append(len(drafts))
    return sizes


@pytest.mark.parametrize(
    ("cheap", "dear", "chosen"),
    [
        (Fake(0.01, 7), Fake(0.2, 7), 0),
        (Fake(0.01, 0), Fake(0.1, 7), 1),  # wrong drafts cost a step, so dearer right ones win
        (Fake(0.01, 1), Fake(0.05, 7), 1),
        (Fake(0.01, 7), Fake(0.01, 1), 0),
    ],
)
def test_the_source_that_pays_most(cheap: Fake, dear: Fake, chosen: int) -> None:
    follow(range(400), cheap, dear)
    calls = cheap.calls, dear.calls
    assert calls[chosen] > 4 * calls[1 - chosen]


def test_none_where_none_pays() -> None:
    """Sources are tried again now and then, as a text changes."""
    wrong, dear = Fake(0.01, 0), Fake(1.0)
    sizes = follow(range(400), wrong, dear)
    assert 0 < wrong.calls < 60 and dear.calls == 0 and sizes.count(0) > 340


def test_more_drafts_where_they_come_true() -> None:
    sizes = follow(range(200), Fake(0.03), times=DEAR)
    assert sizes[0] == 1 and set(sizes[-10:]) == {7}
    assert set(follow(range(200), Fake(0.03, 2), times=DEAR)[-10:]) <= {1, 3}


def test_an_answer_of_64_tokens_hardly_pays_for_drafts_that_are_all_wrong() -> None:
    sizes = follow(range(64), Fake(0.03, 0), times=DEAR)
    assert sum(size > 0 for size in sizes) > 1  # one wrong draft proves nothing
    assert sum(DEAR.get(size + 1, 1.0) + 0.03 * size for size in sizes) < 1.03 * len(sizes)


def test_one_that_fails_is_not_asked_again() -> None:
    class Failing(Fake):
        def drafted(self, seen: Sequence[int], count: int) -> list[int]:
            super().drafted(seen, count)
            raise BackendError("broken")

    failing, other = Failing(0.01), Fake(0.02)
    follow(range(60), failing, other)
    assert failing.calls == 1 and other.calls > 3


@pytest.mark.parametrize("times", [TIMES, DEAR])
def test_a_copy_is_drafted_whole(times: dict[int, float]) -> None:
    """Also where all its pairs of tokens occur later, too, and of a text that repeats itself."""
    source = NEW[:200]
    for text in (source * 2, [*source, *NEW[19:22] * 20, *source], [1, 2, 3] * 100):
        sizes = follow(text, times=times)
        assert sizes[-4] == 7 and sizes.count(7) >= 20


def test_text_that_does_not_repeat_is_left_alone() -> None:
    assert set(follow(NEW)) == {0}
    misleading = [token for n in range(60) for token in (1, 2, 3, 1000 + n)]
    sizes = follow(misleading, times=DEAR)
    assert sum(size > 0 for size in sizes) < 5


@pytest.mark.parametrize(("room", "most"), [(7, 7), (6, 3), (2, 1), (0, 0)])
def test_the_most_drafts(room: int, most: int) -> None:
    assert max(follow(NEW[:50] * 3, room=room)) == most
    costs = Costs(TIMES, room)
    assert max([0, *costs.gains(1.0, 7, 0.0, 0)]) == most and costs.can_pay == (most > 0)


def test_steps_that_cost_as_much_as_their_tokens_are_left_alone() -> None:
    text = NEW[:50] * 3
    assert not Costs(NEVER, 7).can_pay and set(follow(text, times=NEVER)) == {0}
    assert set(follow(text, Fake(0.5, 7))) >= {7}  # the text's drafts take no time
    assert set(follow(NEW[:100] * 4, times=DEAR, attention=0.1)) <= {0, 1}  # attention takes longer
