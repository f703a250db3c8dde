"""Batches of each engine, beside the same sequences that each step alone.

With weights in float32, both compute the same up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from architectures import CPU_ONLY, VARIANTS
from beside import MOST, Beside
from exact_models import GEMMA, GEMMA_3N, exact_gemma, exact_stem, published
from installed import bundle_for, needs_ggml
from tiers import slow_but

import stem_edge
from stem_edge.errors import BackendError
from stem_edge.graph.formats import EngineName
from stem_edge.graph.kv import QUANTIZED, KvType
from stem_edge.numerics.quantize import U8
from stem_edge.runtime import Model
from stem_edge.runtime.backends.ggml.graph import GgmlGraph
from stem_edge.runtime.backends.interface import NotFiniteError
from stem_edge.runtime.backends.onnxruntime.backend import OrtBackend
from stem_edge.runtime.backends.onnxruntime.providers.session import BoundSession
from stem_edge.runtime.rows.store import RowStore

WIDE, ODD = "wide heads", "lines that are not aligned"
MODELS = VARIANTS | {
    WIDE: {"head_dim": 32, "n_heads": 2, "n_kv_heads": 1, "sliding_window": 20},
    ODD: {"head_dim": 10, "n_heads": 3, "n_kv_heads": 1},
}
NAMES = ["stem", "dense", "low rank, gate", "hash-moe", "window", WIDE, ODD, "all at once"]
NAMES += ["means of rows", "mixture of rows", "Engram and windows"]
NAMES += [GEMMA, GEMMA_3N]
CASES = slow_but(["all at once", GEMMA_3N], NAMES)
LENGTH = 330


class Case(NamedTuple):
    path: Path
    ids: list[int]
    length: int  # longest text


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder, name = tmp_path_factory.mktemp("batch"), request.param
    if name == GEMMA_3N:
        ids = np.random.default_rng(0).integers(80, size=60).tolist()
        return Case(published(folder, name).path, ids, 64)
    if name == GEMMA:
        exact = exact_gemma(folder, LENGTH)
    else:
        exact = exact_stem(folder, {"max_context": 512} | MODELS[name], LENGTH)
    return Case(exact.path, exact.ids, LENGTH)


@pytest.fixture(params=["onnxruntime", pytest.param("ggml", marks=needs_ggml), "device"])
def model(case: Case, request: pytest.FixtureRequest) -> Iterator[Model]:
    """A model on an engine, or on onnxruntime with the CPU playing a device."""
    options: Any = {"engine": request.param}
    path = case.path
    if request.param == "device":
        options = {"device_memory": "4GB"}
        config = stem_edge.open_bundle(path).manifest.model
        if any(getattr(config, field) for field in CPU_ONLY):
            pytest.skip("this model has no graphs for devices")
    elif not (path := bundle_for(path, request.param)).exists():
        pytest.skip("this model runs on the other engine only")
    with stem_edge.load(path, **options) as loaded:
        yield loaded


def prompts(case: Case) -> list[list[int]]:
    """Return texts of very different lengths; steps after the third reach where windows drop."""
    lengths = [1, 40, 255, 300] if case.length == LENGTH else [1, 9, 20, 33]
    return [case.ids[-length:] for length in lengths]


@pytest.mark.parametrize("case", slow_but(["all at once", GEMMA, GEMMA_3N], NAMES), indirect=True)
def test_logits_are_those_of_each_alone(case: Case, model: Model) -> None:
    both = Beside(model, case.length)
    for number, ids in enumerate(prompts(case)):
        both.join(ids, roomy=number % 2 == 0)
        both.step()
    for _ in range(12):
        both.step()


ORDERS = [
    (0, 1, 0),
    *(
        pytest.param(o, marks=pytest.mark.slow)
        for o in product(range(3), range(2), range(1))
        if o != (0, 1, 0)
    ),
]


@pytest.mark.parametrize("order", ORDERS)
def test_sequences_leave_and_join_in_any_order(
    case: Case, model: Model, order: tuple[int, ...]
) -> None:
    texts = prompts(case)
    both = Beside(model, case.length)
    for ids in texts[1:]:
        both.join(ids)
    for number, place in enumerate(order):
        both.step()
        both.leave(place)
        if number == 1:
            both.join(texts[3])
            both.join(texts[0])
            both.step()
            both.leave(1)
    both.step()


def test_steps_of_some_sequences(case: Case, model: Model) -> None:
    both = Beside(model, case.length)
    for ids in prompts(case):
        both.join(ids)
    for first in range(4):
        for count in range(1, 5 - first):
            both.step(first, count)
    both.step()


def test_a_step_that_failed_can_be_tried_again(
    case: Case, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail before and after each run of a graph, when keys and values of others are written."""
    both = Beside(model, case.length)
    for ids in prompts(case)[1:]:
        both.join(ids)
    graph: Any = BoundSession if isinstance(model.engine.backend, OrtBackend) else GgmlGraph
    real, runs, failing = graph.run, list[object](), 0

    def run(bound: object) -> None:
        real(bound)
        runs.append(bound)
        if len(runs) == failing:
            raise BackendError("failed")

    monkeypatch.setattr(graph, "run", run)
    both.run(both.batch, 0, 3)
    last = len(runs)
    for first, count in ((0, 3), (0, 2), (1, 2), (2, 1)):
        both.begin(both.batch, 0, [5, 6, 7])  # as if reading rows had failed
        for number in range(1, 1 + last):
            failing = number
            runs.clear()
            with pytest.raises(BackendError, match="failed"):
                both.run(both.batch, 0, 3, tokens=[5, 6, 7])
        failing = 0
        both.step(first, count)
    both.leave(0)
    both.step()


@pytest.mark.parametrize("case", ["stem"], indirect=True)
def test_a_row_that_is_damaged_fails_its_own_sequence_only(
    case: Case, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, bad = RowStore.read, 77

    def read(store: RowStore, numbers: Any, whole: Any = None) -> U8:
        records = real(store, numbers, whole)
        records[numbers == bad] = 0xFF  # NaN
        return records

    monkeypatch.setattr(RowStore, "read", read)
    both = Beside(model, case.length)
    for ids in prompts(case)[:3]:
        both.join([token for token in ids if token != bad])
    fine = [5, 6, 7]
    for place in range(3):
        tokens = [bad if number == place else token for number, token in enumerate(fine)]
        with pytest.raises(NotFiniteError):
            both.run(both.batch, 0, 3, tokens)
        with pytest.raises(NotFiniteError):
            both.run(both.batch, place, 1, [bad])
        both.step(0, 3, fine)
    both.leave(0)
    both.step(0, 2, [8, 9])


@pytest.mark.parametrize("case", ["all at once", WIDE, GEMMA], indirect=True)
@pytest.mark.parametrize(
    "kv", ["int8", *(pytest.param(kv, marks=pytest.mark.slow) for kv in ("fp16", "int4"))]
)
def test_types_of_keys_and_values(case: Case, engine: EngineName, kv: KvType) -> None:
    heads = {layer.head_dim for layer in stem_edge.open_bundle(case.path).manifest.model.layers}
    if engine == "ggml" and kv in QUANTIZED and any(head % 32 for head in heads):
        pytest.skip("ggml needs heads of a multiple of 32 values")
    with stem_edge.load(bundle_for(case.path, engine), engine=engine, kv=kv) as model:
        both = Beside(model, case.length, MOST[kv])
        for ids in prompts(case):
            both.join(ids)
            both.step()
        for place in (0, 1, 0):
            both.leave(place)
            both.step()
