"""What a model speculates with, and the guesses of one answer."""

from __future__ import annotations

from collections.abc import Sequence

from stem_edge.runtime.backends.step_costs import StepCosts
from stem_edge.runtime.speculation.gate import Gate
from stem_edge.runtime.speculation.text_drafts import TextDrafts


class Guesses:
    """Drafts for one answer; this base class has none."""

    def after(self, seen: Sequence[int], room: int) -> list[int]:
        """Return guesses at what follows the prompt and answer so far: at most `room` tokens.

        `seen` begins with what it was at the call before.
        """
        return []


class Speculation:
    """Makes the guesses of a model's answers. most: tokens that are drafted for a step."""

    def __init__(self, costs: StepCosts, most: int) -> None:
        self.costs, self._gate = costs, Gate(costs.times, most)

    @property
    def most(self) -> int:
        """Most tokens of a step beside its first."""
        return self._gate.most

    def begin(self) -> Guesses:
        """Return the guesses for a new answer; none where not even right ones would pay."""
        return GatedGuesses(self._gate) if self._gate.can_pay else Guesses()


class GatedGuesses(Guesses):
    """As many guesses as are expected to pay."""

    def __init__(self, gate: Gate) -> None:
        self._gate, self._text, self._drafted = gate, TextDrafts(), 0

    def after(self, seen: Sequence[int], room: int) -> list[int]:
        self._text.learn(seen, self._drafted)
        self._drafted = self._gate.choose(self._text.chances(self._gate.most), room).drafts
        return self._text.draft(self._drafted)
