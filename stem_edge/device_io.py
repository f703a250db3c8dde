"""Inputs and outputs of the graphs for devices, fp32 and fp16: stem_edge.graph_io says what they mean."""

from __future__ import annotations

from stem_edge import graph_io as io
from stem_edge.config import ModelConfig
from stem_edge.device_rows import Activations, DeviceRows, Slab
from stem_edge.graph_io import Shape, Value, Values
from stem_edge.rows import RecordLayout

FLOATS: dict[Activations, str] = {"fp32": "float32", "fp16": "float16"}
I32, I64, F32 = "int32", "int64", "float32"


def slab_name(slab: Slab) -> str:
    """Input of the graphs that a slab is."""
    return (io.row_scales if slab.scales else io.row_codes)(slab.layer)


def device_inputs(
    graph: str, config: ModelConfig, layout: RecordLayout | None, variant: Activations
) -> Values:
    """Name -> type and shape of everything that a graph takes, in no order.

    Those that decode declare rows without their shapes, which are given here all the same.
    """
    if graph == io.TOP:
        logits = Value(F32, (1, "n", config.vocab_size))
        return {io.LOGITS: logits, io.COUNT: Value(I64, (1,))}
    rows = DeviceRows(layout, variant) if layout is not None else None
    if graph == io.ROWS:
        return _rows_inputs(rows) if rows else {}
    values = _in_floats(io.graph_inputs(graph, config, layout), variant)
    if graph == io.HEAD:
        values[io.WANTED] = Value(I64, ("n",))
    slots = _slots(rows) if rows else {}
    return values | {name: slots[name] for name in values.keys() & slots.keys()}


def device_outputs(
    graph: str, config: ModelConfig, layout: RecordLayout | None, variant: Activations
) -> Values:
    """Name -> type and shape of everything that a graph gives."""
    if graph == io.TOP:
        shape: Shape = (1, "n", "count")
        return {io.TOP_LOGITS: Value(F32, shape), io.TOP_IDS: Value(I64, shape)}
    if graph == io.ROWS:
        given = device_inputs(graph, config, layout, variant)
        return {io.NEW + n: v for n, v in given.items() if n not in (io.RECORDS, io.SLOTS)}
    if graph == io.HEAD:
        return {io.LOGITS: Value(F32, (1, "n", config.vocab_size))}
    return _in_floats(io.graph_outputs(graph, config), variant)


def _in_floats(values: Values, variant: Activations) -> Values:
    """Activations in the type of a variant."""
    floats = FLOATS[variant]
    return {n: v._replace(type=floats) if v.type == F32 else v for n, v in values.items()}


def _slots(rows: DeviceRows) -> Values:
    """The inputs that hold slots, as graphs that decode take them."""
    values = {slab_name(slab): Value(slab.dtype.name, ("slots", slab.width)) for slab in rows.slabs}
    if rows.layout.quantized:
        nbytes = rows.zero_points(1).shape[1]
        values[io.ROW_ZERO_POINTS] = Value("uint8", ("slots", nbytes))
    return values


def _rows_inputs(rows: DeviceRows) -> Values:
    values = {io.RECORDS: Value(I32, ("n", rows.words)), io.SLOTS: Value(I64, ("n", 1))}
    return values | {slab_name(slab): Value(I32, ("slots", slab.words)) for slab in rows.slabs}
