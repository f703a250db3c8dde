"""Graphs that only save time are opened by the first step that uses them, and tried once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stem_edge
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import BackendError, OutOfMemoryError, StemEdgeError
from stem_edge.graph.names import EMBED, HEAD, PREFILL, STEP, apart_step
from stem_edge.graph.special.apart import apart
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.onnxruntime import loaded
from stem_edge.runtime.backends.onnxruntime.backend import OrtBackend
from stem_edge.runtime.backends.onnxruntime.loaded import NotOpened
from stem_edge.runtime.backends.onnxruntime.placeholders import placeholder_rows
from stem_edge.runtime.backends.onnxruntime.providers.graphs import (
    cpu_graphs,
    joined_graphs,
    joined_parts,
    sources,
)
from stem_edge.runtime.backends.onnxruntime.providers.session import open_session
from stem_edge.runtime.rows.slots import ArraySlots

BY_PROMPTS = {True: [HEAD, PREFILL], False: [PREFILL]}  # of joined graphs, and of others
ERRORS = pytest.mark.parametrize("error", [BackendError("damaged"), OutOfMemoryError("full")])


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    out = tmp_path_factory.mktemp("later") / "bundle"
    return stem_edge.export_bundle(tiny_checkpoint, out, prefill_graph=True)


def watch(monkeypatch: pytest.MonkeyPatch, errors: Mapping[str, StemEdgeError]) -> list[str]:
    """Record the names of graphs that are opened, which some fail to be."""
    names = list[str]()

    def watched(graph: Any, *rest: Any, **more: Any) -> Any:
        names.append(graph.name)
        if graph.name in errors:
            raise errors[graph.name]
        return open_session(graph, *rest, **more)

    monkeypatch.setattr(loaded, "open_session", watched)
    return names


def steps(bundle: Bundle, *, joined: bool) -> Callable[..., F32]:
    """Return a function that takes a step of so many tokens in a new context of one backend."""
    config, layout = bundle.manifest.model, bundle.manifest.tables
    assert layout is not None
    slots = ArraySlots(layout, 5)
    rows = placeholder_rows(slots, 64)
    graphs = (joined_graphs if joined else cpu_graphs)(bundle, prefill=True)
    step = joined_parts(bundle, prefill=False)[STEP]
    apart_graphs = sources(bundle, {apart_step(2): apart(step, 2)})
    backend = OrtBackend(config, graphs, slots, 1, apart=apart_graphs)

    def take(tokens: int, **how: bool) -> F32:
        context = backend.open_context(64)
        context.begin(np.arange(tokens), 0, **how)
        found = context.finish(rows[:tokens], 1).copy()
        context.rest()
        context.begin(np.arange(tokens), 0, **how)  # all that rest() has freed
        assert np.array_equal(context.finish(rows[:tokens], 1), found)
        return found

    return take


@pytest.mark.parametrize("joined", [True, False])
def test_by_the_first_step_that_uses_them(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, joined: bool
) -> None:
    tried = watch(monkeypatch, {})
    take = steps(bundle, joined=joined)
    first = [*tried]
    assert EMBED in first and not {PREFILL, apart_step(2)} & {*first}
    take(1)
    take(8)
    assert tried == first
    one, many = take(1, prefill=True), take(8, prefill=True)
    assert tried == [*first, *BY_PROMPTS[joined]]
    assert np.isfinite(one).all() and not np.array_equal(many, take(8))
    if joined:  # others are never there with graphs for such steps
        take(2, apart=True)
        take(2, apart=True)
        assert tried == [*first, *BY_PROMPTS[joined], apart_step(2)]


@ERRORS
@pytest.mark.parametrize("joined", [True, False])
def test_prompts_go_on_without_it(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, joined: bool, error: StemEdgeError
) -> None:
    failing = BY_PROMPTS[joined][-1]
    names = watch(monkeypatch, {failing: error})
    take = steps(bundle, joined=joined)
    with pytest.warns(NotOpened, match=f"^{error}; answers take longer") as told:
        found = [take(8, prefill=True), take(8, prefill=True), take(8)]
    assert len(told) == 1 and names.count(failing) == 1
    assert np.array_equal(found[0], found[2]) and np.array_equal(found[1], found[2])
