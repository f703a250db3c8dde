"""The graphs of a prepared backbone compute the bits of the separate ones, in every kind of step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from every_kind import GEMMA_3N, GEMMA_4, checkpoint_of

import stem_edge
from stem_edge.bundle.opening import Bundle
from stem_edge.graph.kv import KvType
from stem_edge.numerics.distributions import divergence
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.onnxruntime.backend import OrtBackend
from stem_edge.runtime.backends.onnxruntime.placeholders import placeholder_rows
from stem_edge.runtime.backends.onnxruntime.providers.graphs import separate, sources
from stem_edge.runtime.backends.onnxruntime.providers.joined import joined_parts
from stem_edge.runtime.rows.slots import ArraySlots

FAST = {"stem", "window", "all at once", GEMMA_3N}
NAMES = ["stem", "dense", "hash-moe", "window", "biases", "all at once", GEMMA_4, GEMMA_3N]
CASES = [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in NAMES]
SLOTS = 5
# Tokens of each step, and of how many logits are wanted.
STEPS = [(4, 4), (1, 1), (6, 0), (6, 1), (1, 1), (5, 2), (1, 0), (1, 1)]


def export(name: str, folder: Path, backbone: str) -> Bundle:
    checkpoint = checkpoint_of(name, folder / "checkpoint")
    options = {"type": backbone, "prefill_graph": backbone != "fp32"}
    return stem_edge.export_bundle(checkpoint, folder / "bundle", **options)  # type: ignore[arg-type]


def run(bundle: Bundle, *, joined: bool, prefill: bool = False, kv: KvType = "fp32") -> list[F32]:
    """Return the logits of all steps, the first two of which are a prompt, and then of a batch."""
    config, layout = bundle.manifest.model, bundle.manifest.tables
    slots = ArraySlots(layout, min(SLOTS, layout.records)) if layout is not None else None
    rows = placeholder_rows(slots, 64)
    parts = (joined_parts if joined else separate)(bundle, prefill=prefill, kv=kv)
    backend = OrtBackend(config, sources(bundle, parts), slots, 1, kv)
    context, found, position = backend.open_context(64), list[F32](), 0
    for number, (count, wanted) in enumerate(STEPS):
        ids = np.arange(position, position + count)
        backend.begin([context], ids[None], [position], prefill=prefill and number < 2)
        found.append(backend.finish(rows[ids], wanted).copy())
        position += count
    places, other = backend.open_places(2, 64), backend.open_context(64)
    other.restore(context.kept(position - 1), position - 1)
    places.join(context, position)
    places.join(other, position - 1)
    backend.begin([context, other], np.array([[7], [8]]), [position, position - 1])
    return [*found, backend.finish(rows[:2], 1).copy()]


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits(name: str, tmp_path: Path) -> None:
    bundle = export(name, tmp_path, "fp32" if name == GEMMA_3N else "int4")
    for prefill in {False, bundle.manifest.has_prefill}:
        expected = run(bundle, joined=False, prefill=prefill)
        found = run(bundle, joined=True, prefill=prefill)
        assert [len(logits) for logits in found] == [*(wanted for _, wanted in STEPS), 2]
        assert all(map(np.array_equal, found, expected))


def test_the_same_bits_with_borrowed_keys_of_another_type(tmp_path: Path) -> None:
    bundle = export(GEMMA_3N, tmp_path, "fp32")
    expected, found = (run(bundle, joined=joined, kv="int8") for joined in (False, True))
    assert all(map(np.array_equal, found, expected))


@pytest.mark.parametrize("name", [one for one in CASES if "Gemma" not in str(one.values)])
def test_prompts_over_int8_keys(name: str, tmp_path: Path) -> None:
    bundle = export(name, tmp_path, "int4")
    exact, found = (run(bundle, joined=True, prefill=True, kv=kv) for kv in ("fp32", "int8"))
    for expected, logits in zip(exact, found, strict=True):
        assert not len(logits) or divergence(expected, logits).max() < 0.02


def test_head_is_there_for_prompts_alone(tmp_path: Path) -> None:
    bundle = export("stem", tmp_path, "int4")
    assert [*joined_parts(bundle, prefill=False)] == ["step", "embed"]
    assert [*joined_parts(bundle, prefill=True)] == ["step", "embed", "head", "prefill"]
