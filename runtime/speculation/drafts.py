"""Sources of guesses: what a model speculates with, and what each drafts for one answer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from stem_edge.runtime.engine import Context
from stem_edge.runtime.speculation.gate import Chances

EXPECTED = (0.7,) * 7  # how often each token of a model is right before anything is known
# Unlike text, a model always has a guess. So what it is expected to do counts less, and what was seen fades
# slower: where all are wrong, an answer of 64 tokens takes 3 % longer, not 10 % (with drafts at 0.06 of a
# step, and steps of 2, 4 and 8 tokens at 1.1, 1.2 and 1.4).
TRUST, FADING = 2.0, 0.995


class Drafts(Protocol):
    """Guesses of one source at the next tokens of one answer."""

    @property
    def seconds(self) -> float:
        """Time that a draft takes."""

    def learn(self, seen: Sequence[int], drafts: Sequence[int]) -> None:
        """Learn from a text that has grown since the last call, after it gave these drafts for it."""

    def chances(self, seen: Sequence[int], count: int) -> list[float]:
        """Return how likely each of the next drafts is right if those before it are; fewer if it has fewer."""

    def draft(self, seen: Sequence[int], count: int) -> list[int]:
        """Return guesses at the next tokens. Raises what a step raises."""


class Source(Protocol):
    """What drafts for the answers of a model."""

    def begin(
        self, prompt: Sequence[int], length: int, context: Context
    ) -> AbstractContextManager[Drafts]:
        """Lend the drafts for an answer.

        length: most tokens of prompt and answer that are computed, or drafted. context: the answer's.
        Raises StemEdgeError if there are none.
        """

    def close(self) -> None:
        """Release it."""


class ByPlace:
    """How often drafts were right, by their place after the text."""

    def __init__(self) -> None:
        self._chances = Chances(EXPECTED, TRUST, FADING)
        self._known = 0  # tokens of the text at the latest call of `learn`

    def learn(self, seen: Sequence[int], drafts: Sequence[int]) -> None:
        """See Drafts."""
        if not drafts:
            self._chances.fade()
        for place, (draft, token) in enumerate(zip(drafts, seen[self._known :], strict=False)):
            self._chances.saw(place, draft == token)
            if draft != token:
                break
        self._known = len(seen)

    def chances(self, seen: Sequence[int], count: int) -> list[float]:
        """See Drafts."""
        return [self._chances.of(place) for place in range(count)]
