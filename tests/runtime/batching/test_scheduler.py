"""The scheduler over a toy engine: order, turns, memory, cancellations and failures."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pytest
from interrupts import interrupted
from threads import together as in_threads
from tiers import slow_but
from toy_batches import alone, check_given_back, together, toy_model

import stem_edge
from stem_edge.errors import BackendError, InputError, OutOfMemoryError, StemEdgeError
from stem_edge.runtime import batching
from stem_edge.runtime.backends.interface import StepCosts
from stem_edge.runtime.batching.request import Request
from stem_edge.runtime.batching.scheduler import Scheduler
from stem_edge.runtime.decoding import Stepping
from stem_edge.runtime.model import Model
from stem_edge.runtime.sampling_params import SamplingParams

PROMPTS = [[5, 6, 7, start, start + 1, *range(start % 7)] for start in range(10, 250, 22)]
NEW: dict[str, Any] = {"max_new_tokens": 9}
Toy = tuple[Model, Any]
TOY = {"slots": 6, "sequences": 6}  # few slots, so that prompts have several chunks


def run(scheduler: Scheduler, steps: int = 1 << 30) -> dict[Request, list[int]]:
    """Step until nothing is left; return the tokens of each request."""
    found: dict[Request, list[int]] = {}
    while scheduler.busy and steps:
        steps -= 1
        for request, chunk in scheduler.step():
            found.setdefault(request, []).extend(chunk.token_ids)
            assert chunk.finish_reason in (None, "stop", "length")
    return found


def test_a_token_of_each_and_a_chunk_of_the_next_prompt_take_turns(tiny_bundle: Path) -> None:
    with toy_model(tiny_bundle, slots=4, sequences=4, keep_prefixes=False) as (model, backend):
        prompts = [[1, 2, 3], [*range(11, 21)], [21, 22]]
        counts = [4, 2, 2]
        first, second, third = (
            alone(model, prompts[:1], max_new_tokens=4),
            *(alone(model, [prompt], max_new_tokens=2) for prompt in prompts[1:]),
        )
        (a,), (b,), (c,) = first, second, third
        backend.units.clear()
        params = [SamplingParams(max_new_tokens=count) for count in counts]
        assert together(model, prompts, params, sequences=2) == {0: a, 1: b, 2: c}
        assert backend.units == [
            ([1, 2, 3], [0]),
            ([a[0]], [3]),
            ([11, 12, 13, 14], [0]),
            ([a[1]], [4]),
            ([15, 16, 17, 18], [4]),
            ([a[2]], [5]),  # its last: the fourth token is chosen and not processed
            ([19, 20], [8]),
            ([b[0]], [10]),  # while the third prompt, for which there is a place now, begins next
            ([21, 22], [0]),
            ([c[0]], [2]),
        ]


@pytest.mark.parametrize("size", [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 7}, {"top_k": 5, "seed": 1}])
def test_tokens_are_those_of_generate(
    tiny_bundle: Path, size: int, overlap: bool, sampling: Any
) -> None:
    for copies in (True, False):
        with toy_model(tiny_bundle, copies=copies, slots=6, sequences=5, overlap=overlap) as made:
            model, backend = made
            options = NEW | sampling
            expected = dict(enumerate(alone(model, PROMPTS, **options)))
            model.forget_prefixes()
            assert together(model, PROMPTS, sequences=size, **options) == expected
            assert together(model, PROMPTS, sequences=size, exact=True, **options) == expected
            check_given_back(model, backend)
            stats = model.stats
            assert stats.sequences == len(PROMPTS)
            assert stats.new_tokens == sum(map(len, expected.values()))
            assert (stats.decode_steps == stats.decoded_tokens) == (size == 1)


def test_each_has_its_own_params_and_end(toy: Toy) -> None:
    model, _ = toy
    params = [SamplingParams(max_new_tokens=1 + number % 5) for number in range(len(PROMPTS))]
    params[3] = SamplingParams(max_new_tokens=300, logprobs=2, temperature=0.5, seed=1)
    expected = [alone(model, [p], max_new_tokens=50)[0] for p in PROMPTS[:1]]
    stop = model.detokenize(expected[0][1:2])
    params[0] = SamplingParams(max_new_tokens=50, stop=stop)
    wanted = [list(model.generate(*pair)) for pair in zip(PROMPTS, params, strict=True)]
    found: list[Any] = [[] for _ in PROMPTS]
    for number, chunk in model.generate_many(PROMPTS, params):
        found[number].append(chunk)
    assert found == wanted
    assert {chunks[-1].finish_reason for chunks in found} == {"stop", "length"}


def test_rows_of_the_next_unit_are_read_while_one_computes(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was submitted last is wanted by the step after, so that no read is for nothing."""
    model, rows, pending = toy[0], toy[0].engine.rows, list[set[int]]()
    submit, fetch, wasted, ahead = rows.submit, rows.fetch, [0], [0]

    def submitted(ids: Any, *more: Any) -> None:
        if not pending:
            pending.append(set(ids.tolist()))
        submit(ids, *more)

    def fetched(ids: Any, whole: int | None = None) -> Any:
        if pending:
            wasted[0] += len(pending.pop() - set(ids.tolist()))
            ahead[0] += 1
        return fetch(ids, whole)

    monkeypatch.setattr(rows, "submit", submitted)
    monkeypatch.setattr(rows, "fetch", fetched)
    together(model, PROMPTS, sequences=4, **NEW)
    assert wasted == [0]
    assert ahead[0] > 0.9 * (model.stats.decode_steps + len(PROMPTS))


