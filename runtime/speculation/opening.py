"""What a model that is being loaded speculates with, and what its steps cost if that is not known."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import numpy as np

from stem_edge.bundle.footprint import Footprint
from stem_edge.runtime.backends.interface import BEFORE, MOST, StepCosts
from stem_edge.runtime.backends.memory_plan import MemoryPlan
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.backends.step_measure import measure_steps
from stem_edge.runtime.engine import Engine
from stem_edge.runtime.prefixes.kept import Prefixes
from stem_edge.runtime.speculation.assistant_drafts import Assisted, begin
from stem_edge.runtime.speculation.drafts import Source
from stem_edge.runtime.speculation.model_drafts import Drafter
from stem_edge.runtime.speculation.speculation import CallerDrafts, Speculation

TRIES = 3  # of an assistant, the fastest counts


def measured(engine: Engine, plan: MemoryPlan, vocab_size: int) -> StepCosts | None:
    """Measure steps over the first tokens of the vocabulary, before anybody uses the engine.

    None if context, slots or planned memory hold no such step. Raises what a step raises.
    """
    before = min(BEFORE, engine.chunk_tokens, plan.context_length - MOST)
    if before < 1 or engine.logit_tokens < MOST:
        return None
    ids = np.arange(before + MOST, dtype=np.int64) % vocab_size
    # Fetched once, because the row cache counts how often each is used.
    slots = engine.rows.slots(engine.rows.ids(ids)[: min(MOST, engine.chunk_tokens)])
    return measure_steps(engine.backend, ids, slots[np.arange(len(ids)) % len(slots)])


def open_speculation(
    engine: Engine,
    plan: MemoryPlan,
    footprint: Footprint,
    costs: StepCosts | None,
    options: LoadOptions,
    load_drafter: Callable[[], Drafter | None],
) -> Speculation | None:
    """Return what drafts; None if steps of several tokens cannot be measured, or are not exact.

    load_drafter: loads the bundle that drafts, if there is one.
    """
    if callable(options.speculate):
        return CallerDrafts(options.speculate, footprint.model.vocab_size, costs)
    if costs is None:
        costs = measured(engine, plan, footprint.model.vocab_size)
    if costs is None or (options.exact and not costs.same_bits):
        return None
    most = options.speculate if type(options.speculate) is int else MOST - 1
    assistant, drafter = _assistant(engine, plan), load_drafter()
    sources = [] if assistant is None else [assistant]
    # A step reads weights and, for each of its tokens, keys and values: about as fast.
    depth = plan.context_length
    attention = footprint.with_kv(plan.kv).kv_read_nbytes(depth) / depth / footprint.step_nbytes
    if drafter is None:
        return Speculation(costs, most, sources, attention)
    return Speculation(costs, most, [*sources, drafter.begin], attention, drafter.close)


def _assistant(engine: Engine, plan: MemoryPlan) -> Source | None:
    """Return the model's own assistant, if one was loaded, once it has drafted."""
    backend = engine.backend
    if not isinstance(backend, Assisted) or plan.context_length < MOST:
        return None
    context, times = engine.open_context(MOST), list[float]()
    engine.step([context], *engine.steps([0]))
    drafter = backend.open_drafter(context.backend)
    for _ in range(TRIES):
        started = time.perf_counter()
        drafter.draft(0, context.position, MOST - 1)
        times.append(time.perf_counter() - started)
    return partial(begin, engine, backend, min(times) / (MOST - 1))


def drafter(
    engine: Engine,
    prefixes: Prefixes,
    plan: MemoryPlan,
    costs: StepCosts | None,
    vocab_size: int,
    close: Callable[[], None],
) -> Drafter | None:
    """Return a loaded model as one that drafts for another; closed, and None, if its context is too short."""
    with ExitStack() as unused:
        unused.callback(close)
        costs = costs or measured(engine, plan, vocab_size)
        if costs is None:
            return None
        unused.pop_all()
    return Drafter(engine, prefixes, plan.context_length, costs.seconds, close)
