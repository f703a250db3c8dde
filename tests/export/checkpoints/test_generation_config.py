"""How a model's makers want tokens chosen: read from checkpoints, kept in bundles, the default of every door."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from installed import DATA, DEMO
from loading import load_fixed
from msgspec.structs import replace

import stem_edge
from stem_edge.apps.answers.openai.chat import ChatBody
from stem_edge.apps.answers.openai.completion import CompletionBody
from stem_edge.apps.batches import answering
from stem_edge.apps.batches.answering import Settings
from stem_edge.apps.batches.rows import Row
from stem_edge.bundle.manifest import open_manifest
from stem_edge.errors import CheckpointError
from stem_edge.export.checkpoints.hugging_face.generation_config import of_folder
from stem_edge.runtime.model import Model
from stem_edge.runtime.sampling_params import SamplingParams
from stem_edge.sampling import CONVERSATION, RANGES, Sampling

OWN = Sampling(temperature=1.0, top_p=0.9, top_k=64)
NEUTRAL = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, None),
        ({"bos_token_id": 2, "max_length": 20}, None),
        ({"do_sample": True}, Sampling(temperature=1.0)),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95}, Sampling(0.6, None, 0.95)),
        ({"temperature": 1.0, "top_k": 64, "top_p": 0.95}, Sampling(1.0, 64, 0.95)),
        ({"top_k": 20}, Sampling(1.0, 20)),
        ({"do_sample": False, "temperature": 0.6, "top_k": 5}, Sampling(0.0)),
        ({"repetition_penalty": 1.1}, Sampling(repetition_penalty=1.1)),
        ({"repetition_penalty": 1.0}, None),
    ],
)
def test_generation_config(said: dict[str, Any], expected: Sampling | None, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert of_folder(tmp_path) == expected


@pytest.mark.parametrize(
    "said", [{"temperature": -1}, {"top_p": 0, "temperature": 1}, {"top_k": 0.5}, {"top_k": "all"}]
)
def test_values_that_cannot_be(said: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        of_folder(tmp_path)


@pytest.mark.parametrize(
    ("given", "own", "otherwise", "expected"),
    [
        ({}, Sampling(), {}, {}),
        ({}, OWN, {}, {"temperature": 1.0, "top_p": 0.9, "top_k": 64}),
        ({"top_k": 5}, OWN, CONVERSATION, {"temperature": 1.0, "top_p": 0.9, "top_k": 5}),
        ({"temperature": 0}, OWN, CONVERSATION, {}),
        ({}, Sampling(), CONVERSATION, {"temperature": 0.7, "top_p": 0.95}),
        ({}, Sampling(top_k=9), CONVERSATION, {"temperature": 0.7, "top_p": 0.95, "top_k": 9}),
        ({"top_p": 0.5}, Sampling(), {}, {"temperature": 1.0, "top_p": 0.5}),
        ({}, Sampling(repetition_penalty=1.3), {}, {"repetition_penalty": 1.3}),
    ],
)
def test_what_is_given_comes_before_the_models_own(
    given: dict[str, Any], own: Sampling, otherwise: dict[str, float], expected: dict[str, float]
) -> None:
    found = SamplingParams(**given).resolved(own.values(), otherwise)
    assert {name: getattr(found, name) for name in RANGES} == NEUTRAL | expected


def values(params: SamplingParams | None) -> tuple[float | None, float | None, int | None]:
    assert params is not None
    return params.temperature, params.top_p, params.top_k


HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


def row(**given: object) -> Callable[[Model], SamplingParams]:
    """Return how a batch chooses tokens for a row."""
    return lambda model: answering._task(model, Row(1, 1, given), Settings())[0].params


# Where requests come in -> how their tokens are chosen; conversations first.
CONVERSATIONS: dict[str, Callable[[Model], SamplingParams | None]] = {
    "chat completions": lambda model: ChatBody(messages=HELLO).params(model, 8, None),
    "completions": lambda model: CompletionBody(prompt="Hello").sampling(model),
}
TEXTS: dict[str, Callable[[Model], SamplingParams | None]] = {
    "generate": lambda model: model.chosen(SamplingParams()),
    "a request of a scheduler": lambda model: model.request("Hello").params,
    "a row": row(prompt="Hello"),
    "a row with messages": row(messages=HELLO),
}


@pytest.mark.parametrize("door", [*CONVERSATIONS, *TEXTS])
def test_what_is_not_said_is_the_models_own(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = (CONVERSATIONS | TEXTS)[door]
    with load_fixed(DEMO) as model:
        usual = (0.7, 0.95, 0) if door in CONVERSATIONS else (0.0, 1.0, 0)
        assert values(found(model)) == usual
        manifest = replace(model.bundle.manifest, sampling=OWN)
        monkeypatch.setattr(model, "bundle", replace(model.bundle, manifest=manifest))
        assert values(found(model)) == (1.0, 0.9, 64)


def test_generate_samples_by_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with load_fixed(DEMO) as model:
        manifest = replace(model.bundle.manifest, sampling=OWN)
        monkeypatch.setattr(model, "bundle", replace(model.bundle, manifest=manifest))
        texts = {model.generate_text("The", max_new_tokens=12) for _ in range(8)}
        assert len(texts) > 1
        assert (
            len({model.generate_text("The", max_new_tokens=12, temperature=0) for _ in range(2)})
            == 1
        )


def test_an_export_keeps_what_the_makers_say(tmp_path: Path) -> None:
    shutil.copytree(DATA / "conformance" / "gemma3n-text", source := tmp_path / "checkpoint")
    (source / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.6, "top_k": 64}'
    )
    stem_edge.export_bundle(source, tmp_path / "out", type="fp32", rows="fp32")
    assert open_manifest(tmp_path / "out").sampling == Sampling(0.6, 64)
