"""Memory plans, computed from manifests alone."""

import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from planned_bundle import BUNDLE, CONTEXT, DATA, make_bundle

from stem_edge.bundle.footprint import SLOT_BOOKKEEPING_NBYTES, array_slot_nbytes, footprint_of
from stem_edge.bundle.manifest import TABLES, FileEntry, Manifest
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import InputError, MemoryPlanError
from stem_edge.runtime.backends.costs import Needs
from stem_edge.runtime.backends.memory_plan import (
    CHUNK_TOKENS,
    PROMPT_NBYTES,
    SMALLEST_CHUNK,
    MemoryPlan,
    Room,
)
from stem_edge.runtime.backends.memory_plan import plan_memory as plan_of_lengths
from stem_edge.runtime.backends.onnxruntime.needs import cpu_needs
from stem_edge.shown import parse_size
from stem_edge.tables.packing import make_layout
from stem_edge.tables.store import CRC_NBYTES

INDEX_CHUNK = f"{TABLES}/index/c/0"


def plan_memory(
    bundle: Bundle,
    context: int,
    memory: int | str | None,
    available: int = 1 << 40,
    process: int = 0,
    slots: int | None = None,
    **changes: Any,
) -> MemoryPlan:
    """Plan for a bundle that is not prepacked, in a process that holds no memory yet."""
    options: dict[str, Any] = {"threads": 1, "prepared": False, "prefill": False} | changes
    needs = cpu_needs(footprint_of(bundle.manifest), context, **options)
    limit = None if memory is None else parse_size(memory)
    return planned(needs, Room(process, available, limit, slots))


def planned(needs: Needs, room: Room) -> MemoryPlan:
    return plan_of_lengths(BUNDLE.path, [CONTEXT], lambda _: needs, room)


assert BUNDLE.manifest.tables is not None
LAYOUT = BUNDLE.manifest.tables
SLOT = array_slot_nbytes(LAYOUT) + SLOT_BOOKKEEPING_NBYTES


def smallest(bundle: Bundle, context: int = CONTEXT) -> int:
    """Find the smallest memory that is accepted, by bisection."""
    refused, accepted = 0, 1 << 40
    while accepted - refused > 1:
        middle = (refused + accepted) // 2
        try:
            plan_memory(bundle, context, middle)
            accepted = middle
        except MemoryPlanError:
            refused = middle
    return accepted


def test_the_parts_add_up() -> None:
    plan = plan_memory(BUNDLE, CONTEXT, "60MB")
    parts = dict(plan.parts())
    assert len(parts) == 8
    assert plan.text == PROMPT_NBYTES * CONTEXT
    assert plan.total == sum(parts.values())
    known = plan.process + plan.text + plan.weights + plan.kv_cache + plan.activations
    assert plan.total == known + plan.reads + plan.row_cache


def test_without_a_limit_the_machine_is_the_limit() -> None:
    least = smallest(BUNDLE)
    with pytest.raises(MemoryPlanError, match="available memory of"):
        plan_memory(BUNDLE, CONTEXT, None, available=least - 1)
    tight = plan_memory(BUNDLE, CONTEXT, None, available=least)
    assert (tight.total, tight.slots, tight.chunk_tokens) == (least, *[SMALLEST_CHUNK] * 2)
    half = plan_memory(BUNDLE, CONTEXT, None, available=40_000_000)
    assert 20_000_000 - SLOT < half.total <= 20_000_000


def test_a_prepared_backbone_stays_in_its_file() -> None:
    big = make_bundle(files=BUNDLE.manifest.files | {DATA: FileEntry(1 << 30, "0" * 64)})
    plans = [plan_memory(big, CONTEXT, None, prepared=prepared) for prepared in (False, True)]
    assert plans[0].weights > 900_000_000
    assert plans[1].weights < 64 << 20


@pytest.mark.parametrize("vocab_size", [1000, 50_000, 1 << 20])
@pytest.mark.parametrize("slots", [4, 16, 128])
def test_logits_of_every_position_take_no_more_than_a_chunk(vocab_size: int, slots: int) -> None:
    model = msgspec.structs.replace(BUNDLE.manifest.model, vocab_size=vocab_size)
    footprint = replace(footprint_of(BUNDLE.manifest), model=model)
    needs = cpu_needs(footprint, CONTEXT, 1, prepared=False, prefill=False)
    plan = planned(needs, Room(0, 1 << 40, slots=slots))
    taken = plan.logit_tokens * (needs.host.chunk_token + needs.host.logits)
    assert 4 <= plan.logit_tokens <= plan.chunk_tokens
    assert plan.logit_tokens == 4 or taken <= plan.chunk_tokens * needs.host.chunk_token
    assert needs.host.logits == 3 * 4 * vocab_size