def test_misses_are_reads_and_fall_with_the_batch(tiny_bundle: Path) -> None:
    prompt, reads = [1, 2, 3, 4], list[int]()
    with toy_model(tiny_bundle, slots=8, sequences=8, keep_prefixes=False) as (model, _):
        for sequences in (1, 8):
            model.engine.rows.cache._slot_of[:] = -1  # type: ignore[attr-defined]
            model.engine.rows.cache._record_of[:] = -1  # type: ignore[attr-defined]
            together(model, [prompt] * 8, sequences=sequences, max_new_tokens=30)
            stats = model.stats
            assert stats.row_hits + stats.row_misses == stats.prompt_tokens + stats.decoded_tokens
            assert stats.records_per_step <= stats.tokens_per_step
            reads.append(stats.row_misses)
        record = model.bundle.manifest.tables.record_nbytes  # type: ignore[union-attr]
        assert stats.flash_bytes >= reads[1] * record
    assert reads[1] < reads[0]


def test_keys_and_values_stay_within_the_plan(tiny_bundle: Path) -> None:
    """Whatever runs together: short ones, ones that fill the context, kept prompts."""
    rng = random.Random(1)
    for copies in (True, False):
        with toy_model(tiny_bundle, copies=copies, sequences=4) as (model, backend):
            length, limit = model.plan.context_length, model._prefixes.limit
            assert limit == 4 * backend.nbytes_of(length)
            prompts = [
                [rng.randrange(1, 250) for _ in range(rng.choice([3, length // 2, length - 9]))]
                for _ in range(14)
            ]
            expected = dict(enumerate(alone(model, prompts, max_new_tokens=8)))
            taken, running = list[int](), list[int]()

            def watch(
                _: list[int], backend: Any = backend, taken: Any = taken, running: Any = running
            ) -> None:
                taken.append(backend.nbytes)
                running.append(sum(len(batch.texts) for batch in backend.batches))

            backend.before = watch
            assert together(model, prompts, max_new_tokens=8) == expected
            assert 0 < max(taken) <= limit
            assert max(running) > 1 or not copies


def test_one_too_large_to_be_copied_runs_alone_in_its_context(tiny_bundle: Path) -> None:
    with toy_model(tiny_bundle) as (model, backend):
        length = model.plan.context_length
        long = [7] * (length - 20)
        prompts = [[1, 2], long, [3, 4], long, [5, 6]]
        expected = dict(enumerate(alone(model, prompts, max_new_tokens=10)))
        backend.units.clear()
        assert together(model, prompts, max_new_tokens=10) == expected
        beside = [positions for tokens, positions in backend.units if len(positions) > 1]
        assert all(max(positions) < len(long) for positions in beside)
        check_given_back(model, backend)


def other_work(model: Model, scheduler: Scheduler, texts: int) -> Iterator[int | None]:
    """Compute texts of a full context each; yield the number of one that is complete, or None."""
    length = model.plan.context_length
    ids = np.arange(length) % 100
    for number in range(texts):
        while (room := scheduler.room(length)) is None:
            yield None
        with room, model.empty_context(length) as context:
            for _ in model.engine.process(context, ids.tolist(), ids, every=True):
                yield None
        del context
        yield number


@pytest.mark.parametrize("contexts", slow_but([2], [1, 2, 3]))
def test_other_work_and_requests_begin_in_turns_within_the_plan(
    tiny_bundle: Path, contexts: int
) -> None:
    with toy_model(tiny_bundle, slots=16, sequences=contexts) as (model, backend):
        prompts = [[number, *range(60)] for number in range(8)]
        new = model.plan.context_length - 80
        endless: Any = {"logit_bias": dict.fromkeys(model.config.eos_ids, -100.0)}
        expected = alone(model, prompts, max_new_tokens=new, **endless)
        scheduler, taken, ends = model.scheduler(2), list[int](), list[str]()
        requests = [model.request(prompt, max_new_tokens=new, **endless) for prompt in prompts]
        for request in requests:
            scheduler.submit(request)
        work: Iterator[int | None] = other_work(model, scheduler, 5)
        backend.before = lambda ids: taken.append(backend.nbytes)
        found: dict[Request, list[int]] = {}
        while scheduler.busy or len(ends) < 13:
            for request, tokens in run(scheduler, 1).items():
                found.setdefault(request, []).extend(tokens)
                ends += ["request"] * request.ended
            if isinstance(next(work, None), int):
                ends.append("other")
        assert [found[request] for request in requests] == expected
        assert max(taken) <= model._prefixes.limit
        # Neither waits for more than a few of the others.
        assert "other" in ends[:4] and "request" in ends[:3]
        assert ends.index("request", ends.index("other")) < 6
        scheduler.close()
        del work, found, request, requests
        check_given_back(model, backend)


def test_a_call_that_is_under_way_elsewhere_keeps_nobody_waiting(tiny_bundle: Path) -> None:
    with toy_model(tiny_bundle, slots=16) as (model, backend):
        expected = alone(model, PROMPTS[:2], **NEW)
        chunks = model.generate(PROMPTS[2], max_new_tokens=model.plan.context_length - 20)
        next(chunks)
        scheduler = model.scheduler(2)
        work = other_work(model, scheduler, 1)
        assert [*islice(work, 99)][-1] == 0
        assert together(model, PROMPTS[:2], **NEW) == dict(enumerate(expected))
        scheduler.close()
        chunks.close()
        check_given_back(model, backend)


def test_prefixes_are_used_and_kept(toy: Toy) -> None:
    model, _ = toy
    shared = [*range(100, 140)]
    expected = dict(enumerate(alone(model, [[*shared, n, n] for n in range(5)], **NEW)))
    model.forget_prefixes()
    assert together(model, [[*shared, n, n] for n in range(5)], **NEW) == expected
    assert model.stats.cached_tokens > len(shared)  # unless their contexts are still in use
    alone(model, [[*shared, 9, 9]])
    assert model.stats.cached_tokens == len(shared)


def test_requests_begin_in_their_order(toy: Toy) -> None:
    model, backend = toy
    together(model, [[n, n, n] for n in range(20)], sequences=3, **NEW)
    assert [tokens for tokens, (at, *_) in backend.units if not at] == [[n] * 3 for n in range(20)]


@pytest.mark.parametrize("victim", slow_but([2], [0, 2, 4]))
def test_cancelling_at_any_point_leaves_the_others_as_alone(toy: Toy, victim: int) -> None:
    model, backend = toy
    prompts = PROMPTS[:5]
    expected = alone(model, prompts, **NEW)
    for at in range(80):
        ended = cancelled(model, prompts, victim, at, expected)
        check_given_back(model, backend)
        if ended:
            return
    pytest.fail("it never ended")


def cancelled(model: Model, prompts: Any, victim: int, at: int, expected: list[list[int]]) -> bool:
    """Cancel a request after so many steps; return whether it had ended."""
    scheduler = model.scheduler(3)
    requests = [model.request(prompt, **NEW) for prompt in prompts]
    for request in requests:
        scheduler.submit(request)
    found, gone = run(scheduler, at), requests[victim]
    ended = gone.ended
    scheduler.cancel(gone)
    for request, tokens in run(scheduler).items():
        assert request is not gone
        found.setdefault(request, []).extend(tokens)
    assert gone.ended and not scheduler.busy
    for request, tokens in zip(requests, expected, strict=True):
        if request is not gone:
            assert found[request] == tokens
    tokens = found.get(gone, [])
    assert tokens == expected[victim][: len(tokens)] and len(tokens) <= at
    return ended


class Once:
    """Raise an error at the k-th computation, counting each sequence of a step as one."""

    def __init__(self, at: int, error: type[Exception]) -> None:
        self.left, self.error, self.raised = at, error, False

    def __call__(self, ids: list[int]) -> None:
        self.left -= 1
        if self.left == -1:
            self.raised = True
            raise self.error("here")


@pytest.mark.parametrize(
    "error", slow_but([MemoryError, BackendError], [OutOfMemoryError, MemoryError, BackendError])
)
def test_an_error_that_passes_costs_no_token_of_a_batch(toy: Toy, error: type[Exception]) -> None:
    """The sequences are stepped one by one, and none fails again; of one alone, it is its end."""
    model, backend = toy
    prompts = PROMPTS[:4]
    expected = dict(enumerate(alone(model, prompts, **NEW)))
    survived = 0
    for at in range(400):
        hook = backend.before = Once(at, error)
        found = together(model, prompts, **NEW)
        failed = [number for number, tokens in found.items() if isinstance(tokens, StemEdgeError)]
        assert len(failed) <= 1
        for number, tokens in found.items():
            assert number in failed or tokens == expected[number]
        survived += not failed
        backend.before = lambda ids: None
        del found
        check_given_back(model, backend)
        if not hook.raised:
            break
    assert survived > 8


def test_a_sequence_that_keeps_failing_ends_alone(toy: Toy) -> None:
    model, backend = toy
    prompts = PROMPTS[:5]
    expected = alone(model, prompts, **NEW)
    for victim, prompt in list(enumerate(prompts))[1::2]:
        for length in range(len(prompt), len(prompt) + len(expected[victim])):
            text = [*prompt, *expected[victim]][:length]

            def fail(ids: list[int], text: list[int] = text) -> None:
                if ids[: len(text)] == text:
                    raise BackendError("not this one")

            backend.before = fail
            found = together(model, prompts, **NEW)
            for number, tokens in enumerate(expected):
                if number == victim:
                    assert isinstance(found[number], BackendError)
                    assert str(found[number]) == "not this one"
                else:
                    assert found[number] == tokens
            with pytest.raises(BackendError, match="not this one"):
                model.generate_texts(prompts, **NEW)
            del found
            check_given_back(model, backend)


def decode(real: Any, wrong: int, ids: Any, **options: Any) -> str:
    """Decode ids, unless one is wrong."""
    if wrong in list(ids):
        raise InputError("the tokenizer cannot process these token ids")
    text: str = real(ids, **options)
    return text


def test_errors_of_choosing_and_of_text_end_one_sequence(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, backend = toy
    expected = dict(enumerate(alone(model, PROMPTS[:4], **NEW)))
    for step in (1, 2, 7):
        wrong = expected[2][step - 1]
        monkeypatch.setattr(model._text, "decode", partial(decode, model._text.decode, wrong))
        found = together(model, PROMPTS[:4], **NEW)
        monkeypatch.undo()
        assert isinstance(found[2], InputError)
        for number, tokens in expected.items():
            if wrong not in tokens:
                assert found[number] == tokens
    monkeypatch.setattr(backend, "logits", lambda *_: np.full(300, np.nan, np.float32))
    found = together(model, PROMPTS[:4], **NEW)
    assert all(isinstance(error, BackendError) for error in found.values())
    del found


def test_an_error_that_a_chunk_brings_keeps_no_context(toy: Toy) -> None:
    model, backend = toy
    backend.before = Once(0, MemoryError)
    errors = [chunk.error for _, chunk in model.generate_many([[1, 2, 3]]) if chunk.error]
    backend.before = lambda ids: None
    assert [type(error) for error in errors] == [OutOfMemoryError]
    check_given_back(model, backend)


@pytest.mark.parametrize("step", [1, 2, 5, 30])
def test_a_closed_generator_gives_everything_back(toy: Toy, step: int) -> None:
    model, backend = toy
    many = model.generate_many(PROMPTS, **NEW)
    for _ in range(step):
        next(many)
    many.close()
    check_given_back(model, backend)
    many = model.generate_many(PROMPTS, **NEW)
    next(many)
    del many
    check_given_back(model, backend)


@pytest.mark.parametrize("prompts", [PROMPTS, repeat([1, 2])], ids=["list", "endless"])
@pytest.mark.parametrize("taken", [0, 1])
def test_closing_the_model_ends_all(tiny_bundle: Path, prompts: Any, taken: int) -> None:
    with toy_model(tiny_bundle) as (model, backend):
        many = model.generate_many(prompts, **NEW)
        assert len(list(islice(many, taken))) == taken
        model.close()
        with pytest.raises(InputError, match="this model is closed"):
            list(many)
        del many
        assert not backend.contexts and not backend.batches


def within_batching(code: CodeType) -> bool:
    return Path(code.co_filename).parent == Path(batching.__file__).parent


@pytest.mark.parametrize(("at", "step"), slow_but([(0, 17)], [(0, 17), (1, 7), (5, 7)]))
def test_an_interrupt_anywhere_leaves_nothing_behind(tiny_bundle: Path, at: int, step: int) -> None:
    with toy_model(tiny_bundle, slots=8, sequences=2) as (model, backend):
        edit = stem_edge.make_edit(tiny_bundle, "a", "b", scope="everywhere")
        prompts = [[97, 98, 97], [5, 97, 6], [97]]
        with model.edited(edit):
            expected = dict(enumerate(alone(model, prompts, max_new_tokens=3)))
            while interrupted(
                lambda: together(model, prompts, max_new_tokens=3), at, within_batching
            ):
                check_given_back(model, backend)
                at += step
            assert at > 300
            assert together(model, prompts, max_new_tokens=3) == expected


def test_a_closed_scheduler_holds_nothing(toy: Toy) -> None:
    model, backend = toy
    scheduler = model.scheduler(4)
    for prompt in PROMPTS[:3]:
        scheduler.submit(model.request(prompt, **NEW))
    for _ in range(9):
        scheduler.step()
    scheduler.close()
    gc.collect()
    assert not backend.batches and len(backend.contexts) <= 8
    request = model.request(PROMPTS[0], **NEW)
    with pytest.raises(InputError, match="closed"):
        scheduler.submit(request)
    assert request.ended


@pytest.mark.parametrize("same", [True, False])
def test_exact_holds_as_loaded(tiny_bundle: Path, same: bool) -> None:
    with toy_model(tiny_bundle, copies=True, slots=6, sequences=6) as (model, backend):
        costs = StepCosts(seconds=1, times={}, same_bits=False, same_in_batches=same)
        model.stepping = Stepping(exact=True, costs=costs)
        scheduler = model.scheduler(4)
        assert bool(backend.batches) == same
        scheduler.close()


def test_prompts_are_taken_as_places_become_free(toy: Toy) -> None:
    model, _ = toy
    taken: list[int] = []

    def endless() -> Iterator[list[int]]:
        while True:
            taken.append(len(taken))
            yield PROMPTS[len(taken) % len(PROMPTS)]

    many, ended = model.generate_many(endless(), sequences=3, **NEW), 0
    for _number, chunk in many:
        ended += chunk.finish_reason is not None
        assert len(taken) <= ended + 3
        if ended == 20:
            break
    many.close()


def test_what_is_refused(toy: Toy) -> None:
    model, _ = toy
    whole = [1] * (model.plan.context_length + 1)
    for prompts, said in (
        ([[1], [999]], "prompt 1: token id 999 at position 0"),
        ([[1], whole], "prompt 1: the prompt has"),
        (["a", ""], "prompt 1: the prompt is empty"),
        ("a text", "give a list of prompts"),
        ([1, 2], "prompt 0: token ids must be a flat sequence"),
    ):
        with pytest.raises(InputError, match=said):
            model.generate_many(prompts)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="sequences is 0; expected 1 to 128"):
        model.generate_many([[1]], sequences=0)
    with pytest.raises(InputError, match="not both"):
        model.generate_many([[1]], [SamplingParams()], seed=1)
    with pytest.raises(InputError, match="prompt 1 has no params"):
        model.generate_many([[1], [2]], [SamplingParams()])
    with pytest.raises(TypeError, match="no option max_tokens"):
        model.generate_many([[1]], max_tokens=1)  # type: ignore[call-arg]


def test_a_bad_prompt_among_lazy_ones_fails_alone(toy: Toy) -> None:
    model, _ = toy
    prompts = [[1, 2], [999], [3, 4]]
    first, last = alone(model, [prompts[0], prompts[2]], **NEW)
    found = together(model, iter(prompts), **NEW)
    assert (found[0], found[2]) == (first, last)
    assert str(found[1]).startswith("prompt 1: token id 999")


def test_an_iterable_that_raises_ends_all(toy: Toy) -> None:
    model, backend = toy

    def prompts() -> Iterator[list[int]]:
        yield [1, 2]
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        together(model, prompts(), **NEW)
    check_given_back(model, backend)


def test_stem_ids_and_edits_are_those_of_the_call(toy: Toy) -> None:
    model, _ = toy
    stem_ids = [[9] * len(prompt) if number % 2 else None for number, prompt in enumerate(PROMPTS)]
    expected = [
        [t for c in model.generate(prompt, stem_ids=given, **NEW) for t in c.token_ids]
        for prompt, given in zip(PROMPTS, stem_ids, strict=True)
    ]
    assert together(model, PROMPTS, stem_ids=stem_ids, **NEW) == dict(enumerate(expected))
    edit = stem_edge.make_edit(model.bundle.path, "a", "b", scope="everywhere")
    prompts = [[97, 5, n, 97] for n in range(5)]
    with model.edited(edit):
        edited = dict(enumerate(alone(model, prompts, **NEW)))
        many = model.generate_many(iter(prompts), **NEW)
    assert edited != dict(enumerate(alone(model, prompts, **NEW)))
    found: dict[int, list[int]] = {}
    for number, chunk in many:  # outside the block
        found.setdefault(number, []).extend(chunk.token_ids)
    assert found == edited


def test_threads_submit_and_cancel_while_one_steps(toy: Toy) -> None:
    model, backend = toy
    assert race(model) > 20
    check_given_back(model, backend)


def race(model: Model) -> int:
    """Submit and cancel in eight threads; return how many answers were complete."""
    expected = dict(zip(map(tuple, PROMPTS), alone(model, PROMPTS, **NEW), strict=True))
    scheduler, done = model.scheduler(4), [False]
    found: dict[Request, list[int]] = {}
    submitted: list[list[Request]] = [[] for _ in range(8)]

    def step() -> None:
        while not done[0] or scheduler.busy:
            for request, chunk in scheduler.step():
                assert chunk.error is None
                found.setdefault(request, []).extend(chunk.token_ids)

    def submit(number: int) -> None:
        rng = random.Random(number)
        for _ in range(12):
            request = model.request(rng.choice(PROMPTS), **NEW)
            submitted[number].append(request)
            scheduler.submit(request)
            if rng.random() < 0.4:
                scheduler.cancel(rng.choice(submitted[number]))

    def submit_all() -> None:
        try:
            in_threads([lambda n=n: submit(n) for n in range(8)])  # type: ignore[misc]
        finally:
            done[0] = True

    in_threads([step, submit_all])
    whole = 0
    for request in (request for requests in submitted for request in requests):
        wanted, tokens = expected[tuple(request.prompt)], found.get(request, [])
        assert tokens == wanted or (request.cancelled and tokens == wanted[: len(tokens)])
        whole += tokens == wanted
    scheduler.close()
    with pytest.raises(InputError, match="this scheduler is closed"):
        scheduler.submit(model.request([1]))
    return whole
