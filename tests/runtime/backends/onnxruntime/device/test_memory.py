"""Arrays in the memory of a device, emulated by the CPU's memory."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from stem_edge.errors import DeviceLostError, OutOfMemoryError
from stem_edge.runtime.backends.onnxruntime.device.memory import DeviceArray, DeviceMemory
from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU, Provider

KINDS = ["host", "plugged"]


class Device:
    """A fake OrtEpDevice whose memory is the CPU's."""

    def memory_info(self, kind: ort.OrtDeviceMemoryType) -> Any | None:
        return _cpu_info() if kind == ort.OrtDeviceMemoryType.DEFAULT else None


def _cpu_info() -> Any:
    arena = ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR
    return ort.OrtMemoryInfo("Cpu", arena, 0, ort.OrtMemType.DEFAULT)


@pytest.fixture(scope="module", autouse=True)
def allocator() -> None:
    ort.create_and_register_allocator(_cpu_info(), None)


@pytest.fixture
def plugged(monkeypatch: pytest.MonkeyPatch) -> DeviceMemory:
    """Memory of a fake plug-in, because onnxruntime has no copies from CPU to CPU."""

    def copy(sources: list[ort.OrtValue], targets: list[ort.OrtValue]) -> None:
        for source, target in zip(sources, targets, strict=True):
            size = source.tensor_size_in_bytes()
            assert target.tensor_size_in_bytes() == size  # more would be written past the end
            ctypes.memmove(target.data_ptr(), source.data_ptr(), size)

    monkeypatch.setattr(ort, "copy_tensors", copy)
    provider = Provider("gpu", "GpuExecutionProvider", devices=(Device(),))
    return DeviceMemory(provider)


@pytest.fixture(params=KINDS)
def memory(request: pytest.FixtureRequest) -> DeviceMemory:
    found = request.getfixturevalue("plugged") if request.param == "plugged" else DeviceMemory(CPU)
    assert isinstance(found, DeviceMemory) and found.shared == (request.param == "host")
    return found


def put(memory: DeviceMemory, values: Any) -> DeviceArray:
    array = memory.empty(values.shape, "a test")
    array.write(values)
    return array


def test_what_is_written_is_read(memory: DeviceMemory) -> None:
    values = np.arange(15, dtype=np.float32).reshape(3, 5)
    array = put(memory, values)
    values[:] = 0  # a copy was made
    assert np.array_equal(array.beginning(3).numpy().ravel(), np.arange(15))


def test_an_allocation_that_fails_leaves_the_rest(memory: DeviceMemory) -> None:
    held = put(memory, np.arange(4, dtype=np.float32))
    with pytest.raises(OutOfMemoryError, match="for all there is: needs 4,503,599,627,370,496"):
        memory.empty((1 << 50,), "all there is")
    assert memory.nbytes == held.nbytes and np.array_equal(held.beginning(4).numpy(), np.arange(4))


def test_a_device_that_is_gone_is_not_one_that_is_full(
    plugged: DeviceMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("VK_ERROR_DEVICE_LOST")

    monkeypatch.setattr(ort, "copy_tensors", fail)
    with pytest.raises(DeviceLostError, match="lost while memory for slots was allocated"):
        plugged.empty((10,), "slots")
