"""The memory plan: what a model will take, and how many row cache slots fit beside it.

Counts anonymous memory, which no system can take back, of this process with one generation: what it
has taken already, and what loading and generating will add. Weights of a prepared backbone and the
embedding are not in it: they are read in place from their files.
"""

from __future__ import annotations

from dataclasses import dataclass

from stem_edge.bundle import Bundle, EngineName
from stem_edge.errors import InputError, MemoryPlanError
from stem_edge.footprint import Footprint, footprint_of
from stem_edge.runtime import plan_ggml, plan_ort
from stem_edge.runtime.engine import LEAST_CHUNK
from stem_edge.shards import CRC_NBYTES
from stem_edge.table_store import TableFormat
from stem_edge.units import parse_size

# Prompt tokens in one step: matrices reach their speed at about this many, memory grows with it.
CHUNK_TOKENS = 128
SMALLEST_CHUNK = 16
# A larger chunk is taken only if it leaves a row cache of this many times as many slots.
SLOTS_PER_CHUNK_TOKEN = 8
# Without a limit: so much of what the machine leaves, but a row cache of no more than this, which is
# a few percent of a 1B model's tables; beyond, slots gain little.
SHARE_OF_MACHINE = 0.5
DEFAULT_CACHE_NBYTES = 256 << 20


