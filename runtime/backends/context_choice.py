"""The choice of a context length where none is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stem_edge.errors import MemoryPlanError
from stem_edge.runtime.backends.memory_plan import CHUNK_TOKENS, MemoryPlan

# A longer context is taken only if it leaves room; a shorter one only if this one does not fit.
USUAL_CONTEXT = 4096
SHORTEST_CONTEXT = 128
# Of what a limit leaves beside process and weights, a long context takes at most this share, because
# rows that the cache lacks cost time in every text, and room for long texts serves only those.
CONTEXT_SHARE = 0.5


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
    """Tell whether the context takes no more than its share, and chunks of prompts are whole.

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
