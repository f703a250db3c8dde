"""The device backend, run on the CPU: the same logits, with little data copied."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from device_parts import IDS, all_logits, on_device, on_host, step
from installed import DEMO

from stem_edge.bundle.footprint import footprint_of
from stem_edge.bundle.manifest import open_manifest
from stem_edge.errors import OutOfMemoryError
from stem_edge.graph.device.rows import Activations
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.interface import NotFiniteError
from stem_edge.runtime.backends.onnxruntime.context import OrtContext
from stem_edge.runtime.backends.onnxruntime.device.needs import device_needs
from stem_edge.runtime.backends.onnxruntime.providers.session import BoundSession
from stem_edge.runtime.backends.planner import Planner

LENGTH = 64
CHUNKED = [16, 16, 5, 1, 1, 4, 1]  # steps of 44 tokens
# Largest difference of a logit. They have a standard deviation of 2.6 and go up to 15, where a
# float32 ends at 1e-6. Measured: 1.05e-5 and 0.02.
EXACT, HALF = 2e-5, 0.05


@pytest.fixture(scope="module")
def expected() -> F32:
    """Logits of IDS on the CPU."""
    with on_host() as (backend, rows):
        return all_logits(backend.open_context(LENGTH), rows, [len(IDS)])


@pytest.mark.parametrize(("activations", "bound"), [("fp32", EXACT), ("fp16", HALF)])
@pytest.mark.parametrize("sizes", [[1] * 20, CHUNKED], ids=["tokens", "chunks"])
def test_logits_are_those_of_the_cpu(
    activations: Activations, bound: float, sizes: list[int], expected: F32
) -> None:
    with on_device(activations) as (backend, _, rows, _):
        found = all_logits(backend.open_context(LENGTH), rows, sizes)
    assert found.dtype == np.float32
    assert np.abs(found - expected[: sum(sizes)]).max() < bound


def test_the_graphs_of_the_cpu_round_a_little_more(expected: F32) -> None:
    """Other tests compare with exact graphs, so check that these are not too far off."""
    with on_host(exact=False) as (backend, rows):
        found = all_logits(backend.open_context(LENGTH), rows, CHUNKED)
    assert np.abs(found - expected[: sum(CHUNKED)]).max() < 0.5


def test_with_few_slots_each_missing_record_is_uploaded_once(expected: F32) -> None:
    sizes = [8, 8] + [1] * 28
    with on_device("fp32", slots=16, overlap=True) as (backend, slots, rows, _):
        context = backend.open_context(LENGTH)
        position, uploads = 0, 0
        for size, following in zip(sizes, [*sizes[1:], 1], strict=True):
            ids = IDS[position : position + size].astype(np.int64)
            missing = len(rows.cache.missing(ids))
            uploads += bool(missing)
            before = slots.uploaded_rows
            found = step(context, rows, ids, position, size)
            assert slots.uploaded_rows - before == missing
            assert slots.uploads == uploads  # one batch per step
            assert np.abs(found - expected[position : position + size]).max() < EXACT
            position += size
            rows.submit(IDS[position : position + following].astype(np.int64))
        assert slots.uploaded_rows == rows.cache.misses > 30
        assert slots.uploaded_nbytes == slots.uploaded_rows * (4 * slots.rows.words + 8)


def test_only_the_largest_logits_are_copied_back(expected: F32) -> None:
    with on_device("fp32") as (backend, _, rows, _):
        context = backend.open_context(LENGTH)
        all_logits(context, rows, [10])
        for position in range(10, 30):
            top = (1, 50, 7, 50, 0)[position % 5]
            found = step(context, rows, IDS[position : position + 1], position, 1, top)
            whole = expected[position]
            if not top:
                assert np.isfinite(found).all()
                continue
            largest = np.argsort(-whole)[:top]
            assert found.shape == (1, whole.size) and np.isfinite(found).sum() == top
            assert set(np.flatnonzero(np.isfinite(found[0]))) == set(largest)
            assert np.abs(found[0, largest] - whole[largest]).max() < EXACT


def test_the_largest_of_several_tokens_and_more_than_there_are(expected: F32) -> None:
    with on_device("fp32") as (backend, _, rows, _):
        context = backend.open_context(LENGTH)
        found = step(context, rows, IDS[:12], 0, 3, 5)
        assert found.shape[0] == 3 and (np.isfinite(found).sum(axis=1) == 5).all()
        assert np.array_equal(found.argmax(axis=1), expected[9:12].argmax(axis=1))
        assert np.isfinite(step(context, rows, IDS[12:13], 12, 1, 1_000_000)).all()
        assert step(context, rows, IDS[13:14], 13, 0).shape[0] == 0


def test_a_context_holds_what_the_plan_says() -> None:
    widths: dict[Activations, int] = {"fp32": 4, "fp16": 2}
    for activations, width in widths.items():
        with on_device(activations) as parts:
            before = parts.memory.nbytes
            context = parts.backend.open_context(LENGTH)
            assert isinstance(context, OrtContext)
            kv_cache = sum(array.nbytes for array in context.kv.arrays)
            assert kv_cache == width * 2 * 6 * 2 * LENGTH * 32
            step(context, parts.rows, IDS[:9], 0, 1, 40)
            assert context.nbytes == kv_cache * 9 // LENGTH  # in this process, where pages are read
            needs = device_needs(
                footprint_of(open_manifest(DEMO)), LENGTH, "cpu", activations,
                limit=None, asked=False, shared=True,
            )  # fmt: skip
            plan = Planner(needs, 0).plan(9, 40).device
            assert plan is not None and plan.kv_cache == kv_cache
            assert plan.kv_cache < parts.memory.nbytes - before <= plan.kv_cache + plan.activations
            del context


def test_dropped_contexts_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_device("fp16") as parts:
        parts.backend.loaded.ropes.upto(LENGTH)  # which stay, for all contexts
        before = parts.memory.nbytes
        for kind in ("device", "device", "host"):
            monkeypatch.setattr(parts.memory, "kind", kind)
            context = parts.backend.open_context(LENGTH)
            step(context, parts.rows, IDS[:5], 0, 1, 40)
            held = parts.memory.nbytes
            dropping = threading.Thread(target=lambda kept=[context]: kept.clear())
            del context
            dropping.start()
            dropping.join()
            # Freeing device memory must not happen in another thread, in the midst of a step.
            assert parts.memory.nbytes == (held if kind == "device" else before)
            parts.memory.collect()
            assert parts.memory.nbytes == before
    slots, memory = parts.slots, parts.memory
    del parts, slots
    gc.collect()
    assert memory.nbytes == 0


def test_contexts_take_turns(expected: F32) -> None:
    with on_device("fp32") as (backend, _, rows, _):
        contexts = [backend.open_context(LENGTH), backend.open_context(LENGTH)]
        for position in range(12):
            for context in contexts:
                found = step(context, rows, IDS[position : position + 1], position, 1, 5)
                assert found[0].argmax() == expected[position].argmax()
        dropped, kept = contexts
        del contexts, dropped
        found = step(kept, rows, IDS[12:30], 12, 18)
        assert np.abs(found - expected[12:30]).max() < EXACT


def test_beyond_the_limit_a_context_is_refused_and_others_go_on(expected: F32) -> None:
    with on_device("fp32", limit=800_000) as (backend, _, rows, memory):
        context = backend.open_context(LENGTH)
        held = memory.nbytes
        with pytest.raises(OutOfMemoryError, match="for the KV cache of 4,000 tokens"):
            backend.open_context(4000)
        found = all_logits(context, rows, [4, 1])
        assert np.abs(found - expected[:5]).max() < EXACT
        memory.collect()
        assert memory.nbytes <= held + 8 * 512 * 3
        with pytest.raises(OutOfMemoryError, match="for the hidden states of 500 tokens"):
            context.begin(np.zeros(500, np.int64), 5)
        found = step(context, rows, IDS[5:9], 5, 4)
        assert np.abs(found - expected[5:9]).max() < EXACT


@pytest.mark.parametrize("graph", ["embed", "early", "late", "head", "top"])
def test_a_step_that_failed_can_be_tried_again(
    graph: str, expected: F32, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_device("fp32") as (backend, _, rows, _):
        context = backend.open_context(LENGTH)
        all_logits(context, rows, [6])
        assert isinstance(context, OrtContext)
        failing, real = context._graphs.graphs[graph], BoundSession.run

        def run(bound: BoundSession) -> None:
            if bound is failing:
                raise RuntimeError("CUDA failure 2: out of memory\n at a.cc")
            real(bound)

        monkeypatch.setattr(BoundSession, "run", run)
        where = "head" if graph == "top" else graph
        with pytest.raises(OutOfMemoryError, match=rf"\({where}\) at position 6") as caught:
            step(context, rows, IDS[6:8], 6, 1, 5)
        assert "\n" not in str(caught.value)
        monkeypatch.setattr(BoundSession, "run", real)
        found = step(context, rows, IDS[6:8], 6, 1, 5)
        assert found[0].argmax() == expected[7].argmax()


def test_logits_that_are_not_numbers_are_refused() -> None:
    with on_device("fp32") as (backend, _, rows, _):
        context = backend.open_context(LENGTH)
        all_logits(context, rows, [3])
        assert isinstance(context, OrtContext)
        keys = context.kv.arrays[0]
        keys.write(np.full(keys.shape, np.nan, np.float32))
        for top in (0, 5):
            with pytest.raises(NotFiniteError, match="at position 3"):
                step(context, rows, IDS[3:4], 3, 1, top)
