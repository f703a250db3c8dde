"""Graphs that serve a device's memory: rows into slots, and the greatest logits of a step.

stem_edge.graph_io has their inputs and outputs; they have no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from stem_edge import graph_io as io
from stem_edge.config import ModelConfig
from stem_edge.device_io import slab_name
from stem_edge.device_rows import DeviceRows, Slab
from stem_edge.export.graph import CONTRIB, IR_VERSION, OPSET, Shape

# The sizes of so many parts lie in the graph itself, as all that its reader takes (onnx_file).
MOST_PARTS = 64


def rows_graph(rows: DeviceRows) -> onnx.ModelProto:
    """records [n, words] and slots [n, 1] -> every slab [slots, words] with these in place."""
    nodes, tensors = _parts(rows.slabs)
    words = TensorProto.INT32
    inputs = [
        helper.make_tensor_value_info(io.RECORDS, words, ["n", rows.words]),
        helper.make_tensor_value_info(io.SLOTS, TensorProto.INT64, ["n", 1]),
    ]
    outputs = []
    for slab in rows.slabs:
        name = slab_name(slab)
        shape: Shape = ["slots", slab.words]
        inputs.append(helper.make_tensor_value_info(name, words, shape))
        outputs.append(helper.make_tensor_value_info(io.NEW + name, words, shape))
        nodes.append(_node("ScatterND", [name, io.SLOTS, _part(slab)], [io.NEW + name]))
    return _model(helper.make_graph(nodes, "rows", inputs, outputs, tensors))


def top_graph(config: ModelConfig) -> onnx.ModelProto:
    """logits [1, n, V] and count [1] -> top_logits and top_ids [1, n, count], the greatest first."""
    inputs = [
        helper.make_tensor_value_info(io.LOGITS, TensorProto.FLOAT, [1, "n", config.vocab_size]),
        helper.make_tensor_value_info(io.COUNT, TensorProto.INT64, [1]),
    ]
    shape: Shape = [1, "n", "count"]
    outputs = [
        helper.make_tensor_value_info(io.TOP_LOGITS, TensorProto.FLOAT, shape),
        helper.make_tensor_value_info(io.TOP_IDS, TensorProto.INT64, shape),
    ]
    node = _node("TopK", [io.LOGITS, io.COUNT], [io.TOP_LOGITS, io.TOP_IDS])
    return _model(helper.make_graph([node], "top", inputs, outputs))


def _part(slab: Slab) -> str:
    return f"{io.RECORDS}.{slab_name(slab)}"


def _parts(slabs: Sequence[Slab]) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    """Nodes that cut records into what belongs to each slab, some at a time."""
    nodes, tensors, rest = [], [], io.RECORDS
    for start in range(0, len(slabs), MOST_PARTS):
        some, others = slabs[start : start + MOST_PARTS], slabs[start + MOST_PARTS :]
        names, words = [_part(slab) for slab in some], [slab.words for slab in some]
        source, sizes = rest, f"sizes.{start}"
        if others:
            rest = f"rest.{start}"
            names, words = [*names, rest], [*words, sum(slab.words for slab in others)]
        tensors.append(numpy_helper.from_array(np.array(words, np.int64), sizes))
        nodes.append(_node("Split", [source, sizes], names, axis=1))
    return nodes, tensors


def _node(
    operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any
) -> onnx.NodeProto:
    return helper.make_node(operator, inputs, outputs, name=outputs[0], **attributes)


def _model(graph: onnx.GraphProto) -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
    return helper.make_model(
        graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="stem-edge"
    )
