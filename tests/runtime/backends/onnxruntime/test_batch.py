"""What only onnxruntime's batches have: memory that runs out, and is given back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import stem_edge
from stem_edge.errors import OutOfMemoryError
from stem_edge.graph.kv import KvType
from stem_edge.numerics.quantize import F32
from stem_edge.runtime import Model
from stem_edge.runtime.backends.interface import BackendBatch
from stem_edge.runtime.backends.onnxruntime import loaded
from stem_edge.runtime.backends.onnxruntime.backend import OrtBackend
from stem_edge.runtime.backends.onnxruntime.batch import OrtBatch
from stem_edge.system.memory import own_memory

LENGTH, PROMPT = 64, [1, 2, 3, 4, 5]


@pytest.fixture
def model(tiny_bundle: Path) -> Iterator[Model]:
    with stem_edge.load(tiny_bundle) as loaded:
        yield loaded


def join(model: Model, batch: BackendBatch, prompt: list[int] = PROMPT) -> None:
    context = model.engine.open_context(LENGTH)
    model.engine.step(context, np.array(prompt))
    batch.join(context.backend, len(prompt))


def step(
    model: Model, batch: BackendBatch, first: int, count: int, positions: list[int] | None = None
) -> F32:
    ids = np.arange(first, first + count)
    batch.begin(first, ids, np.array(positions or [len(PROMPT)] * count))
    return batch.finish(model.engine.rows.slots(ids)).copy()


def test_a_step_without_memory_changes_nothing(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    backend = model.engine.backend
    assert isinstance(backend, OrtBackend)
    batch = backend.open_batch(3, LENGTH)
    for _ in range(3):
        join(model, batch)
    expected = step(model, batch, 0, 3)
    alone = step(model, batch, 1, 1)
    monkeypatch.setattr(loaded, "own_pages", full)
    with pytest.raises(OutOfMemoryError, match="for the hidden states of 2 tokens"):
        step(model, batch, 0, 2)
    with pytest.raises(OutOfMemoryError, match="for the KV cache of 64 tokens"):
        backend.open_batch(3, LENGTH)
    assert np.array_equal(step(model, batch, 1, 1), alone)
    monkeypatch.undo()
    assert np.array_equal(step(model, batch, 0, 3), expected)


@pytest.mark.parametrize("kv", ["fp32", "fp16"])
def test_what_an_earlier_sequence_left_is_never_read(tiny_bundle: Path, kv: KvType) -> None:
    with stem_edge.load(tiny_bundle, kv=kv) as model:
        found = []
        for left in (0, np.nan):
            batch = model.engine.backend.open_batch(3, LENGTH)
            assert isinstance(batch, OrtBatch)
            for array in batch._kv.arrays:
                array[...] = left
            for prompt in (PROMPT, PROMPT[:1], PROMPT * 5):
                join(model, batch, prompt)
            found.append(step(model, batch, 0, 3, [5, 1, 25]))
    assert np.array_equal(found[0], found[1])


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux only")
def test_a_sequence_that_leaves_gives_its_memory_back(model: Model) -> None:
    backend = model.engine.backend
    assert isinstance(backend, OrtBackend)
    batch = OrtBatch(backend.loaded, 3, 1 << 14)
    for _ in range(3):
        join(model, batch)
    for array in batch._kv.arrays:
        array[1:, :, len(PROMPT) :] = 7
    held, nbytes = own_memory(), sum(array[0].nbytes for array in batch._kv.arrays)
    expected = step(model, batch, 0, 1)
    batch.leave(0)
    assert held - own_memory() > nbytes * 0.9
    assert np.array_equal(step(model, batch, 0, 1), expected)
    batch.leave(1)
    assert held - own_memory() > nbytes * 1.9
