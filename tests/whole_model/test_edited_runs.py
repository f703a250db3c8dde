"""Scope of edits in time: contexts, threads, running generations, caches, failures."""

from __future__ import annotations

import gc
import threading
import time
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from edit_oracle import PROMPT, Tried, spec, swap, tokens
from exact_models import TOLERANCE, off
from installed import bundle_for
from loading import load_fixed
from threads import together
from tiers import GGML_IS_SLOW

import stem_edge
from stem_edge import Edit
from stem_edge.edit_files.file import SCOPES
from stem_edge.errors import InputError
from stem_edge.graph.formats import EngineName
from stem_edge.runtime import Model
from stem_edge.runtime.rows.prefetch import Prefetcher

pytestmark = pytest.mark.usefixtures("one_torch_thread")
WHICH = list(product((0, 1), repeat=2))  # of two edits are open


def test_contexts_within_one_another(stem: Tried) -> None:
    with load_fixed(stem.path) as model:
        ids = model.tokenize(PROMPT)
        specs = [spec("cat", "dog"), spec("cat", "cow", layers=[2]), spec("met", "ate")]
        edits = [swap(model, one, "".join(to), layers=at) for one, to, _, at in specs]

        def check(*numbers: int) -> None:
            rows = stem.oracle.edited([specs[n] for n in numbers], ids, len(ids))
            assert off(model.logits(ids), stem.oracle.logits(ids, rows)) < TOLERANCE
            assert model.edits == tuple(edits[n] for n in numbers)

        with model.edited(edits[0]) as same:
            assert same is model
            check(0)
            with model.edited(edits[1], edits[2]), model.edited():
                check(0, 1, 2)
                with model.edited(edits[0]):
                    check(0, 1, 2, 0)
                check(0, 1, 2)
            check(0)
            with pytest.raises(ZeroDivisionError), model.edited(edits[1]):
                1 / 0  # noqa: B018
            check(0)
        check()


def test_contexts_may_end_in_any_order(stem: Tried) -> None:
    """Contexts of several threads do; some of the edits here are equal."""
    with load_fixed(stem.path) as model:
        one, two = swap(model, "cat", "dog"), swap(model, "cat", "cow")

        def check(*expected: Edit) -> None:
            assert model.edits == expected

        first, second, third = model.edited(one), model.edited(two), model.edited(one)
        for context in (first, second, third):
            context.__enter__()
        first.__exit__(None, None, None)
        check(two, one)
        third.__exit__(None, None, None)
        check(two)
        second.__exit__(None, None, None)
        check()


def test_an_edit_that_is_refused_lets_nothing_in(stem: Tried, tmp_path: Path) -> None:
    with load_fixed(stem.path) as model:
        good = swap(model, "cat", "dog")
        (tmp_path / "bad.edit").write_text("{}")
        with (
            pytest.raises(stem_edge.errors.EditError, match=r"bad\.edit"),
            model.edited(good, tmp_path / "bad.edit"),
        ):
            pytest.fail("was let in")
        assert not model.edits
        good.save(tmp_path / "good.edit")
        with model.edited(str(tmp_path / "good.edit")):
            assert model.edits == (good,)


def test_a_generation_keeps_the_edits_that_it_began_with(stem: Tried, engine: EngineName) -> None:
    specs = [spec("cat", "dog"), spec("aeiou", "vwxyz", "everywhere")]
    with load_fixed(bundle_for(stem.path, engine), engine=engine, slots=4) as model:
        ids = model.tokenize(PROMPT)
        edits = [swap(model, one, "".join(to), scope=s) for one, to, s, _ in specs]
        without, within = stem.oracle.greedy(ids, [], 12), stem.oracle.greedy(ids, specs, 12)
        before, unasked = (model.generate(ids, max_new_tokens=12) for _ in range(2))
        first = [*next(before).token_ids]
        with model.edited(*edits):
            inside, late = (model.generate(ids, max_new_tokens=12) for _ in range(2))
            turns = [*next(inside).token_ids, *next(inside).token_ids]
            first += [*next(before).token_ids, *next(before).token_ids]
            third = [*tokens(unasked)]
            assert (
                off(
                    model.logits(ids),
                    stem.oracle.logits(ids, stem.oracle.edited(specs, ids, len(ids))),
                )
                < TOLERANCE
            )
        fourth = [*tokens(late)]  # begun by the call, within
        for mine, one in ((turns, inside), (first, before)):
            mine.extend(tokens(one))
        assert first == third == without
        assert turns == fourth == within


