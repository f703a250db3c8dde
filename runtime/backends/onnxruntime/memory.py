"""Tensors in the memory of an execution provider's device.

A provider reports where its memory is. One without its own (the CPU, and providers that compute on
it) gets numpy arrays and the same copies, so that whatever runs on a device runs there, too.

onnxruntime has no call that views memory as another type; the workaround for that is here alone.
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
    """A tensor [*shape] on a device; its memory is freed when nothing refers to it any more."""

    def __init__(
        self, memory: DeviceMemory, store: Any, shape: Shape, dtype: npt.DTypeLike
    ) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.nbytes = nbytes_of(shape, self.dtype)
        self._place, self._store = memory.place, store
        memory.arrays.add(self)

    @property
    def host(self) -> Array:
        """The memory itself as an array, on a provider that has none of its own."""
        if not isinstance(self._store, np.ndarray):
            raise TypeError("this memory is a device's")
        return self._store

    def write(self, array: Array) -> None:
        """Copy an array of the same shape and type to the device."""
        if array.shape != self.shape or array.dtype != self.dtype:
            raise ValueError(
                f"array is {array.dtype} {array.shape}; expected {self.dtype} {self.shape}"
            )
        with onnxruntime_errors("copying to the device"):
            self._place.write(self._store, np.asarray(array, order="C"))

    def read(self) -> Array:
        """Return a copy on the host."""
        array = np.empty(self.shape, self.dtype)
        with onnxruntime_errors("copying from the device"):
            self._place.read(self._store, array)
        return array

    def value(self, dtype: npt.DTypeLike | None = None, shape: Shape | None = None) -> ort.OrtValue:
        """Return a view of this memory, also as another type and shape of as many bytes."""
        wanted = self.dtype if dtype is None else np.dtype(dtype)
        shape = self.shape if shape is None else shape
        if nbytes_of(shape, wanted) != self.nbytes:
            raise ValueError(f"cannot view {self.dtype} {self.shape} as {wanted} {shape}")
        return self._view(wanted, shape)

    def beginning(self, count: int) -> ort.OrtValue:
        """Return a view of the first `count` along the first axis."""
        if not 0 < count <= self.shape[0]:
            raise ValueError(f"cannot view the first {count} of {self.shape}")
        return self._view(self.dtype, (count, *self.shape[1:]))

    def _view(self, dtype: np.dtype[Any], shape: Shape) -> ort.OrtValue:
        value = self._place.value(self._store, dtype, shape)
        value.owner = self  # needed because views do not keep a device's memory alive
        return value


class Pinned(NamedTuple):
    """A host array, and the value that keeps its memory alive."""

    array: Array
    owner: ort.OrtValue


class DeviceMemory:
    """Memory of a provider's device. Not thread-safe: only an engine's thread may use it.

    limit: bytes that arrays may take in all, None if there is no limit.

    An owner of device memory may be dropped by any thread, while the engine's thread runs a step. A
    provider need not tolerate that, so the owner calls `retire`; the engine's next call frees it.
    """

    def __init__(self, provider: Provider, limit: int | None = None) -> None:
        self.provider, self.limit = provider, limit
        self.arrays: weakref.WeakSet[DeviceArray] = weakref.WeakSet()  # those alive
        self.place = _find_place(provider)
        # "host": memory of this process, because the device has none of its own.
        self.kind: Kind = "host" if isinstance(self.place, _Host) else "device"
        self._retired: list[object] = []

    @property
    def nbytes(self) -> int:
        """Bytes that arrays take now, with retired ones."""
        return sum(array.nbytes for array in self.arrays)

    def retire(self, owner: object) -> None:
        """Keep an owner until the engine's next call, unless on the CPU; safe in any thread."""
        if self.kind == "device" or not self.provider.on_cpu:
            self._retired.append(owner)

    def collect(self) -> None:
        """Free retired owners."""
        while self._retired:
            self._retired.pop()

    def empty(self, shape: Shape, dtype: npt.DTypeLike, what: str) -> DeviceArray:
        """Allocate an uninitialized array for `what`. Raises OutOfMemoryError, DeviceLostError."""
        self.collect()
        dtype = np.dtype(dtype)
        wanted = nbytes_of(shape, dtype)
        if self.limit is not None and self.nbytes + wanted > self.limit:
            raise self._full(what, wanted, f"{self.limit:,} are allowed")
        try:
            store = self.place.allocate(shape, dtype)
        except Exception as error:  # because onnxruntime's exceptions share no base class
            check_lost(error, f"while memory for {what} was allocated")
            raise self._full(what, wanted, reason(error)) from error
        if store is None:
            raise self._full(what, wanted, "the device has no room")
        return DeviceArray(self, store, shape, dtype)

    def put(self, array: Array, what: str) -> DeviceArray:
        """Copy an array to the device. Raises OutOfMemoryError, DeviceLostError."""
        copy = self.empty(array.shape, array.dtype, what)
        copy.write(array)
        return copy

    def pinned(self, shape: Shape, dtype: npt.DTypeLike) -> Pinned | None:
        """Allocate host memory that the device reads by itself; None if it reads none."""
        for device in self.provider.devices if self.kind == "device" else ():
            info = device.memory_info(ort.OrtDeviceMemoryType.HOST_ACCESSIBLE)
            if info is not None:
                value = ort.OrtValue.ortvalue_from_shape_and_type(
                    list(shape), np.dtype(dtype).type, memory_info=info
                )
                array = value.numpy()
                if array.ctypes.data == value.data_ptr():  # otherwise numpy() made a copy
                    return Pinned(array, value)
        return None

    def _full(self, what: str, wanted: int, why: str) -> OutOfMemoryError:
        return OutOfMemoryError(
            f"no memory left on {self.provider.name} for {what}: needs {wanted:,} bytes beside "
            f"{self.nbytes:,} in use ({why}); {LESS_MEMORY}"
        )


def nbytes_of(shape: Shape, dtype: np.dtype[Any]) -> int:
    """Return the bytes of an array."""
    return math.prod(shape) * dtype.itemsize


class _Place(Protocol):
    """Access to the memory of a device."""

    def allocate(self, shape: Shape, dtype: np.dtype[Any]) -> Any | None: ...
    def write(self, store: Any, array: Array) -> None: ...
    def read(self, store: Any, array: Array) -> None: ...
    def value(self, store: Any, dtype: np.dtype[Any], shape: Shape) -> ort.OrtValue: ...


class _Host:
    """Memory of this process; the system provides its pages as they are written."""

    def allocate(self, shape: Shape, dtype: np.dtype[Any]) -> Array:
        return own_pages(shape, dtype.type)

    def write(self, store: Array, array: Array) -> None:
        store[...] = array

    def read(self, store: Array, array: Array) -> None:
        array[...] = store

    def value(self, store: Array, dtype: np.dtype[Any], shape: Shape) -> ort.OrtValue:
        values = store.reshape(-1).view(dtype)[: math.prod(shape)]
        return ort.OrtValue.ortvalue_from_numpy(values.reshape(shape))


class _Named:
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


class _Plugged(_Named):
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


def _find_place(provider: Provider) -> _Place:
    for device in provider.devices:
        info = device.memory_info(ort.OrtDeviceMemoryType.DEFAULT)
        if info is not None:
            return _Plugged(info)
    known = KNOWN.get(provider.name)
    if known is not None and known.memory:
        return _Named(known.memory, int(provider.options.get("device_id", "0")))
    return _Host()
