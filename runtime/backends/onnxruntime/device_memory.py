"""Tensors in the memory of an execution provider's device.

A provider says itself where its memory is. One that has none of its own (the CPU, and providers that
compute on it) gets numpy arrays, which are copied to and from all the same: what runs on a device
runs there, too, only not faster.

What onnxruntime has no call for, a view of memory as another type, is in this file alone.
"""

from __future__ import annotations

import itertools
import math
import weakref
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from stem_edge.errors import OutOfMemoryError
from stem_edge.graph.encoder import encode
from stem_edge.graph.ir import Graph
from stem_edge.runtime.backends.interface import LESS_MEMORY, check_lost, reason
from stem_edge.runtime.backends.onnxruntime.providers.names import KNOWN
from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU, Provider
from stem_edge.runtime.backends.onnxruntime.providers.session import new_session, onnxruntime_errors
from stem_edge.system.memory import own_pages

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
Kind = Literal["device", "host"]
MARK_NBYTES = 8
_marks = itertools.count(1)


class DeviceArray:
    """A tensor [*shape] on a device, whose memory is free when nothing refers to it any more."""

    def __init__(
        self, memory: DeviceMemory, store: Any, shape: Shape, dtype: npt.DTypeLike
    ) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.nbytes = nbytes_of(shape, self.dtype)
        self._place, self._store = memory.place, store
        memory.arrays.add(self)

    def write(self, array: Array) -> None:
        """Copy an array of the same shape and type to the device."""
        if array.shape != self.shape or array.dtype != self.dtype:
            raise ValueError(f"{array.dtype} {array.shape} into {self.dtype} {self.shape}")
        with onnxruntime_errors("copying to the device"):
            self._place.write(self._store, np.asarray(array, order="C"))

    def read(self) -> Array:
        """A copy on the host."""
        array = np.empty(self.shape, self.dtype)
        with onnxruntime_errors("copying from the device"):
            self._place.read(self._store, array)
        return array

    def value(self, dtype: npt.DTypeLike | None = None, shape: Shape | None = None) -> ort.OrtValue:
        """This memory, as it is or as another type and shape: nothing is copied."""
        wanted = self.dtype if dtype is None else np.dtype(dtype)
        shape = self.shape if shape is None else shape
        if nbytes_of(shape, wanted) != self.nbytes:
            raise ValueError(f"{self.dtype} {self.shape} as {wanted} {shape}")
        value = self._place.value(self._store, wanted, shape)
        value.owner = self  # views of a device's memory do not keep it alive by themselves
        return value


class Pinned(NamedTuple):
    """An array, and what keeps its memory."""

    array: Array
    owner: ort.OrtValue


