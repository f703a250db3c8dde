"""Scores against the logits of every position, with and without reuse of the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import models
import numpy as np
import pytest
from installed import DEMO
from loading import load_fixed
from prompt_graph import without_prompt_graph

from stem_edge.errors import InputError
from stem_edge.graph.kv import KvType
from stem_edge.runtime import Model
from stem_edge.runtime.engine import starts_of
from stem_edge.runtime.scoring import Pair, Score, Scorer

# Of a sum of log probabilities, per token. Where it was measured 1e-5 would do; kernels of other
# processors may round lone tokens in another way, and int8 activations make steps of that. A wrong
# position or prefix is off by far more.
TOLERANCE = 0.05
OWN_KEYS = "engram", "ngrams", "mixture"  # whose tokens look up rows by the tokens before them, too


@pytest.fixture(params=["demo", "demo without prefill graph", "tiny", "dense", *OWN_KEYS])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Model]:
    """A model: quantized with two graphs or one, or float32, with rows of tokens, of several or none."""
    name = request.param.split()[0]
    if name in OWN_KEYS:
        bundle = models.bundle_of(name, models.ORT, tmp_path)
    else:
        bundle = DEMO if name == "demo" else request.getfixturevalue(f"{name}_bundle")
    if "without" in request.param:
        bundle = without_prompt_graph(bundle, tmp_path / "copy")
    with load_fixed(bundle) as loaded:
        yield loaded


def expected(model: Model, pair: Pair) -> Score:
    """Compute it in float64 from the logits of all positions of an even number of tokens."""
    context, continuation = pair
    holds = model.plan.context_length
    ids = [*context, *continuation][-holds - 1 :]
    inputs = ids[:-1] + ids[-2:-1] * (len(ids[:-1]) % 2)
    # Repeat the last token, which changes nothing, so that the graph for prompts is used.
    padded = inputs + inputs[-1:] * max(0, 8 - len(inputs))
    logits = model.logits(padded)[len(ids) - 1 - len(continuation) : len(ids) - 1]
    logits64 = logits.astype(np.float64)
    peaks = logits64.max(axis=1, keepdims=True)
    logs = logits64 - peaks - np.log(np.exp(logits64 - peaks).sum(axis=1, keepdims=True))
    targets = np.array(continuation)
    total = logs[np.arange(len(targets)), targets].sum()
    return Score(float(total), bool((logs.argmax(axis=1) == targets).all()))


def some_pairs(model: Model, count: int = 24) -> list[Pair]:
    """Contexts that share beginnings of every length, with continuations of 1 to 9 tokens."""
    rng = np.random.default_rng(7)

    def ids(length: int) -> list[int]:
        drawn: list[int] = rng.integers(0, model.config.vocab_size, length).tolist()
        return drawn

    base = ids(60)
    contexts = [base[: int(rng.integers(1, 60))] + ids(int(rng.integers(0, 5))) for _ in range(9)]
    return [
        (contexts[int(rng.integers(0, 9))], ids(int(rng.integers(1, 10)))) for _ in range(count)
    ]


def assert_close(got: list[Score], wanted: list[Score], pairs: list[Pair]) -> None:
    for one, other, (_, continuation) in zip(got, wanted, pairs, strict=True):
        assert abs(one.logprob - other.logprob) < TOLERANCE * len(continuation)
        assert one.greedy == other.greedy


@pytest.mark.slow
def test_scores_are_those_of_the_logits_of_every_position(model: Model) -> None:
    pairs = some_pairs(model)
    assert_close(Scorer(model).score(pairs), [expected(model, pair) for pair in pairs], pairs)


@pytest.mark.slow
def test_reuse_changes_no_more_than_rounding_and_saves_most_tokens(model: Model) -> None:
    pairs = some_pairs(model)
    with_reuse, without = Scorer(model), Scorer(model, reuse=False)
    assert_close(with_reuse.score(pairs), without.score(pairs), pairs)
    assert without.reused == 0
    assert with_reuse.processed + with_reuse.reused == without.processed
    assert with_reuse.processed < without.processed / 2


@pytest.mark.parametrize(
    ("kv", "reuses"),
    [("fp32", True), pytest.param("fp16", False, marks=pytest.mark.slow), ("int8", True)],
)
def test_reuse_never_shows_in_a_score(kv: KvType, reuses: bool) -> None:
    ids = [(7 * place * place + place) % 1700 + 3 for place in range(240)]
    pairs = [(ids[:count], [5, 6, 7]) for count in (40, 51, 100, 151, 222, 233)]
    with load_fixed(DEMO, kv=kv, slots=256) as model:
        scorer = Scorer(model)
        anew = Scorer(model, reuse=False).score(pairs)
        for one, other in zip(scorer.score(pairs), anew, strict=True):
            assert abs(one.logprob - other.logprob) < 1e-4
        assert bool(scorer.reused) == reuses


@pytest.mark.parametrize("length", [20, 21])
def test_choices_process_their_context_once(demo: Model, length: int) -> None:
    context = list(range(100, 100 + length))
    scorer = Scorer(demo)
    scorer.score([(context, [choice]) for choice in (7, 8, 9, 10)])
    assert scorer.processed == length + length % 2  # choices of one token are one computation
    scorer = Scorer(demo)
    scorer.score([(context, [choice, 1, 2, 3]) for choice in (7, 8, 9, 10)])
    whole, first = length + 3 + (length + 3) % 2, (length - 1) // 2 * 2
    assert scorer.processed == whole + 3 * (whole - first)


def test_greedy_says_what_generation_would(demo: Model) -> None:
    prompt = demo.tokenize("The capital of Peru is")
    answer = demo.tokenize(" Lima.", add_special_tokens=False)
    wrong = demo.tokenize(" Paris.", add_special_tokens=False)
    right, other = Scorer(demo).score([(prompt, answer), (prompt, wrong)])
    assert right.greedy
    assert not other.greedy
    assert right.logprob > -0.1 > other.logprob


@pytest.mark.slow
@pytest.mark.parametrize("context_length", [16, 17])
def test_what_is_too_long_loses_its_beginning(context_length: int) -> None:
    ids = list(range(300, 340))
    with load_fixed(DEMO, context_length=context_length) as model:
        long, same, all_of_it = Scorer(model).score(
            [
                (ids[:30], ids[30:34]),
                (ids[33 - context_length : 30], ids[30:34]),
                (ids[:20], ids[20 : 20 + context_length]),
            ]
        )
    assert long == same
    with load_fixed(DEMO) as model:
        cut = (ids[33 - context_length : 30], ids[30:34])
        assert abs(long.logprob - expected(model, cut).logprob) < 4 * TOLERANCE
        whole = expected(model, (ids[19:20], ids[20 : 20 + context_length]))
        assert abs(all_of_it.logprob - whole.logprob) < context_length * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (([], [1]), "pair 1: the context is empty; give at least a begin token"),
        (([1], []), "pair 1: the continuation has 0 tokens; expected 1 to 256"),
        (([1], [2] * 257), "pair 1: the continuation has 257 tokens; expected 1 to 256"),
        (([1], [1756]), "token id 1756 at position 1 is not in"),
        (([-1], [1]), "token id -1 at position 0"),
    ],
)
def test_bad_pairs_are_refused_before_anything_is_computed(
    demo: Model, pair: Pair, message: str
) -> None:
    scorer = Scorer(demo)
    with pytest.raises(InputError, match=message):
        scorer.scores([([1], [2]), pair])
    assert scorer.processed == 0


def test_a_prompt_is_cut_into_pairs_with_no_token_left_alone() -> None:
    for length, size in product(range(1, 40), (4, 5, 6, 16, 17, 128)):
        counts = np.diff([*starts_of(length, size), length]).tolist()
        assert sum(counts) == length and max(counts) <= size
        assert all(count % 2 == 0 for count in counts[:-1])
        assert counts[-1] > 1 or length == 1
