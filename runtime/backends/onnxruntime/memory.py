"""Tensors in the memory of an execution provider's device.

A provider without its own memory (the CPU, and providers that compute on it) gets numpy arrays and
the same copies, so that all code for devices runs there, too. Memory of devices is in
device/places.py.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from stem_edge.errors import OutOfMemoryError
from stem_edge.runtime.backends.interface import LESS_MEMORY, check_lost, reason
from stem_edge.runtime.backends.onnxruntime.providers.provider import Provider
from stem_edge.runtime.backends.onnxruntime.providers.session import onnxruntime_errors
from stem_edge.system.memory import own_pages

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
Kind = Literal["device", "host"]


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
        """The memory itself as an array, on a provider without its own memory."""
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


class DeviceMemory:
    """Memory of a provider's device. Not thread-safe: only an engine's thread may use it.

    place: where it is; default: memory of this process. limit: bytes that arrays may take in all,
    None if there is no limit.

    An owner of device memory may be dropped by any thread, while the engine's thread runs a step. A
    provider need not tolerate that, so the owner calls `retire`; the engine's next call frees it.
    """

    def __init__(
        self, provider: Provider, place: DeviceAccess | None = None, limit: int | None = None
    ) -> None:
        self.provider, self.limit = provider, limit
        self.arrays: weakref.WeakSet[DeviceArray] = weakref.WeakSet()  # those alive
        self.place = place or Host()
        # "host": this process's memory, because the device has no own memory.
        self.kind: Kind = "host" if isinstance(self.place, Host) else "device"
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

    def _full(self, what: str, wanted: int, why: str) -> OutOfMemoryError:
        return OutOfMemoryError(
            f"no memory left on {self.provider.name} for {what}: needs {wanted:,} bytes beside "
            f"{self.nbytes:,} in use ({why}); {LESS_MEMORY}"
        )


def nbytes_of(shape: Shape, dtype: np.dtype[Any]) -> int:
    """Return the bytes of an array."""
    return math.prod(shape) * dtype.itemsize


class DeviceAccess(Protocol):
    """Access to the memory of a device."""

    def allocate(self, shape: Shape, dtype: np.dtype[Any]) -> Any | None: ...
    def write(self, store: Any, array: Array) -> None: ...
    def read(self, store: Any, array: Array) -> None: ...
    def value(self, store: Any, dtype: np.dtype[Any], shape: Shape) -> ort.OrtValue: ...


class Host:
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
