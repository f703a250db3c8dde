"""Emits an ONNX graph node by node, its weights streamed to one external data file.

Opset 21 and IR 10 are pinned: the onnx package's own default is newer than what onnxruntime reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from stem_edge.export.files import BundleFile

OPSET = 21
IR_VERSION = 10
CONTRIB = "com.microsoft"
# Large weights are mapped in place, in units of up to 64 KiB; small ones are copied anyway and need
# only a cache line.
LARGE_NBYTES = 1 << 20
LARGE_ALIGNMENT = 1 << 16
SMALL_ALIGNMENT = 64
# Smaller tensors lie in the graph itself, where shape inference can see them.
INLINE_NBYTES = 256

ELEMENT_TYPES = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.float16): TensorProto.FLOAT16,
    np.dtype(np.uint8): TensorProto.UINT8,
    np.dtype(np.int8): TensorProto.INT8,
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(np.int64): TensorProto.INT64,
}
Array = npt.NDArray[Any]
Shape = Sequence[int | str]


class Graph:
    """A graph under construction. Values are referred to by their names."""

    def __init__(self, data: BundleFile, data_name: str) -> None:
        self._data, self._data_name = data, data_name
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, dtype: npt.DTypeLike, shape: Shape | None) -> str:
        """Declare a graph input; returns its name."""
        self._inputs.append(_value(name, dtype, shape))
        return name

    def output(self, name: str, dtype: npt.DTypeLike, shape: Shape) -> str:
        """Declare a graph output; returns its name."""
        self._outputs.append(_value(name, dtype, shape))
        return name

    def node(
        self,
        op: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        domain: str = "",
        **attributes: Any,
    ) -> str:
        """Add a node named after its first output; returns that output."""
        self._nodes.append(
            helper.make_node(
                op, list(inputs), list(outputs), name=outputs[0], domain=domain, **attributes
            )
        )
        return outputs[0]

    def fill(self, shape: str, output: str, value: Array) -> str:
        """Add a node that fills a tensor of this shape with one value; returns its output."""
        kind = ELEMENT_TYPES[value.dtype]
        tensor = helper.make_tensor("value", kind, [1], value.tolist())
        return self.node("ConstantOfShape", [shape], [output], value=tensor)

    def constant(self, name: str, array: Array) -> str:
        """Add a weight that is whole in memory; returns its name."""
        return self.stream(name, array.dtype, array.shape, [array])

    def stream(
        self, name: str, dtype: npt.DTypeLike, shape: Sequence[int], pieces: Iterable[Array]
    ) -> str:
        """Add a weight whose bytes arrive in pieces, in C order; returns its name."""
        kind = np.dtype(dtype)
        tensor = TensorProto(name=name, data_type=ELEMENT_TYPES[kind], dims=shape)
        nbytes = int(np.prod(shape)) * kind.itemsize
        if nbytes <= INLINE_NBYTES:
            tensor.raw_data = b"".join(piece.tobytes() for piece in pieces)
        else:
            large = nbytes >= LARGE_NBYTES
            offset = self._data.align(LARGE_ALIGNMENT if large else SMALL_ALIGNMENT)
            for piece in pieces:
                self._data.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
            _point_to(tensor, self._data_name, offset, self._data.nbytes - offset)
        self._initializers.append(tensor)
        return name

    def serialize(self) -> bytes:
        """The checked model as bytes; equal graphs give equal bytes."""
        graph = helper.make_graph(
            self._nodes, "backbone", self._inputs, self._outputs, self._initializers
        )
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)],
            ir_version=IR_VERSION,
            producer_name="stem-edge",
        )
        return bytes(model.SerializeToString(deterministic=True))


def _value(name: str, dtype: npt.DTypeLike, shape: Shape | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, ELEMENT_TYPES[np.dtype(dtype)], shape)


def _point_to(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
