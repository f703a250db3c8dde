"""Memory plans: what fits into a limit, what is chosen for it, and what a refusal says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
from make_checkpoint import Shape, write_checkpoint
from models import ORT

import stem_edge
from stem_edge.errors import InputError, MemoryPlanError
from stem_edge.runtime import load_plan
from stem_edge.runtime.backends.memory_plan import MemoryPlan
from stem_edge.shown import parse_size

RECORDS, LONGEST, MEGA, GREAT = 20_000, 1 << 17, 10**6, 1 << 40
OWN = 30 * MEGA
Plan = Callable[..., MemoryPlan]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planned")
    layers: Any = {"n_layers": 4, "stem_layers": (1, 2, 3)}
    shape = Shape(vocab_size=RECORDS, d_ff=256, max_seqlen=LONGEST, **layers)
    checkpoint = write_checkpoint(folder / "checkpoint", shape)
    return stem_edge.export_bundle(checkpoint, folder / "bundle", type="fp32", rows="int8").path


@pytest.fixture
def plan(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Plan on a machine with a terabyte of memory, of which this process has 30 MB."""
    monkeypatch.setattr(load_plan, "own_memory", lambda: OWN)

    def planned(
        memory: int | str | None = None, path: Path = bundle, free: int = GREAT, **options: Any
    ) -> MemoryPlan:
        monkeypatch.setattr(load_plan, "available_memory", lambda: free)
        given: Any = {"threads": 1, "kv": "fp32", "context_length": 512} | options
        return stem_edge.memory_plan(path, memory, **given)

    return planned


def least(plan: Callable[[], object]) -> str:
    """Return the memory that a refusal asks for."""
    with pytest.raises(MemoryPlanError, match=r"at least (\S+ MB) are needed") as refused:
        plan()
    found = re.search(r"at least (\S+ MB)", str(refused.value))
    assert found and "\n" not in str(refused.value)
    return found[1]


@pytest.mark.parametrize("memory", ["80MB", "100MB", "1GB", 80_000_001])
def test_the_plan_keeps_to_the_limit_and_wastes_less_than_a_slot(
    memory: int | str, plan: Plan
) -> None:
    found, limit = plan(memory), parse_size(memory)
    slot = plan(slots=1001).row_cache - plan(slots=1000).row_cache
    assert found.total == sum(nbytes for _, nbytes in found.parts()) <= limit
    assert (found.process, found.chunk_tokens) == (OWN, 128)
    assert found.slots == RECORDS or found.total > limit - slot
    assert 4 <= found.logit_tokens < found.chunk_tokens  # logits of every position take more


def test_without_a_limit_half_of_the_machine_is_planned_and_all_of_it_may_be_needed(
    plan: Plan,
) -> None:
    half = plan(free=60 * MEGA)
    share = half.process + (OWN + 60 * MEGA - half.process) // 2
    assert share - 1000 < half.total <= share
    with pytest.raises(MemoryPlanError, match="available memory of 1 MB"):
        plan(free=MEGA - OWN)
    needed = parse_size(least(lambda: plan(free=10 * MEGA)))
    tight = plan(free=needed - OWN)
    assert (tight.slots, tight.chunk_tokens) == (16, 16)


@pytest.mark.parametrize("options", [{}, {"sequences": 8}, {"context_length": 4096}], ids=str)
def test_a_refusal_names_a_minimum_that_is_then_accepted(
    options: dict[str, Any], plan: Plan, shared: Path
) -> None:
    for path in (None, models.bundle_of("stem", ORT, shared)):
        given = options if path is None else {"sequences": 1 + len(options), "path": path}
        enough = least(lambda given=given: plan(OWN, **given))  # type: ignore[misc]
        assert OWN < plan(enough, **given).total <= parse_size(enough)
        least(lambda given=given, enough=enough: plan(parse_size(enough) - 200_000, **given))  # type: ignore[misc]


@pytest.mark.parametrize("sequences", [2, 8, 100])
def test_each_sequence_has_a_full_context(sequences: int, plan: Plan) -> None:
    one, found = plan(), plan(sequences=sequences)
    assert (found.sequences, found.kv_cache) == (sequences, sequences * one.kv_cache)
    assert found.slots >= found.chunk_tokens >= found.logit_tokens >= sequences
    assert found.activations - one.activations >= 12 * RECORDS * max(
        0, sequences - one.logit_tokens
    )
    with pytest.raises(MemoryPlanError, match=f"KV cache of {sequences} x 512 tokens"):
        plan(35 * MEGA, sequences=sequences)
    with pytest.raises(InputError, match=f"slots is 1; expected {max(4, sequences)} to {RECORDS}"):
        plan(slots=1, sequences=sequences)


def test_records_that_tokens_share(plan: Plan, shared: Path) -> None:
    """With few, large records: slots and reads count records; each thread dequantizes an expert."""
    path = models.bundle_of("hash-moe", ORT, shared)
    records = stem_edge.open_bundle(path).manifest.model.records
    found, few = plan(path=path), plan(path=path, slots=4)
    assert (found.slots, few.slots, few.chunk_tokens) == (records, 4, 4)
    assert found.reads * 4 == few.reads * records
    with pytest.raises(InputError, match=f"slots is {records + 1}; expected 4 to {records}"):
        plan(path=path, slots=records + 1)


def test_more_memory_gives_a_longer_context_and_at_least_as_much_for_rows(plan: Plan) -> None:
    sizes = [size * MEGA for size in range(50, 1400, 10)]
    found = [plan(size, context_length=None) for size in sizes]
    lengths = [one.context_length for one in found]
    assert lengths == sorted(lengths) and lengths[0] < 4096 in lengths and lengths[-1] == LONGEST
    assert all(length & (length - 1) == 0 for length in lengths)

    def of_context(plan: MemoryPlan) -> int:
        return plan.kv_cache + plan.activations + plan.text

    for size, one in zip(sizes, found, strict=True):
        spare = size - OWN - one.weights
        assert one.total <= size and (one.context_length <= 4096 or 2 * of_context(one) <= spare)
        if one.context_length < LONGEST:  # the next one would take too much, or not fit
            try:
                longer = plan(size, context_length=2 * one.context_length)
            except MemoryPlanError:
                continue
            assert one.context_length >= 4096 and 2 * of_context(longer) > spare


def test_on_a_device_its_memory_decides(plan: Plan) -> None:
    """Refusals name its parts; this process's memory holds no keys and values."""
    found = [
        plan(device_memory=size * MEGA, context_length=None) for size in (100, 300, 3000, 8000)
    ]
    lengths = [one.context_length for one in found]
    assert lengths == sorted(set(lengths)) and lengths[-1] == LONGEST
    for one in found:
        assert one.device is not None and one.kv_cache == 0
        limit, taken = one.device.limit or 0, one.device.total - one.device.weights
        assert one.device.total <= limit
        assert one.context_length <= 4096 or 2 * taken <= limit - one.device.weights
        assert one.device.kv_cache == 2 * 4 * 4 * 32 * one.context_length
    with pytest.raises(MemoryPlanError, match=r"device.*weights.*KV cache.*activations"):
        plan(device_memory=17 * MEGA)
    for memory in range(200 * MEGA, 200 * MEGA + 2000, 500):
        assert plan(memory, device_memory="60MB").total <= memory
