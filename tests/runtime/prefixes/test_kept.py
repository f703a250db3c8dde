"""Contexts kept between calls: which one a call gets, and which ones stay."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
from installed import DEMO
from loading import load_fixed

import stem_edge
from stem_edge.errors import OutOfMemoryError
from stem_edge.graph.formats import EngineName
from stem_edge.runtime import Model
from stem_edge.runtime.conversations.file import load, save
from stem_edge.runtime.engine import Context, starts_of
from stem_edge.runtime.prefixes.folder import PrefixFolder
from stem_edge.runtime.prefixes.kept import MOST_KEPT, Prefixes

LENGTH, TOKEN_NBYTES = 1000, 10
A, B, C = ([start + place for place in range(400)] for start in (0, 1000, 2000))


class FakeContext:
    """A KV cache of ids, in which each token takes 10 bytes once it was written."""

    earliest = settled = 0

    def __init__(self, length: int, engine: FakeEngine) -> None:
        self.length, self.engine, self.ids = length, engine, np.full(length, -1)
        self.filled = 0  # the most there have been

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
        return [self.ids[:tokens, None]]

    def restore(self, arrays: Iterable[Any], tokens: int) -> None:
        (array,) = arrays
        self.ids[:tokens] = array[:, 0]
        self.fill(tokens)

    def fill(self, tokens: int) -> None:
        self.filled = max(self.filled, tokens)
        self.engine.check()


class FakeEngine:
    """Opens fake contexts, as many as there is memory for, and never while `busy` is locked.

    limit: bytes that all of them may take at any time.
    """

    def __init__(self, limit: int) -> None:
        self.opened, self.most, self.limit = 0, 100, limit
        self.busy = threading.Lock()
        self.contexts = WeakSet[FakeContext]()

    def check(self) -> None:
        assert sum(context.nbytes for context in self.contexts) <= self.limit

    def open_context(self, length: int) -> Context:
        with self.busy:
            return self._open(length)

    def _open(self, length: int) -> Context:
        if self.opened >= self.most:
            self.opened = 0
            raise OutOfMemoryError("no memory")
        self.opened += 1
        context = FakeContext(length, self)
        self.contexts.add(context)
        return Context(context)  # type: ignore[arg-type]

    def starts(self, tokens: int) -> list[int]:
        return starts_of(tokens, 128)


class Calls:
    """Calls over a fake engine; each computes its prompt, and may decode."""

    def __init__(self, limit: int | None, folder: PrefixFolder | None = None) -> None:
        engine: Any = FakeEngine(10_000 if limit is None else limit)
        self.engine, keeps = engine, limit is not None
        self.prefixes = Prefixes(engine, LENGTH, engine.limit, folder, keeps=keeps)

    def call(self, ids: list[int], answer: int = 0, error: BaseException | None = None) -> int:
        """Compute a prompt; return how many of its tokens were there."""
        with self.prefixes.lent(ids, {}, len(ids) + answer) as context:
            cached = context.position
            backend: Any = context.backend
            assert backend.ids[:cached].tolist() == ids[:cached]
            backend.ids[cached : len(ids)] = ids[cached:]
            backend.ids[len(ids) : len(ids) + answer] = -2
            context.position = len(ids) + answer
            backend.fill(context.position)
            if error is not None:
                raise error
        return cached

    def fill(self, tokens: int) -> None:
        """Fill an empty context."""
        with self.prefixes.empty(tokens) as context:
            backend: Any = context.backend
            assert (context.position, context.room) == (0, tokens)
            backend.fill(tokens)


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
            context.position = position
            calls.prefixes.make_room(context)
            backend.fill(position)
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


def test_contexts_that_went_back_count_what_they_took() -> None:
    calls = Calls(6_900)  # one call of 400 tokens and one of 300 would take 7,000
    for one, other in ((A, B), (B, C)):
        calls.call(one)
        calls.call(one[:130] + [1] * 20)
        calls.call(other[:300])


def test_kept_contexts_give_way_to_an_empty_one() -> None:
    calls = Calls(5_000)
    calls.call(A)
    for _ in range(2):
        calls.fill(300)
    assert calls.call(A) == 0 and calls.call(A) == 398


def test_files_are_read_once_others_have_given_way(tmp_path: Path) -> None:
    folder = PrefixFolder(tmp_path / "prefixes", "here")
    calls = Calls(5_200, folder)
    assert [calls.call(ids[:count]) for ids in (A, B) for count in (300, 400)] == [0, 300, 0, 300]
    assert [calls.call(ids) for ids in (A, B, A)] == [398, 398, 398]  # written as others came
    save(calls.prefixes, tmp_path / "talk", A, "[]")
    for _ in range(5):
        assert load(calls.prefixes, tmp_path / "talk") == "[]"
    assert calls.call(A) == 398 and len(calls.prefixes._kept) <= 1


@pytest.mark.parametrize("ids", [A, B, []])
def test_a_context_stays_after_it_was_saved(ids: list[int], tmp_path: Path) -> None:
    calls = Calls(5_200)
    calls.call(A)
    save(calls.prefixes, tmp_path / "talk", ids, "[]")
    assert calls.call(A) == 398


def test_kept_contexts_give_way_to_a_batch() -> None:
    calls = Calls(12_000)
    prefixes = calls.prefixes
    for ids in (A, B):
        calls.call(ids)
    assert prefixes.fits(12_000) and len(prefixes._kept) == 2
    first = prefixes.reserve(4_000)
    assert len(prefixes._kept) == 1  # 400 tokens take 5,120 bytes
    assert prefixes.fits(8_000) and not prefixes.fits(8_001)
    with prefixes.empty(100):
        assert not prefixes.fits(8_000)
        second = prefixes.reserve(9_000)  # one that nobody waits for
    assert not prefixes._kept and not prefixes.fits(1)
    second.release()
    assert prefixes.fits(8_000)
    del first
    assert prefixes.fits(12_000)


def test_a_call_under_way_counts_as_it_may_grow() -> None:
    prefixes = Calls(12_000).prefixes
    with prefixes.lent(A[:10], {}, 800):
        assert prefixes.fits(12_000 - 8_960) and not prefixes.fits(12_001 - 8_960)


def test_a_context_without_memory_to_rest_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def rest(self: object) -> None:
        raise OutOfMemoryError("no memory")

    calls = Calls(12_000)
    with monkeypatch.context() as patch:
        patch.setattr(FakeContext, "rest", rest)
        calls.call(A)
        assert calls.call(A) == 0
    assert calls.call(A) > 0


class FailingFolder:
    """A folder in which nothing is found, and to which writing is interrupted."""

    def find(self, *_: object) -> None:
        return None

    def write(self, *_: object) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_before_a_call_has_its_context_leaves_none_behind() -> None:
    folder: Any = FailingFolder()
    calls = Calls(5_200, folder)
    calls.call(A)
    with pytest.raises(KeyboardInterrupt):
        calls.call(B)
    gc.collect()
    assert not calls.prefixes._lent and not calls.prefixes._ended
    assert [calls.call(B), calls.call(B)] == [0, 398]


@pytest.mark.parametrize("first", [[], A])  # a fresh context, a copy
def test_nobody_waits_for_the_engine_with_the_lock(first: list[int]) -> None:
    calls = Calls(20_000)
    if first:
        calls.call(first)
    with calls.engine.busy:  # as in a step that a signal handler has interrupted
        waiting = threading.Thread(target=calls.call, args=(A[:100] + B[:200],))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        closing = threading.Thread(target=calls.prefixes.close)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
    waiting.join()


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
    with load_fixed(DEMO, keep_prefixes=False) as cold:
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
    with load_fixed(DEMO, keep_prefixes=False) as cold:
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
    with load_fixed(tiny, engine=engine) as model:
        expected = list(model.generate([*range(5, 60)], max_new_tokens=1))
        model._prefixes._collect()
        context: Any = model._prefixes._kept[0].context.backend
        assert context.nbytes
        if engine == "ggml":
            assert context.steps.scratch.nbytes == 0
        else:
            assert context._graphs.shape.tokens == 1
        assert list(model.generate([*range(5, 60)], max_new_tokens=1)) == expected
        assert model.stats.cached_tokens or engine == "ggml"  # its steps are longer
    assert not model._prefixes._kept and not model._prefixes._ended


EXIT = """
import sys, stem_edge
model = stem_edge.load({path!r}, engine={engine!r})
generation = model.generate([*range(5, 60)], max_new_tokens=20)
print(next(generation).token_ids)
model.itself = model
"""


def test_a_program_may_end_in_the_midst_of_an_answer(tiny: Path, engine: EngineName) -> None:
    code = EXIT.format(path=str(tiny), engine=engine)
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
