"""Trainers' logits through the graphs for accelerators, on every provider that runs here.

The CPU stands in for a device (every tensor apart from this process's own arrays, copied to and from);
plug-in providers are skipped by name where they, or a device for them, are not there.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from conformance import CASES, stepwise
from exact_models import Exact, flat_gemma, off, published
from installed import DEMO

import stem_edge
from stem_edge.errors import BackendError
from stem_edge.runtime import Model
from stem_edge.runtime.backends.onnxruntime.providers.find import find_provider

TOLERANCE = 1e-4  # of logits


@pytest.fixture(scope="module", params=["cpu", "webgpu", "cuda", "coreml"])
def provider(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    try:
        find_provider(name)
    except BackendError as error:
        pytest.skip(f"{name} is not here: {error}")
    return name


@pytest.fixture(scope="module", params=[*CASES, "gemma3", "gemma4", "gemma3n"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exact:
    """A trainer's checkpoint, or a random Gemma with the logits of transformers."""
    folder, name = tmp_path_factory.mktemp("conformance"), request.param
    return published(folder, name, ggml=False) if name in CASES else flat_gemma(folder, name)


@pytest.fixture
def model(provider: str, case: Exact) -> Iterator[Model]:
    with stem_edge.load(case.path, provider=provider, device_memory="100MB") as loaded:
        assert loaded.plan.provider == provider and loaded.plan.device is not None
        yield loaded


def test_one_pass_and_token_by_token_give_the_trainers_logits(model: Model, case: Exact) -> None:
    for ids, expected in case.texts:
        engine = model.engine
        context = engine.open_context(len(ids))
        (prompt,) = (logits.copy() for logits in engine.process(context, ids[:-1]))
        ends = np.concatenate([prompt.reshape(1, -1), engine.step(context, np.array(ids[-1:]))])
        for found in (model.logits(ids), stepwise(model, ids)):
            assert off(found, expected) < TOLERANCE
        assert off(ends, expected[-2:]) < TOLERANCE


def test_texts_are_those_of_the_cpu(provider: str) -> None:
    """With few slots, so that steps upload rows."""
    prompts = ["The capital of France is", "In Japan, people speak", "Kenya is a country in"]
    with stem_edge.load(DEMO) as model:
        expected = [model.generate_text(text, max_new_tokens=24) for text in prompts]
    with stem_edge.load(DEMO, provider=provider, device_memory="100MB", slots=32) as model:
        assert [model.generate_text(text, max_new_tokens=24) for text in prompts] == expected
        assert model.stats.uploaded_rows > 0
