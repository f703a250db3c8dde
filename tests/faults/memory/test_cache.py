"""Catalogue R8 to R11: row caches of odd sizes and counts, and growing contexts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from contract import refused
from installed import DEMO
from loading import load_fixed

import stem_edge
from stem_edge.errors import InputError, MemoryPlanError
from stem_edge.graph.formats import EngineName


@pytest.mark.parametrize("slots", [-1, 0, 1, 3, 301, 1 << 40])
def test_r8_a_row_cache_that_cannot_be_is_refused(
    slots: int, engine: EngineName, tiny: Path
) -> None:
    """It would hold nothing, fewer rows than a step needs, or more than the table has."""
    refused(
        lambda: load_fixed(tiny, engine=engine, slots=slots),
        InputError,
        f"slots is {slots}; expected 4 to 300",
        kept=[tiny],
    )


def test_r8_memory_for_less_than_a_row_is_refused(tiny_bundle: Path) -> None:
    plan = stem_edge.memory_plan(tiny_bundle)
    fixed = plan.total - plan.row_cache
    refused(
        lambda: load_fixed(tiny_bundle, memory=fixed // 2),
        MemoryPlanError,
        *("too small", "row cache of"),
        kept=[tiny_bundle],
    )


def test_r10_a_context_is_planned_before_it_grows(engine: EngineName, tiny: Path) -> None:
    """The plan includes the full KV cache; longer contexts are refused with both numbers."""
    with load_fixed(tiny, engine=engine, context_length=100, threads=1) as model:
        refused(
            lambda: model.generate([1] * 101),
            InputError,
            *("the prompt has 101 tokens", "the context holds 100", "shorten it"),
        )
        chunks = list(model.generate([1] * 90, max_new_tokens=1000, temperature=5.0, seed=3))
        new = sum(len(chunk.token_ids) for chunk in chunks)
        assert chunks[-1].finish_reason == "stop" or new == 11  # the last token takes no place
        assert 0 < model.kv_nbytes <= model.plan.kv_cache


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system drops no pages")
def test_r11_pages_that_are_dropped_between_steps_are_read_again() -> None:
    """Without free memory, no page of the tables stays cached, but the text is the same."""
    shards = sorted(path for path in (DEMO / "tables.zarr").rglob("*") if path.is_file())
    with load_fixed(DEMO, resident=True, threads=1) as model:
        expected = model.generate_text("The capital of Peru is", max_new_tokens=20)
    with load_fixed(DEMO, slots=4, threads=1) as model:
        text = ""
        for chunk in model.generate("The capital of Peru is", max_new_tokens=20):
            text += chunk.text
            for shard in shards:
                with shard.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert text == expected
        assert model.stats.flash_bytes > 0
