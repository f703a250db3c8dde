"""Makes memory plans: how long a context, how large a chunk, and how many slots, the memory allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stem_edge.errors import InputError, MemoryPlanError
from stem_edge.runtime.backends.interface import LEAST_CHUNK
from stem_edge.runtime.backends.memory_plan import (
    CHUNK_TOKENS,
    Ask,
    DevicePlan,
    MemoryPlan,
    Needs,
    Part,
)
from stem_edge.tables.shards import CRC_NBYTES
from stem_edge.units import format_size, parse_size

SMALLEST_CHUNK = 16
# A larger chunk is taken only if the row cache keeps this many slots for each of its tokens.
SLOTS_PER_CHUNK_TOKEN = 8
# Without a limit, a plan takes this share of the available memory. The row cache takes no more than
# a few percent of a 1B model's tables, because further slots gain little.
SHARE_OF_MACHINE = 0.5
DEFAULT_CACHE_NBYTES = 256 << 20
RECORD_NBYTES = 8  # of bookkeeping in a row cache, for every record of the tables

# A longer context is taken only if it leaves room; a shorter one only if this one does not fit.
USUAL_CONTEXT = 4096
SHORTEST_CONTEXT = 128
# Of what a limit leaves beside process and weights, a long context takes at most this share, because
# rows that the cache lacks cost time in every text, and room for long texts serves only those.
CONTEXT_SHARE = 0.5


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
    share = allowed(ask, process, available)
    return planner.filled(least, share, capped=ask.memory is None)


def allowed(ask: Ask, process: int, available: int) -> int:
    """Return the limit asked for, or without one, the share of `available` that a plan takes."""
    if ask.memory is not None:
        return parse_size(ask.memory)
    return process + int(available * SHARE_OF_MACHINE)


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
        host, device = self.needs.host, self.needs.device
        each = host.slot + (device.needs.slot if device and device.shared else 0)
        more = [(limit - least.total) // each]
        cached, slot = least.row_cache, host.slot
        if device is not None and least.device is not None:
            capped, cached, slot = device.limit is None, least.device.row_cache, device.needs.slot
            if device.limit is not None:
                more.append((device.limit - least.device.total) // slot)
        if capped:
            more.append((DEFAULT_CACHE_NBYTES - cached) // slot)
        slots = least.slots + max(0, min(more))
        return self.plan(least.chunk_tokens, slots)

    def plan(self, chunk: int, slots: int) -> MemoryPlan:
        """Return the plan for `chunk` tokens in a chunk and `slots` slots, at most one a record."""
        needs, host, tables = self.needs, self.needs.host, self._tables
        slots = min(slots, self.records)
        # All rows of a chunk must be resident at once.
        fitting = (slots - self._before) // self._each
        chunk = min(chunk, fitting) if slots < self.records else chunk
        known = RECORD_NBYTES * self.records
        cached = slots * host.slot + known + (tables.index_nbytes if tables else 0)
        # Twice, because staging or choosing records copies them.
        read = tables.tables.record_nbytes + CRC_NBYTES if tables else 0
        return MemoryPlan(
            engine=needs.footprint.engine,
            context_length=needs.context_length,
            chunk_tokens=chunk,
            logit_tokens=self._logit_tokens(chunk),
            slots=slots,
            process=self._process,
            weights=host.weights,
            kv_cache=self._sequences * host.kv_cache,
            activations=self._activations(host, chunk),
            reads=2 * min(self._rows(chunk), self.records) * read,
            row_cache=cached,
            provider=needs.provider,
            device=self._on_device(chunk, slots),
            prefill=needs.prefill,
            prefill_refused=needs.prefill_refused,
            kv=needs.footprint.kv,
            sequences=self._sequences,
            preparing=needs.preparing,
        )

    def _activations(self, part: Part, chunk: int) -> int:
        """Return the bytes of a chunk, or of a step with a token and its logits of each sequence."""
        step = self._sequences * (part.chunk_token + part.logits) if self._sequences > 1 else 0
        return part.fixed + max(chunk * part.chunk_token, step)

    def _logit_tokens(self, chunk: int) -> int:
        """Return the most tokens that take no more with all their logits than a chunk without."""
        part = self.needs.device.needs if self.needs.device else self.needs.host
        fitting = chunk * part.chunk_token // (part.chunk_token + part.logits)
        return min(chunk, max(LEAST_CHUNK, self._sequences, fitting))

    def refusal(
        self, least: MemoryPlan, limit: int, whose: str = "memory", path: object = "this model"
    ) -> str:
        """Return the error message if a plan does not fit, else "". whose: the limit, in words."""
        total, parts, advice = least.total, least.parts(), "shorten the context" + self.needs.saving
        device = least.device
        if device is not None and device.limit is not None and device.total > device.limit:
            whose, limit = f"memory of the device ({device.provider})", device.limit
            total, parts = device.total, device.parts()
            advice = "shorten the context, or run it on the CPU"
        elif total <= limit:
            return ""
        named = ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in parts)
        return (
            f"{whose} of {format_size(limit)} is too small for {path}: at least "
            f"{format_size(total, up=True)} are needed ({named}); allow more or {advice}"
        )

    def _on_device(self, chunk: int, slots: int) -> DevicePlan | None:
        if (device := self.needs.device) is None:
            return None
        part = device.needs
        return DevicePlan(
            provider=self.needs.provider,
            limit=device.limit,
            shared=device.shared,
            context_length=self.needs.context_length,
            chunk_tokens=chunk,
            slots=slots,
            weights=part.weights,
            kv_cache=self._sequences * part.kv_cache,
            activations=self._activations(part, chunk),
            row_cache=slots * part.slot,
            kv=self.needs.footprint.kv,
            sequences=self._sequences,
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
