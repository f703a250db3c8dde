"""Chooses source and number of drafts for each decode step, by their expected speedup.

Choices depend on the text and stored measurements only, so equal calls draft the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from stem_edge.errors import StemEdgeError
from stem_edge.runtime.backends.costs import BEFORE

if TYPE_CHECKING:
    from stem_edge.runtime.speculation.model_drafts import ModelDrafts
    from stem_edge.runtime.speculation.text_drafts import TextDrafts

    Drafts: TypeAlias = TextDrafts | ModelDrafts

WORTH = 1.05  # draft only if this many tokens are expected in the time of a one-token step


class Costs:
    """Times of steps, by number of tokens in the step. The unit is the time of a one-token step.

    times: number of tokens -> time, measured with BEFORE tokens in the context. most: largest number of drafts.
    attention: time that each context token above BEFORE adds, per token of the step.
    """

    def __init__(self, times: Mapping[int, float], most: int, attention: float = 0.0) -> None:
        self._attention = attention
        self.times = {n: max(1.0, times[n]) for n in sorted(times) if 1 < n <= most + 1}

    @property
    def can_pay(self) -> bool:
        """True if drafting is faster when all drafts are right."""
        return any(size / time > WORTH for size, time in self.times.items())

    def gains(self, chance: float, room: int, each: float, before: int) -> dict[int, float]:
        """Return, for each number of drafts up to `room`, the expected speedup over one-token steps.

        chance: probability that a draft is right. each: time to draft a token (a one-token step
        takes 1). before: number of earlier tokens.
        """
        deep = self._attention * max(0, before - BEFORE)
        return {
            size - 1: sum(chance**n for n in range(size))
            * (1 + deep)
            / (time + size * deep + (size - 1) * each)
            for size, time in self.times.items()
            if size <= room + 1
        }


class BestGuesses:
    """Drafts for one answer. Each step uses the source and number expected to be fastest.

    sources: prompt lookup, and a draft model if there is one. seconds: time of a one-token step.
    """

    def __init__(self, costs: Costs, sources: list[Drafts], seconds: float) -> None:
        self._costs, self._sources, self._seconds = costs, sources, seconds
        self._chosen: Drafts | None = None  # the source of the last step's drafts
        self._made = list[int]()

    def __call__(self, seen: Sequence[int], room: int) -> list[int]:
        """Return up to `room` drafts. seen: token ids of the prompt and answer so far."""
        best, count, chosen = WORTH, 0, None
        for source in self._sources:
            source.learn(seen, self._made if source is self._chosen else [])
            each = source.seconds / self._seconds
            for drafts, gain in self._costs.gains(source.chance, room, each, len(seen)).items():
                if gain > best:
                    best, count, chosen = gain, drafts, source
        self._chosen, self._made = chosen, []
        if chosen is not None:
            try:
                self._made = chosen.draft(seen, count)
            except StemEdgeError:  # not asked again
                self._sources.remove(chosen)
        return self._made
