"""How a model computes several tokens in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

from stem_edge.runtime.backends.interface import StepCosts
from stem_edge.runtime.steps import NO_GUESSES, Guesses

if TYPE_CHECKING:
    from stem_edge.runtime.backends.memory_plan import MemoryPlan
    from stem_edge.runtime.backends.options import LoadOptions
    from stem_edge.runtime.engine import Engine
    from stem_edge.runtime.speculation.draft_bundle import DraftBundle
    from stem_edge.runtime.speculation.opening import Smaller
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


def open_stepping(
    engine: Engine,
    plan: MemoryPlan,
    vocab_size: int,
    costs: StepCosts | None,
    draft: DraftBundle | None,
    options: LoadOptions,
    load: Callable[..., Smaller],
) -> Stepping:
    """Let a model guess ahead, if that is wanted, exact unless asked for, and of known cost."""
    alone = Stepping(options.exact, costs)
    asked = options.speculate != "auto" or draft is not None
    if not options.speculate or not (
        asked or (costs is not None and costs.sure and costs.same_bits)
    ):
        return alone
    from stem_edge.runtime.speculation.opening import open_speculation

    speculation = open_speculation(engine, plan, vocab_size, costs, draft, options, load)
    return alone._replace(speculation=speculation)
