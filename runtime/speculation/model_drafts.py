"""Drafts from a draft model, for speculative decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Assumed fraction of right drafts, and the number of drafts that this assumption counts as. Each new outcome
# reduces the weight of earlier outcomes. So does each step without drafts, so that drafting is tried again.
EXPECTED, TRUST, MEMORY, FADING = 0.75, 3.0, 0.95, 0.995


class ModelDrafts:
    """Drafts from a draft model for one answer, and an estimate of how often they are right.

    draft: (token ids so far, count) -> drafts; may raise a step's errors. seconds: time per draft.
    """

    def __init__(self, draft: Callable[[Sequence[int], int], list[int]], seconds: float) -> None:
        self.draft, self.seconds = draft, seconds
        self._right = self._all = 0.0
        self._known = 0  # tokens of the text at the latest call of `learn`

    def learn(self, seen: Sequence[int], drafts: Sequence[int]) -> None:
        """Update `chance`: compare `drafts` with the tokens added to `seen` since the last call."""
        if not drafts:
            self._right, self._all = FADING * self._right, FADING * self._all
        for draft, token in zip(drafts, seen[self._known :], strict=False):
            self._right = MEMORY * self._right + (draft == token)
            self._all = MEMORY * self._all + 1
            if draft != token:
                break
        self._known = len(seen)

    @property
    def chance(self) -> float:
        """Estimated probability that the next draft is right."""
        return (TRUST * EXPECTED + self._right) / (TRUST + self._all)
