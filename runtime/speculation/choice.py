"""Whether a model speculates, by the options it was loaded with and what its steps cost."""

from __future__ import annotations

import numpy as np

from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.memory_plan import CHUNK_TOKENS
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.backends.step_costs import SIZES, StepCosts, measure_steps
from stem_edge.runtime.engine import Engine
from stem_edge.runtime.speculation.speculation import Speculation


def speculation_for(
    engine: Engine,
    context_length: int,
    vocab_size: int,
    costs: StepCosts | None,
    options: LoadOptions,
) -> Speculation | None:
    """Return what to speculate with; None if that is not wanted, not exact, or of unknown cost.

    costs: measured earlier, if at all; otherwise measured now if speculation is asked for. Raises
    what a step raises.
    """
    if not options.speculate:
        return None
    if costs is None and options.speculate != "auto":
        costs = measured(engine, context_length, vocab_size)
    if costs is None or (options.exact and not costs.same_bits):
        return None
    at_will = options.speculate is True or options.speculate == "auto"
    return Speculation(costs, max(SIZES) if at_will else int(options.speculate))


def measured(engine: Engine, context_length: int, vocab_size: int) -> StepCosts | None:
    """Measure steps over the first tokens of the vocabulary, before anybody uses the engine.

    None if context, slots or planned memory hold no such step.
    """
    most = max(SIZES)
    before = min(CHUNK_TOKENS, engine.chunk_tokens, context_length - most)
    if before < 1 or engine.logit_tokens < most:
        return None
    context = engine.backend.open_context(before + most)
    ids = np.arange(before + most, dtype=np.int64) % vocab_size
    # Fetched once, because the row cache counts how often each is used.
    slots = np.resize(engine.rows.fetch(ids[:most]), before + most)

    def step(position: int, count: int) -> F32:
        places = slice(position, position + count)
        context.begin(ids[places], position)
        return context.finish(slots[places], count)

    step(0, before)
    return measure_steps(step, before)
