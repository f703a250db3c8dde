"""Builds a bundle's graphs in memory for sessions; the graphs refer to the bundle's weight files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from stem_edge.bundle.manifest import MANIFEST
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import BackendError
from stem_edge.files import disk
from stem_edge.files.plain_files import damaged, unreadable
from stem_edge.graph import names as io
from stem_edge.graph.decode import decoding
from stem_edge.graph.encoder import encode
from stem_edge.graph.formats import BackboneFormat
from stem_edge.graph.ir import Graph
from stem_edge.graph.kv import X86, KvType
from stem_edge.graph.weight_plan import WeightPlan
from stem_edge.runtime.backends.onnxruntime.providers.session import GraphSource


def cpu_graphs(bundle: Bundle, *, prefill: bool, kv: KvType) -> dict[str, GraphSource]:
    """Return graph name (graph/names.py) -> encoded graph for the CPU, in the order in which a step runs them."""
    return sources(bundle, separate(bundle, prefill=prefill, kv=kv))


def separate(bundle: Bundle, *, prefill: bool, kv: KvType) -> dict[str, Graph]:
    """Build the graphs of a backbone for the CPU, such as embed and head; return name -> graph.

    prefill: include the graph for prompts. kv: type of cached keys and values. Raises BundleError for damaged files.
    """
    described = bundle.manifest.model, bundle.manifest.tables, format_of(bundle)
    try:
        built = [decoding(*described, kv=kv, unblocked=unblocked_attention(bundle, kv))]
        if prefill:
            from stem_edge.graph.prompt_products import prompts  # only for long prompts

            built.append(prompts(*described, kv=kv))
    except ValueError as error:
        said = f"this model cannot be stored in this format ({error})"
        raise damaged(bundle.file(MANIFEST), said) from error
    for one in built:
        check_weights(bundle, one.plan)
    with_states_of(bundle, built[0].graphs[io.HEAD])
    return {name: graph for one in built for name, graph in one.graphs.items()}


def unblocked_attention(bundle: Bundle, kv: KvType) -> bool:
    """Return True if decoding graphs have KvFormat.unblocked, which is faster for one token on x86.

    It takes much memory for many tokens, so only if prompts have a graph of their own.
    """
    return bundle.manifest.has_prefill and kv == "fp32" and X86


def check_weights(bundle: Bundle, plan: WeightPlan) -> None:
    """Raise BundleError if the weight file lacks the planned size: engines could read beyond its end."""
    if (found := bundle.manifest.files[plan.file].nbytes) != plan.nbytes:
        said = f"{found} bytes, but the weights of this model take {plan.nbytes}"
        raise damaged(bundle.file(plan.file), said)


def with_states_of(bundle: Bundle, graph: Graph) -> Graph:
    """Add the head's input to the outputs of `graph` if the bundle's assistant reads this input; return the graph."""
    if bundle.manifest.assistant is not None:
        from stem_edge.graph.special.assistant import with_states  # only for these bundles

        with_states(graph, bundle.manifest.model)
    return graph


def format_of(bundle: Bundle) -> BackboneFormat:
    """Return the storage format of the backbone for onnxruntime. Raises BackendError if there is none."""
    if bundle.manifest.backbone is None:
        raise BackendError(f"{bundle.path}: no backbone for onnxruntime; choose another engine")
    return bundle.manifest.backbone


def graph_source(bundle: Bundle, name: str, graph: Graph) -> GraphSource:
    """Encode a graph of a bundle for a session.

    onnxruntime refuses symbolic links out of a graph's folder. So weight files that are links, as in a
    hub's cache, are named by their targets, relative to a folder that contains all of them.
    """
    files = {tensor.file for tensor in graph.tensors.values() if tensor.file}
    places = {file: _place(bundle.file(file)) for file in files}
    if all(place == bundle.file(file) for file, place in places.items()):
        return GraphSource(name, encode(graph), bundle.path)
    weights = Path(os.path.commonpath([place.parent for place in places.values()]))
    moved = {
        key: replace(tensor, file=places[tensor.file].relative_to(weights).as_posix())
        if tensor.file
        else tensor
        for key, tensor in graph.tensors.items()
    }
    return GraphSource(name, encode(replace(graph, tensors=moved)), weights, bundle.path)


def _place(path: Path) -> Path:
    try:
        return disk.plain(path)
    except OSError as error:
        raise unreadable(path, "weight file", error) from error


def sources(bundle: Bundle, graphs: Mapping[str, Graph]) -> dict[str, GraphSource]:
    return {name: graph_source(bundle, name, graph) for name, graph in graphs.items()}
