"""Reference logits through the graphs for accelerators, on every provider that runs here.

The CPU plays a device (every tensor apart from this process's own arrays, copied to and from);
plug-in providers are skipped by name where they, or a device for them, are not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from conformance import CASES, stepwise
from exact_models import Exact, flat_gemma, off, published

import stem_edge
from stem_edge.errors import BackendError
from stem_edge.graph.names import Variant
from stem_edge.runtime import Model
from stem_edge.runtime.backends.onnxruntime.device import loader as device_loader
from stem_edge.runtime.backends.onnxruntime.providers.resolve import resolve

# Of logits; those of fp16 have passed through numbers of 11 bits in every layer.
TOLERANCES: dict[Variant, float] = {"fp32": 1e-4, "fp16": 2e-2, "portable": 1e-4}


class Way(NamedTuple):
    """A provider, with the options that make it exact, and the graphs that it is to run."""

    provider: str
    variant: Variant
    options: tuple[tuple[str, str], ...] = ()


WAYS = [Way("cpu", variant) for variant in TOLERANCES]
WAYS += [Way(name, variant) for name in ("webgpu", "cuda") for variant in TOLERANCES]
# Needed because otherwise it computes in whatever type the processor is fastest with.
EXACT = (("load_config", '{"CPU": {"EXECUTION_MODE_HINT": "ACCURACY"}}'),)
WAYS += [Way("openvino", "portable", EXACT)]


@pytest.fixture(scope="module", params=[*CASES, "gemma3", "gemma4", "gemma3n"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exact:
    """A trainer's checkpoint, or a random Gemma with the logits of transformers."""
    folder, name = tmp_path_factory.mktemp("conformance"), request.param
    return published(folder, name, ggml=False) if name in CASES else flat_gemma(folder, name)


@pytest.fixture(params=WAYS, ids=lambda way: f"{way.provider}-{way.variant}")
def model(
    request: pytest.FixtureRequest, case: Exact, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Model]:
    way: Way = request.param
    try:
        resolve([(way.provider, dict(way.options))])
    except BackendError as error:
        pytest.skip(f"{way.provider} is not here: {error}")
    for name in ("ON_CPU", "ACCELERATED"):
        monkeypatch.setattr(device_loader, name, (way.variant,))
    size = "100MB" if way.provider == "cpu" else None
    try:
        loaded = stem_edge.load(
            case.path, providers=[(way.provider, dict(way.options))], device_memory=size
        )
    except BackendError as error:
        if way[:2] != ("cuda", "fp32"):  # whose attention is for halves alone
            raise
        pytest.skip(f"cuda cannot compute in fp32: {error}")
    with loaded:
        assert (loaded.plan.provider, loaded.plan.variant) == (way.provider, way.variant)
        yield loaded


def test_one_pass_and_token_by_token_give_the_trainers_logits(model: Model, case: Exact) -> None:
    variant = model.plan.variant
    assert variant is not None
    for ids, expected in case.texts:
        engine = model.engine
        context = engine.open_context(len(ids))
        (prompt,) = (logits.copy() for logits in engine.process(context, ids[:-1]))
        ends = np.concatenate([prompt.reshape(1, -1), engine.step(context, np.array(ids[-1:]))])
        for found in (model.logits(ids), stepwise(model, ids)):
            assert off(found, expected) < TOLERANCES[variant]
        assert off(ends, expected[-2:]) < TOLERANCES[variant]
