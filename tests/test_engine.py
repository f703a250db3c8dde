"""Whatever is only about speed or memory must not change a single token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stem_edge
from stem_edge.bundle import TABLES, open_bundle
from stem_edge.quantize import F32
from stem_edge.runtime.backend import open_backend
from stem_edge.runtime.cache import RowCache
from stem_edge.runtime.engine import Engine
from stem_edge.runtime.prefetch import Prefetcher
from stem_edge.runtime.store import ReadMode, open_store

PROMPT = [256, *b"Not all rows fit: the cache must choose, and choose again.", 5, 299, 0]
NEW_TOKENS = 40


def run(
    bundle: Path,
    *,
    slots: int = 300,
    chunk: int = 128,
    overlap: bool = True,
    reads: ReadMode = "pread",
    threads: int = 1,
) -> tuple[list[int], F32]:
    """Greedy tokens after PROMPT, and the logits of the last step."""
    opened = open_bundle(bundle)
    layout = opened.manifest.tables
    cache = RowCache(layout, slots)
    store = open_store(opened.file(TABLES), layout, reads)
    backend = open_backend(opened, cache, threads, None)
    engine = Engine(backend, Prefetcher(store, cache, overlap=overlap), chunk, overlap=overlap)
    try:
        context = engine.open_context(len(PROMPT) + NEW_TOKENS)
        *_, logits = engine.process(context, PROMPT)
        tokens = []
        for _ in range(NEW_TOKENS):
            tokens.append(int(logits[0].argmax()))
            engine.expect(np.array(tokens[-1:]))
            logits = engine.step(context, np.array(tokens[-1:]), 0)
        return tokens, logits[0].copy()
    finally:
        engine.close()


VARIANTS: list[dict[str, Any]] = [
    {"overlap": False},
    {"slots": 1},
    {"slots": 2},
    {"slots": 7, "overlap": False},
    {"slots": 33},
    {"reads": "mmap"},
    {"reads": "mmap", "slots": 3, "overlap": False},
    {"chunk": 1},
    {"chunk": 16},
    {"threads": 2},
    {"threads": 2, "slots": 5, "chunk": 4},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_tokens_do_not_depend_on_how_they_are_computed(
    tiny_bundle: Path, variant: dict[str, Any]
) -> None:
    expected_tokens, expected = run(tiny_bundle)
    tokens, logits = run(tiny_bundle, **variant)
    assert tokens == expected_tokens
    assert np.abs(logits - expected).max() < 1e-4


def test_contexts_that_take_turns_do_not_mix(tiny_bundle: Path) -> None:
    with stem_edge.load(tiny_bundle) as model:
        prompts = [[256, 1, 2], [256, 7, 8, 9]]
        alone = [
            [t for c in model.generate(p, max_new_tokens=12) for t in c.token_ids] for p in prompts
        ]
        together: list[list[int]] = [[], []]
        streams = [model.generate(p, max_new_tokens=12) for p in prompts]
        active = [0, 1]
        while active:
            for number in list(active):
                chunk = next(streams[number], None)
                if chunk is None:
                    active.remove(number)
                else:
                    together[number] += chunk.token_ids
    assert together == alone


def test_a_failed_read_leaves_the_engine_usable(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stem_edge.load(tiny_bundle) as model:
        expected = model.logits([1, 2, 3])
    with stem_edge.load(tiny_bundle) as model:
        real = model._engine.rows.store._read_at

        def broken(*args: Any) -> int:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(model._engine.rows.store, "_read_at", broken)
        with pytest.raises(stem_edge.RowReadError, match="records/c/0/0: record of token"):
            model.logits([1, 2, 3])
        monkeypatch.setattr(model._engine.rows.store, "_read_at", real)
        assert np.array_equal(model.logits([1, 2, 3]), expected)
