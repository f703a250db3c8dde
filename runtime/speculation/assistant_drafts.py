"""Guesses of a model's own assistant, which reads what the model has computed of the text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol, runtime_checkable

from stem_edge.runtime.backends.interface import BackendContext
from stem_edge.runtime.engine import Engine
from stem_edge.runtime.speculation.drafts import Drafts


class BackendDrafter(Protocol):
    """Drafts of a model's own assistant in one context, whose keys and values it reads."""

    def draft(self, token_id: int, position: int, count: int) -> list[int]:
        """Return the most probable tokens after the one at a position.

        That one is not computed yet, and the one before was among those with logits in the context's last
        step. Raises BackendError.
        """


@runtime_checkable
class Assisted(Protocol):
    """A backend whose model has an assistant."""

    def open_drafter(self, context: BackendContext) -> BackendDrafter:
        """Return what drafts in a context."""


class AssistantDrafts(Drafts):
    """Drafts for one answer, whose context has all tokens but the last. seconds: that each takes."""

    def __init__(self, engine: Engine, drafter: BackendDrafter, seconds: float) -> None:
        super().__init__()
        self._engine, self._drafter, self.seconds = engine, drafter, seconds

    def draft(self, seen: Sequence[int], count: int) -> list[int]:
        """Return guesses at the next tokens."""
        last, position = seen[-1], len(seen) - 1
        return self._engine.in_turn(partial(self._drafter.draft, last, position, count))
