"""Prompt-lookup drafts: the tokens that followed where the text's last tokens occurred before."""

from __future__ import annotations

from collections.abc import Sequence

MATCH = 3  # number of tokens that must occur again
BITS = 64 // MATCH  # bits of each token id in a key
# After a match of n tokens, the next draft is right with probability n^2 / (n^2 + doubt). Doubt begins at 16,
# doubles after each step whose first draft was wrong, and halves after each step whose first draft was right.
DOUBT, LEAST_DOUBT, MOST_DOUBT = 16, 4, 32


class TextDrafts:
    """Prompt-lookup drafts for one answer. Methods: see ModelDrafts."""

    seconds = 0.0  # drafting takes no measurable time

    def __init__(self) -> None:
        self._ids, self._key = list[int](), 0
        self._places: dict[int, int] = {}  # MATCH tokens -> the place after their latest occurrence
        self._length, self._next = 0, 0  # number of tokens in the match, and the index after them
        self._doubt: float = DOUBT

    def learn(self, seen: Sequence[int], drafts: Sequence[int]) -> None:
        """Index the new tokens of `seen` (all so far). drafts: what this object proposed in the last step, or []."""
        known, ids, places, key = len(self._ids), self._ids, self._places, self._key
        if drafts:
            doubt = self._doubt / 2 if drafts[0] == seen[known] else self._doubt * 2
            self._doubt = min(max(doubt, LEAST_DOUBT), MOST_DOUBT)
        for place, token in enumerate(seen[known:], known + 1):
            goes_on = self._length and ids[self._next] == token
            ids.append(token)
            key = (key << BITS | token) & ((1 << MATCH * BITS) - 1)
            before = places.get(key, 0)
            if place >= MATCH:
                places[key] = place
            # Continue the match where it began, although its tokens may have occurred later, too.
            self._next = self._next + 1 if goes_on else before
            self._length = self._length + 1 if goes_on else MATCH if before else 0
        self._key = key

    @property
    def chance(self) -> float:
        return self._length**2 / (self._length**2 + self._doubt)

    def draft(self, seen: Sequence[int], count: int) -> list[int]:
        """Return `count` drafts: the tokens after an earlier occurrence of the text's last tokens.

        If fewer tokens followed, they are repeated.
        """
        found = self._ids[self._next : self._next + count]
        return (found * count)[:count]
