"""ONNX graphs under construction: their nodes, tensors, inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from stem_edge.errors import ExportError

CONTRIB = "com.microsoft"  # the domain of onnxruntime's own operators

Array: TypeAlias = npt.NDArray[Any]
Shape: TypeAlias = Sequence[int | str]  # sizes that depend on the step are names


class GraphError(ExportError, ValueError):
    """Raised if a model cannot be built as a graph in the requested format."""


class ElementType(IntEnum):
    """Element types, numbered as TensorProto.DataType of ONNX."""

    FLOAT = 1
    UINT8 = 2
    INT8 = 3
    INT32 = 6
    INT64 = 7
    FLOAT16 = 10
    UINT4 = 21

    @classmethod
    def of(cls, dtype: npt.DTypeLike) -> ElementType:
        return _BY_DTYPE[np.dtype(dtype)]

    @property
    def bits(self) -> int:
        return 4 if self is ElementType.UINT4 else 8 * _DTYPES[self].itemsize


_DTYPES: dict[ElementType, np.dtype[Any]] = {
    ElementType.FLOAT: np.dtype(np.float32),
    ElementType.UINT8: np.dtype(np.uint8),
    ElementType.INT8: np.dtype(np.int8),
    ElementType.INT32: np.dtype(np.int32),
    ElementType.INT64: np.dtype(np.int64),
    ElementType.FLOAT16: np.dtype(np.float16),
}
_BY_DTYPE: dict[np.dtype[Any], ElementType] = {dtype: kind for kind, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Tensor:
    """Constant of a graph; its values are in the graph, or at an offset in a weight file.

    packed: where onnxruntime finds a copy that is arranged for the processor, in its own notation.
    parts: tensors in several files; their bytes, one after another, are the values.
    """

    name: str
    type: ElementType
    dims: tuple[int, ...]
    data: bytes | None = None  # None: the values are in `file`
    file: str = ""
    offset: int = 0  # bytes
    packed: str = ""
    parts: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        return prod(self.dims) * self.type.bits // 8


Attribute: TypeAlias = int | float | tuple[int, ...] | str | Tensor


@dataclass
class Node:
    """Application of an operator, named after its first output."""

    op: str
    inputs: list[str]
    outputs: list[str]
    domain: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)  # name -> Attribute


@dataclass(frozen=True)
class ValueInfo:
    """Type and shape of a graph's input or output; a shape of None is not declared."""

    type: ElementType
    shape: tuple[int | str, ...] | None


@dataclass
class Graph:
    """Graph under construction. Methods take and return names of values, such as node outputs."""

    inputs: dict[str, ValueInfo] = field(default_factory=dict)
    outputs: dict[str, ValueInfo] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    sequences: int | str = 1  # batch size B, the first axis of most inputs and outputs

    def input(self, name: str, dtype: npt.DTypeLike, shape: Shape | None) -> str:
        self.inputs[name] = _value(dtype, shape)
        return name

    def output(self, name: str, dtype: npt.DTypeLike, shape: Shape | None) -> str:
        self.outputs[name] = _value(dtype, shape)
        return name

    def node(
        self,
        op: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        domain: str = "",
        **attributes: Attribute,
    ) -> str:
        """Add a node and return the name of its first output."""
        self.nodes.append(Node(op, list(inputs), list(outputs), domain, attributes))
        return outputs[0]

    def add(self, op: str, inputs: Sequence[str], output: str, **attributes: Attribute) -> str:
        """Add a node of a standard ONNX operator with one output; return `output`."""
        return self.node(op, inputs, [output], "", **attributes)

    def fill(self, shape: str, output: str, value: Array) -> str:
        """Add the tensor `output` of shape `shape` (a graph value), filled with `value` [1]."""
        return self.add("ConstantOfShape", [shape], output, value=inline("value", value))

    def constant(self, name: str, array: Array) -> str:
        """Add an inline constant, unless the graph has one of this name; return the name."""
        self.tensors.setdefault(name, inline(name, array))
        return name

    def weight(self, tensor: Tensor) -> str:
        self.tensors[tensor.name] = tensor
        return tensor.name

    def sizes(self, values: Sequence[int]) -> str:
        """Add an int64 constant [n] and return its name; equal values share one constant."""
        return self.constant("sizes." + ".".join(map(str, values)), np.array(values, np.int64))

    def float(self, value: float) -> str:
        """Add a float32 scalar as a constant and return its name."""
        return self.constant(f"float.{value!r}", np.array(value, np.float32))

    def reshape(self, x: str, sizes: Sequence[int], output: str) -> str:
        """Add a Reshape of x; a size of 0 stands for x's own size on that axis."""
        return self.add("Reshape", [x, self.sizes(sizes)], output)

    def cut(self, x: str, start: int, stop: int, step: int, output: str) -> str:
        """Add x[..., start:stop:step], a slice on the last axis, as the value `output`."""
        bounds = [self.sizes([number]) for number in (start, stop, -1, step)]
        return self.add("Slice", [x, *bounds], output)


def inline(name: str, array: Array) -> Tensor:
    """Return a tensor whose values are stored in the graph itself, in little-endian order."""
    array = np.ascontiguousarray(array).reshape(array.shape)
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return Tensor(name, ElementType.of(array.dtype), array.shape, little.tobytes())


def _value(dtype: npt.DTypeLike, shape: Shape | None) -> ValueInfo:
    return ValueInfo(ElementType.of(dtype), None if shape is None else tuple(shape))
