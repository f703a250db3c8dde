"""Sampling against a plain oracle: sort everything, softmax in float64."""

import math
from typing import Any

import numpy as np
import pytest

from stem_edge.numerics.logits import (
    BLOCK,
    apply_repetition_penalty,
    candidates,
    top_ids,
)
from stem_edge.numerics.quantize import F32, F64, I64
from stem_edge.runtime.sampling import (
    Sampler,
    token_logprobs,
)
from stem_edge.runtime.sampling_params import SamplingParams

LARGE_V = 128256
INF = float("inf")


def sample(logits: F32, params: SamplingParams, count: int = 1) -> list[int]:
    choose = Sampler(params)
    return [choose(logits.copy(), []) for _ in range(count)]


def adversarial_logits() -> dict[str, F32]:
    rng, found = np.random.default_rng(2), dict[str, F32]()
    for size in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 1000):
        made = {
            "random": rng.normal(size=size),
            "few values": rng.integers(0, 3, size),
            "all equal": np.zeros(size),
            "ascending": np.arange(size),
            "descending": -np.arange(size),
            "infinite": rng.choice([-INF, 0, INF], size),
            "zeros of both signs": rng.choice([-0.0, 0.0], size),
        }
        found |= {f"{kind} {size}": logits.astype(np.float32) for kind, logits in made.items()}
    return found


ADVERSARIAL = adversarial_logits()


@pytest.mark.parametrize("logits", ADVERSARIAL.values(), ids=ADVERSARIAL)
def test_top_ids_are_those_of_a_stable_sort(logits: F32) -> None:
    expected, size = np.argsort(-logits, kind="stable"), len(logits)
    counts = {0, 1, 2, 3, 5, 8, BLOCK, BLOCK + 1, size // 2, size - 1, size, size + 1}
    for count in counts:
        assert top_ids(logits, count).tolist() == expected[:count].tolist()


def oracle(logits: F32, order: I64, params: SamplingParams) -> tuple[I64, F64]:
    """Filter by filter over the whole distribution; `order` is the stable sort of the logits."""
    wide = logits[order].astype(np.float64)
    weights = np.exp((wide - wide[0]) / params.temperature)
    if params.top_k:
        weights = weights[: params.top_k]
    if params.top_p is not None and params.top_p < 1:
        reached = np.cumsum(weights) / weights.sum()
        weights = weights[: int((reached < params.top_p).sum()) + 1]
    weights = weights[weights / weights[0] >= params.min_p]
    ascending = np.argsort(order[: len(weights)])
    return order[ascending], weights[ascending] / weights.sum()


def logits_of_kind(kind: str) -> F32:
    rng = np.random.default_rng(4)
    small, large = rng.normal(size=300) * 3, rng.normal(size=LARGE_V)
    made = {
        "small": small,
        "ties": small.round(),
        "-inf": np.where(rng.random(300) < 0.9, -INF, small),
        "one": np.array([3.0]),
        "flat": large * 0.01,
        "peaked": np.where(np.arange(LARGE_V) == 77_777, 30, large),
        "wide": large * 3,  # top_p needs a few thousand of them
    }
    return made[kind].astype(np.float32)


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 10**9},
    {"top_p": 1e-9},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.8},
    {"top_k": 50, "min_p": 0.2},
    {"top_p": 0.7, "min_p": 0.3},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("temperature", [1e-6, 0.7, 100.0])
@pytest.mark.parametrize("kind", ["small", "ties", "-inf", "one", "flat", "peaked", "wide"])
def test_candidates_against_the_oracle(kind: str, temperature: float) -> None:
    logits = logits_of_kind(kind)
    order = np.argsort(-logits, kind="stable")
    for options in FILTERS:
        params = SamplingParams(temperature=temperature, **options).resolved()
        ids, probabilities = candidates(
            logits.copy(), temperature, params.top_k, params.top_p, params.min_p
        )
        expected_ids, expected = oracle(logits, order, params)
        # Rounding decides which token is the first to reach top_p.
        rounding = abs(len(ids) - len(expected))
        assert rounding <= ((params.top_p or 1) < 1), options
        found, wanted = np.zeros((2, len(logits)))
        found[ids], wanted[expected_ids] = probabilities, expected
        # Neighbours at the edge of top_p may differ, because exp is computed in float32.
        tolerance = 1e-6 + (2 * float(expected.min()) if (params.top_p or 1) < 1 else 0)
        assert np.abs(found - wanted).max() <= tolerance, options
        assert probabilities.sum() == pytest.approx(1)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"min_p": 0.5}, {"top_k": 2}])
