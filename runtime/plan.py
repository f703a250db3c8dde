"""The memory plan: what a model will take, and how many row cache slots fit beside it.

Counts anonymous memory, which no system can take back, of this process with one generation: what it
has taken already, and what loading and generating will add. Weights of a prepared backbone and the
embedding are not in it: they are read in place from their files. On a device with memory of its own,
what lies there has a plan of its own (stem_edge.runtime.plan_device), and the process keeps records
that may be wanted there: the host tier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from stem_edge.bundle import Bundle, EngineName
from stem_edge.errors import InputError, MemoryPlanError
from stem_edge.footprint import FLOAT, SLOT_BOOKKEEPING_NBYTES, Footprint, footprint_of
from stem_edge.graph_io import Variant
from stem_edge.runtime import plan_ggml, plan_ort
from stem_edge.runtime.engine import LEAST_CHUNK
from stem_edge.runtime.plan_device import DevicePlan, DevicePlanner, OnDevice
from stem_edge.runtime.plan_portable import portable_nbytes
from stem_edge.shards import CRC_NBYTES
from stem_edge.table_store import TableFormat
from stem_edge.units import format_size, parse_size

# Prompt tokens in one step: matrices reach their speed at about this many, memory grows with it.
CHUNK_TOKENS = 128
SMALLEST_CHUNK = 16
# A larger chunk is taken only if it leaves a row cache of this many times as many slots.
SLOTS_PER_CHUNK_TOKEN = 8
# Without a limit: so much of what the machine leaves, but a row cache of no more than this, which is
# a few percent of a 1B model's tables; beyond, slots gain little.
SHARE_OF_MACHINE = 0.5
# What a provider's library keeps in this process for itself.
HOST_FIXED_NBYTES = 64 << 20
DEFAULT_CACHE_NBYTES = 256 << 20
RECORD_NBYTES = 8  # that a row cache knows of every record


@dataclass(frozen=True)
class Loading:
    """What is chosen before memory is planned."""

    context_length: int
    process: int  # bytes that this process has taken already
    engine: EngineName = "onnxruntime"
    prepared: bool = False  # weights stay in their files
    prefill: bool = False  # the graph for prompts is loaded, too
    prefill_refused: str = ""  # why it is not, though the bundle has one
    slots: int | None = None  # this many slots, and not as many as fit
    threads: int = 1  # of the backbone
    repack: bool = False  # weights are rearranged in memory
    device: OnDevice | None = None  # that the backbone runs on, instead of the CPU
    host_slots: int | None = None  # so many records in the host tier, and not as many as fit


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
    row_cache: int  # of a device: the bookkeeping of its slots, and the host tier
    host_slots: int = 0  # records of the host tier
    provider: str = "cpu"  # of onnxruntime, that runs the backbone
    variant: Variant | None = None  # of its graphs; None: those for the CPU
    device: DevicePlan | None = None  # what lies in memory of the provider's device
    prefill_refused: str = ""  # why the graph for prompts is not loaded, if it is not exact here

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(nbytes for _, nbytes in self.parts())

    def parts(self) -> list[tuple[str, int]]:
        """Name and bytes of each part."""
        parts = [
            ("this process before loading", self.process),
            ("weights", self.weights),
            (f"KV cache of {self.context_length} tokens", self.kv_cache),
            (f"activations of {self.chunk_tokens} tokens", self.activations),
            ("reads", self.reads),
        ]
        if self.device is None:
            return [*parts, (f"row cache of {self.slots} slots", self.row_cache)]
        # What a device without memory of its own takes is memory of this process.
        shared = [("memory of the device", self.device.total)] if self.device.shared else []
        tier = (f"host tier of {self.host_slots} records", self.row_cache)
        return [("this process before loading", self.process), *parts[3:], tier, *shared]


def plan_memory(
    bundle: Bundle, loading: Loading, memory: int | str | None, available: int
) -> MemoryPlan:
    """The plan with the most slots under `memory`, or a share of what is `available`.

    Raises MemoryPlanError if even the least (chunks and slots for SMALLEST_CHUNK tokens) does not
    fit, InputError for slots that cannot be.
    """
    limit = parse_size(memory) if memory is not None else loading.process + available
    footprint = footprint_of(bundle.manifest, loading.engine)
    if loading.host_slots and (loading.device is None or not footprint.tables):
        raise InputError(
            f"host_slots is {loading.host_slots}, and there is no accelerator that would miss rows; "
            "leave it out"
        )
    if loading.device is not None and loading.device.variant != "portable":
        return _plan_with_device(bundle, footprint, loading, loading.device, limit, memory)
    least = least_plan(footprint, loading, limit)
    if least.total > limit:
        raise MemoryPlanError(_refusal(bundle, least, limit, loading, asked=memory is not None))
    if loading.slots is not None:
        return least
    share = limit if memory is not None else loading.process + int(available * SHARE_OF_MACHINE)
    return fill_plan(footprint, loading, least, share, capped=memory is None)


def _plan_with_device(
    bundle: Bundle,
    footprint: Footprint,
    loading: Loading,
    device: OnDevice,
    limit: int,
    memory: int | str | None,
) -> MemoryPlan:
    """The plan of a device's memory, and what this process holds beside it."""
    planner = DevicePlanner(footprint, device, loading.context_length)
    found = planner.least(CHUNK_TOKENS, SMALLEST_CHUNK, loading.slots)
    words = planner.slot_nbytes

    def plan(host_slots: int) -> MemoryPlan:
        return _host_plan(footprint, loading, found, words, host_slots)

    least = plan(loading.host_slots or 0)
    if least.total > limit:
        raise MemoryPlanError(_refusal(bundle, least, limit, loading, asked=memory is not None))
    if loading.slots is None:
        # Slots take memory of this process, too: at least for what is known of them.
        each = SLOT_BOOKKEEPING_NBYTES + (words if device.shared else 0)
        room = (found.slots + (limit - least.total) // each) * words
        found = planner.filled(found, room if device.asked else min(room, DEFAULT_CACHE_NBYTES))
        least = plan(loading.host_slots or 0)
    records = footprint.tables.records if footprint.tables else 0
    if loading.host_slots is not None or found.slots == records:  # then nothing will be missed
        return least
    spare = limit - least.total
    if memory is None:
        spare = min(int(spare * SHARE_OF_MACHINE), DEFAULT_CACHE_NBYTES)
    spare -= RECORD_NBYTES * records
    return plan(min(records, max(0, spare) // _host_slot_nbytes(footprint)))


def _host_slot_nbytes(footprint: Footprint) -> int:
    return (footprint.tables.record_nbytes if footprint.tables else 0) + SLOT_BOOKKEEPING_NBYTES


def _host_plan(
    footprint: Footprint, loading: Loading, device: DevicePlan, slot_nbytes: int, host_slots: int
) -> MemoryPlan:
    """What this process holds while a device computes."""
    tables, records = footprint.table_format, footprint.tables.records if footprint.tables else 0
    known = RECORD_NBYTES * records  # of each tier's cache
    tier = host_slots * _host_slot_nbytes(footprint) + (known if host_slots else 0)
    kept = device.slots * SLOT_BOOKKEEPING_NBYTES + known
    logits = 2 * FLOAT * footprint.model.vocab_size
    return MemoryPlan(
        engine=footprint.engine,
        context_length=loading.context_length,
        chunk_tokens=device.chunk_tokens,
        slots=device.slots,
        process=loading.process,
        weights=0,
        kv_cache=0,
        activations=HOST_FIXED_NBYTES + logits + device.chunk_tokens * slot_nbytes,
        reads=_reads_nbytes(tables, device.chunk_tokens),
        row_cache=tier + kept + (tables.index_nbytes if tables else 0),
        host_slots=host_slots,
        provider=device.provider,
        variant=device.variant,
        device=device,
    )


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


class _Place(TypedDict, total=False):
    """Where a backbone runs, of a MemoryPlan."""

    provider: str
    variant: Variant | None


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
            prefill_refused=loading.prefill_refused,
            **self._place(),
        )

    def _place(self) -> _Place:
        device = self.loading.device
        return {} if device is None else {"provider": device.provider, "variant": device.variant}

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
        # On a device this is the variant that leaves it rows and the KV cache to copy.
        copied = portable_nbytes(footprint, chunk, context) if self.loading.device else 0
        return copied + plan_ort.activations_nbytes(
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
    known = RECORD_NBYTES * tables.tables.records
    return slots * footprint.slot_nbytes + known + tables.index_nbytes


def _refusal(
    bundle: Bundle, least: MemoryPlan, limit: int, loading: Loading, *, asked: bool
) -> str:
    parts = ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in least.parts())
    whose = "memory" if asked else "what this machine leaves"
    advice = "allow more or shorten the context"
    if loading.repack:
        advice += ", or load without repack"
    elif not loading.prepared and 2 * least.weights > least.total:
        advice += f", or keep the weights in a file: stem-edge prepare {bundle.path}"
    return (
        f"{whose} of {format_size(limit)} is too small for {bundle.path}: at least "
        f"{format_size(least.total, up=True)} are needed ({parts}); {advice}"
    )
