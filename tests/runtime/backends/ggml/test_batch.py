"""Batches on ggml, compared with PlainBatch, which steps each sequence alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architectures import HASHED, SIZES, VARIANTS, write
from hf_folders import write_gemma
from installed import needs_ggml

import stem_edge
from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError
from stem_edge.graph.kv import KvType
from stem_edge.numerics.quantize import F32
from stem_edge.runtime import Model
from stem_edge.runtime.backends.ggml.backend import GgmlContext
from stem_edge.runtime.backends.ggml.graph import GgmlGraph
from stem_edge.runtime.backends.ggml.kv_cache import KvCache
from stem_edge.runtime.backends.interface import BackendBatch, NotFiniteError
from stem_edge.runtime.backends.plain_batch import PlainBatch

pytestmark = needs_ggml
LENGTH = 420
LENGTHS = (1, 5, 63, 64, 400)  # the last one is longer than what layers with a window keep
# Products of float32 weights with one token and with several round differently: measured up to 4e-6,
# and 2e-3 where that turns a key to the next number of float16. Logits go up to 4.5.
TOLERANCE: dict[KvType, float] = {"fp32": 1e-4, "fp16": 0.02, "int8": 0.1, "int4": 0.1}
# Rounding of hidden states to 8 bits differs: measured 0.12 of logits up to 4.3 with repacked Q4_K.
TOLERANCE_OF_CODES = 0.3
GEMMA = "borrowed keys and values"
MODELS: dict[str, dict[str, Any]] = {
    "all at once": VARIANTS["all at once"],
    "experts": HASHED,
    "wide heads": {"head_dim": 32, "n_heads": 2, "n_kv_heads": 1, "sliding_window": 20},
    "lines that are not aligned": {"head_dim": 10, "n_heads": 3, "n_kv_heads": 1},
    "wide layers": {"dim": 256, "d_ff": 256, "head_dim": 64, "n_heads": 4},
}


REST: list[tuple[str, KvType]] = [
    (GEMMA, "fp16"),
    ("wide heads", "fp32"),
    ("wide heads", "fp16"),
    ("wide heads", "int4"),
    ("experts", "fp32"),
    ("lines that are not aligned", "fp32"),
]


class Both:
    """The batch under test, and a plain one of the same sequences."""

    def __init__(self, model: Model, *lengths: int) -> None:
        self._engine, self._random = model.engine, np.random.default_rng(0)
        self.tested = model.engine.backend.open_batch(len(lengths), LENGTH)
        self._plain = PlainBatch()
        self.positions, self._tokens = list[int](), list[int]()
        for length in lengths:
            self.join(length)

    def join(self, length: int) -> None:
        """Add a sequence after a prompt of random tokens."""
        prompt = self._random.integers(0, 90, length).tolist()
        for batch in (self.tested, self._plain):
            context = self._engine.open_context(LENGTH)
            (logits,) = self._engine.process(context, prompt)
            batch.join(context.backend, context.position)
        self.positions.append(length)
        self._tokens.append(int(logits.argmax()))

    def leave(self, place: int) -> None:
        for batch in (self.tested, self._plain):
            batch.leave(place)
        for each in (self.positions, self._tokens):
            last = each.pop()
            if place < len(each):
                each[place] = last

    def begin(self, batch: BackendBatch, first: int, count: int) -> None:
        places = slice(first, first + count)
        batch.begin(first, np.array(self._tokens[places]), np.array(self.positions[places]))

    def finish(self, batch: BackendBatch, first: int, count: int) -> F32:
        ids = np.array(self._tokens[first : first + count])
        return batch.finish(self._engine.rows.fetch(ids, count)).copy()

    def run(self, batch: BackendBatch, first: int, count: int) -> F32:
        """Return logits [count, V] of one step."""
        self.begin(batch, first, count)
        return self.finish(batch, first, count)

    def step(self, first: int, count: int, tolerance: float = TOLERANCE["fp32"]) -> None:
        """Compare the logits of a step, and go on with the most probable tokens."""
        found, expected = (self.run(one, first, count) for one in (self.tested, self._plain))
        assert np.abs(found - expected).max() < tolerance
        for place, token in enumerate(expected.argmax(1).tolist(), first):
            self._tokens[place] = token
            self.positions[place] += 1


def bundle(folder: Path, name: str, backbone: str = "f32") -> Path:
    """Export one of MODELS."""
    if name == GEMMA:
        write_gemma(folder / "checkpoint", 1)
    else:
        config = ModelConfig(**(SIZES | {"max_context": 1024} | MODELS[name]))
        write(folder / "checkpoint", config)
    options: dict[str, Any] = {"engine": "gguf", "backbone": backbone, "tables": "fp32"}
    stem_edge.export_bundle(folder / "checkpoint", folder / "bundle", **options)
    return folder / "bundle"


@pytest.fixture
def model(tiny_gguf: Path) -> Iterator[Model]:
    with stem_edge.load(tiny_gguf, context_length=LENGTH // 4) as loaded:
        yield loaded


@pytest.mark.parametrize(
    ("name", "kv"),
    [
        (GEMMA, "fp32"),
        pytest.param("all at once", "fp32", marks=pytest.mark.slow),
        ("wide heads", "int8"),
        *(pytest.param(name, kv, marks=pytest.mark.slow) for name, kv in REST),
    ],
)
def test_logits_of_ragged_sequences(name: str, kv: KvType, tmp_path: Path) -> None:
    with stem_edge.load(bundle(tmp_path, name), kv=kv, threads=1, context_length=LENGTH) as model:
        both = Both(model, *LENGTHS)
        for _ in range(4):
            both.step(0, len(LENGTHS), TOLERANCE[kv])
        both.step(1, 3, TOLERANCE[kv])


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["q4_k_m", "q6_k", "q4_0"])
@pytest.mark.parametrize("repack", [False, True])
def test_kernels_for_any_number_of_tokens(weights: str, repack: bool, tmp_path: Path) -> None:
    path = bundle(tmp_path, "wide layers", weights)
    with stem_edge.load(path, repack=repack, threads=1, context_length=LENGTH) as model:
        both = Both(model, *range(1, 41))
        for count in (1, 2, 3, 4, 7, 8, 9, 11, 12, 31, 32, 40):
            both.step(0, count, TOLERANCE_OF_CODES)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_sequences_join_and_leave(model: Model, order: tuple[int, ...]) -> None:
    both = Both(model, 30, 2, 17)
    for ends in order:
        both.step(0, len(both.positions))
        both.leave(min(ends, len(both.positions) - 1))
        both.join(5 + ends)
    for ends in order:
        both.step(0, len(both.positions))
        both.leave(min(ends, len(both.positions) - 1))
    assert not both.positions


def test_any_part_of_a_batch(model: Model) -> None:
    both = Both(model, 30, 2, 17, 62)
    for first in range(4):
        for count in range(1, 5 - first):
            both.step(first, count)


@pytest.mark.parametrize("parts", [[(0, 3)], [(0, 1), (1, 1), (2, 1)], [(1, 2), (0, 1)]])
@pytest.mark.parametrize("phase", ["rows", "early", "late"])
def test_a_failed_step_can_be_tried_again(
    model: Model, monkeypatch: pytest.MonkeyPatch, phase: str, parts: list[tuple[int, int]]
) -> None:
    both = Both(model, 30, 2, 63)
    both.step(0, 3)
    original, left = GgmlGraph.run, [1] if phase == "late" else []  # graphs that still run

    def run(self: GgmlGraph) -> None:
        if not left:
            raise BackendError("no more")
        left.pop()
        original(self)

    if phase == "rows":
        both.begin(both.tested, 0, 3)
    else:
        monkeypatch.setattr(GgmlGraph, "run", run)
        with pytest.raises(BackendError, match="no more"):
            both.run(both.tested, 0, 3)
        monkeypatch.undo()
    for first, count in parts:
        both.step(first, count)


def test_a_sequence_that_is_not_finite_is_told_by_its_position(model: Model) -> None:
    both = Both(model, 30, 2, 17)
    damaged = model.engine.open_context(LENGTH)
    model.engine.step(damaged, np.arange(7))
    assert isinstance(damaged.backend, GgmlContext)
    for array in damaged.backend.kv.kept(7):
        array[...] = 0xFF
    both.tested.join(damaged.backend, 7)
    with pytest.raises(NotFiniteError, match="position 7"):
        both.tested.begin(0, np.ones(4, np.int64), np.array([*both.positions, 7]))
        both.tested.finish(model.engine.rows.fetch(np.ones(4, np.int64), 4))
    both.tested.leave(3)
    both.step(0, 3)


def test_a_context_that_has_left_is_as_before(model: Model) -> None:
    """It has the keys and values of the batch's steps, and the batch keeps nothing of it."""
    engine, ids = model.engine, np.arange(40)
    context, other = engine.open_context(60), engine.open_context(60)
    for one in (context, other):
        engine.step(one, ids[:30])
    batch = engine.backend.open_batch(1, 60)
    batch.join(context.backend, 30)
    for position in range(30, 35):
        batch.begin(0, ids[position : position + 1], np.array([position]))
        batch.finish(engine.rows.fetch(ids[position : position + 1]))
        engine.step(other, ids[position : position + 1])
    batch.leave(0)
    context.position = 35
    found = engine.step(context, ids[35:]).copy()
    assert np.array_equal(found, engine.step(other, ids[35:]))
    assert isinstance(context.backend, GgmlContext)
    freed: weakref.ref[KvCache] = weakref.ref(context.backend.kv)
    del context, one
    gc.collect()
    assert freed() is None


def test_contexts_of_other_backends_are_refused(model: Model) -> None:
    stranger: Any = object()
    with pytest.raises(BackendError, match="open it with this backend"):
        model.engine.backend.open_batch(1, 10).join(stranger, 0)
