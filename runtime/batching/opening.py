"""Making the scheduler of a loaded model."""

from __future__ import annotations

from functools import partial

from stem_edge.bundle.footprint import footprint_of
from stem_edge.bundle.opening import Bundle
from stem_edge.runtime.backends.engines import ENGINES
from stem_edge.runtime.backends.memory_plan import MemoryPlan
from stem_edge.runtime.backends.options import check_sequences
from stem_edge.runtime.batching.scheduler import Scheduler
from stem_edge.runtime.decoding import Stepping
from stem_edge.runtime.engine import Engine
from stem_edge.runtime.prefixes.kept import Prefixes
from stem_edge.runtime.stats import Recorder


def open_scheduler(
    bundle: Bundle,
    engine: Engine,
    plan: MemoryPlan,
    prefixes: Prefixes,
    stepping: Stepping,
    record: Recorder,
    *,
    sequences: int,
    exact: bool | None,
    steady: bool,
) -> Scheduler:
    """Return a scheduler with as many places as memory allows, as Model.scheduler says."""
    check_sequences(sequences)
    footprint = footprint_of(bundle.manifest, ENGINES[plan.engine].backbone)
    if plan.variant is not None:
        footprint = footprint.without_windows()
    exact = stepping.exact if exact is None else exact
    batches = not exact or stepping.same_in_batches
    if plan.device is not None:
        # Places take their memory at once; one planned context is left to compute prompts in.
        places = min(sequences, plan.sequences - 1)
        places -= places % 2 if steady else 0  # an empty sequence may take one
        batches = batches and places > 1
        sequences = places if batches else sequences
    return Scheduler(
        engine,
        prefixes,
        footprint.with_kv(plan.kv).kv_nbytes,
        record,
        partial(stepping.guessing, exact=exact),
        size=sequences,
        length=plan.context_length,
        exact=exact,
        batches=batches,
        steady=steady and not exact,
    )
