"""Plans of a device's and the host's memory, computed from manifests alone."""

from __future__ import annotations

from typing import Any

import pytest
from planned_bundle import BUNDLE, CONTEXT, make_bundle

from stem_edge.bundle.footprint import footprint_of
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import MemoryPlanError
from stem_edge.runtime.backends.costs import Needs
from stem_edge.runtime.backends.memory_plan import (
    SMALLEST_CHUNK,
    DevicePlan,
    MemoryPlan,
    Room,
    plan_memory,
)
from stem_edge.runtime.backends.onnxruntime.device.needs import DEVICE_FIXED_NBYTES as FIXED_NBYTES
from stem_edge.runtime.backends.onnxruntime.device.needs import device_needs

GREAT = 1 << 40


def needs(bundle: Bundle = BUNDLE, **changes: Any) -> Needs:
    usual: dict[str, Any] = {"limit": None, "shared": False}
    return device_needs(footprint_of(bundle.manifest), CONTEXT, "webgpu", **usual | changes)


def planned(
    memory: int | None = None,
    slots: int | None = None,
    **changes: Any,
) -> tuple[MemoryPlan, DevicePlan]:
    plan = plan_memory(
        "model", [CONTEXT], lambda _: needs(**changes), Room(0, GREAT, memory, slots)
    )
    assert plan.device is not None
    return plan, plan.device


def smallest() -> int:
    """Find the smallest memory of a device that is not refused."""
    low, high = 0, 1 << 30
    while high - low > 1:
        middle = (low + high) // 2
        try:
            planned(limit=middle)
            high = middle
        except MemoryPlanError:
            low = middle
    return high


def test_less_than_the_least_is_refused_with_parts() -> None:
    least = smallest()
    plan, _ = planned(limit=least)
    assert plan.chunk_tokens == SMALLEST_CHUNK
    with pytest.raises(MemoryPlanError, match=r"webgpu.*weights.*KV cache.*activations"):
        planned(limit=least - 1)


def test_the_device_holds_weights_keys_and_values() -> None:
    _, on = planned(slots=100)
    model = BUNDLE.manifest.model
    assert on.kv_cache == 2 * model.n_layers * model.n_kv_heads * model.head_dim * 4 * CONTEXT
    assert on.weights == footprint_of(BUNDLE.manifest).backbone_nbytes + FIXED_NBYTES


@pytest.mark.parametrize("shared", (False, True))
@pytest.mark.parametrize("limit", (None, GREAT))
@pytest.mark.parametrize("memory", range(500_000_000, 500_002_000, 500))
def test_no_plan_takes_more_than_it_may(memory: int, limit: int | None, shared: bool) -> None:
    big = make_bundle(vocab_size=2_000_000)
    plan, _ = planned(memory, bundle=big, limit=limit, shared=shared)
    assert plan.total <= memory and plan.slots
