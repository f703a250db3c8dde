"""How a model decodes: whether answers must be exact, and who drafts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

from stem_edge.runtime.backends.interface import StepCosts
from stem_edge.runtime.engine import NO_GUESSES, Context, Guesses

if TYPE_CHECKING:
    from stem_edge.runtime.speculation.speculation import Speculation


class Stepping(NamedTuple):
    """How a model decodes."""

    # Decode several tokens or sequences in a step only where each has the bits of a step alone.
    exact: bool = False
    costs: StepCosts | None = None  # if they are known
    speculation: Speculation | None = None  # None: nothing drafts

    @property
    def same_bits(self) -> bool:
        """True if steps of several tokens are known to give each the bits of a step of its own."""
        return self.costs is not None and self.costs.same_bits

    @property
    def batches(self) -> bool:
        """True if sequences may decode together."""
        return not self.exact or (self.costs is not None and self.costs.same_in_batches)

    def guessing(
        self, prompt: Sequence[int], length: int, context: Context
    ) -> AbstractContextManager[Guesses]:
        """Lend the drafts for an answer; see Speculation.begin."""
        speculation = self.speculation
        if speculation is None or (self.exact and not speculation.costs.same_bits):
            return nullcontext(NO_GUESSES)
        return speculation.begin(prompt, length, context)
