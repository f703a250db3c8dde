"""Measuring what decoding steps cost, where preparing the bundle has not."""

from __future__ import annotations

import numpy as np

from stem_edge.runtime.backends.interface import MOST, StepCosts
from stem_edge.runtime.backends.memory_plan import CHUNK_TOKENS, MemoryPlan
from stem_edge.runtime.backends.step_measure import Probe, measure_steps
from stem_edge.runtime.engine import Engine


def measured(engine: Engine, plan: MemoryPlan, vocab_size: int) -> StepCosts | None:
    """Measure steps over the first tokens of the vocabulary, before anybody uses the engine.

    None if context, slots or planned memory hold no such step. Raises what a step raises.
    """
    most = MOST
    before = min(CHUNK_TOKENS, engine.chunk_tokens, plan.context_length - most)
    if before < 1 or engine.logit_tokens < most:
        return None
    context = engine.backend.open_context(before + most)
    ids = np.arange(before + most, dtype=np.int64) % vocab_size
    # Fetched once, because the row cache counts how often each is used.
    slots = np.resize(engine.rows.fetch(ids[:most]), before + most)

    probe = Probe(engine.backend, context, ids, slots, before)
    probe.step(0, before)
    return measure_steps(probe)
