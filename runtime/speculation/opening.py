"""Sets up speculative decoding for a model, and measures the cost of steps if unknown."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from stem_edge.bundle.footprint import Footprint
from stem_edge.errors import InputError, StemEdgeError
from stem_edge.runtime.backends.context import Context
from stem_edge.runtime.backends.costs import BEFORE, MOST, SIZES, StepCosts
from stem_edge.runtime.backends.memory_plan import MemoryPlan
from stem_edge.runtime.backends.options import Draft, LoadOptions
from stem_edge.runtime.engine import Engine, Guesses, Speculation
from stem_edge.runtime.speculation.guesses import BestGuesses, Costs
from stem_edge.runtime.speculation.text_drafts import TextDrafts
from stem_edge.shown import shown

if TYPE_CHECKING:
    from stem_edge.runtime.speculation.guesses import Drafts
    from stem_edge.runtime.speculation.model_drafts import ModelDrafts

TRIES = 3  # measurements of an assistant's speed; the fastest counts


def open_speculation(
    engine: Engine,
    plan: MemoryPlan,
    footprint: Footprint,
    costs: StepCosts | None,
    options: LoadOptions,
) -> Speculation | None:
    """Return a function that makes the source of drafts for a context; None if drafting is off.

    It is off if it saves no time, or if options.exact is set and drafting may change bits.
    footprint: sizes of the weights, and of a KV cache of the planned type. costs: times of steps; measured now if None.
    """
    if options.exact and not (costs is not None and costs.same_bits):
        return None
    if callable(options.speculate):
        caller = _of_caller(options.speculate, footprint.model.vocab_size, exact=options.exact)
        return lambda context: caller
    known = costs or _measured(engine, plan, footprint.model.vocab_size)
    if known is None:
        return None
    most = options.speculate if type(options.speculate) is int else MOST - 1
    # A step reads the weights, and for each of its tokens the keys and values, at about the same speed.
    depth = plan.context_length
    attention = _kv_read_nbytes(footprint, depth) / depth / footprint.step_nbytes
    step_costs, assistant = Costs(known.times, most, attention), _assistant(engine, plan)

    def begin(context: Context) -> Guesses:
        drafts: list[Drafts] = [TextDrafts()]
        with suppress(StemEdgeError):  # such as lack of memory: an answer needs no drafts
            if assistant is not None and (own := assistant(context)) is not None:
                drafts.append(own)
        return BestGuesses(step_costs, drafts, known.seconds)

    return begin if step_costs.can_pay else None


def _kv_read_nbytes(footprint: Footprint, tokens: int) -> int:
    """Return the bytes that a decode step reads from the KV cache in a context of `tokens` tokens.

    If several layers share keys and values, each of the layers reads them.
    """
    model = footprint.model
    return sum(
        footprint.token_nbytes(footprint.kv, layer) * min(tokens, layer.window or tokens)
        for layer in model.layers
    ) + footprint.conv_nbytes(min(tokens, model.engram_kernel))


def _of_caller(draft: Draft, vocab_size: int, *, exact: bool) -> Guesses:
    """Wrap a caller's draft function: cut its drafts before the first that is not a token id.

    exact: cut them to a size of steps whose bits were compared with those of single tokens.
    """

    def guess(seen: Sequence[int], room: int) -> list[int]:
        drafts = draft(seen, room)
        try:
            ids = [*map(operator.index, drafts[:room])]
        except (TypeError, KeyError):
            raise InputError(
                f"the draft function returned {shown(drafts)}; expected a list of token ids, or []"
            ) from None
        known = list(takewhile(lambda token: 0 <= token < vocab_size, ids))
        if exact:
            del known[max(size for size in (1, *SIZES) if size <= 1 + len(known)) - 1 :]
        return known

    return guess


def _measured(engine: Engine, plan: MemoryPlan, vocab_size: int) -> StepCosts | None:
    """Measure the time of steps of several sizes; None if context or memory is too small."""
    before = min(BEFORE, engine.chunk_tokens, plan.context_length - MOST)
    if before < 1 or engine.logit_tokens < MOST:
        return None
    from stem_edge.runtime.backends.step_measure import MeasuredSteps  # seldom needed

    ids = np.arange(before + MOST, dtype=np.int64) % vocab_size
    # The slots are looked up once, because the row cache counts how often each record is used.
    slots = engine.rows.slots(engine.rows.ids(ids)[: min(MOST, engine.chunk_tokens)])
    return MeasuredSteps(engine.backend, ids, slots[np.arange(len(ids)) % len(slots)]).costs()


def _assistant(engine: Engine, plan: MemoryPlan) -> Callable[[Context], ModelDrafts | None] | None:
    """Return a function that opens the draft model for a context; None without a usable draft model."""
    if plan.context_length < MOST:
        return None
    context, times, opened = engine.open_context(MOST), list[float](), engine.backend.open_drafter
    if (drafter := opened(context.backend)) is None:
        return None
    from stem_edge.runtime.speculation.model_drafts import ModelDrafts

    engine.step([context], *engine.steps([0]))
    for _ in range(TRIES):
        started = time.perf_counter()
        drafter(0, context.position, MOST - 1)
        times.append(time.perf_counter() - started)
    seconds = min(times) / (MOST - 1)

    def begin(context: Context) -> ModelDrafts | None:
        if (drafter := engine.in_turn(partial(opened, context.backend))) is None:
            return None

        def draft(seen: Sequence[int], count: int) -> list[int]:
            return engine.in_turn(partial(drafter, seen[-1], len(seen) - 1, count))

        return ModelDrafts(draft, seconds)

    return begin
