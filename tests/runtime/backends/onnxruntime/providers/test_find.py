"""Execution providers: names, plug-in packages, and the errors if one is missing or cannot start."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from stem_edge.errors import BackendError, InputError
from stem_edge.graph.encoder import encode
from stem_edge.graph.ir import CONTRIB, Graph
from stem_edge.runtime.backends.onnxruntime.providers import find
from stem_edge.runtime.backends.onnxruntime.providers.find import find_provider
from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU, CUDA, Provider
from stem_edge.runtime.backends.onnxruntime.providers.session import (
    GraphSource,
    open_session,
    products_saturate,
)


def attention() -> GraphSource:
    """Return a graph of an operator that few providers have."""
    graph = Graph()
    names = [graph.input(name, np.float32, [1, 1, 8]) for name in ("q", "k", "v")]
    names += [graph.input(name, np.float32, [1, 1, 8, 8]) for name in ("keys", "values")]
    names += [graph.input("seqlens_k", np.int32, [1]), graph.input("total", np.int32, [])]
    outputs = ["mixed", "new_keys", "new_values"]
    graph.node("GroupQueryAttention", names, outputs, CONTRIB, num_heads=1, kv_num_heads=1)
    for output, shape in zip(outputs, ([1, 1, 8], [1, 1, 8, 8], [1, 1, 8, 8]), strict=True):
        graph.output(output, np.float32, shape)
    return GraphSource("attention", encode(graph), Path())


@dataclass
class Device:
    """A fake OrtEpDevice."""

    ep_name: str
    kind: str = "GPU"

    @property
    def device(self) -> Any:
        return SimpleNamespace(type=SimpleNamespace(name=self.kind))


@dataclass
class Machine:
    """A fake onnxruntime: built-in providers, and the devices of plug-in packages."""

    built_in: list[str] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
    packages: dict[str, list[Device]] = field(default_factory=dict)
    registered: list[str] = field(default_factory=list)
    preloads: int = 0

    def module(self, name: str) -> ModuleType | None:
        found = ModuleType(name)
        found.__dict__["get_library_path"] = lambda: name
        return found if name in self.packages else None

    def register(self, name: str, path: str) -> None:
        self.registered.append(name)
        self.devices += self.packages[path]

    def preload(self) -> None:
        print("Failed to load libcudnn.so.9")  # as onnxruntime does
        self.preloads += 1


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(ort, "get_available_providers", lambda: [*found.built_in, CPU.full])
    monkeypatch.setattr(ort, "get_ep_devices", lambda: found.devices)
    monkeypatch.setattr(ort, "register_execution_provider_library", found.register)
    monkeypatch.setattr(ort, "preload_dlls", found.preload, raising=False)
    monkeypatch.setattr(find, "find_spec", found.module)
    monkeypatch.setattr(find, "import_module", found.module)
    return found


@pytest.mark.parametrize("name", ["cpu", "CPU", "CPUExecutionProvider", " cpu "])
def test_the_cpu_has_several_spellings(name: str) -> None:
    assert find_provider(name) == CPU


@pytest.mark.parametrize(
    ("name", "message", "error"),
    [
        ("", "provider is empty", InputError),
        (
            "cuda",
            r"has only tensorrt, cpu here; pip install .*stem-edge\[cuda\].*gpu",
            BackendError,
        ),
        ("CUDAExecutionProvider", r"stem-edge\[cuda\]", BackendError),
        ("webgpu", r'pip install "stem-edge\[webgpu\]"$', BackendError),
        ("coreml", "onnxruntime's package for macOS", BackendError),
        ("azure", "'azure', but .*; expected one of these", BackendError),
        ("cuda,cpu", "'cuda,cpu', but .*; expected one of these", BackendError),
    ],
)
def test_absent_providers_are_refused(
    machine: Machine, name: str, message: str, error: type[Exception]
) -> None:
    machine.built_in = ["AzureExecutionProvider", "TensorrtExecutionProvider"]
    with pytest.raises(error, match=message) as caught:
        find_provider(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["webgpu", "WebGpuExecutionProvider"])
def test_a_plug_in_is_registered_once_and_its_best_device_taken(
    machine: Machine, name: str
) -> None:
    weak, strong = (Device("WebGpuExecutionProvider", kind) for kind in ("CPU", "GPU"))
    machine.packages["onnxruntime_ep_webgpu"] = [weak, strong, Device("OtherExecutionProvider")]
    for _ in range(2):
        found = find_provider(name)
        assert found == Provider("webgpu", "WebGpuExecutionProvider", (strong,))
    assert machine.registered == ["webgpu"]


def test_a_session_refuses_operators_that_would_go_to_the_cpu() -> None:
    azure = Provider("azure", "AzureExecutionProvider")
    if azure.full not in ort.get_available_providers():
        pytest.skip("this onnxruntime has no provider that lacks operators")
    with pytest.raises(BackendError, match=r"on azure \(the provider lacks operators\); leave out"):
        open_session(attention(), 1, azure)


def test_a_provider_that_onnxruntime_leaves_out_in_silence_is_an_error(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    products_saturate()
    opened = SimpleNamespace(get_providers=lambda: [CPU.full])
    monkeypatch.setattr(ort, "InferenceSession", lambda *_, **__: opened)
    machine.built_in = [CUDA]
    with pytest.raises(
        BackendError, match=r"did not start cuda, .* took CPUExec.* instead\. Install"
    ):
        open_session(attention(), 1, find_provider("cuda"))
