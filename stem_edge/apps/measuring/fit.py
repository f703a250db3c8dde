"""Plan a bundle for a memory limit without running it: does it fit, with which context and row cache.

The memory limit covers all that fast decoding needs in memory: anonymous memory, and the mapped
weights that every token reads. The memory left by these weights is planned as in stem_edge.load.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from stem_edge.bundle.footprint import Footprint
from stem_edge.errors import MemoryPlanError
from stem_edge.graph.kv import KvChoice
from stem_edge.runtime.backends.costs import Needs
from stem_edge.runtime.backends.engines import choose_engine, loader
from stem_edge.runtime.backends.memory_plan import MemoryPlan
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.load_plan import loader_of_kv, open_text
from stem_edge.runtime.loading import open_or_make
from stem_edge.shown import format_size, parse_size
from stem_edge.system.memory import available_memory, own_memory


@dataclass(frozen=True)
class Fit:
    """Plan of a model within a memory limit. Sizes in bytes."""

    needs: Needs
    plan: MemoryPlan  # of anonymous memory, as load makes it
    mapped: int  # weights that every token reads in place, in mapped files

    @property
    def footprint(self) -> Footprint:
        """Sizes of the bundle's parts."""
        return self.needs.footprint

    @property
    def tables(self) -> str:
        """Type of the rows; empty for a dense model."""
        return self.footprint.table_format.kind if self.footprint.table_format else ""

    @property
    def memory(self) -> int:
        """Largest anonymous memory of the plan, plus the mapped weights."""
        return self.plan.total + self.mapped


def fit(
    path: str | Path,
    memory: int | str | None = None,
    *,
    context_length: int | None = None,
    threads: int | None = None,
    engine: str = "auto",
    kv: KvChoice = "auto",
    sequences: int = 1,
) -> Fit:
    """Plan how a bundle runs within a memory limit.

    memory: limit for the program, including mapped weights. Default: what is available on this machine.
    context_length, threads, engine, kv, sequences: as in stem_edge.load.

    Raises MemoryPlanError if the bundle does not fit, with the least memory that it needs;
    InputError, BundleError.
    """
    given = LoadOptions(
        threads=threads, context_length=context_length, engine=engine, kv=kv, sequences=sequences
    )
    allowed = available_memory() + own_memory() if memory is None else parse_size(memory)
    bundle = open_or_make(path)
    chosen = choose_engine(bundle, engine)
    mapped = loader(bundle, chosen, given).needs(1).mapped
    if mapped >= allowed:
        raise MemoryPlanError(
            f"{bundle.path}: {format_size(allowed)} are too little: every token reads {format_size(mapped)} of "
            "weights, at least which must stay in memory; allow more, or export with fewer bits"
        )
    options = replace(given, memory=allowed - mapped)
    # As load does, because the memory of the tokenizer counts.
    later = open_text(bundle, options).nbytes_to_come
    found, _, plan = loader_of_kv(bundle, chosen, options, later)
    needs = found.needs(plan.context_length)
    return Fit(needs, plan, needs.mapped)
