"""Memory of devices, as their providers report it.

onnxruntime has no call that views memory as another type; the workaround for that is here alone.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from stem_edge.graph.encoder import encode
from stem_edge.graph.ir import Graph
from stem_edge.runtime.backends.onnxruntime.memory import (
    Array,
    DeviceAccess,
    DeviceMemory,
    Host,
    Shape,
    nbytes_of,
)
from stem_edge.runtime.backends.onnxruntime.providers.names import KNOWN
from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU, Provider
from stem_edge.runtime.backends.onnxruntime.providers.session import new_session

MARK_NBYTES = 8
_marks = itertools.count(1)


class Named:
    """Memory of a provider that is built into onnxruntime, which knows the device by a name."""

    def __init__(self, device: str, device_id: int) -> None:
        self._device, self._id = device, device_id
        # A graph y = x, needed because only the output of a session can be bound to given memory.
        graph = Graph()
        graph.output(
            graph.add("Identity", [graph.input("x", np.int32, ["n"])], "y"), np.int32, ["n"]
        )
        self._viewer = new_session(encode(graph), 1, [CPU])

    def allocate(self, shape: Shape, dtype: np.dtype[Any]) -> ort.OrtValue | None:
        return ort.OrtValue.ortvalue_from_shape_and_type(
            list(shape), dtype.type, self._device, self._id
        )

    def write(self, store: ort.OrtValue, array: Array) -> None:
        store.update_inplace(array)

    def read(self, store: ort.OrtValue, array: Array) -> None:
        array[...] = store.numpy()

    def value(self, store: ort.OrtValue, dtype: np.dtype[Any], shape: Shape) -> ort.OrtValue:
        """Return a view as another type: a bound output can be fetched without a run."""
        binding = self._viewer.io_binding()
        binding.bind_output(
            "y", store.device_name(), self._id, dtype.type, list(shape), store.data_ptr()
        )
        # Not get_outputs(), because that ties the value to the viewer's session.
        return ort.OrtValue(binding.get_outputs_as_ortvaluevector()[0])


class Plugged(Named):
    """Memory of a plug-in provider, which describes it through its OrtEpDevice."""

    def __init__(self, memory_info: Any) -> None:
        super().__init__("", memory_info.device_id)
        self._info = memory_info

    def allocate(self, shape: Shape, dtype: np.dtype[Any]) -> ort.OrtValue | None:
        """Allocate an array, or return None if a mark written there does not read back.

        A provider that is out of memory may raise nothing and return memory that cannot be written.
        """
        store = ort.OrtValue.ortvalue_from_shape_and_type(
            list(shape), dtype.type, memory_info=self._info
        )
        count = min(MARK_NBYTES, nbytes_of(shape, dtype))
        start = self.value(store, np.dtype(np.uint8), (count,))
        mark = np.frombuffer(next(_marks).to_bytes(MARK_NBYTES, "little"), np.uint8)[:count]
        self.write(start, mark)
        found = np.zeros_like(mark)
        self.read(start, found)
        return store if np.array_equal(mark, found) else None

    def write(self, store: ort.OrtValue, array: Array) -> None:
        ort.copy_tensors([ort.OrtValue.ortvalue_from_numpy(array)], [store])

    def read(self, store: ort.OrtValue, array: Array) -> None:
        ort.copy_tensors([store], [ort.OrtValue.ortvalue_from_numpy(array)])


def place_of(provider: Provider) -> DeviceAccess:
    """Return where a provider's memory is."""
    for device in provider.devices:
        info = device.memory_info(ort.OrtDeviceMemoryType.DEFAULT)
        if info is not None:
            return Plugged(info)
    known = KNOWN.get(provider.name)
    if known is not None and known.memory:
        return Named(known.memory, int(provider.options.get("device_id", "0")))
    return Host()


class Pinned(NamedTuple):
    """A host array, and the value that keeps its memory alive."""

    array: Array
    owner: ort.OrtValue


def pinned(memory: DeviceMemory, shape: Shape, dtype: npt.DTypeLike) -> Pinned | None:
    """Allocate host memory that the device reads by itself; None if it cannot read any."""
    for device in memory.provider.devices if memory.kind == "device" else ():
        info = device.memory_info(ort.OrtDeviceMemoryType.HOST_ACCESSIBLE)
        if info is not None:
            value = ort.OrtValue.ortvalue_from_shape_and_type(
                list(shape), np.dtype(dtype).type, memory_info=info
            )
            array = value.numpy()
            if array.ctypes.data == value.data_ptr():  # otherwise numpy() made a copy
                return Pinned(array, value)
    return None
