"""Layers that borrow keys and values, for kernels of attention that always add some.

On the CPU they add none, which WebGPU's kernel computes wrongly without an error. Here each adds those
that its lender has added for the same positions, once more to the same places.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.graph import names as io
from stem_edge.graph.device.portable_attention import ATTENTION, projected
from stem_edge.graph.ir import Graph, Node


def lent_values(config: ModelConfig) -> dict[str, int]:
    """Map inputs with the K and V that layers borrow to their values of a token."""
    lenders = {layer.kv_layer: layer for layer in config.layers[config.own_kv_layers :]}
    return {
        f"{io.LENT}{name}{number}": layer.n_kv_heads * io.head_width(layer)
        for number, layer in lenders.items()
        for name in (io.KEYS, io.VALUES)
    }


def lend(graphs: Mapping[str, Graph], config: ModelConfig) -> None:
    """Pass the keys and values of a step from the layers that lend them to those that borrow."""
    for name in io.layer_graphs(config):
        graph = graphs[name]
        for node in [node for node in graph.nodes if node.op == ATTENTION]:
            if name == io.REST:
                _borrow(graph, node, config)
            else:
                _give(graph, node, config)


def _give(graph: Graph, node: Node, config: ModelConfig) -> None:
    """Emit what a layer adds, if another borrows it: lent_keys.<l> [B, T, kv heads * width]."""
    number, lent = int(node.outputs[0].split(".")[1]), lent_values(config)
    names = [f"{io.LENT}{name}{number}" for name in (io.KEYS, io.VALUES)]
    if names[0] not in lent:
        return
    _, *added = projected(graph, node, config, number)
    for name, value in zip(names, added, strict=True):
        output = graph.add("Identity", [value], io.NEW + name)
        graph.output(output, np.float32, [graph.sequences, "T", lent[name]])


def _borrow(graph: Graph, node: Node, config: ModelConfig) -> None:
    """Have a layer add what its lender has added."""
    layer = int(node.outputs[0].split(".")[1])
    for at, name in enumerate((io.KEYS, io.VALUES)):
        cache, output = node.inputs[3 + at], f"{io.NEW}{name}{layer}"
        node.inputs[1 + at] = _wanted(graph, io.LENT + cache, config)
        node.outputs.append(output)
        graph.outputs[output] = graph.inputs[cache]


def _wanted(graph: Graph, name: str, config: ModelConfig) -> str:
    """Emit the wanted positions of an input, before all that takes them."""
    result = f"wanted.{name}"
    if name not in graph.inputs:
        graph.input(name, np.float32, [graph.sequences, "T", lent_values(config)[name]])
        gather = Node("Gather", [name, io.WANTED], [result], attributes={"axis": 1})
        graph.nodes.insert(0, gather)
    return result
