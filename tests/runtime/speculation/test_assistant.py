"""Gemma 4's own drafter: what it drafts is what transformers drafts, and no answer depends on it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import msgspec
import numpy as np
import pytest
from exact_models import TOLERANCE_OF_GEMMA, off
from gemma_pairs import CLUSTERS, Pair, V, make_pair
from guessing import CHEAP, answer_of, answered
from tiers import slow_but

import stem_edge
from stem_edge.errors import BackendError
from stem_edge.graph import names as io
from stem_edge.graph.special.assistant import drafting
from stem_edge.graph.weight_plan import Order
from stem_edge.numerics.quantize import F32
from stem_edge.runtime import Model
from stem_edge.runtime.backends.onnxruntime import prepared
from stem_edge.runtime.backends.onnxruntime.assistant import AssistedBackend, OrtDrafter
from stem_edge.runtime.backends.onnxruntime.backend import OrtBackend
from stem_edge.runtime.backends.onnxruntime.loader import OrtLoader
from stem_edge.runtime.engine import Context
from stem_edge.runtime.speculation.assistant_drafts import Assistant, AssistantDrafts
from stem_edge.runtime.speculation.speculation import Speculation

PROMPT = np.random.default_rng(3).integers(3, 300, 40).tolist()
DRAFTS = 3
RIGHT = (2, 0, 3, 1, 3, 0, 0, 3)  # how many of the drafts of a step come true


class Exported(NamedTuple):
    """A pair in transformers, and its bundle without any quantization."""

    pair: Pair
    path: Path


@pytest.fixture(scope="module", params=slow_but([CLUSTERS], [CLUSTERS, 0]))
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp("pair")
    pair, exact = make_pair(folder, clusters=request.param), {"type": "fp32", "rows": "fp32"}
    stem_edge.export_bundle(folder / "t", folder / "b", assistant=folder / "a", **exact)  # type: ignore[arg-type]
    return Exported(pair, folder / "b")


@pytest.fixture
def model(exported: Exported) -> Iterator[Model]:
    with stem_edge.load(exported.path, threads=1, speculate=True) as model:
        yield model


def drafter_of(model: Model, context: Context) -> OrtDrafter:
    assert isinstance(model.engine.backend, AssistedBackend)
    drafter = model.engine.backend.open_drafter(context.backend)
    assert isinstance(drafter, OrtDrafter)
    return drafter


def scores_of(drafter: OrtDrafter) -> F32:
    """Scores [V] of the last draft, as transformers has them: those that are not scored below the others."""
    found = np.full(V, drafter._scores.min() - 1, np.float32)
    found[drafter._ids[0]] = drafter._scores[0, 0]
    return found


def feed(model: Model, context: Context, ids: Sequence[int], size: int = 16) -> None:
    for start in range(0, len(ids), size):
        model.engine.step(context, np.array(ids[start : start + size]))


def test_drafts_scores_and_states_are_those_of_transformers(
    exported: Exported, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token, after drafts that were refused, and where windows have dropped tokens."""
    monkeypatch.setattr(io, "WINDOW_BLOCK", 1)
    monkeypatch.setattr(io, "STEP_TOKENS", 1 + DRAFTS)
    context, seen = model.engine.open_context(200), [*PROMPT]
    feed(model, context, seen, 1 + DRAFTS)
    drafter = drafter_of(model, context)
    for number, right in enumerate(RIGHT):
        seen.append(7 + number)
        expected = exported.pair.drafts(seen, DRAFTS)
        for count in range(1, DRAFTS + 1):
            found = drafter.draft(seen[-1], context.position, count)
            assert found == expected.tokens[:count]
            assert off(scores_of(drafter), expected.scores[count - 1]) < TOLERANCE_OF_GEMMA
            assert off(drafter._next, expected.states[count - 1]) < TOLERANCE_OF_GEMMA
        model.engine.step(context, np.array([seen[-1], *found]), 1 + DRAFTS)
        context.rewind(len(seen) + right)
        seen += found[:right]
    assert context.position == len(seen) and context.backend.earliest > 30