def test_threads_have_their_own_generations(stem: Tried, engine: EngineName) -> None:
    targets = ["dog", "cow", "ape", "elk"]
    with load_fixed(bundle_for(stem.path, engine), engine=engine, slots=5) as model:
        ids = model.tokenize(PROMPT)
        edits = {target: swap(model, "cat", target) for target in targets}
        found: dict[str, list[list[int]]] = {target: [] for target in targets}
        turn = threading.Lock()

        def work(target: str) -> None:
            for _ in range(4):
                with turn, model.edited(edits[target]):
                    mine = model.generate(ids, max_new_tokens=6)
                found[target].append(list(tokens(mine)))

        threads = [threading.Thread(target=work, args=[target]) for target in targets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for target in targets:
            expected = stem.oracle.greedy(ids, [spec("cat", target)], 6)
            assert found[target] == [expected] * 4
        assert made_now(model) == 0


@pytest.mark.parametrize("engine", GGML_IS_SLOW)
def test_edits_come_and_go_while_threads_generate(stem: Tried, engine: EngineName) -> None:
    """Each answer is that of the edits that were open when it began, and of no others."""
    specs = [spec("cat", "dog"), spec("met", "ate", "everywhere")]
    with load_fixed(bundle_for(stem.path, engine), engine=engine, slots=5) as model:
        ids, ended = model.tokenize(PROMPT), threading.Event()
        edits = [swap(model, one, "".join(to), scope=scope) for one, to, scope, _ in specs]
        chosen = [[spec for spec, on in zip(specs, which, strict=True) if on] for which in WHICH]
        expected = {
            which: stem.oracle.greedy(ids, on, 6) for which, on in zip(WHICH, chosen, strict=True)
        }

        def come_and_go(edit: Edit) -> list[list[int]]:
            while not ended.is_set():
                with model.edited(edit):
                    time.sleep(0.003)
                time.sleep(0.002)
            return []

        def answers() -> list[list[int]]:
            try:
                return [list(tokens(model.generate(ids, max_new_tokens=6))) for _ in range(12)]
            finally:
                left.pop()
                if not left:
                    ended.set()

        left = [*range(8)]
        calls = [answers] * 8 + [partial(come_and_go, edit) for edit in edits]
        found = [answer for each in together(calls) for answer in each]
        assert len(found) == 96
        kinds = {which for which, answer in expected.items() if answer in found}
        assert all(answer in expected.values() for answer in found)
        assert len(kinds) > 1
        assert (
            model.edits == ()
            and list(tokens(model.generate(ids, max_new_tokens=6))) == expected[0, 0]
        )
        assert made_now(model) == 0


def made_now(model: Model) -> int:
    """Count composed records that are still in use."""
    assert isinstance(model.engine.rows, Prefetcher)
    model.engine.make([])
    return model.engine.rows.made


def test_generations_that_are_left_release_what_they_made(stem: Tried) -> None:
    with load_fixed(stem.path, slots=4) as model:
        ids = model.tokenize(PROMPT)
        edit = stem_edge.make_edit(
            model.bundle, "cat", "mouse", scheme="average", scope="everywhere"
        )
        with model.edited(edit):
            held = [model.generate(ids, max_new_tokens=20) for _ in range(5)]
            assert made_now(model) == 0  # nothing before the first is asked for
            for one in held:
                next(one)
            assert made_now(model) == 1
            held.pop(0)
            with pytest.raises(InputError):
                model.logits([999])
            with (
                pytest.raises(InputError, match="not in the prompt"),
                model.edited(swap(model, "cow", "elk")),
            ):
                model.logits(ids)
        del held[:2], one
        gc.collect()
        assert made_now(model) == 1
        assert len(list(held[0])) > 0
        held.clear()
        gc.collect()
        assert made_now(model) == 0


@pytest.mark.parametrize("slots", [4, 260])
def test_cached_tokens_are_seen_as_edited_at_once(
    slots: int, stem: Tried, engine: EngineName
) -> None:
    """The cache may hold the token's own record, those of its targets, or the composed one."""
    with load_fixed(bundle_for(stem.path, engine), engine=engine, slots=slots) as model:
        ids = model.tokenize(PROMPT)
        edit = stem_edge.make_edit(
            model.bundle, "cat", "dogs", scheme="average", scope="everywhere", layers=[2]
        )
        specs = [("cat", ["dogs"] * 3, "everywhere", [2])]
        expected = stem.oracle.logits(ids, stem.oracle.edited(specs, ids, len(ids)))
        for warm in ("cat", "dogs", "cat dogs"):
            for _ in range(3):
                model.logits(model.tokenize(warm))
            before = model.logits(ids)
            with model.edited(edit):
                for _ in range(3):
                    assert off(model.logits(ids), expected) < TOLERANCE
            assert np.array_equal(model.logits(ids), before)


def test_uses_are_counted_as_ever(stem: Tried) -> None:
    """A composed record without a slot is a miss, which reads all records it is made of."""
    record_nbytes = 2 * 80 * 4 + 4
    with load_fixed(stem.path, slots=260, warm_start=False) as model:
        ids = model.tokenize(PROMPT)
        model.logits(ids)
        edits = [
            stem_edge.make_edit(model.bundle, "cat", target, scheme="average", scope=scope)
            for target, scope in zip(("mouse", "zebra"), SCOPES, strict=True)
        ]
        with model.edited(edits[0]):
            model.logits(ids)
            found = (model.stats.row_hits, model.stats.row_misses, model.stats.flash_bytes)
            assert found == (len(ids) - 1, 1, 5 * record_nbytes)  # one mean, in six places
        with model.edited(edits[1]):
            for misses, nbytes in ((1, 5 * record_nbytes), (0, 0)):
                model.logits(ids)
                found = (model.stats.row_hits, model.stats.row_misses, model.stats.flash_bytes)
                assert found == (len(ids) - misses, misses, nbytes)


def test_errors_come_with_the_call_and_not_with_the_first_token(tiny_model: Model) -> None:
    with tiny_model.edited(swap(tiny_model, "cat", "dog")):
        for call in (tiny_model.generate, tiny_model.generate_text):
            with pytest.raises(InputError, match="'cat' is not in the prompt"):
                call("no such animal")
        for logits in (tiny_model.logits, tiny_model.logits_chunks):
            with pytest.raises(InputError, match="near it: 'cart'"):
                logits(tiny_model.tokenize("a cart here"))


def test_a_prompt_that_fills_the_context(stem: Tried, engine: EngineName) -> None:
    with load_fixed(
        bundle_for(stem.path, engine), engine=engine, context_length=16, slots=4
    ) as model:
        ids = model.tokenize("a cat and a cat")
        assert len(ids) == 16
        with model.edited(stem_edge.make_edit(model.bundle, "cat", "mouse", scheme="average")):
            specs = [("cat", ["mouse"] * 3, "positions", None)]
            rows = stem.oracle.edited(specs, ids, len(ids))
            expected = stem.oracle.logits(ids, rows)
            assert off(model.logits(ids), expected) < TOLERANCE
            found = list(tokens(model.generate(ids, max_new_tokens=5)))
            assert found == [int(expected[-1].argmax())]
            with pytest.raises(InputError, match="17 tokens"):
                model.generate("a cat and a cats")


def test_scores_are_refused_within_edits(tiny_model: Model) -> None:
    from stem_edge.runtime.scoring import Scorer

    scorer = Scorer(tiny_model)
    before = scorer.score([([1, 2], [3])])
    with (
        tiny_model.edited(swap(tiny_model, "cat", "dog")),
        pytest.raises(InputError, match="without edits"),
    ):
        scorer.scores([([1, 2], [3])])
    assert scorer.score([([1, 2], [3])]) == before
