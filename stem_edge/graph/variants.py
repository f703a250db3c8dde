"""The graphs that accelerators run: which there are of a model, and all that each needs."""

from __future__ import annotations

from stem_edge.config import ModelConfig
from stem_edge.formats import BackboneFormat
from stem_edge.graph import device, portable
from stem_edge.graph import names as io
from stem_edge.graph.decode import decoding
from stem_edge.graph.device_rows import DeviceRows
from stem_edge.graph.ir import Graph
from stem_edge.graph.names import Variant
from stem_edge.graph.slots import rows_graph, top_graph
from stem_edge.rows import RecordLayout


def obstacle(
    variant: Variant, config: ModelConfig, layout: RecordLayout | None, format: BackboneFormat
) -> str:
    """Why a model has no such graphs; empty if it has."""
    find = portable.obstacle if variant == "portable" else device.obstacle
    return find(config, layout, format)


def graphs(
    variant: Variant, config: ModelConfig, layout: RecordLayout | None, format: BackboneFormat
) -> dict[str, Graph]:
    """Graphs of a variant without `obstacle`: those that decode, and those that serve a device."""
    plain = decoding(config, layout, format).graphs
    if variant == "portable":
        return {n: portable.lower(n, graph, config, layout) for n, graph in plain.items()}
    made = {n: device.derive(graph, layout, variant) for n, graph in plain.items()}
    if layout is not None:
        made[io.ROWS] = rows_graph(DeviceRows(layout, variant))
    return made | {io.TOP: top_graph(config)}
