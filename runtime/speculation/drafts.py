"""Drafts from a draft model for one answer, and how often they are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stem_edge.runtime.backends.costs import MOST
from stem_edge.runtime.speculation.gate import MEMORY

# How often a draft of a model is right before anything is known, and how many drafts that counts as. What is
# known fades slower than that of text, because a model always has a draft. Simulated: with steps of 2, 4 and 8
# tokens at 1.44, 2.43 and 4.02, drafts that are all wrong cost an answer of 64 tokens 1.5 % of its time, and
# 3.9 % with steps at 1.1, 1.2 and 1.4 and drafts at 0.06.
EXPECTED, TRUST, FADING = 0.75, 3.0, 0.995
PLACES = MOST - 1


class ModelDrafts:
    """Drafts from a draft model for one answer, with the fraction of right drafts at each place.

    A place without data is expected to be right as often as the place before it; otherwise long drafts would not be
    tried where short ones are nearly always right.

    draft: function (token ids, number) -> that many drafts; its errors are those of a step. seconds:
    time per draft.
    """

    def __init__(
        self, draft: Callable[[Sequence[int], int], list[int]], seconds: float = 0.0
    ) -> None:
        self.draft, self.seconds = draft, seconds
        self._hits, self._tries = [0.0] * PLACES, [0.0] * PLACES
        self._known = 0  # tokens of the text at the latest call of `learn`

    def learn(self, seen: Sequence[int], drafts: Sequence[int]) -> None:
        """Compare `drafts`, made for the text of the last call, with the new tokens of `seen`."""
        if not drafts:
            self._hits = [FADING * count for count in self._hits]
            self._tries = [FADING * count for count in self._tries]
        for place, (draft, token) in enumerate(zip(drafts, seen[self._known :], strict=False)):
            self._hits[place] = MEMORY * self._hits[place] + (draft == token)
            self._tries[place] = MEMORY * self._tries[place] + 1
            if draft != token:
                break
        self._known = len(seen)

    def chances(self, seen: Sequence[int], count: int) -> list[float]:
        """Return up to `count` probabilities: p[i] is for draft i, if earlier drafts are right."""
        found, chance = list[float](), EXPECTED
        for hits, tries in zip(self._hits[:count], self._tries, strict=False):
            chance = (TRUST * chance + hits) / (TRUST + tries)
            found.append(chance)
        return found