@dataclass(frozen=True)
class Loading:
    """What is chosen before memory is planned."""

    context_length: int
    process: int  # bytes that this process has taken already
    engine: EngineName = "onnxruntime"
    prepared: bool = False  # weights stay in their files
    prefill: bool = False  # the graph for prompts is loaded, too
    slots: int | None = None  # this many slots, and not as many as fit
    threads: int = 1  # of the backbone
    repack: bool = False  # weights are rearranged in memory


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of each part, and the numbers they follow from."""

    engine: EngineName
    context_length: int
    chunk_tokens: int
    slots: int
    process: int
    weights: int  # matrices that the engine rearranges into its own memory, and its bookkeeping
    kv_cache: int  # once the context is full; it grows in steps
    activations: int
    reads: int  # records on their way from flash
    row_cache: int

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(nbytes for _, nbytes in self.parts())

    def parts(self) -> list[tuple[str, int]]:
        """Name and bytes of each part."""
        return [
            ("this process before loading", self.process),
            ("weights", self.weights),
            (f"KV cache of {self.context_length} tokens", self.kv_cache),
            (f"activations of {self.chunk_tokens} tokens", self.activations),
            ("reads", self.reads),
            (f"row cache of {self.slots} slots", self.row_cache),
        ]


def plan_memory(
    bundle: Bundle, loading: Loading, memory: int | str | None, available: int
) -> MemoryPlan:
    """The plan with the most slots under `memory`, or a share of what is `available`.

    Raises MemoryPlanError if even the least (chunks and slots for SMALLEST_CHUNK tokens) does not
    fit, InputError for slots that cannot be.
    """
    limit = parse_size(memory) if memory is not None else loading.process + available
    footprint = footprint_of(bundle.manifest, loading.engine)
    least = least_plan(footprint, loading, limit)
    if least.total > limit:
        raise MemoryPlanError(_refusal(bundle, least, limit, loading, asked=memory is not None))
    if loading.slots is not None:
        return least
    share = limit if memory is not None else loading.process + int(available * SHARE_OF_MACHINE)
    return fill_plan(footprint, loading, least, share, capped=memory is None)


def least_plan(footprint: Footprint, loading: Loading, limit: int) -> MemoryPlan:
    """The plan with the largest chunks under `limit` and the fewest slots; it may be too much."""
    planner = _Planner(footprint, loading)
    chunk = planner.chunk(limit)
    slots = planner.given_slots(chunk)
    return planner.plan(chunk, chunk if slots is None else slots)


def fill_plan(
    footprint: Footprint, loading: Loading, least: MemoryPlan, limit: int, *, capped: bool = False
) -> MemoryPlan:
    """The same with as many slots as fit, or, `capped`, as a cache of the default size has."""
    planner = _Planner(footprint, loading)
    return planner.plan(least.chunk_tokens, planner.most_slots(least, limit, capped=capped))


class _Planner:
    """Plans for one bundle and one way of loading it."""

    def __init__(self, footprint: Footprint, loading: Loading) -> None:
        self.footprint, self.loading = footprint, loading
        self.tables = footprint.table_format
        self.records = self.tables.tables.records if self.tables else 0

    def chunk(self, limit: int) -> int:
        """The largest chunk that leaves room for enough slots."""
        chunk = CHUNK_TOKENS
        while chunk > SMALLEST_CHUNK:
            wanted = self.loading.slots or SLOTS_PER_CHUNK_TOKEN * chunk
            if self.plan(chunk, wanted).total <= limit:
                break
            chunk //= 2
        return chunk

    def given_slots(self, chunk: int) -> int | None:
        slots = self.loading.slots
        if slots is None or self.tables is None:
            return None
        least = min(LEAST_CHUNK, self.records)
        if not least <= slots <= self.records:
            raise InputError(f"slots is {slots}; expected {least} to {self.records}")
        return slots

    def most_slots(self, least: MemoryPlan, limit: int, *, capped: bool) -> int:
        """Slots that fit into what the least plan leaves."""
        if self.tables is None:
            return 0
        spare = limit - least.total
        if capped:
            spare = min(spare, DEFAULT_CACHE_NBYTES - least.row_cache)
        return least.slots + max(0, spare) // self.footprint.slot_nbytes

    def plan(self, chunk: int, slots: int) -> MemoryPlan:
        footprint, loading = self.footprint, self.loading
        context = loading.context_length
        slots = min(slots, self.records)
        # The rows of a chunk are resident at once: of any chunk, if all are.
        chunk = min(chunk, slots) if slots < self.records else chunk
        return MemoryPlan(
            engine=footprint.engine,
            context_length=context,
            chunk_tokens=chunk,
            slots=slots,
            process=self.loading.process,
            weights=self._weights_nbytes(),
            kv_cache=footprint.kv_nbytes(context),
            activations=self._activations_nbytes(chunk),
            reads=_reads_nbytes(self.tables, chunk),
            row_cache=_row_cache_nbytes(footprint, slots),
        )

    def _weights_nbytes(self) -> int:
        if self.footprint.engine == "ggml":
            return plan_ggml.weights_nbytes(self.footprint, repack=self.loading.repack)
        return plan_ort.weights_nbytes(
            self.footprint, prepared=self.loading.prepared, prefill=self.loading.prefill
        )

    def _activations_nbytes(self, chunk: int) -> int:
        footprint, context = self.footprint, self.loading.context_length
        if footprint.engine == "ggml":
            return plan_ggml.activations_nbytes(footprint, chunk, context, self.loading.threads)
        return plan_ort.activations_nbytes(
            footprint, chunk, context, self.loading.threads, prefill=self.loading.prefill
        )


def _reads_nbytes(tables: TableFormat | None, chunk: int) -> int:
    if tables is None:
        return 0
    layout = tables.tables
    return 2 * min(chunk, layout.records) * (layout.record_nbytes + CRC_NBYTES)


def _row_cache_nbytes(footprint: Footprint, slots: int) -> int:
    """With what is known of every record, and of every token where there is an index."""
    if (tables := footprint.table_format) is None:
        return 0
    return slots * footprint.slot_nbytes + 8 * tables.tables.records + tables.index_nbytes


def _refusal(
    bundle: Bundle, least: MemoryPlan, limit: int, loading: Loading, *, asked: bool
) -> str:
    parts = ", ".join(f"{name} {nbytes:,}" for name, nbytes in least.parts())
    whose = "memory" if asked else "what this machine leaves"
    advice = "allow more or shorten the context"
    if loading.repack:
        advice += ", or load without repack"
    elif not loading.prepared and 2 * least.weights > least.total:
        advice += f", or keep the weights in a file: stem-edge prepare {bundle.path}"
    return (
        f"{whose} of {limit:,} bytes is too small for {bundle.path}: at least {least.total:,} "
        f"bytes are needed ({parts}); {advice}"
    )