def test_a_temperature_next_to_zero_is_greedy(options: dict[str, Any]) -> None:
    logits = np.array([1, 90, 3, 20], np.float32)
    for temperature in (1e-30, 1e-50, 1e-310, 5e-324):
        params = SamplingParams(temperature=temperature, seed=1, **options)
        assert sample(logits, params, 5) == [1] * 5


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.9}]
)
def test_tokens_are_drawn_with_their_probabilities(options: dict[str, Any]) -> None:
    logits = np.array([0.3, 2, -1, 1.4, 1, 0, 1.9, -0.5], np.float32)
    params, draws = SamplingParams(temperature=0.9, seed=11, **options).resolved(), 4000
    ids, probabilities = oracle(logits, np.argsort(-logits, kind="stable"), params)
    counts = np.bincount(sample(logits, params, draws), minlength=len(logits))
    assert counts[ids].sum() == draws
    expected = probabilities * draws
    chi_square = float(((counts[ids] - expected) ** 2 / expected).sum())
    assert chi_square < 24.3  # 99.9 % for 7 degrees of freedom, the most there are here


def test_the_same_seed_gives_the_same_tokens_and_another_does_not() -> None:
    logits = np.zeros(1000, np.float32)
    draws = [sample(logits, SamplingParams(temperature=1.0, seed=s), 20) for s in (5, 5, 6)]
    assert draws[0] == draws[1] != draws[2]


def test_without_a_seed_every_sampler_draws_differently() -> None:
    logits = np.zeros(1000, np.float32)
    first, second = (sample(logits, SamplingParams(temperature=1.0), 20) for _ in range(2))
    assert first != second


@pytest.mark.parametrize(
    ("penalty", "expected"),
    [(2.0, [1, -4, 0, 3, -1]), (0.5, [4, -1, 0, 3, -1]), (1.0, [2, -2, 0, 3, -1])],
)
def test_repetition_penalty_by_hand(penalty: float, expected: list[float]) -> None:
    logits = np.array([2, -2, 0, 3, -1], np.float32)
    apply_repetition_penalty(logits, [0, 1, 2, 1, 1, 0], penalty)  # once, however often seen
    assert logits.tolist() == expected


def test_penalties_are_for_the_answer_and_others_for_all() -> None:
    logits = np.array([2, 1.5, 1], np.float32)
    options: dict[str, Any]
    for options, expected in (
        ({"presence_penalty": 1.0}, [0, 1, 0, 0]),
        ({"frequency_penalty": 0.6}, [0, 1, 0, 2]),
        ({"frequency_penalty": -2.0}, [0, 0, 0, 0]),
        ({"repetition_penalty": 2.0}, [1, 0, 0, 0]),
        ({"logit_bias": {0: -100, 2: 0.75}}, [2, 2, 2, 2]),
        ({"logit_bias": {1: 100.0}, "presence_penalty": 2.0}, [1, 1, 1, 1]),
    ):
        choose, seen = Sampler(SamplingParams(**options), 1), [0]
        for _ in range(4):
            seen.append(choose(logits.copy(), seen))
        assert seen[1:] == expected, options


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_that_is_skipped_has_its_random_number(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=4)
    choose, other = Sampler(params), Sampler(params)
    logits = np.random.default_rng(0).normal(size=50).astype(np.float32)
    for at in range(40):
        if at % 3:
            assert choose(logits.copy(), []) == other(logits.copy(), [])
        else:
            choose(logits.copy(), [])
            other.skip()


@pytest.mark.parametrize("count", [0, 1, 5, 300, 301])
@pytest.mark.parametrize("kind", ["small", "ties", "-inf"])
def test_logprobs_are_those_of_a_log_softmax(kind: str, count: int) -> None:
    logits = logits_of_kind(kind)
    wide = logits.astype(np.float64)
    expected = wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())
    token = int(logits.argmin())
    found = token_logprobs(logits, token, count)
    assert found.token_id == token
    assert found.logprob == pytest.approx(expected[token], abs=1e-5)
    best = np.argsort(-logits, kind="stable")[:count]
    assert [token_id for token_id, _ in found.top] == best.tolist()
    assert [logprob for _, logprob in found.top] == pytest.approx(expected[best], abs=1e-5)
