"""Drafts from a draft model for one answer, and how often they are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# How often a draft is right before anything is known, and how many drafts that counts as. Each new outcome fades
# the earlier ones; so does each step without drafts, so that they are tried again now and then.
EXPECTED, TRUST, MEMORY, FADING = 0.75, 3.0, 0.95, 0.995


class ModelDrafts:
    """Drafts from a draft model for one answer, with the fraction of right drafts.

    draft: function (token ids, number) -> that many drafts; its errors are those of a step. seconds:
    time per draft.
    """

    def __init__(
        self, draft: Callable[[Sequence[int], int], list[int]], seconds: float = 0.0
    ) -> None:
        self.draft, self.seconds = draft, seconds
        self._right = self._all = 0.0
        self._known = 0  # tokens of the text at the latest call of `learn`

    def learn(self, seen: Sequence[int], drafts: Sequence[int]) -> None:
        """Compare `drafts`, made for the text of the last call, with the new tokens of `seen`."""
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
        """How often the next draft is right."""
        return (TRUST * EXPECTED + self._right) / (TRUST + self._all)
