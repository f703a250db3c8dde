"""The standard graphs on a device, which the CPU stands in for: the logits of the CPU's own graphs."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import numpy as np
import pytest
from architectures import KINDS, QUANTIZED, SIZES, VARIANTS, quantized, write
from device_parts import BUNDLE, IDS, all_logits, on_device, on_host, step

import stem_edge
from stem_edge.bundle.footprint import footprint_of
from stem_edge.config import ModelConfig
from stem_edge.errors import OutOfMemoryError
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.memory_plan import Room, plan_memory
from stem_edge.runtime.backends.onnxruntime.device.backend import DeviceContext
from stem_edge.runtime.backends.onnxruntime.device.needs import device_needs

LENGTH = 64
CHUNKED = [16, 16, 5, 1, 1, 4, 1]  # steps of 44 tokens
TOLERANCE = 1e-4  # logits have a standard deviation of 2.6


@pytest.fixture(scope="module")
def expected() -> F32:
    """Logits of IDS on the CPU."""
    with on_host() as (backend, rows):
        return all_logits(backend, rows, [len(IDS)])


@pytest.mark.parametrize("sizes", [[1] * 20, CHUNKED], ids=["tokens", "chunks"])
def test_logits_are_those_of_the_cpu(sizes: list[int], expected: F32) -> None:
    with on_device() as (backend, _, rows):
        found = all_logits(backend, rows, sizes)
    assert found.dtype == np.float32
    assert np.abs(found - expected[: sum(sizes)]).max() < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_logits_of_every_architecture(name: str, tmp_path: Path) -> None:
    path, ids, wanted = write(tmp_path / "checkpoint", ModelConfig(**(SIZES | VARIANTS[name])))
    bundle = stem_edge.export_bundle(path, tmp_path / "out", type="fp32", rows="fp32")
    with on_device(bundle) as (backend, _, rows):
        for sizes in ([len(ids)], [1] * len(ids), [7, *[1] * (len(ids) - 7)]):
            found = all_logits(backend, rows, sizes, np.array(ids))
            assert np.abs(found - wanted).max() < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTIZED)
def test_logits_of_quantized_backbones(name: str, tmp_path: Path) -> None:
    """Compared with the CPU's graphs, without their rounding of activations."""
    bundle, ids = quantized(tmp_path, name)
    sizes = [7, *[1] * (len(ids) - 7)]
    with on_host(bundle) as (host, rows):
        wanted = all_logits(host, rows, [len(ids)], np.array(ids))
    with on_device(bundle) as (device, _, rows):
        found = all_logits(device, rows, sizes, np.array(ids))
    assert np.abs(found - wanted).max() < TOLERANCE


def test_with_few_slots_logits_are_the_same(expected: F32) -> None:
    sizes = [8, 8] + [1] * 28
    with on_device(slots=16, overlap=True) as (backend, _, rows):
        context, position = backend.open_context(LENGTH), 0
        for size, following in zip(sizes, [*sizes[1:], 1], strict=True):
            ids = IDS[position : position + size].astype(np.int64)
            found = step(backend, context, rows, ids, position, size)
            assert np.abs(found - expected[position : position + size]).max() < TOLERANCE
            position += size
            rows.expect(IDS[position : position + following].astype(np.int64))
        assert rows.counters().misses > 30


def test_a_context_holds_what_the_plan_says() -> None:
    with on_device() as (backend, _, rows):
        before = backend.memory.nbytes
        context = backend.open_context(LENGTH)
        step(backend, context, rows, IDS[:9], 0, 1)
        footprint = footprint_of(BUNDLE.manifest)
        needs = device_needs(footprint, LENGTH, "cpu", limit=None, shared=True)
        room = Room(0, 1 << 40, slots=9)  # for chunks of as many tokens
        plan = plan_memory("it", [LENGTH], lambda _: needs, room).device
        assert plan is not None and plan.kv_cache == context.nbytes
        assert plan.kv_cache < backend.memory.nbytes - before <= plan.kv_cache + plan.activations


def test_dropped_contexts_leave_nothing() -> None:
    with on_device() as (backend, _, rows):
        before = backend.memory.nbytes
        for _ in range(2):
            context = backend.open_context(LENGTH)
            step(backend, context, rows, IDS[:5], 0)
            held = backend.memory.nbytes
            dropping = threading.Thread(target=lambda kept=[context]: kept.clear())
            del context
            dropping.start()
            dropping.join()
            # Freeing device memory must not happen in another thread, in the midst of a step.
            assert backend.memory.nbytes == held
            backend.memory.collect()
            assert backend.memory.nbytes == before
        memory = backend.memory
    del backend, rows, _
    gc.collect()
    assert memory.nbytes == 0


def test_beyond_the_limit_a_context_is_refused_and_others_go_on(expected: F32) -> None:
    with on_device(limit=800_000) as (backend, _, rows):
        context = backend.open_context(LENGTH)
        with pytest.raises(OutOfMemoryError, match="for the KV cache of 4,000 tokens"):
            backend.open_context(4000)
        found = all_logits(backend, rows, [4, 1], context=context)
        assert np.abs(found - expected[:5]).max() < TOLERANCE
        with pytest.raises(OutOfMemoryError, match="for hidden states of 500 tokens"):
            backend.begin([context], np.zeros((1, 500), np.int64), [5])
        found = step(backend, context, rows, IDS[5:9], 5, 4)
        assert np.abs(found - expected[5:9]).max() < TOLERANCE


def test_logits_that_are_not_numbers_leave_nothing(expected: F32) -> None:
    with on_device() as (backend, _, rows):
        context = backend.open_context(LENGTH)
        all_logits(backend, rows, [3], context=context)
        assert isinstance(context, DeviceContext)
        keys = context._kv["keys.0"]
        lines = keys.read()
        lines[4] = np.nan  # of the second of the tokens that come
        keys.write(lines)
        assert np.isnan(step(backend, context, rows, IDS[3:4], 3)).any()
        # A shorter step must not see what a longer one has left behind.
        found = [step(backend, context, rows, IDS[at : at + 1], at) for at in (3, 4)]
        assert np.abs(np.concatenate(found) - expected[3:5]).max() < TOLERANCE
