"""Catalogue K1 to K3, K4, K7, K10, K11: many threads with one row cache."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty_disk import Counter, slow, watch
from loading import load_fixed
from threads import run_script, together, tokens
from tiers import slow_but

from stem_edge.errors import InputError, OutOfMemoryError, RowReadError
from stem_edge.graph.formats import EngineName
from stem_edge.runtime.model import Model
from stem_edge.runtime.rows.table_rows import TableRows

PROMPTS = [[5, 6, 7, start, start + 1] for start in range(10, 250, 40)]
Load = Callable[..., Model]


@pytest.fixture
def load(engine: EngineName, tiny: Path) -> Iterator[Load]:
    """Load the tiny bundle of each engine in turn, and close it at the end."""
    opened: list[Model] = []

    def loaded(**options: Any) -> Model:
        given = {"threads": 1} | options
        opened.append(load_fixed(tiny, engine=engine, **given))
        return opened[-1]

    yield loaded
    while opened:  # and leave nothing in it: ggml keeps its file while anyone holds a context
        opened.pop().close()


@pytest.fixture
def model(tiny_bundle: Path) -> Iterator[Model]:
    """A model on onnxruntime whose row cache is too small for all rows."""
    with load_fixed(tiny_bundle, slots=16, threads=1) as loaded:
        yield loaded


def test_k1_64_threads_that_miss_the_same_row_read_it_once(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Counter()

    def count(name: str) -> None:
        reads(name)
        time.sleep(0.05)

    watch(monkeypatch, ["pread"], count)
    assert len(set(together([lambda: model.logits([77]).tobytes()] * 64))) == 1
    assert len(reads) == 1


def test_k2_no_step_reads_a_slot_that_is_being_written(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads evict each other's rows, and reads linger."""
    model = load(slots=8)
    alone = [tokens(model, prompt) for prompt in PROMPTS]
    slow(monkeypatch, ["pread"], 0.001)
    assert together([partial(tokens, model, prompt) for prompt in PROMPTS]) == alone