@pytest.mark.parametrize("kv", ["fp16", *slow_but(["int8"], ["int8", "int4"])])
def test_it_reads_keys_and_values_of_every_type(exported: Exported, kv: Any) -> None:
    expected = exported.pair.drafts([*PROMPT, 7], 1)
    with stem_edge.load(exported.path, threads=1, speculate=True, kv=kv) as model:
        context = model.engine.open_context(64)
        feed(model, context, PROMPT)
        drafter = drafter_of(model, context)
        drafter.draft(7, len(PROMPT), 1)
        state, own = context.backend.state_before(len(PROMPT)), drafter._next[0, 0]  # type: ignore[attr-defined]
    alike = np.corrcoef(state, expected.before)[0, 1]  # no more in a model that is so sharp
    assert np.corrcoef(own, expected.states[0])[0, 1] > min(0.99999, alike - 0.05)


class Half(AssistantDrafts):
    """Drafts as the assistant does, and takes note; but gives what it was told, every fourth wrong."""

    text: Sequence[int] = ()
    drafted: list[tuple[list[int], list[int]]]

    def draft(self, seen: Sequence[int], count: int) -> list[int]:
        own = super().draft(seen, count)
        self.drafted.append(([*seen], own))
        known = self.text[len(seen) : len(seen) + count]
        places = range(len(seen), len(seen) + count)
        return [t if n % 4 else (t + 1) % V for n, t in zip(places, known, strict=False)]


ANSWERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 3},
    "penalized": {"repetition_penalty": 1.3, "top_k": 20, "temperature": 1.0, "seed": 3},
    "other rows": {"stem_ids": [*PROMPT[1:], 5]},
    "stopped": {"stop": ["e"], "temperature": 2.0, "seed": 5},
}


