"""Loading on a device, emulated by the CPU: which graphs run, and what lies where."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from installed import DEMO

import stem_edge
from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.errors import (
    BackendError,
    InputError,
    MemoryPlanError,
    OutOfMemoryError,
)
from stem_edge.graph.names import Variant
from stem_edge.runtime.backends.engine import NotRunnableError, first_that_runs
from stem_edge.runtime.backends.interface import NotFiniteError
from stem_edge.runtime.backends.onnxruntime.device import loader as device_loader
from stem_edge.runtime.backends.onnxruntime.device.loader import DeviceLoader, WrongStepsWarning
from stem_edge.runtime.backends.onnxruntime.providers import resolve as providers
from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.rows.prefetch import ANY_NUMBER
from stem_edge.system import nvidia as machine

PROMPT = "The capital of France"
NEW = 24
SIZE = "60MB"


def text(**options: Any) -> str:
    with stem_edge.load(DEMO, **options) as model:
        return model.generate_text(PROMPT, max_new_tokens=NEW)


@pytest.fixture(scope="module")
def expected() -> str:
    with stem_edge.load(DEMO) as model:
        return model.generate_text(PROMPT, max_new_tokens=NEW)


@pytest.mark.parametrize("options", ({}, {"overlap": False}, {"resident": True}))
def test_the_text_is_that_of_the_cpu(options: dict[str, Any], expected: str) -> None:
    assert text(device_memory=SIZE, **options) == expected


def test_few_slots_give_the_same_text(expected: str) -> None:
    with stem_edge.load(DEMO, device_memory=SIZE, slots=16, warm_start=False) as model:
        assert model.plan.slots == 16
        assert model.generate_text(PROMPT, max_new_tokens=NEW) == expected
        stats = model.stats
        assert stats.uploaded_rows > 0 and stats.uploaded_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("context_length", (1, 5, 16, 17, 24, 33, 40, 63, 64, 65))
def test_contexts_of_any_length_load(context_length: int) -> None:
    """The checks while loading fit into any context, and accept a correct device."""
    with stem_edge.load(DEMO, device_memory=SIZE, context_length=context_length) as model:
        assert model.engine.chunk_tokens == model.plan.chunk_tokens
        assert model.logits([5] * min(context_length, 3)).shape[0] == min(context_length, 3)


@pytest.mark.parametrize("variant", ("fp16", "portable"))
def test_other_variants_give_the_same_text(
    variant: Variant, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_loader, "ON_CPU", (variant,))
    with stem_edge.load(DEMO, device_memory=SIZE) as model:
        assert model.plan.variant == variant
        assert (model.plan.device is None) == (variant == "portable")
        assert model.generate_text(PROMPT, max_new_tokens=NEW) == expected


def test_auto_without_an_accelerator_is_the_cpu_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "_accelerators", lambda libraries: iter(()))
    for wanted in ("auto", ["auto"]):
        plan = stem_edge.memory_plan(DEMO, providers=wanted, device_memory=SIZE)
        with stem_edge.load(DEMO, providers=wanted, device_memory=SIZE) as model:
            assert plan.device is None and model.plan.device is None


def test_figures_say_where_it_ran() -> None:
    with stem_edge.load(DEMO, device_memory=SIZE) as model:
        assert model.stats.provider == "cpu" and model.stats.line().startswith("onnxruntime: ")
        elsewhere = replace(model.stats, provider="webgpu")
        assert elsewhere.line().startswith("onnxruntime on webgpu: ")


def test_what_is_planned_is_what_is_loaded() -> None:
    options: dict[str, Any] = {"device_memory": "30MB", "context_length": 64}
    plan = stem_edge.memory_plan(DEMO, **options)
    with stem_edge.load(DEMO, **options) as model:
        assert model.plan.slots == plan.slots
        assert model.plan.device == plan.device is not None


def test_a_limit_that_was_asked_for_is_kept() -> None:
    least = stem_edge.memory_plan(DEMO, device_memory="30MB", slots=16).device
    assert least is not None
    with stem_edge.load(DEMO, device_memory=least.total, slots=16) as model:
        assert model.generate_text(PROMPT, max_new_tokens=4)
        kept = []
        with pytest.raises(OutOfMemoryError, match="are allowed"):
            for _ in range(1000):  # each with a KV cache of its own
                kept.append(model.engine.open_context(256))
        kept.clear()
        assert model.generate_text(PROMPT, max_new_tokens=4)


def test_too_little_device_memory_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_loader, "open_session", lambda *_: pytest.fail("opened"))
    with pytest.raises(MemoryPlanError, match=r"memory of the device \(cpu\) of 1 MB"):
        stem_edge.load(DEMO, device_memory="1MB")


def test_ggml_has_no_devices(tiny_gguf: Path) -> None:
    with pytest.raises(InputError, match="device_memory"):
        stem_edge.load(tiny_gguf, device_memory=SIZE)
    with pytest.raises(InputError, match="device_memory"):
        stem_edge.memory_plan(tiny_gguf, device_memory=SIZE)


def test_a_model_without_such_graphs_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_loader, "obstacle", lambda *_: "experts are too many")
    said = r"no graphs for cpu: experts are too many; run it on the CPU"
    with pytest.raises(BackendError, match=said):
        stem_edge.load(DEMO, device_memory=SIZE)
    with stem_edge.load(DEMO) as model:
        assert model.plan.provider == "cpu"


class TestFirstThatRuns:
    bundle: Bundle = open_bundle(DEMO)

    def loaders(self, *variants: Variant) -> list[DeviceLoader]:
        made = [SimpleNamespace(variant=one, name=f"magic {one}") for one in variants]
        return cast(list[DeviceLoader], made)

    def test_the_first_is_taken_and_no_other_tried(self) -> None:
        tried: list[str] = []

        def load(loader: Any) -> str:
            tried.append(loader.variant)
            if loader.variant == "fp16":
                raise NotRunnableError("no fp16 here")
            return str(loader.variant)

        loaders = self.loaders("fp16", "fp32", "portable")
        assert first_that_runs(self.bundle, loaders, load) == "fp32"
        assert tried == ["fp16", "fp32"]

    def test_all_reasons_are_told(self) -> None:
        def load(loader: Any) -> str:
            raise NotRunnableError(f"cannot run Foo of {loader.variant}")

        with pytest.raises(BackendError, match=r"magic.*Foo of fp16.*Foo of portable") as caught:
            first_that_runs(self.bundle, self.loaders("fp16", "portable"), load)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("error", (OutOfMemoryError, MemoryPlanError, InputError))
    def test_other_errors_are_no_reason_to_try_the_next(self, error: type[Exception]) -> None:
        def load(loader: Any) -> str:
            raise error(loader.variant)

        with pytest.raises(error, match="fp16"):
            first_that_runs(self.bundle, self.loaders("fp16", "fp32"), load)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (BackendError("the device does not know f16"), r"cpu fp32: .*does not know f16"),
        (OutOfMemoryError("no memory left on cpu"), "no memory left on cpu"),  # no missing operator
    ],
)
def test_a_failing_trial_token_leaves_nothing_open(
    error: BackendError, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_loader, "agreeing_tokens", Mock(side_effect=error))
    with pytest.raises(type(error), match=said):
        stem_edge.load(DEMO, device_memory=SIZE)  # checked by the fixture no_leaks


@pytest.mark.parametrize(("variant", "runs"), (("fp16", False), ("fp32", True), ("portable", True)))
def test_what_float16_cannot_hold_is_left_to_the_next_variant(
    variant: Variant, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise NotFiniteError("7 of 9 logits are not finite numbers")

    monkeypatch.setattr(device_loader, "agreeing_tokens", fail)
    closed: list[Variant] = []
    closing: Any = SimpleNamespace(close=lambda: closed.append(variant), batches=False)
    for name in ("DeviceBackend", "PortableBackend"):
        monkeypatch.setattr(device_loader, name, lambda *_: closing)
    loader = DeviceLoader(stem_edge.open_bundle(DEMO), LoadOptions(threads=1), [CPU], variant)
    if runs:
        assert loader.open(None) is closing and loader.step_tokens == ANY_NUMBER
    else:
        with pytest.raises(NotRunnableError, match="7 of 9 logits"):
            loader.open(None)
    assert closed == [variant] * (not runs)


def test_prompts_go_in_pieces_where_many_tokens_are_wrong(
    expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_loader, "agreeing_tokens", lambda *_: 16)
    with pytest.warns(WrongStepsWarning, match="cpu computes many tokens in one step wrongly"):
        model = stem_edge.load(DEMO, device_memory=SIZE)
    with model:
        assert model.engine.chunk_tokens == 16
        assert model.generate_text(PROMPT, max_new_tokens=NEW) == expected


@pytest.mark.parametrize(("said", "expected"), (("1024\n", 1 << 30), ("[N/A]\n", None), ("", None)))
def test_free_memory_is_what_the_driver_says(
    said: str, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=said))
    assert machine.free_on_nvidia("0") == expected


def test_free_memory_is_unknown_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert machine.free_on_nvidia("0") is None
