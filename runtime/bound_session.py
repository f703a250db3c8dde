"""A session, and what its inputs and outputs are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from stem_edge.runtime.device_memory import DeviceArray, Shape, device_errors


class View(NamedTuple):
    """Memory of a device as a graph sees it; None: as it is."""

    array: DeviceArray
    dtype: npt.DTypeLike | None = None
    shape: Shape | None = None


class BoundSession:
    """Runs a graph over memory that is bound once, and over small arrays of the host."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session, self._binding = session, session.io_binding()
        self.inputs = {value.name for value in session.get_inputs()}
        self.outputs = {value.name for value in session.get_outputs()}
        self._kept: dict[str, View | ort.OrtValue] = {}  # alive what the binding points to

    def bind(self, views: Mapping[str, View]) -> None:
        """Bind those that this graph has, in place of what was bound to the same names."""
        for name, view in views.items():
            if name in self.inputs:
                view.array.bind_input(self._binding, name, view.dtype, view.shape)
            elif name in self.outputs:
                view.array.bind_output(self._binding, name, view.dtype, view.shape)
            else:
                continue
            self._kept[name] = view

    def feed(self, arrays: Mapping[str, npt.NDArray[Any]], doing: str) -> None:
        """Copy arrays to those inputs that this graph has.

        Every time anew: an input on a device is copied when it is bound, and only then.
        """
        with device_errors(doing):
            for name, array in arrays.items():
                if name in self.inputs:
                    # Of a scalar, ascontiguousarray would make a list.
                    value = ort.OrtValue.ortvalue_from_numpy(np.asarray(array, order="C"))
                    self._binding.bind_ortvalue_input(name, value)
                    self._kept[name] = value

    def give(self, name: str, array: npt.NDArray[Any]) -> None:
        """Copy an output to an array of the host whenever the graph has run."""
        value = ort.OrtValue.ortvalue_from_numpy(array)
        self._binding.bind_ortvalue_output(name, value)
        self._kept[name] = value

    def unbind(self) -> None:
        """Let go of all memory; nothing can be run before it is bound again."""
        self._binding.clear_binding_inputs()
        self._binding.clear_binding_outputs()
        self._kept.clear()

    def run(self, doing: str) -> None:
        """Raises OutOfMemoryError, DeviceLostError, BackendError: what went wrong `doing` what."""
        with device_errors(doing):
            self._session.run_with_iobinding(self._binding)