@pytest.mark.parametrize("case", ANSWERS)
def test_answers_are_those_of_plain_decoding(
    exported: Exported, model: Model, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """With drafts that are right and wrong in turn, each of them what transformers drafts there."""
    options = {"max_new_tokens": 60, **ANSWERS[case]}
    plain = answered(model, PROMPT, **options)
    monkeypatch.setattr(Half, "text", [*PROMPT, *plain[1]])
    monkeypatch.setattr(Half, "drafted", [], raising=False)
    monkeypatch.setattr("stem_edge.runtime.speculation.assistant_drafts.AssistantDrafts", Half)
    guessing = Speculation(CHEAP, 7, [made(model)])
    assert answered(model, PROMPT, guessing, **options) == plain
    drafted = model.stats.drafted_tokens
    assert case == "stopped" or drafted > model.stats.accepted_tokens > 10
    if case == "other rows":
        return  # transformers has no other rows
    for seen, drafts in Half.drafted[::4]:
        assert drafts == exported.pair.drafts(seen, len(drafts)).tokens


def made(model: Model) -> Assistant:
    """Return the assistant of a model, as one that drafts in no time."""
    assert isinstance(model.engine.backend, AssistedBackend)
    return Assistant(model.engine, model.engine.backend, 1e-9)


def test_contexts_at_their_end(model: Model) -> None:
    """Where no draft has room, and no token after it."""
    length = model.plan.context_length
    prompt = (PROMPT * (length // len(PROMPT) + 1))[: length - 9]
    plain = answered(model, prompt, max_new_tokens=9)
    assert answered(model, prompt, Speculation(CHEAP, 7, [made(model)]), max_new_tokens=9) == plain
    assert model.stats.drafted_tokens


def test_turns_and_kept_prompts(model: Model) -> None:
    guessing = Speculation(CHEAP, 7, [made(model)])
    for speculation in (None, guessing):  # the second finds what the first has kept of the prompt
        model.speculate(speculation)
        answers = [
            answer_of(list(model.generate(p, max_new_tokens=12))) for p in (PROMPT, PROMPT * 2)
        ]
        if speculation is None:
            plain = answers
    assert answers == plain and model.stats.cached_tokens


def test_sequences_that_run_alone_and_together(model: Model) -> None:
    prompts = [PROMPT, PROMPT[5:], PROMPT[::-1]]
    model.speculate(None)
    plain = model.generate_texts(prompts, max_new_tokens=16, sequences=2)
    model.speculate(Speculation(CHEAP, 7, [made(model)]))
    assert model.generate_texts(prompts, max_new_tokens=16, sequences=2) == plain


def test_an_answer_goes_on_without_it_when_it_fails(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = answered(model, PROMPT, max_new_tokens=20)
    calls = []

    def fail(*_: object) -> list[int]:
        calls.append(1)
        raise BackendError("broken")

    monkeypatch.setattr(OrtDrafter, "draft", fail)
    guessing = Speculation(CHEAP, 7, [made(model)])
    assert answered(model, PROMPT, guessing, max_new_tokens=20) == plain
    assert len(calls) == 1


def test_states_that_are_not_there_are_an_error(model: Model) -> None:
    context = model.engine.open_context(64)
    feed(model, context, PROMPT)
    drafter = drafter_of(model, context)
    for position in (len(PROMPT) + 1, len(PROMPT) - 1):
        with pytest.raises(BackendError, match="no state of the token before position"):
            drafter.draft(7, position, 1)


@pytest.mark.parametrize("same_bits", [True, False])
def test_auto_takes_it_where_guesses_are_known_to_be_exact(
    exported: Exported, monkeypatch: pytest.MonkeyPatch, same_bits: bool
) -> None:
    costs = msgspec.structs.replace(CHEAP, same_bits=same_bits)
    monkeypatch.setattr(OrtLoader, "step_costs", property(lambda _: costs))
    with stem_edge.load(exported.path, threads=1) as model:
        speculation = model.stepping.speculation
        found = [type(source) for source in speculation.sources] if speculation else []
    assert found == ([Assistant] if same_bits else [])


@pytest.mark.parametrize(
    ("options", "there"),
    [
        ({}, False),  # because not prepared
        ({"speculate": False}, False),
        ({"speculate": True}, True),
        ({"speculate": 1}, True),
    ],
)
def test_its_memory_is_in_the_plan_where_it_is_loaded(
    exported: Exported, options: dict[str, Any], there: bool
) -> None:
    plain = stem_edge.memory_plan(exported.path, slots=300, threads=1, speculate=False)
    found = stem_edge.memory_plan(exported.path, slots=300, threads=1, **options)
    most = (exported.path / "assistant.data").stat().st_size + 4 * V * 17
    assert 0 < found.weights - plain.weights <= most if there else found.weights == plain.weights
    with closing(stem_edge.load(exported.path, threads=1, **options)) as model:
        assert isinstance(model.engine.backend, AssistedBackend) == there


def test_it_leaves_where_weights_are_read_anew_in_each_step(
    exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps cost otherwise then, so that `auto` guesses nothing, and its memory is wanted."""
    costs = property(lambda loader: None if loader._streams else CHEAP)
    monkeypatch.setattr(OrtLoader, "step_costs", costs)
    monkeypatch.setattr(prepared, "LEAST_NBYTES", 0)
    for streams, speculate in ((False, "auto"), (True, "auto"), (True, True)):
        stream = MagicMock() if streams else None
        monkeypatch.setattr(OrtLoader, "_stream", lambda *_, stream=stream: stream)
        options: dict[str, Any] = {"cache_dir": tmp_path, "speculate": speculate, "threads": 1}
        with stem_edge.load(exported.path, **options) as model:
            backend, there = model.engine.backend, not streams or speculate is True
            assert isinstance(backend, AssistedBackend) == there
            assert (
                isinstance(backend, OrtBackend)
                and (io.ASSISTANT in backend.loaded.sessions) == there
            )


def test_tokens_that_are_none_are_an_error(exported: Exported, tmp_path: Path) -> None:
    """Their numbers come from a file, and the rows of drafts are looked up before anything checks them."""
    path = shutil.copytree(exported.path, tmp_path / "bundle")
    manifest = stem_edge.open_bundle(path).manifest
    assert manifest.assistant is not None and manifest.backbone is not None
    plan = drafting(manifest.assistant, manifest.model, manifest.backbone)[1]
    if (order := next((one for one in plan.items if isinstance(one, Order)), None)) is None:
        pytest.skip("without clusters, all tokens are scored")
    with (path / plan.file).open("r+b") as file:
        file.seek(order.tensor.offset)
        file.write(np.full(V, -1, np.int32).tobytes())
    with pytest.raises(BackendError, match="the assistant drafts token -1; "):
        stem_edge.load(path, threads=1, speculate=True)
