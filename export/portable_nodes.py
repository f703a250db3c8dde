"""Nodes and small constants of a graph of ONNX's own operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

Attributes = dict[str, Any]


class Nodes:
    """Nodes in the order in which they were added, and the tensors that they take."""

    def __init__(self) -> None:
        self.made: list[onnx.NodeProto] = []
        self.tensors: dict[str, onnx.TensorProto] = {}

    def add(self, operator: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """A node of one output, which names it; returns that."""
        self.made.append(helper.make_node(operator, inputs, [output], name=output, **attributes))
        return output

    def sizes(self, values: Sequence[int]) -> str:
        """A constant list of sizes, the same for all who ask for these."""
        return self._constant("sizes." + ".".join(map(str, values)), np.array(values, np.int64))

    def float(self, value: float) -> str:
        """A constant float32."""
        return self._constant(f"float.{value!r}", np.array(value, np.float32))

    def reshape(self, x: str, sizes: Sequence[int], output: str) -> str:
        """The same values in another shape; 0 is the size that was there."""
        return self.add("Reshape", [x, self.sizes(sizes)], output)

    def cut(self, x: str, start: int, stop: int, step: int, output: str) -> str:
        """A part of the last axis."""
        bounds = [self.sizes([number]) for number in (start, stop, -1, step)]
        return self.add("Slice", [x, *bounds], output)

    def _constant(self, name: str, array: np.ndarray[Any, Any]) -> str:
        self.tensors.setdefault(name, numpy_helper.from_array(array, name))
        return name