@pytest.mark.parametrize("vocab_size", [1000, 1 << 18])
@pytest.mark.parametrize("sequences", [2, 8, 100])
@pytest.mark.parametrize("memory", [None, "72MB", "400MB"])
def test_memory_for_several_sequences(vocab_size: int, sequences: int, memory: str | None) -> None:
    model = msgspec.structs.replace(BUNDLE.manifest.model, vocab_size=vocab_size)
    needs = cpu_needs(
        replace(footprint_of(BUNDLE.manifest), model=model),
        CONTEXT,
        1,
        prepared=False,
        prefill=False,
    )
    limit = None if memory is None else parse_size(memory)
    room = Room(0, 1 << 40, limit, sequences=sequences)
    one = planned(needs, Room(0, 1 << 40))
    try:
        plan = planned(needs, room)
    except MemoryPlanError as error:
        assert f"KV cache of {sequences} x {CONTEXT} tokens" in str(error)
        assert (vocab_size, sequences, memory) == (1 << 18, 100, "72MB")
        return
    assert plan.sequences == sequences and plan.kv_cache == sequences * one.kv_cache
    assert plan.slots >= plan.chunk_tokens >= plan.logit_tokens >= sequences
    step = sequences * (needs.host.chunk_token + needs.host.logits)
    assert plan.activations - needs.host.fixed >= step
    assert memory is None or plan.total <= parse_size(memory)
    with pytest.raises(InputError, match=f"slots is 1; expected {max(4, sequences)} to 20000"):
        planned(needs, replace(room, slots=1))


@pytest.mark.parametrize("memory", ["60MB", "100MB", "1GB", 60_000_001])
def test_the_plan_keeps_to_the_limit_and_wastes_less_than_a_slot(memory: int | str) -> None:
    plan = plan_memory(BUNDLE, CONTEXT, memory)
    limit = parse_size(memory)
    assert plan.total <= limit
    assert plan.slots == 20_000 or plan.total > limit - SLOT


def test_records_that_tokens_share() -> None:
    """With few, large records: slots and reads count records, the index counts tokens."""
    config = msgspec.structs.replace(BUNDLE.manifest.model, stem_ffn="hash-moe", n_experts=40)
    layout = make_layout(40, config.stem_layers, config.row_parts(), "int8", 32)
    index = {name: FileEntry(100, "0" * 64) for name in (f"{TABLES}/index/zarr.json", INDEX_CHUNK)}
    files = BUNDLE.manifest.files | index
    bundle = make_bundle(model=config, stored=layout, indexed=True, files=files)
    plan = plan_memory(bundle, CONTEXT, None)
    record = layout.record_nbytes + CRC_NBYTES
    assert (plan.slots, plan.chunk_tokens) == (40, CHUNK_TOKENS)
    assert plan.reads == 2 * 40 * record
    assert (
        plan.row_cache
        == 40 * (array_slot_nbytes(layout) + SLOT_BOOKKEEPING_NBYTES) + 8 * 40 + 4 * 20_000
    )
    with pytest.raises(InputError, match="slots is 41; expected 4 to 40"):
        plan_memory(bundle, CONTEXT, None, slots=41)
    few = plan_memory(bundle, CONTEXT, None, slots=8)
    assert (few.slots, few.chunk_tokens, few.reads) == (8, 8, 2 * 8 * record)
    threads = plan_memory(bundle, CONTEXT, None, threads=3)  # because each dequantizes an expert
    assert threads.activations - plan.activations == 2 * 4 * layout.row_width


@pytest.mark.parametrize("vocab_size", [5, 999, 20_000, 128_256])
def test_too_little_memory_is_refused_with_a_minimum_that_is_then_accepted(
    vocab_size: int,
) -> None:
    bundle = make_bundle(vocab_size)
    with pytest.raises(MemoryPlanError) as caught:
        plan_memory(bundle, CONTEXT, smallest(bundle) - 1)
    found = re.search(r"at least (\S+ MB) are needed", str(caught.value))
    assert found
    assert plan_memory(bundle, CONTEXT, found[1]).total <= parse_size(found[1])


def test_the_refusal_lists_the_parts_and_what_to_do() -> None:
    with pytest.raises(MemoryPlanError) as caught:
        plan_memory(BUNDLE, CONTEXT, "1MB")
    message = str(caught.value)
    assert message.startswith("memory of 1 MB is too small for model: at least ")
    for name, nbytes in plan_memory(BUNDLE, CONTEXT, smallest(BUNDLE)).parts():
        assert (f"{name} " in message) == bool(nbytes)
    assert message.endswith(
        "; allow more or shorten the context"
    )  # prepared, it would not fit either
    assert "\n" not in message


@pytest.mark.parametrize("block_size", [0, -32, 8])
def test_manifest_with_an_impossible_block_size_is_refused(block_size: int) -> None:
    """The refusal names it, instead of a division by zero in the plan."""
    manifest = msgspec.to_builtins(BUNDLE.manifest)
    manifest["backbone"]["block_size"] = block_size
    with pytest.raises(msgspec.ValidationError, match="block_size"):
        msgspec.convert(manifest, Manifest)