@pytest.mark.parametrize("error", [OSError(5, "broken"), MemoryError(), ValueError(), SystemExit()])
def test_k3_what_the_prefetch_thread_raises_is_repaired_by_reading_again(
    model: Model, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, main, failed = tokens(model, [5, 6, 7]), threading.current_thread(), [0]

    def fail(_: str) -> None:
        if threading.current_thread() is not main:
            failed[0] += 1
            raise error

    watch(monkeypatch, ["pread"], fail)
    tokens(model, list(range(100, 116)))  # to evict what was read
    assert tokens(model, [5, 6, 7]) == expected
    assert failed[0]


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (OSError(5, "broken"), RowReadError),
        (MemoryError(), OutOfMemoryError),
        (ValueError(), ValueError),
    ],
)
def test_k3_what_every_read_raises_comes_to_the_caller_and_harms_nothing(
    model: Model,
    error: Exception,
    reported: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, failing = tokens(model, [5, 6, 7]), [True]

    def fail(_: str) -> None:
        if failing[0]:
            raise error

    watch(monkeypatch, ["pread"], fail)
    with pytest.raises(reported):
        tokens(model, list(range(100, 116)))
    failing[0] = False
    assert tokens(model, [5, 6, 7]) == expected


def test_k4_a_generation_whose_model_was_closed_says_so(load: Load) -> None:
    """All ways into the model say so, too; closing twice is allowed."""
    model = load()
    stream, unbegun = model.generate([1, 2], max_new_tokens=9), model.generate([1, 2])
    chunks = model.logits_chunks([1, 2])
    next(stream)
    model.close()
    model.close()
    ways: list[Callable[[], object]] = [
        lambda: next(stream),
        lambda: next(unbegun),
        lambda: next(chunks),
        lambda: model.generate([1]),
        lambda: model.logits([1]),
        lambda: model.edited().__enter__(),
    ]
    for way in ways:
        with pytest.raises(InputError, match="this model is closed; load it again"):
            way()
    assert list(stream) == []


def test_k4_close_waits_for_the_step_of_another_thread(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(slots=16)
    reading, gate = threading.Event(), threading.Event()

    def wait(_: str) -> None:
        reading.set()
        gate.wait(60)

    watch(monkeypatch, ["pread"], wait)
    ended: list[BaseException] = []

    def generate() -> None:
        try:
            tokens(model, list(range(100, 116)), 100)
        except BaseException as error:
            ended.append(error)

    threads = [threading.Thread(target=generate) for _ in range(3)]
    threads += [threading.Thread(target=model.close) for _ in range(2)]
    for thread in threads[:3]:
        thread.start()
    assert reading.wait(60)
    for thread in threads[3:]:
        thread.start()
    threads[3].join(0.1)
    assert threads[3].is_alive()  # while a row is copied into a slot
    gate.set()
    for thread in threads:
        thread.join()
    assert [type(error) for error in ended] == [InputError] * 3
    with pytest.raises(InputError, match="closed"):
        model.logits([1])


def test_k4_a_signal_handler_may_close_in_the_midst_of_a_step(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler, as of SIGTERM, runs in the thread whose step is under way."""
    model, refused = load(overlap=False), list[str]()

    def handler(_: str) -> None:
        try:
            model.logits([1])
        except InputError as error:
            refused.append(str(error))
        model.close()

    chunks = model.logits_chunks([3, 4])
    watch(monkeypatch, ["pread"], handler)
    assert np.isfinite(next(chunks)).all()  # it ends as it should
    assert refused[0] == "a signal handler cannot use the model mid-step; return first"
    with pytest.raises(InputError, match="closed"):
        model.logits([1, 2])


EXIT = """
import sys, threading, time
import stem_edge
from stem_edge.files import disk
model = stem_edge.load(sys.argv[1], slots=16, threads=2)
stream = model.generate([5, 6, 7], max_new_tokens=50)
next(stream)
if "prefetch" in sys.argv:
    pread = disk.pread
    disk.pread = lambda *asked: (time.sleep(0.5), pread(*asked))[1]
    next(stream)  # which has the next row read
def work():
    try:
        while True:
            list(model.generate([1, 2, 3], max_new_tokens=100))
    except stem_edge.errors.InputError:
        pass
if "thread" in sys.argv:
    threading.Thread(target=work, daemon=True).start()
    time.sleep(0.2)
"""


@pytest.mark.parametrize("what", slow_but(["suspended"], ["suspended", "prefetch", "thread"]))
def test_k4_the_interpreter_ends_with_a_generation_under_way(
    what: str, engine: EngineName, tiny: Path
) -> None:
    done = run_script(EXIT, tiny, what)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_k7_a_model_that_is_dropped_leaves_nothing(engine: EngineName, tiny: Path) -> None:
    next(load_fixed(tiny, engine=engine, threads=1).generate([1, 2]))


def test_k7_abandoned_generations_with_edited_ids_leave_no_row(load: Load) -> None:
    rows = (model := load(slots=64)).engine.rows
    for number in range(20):
        stream = model.generate([5, 6, 7], stem_ids=[[1, number + 2], 6, 7], max_new_tokens=20)
        for _ in range(number % 4):  # some never begin
            next(stream, None)
        if number % 2:
            stream.close()
    del stream
    assert isinstance(rows, TableRows) and rows.made == 0


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("slots", slow_but([8], [8, 16, 40, 300]))
def test_k10_threads_caches_and_prefetching_change_no_token(
    load: Load, slots: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(resident=True, overlap=False) as whole:
        expected = [tokens(whole, prompt) for prompt in PROMPTS]
    model = load(slots=slots, overlap=overlap)
    slow(monkeypatch, ["pread"], 0.001)
    assert [tokens(model, prompt) for prompt in PROMPTS] == expected
    assert together([partial(tokens, model, prompt) for prompt in PROMPTS]) == expected


def test_k11_a_deadlock_shows_its_stacks_and_fails(pytestconfig: pytest.Config) -> None:
    assert float(pytestconfig.getini("faulthandler_timeout")) > 0
    assert pytestconfig.getini("faulthandler_exit_on_timeout")
