"""The choice of a context length, for bundles that exist only as manifests."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planned_bundle import BUNDLE

from stem_edge.bundle.footprint import footprint_of
from stem_edge.errors import MemoryPlanError
from stem_edge.runtime.backends.costs import Needs, Part
from stem_edge.runtime.backends.memory_plan import (
    CONTEXT_SHARE,
    USUAL_CONTEXT,
    MemoryPlan,
    Room,
    plan_memory,
)
from stem_edge.runtime.backends.onnxruntime.needs import cpu_needs
from stem_edge.runtime.backends.options import contexts

LONGEST = 131_072
FOOTPRINT = footprint_of(BUNDLE.manifest)
MEGA = 10**6


def chosen(
    memory: int,
    *,
    device: Part | None = None,
    limit: int | None = None,
    lengths: list[int] | None = None,
) -> MemoryPlan:
    """Plan for one of these lengths; on a device, each token takes 1 kB of keys and values."""

    def needs_at(context: int) -> Needs:
        needs = cpu_needs(FOOTPRINT, context, 1, prepared=False, prefill=False)
        if device is None:
            return needs
        there = replace(device, kv_cache=1000 * context)
        return replace(needs, device=there, device_limit=limit)

    return plan_memory("it", lengths or contexts(LONGEST), needs_at, Room(0, 1 << 40, memory))


def of_context(plan: MemoryPlan) -> int:
    return plan.kv_cache + plan.activations + plan.text


@pytest.mark.parametrize(
    ("longest", "expected"),
    [
        (131_072, [1 << bits for bits in range(17, 6, -1)]),
        (5000, [5000, 4096, 2048, 1024, 512, 256, 128]),
        (129, [129, 128]),
        (128, [128]),
        (100, [100]),
        (1, [1]),
    ],
)
def test_lengths_to_try(longest: int, expected: list[int]) -> None:
    assert contexts(longest) == expected


def test_more_memory_gives_a_longer_context_and_at_least_as_much_for_rows() -> None:
    found = [chosen(size * MEGA) for size in range(17, 1000, 7)]
    lengths = [plan.context_length for plan in found]
    assert lengths == sorted(lengths)
    assert lengths[0] < USUAL_CONTEXT in lengths and lengths[-1] == LONGEST
    for size, plan in zip(range(17, 1000, 7), found, strict=True):
        assert plan.total <= size * MEGA
        taken, spare = of_context(plan), size * MEGA - plan.weights
        if plan.context_length > USUAL_CONTEXT:
            assert taken <= CONTEXT_SHARE * spare
        if plan.context_length < LONGEST:  # the next one would take too much, or not fit
            try:
                longer = chosen(size * MEGA, lengths=[2 * plan.context_length])
            except MemoryPlanError:
                continue
            assert plan.context_length >= USUAL_CONTEXT
            assert of_context(longer) > CONTEXT_SHARE * spare


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, USUAL_CONTEXT), (100 * MEGA, 32_768), (300 * MEGA, LONGEST)]
)
def test_on_a_device_its_memory_decides(limit: int | None, expected: int) -> None:
    device = Part(weights=10 * MEGA, kv_cache=0, fixed=0, chunk_token=1000, logits=1000)
    assert chosen(2000 * MEGA, device=device, limit=limit).context_length == expected
