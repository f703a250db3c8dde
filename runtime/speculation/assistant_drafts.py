"""Guesses of a model's own assistant, which reads what the model has computed of the text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from stem_edge.runtime.backends.interface import BackendDrafter
from stem_edge.runtime.engine import Engine
from stem_edge.runtime.speculation.drafts import Drafts


class AssistantDrafts(Drafts):
    """Drafts for one answer, whose context has all tokens but the last. seconds: that each takes."""

    def __init__(self, engine: Engine, drafter: BackendDrafter, seconds: float) -> None:
        super().__init__()
        self._engine, self._drafter, self.seconds = engine, drafter, seconds

    def draft(self, seen: Sequence[int], count: int) -> list[int]:
        """Return guesses at the next tokens."""
        last, position = seen[-1], len(seen) - 1
        return self._engine.in_turn(partial(self._drafter.draft, last, position, count))
