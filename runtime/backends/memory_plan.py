"""The memory plan: how much memory a model will take, and how many row cache slots fit beside it.

The plan counts anonymous memory of this process, because the system cannot reclaim it: what the process
has taken, and what loading and generating will add if each sequence fills its context. Weights that are
read in place from their files do not count.

    manifest -> Footprint: sizes of a bundle's parts -> Needs: of an engine, for a context length
    Needs in a Room -> MemoryPlan -> MemoryPlan.measured: once the backbone is open, the rest becomes slots
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stem_edge.bundle.footprint import BUCKET_NBYTES, LEAST_BUCKETS
from stem_edge.errors import InputError, MemoryPlanError
from stem_edge.graph.formats import EngineName
from stem_edge.graph.kv import KvType
from stem_edge.graph.names import STEP_TOKENS
from stem_edge.runtime.backends.costs import LEAST_CHUNK, Needs
from stem_edge.shown import format_size
from stem_edge.tables.store import CRC_NBYTES

# Prompt tokens in a step. Matrix products reach full speed at about this many; more only take memory.
CHUNK_TOKENS = STEP_TOKENS
SMALLEST_CHUNK = 16
# A larger chunk is taken only if the row cache keeps this many slots for each of its tokens.
SLOTS_PER_CHUNK_TOKEN = 8
# Memory for each token while a prompt is tokenized: about 4 bytes of text, TextCodec.TEXT_NBYTES for each of them.
PROMPT_NBYTES = 2_000
# Without a limit, a plan takes this share of the available memory. The row cache takes no more than
# a few percent of a 1B model's tables, because further slots gain little.
SHARE_OF_MACHINE = 0.5
DEFAULT_CACHE_NBYTES = 256 << 20
# A context is longer only if that leaves room for rows, and shorter only if this length does not fit.
USUAL_CONTEXT = 4096
SHORTEST_CONTEXT = 128
# A long context takes at most this share of the memory that process and weights leave: rows missing
# from the cache slow down every text, and room for long texts serves long texts only.
CONTEXT_SHARE = 0.5


@dataclass(frozen=True)
class Room:
    """Memory in bytes when planning begins, and the limits that the user chose.

    process: what this process takes now, and what it will need in addition to the model. later:
    part of `process` that is not taken yet. available: what this process may take in addition.
    memory: the user's limit for this process.
    """

    process: int
    available: int
    memory: int | None = None
    slots: int | None = None  # None: as many as fit
    sequences: int = 1  # decoded at a time, each with a full context
    later: int = 0
    requests: int = 0  # bytes that a server needs for requests

    @property
    def limit(self) -> int:
        """Most bytes that this process may take: the user's limit, or else what is available."""
        return self.process + self.available if self.memory is None else self.memory

    @property
    def share(self) -> int:
        """Bytes to plan with: the user's limit, or else a share of the available memory."""
        share = self.process + int(self.available * SHARE_OF_MACHINE)
        return share if self.memory is None else self.memory


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """Planned bytes in a device's memory, and its limit. shared: it is this process's memory."""

    weights: int
    kv_cache: int  # of full contexts
    activations: int  # of a chunk
    limit: int | None
    shared: bool

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.activations


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Planned bytes in the memory of this process, and the numbers that determine them."""

    engine: EngineName  # the engine that runs the backbone
    provider: str  # onnxruntime's execution provider
    context_length: int  # tokens of prompt and answer together
    sequences: int  # number of sequences that the KV cache has room for
    kv: KvType  # type of keys and values
    chunk_tokens: int  # most tokens of a prompt in a step
    logit_tokens: int  # most tokens of a step that returns logits for all of them
    slots: int  # records that the row cache holds
    process: int  # bytes taken before loading
    weights: int  # matrices that the engine copies into this memory, and its bookkeeping
    kv_cache: int  # bytes of full contexts; the system provides pages as contexts fill
    activations: int  # bytes of a step's intermediate results
    requests: int = 0  # bytes that a server needs for requests
    reads: int  # buffers for records that are read from flash
    row_cache: int  # bytes of all slots, and of their bookkeeping
    device: DevicePlan | None = None  # plan of a device's memory, if it runs the backbone
    prefill: bool = False  # the graph for prompts is loaded, too
    preparing: str = ""  # disk, memory and time for preparing; empty if nothing is to be prepared

    def measured(self, opened: int, needs: Needs, limit: int) -> MemoryPlan:
        """Return the plan with the backbone's measured size, and more row cache slots if they fit.

        opened: bytes of this process once the backbone is open, without a row cache, plus the bytes
        that it will need later in addition to the model. limit: most bytes of this process.
        """
        taken, slot = max(0, opened - self.process), needs.footprint.slot_nbytes
        weights = max(taken, min(taken + needs.host.later, self.weights))
        spare = limit - self.total + self.weights - weights
        more = max(0, min(spare // slot, self.more_slots(needs)))
        cached = self.row_cache + more * slot
        return replace(self, weights=weights, slots=self.slots + more, row_cache=cached)

    def more_slots(self, needs: Needs) -> int:
        """Return the most slots that measured() can add: those that fit if weights take no memory."""
        left = needs.footprint.model.records - self.slots
        return max(0, min(left, self.weights // needs.footprint.slot_nbytes))

    @property
    def total(self) -> int:
        """Bytes of all parts together."""
        return sum(nbytes for _, nbytes in self.parts())

    @property
    def kv_nbytes(self) -> int:
        """Bytes of keys and values, in this process or on the device."""
        return self.kv_cache if self.device is None else self.device.kv_cache

    @property
    def text(self) -> int:
        """Bytes for tokenizing a prompt; prompts are tokenized one at a time."""
        return PROMPT_NBYTES * self.context_length

    def parts(self) -> list[tuple[str, int]]:
        """Return name and bytes of each part of the plan."""
        shared = self.device.total if self.device is not None and self.device.shared else 0
        return [
            ("this process before loading", self.process),
            ("text of a prompt", self.text),
            ("requests", self.requests),
            *self.computing(self),
            ("reads", self.reads),
            (f"row cache of {self.slots} slots", self.row_cache),
            *([("memory of the device", shared)] if shared else []),
        ]

    def computing(self, place: MemoryPlan | DevicePlan) -> list[tuple[str, int]]:
        """Return name and bytes of weights, KV cache and activations in `place`: this process or the device."""
        times = f"{self.sequences} x " if self.sequences > 1 else ""
        return [
            ("weights", place.weights),
            (f"{self.kv} KV cache of {times}{self.context_length} tokens", place.kv_cache),
            (f"activations of {self.chunk_tokens} tokens", place.activations),
        ]


def plan_memory(
    path: object, lengths: Sequence[int], needs_at: Callable[[int], Needs], room: Room
) -> MemoryPlan:
    """Return the plan for the longest context length that fits in memory.

    lengths: context lengths in descending order. A length above USUAL_CONTEXT must also leave room
    for cached rows, unless it is the last. needs_at: context length -> memory needs; its last call
    is for the chosen length. path: for the error's message. Raises MemoryPlanError if no length
    fits, and InputError for an impossible number of slots.
    """
    for length in lengths[:-1]:
        try:
            plan = _plan_of(path, needs_at(length), room)
        except MemoryPlanError:
            continue
        if length <= USUAL_CONTEXT or _leaves_room(plan, room.share):
            return plan
    return _plan_of(path, needs_at(lengths[-1]), room)


def _plan_of(path: object, needs: Needs, room: Room) -> MemoryPlan:
    """Return the plan with as many row cache slots as fit. Raises MemoryPlanError, InputError."""
    least = _least(needs, room)
    if reason := _refusal(least, needs, room, path):
        raise MemoryPlanError(reason)
    if room.slots is not None or not needs.records:
        return least
    spare = room.share - least.total
    if room.memory is None:
        spare = min(spare, DEFAULT_CACHE_NBYTES - least.row_cache)
    more = max(0, spare // needs.footprint.slot_nbytes)
    return _planned(needs, room, least.chunk_tokens, least.slots + more)


def _least(needs: Needs, room: Room) -> MemoryPlan:
    """Return the plan with the largest prompt chunk under the limit and the fewest row cache slots.

    If no plan fits, the returned plan exceeds the limit. Raises InputError for an impossible number of slots.
    """
    slots, records, sequences = room.slots, needs.records, room.sequences
    fewest = min(max(needs.rows(LEAST_CHUNK), sequences * needs.rows(1)), records)
    if slots is not None and records and not fewest <= slots <= records:
        raise InputError(f"slots is {slots}; expected {fewest} to {records}")
    chunk, useful = CHUNK_TOKENS, SLOTS_PER_CHUNK_TOKEN * needs.footprint.model.lookups
    while chunk // 2 >= max(SMALLEST_CHUNK, sequences):
        plan = _planned(needs, room, chunk, slots or max(fewest, useful * chunk))
        if not _refusal(plan, needs, room):
            break
        chunk //= 2
    return _planned(needs, room, chunk, slots or max(fewest, needs.rows(chunk)))


def _planned(needs: Needs, room: Room, chunk: int, slots: int) -> MemoryPlan:
    """Return the plan for prompt chunks of `chunk` tokens and up to `slots` row cache slots."""
    footprint, host, sequences = needs.footprint, needs.host, room.sequences
    slots, tables, device = min(slots, needs.records), footprint.table_format, None
    if slots < needs.records:  # all rows of a chunk must be resident at once
        chunk = min(chunk, (slots - needs.rows(0)) // footprint.model.lookups)
    known = BUCKET_NBYTES * min(needs.records, LEAST_BUCKETS) + (
        tables.index_nbytes if tables else 0
    )
    # Twice, because choosing records copies them.
    read = 2 * (tables.tables.record_nbytes + CRC_NBYTES) if tables else 0
    part = needs.device or host
    if needs.device is not None:
        device = DevicePlan(
            weights=part.weights,
            kv_cache=sequences * part.kv_cache,
            activations=part.activations(chunk, sequences),
            limit=needs.device_limit,
            shared=needs.shared,
        )
    # So many tokens with logits take no more memory than a chunk without logits.
    fitting = chunk * part.chunk_token // (part.chunk_token + part.logits)
    return MemoryPlan(
        engine=footprint.backbone.engine,
        provider=needs.provider,
        context_length=needs.context_length,
        sequences=sequences,
        kv=footprint.kv,
        chunk_tokens=chunk,
        logit_tokens=min(chunk, max(LEAST_CHUNK, sequences, fitting)),
        slots=slots,
        process=room.process,
        weights=host.weights,
        kv_cache=sequences * host.kv_cache,
        activations=host.activations(chunk, sequences),
        requests=room.requests,
        reads=min(needs.rows(chunk), needs.records) * read,
        row_cache=slots * footprint.slot_nbytes + known,
        device=device,
        prefill=needs.prefill,
        preparing=needs.preparing,
    )


def _refusal(plan: MemoryPlan, needs: Needs, room: Room, path: object = "this model") -> str:
    """Return an error message if the plan exceeds a limit, else ""."""
    whose = "memory" if room.memory is not None else "available memory"
    limit, total, parts = room.limit, plan.total, plan.parts()
    advice, device = "shorten the context", plan.device
    if device is not None and device.limit is not None and device.total > device.limit:
        whose, limit = f"memory of the device ({plan.provider})", device.limit
        total, parts = device.total, plan.computing(device)
        advice = "shorten the context, or run it on the CPU"
    elif total <= limit:
        return ""
    named = ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in parts if nbytes)
    mapped = format_size(total + needs.mapped, up=True)
    counted = f", or {mapped} with mapped weights, which fit counts" * bool(needs.mapped)
    return (
        f"{whose} of {format_size(limit)} is too small for {path}: at least "
        f"{format_size(total, up=True)} are needed{counted} ({named}); allow more or {advice}"
    )


def _leaves_room(plan: MemoryPlan, limit: int) -> bool:
    """Return True if the context takes at most CONTEXT_SHARE of memory, and prompt chunks have full size.

    limit: bytes for this process. Returns False if the plan has a device whose memory size is unknown.
    """
    if plan.chunk_tokens < min(CHUNK_TOKENS, plan.slots):
        return False
    taken = plan.kv_cache + plan.activations + plan.text
    sides = [(taken, limit - plan.process - plan.requests - plan.weights)]
    if (device := plan.device) is not None:
        room = 0 if device.limit is None else device.limit - device.weights
        sides.append((device.kv_cache + device.activations, room))
    return all(taken <= CONTEXT_SHARE * room for taken, room in sides)
