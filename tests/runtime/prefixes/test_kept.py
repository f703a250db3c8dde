"""Contexts kept between calls: which one a call gets, and which ones stay."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from installed import DEMO

import stem_edge
from stem_edge.errors import OutOfMemoryError
from stem_edge.graph.formats import EngineName
from stem_edge.runtime import Model
from stem_edge.runtime.engine import Context, starts_of
from stem_edge.runtime.prefixes.kept import MOST_KEPT, Prefixes

LENGTH, TOKEN_NBYTES = 1000, 10
A, B, C = ([start + place for place in range(400)] for start in (0, 1000, 2000))


class FakeContext:
    """A KV cache of ids, in which each token takes 10 bytes."""

    earliest = settled = 0

    def __init__(self, length: int) -> None:
        self.length, self.ids = length, np.full(length, -1)
        self.filled = 0

    @property
    def nbytes(self) -> int:
        return self.nbytes_of(self.filled)

    def nbytes_of(self, tokens: int) -> int:
        return TOKEN_NBYTES * tokens

    def resumes(self, tokens: int) -> str:
        return "pairs"

    def rest(self) -> None:
        """Free nothing."""

    def kept(self, tokens: int) -> list[Any]:
        return [self.ids[:tokens]]

    def restore(self, arrays: Sequence[Any], tokens: int) -> None:
        self.ids[:tokens], self.filled = arrays[0], tokens


class FakeEngine:
    """Opens fake contexts, as many as there is memory for."""

    def __init__(self) -> None:
        self.opened, self.most = 0, 100

    def open_context(self, length: int) -> Context:
        if self.opened >= self.most:
            self.opened = 0
            raise OutOfMemoryError("no memory")
        self.opened += 1
        return Context(FakeContext(length))  # type: ignore[arg-type]

    def starts(self, tokens: int) -> list[int]:
        return starts_of(tokens, 128)


class Calls:
    """Calls over a fake engine; each computes its prompt, and may decode."""

    def __init__(self, limit: int | None) -> None:
        self.engine = FakeEngine()
        self.prefixes = Prefixes(self.engine, LENGTH, limit)  # type: ignore[arg-type]

    def call(self, ids: list[int], answer: int = 0, error: BaseException | None = None) -> int:
        """Compute a prompt; return how many of its tokens were there."""
        with self.prefixes.lent(ids, {}, len(ids) + answer) as context:
            cached = context.position
            backend: Any = context.backend
            assert backend.ids[:cached].tolist() == ids[:cached]
            backend.ids[cached : len(ids)] = ids[cached:]
            backend.ids[len(ids) : len(ids) + answer] = -2
            context.position = backend.filled = len(ids) + answer
            if error is not None:
                raise error
        return cached


def test_a_conversation_goes_on() -> None:
    calls = Calls(10_000)
    found = [calls.call(A[:count], answer=20) for count in (100, 131, 200, 200, 150)]
    assert found == [0, 100, 130, 198, 148]
    assert calls.engine.opened == 1


def test_conversations_take_turns() -> None:
    calls = Calls(10_000)
    found = [calls.call(ids[:count]) for count in (200, 300, 380) for ids in (A, B)]
    assert found == [0, 0, 200, 200, 300, 300]


def test_only_some_are_kept() -> None:
    calls = Calls(1 << 40)
    for number in range(30):
        calls.call([number, *A])
    assert calls.call([0, *A]) == 0 and calls.call([29, *A]) > 300
    assert len(calls.prefixes._kept) <= MOST_KEPT


def test_a_common_beginning_is_copied_where_there_is_room() -> None:
    for limit, later in ((20_000, 300), (5_000, 100)):
        calls = Calls(limit)
        assert [calls.call(A[:300]), calls.call(A[:100] + B[:200])] == [0, 100]
        assert calls.call(A) == later


def test_the_oldest_gives_way() -> None:
    calls = Calls(7_000)  # room for two of 200 tokens, which count as 256
    assert [calls.call(ids[:200]) for ids in (A, B, A, C)] == [0, 0, 198, 0]
    assert [calls.call(ids[:200]) for ids in (A, B)] == [198, 0]


def test_kept_contexts_give_way_to_one_that_grows() -> None:
    calls = Calls(6_000)
    calls.call(A[:200])
    with calls.prefixes.lent(B[:100], {}, 500) as context:
        backend: Any = context.backend
        for position in range(100, 500):
            context.position = backend.filled = position
            calls.prefixes.make_room(context)
            kept = sum(prefix.nbytes for prefix in calls.prefixes._kept)
            assert kept + backend.nbytes <= 6_000
            assert bool(kept) == (position < 256)


def test_a_context_is_not_lent_twice() -> None:
    calls = Calls(10_000)
    calls.call(A)
    with calls.prefixes.lent(A, {}, 400) as first, calls.prefixes.lent(A, {}, 400) as second:
        assert first.backend is not second.backend
        assert [first.position, second.position] == [398, 0]


@pytest.mark.parametrize(
    ("error", "kept"), [(KeyboardInterrupt(), 398), (ValueError(), 0), (GeneratorExit(), 398)]
)
def test_what_is_kept_after_an_error(error: BaseException, kept: int) -> None:
    calls = Calls(10_000)
    with pytest.raises(type(error)):
        calls.call(A, error=error)
    assert calls.call(A) == kept


def test_without_memory_kept_contexts_are_dropped() -> None:
    calls = Calls(10_000)
    calls.call(A[:100])
    calls.engine.most = 1
    assert calls.call(B[:100]) == 0
    assert calls.call(A[:100]) == 0


def test_nothing_is_kept_without_a_limit_and_after_forgetting() -> None:
    calls = Calls(None)
    assert [calls.call(A), calls.call(A)] == [0, 0]
    calls = Calls(10_000)
    calls.call(A)
    calls.prefixes.forget()
    assert calls.call(A) == 0


@pytest.fixture
def model() -> Iterator[Model]:
    with stem_edge.load(DEMO) as loaded:
        yield loaded


TEXT = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is"


def tokens(model: Model, prompt: str = TEXT, count: int = 12, **options: Any) -> list[int]:
    chunks = model.generate(prompt, max_new_tokens=count, **options)
    return [token for chunk in chunks for token in chunk.token_ids]


def test_stats_and_tokens(model: Model) -> None:
    first = tokens(model)
    assert model.stats.cached_tokens == 0 and "kept" not in model.stats.line()
    assert tokens(model) == first
    stats = model.stats
    assert stats.cached_tokens == (stats.prompt_tokens - 2) // 2 * 2
    assert stats.prefill_tokens_per_second * stats.prefill_seconds == pytest.approx(
        stats.prompt_tokens - stats.cached_tokens
    )
    assert f"({stats.cached_tokens} kept)" in stats.line()
    assert stats.to_dict()["cached_tokens"] == stats.cached_tokens
    model.forget_prefixes()
    assert tokens(model) == first and model.stats.cached_tokens == 0


def test_max_new_tokens_holds_in_a_kept_context(model: Model) -> None:
    for count in (3, 30, 1):
        assert len(tokens(model, count=count)) == count or count == 30
    assert [len(tokens(model, count=count)) for count in (5, 2)] == [5, 2]


def test_edits_have_contexts_of_their_own(model: Model) -> None:
    edit = stem_edge.make_edit(DEMO, "Spain", "Germany", scope="everywhere")
    with stem_edge.load(DEMO, keep_prefixes=False) as cold:
        plain = tokens(cold)
        with cold.edited(edit):
            edited = tokens(cold)
    for _ in range(2):
        assert tokens(model) == plain
        with model.edited(edit):
            assert tokens(model) == edited
    assert model.stats.cached_tokens


def test_generators_that_are_open_at_once_or_abandoned(model: Model) -> None:
    expected = tokens(model)
    opened = [model.generate(TEXT, max_new_tokens=12) for _ in range(3)]
    started = [next(one).token_ids for one in opened]
    found = [
        ids + [t for chunk in one for t in chunk.token_ids]
        for ids, one in zip(started[1:], opened[1:], strict=True)
    ]
    assert found == [expected, expected]
    del opened
    gc.collect()
    assert not model._prefixes._lent or model._prefixes._ended
    assert tokens(model) == expected
    assert len(model._prefixes._lent) == 1 and len(model._prefixes._ended) == 1


def test_threads(model: Model) -> None:
    prompts = [TEXT, TEXT + " Madrid. The capital of", TEXT[:40]]
    with stem_edge.load(DEMO, keep_prefixes=False) as cold:
        expected = [tokens(cold, prompt) for prompt in prompts]
    wrong: list[tuple[str, list[int]]] = []

    def call(turn: int) -> None:
        for number in range(6):
            which = (turn + number) % 3
            if (found := tokens(model, prompts[which])) != expected[which]:
                wrong.append((prompts[which], found))

    threads = [threading.Thread(target=call, args=(turn,)) for turn in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_kept_context_has_nothing_but_its_cache(tiny: Path, engine: EngineName) -> None:
    with stem_edge.load(tiny, engine=engine) as model:
        expected = list(model.generate([*range(5, 60)], max_new_tokens=1))
        model._prefixes._collect()
        context: Any = model._prefixes._kept[0].context.backend
        assert context.nbytes
        if engine == "ggml":
            assert context._scratch.nbytes == 0
        else:
            assert context._step[0] == 1
        assert list(model.generate([*range(5, 60)], max_new_tokens=1)) == expected
        assert model.stats.cached_tokens or engine == "ggml"  # its steps are longer
    assert not model._prefixes._kept and not model._prefixes._ended


EXIT = """
import sys, stem_edge
model = stem_edge.load({path!r}, engine={engine!r}, prepare=False)
generation = model.generate([*range(5, 60)], max_new_tokens=20)
print(next(generation).token_ids)
model.itself = model
"""


def test_a_program_may_end_in_the_midst_of_an_answer(tiny: Path, engine: EngineName) -> None:
    code = EXIT.format(path=str(tiny), engine=engine)
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
