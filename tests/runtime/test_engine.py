"""Options of speed and memory must not change a single token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from installed import DEMO
from prompt_graph import load_with

from stem_edge.bundle.manifest import TABLES
from stem_edge.bundle.opening import open_bundle
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.onnxruntime.backend import OrtBackend
from stem_edge.runtime.backends.onnxruntime.providers.graphs import cpu_graphs
from stem_edge.runtime.engine import Engine
from stem_edge.runtime.rows.cache import RowCache
from stem_edge.runtime.rows.rows import TableRows
from stem_edge.runtime.rows.slots import ArraySlots
from stem_edge.runtime.rows.store import open_store
from stem_edge.runtime.scoring import cut

PROMPT = [256, *b"Not all rows fit: the cache must choose, and choose again.", 5, 299, 0]
NEW_TOKENS = 40


def run(
    bundle: Path,
    *,
    slots: int = 300,
    chunk: int = 128,
    overlap: bool = True,
    threads: int = 1,
) -> tuple[list[int], F32]:
    """Greedy tokens after PROMPT, and the logits of the last step."""
    opened = open_bundle(bundle)
    tables = opened.manifest.table_format
    assert tables is not None
    graphs = cpu_graphs(opened, prefill=opened.manifest.has_prefill)
    storage = ArraySlots(tables.tables, slots)
    cache = RowCache(storage)
    store = open_store(opened.file(TABLES), tables)
    backend = OrtBackend(opened.manifest.model, graphs, storage, threads)
    engine = Engine(backend, TableRows(store, cache, overlap=overlap), chunk)
    try:
        context = engine.open_context(len(PROMPT) + NEW_TOKENS)
        begun = set[int]()
        store.ahead = lambda numbers, _: begun.update(numbers)  # type: ignore[assignment]
        *_, logits = engine.process(context, PROMPT)
        if overlap and min(chunk, slots) == 16:
            assert begun == set(PROMPT[32:]) - set(PROMPT[:16])
        tokens = []
        for _ in range(NEW_TOKENS):
            tokens.append(int(logits[0].argmax()))
            engine.expect(np.array(tokens[-1:]))
            logits = engine.step(context, np.array(tokens[-1:]))
        return tokens, logits[0].copy()
    finally:
        engine.close()


VARIANTS: list[dict[str, Any]] = [
    {"overlap": False},
    {"slots": 1},
    {"slots": 299},
    {"slots": 2},
    {"slots": 7, "overlap": False},
    {"slots": 33},
    {"slots": 3, "overlap": False},
    {"chunk": 1},
    {"chunk": 16},
    {"slots": 9, "chunk": 4},
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


@pytest.mark.parametrize("length", range(1, 40))
@pytest.mark.parametrize("size", [4, 5, 6, 16, 17, 128])
def test_a_prompt_is_cut_into_pairs_with_no_token_left_alone(length: int, size: int) -> None:
    chunks = cut(np.arange(length), size)
    assert np.concatenate(chunks).tolist() == list(range(length))
    assert all(len(chunk) <= size for chunk in chunks)
    assert all(len(chunk) % 2 == 0 for chunk in chunks[:-1])
    assert len(chunks[-1]) > 1 or length == 1


@pytest.mark.parametrize("prefill_graph", [True, False])
@pytest.mark.parametrize("length", [33, 37, 40])
def test_quantized_logits_do_not_depend_on_the_size_of_chunks(
    prefill_graph: bool, length: int
) -> None:
    ids = np.random.default_rng(length).integers(0, 1756, length).tolist()
    with load_with(DEMO, prefill=prefill_graph) as model:
        expected = model.logits(ids)
        for size in (4, 7, 16, 32):
            model.engine.planned_chunk = size
            assert np.abs(model.logits(ids) - expected).max() < 1e-3
