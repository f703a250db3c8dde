"""Each token of a step has the bits of a step of its own, in place and where windows drop tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from every_kind import GEMMA_3N, GEMMA_4, checkpoint_of
from msgspec.structs import replace
from tiers import slow_but

from stem_edge.bundle.opening import Bundle
from stem_edge.export.exporter import export_with
from stem_edge.export.job.plan import plain_format
from stem_edge.export.job.recipe import Recipe
from stem_edge.graph.kv import KvType
from stem_edge.graph.names import STEP, apart_step
from stem_edge.graph.special.apart import apart
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.costs import SIZES
from stem_edge.runtime.backends.onnxruntime.backend import OrtBackend
from stem_edge.runtime.backends.onnxruntime.context import OrtContext
from stem_edge.runtime.backends.onnxruntime.loaded import Rows
from stem_edge.runtime.backends.onnxruntime.placeholders import placeholder_rows
from stem_edge.runtime.backends.onnxruntime.providers.graphs import sources
from stem_edge.runtime.backends.onnxruntime.providers.joined import joined_parts
from stem_edge.runtime.rows.slots import ArraySlots
from stem_edge.tables.windows import last_rows

LENGTH, PROMPT = 300, (120, 120)  # chunks of a prompt; a window of 5 drops tokens at 261
# Share of the logits' spread. Products of float32 matrices round by the number of rows, which flips some
# codes of activations: 0.017 of the spread without VNNI, less than 0.01 with it.
ROUNDING = 0.03
STEPS = (1, 8, 2, 4, 8, 1, 1, 8, 8, 4, 2)
CASES: list[tuple[str, str, KvType]] = [
    ("stem", "int4", "fp32"),
    ("stem", "int8", "int8"),
    ("window", "int8", "fp32"),
    ("window", "int4", "int4"),
    ("stem-mix", "fp32", "fp32"),
    ("plus, means, mixture", "fp32", "fp32"),
    ("plus, means, mixture", "int4", "fp32"),
    ("all at once", "int4", "fp32"),
    ("low rank, gate", "int4", "fp32"),
    ("Engram", "int4", "fp32"),
    ("Engram and windows", "int8", "int8"),
    (GEMMA_4, "int4", "int8"),
    (GEMMA_3N, "fp32", "int8"),
]
FAST = [CASES[number] for number in (1, 3, 9, 11)]


def export(name: str, folder: Path, backbone: str) -> Bundle:
    checkpoint = checkpoint_of(name, folder / "checkpoint", max_context=LENGTH)
    kind: Any = backbone
    if name == GEMMA_3N and backbone == "int4":  # it has rows of 8 values here
        kind = replace(plain_format("int4"), kinds={"laurel_out": "fp32"})
    options = Recipe(type=kind, prefill_graph=False, max_kl=99.0)
    return export_with(checkpoint, folder / "bundle", options)


def opened(bundle: Bundle, kv: KvType, rows: Rows) -> tuple[OrtBackend, Any]:
    """Return a backend with graphs for steps of several tokens, and the slots of 300 tokens."""
    config, layout = bundle.manifest.model, bundle.manifest.tables
    slots = ArraySlots(layout, min(5, layout.records)) if layout is not None else None
    step = joined_parts(bundle, prefill=False, kv=kv)[STEP]
    later = sources(bundle, {apart_step(size): apart(step, size) for size in SIZES})
    graphs = sources(bundle, joined_parts(bundle, prefill=False, kv=kv))
    ids = placeholder_rows(slots, LENGTH * config.lookups)
    if config.ngram_order:
        ids = ids.reshape(LENGTH, -1)
    if window := config.row_window:
        ids = last_rows(np.arange(LENGTH), ids, 0, window, ())
    return OrtBackend(config, graphs, slots, 2, kv, later, rows=rows), ids


def run(backend: OrtBackend, slots: Any, ids: Any, steps: Sequence[int]) -> tuple[F32, list[Any]]:
    """Return the logits of each token after a prompt, and keys and values at the end."""
    context, position, found = backend.open_context(LENGTH), 0, list[F32]()
    for count in (*PROMPT, *steps):
        if decoding := position >= sum(PROMPT):
            count = max(
                size for size in (1, *SIZES) if size <= min(count, context.together(position))
            )
        places = slice(position, position := position + count)
        backend.begin([context], ids[None, places], [places.start], apart=decoding)
        logits = backend.finish(slots[places], count)
        found += [logits.copy()] if decoding else []
    loaded: Any = context
    return np.concatenate(found), [array[0].copy() for array in loaded.own.arrays]


@pytest.mark.parametrize(("name", "backbone", "kv"), slow_but(FAST, CASES))
def test_the_bits_of_steps_of_one(name: str, backbone: str, kv: KvType, tmp_path: Path) -> None:
    """With an empty sequence beside a token, products have an even number of rows, and round each alike."""
    bundle = export(name, tmp_path, backbone)
    backend, slots = opened(bundle, kv, "even")
    ids = np.random.default_rng(0).integers(0, bundle.manifest.model.vocab_size, LENGTH)
    found, cache = run(backend, slots, ids, STEPS)
    expected, alone = run(backend, slots, ids, [1] * len(found))
    step = joined_parts(bundle, prefill=False, kv=kv)[STEP]
    if all(node.op != "FusedMatMul" for node in step.nodes):
        assert np.array_equal(found, expected)
        assert all(map(np.array_equal, cache, alone))
    assert np.sqrt(np.mean((found - expected) ** 2)) < ROUNDING * expected.std()
    plain, _ = run(*opened(bundle, kv, "any"), ids, [1] * len(found))
    assert np.sqrt(np.mean((plain - expected) ** 2)) < ROUNDING * expected.std()


@pytest.mark.parametrize("name", slow_but(["window"], ["stem", "window", GEMMA_4]))
def test_a_sequence_has_its_bits_beside_any_number_of_others(name: str, tmp_path: Path) -> None:
    bundle = export(name, tmp_path, "int4")
    backend, slots = opened(bundle, "fp32", "even")
    context = backend.open_context(LENGTH)
    ids = np.random.default_rng(0).integers(0, bundle.manifest.model.vocab_size, LENGTH)
    backend.begin([context], ids[None, :16], [0])
    backend.finish(slots[:16], 1)
    batch, contexts, lines = backend.open_places(5, LENGTH), list[OrtContext](), list[F32]()

    def step(stepped: list[OrtContext]) -> list[F32]:
        backend.begin(stepped, ids[None, 16:17].repeat(len(stepped), 0), [16] * len(stepped))
        return [line.copy() for line in backend.finish(slots[16:17].repeat(len(stepped), 0), 1)]

    for _ in range(5):
        contexts.append(backend.open_context(LENGTH))
        contexts[-1].restore(context.kept(16), 16)
        batch.join(contexts[-1], 16)
        lines += step(contexts)
    batch.leave(0, 16)
    contexts = [contexts[-1], *contexts[1:-1]]
    step(contexts[1:2])  # one alone, as after an error of the step of all
    lines += step(contexts)
    (alone,) = step([context])
    assert len(lines) == 19
    assert all(np.array_equal(line, alone) for line in lines)
