"""What each graph of a bundle must be: its inputs and outputs, its operators, and how many of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from stem_edge import graph_io as io
from stem_edge import onnx_device, onnx_portable
from stem_edge.bundle import Manifest
from stem_edge.device_io import FLOATS, device_inputs, device_outputs
from stem_edge.graph_io import Values, Variant
from stem_edge.onnx_operators import OPERATORS, OPSETS, Operator
from stem_edge.onnx_rules import F32
from stem_edge.portable_io import portable_inputs, portable_outputs

# Of all that is exported, a layer for prompts has the most operators: 70; in ONNX's own, 105.
NODES_OF_LAYER, NODES_BESIDE_LAYERS = 96, 16
NODES_OF_PORTABLE_LAYER, NODES_BESIDE_PORTABLE_LAYERS = 160, 48
# A great head is in pieces of no fewer values (stem_edge.export.linear), each with its own.
PIECE_VALUES = 1 << 24
NODES_OF_PIECE, NODES_OF_PORTABLE_PIECE = 2, 8


class Expected(NamedTuple):
    """What is known of a graph before it is read."""

    inputs: Values  # with the shapes that the runtime gives them
    declared: Values  # as the graph says
    outputs: Values
    reserved: set[str]  # names of inputs, this graph's and others'
    operators: Mapping[tuple[str, str], Operator]
    opsets: dict[str, int]
    nodes: int  # at most
    floats: str = F32  # type of activations


def expected(graph: str, variant: Variant | None, manifest: Manifest) -> Expected:
    """Of one graph of a bundle, or of a variant of it."""
    model, layout = manifest.model, manifest.tables
    nodes = _nodes(graph, variant, manifest)
    if variant is None:
        names = [io.EMBED, io.PREFILL, graph]
        takes = {name: io.graph_inputs(name, model, layout) for name in names}
        gives = io.graph_outputs(graph, model)
        return _expected(graph, takes, gives, OPERATORS, OPSETS, nodes)
    # Logits are an input of one graph alone, and what the head gives.
    every = io.variant_graphs(model, variant)
    names = [name for name in every if (name == io.TOP) == (graph == io.TOP)]
    if variant == "portable":
        takes = {name: portable_inputs(name, model, layout) for name in names}
        gives = portable_outputs(graph, model)
        known, opsets = onnx_portable.OPERATORS, onnx_portable.OPSETS
        return _expected(graph, takes, gives, known, opsets, nodes)
    takes = {name: device_inputs(name, model, layout, variant) for name in names}
    gives = device_outputs(graph, model, layout, variant)
    operators = onnx_device.SERVING.get(graph, onnx_device.OPERATORS)
    made = _expected(graph, takes, gives, operators, OPSETS, nodes)
    return made._replace(floats=FLOATS[variant])


def _expected(
    graph: str,
    takes: dict[str, Values],
    gives: Values,
    operators: Mapping[tuple[str, str], Operator],
    opsets: dict[str, int],
    nodes: int,
) -> Expected:
    inputs = takes[graph]
    # Shape inference of GatherBlockQuantized refuses a symbolic number of slots.
    declared = {
        name: value._replace(shape=None)
        if "slots" in (value.shape or ()) and graph != io.ROWS
        else value
        for name, value in inputs.items()
    }
    reserved = {name for values in takes.values() for name in values}
    return Expected(inputs, declared, gives, reserved, operators, opsets, nodes)


def _nodes(graph: str, variant: Variant | None, manifest: Manifest) -> int:
    """All results of a step may be in memory at once, so their number is part of the memory plan."""
    model = manifest.model
    every = dict.fromkeys((io.PREFILL, io.ROWS), range(model.n_layers))
    layers = len((io.layer_graphs(model) | every).get(graph, ()))
    pieces = model.vocab_size * model.dim // PIECE_VALUES if graph == io.HEAD else 0
    if variant == "portable":
        beside = NODES_BESIDE_PORTABLE_LAYERS + NODES_OF_PORTABLE_PIECE * pieces
        return beside + NODES_OF_PORTABLE_LAYER * layers
    return NODES_BESIDE_LAYERS + NODES_OF_PIECE * pieces + NODES_OF_LAYER * layers
