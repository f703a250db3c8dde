"""Plans for a machine: the longest context that leaves room for rows, and what is expected of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from stem_edge.bundle.footprint import Footprint
from stem_edge.bundle.opening import Bundle
from stem_edge.bundle.prefill_check import crowding
from stem_edge.errors import MemoryPlanError
from stem_edge.graph.formats import BackboneFormat, EngineName, GgufFormat
from stem_edge.measuring.planning.bandwidth import Bandwidth
from stem_edge.measuring.planning.predict import (
    Prediction,
    Usage,
    predict,
    tokenizer_memory,
)
from stem_edge.measuring.planning.process import generate_nbytes
from stem_edge.runtime.backends.engines import ENGINES
from stem_edge.runtime.backends.expected import NeedsAt
from stem_edge.runtime.backends.memory_plan import MemoryPlan, Needs
from stem_edge.runtime.backends.planner import USUAL_CONTEXT, Planner, leaves_room
from stem_edge.runtime.rows.shards import FlashName
from stem_edge.text.checked_tokenizer import TokenizerMemory
from stem_edge.units import format_size

WANTED_SLOTS = 1024  # if there is no room for these beside a context, a shorter one is better


@dataclass(frozen=True)
class Fit:
    """Plan and expected figures of a model on a device."""

    needs: Needs  # at the context that was chosen
    plan: MemoryPlan
    hit_source: str  # of the hit rate, in words
    bandwidth: Bandwidth
    flash: FlashName | None
    prediction: Prediction
    loading: int  # bytes that it takes while its tokenizer loads

    @property
    def footprint(self) -> Footprint:
        """Sizes of the bundle's parts."""
        return self.needs.footprint

    @property
    def types(self) -> BackboneFormat | GgufFormat:
        """Types of the weights."""
        return self.footprint.backbone

    @property
    def tables(self) -> str:
        """Type of the rows; empty for a dense model."""
        return self.footprint.table_format.kind if self.footprint.table_format else ""

    @property
    def load_memory(self) -> int:
        """Bytes to give to stem_edge.load(memory=) or --memory."""
        return max(self.plan.total, self.loading)

    @property
    def mapped(self) -> int:
        """Bytes of weights that every token reads in place, in mapped files."""
        return ENGINES[self.footprint.engine].ways.expected.read_in_place(self.needs)

    @property
    def memory(self) -> int:
        """Bytes of expected anonymous memory and of those weights."""
        return self.prediction.anonymous + self.mapped


@dataclass(frozen=True)
class PlanTarget:
    """Machine and use that plans are made for."""

    root: Path
    bundle: Bundle | None
    memory: int
    limit: int  # bytes that the device has, of which `memory` may be a part
    contexts: list[int]
    bandwidth: Bandwidth
    hits: Callable[[int], float]
    hit_source: str
    flash: FlashName | None
    repack: bool
    sequences: int

    def fits(self, footprints: Sequence[Footprint]) -> list[Fit]:
        """Plan for each possible bundle that fits. Raises MemoryPlanError if no bundle fits."""
        found, refused = list[Fit](), list[MemoryPlanError]()
        for footprint in footprints:
            try:
                found.append(self.fit(footprint))
            except MemoryPlanError as error:
                refused.append(error)
        if not found:
            raise refused[-1]  # the last, because it needs least
        return found

    def fit(self, footprint: Footprint) -> Fit:
        """Plan for one of the possible bundles. Raises MemoryPlanError."""
        tokenizer, engine = self._tokenizer, ENGINES[footprint.engine].ways.expected
        prefill = footprint.prefill_nbytes > 0 and not crowding(footprint, self.limit)
        needs_at = engine.needs_at(footprint, self.bundle, prefill=prefill, repack=self.repack)
        plan = _plan(
            self.root, needs_at, self.memory, self.contexts, tokenizer, sequences=self.sequences
        )
        context, hit_rate = plan.context_length, self.hits(plan.slots)
        used = min(context, USUAL_CONTEXT)  # half of it by a prompt, the other half decoded
        usage = Usage(
            *(used // 2, used - used // 2, min(used, 500), plan.slots, hit_rate),
            self.sequences,
        )
        process = generate_nbytes(footprint.engine)
        given = needs_at, plan, usage, self.bandwidth.rate, self.flash
        figures = predict(*given, process=process, tokenizer=tokenizer)
        about = self.hit_source, self.bandwidth, self.flash, figures
        return Fit(needs_at(context), plan, *about, _loading(footprint.engine, tokenizer))

    @cached_property
    def _tokenizer(self) -> TokenizerMemory:
        return tokenizer_memory(self.root)


def fit_on_device(bundle: Bundle, needs_at: NeedsAt, memory: int, context_length: int) -> int:
    """Return the bytes to give to load as `memory` if a device has so much for one program.

    Raises MemoryPlanError as fit does.
    """
    tokenizer = tokenizer_memory(bundle.path)
    words = "for one program", "take a larger device"
    plan = _plan(bundle.path, needs_at, memory, [context_length], tokenizer, *words)
    return max(plan.total, _loading(needs_at(context_length).footprint.engine, tokenizer))


def _loading(engine: EngineName, tokenizer: TokenizerMemory) -> int:
    """Return the bytes of a process while it loads its tokenizer."""
    return generate_nbytes(engine) + tokenizer.loading


def _plan(
    path: Path,
    needs_at: NeedsAt,
    memory: int,
    contexts: list[int],
    tokenizer: TokenizerMemory,
    whose: str = "of memory",
    advice: str = "allow more",
    *,
    sequences: int = 1,
) -> MemoryPlan:
    """Return the plan with the longest context that leaves room for rows. Raises MemoryPlanError.

    contexts: in descending order.
    """
    for context in contexts:
        needs = needs_at(context)
        engine = needs.footprint.engine
        planner = Planner(needs, generate_nbytes(engine) + tokenizer.kept, sequences)
        anonymous = memory - ENGINES[engine].ways.expected.read_in_place(needs)
        smallest = planner.least(anonymous)
        if smallest.total <= anonymous and _loading(engine, tokenizer) <= memory:
            plan = planner.filled(smallest, anonymous)
            useful = plan.slots >= min(WANTED_SLOTS, planner.records)
            if context > USUAL_CONTEXT:
                useful &= leaves_room(plan, anonymous)
            if useful or context == contexts[-1]:
                return plan
    least = format_size(max(smallest.total + memory - anonymous, _loading(engine, tokenizer)))
    raise MemoryPlanError(
        f"{path}: {format_size(memory)} {whose} are too little: with a context of {context} tokens, "
        f"at least {least} must stay in memory, including the weights that every token reads; "
        f"{advice}, shorten the context, or export with fewer bits"
    )
