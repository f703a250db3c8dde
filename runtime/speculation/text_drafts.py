"""Drafts from the text so far: what followed the last time its latest tokens occurred.

For each pair of neighbouring tokens, an index has the place where it last occurred, and for each place the
previous one with the same pair. Of the latest such places, the one with the longest common past wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stem_edge.runtime.speculation.gate import Chances

LONGEST = 16  # tokens of a match that are compared
TRIES = 8  # places that are compared for a token
SHIFT = 32  # bits of a token id in a key


class Match(NamedTuple):
    """An earlier place in the text. The `length` tokens before it equal the text's last tokens."""

    place: int
    length: int


class TextIndex:
    """The token ids of a growing text, and the places of each pair of neighbouring tokens."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._last: dict[int, int] = {}  # pair -> latest place of its second token
        self._before: list[int] = []  # place -> the one before with the same pair, or -1
        self._followed = -1  # place of the latest match

    def extend(self, ids: Sequence[int]) -> None:
        """Append tokens to the text."""
        first = len(self.ids)
        self.ids += ids
        if self._followed >= 0:
            self._followed += len(ids)
        if not first and len(ids):
            self._before.append(-1)
            first = 1
        # At once for a whole prompt, which may have a hundred thousand tokens.
        pairs = np.array(self.ids[first - 1 :], np.int64)
        last, before = self._last, self._before
        for place, key in enumerate((pairs[:-1] << SHIFT | pairs[1:]).tolist(), first):
            before.append(last.get(key, -1))
            last[key] = place

    def find(self) -> Match | None:
        """Return the longest match, the latest of equal length; None if the last pair is new."""
        end, best = len(self.ids) - 1, Match(-1, 1)
        # Where the text is a copy of an earlier part, keep to that part.
        places = [self._followed] if 0 <= self._followed < end else []
        place = self._before[end] if end > 0 else -1
        while place >= 0 and len(places) < TRIES:
            places.append(place)
            place = self._before[place]
        for place in places:
            if (length := self._length(place, end)) > best.length:
                best = Match(place, length)
            if length == LONGEST:
                break
        self._followed = best.place
        return best if best.place >= 0 else None

    def _length(self, place: int, end: int) -> int:
        ids, most = self.ids, min(LONGEST, place + 1)
        return next((n for n in range(most) if ids[place - n] != ids[end - n]), most)

    def after(self, match: Match, count: int) -> list[int]:
        """Return the `count` tokens after a match. At the text's end, repeat from the match."""
        found = self.ids[match.place + 1 : match.place + 1 + count]
        return (found * count)[:count]


# Class of a match by its length, and how often its next token is right before anything is known.
CLASSES = [0, 0, 0, 1, 2, 3, 3, 4, 4, 4, *[5] * (LONGEST - 10), 6]
EXPECTED = (0.25, 0.35, 0.45, 0.55, 0.7, 0.8, 0.9)


class TextDrafts:
    """Drafts from the text so far, for one answer. Same methods as ModelDrafts.

    It learns from every token, whether or not it was drafted.
    """

    seconds = 0.0  # drafting takes no measurable time

    def __init__(self) -> None:
        self._index, self._chances = TextIndex(), Chances(EXPECTED)
        self._match: Match | None = None

    def learn(self, seen: Sequence[int], drafts: Sequence[int]) -> None:
        """Add the new tokens of `seen`, and record which of them the last match predicted.

        Without drafts from that match, one token is counted as if it had been drafted.
        """
        known = len(self._index.ids)
        if self._match is not None:
            guesses = self._index.after(self._match, max(1, len(drafts)))
            for further, (guess, token) in enumerate(zip(guesses, seen[known:], strict=False)):
                self._chances.saw(_kind(self._match.length + further), guess == token)
                if guess != token:
                    break
        self._index.extend(seen[known:])
        self._match = self._index.find()

    def chances(self, seen: Sequence[int], count: int) -> list[float]:
        """Return `count` probabilities: p[i] is for draft i, if earlier drafts are right."""
        if self._match is None:
            return []
        length = self._match.length
        return [self._chances.of(_kind(length + further)) for further in range(count)]

    def draft(self, seen: Sequence[int], count: int) -> list[int]:
        """Return `count` drafts."""
        return self._index.after(self._match, count) if self._match is not None else []


def _kind(length: int) -> int:
    return CLASSES[min(length, LONGEST)]
