"""Guesses from the text so far, and how sure they are."""

from __future__ import annotations

from collections.abc import Sequence

from stem_edge.runtime.speculation.gate import Chances
from stem_edge.runtime.speculation.ngrams import LONGEST, Match, TextIndex

# Class of a match by its length, and how often its next token is right before anything is known.
CLASSES = [0, 0, 0, 1, 2, 3, 3, 4, 4, 4, *[5] * (LONGEST - 10), 6]
EXPECTED = (0.25, 0.35, 0.45, 0.55, 0.7, 0.8, 0.9)


class TextDrafts:
    """Drafts for one answer. Each token is a lesson, whether anything was drafted or not."""

    def __init__(self) -> None:
        self._index, self._chances = TextIndex(), Chances(EXPECTED)
        self._match: Match | None = None

    def learn(self, seen: Sequence[int], drafted: int) -> None:
        """Take note of all tokens so far, of which the last match foretold some.

        drafted: tokens that were drafted from that match; of others, its first one counts.
        """
        known = len(self._index.ids)
        if self._match is not None:
            guesses = self._index.after(self._match, max(1, drafted))
            for further, (guess, token) in enumerate(zip(guesses, seen[known:], strict=False)):
                self._chances.saw(_kind(self._match.length + further), guess == token)
                if guess != token:
                    break
        self._index.extend(seen[known:])
        self._match = self._index.find()

    def chances(self, count: int) -> list[float]:
        """Return how likely each of the next guesses is right if those before it are."""
        if self._match is None:
            return []
        length = self._match.length
        return [self._chances.of(_kind(length + further)) for further in range(count)]

    def draft(self, count: int) -> list[int]:
        """Return guesses at the next tokens."""
        return self._index.after(self._match, count) if self._match is not None else []


def _kind(length: int) -> int:
    return CLASSES[min(length, LONGEST)]
