"""The memory plan: the memory that a model will take, and the row cache slots that fit beside it.

A backend states its Needs: bytes in any case, per token of a chunk and per slot, in memory of this process
and of a device, if there is one, which has no slots. The plan has the largest chunk that leaves room for a useful row cache,
then as many slots as fit; choose_plan tries context lengths.

It counts the anonymous memory of this process with one generation, or as many sequences at a time as
asked for, each with a full context, because the system cannot reclaim that: what is taken already,
and what loading and generating will add. Weights that are read in place from their files do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stem_edge.bundle.footprint import BUCKET_NBYTES, LEAST_BUCKETS, Footprint
from stem_edge.errors import InputError, MemoryPlanError
from stem_edge.graph.formats import EngineName
from stem_edge.graph.kv import KvType
from stem_edge.graph.names import STEP_TOKENS
from stem_edge.runtime.backends.interface import LEAST_CHUNK
from stem_edge.shown import format_size, parse_size
from stem_edge.tables.shards import CRC_NBYTES

# Prompt tokens in a step. Products reach full speed at about this many; more only take memory.
CHUNK_TOKENS = STEP_TOKENS
SMALLEST_CHUNK = 16
# A larger chunk is taken only if the row cache keeps this many slots for each of its tokens.
SLOTS_PER_CHUNK_TOKEN = 8
# For each token of a context, while a prompt becomes ids: about 4 bytes of text, of TextCodec.TEXT_NBYTES each.
PROMPT_NBYTES = 2_000
# Without a limit, a plan takes this share of the available memory. The row cache takes no more than
# a few percent of a 1B model's tables, because further slots gain little.
SHARE_OF_MACHINE = 0.5
DEFAULT_CACHE_NBYTES = 256 << 20
# A longer context is taken only if it leaves room; a shorter one only if this one does not fit.
USUAL_CONTEXT = 4096
SHORTEST_CONTEXT = 128
# Of what a limit leaves beside process and weights, a long context takes at most this share, because
# rows that the cache lacks cost time in every text, and room for long texts serves only those.
CONTEXT_SHARE = 0.5


@dataclass(frozen=True)
class Part:
    """Bytes that a backbone needs in the memory of this process, or of a device."""

    weights: int  # without those read in place from their file
    kv_cache: int  # of a full context
    fixed: int  # activations of any chunk
    chunk_token: int  # further activations, for each token of a chunk
    logits: int  # further, for each position with logits, if more than one
    slot: int  # of the row cache
    later: int = 0  # of the weights: graphs that are opened when they are first needed


@dataclass(frozen=True)
class DeviceNeeds:
    """Needs on a device that holds weights, KV cache and activations."""

    needs: Part
    limit: int | None  # bytes that may be taken; None without a limit
    shared: bool  # has no memory itself, so it takes this process's memory


@dataclass(frozen=True)
class Preparing:
    """What a first load takes once, in a separate process, to prepare a backbone."""

    disk: int  # bytes, which stay in the cache folder
    memory: int  # bytes
    seconds: int  # on two cores of a server processor

    def __str__(self) -> str:
        disk, memory = format_size(self.disk), format_size(self.memory)
        return f"{disk} on disk, {memory} of memory in a process of its own, about {self.seconds} s"


@dataclass(frozen=True)
class Needs:
    """Memory that a loader needs for its backbone, and the choices that it follows from."""

    footprint: Footprint
    context_length: int
    host: Part
    device: DeviceNeeds | None = None
    provider: str = "cpu"  # onnxruntime's execution provider
    mapped: int = 0  # bytes of weights that every token reads in mapped files
    prefill: bool = False  # the graph for prompts is loaded, too
    prefill_refused: str = ""  # why it is not loaded, if something bars it
    preparing: Preparing | None = None  # what is still to be done for that
    saving: str = ""  # advice on needing less, which ends a sentence


@dataclass(frozen=True)
class Ask:
    """A user's wishes for a plan; None leaves the number to the planner."""

    memory: int | str | None = None  # limit for this process
    slots: int | None = None
    sequences: int = 1  # at a time, each with a full context

    def allowed(self, process: int, available: int) -> int:
        """Return the limit asked for, or without one, the share of `available` that a plan takes."""
        if self.memory is not None:
            return parse_size(self.memory)
        return process + int(available * SHARE_OF_MACHINE)


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Planned bytes in one memory, and the numbers that they follow from."""

    context_length: int  # tokens of prompt and answer together
    chunk_tokens: int  # most tokens of a prompt in a step
    weights: int  # matrices that the engine copies into this memory, and its bookkeeping
    kv_cache: int  # of full contexts; the system provides its pages as they fill
    activations: int  # of a chunk
    provider: str = "cpu"  # onnxruntime's execution provider
    kv: KvType = "fp32"  # type of keys and values
    sequences: int = 1  # that the KV cache has room for

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(nbytes for _, nbytes in self.parts())

    def parts(self) -> list[tuple[str, int]]:
        """Name and bytes of each part."""
        times = f"{self.sequences} x " if self.sequences > 1 else ""
        return [
            ("weights", self.weights),
            (f"{self.kv} KV cache of {times}{self.context_length} tokens", self.kv_cache),
            (f"activations of {self.chunk_tokens} tokens", self.activations),
        ]


@dataclass(frozen=True, kw_only=True)
class DevicePlan(Placed):
    """Planned bytes in the memory of a device, and the numbers that they follow from."""

    limit: int | None  # bytes that may be taken; None without a limit
    shared: bool  # has no memory itself, so it takes this process's memory


@dataclass(frozen=True, kw_only=True)
class MemoryPlan(Placed):
    """Planned bytes in the memory of this process, and the numbers that they follow from."""

    engine: EngineName  # that runs the backbone
    slots: int  # records that the row cache holds
    row_cache: int  # bytes of all slots, and of their bookkeeping
    logit_tokens: int  # most tokens of a step that gives the logits of each
    process: int  # taken before loading
    reads: int  # records on their way from flash
    device: DevicePlan | None = None  # of its memory
    prefill: bool = False  # the graph for prompts is loaded, too
    prefill_refused: str = ""  # why it is not, if something bars it
    preparing: Preparing | None = None  # by the first load; None: it is done, or not wanted

    def measured(self, opened: int, needs: Needs, limit: int) -> MemoryPlan:
        """Return the plan with the slots that fit under a limit, once the backbone is open; no fewer than planned.

        opened: bytes that the process has taken and will take beside the model, without slots.
        """
        taken = max(0, opened - self.process)
        weights = max(taken, min(taken + needs.host.later, self.weights))
        spare = limit - self.total + self.weights - weights
        slots = self.slots + max(0, min(spare // needs.host.slot, self.more_slots(needs)))
        more = (slots - self.slots) * needs.host.slot
        return replace(self, weights=weights, slots=slots, row_cache=self.row_cache + more)

    def more_slots(self, needs: Needs) -> int:
        """Return the most slots that `measured` may add: as many as the weights were expected to take."""
        left = needs.footprint.model.records - self.slots
        return max(0, min(left, self.weights // needs.host.slot))

    @property
    def kv_nbytes(self) -> int:
        """Bytes of keys and values, here or on the device."""
        return self.kv_cache if self.device is None else self.device.kv_cache

    @property
    def text(self) -> int:
        """Bytes for a prompt on its way to ids; one at a time is."""
        return PROMPT_NBYTES * self.context_length

    def parts(self) -> list[tuple[str, int]]:
        """Name and bytes of each part."""
        before = [("this process before loading", self.process), ("text of a prompt", self.text)]
        rows = [("reads", self.reads), (f"row cache of {self.slots} slots", self.row_cache)]
        if self.device is None:
            return [*before, *super().parts(), *rows]
        shared = [("memory of the device", self.device.total)] if self.device.shared else []
        return [*before, *super().parts()[2:], *rows, *shared]


def plan_memory(path: object, needs: Needs, ask: Ask, process: int, available: int) -> MemoryPlan:
    """Return the plan with the most slots under the limit asked for, else a share of `available`.

    process: bytes that this process has taken already. Raises MemoryPlanError, which names the
    path, if not even the smallest plan fits; InputError for impossible numbers of slots.
    """
    planner = Planner(needs, process, ask.sequences)
    limit = process + available if ask.memory is None else parse_size(ask.memory)
    least = planner.least(limit, ask.slots)
    whose = "memory" if ask.memory is not None else "available memory"
    if reason := planner.refusal(least, limit, whose, path):
        raise MemoryPlanError(reason)
    if ask.slots is not None:
        return least
    return planner.filled(least, ask.allowed(process, available), capped=ask.memory is None)


class Planner:
    """Makes plans from the needs of a loader, for several sequences at a time."""

    def __init__(self, needs: Needs, process: int, sequences: int = 1) -> None:
        self.needs, self._process, self._sequences = needs, process, sequences
        self._tables = needs.footprint.table_format
        self.records = self._tables.tables.records if self._tables else 0
        # Rows of each token, and of tokens before a step that it needs, too.
        self._each = needs.footprint.model.lookups
        self._before = max(0, needs.footprint.model.row_window - 1)

    def least(self, limit: int, slots: int | None = None) -> MemoryPlan:
        """Return the plan with the largest chunk under `limit` and the fewest slots.

        It exceeds the limit if nothing fits. Raises InputError for an impossible number of slots.
        """
        fewest = max(self._rows(LEAST_CHUNK), self._sequences * self._rows(1))
        fewest = min(fewest, self.records)
        if slots is not None and self._tables and not fewest <= slots <= self.records:
            raise InputError(f"slots is {slots}; expected {fewest} to {self.records}")
        chunk = CHUNK_TOKENS
        while chunk // 2 >= max(SMALLEST_CHUNK, self._sequences):
            wanted = slots or max(fewest, SLOTS_PER_CHUNK_TOKEN * self._each * chunk)
            if not self.refusal(self.plan(chunk, wanted), limit):
                break
            chunk //= 2
        return self.plan(chunk, slots or max(fewest, self._rows(chunk)))

    def _rows(self, tokens: int) -> int:
        """Most rows that a step of so many tokens looks up."""
        return tokens * self._each + self._before

    def filled(self, least: MemoryPlan, limit: int, *, capped: bool = False) -> MemoryPlan:
        """Return the plan with as many slots as fit; `capped`: in a cache of the default size."""
        if self._tables is None:
            return least
        spare = limit - least.total
        if capped:
            spare = min(spare, DEFAULT_CACHE_NBYTES - least.row_cache)
        return self.plan(least.chunk_tokens, least.slots + max(0, spare // self.needs.host.slot))

    def plan(self, chunk: int, slots: int) -> MemoryPlan:
        """Return the plan for `chunk` tokens in a chunk and `slots` slots, at most one a record."""
        needs, tables, device = self.needs, self._tables, self.needs.device
        slots = min(slots, self.records)
        # All rows of a chunk must be resident at once.
        fitting = (slots - self._before) // self._each
        chunk = min(chunk, fitting) if slots < self.records else chunk
        known = BUCKET_NBYTES * min(self.records, LEAST_BUCKETS) + (
            tables.index_nbytes if tables else 0
        )
        # Twice, because choosing records copies them.
        read = 2 * (tables.tables.record_nbytes + CRC_NBYTES) if tables else 0
        there = None
        if device is not None:
            common = self._in(device.needs, chunk)
            there = DevicePlan(**common, limit=device.limit, shared=device.shared)
        return MemoryPlan(
            **self._in(needs.host, chunk),
            engine=needs.footprint.engine,
            slots=slots,
            row_cache=slots * needs.host.slot + known,
            logit_tokens=self._logit_tokens(chunk),
            process=self._process,
            reads=min(self._rows(chunk), self.records) * read,
            device=there,
            prefill=needs.prefill,
            prefill_refused=needs.prefill_refused,
            preparing=needs.preparing,
        )

    def _in(self, part: Part, chunk: int) -> dict[str, Any]:
        """Return the fields of a plan in one memory."""
        # Of a chunk, or of a step with a token and its logits of each sequence.
        step = self._sequences * (part.chunk_token + part.logits) if self._sequences > 1 else 0
        return {
            "context_length": self.needs.context_length,
            "chunk_tokens": chunk,
            "weights": part.weights,
            "kv_cache": self._sequences * part.kv_cache,
            "activations": part.fixed + max(chunk * part.chunk_token, step),
            "provider": self.needs.provider,
            "kv": self.needs.footprint.kv,
            "sequences": self._sequences,
        }

    def _logit_tokens(self, chunk: int) -> int:
        """Return the most tokens that take no more with all their logits than a chunk without."""
        part = self.needs.device.needs if self.needs.device else self.needs.host
        fitting = chunk * part.chunk_token // (part.chunk_token + part.logits)
        return min(chunk, max(LEAST_CHUNK, self._sequences, fitting))

    def refusal(
        self, least: MemoryPlan, limit: int, whose: str = "memory", path: object = "this model"
    ) -> str:
        """Return the error message if a plan does not fit, else "". whose: the limit, in words."""
        tight: Placed = least
        advice, device = "shorten the context" + self.needs.saving, least.device
        if device is not None and device.limit is not None and device.total > device.limit:
            whose, limit = f"memory of the device ({device.provider})", device.limit
            tight, advice = device, "shorten the context, or run it on the CPU"
        elif least.total <= limit:
            return ""
        named = ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in tight.parts())
        return (
            f"{whose} of {format_size(limit)} is too small for {path}: at least "
            f"{format_size(tight.total, up=True)} are needed ({named}); allow more or {advice}"
        )


def contexts(longest: int) -> list[int]:
    """Return the lengths to try for a model of this longest context, in descending order."""
    powers = (1 << bits for bits in range(SHORTEST_CONTEXT.bit_length() - 1, longest.bit_length()))
    return sorted({longest, *powers}, reverse=True)


def choose_plan(
    lengths: Sequence[int], plan_at: Callable[[int], MemoryPlan], limit: int
) -> MemoryPlan:
    """Return the plan of the first of these lengths that fits and leaves room for rows.

    lengths: in descending order; the last one is taken if it fits. limit: bytes for this process.
    plan_at: plans for a context length; called for the chosen one last. Raises its MemoryPlanError
    if none fits.
    """
    for length in lengths[:-1]:
        try:
            plan = plan_at(length)
        except MemoryPlanError:
            continue
        if length <= USUAL_CONTEXT or leaves_room(plan, limit):
            return plan
    return plan_at(lengths[-1])


def leaves_room(plan: MemoryPlan, limit: int) -> bool:
    """Return whether the context takes no more than its share, and chunks of prompts are whole.

    On a device whose memory is unknown it does not.
    """
    if plan.chunk_tokens < min(CHUNK_TOKENS, plan.slots):
        return False
    taken = plan.kv_cache + plan.activations + plan.text
    sides = [(taken, limit - plan.process - plan.weights)]
    if (device := plan.device) is not None:
        room = 0 if device.limit is None else device.limit - device.weights
        sides.append((device.kv_cache + device.activations, room))
    return all(taken <= CONTEXT_SHARE * room for taken, room in sides)