class DeviceMemory:
    """Memory of one provider's device. Not thread-safe: an engine's thread has it to itself.

    limit: bytes that arrays may take in all, if that is bounded.

    What is on a device may be dropped in the midst of another thread's step, which a provider need
    not stand: whoever may be dropped like this retires it, and it goes with the next call here.
    """

    def __init__(self, provider: Provider, limit: int | None = None) -> None:
        self.provider, self.limit = provider, limit
        self.arrays: weakref.WeakSet[DeviceArray] = weakref.WeakSet()  # all that are alive
        self.place = _find_place(provider)
        # Whose memory it is: the device's own, or this process's.
        self.kind: Kind = "host" if isinstance(self.place, _Host) else "device"
        self._retired: list[object] = []

    @property
    def nbytes(self) -> int:
        """Bytes that arrays hold now, retired ones included."""
        return sum(array.nbytes for array in self.arrays)

    def retire(self, owner: object) -> None:
        """Keep this, unless it is the CPU's, until the engine's thread comes by; safe in any thread."""
        if self.kind == "device" or not self.provider.on_cpu:
            self._retired.append(owner)

    def collect(self) -> None:
        """Free what was retired."""
        while self._retired:
            self._retired.pop()

    def empty(self, shape: Shape, dtype: npt.DTypeLike, what: str) -> DeviceArray:
        """An array of anything. Raises OutOfMemoryError that says it was for `what`, DeviceLostError."""
        self.collect()
        dtype = np.dtype(dtype)
        wanted = nbytes_of(shape, dtype)
        if self.limit is not None and self.nbytes + wanted > self.limit:
            raise self._full(what, wanted, f"{self.limit:,} are allowed")
        try:
            store = self.place.allocate(shape, dtype)
        except Exception as error:  # onnxruntime raises classes of its own that share no base
            check_lost(error, f"while memory for {what} was taken")
            raise self._full(what, wanted, reason(error)) from error
        if store is None:
            raise self._full(what, wanted, "the device has no room")
        return DeviceArray(self, store, shape, dtype)

    def put(self, array: Array, what: str) -> DeviceArray:
        """A copy of an array. Raises OutOfMemoryError."""
        copy = self.empty(array.shape, array.dtype, what)
        copy.write(array)
        return copy

    def pinned(self, shape: Shape, dtype: npt.DTypeLike) -> Pinned | None:
        """Memory of the host that the device reads by itself, if it has such. Raises MemoryError."""
        for device in self.provider.devices if self.kind == "device" else ():
            info = device.memory_info(ort.OrtDeviceMemoryType.HOST_ACCESSIBLE)
            if info is not None:
                value = ort.OrtValue.ortvalue_from_shape_and_type(
                    list(shape), np.dtype(dtype).type, memory_info=info
                )
                array = value.numpy()
                if array.ctypes.data == value.data_ptr():  # else it is a copy
                    return Pinned(array, value)
        return None

    def _full(self, what: str, wanted: int, why: str) -> OutOfMemoryError:
        return OutOfMemoryError(
            f"no memory left on {self.provider.name} for {what}: {wanted:,} bytes beside "
            f"{self.nbytes:,} that are taken ({why}); {LESS_MEMORY}"
        )


def nbytes_of(shape: Shape, dtype: np.dtype[Any]) -> int:
    """Bytes of an array."""
    return math.prod(shape) * dtype.itemsize


class _Place(Protocol):
    """Where memory is, and how one gets at it."""

    def allocate(self, shape: Shape, dtype: np.dtype[Any]) -> Any | None: ...
    def write(self, store: Any, array: Array) -> None: ...
    def read(self, store: Any, array: Array) -> None: ...
    def value(self, store: Any, dtype: np.dtype[Any], shape: Shape) -> ort.OrtValue: ...


class _Host:
    """This process's memory, whose pages come as they are written."""

    def allocate(self, shape: Shape, dtype: np.dtype[Any]) -> Array:
        return own_pages(shape, dtype.type)

    def write(self, store: Array, array: Array) -> None:
        store[...] = array

    def read(self, store: Array, array: Array) -> None:
        array[...] = store

    def value(self, store: Array, dtype: np.dtype[Any], shape: Shape) -> ort.OrtValue:
        return ort.OrtValue.ortvalue_from_numpy(store.reshape(-1).view(dtype).reshape(shape))


class _Named:
    """Of a provider inside onnxruntime."""

    def __init__(self, device: str, device_id: int) -> None:
        self._device, self._id = device, device_id
        # A graph y = x: only something that has an output can be told that its output is in given
        # memory.
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
        """The same memory as another type: an output that is bound there can be had unrun."""
        binding = self._viewer.io_binding()
        binding.bind_output(
            "y", store.device_name(), self._id, dtype.type, list(shape), store.data_ptr()
        )
        # Not get_outputs(), which would say that the value belongs to the session of the viewer.
        return ort.OrtValue(binding.get_outputs_as_ortvaluevector()[0])


class _Plugged(_Named):
    """Of a provider that says through its OrtEpDevice where its memory is."""

    def __init__(self, memory_info: Any) -> None:
        super().__init__("", memory_info.device_id)
        self._info = memory_info

    def allocate(self, shape: Shape, dtype: np.dtype[Any]) -> ort.OrtValue | None:
        """None where there is no room: a provider may give what cannot be written to, unasked."""
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


def _find_place(provider: Provider) -> _Place:
    for device in provider.devices:
        info = device.memory_info(ort.OrtDeviceMemoryType.DEFAULT)
        if info is not None:
            return _Plugged(info)
    known = KNOWN.get(provider.name)
    if known is not None and known.memory:
        return _Named(known.memory, int(provider.options.get("device_id", "0")))
    return _Host()
