"""What followed where the last tokens of a text stood before."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from stem_edge.runtime.speculation.text_drafts import LONGEST, TRIES, Match, TextDrafts, TextIndex


def index_of(*parts: Sequence[int]) -> TextIndex:
    index = TextIndex()
    for part in parts:
        index.extend(part)
    return index


def slowly(ids: Sequence[int]) -> Match | None:
    """Return the longest match, the latest of equal ones, by comparing every place."""
    best = None
    for place in range(1, len(ids) - 1):
        length = 0
        while length < min(LONGEST, place + 1) and ids[place - length] == ids[-1 - length]:
            length += 1
        if length >= max(2, best.length if best else 0):
            best = Match(place, length)
    return best


@pytest.mark.parametrize(
    ("text", "match", "after"),
    [
        ([], None, []),
        ([1], None, []),
        ([1, 1], None, []),
        ([1, 2, 3], None, []),
        ([1, 2, 3, 1, 2], Match(1, 2), [3, 1, 2, 3]),
        ([1, 2, 3, 4, 1, 2, 5, 6, 3, 1, 2], Match(5, 2), [5, 6, 3, 1]),  # the latest
        ([9, 1, 2, 3, 4, 1, 2, 5, 6, 9, 1, 2], Match(2, 3), [3, 4, 1, 2]),  # the longest
        ([7, 7, 7], Match(1, 2), [7, 7, 7, 7]),  # a repetition goes on
        ([5, 6, 5, 6, 5], Match(2, 3), [6, 5, 6, 5]),
    ],
)
def test_matches(text: list[int], match: Match | None, after: list[int]) -> None:
    index = index_of(text)
    assert index.find() == match
    if match is not None:
        assert index.after(match, 4) == after
        assert index.after(match, 0) == []


@pytest.mark.parametrize("seed", range(20))
def test_they_are_the_longest_and_latest(seed: int) -> None:
    rng = np.random.default_rng(seed)
    # So many ids that no pair occurs more often than places are compared.
    ids = rng.integers(0, 12, 120).tolist()
    ids[60:75] = ids[20:35]
    whole = TextIndex()
    for end, token in enumerate(ids, 1):
        whole.extend([token])
        pairs = list(pairwise(ids[:end]))
        if pairs and pairs.count(pairs[-1]) < TRIES:
            assert whole.find() == slowly(ids[:end]) == index_of(ids[:end]).find()


def test_a_copy_is_followed_where_its_pairs_are_everywhere() -> None:
    source = list(range(100, 140))
    index = index_of([*source, *[120, 121, 0] * 50, *source[:10]])
    for place in range(10, 39):
        found = index.find()
        assert found is not None and found.place == place - 1
        index.extend(source[place : place + 1])


def test_a_long_prompt_is_known_at_once() -> None:
    ids = np.random.default_rng(0).integers(0, 1 << 17, 100_000).tolist()
    at_once, bit_by_bit = index_of(ids + ids[50:60]), index_of(ids[:99_000], ids[99_000:])
    bit_by_bit.extend(ids[50:60])
    assert at_once.find() == bit_by_bit.find() == Match(59, 10)


def test_every_token_is_a_lesson() -> None:
    drafts, text = TextDrafts(), [1, 2, 3, 4] * 3
    drafts.learn(text, [])
    first = drafts.chances(text, 3)
    assert drafts.draft(text, 3) == [1, 2, 3] and first == sorted(first)
    drafts.learn([*text, 1], [])  # nothing was drafted, but it would have been right
    assert drafts.draft(text, 2) == [2, 3]
    right = drafts.chances(text, 1)[0]
    drafts.learn([*text, 1, 9], [])
    drafts.learn([*text, 1, 9, 1, 2, 3, 4, 1, 2, 3, 4, 1], [])
    assert drafts.chances(text, 1)[0] < right
    drafts.learn([*text, 1, 9, 1, 2, 3, 4, 1, 2, 3, 4, 1, 8], [])
    drafts.learn([*text, 1, 9, 1, 2, 3, 4, 1, 2, 3, 4, 1, 8, 8], [])
    assert TextDrafts().chances([], 3) == [] and TextDrafts().draft([], 2) == []
