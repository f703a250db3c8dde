"""How a model computes several tokens in a step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

from stem_edge.runtime.backends.step_costs import StepCosts
from stem_edge.runtime.guesses import NO_GUESSES, Guesses

if TYPE_CHECKING:
    from stem_edge.runtime.speculation.speculation import Speculation


class Stepping(NamedTuple):
    """Whether a model decodes several tokens, or sequences, in a step."""

    exact: bool = False  # only where each then has the bits of a step of its own
    costs: StepCosts | None = None  # if they are known
    speculation: Speculation | None = None  # None: a step of an answer has one token

    @property
    def same_in_batches(self) -> bool:
        """Whether sequences that decode together are known to have the bits that each has alone."""
        return self.costs is not None and self.costs.same_in_batches

    def guessing(
        self, prompt: Sequence[int], length: int, *, exact: bool
    ) -> AbstractContextManager[Guesses]:
        """Lend the guesses for an answer; see Speculation.begin."""
        speculation = self.speculation
        if speculation is None or (exact and not speculation.costs.same_bits):
            return nullcontext(NO_GUESSES)
        return speculation.begin(prompt, length)
