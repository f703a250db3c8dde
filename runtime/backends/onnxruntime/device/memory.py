"""float32 tensors in the memory of a device, such as a GPU, on which an execution provider computes.

For providers without memory of their own, such as the CPU, these tensors are numpy arrays. Data are copied to
and from them all the same, so that tests on a CPU run the same code.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np

from stem_edge.bundle.footprint import FLOAT
from stem_edge.errors import OutOfMemoryError
from stem_edge.graph.encoder import encode
from stem_edge.graph.ir import Graph
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.costs import LESS_MEMORY
from stem_edge.runtime.backends.onnxruntime.providers import ort
from stem_edge.runtime.backends.onnxruntime.providers.errors import check_lost, reason
from stem_edge.runtime.backends.onnxruntime.providers.provider import CUDA, Provider
from stem_edge.runtime.backends.onnxruntime.providers.session import new_session, onnxruntime_errors
from stem_edge.system.memory import own_pages

Shape = tuple[int, ...]


class DeviceArray:
    """A tensor [*shape] on a device; its memory is freed when nothing refers to it any more."""

    def __init__(self, place: Host, store: Any, shape: Shape) -> None:
        self.shape, self.nbytes = shape, _nbytes(shape)
        self._place, self._store = place, store

    def write(self, array: F32) -> None:
        with onnxruntime_errors("copying to the device"):
            self._place.write(self._store, np.asarray(array, order="C"))

    def beginning(self, count: int) -> ort.OrtValue:
        """Return a view of the tensor's first `count` entries along the first axis."""
        value = self._place.value(self._store, (count, *self.shape[1:]))
        value.owner = self  # needed because views do not keep a device's memory alive
        return value


class DeviceMemory:
    """Memory of a provider's device. Not thread-safe: only an engine's thread may use it.

    limit: most bytes of all arrays together; None without a limit.

    Any thread may garbage-collect an owner of device memory while the engine's thread runs a step. Not every
    provider tolerates that, so the owner calls `retire`, and the engine's next call frees the memory.
    """

    def __init__(self, provider: Provider, limit: int | None = None) -> None:
        self.limit, self._name, self._place = limit, provider.name, _place_of(provider)
        self.shared = type(self._place) is Host  # True: arrays are in this process's memory
        self._arrays: weakref.WeakSet[DeviceArray] = weakref.WeakSet()
        self._retired: list[object] = []

    @property
    def nbytes(self) -> int:
        """Bytes that all arrays take now, including retired arrays that are not freed yet."""
        return sum(array.nbytes for array in self._arrays)

    def retire(self, owner: object) -> None:
        """Keep an object with device memory alive until the engine's next call. Thread-safe."""
        self._retired.append(owner)

    def collect(self) -> None:
        """Free the device memory of all objects passed to `retire`."""
        while self._retired:
            self._retired.pop()

    def empty(self, shape: Shape, what: str) -> DeviceArray:
        """Allocate an uninitialized array; `what` names it in errors. Raises OutOfMemoryError, DeviceLostError."""
        self.collect()
        wanted = _nbytes(shape)
        if self.limit is not None and self.nbytes + wanted > self.limit:
            raise self._full(what, wanted, f"{self.limit:,} are allowed")
        try:
            store = self._place.allocate(shape)
        except Exception as error:  # because onnxruntime's exceptions share no base class
            check_lost(error, f"while memory for {what} was allocated")
            raise self._full(what, wanted, reason(error)) from error
        array = DeviceArray(self._place, store, shape)
        self._arrays.add(array)
        return array

    def zeros(self, shape: Shape, what: str) -> DeviceArray:
        array = self.empty(shape, what)
        if not self.shared:  # pages of this process are zeros
            array.write(np.zeros(shape, np.float32))
        return array

    def _full(self, what: str, wanted: int, why: str) -> OutOfMemoryError:
        return OutOfMemoryError(
            f"no memory left on {self._name} for {what}: needs {wanted:,} bytes beside "
            f"{self.nbytes:,} in use ({why}); {LESS_MEMORY}"
        )


class Host:
    """Memory of this process; the system commits its pages when they are first written."""

    def allocate(self, shape: Shape) -> Any:
        return own_pages(shape, np.float32)

    def write(self, store: Any, array: F32) -> None:
        store[...] = array

    def value(self, store: Any, shape: Shape) -> ort.OrtValue:
        """Return a view, in this shape, of the beginning of the memory `store`."""
        return ort.OrtValue.ortvalue_from_numpy(store[: shape[0]])


class Cuda(Host):
    """Memory of a CUDA device, which onnxruntime allocates without a plug-in."""

    device_id = 0

    def __init__(self) -> None:
        # A graph y = x, needed because only the output of a session can be bound to given memory.
        graph = Graph()
        graph.input("x", np.float32, ["n"])
        graph.output(graph.add("Identity", ["x"], "y"), np.float32, ["n"])
        self._viewer = new_session(encode(graph), 1)

    def allocate(self, shape: Shape) -> ort.OrtValue:
        return ort.OrtValue.ortvalue_from_shape_and_type(list(shape), np.float32, "cuda", 0)

    def write(self, store: ort.OrtValue, array: F32) -> None:
        store.update_inplace(array)

    def value(self, store: ort.OrtValue, shape: Shape) -> ort.OrtValue:
        binding = self._viewer.io_binding()
        binding.bind_output(
            "y", store.device_name(), self.device_id, np.float32, list(shape), store.data_ptr()
        )
        # Not get_outputs(), because that ties the value to the viewer's session.
        return ort.OrtValue(binding.get_outputs_as_ortvaluevector()[0])


class Plugged(Cuda):
    """Memory of a plug-in provider's device. memory_info: onnxruntime's description of this memory."""

    def __init__(self, memory_info: Any) -> None:
        super().__init__()
        self._info, self.device_id = memory_info, memory_info.device_id

    def allocate(self, shape: Shape) -> ort.OrtValue:
        """Allocate an array. Raises MemoryError if a value written to it cannot be read back.

        If the device's memory is full, a provider may raise nothing and return an array that cannot be written.
        """
        store = ort.OrtValue.ortvalue_from_shape_and_type(
            list(shape), np.float32, memory_info=self._info
        )
        for mark in np.array([[1], [2]], np.float32):
            start, found = self.value(store, mark.shape), np.zeros_like(mark)
            self.write(start, mark)
            self.read(start, found)
            if found != mark:
                raise MemoryError("the device has no room")
        return store

    def write(self, store: ort.OrtValue, array: F32) -> None:
        ort.copy_tensors([ort.OrtValue.ortvalue_from_numpy(array)], [store])

    def read(self, store: ort.OrtValue, array: F32) -> None:
        ort.copy_tensors([store], [ort.OrtValue.ortvalue_from_numpy(array)])


def _place_of(provider: Provider) -> Host:
    for device in provider.devices:
        info = device.memory_info(ort.OrtDeviceMemoryType.DEFAULT)
        if info is not None:
            return Plugged(info)
    return Cuda() if provider.full == CUDA else Host()


def _nbytes(shape: Shape) -> int:
    return FLOAT * math.prod(shape)
