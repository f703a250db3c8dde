"""Backbones that no exporter wrote: graphs and weights of a bundle, changed on purpose."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import onnx
from contract import refused

from stem_edge.bundle import FileEntry, encode_manifest, open_manifest
from stem_edge.errors import BundleError
from stem_edge.graph.names import graph_file
from stem_edge.onnx_check import check_graph

Change = Callable[[onnx.ModelProto], object]


def graph_of(bundle: Path, graph: str) -> onnx.ModelProto:
    """A graph of a bundle, without its weights."""
    return onnx.load_model(str(bundle / graph_file(graph)), load_external_data=False)


def changed(bundle: Path, graph: str, change: Change) -> bytes:
    """The bytes of a graph of a bundle after a change."""
    model = graph_of(bundle, graph)
    change(model)
    return bytes(model.SerializeToString(deterministic=True))


def graph_refused(bundle: Path, graph: str, data: bytes, *naming: str) -> str:
    """The message with which these bytes are refused in the place of a graph."""
    path, manifest = bundle / graph_file(graph), open_manifest(bundle)
    return refused(
        lambda: check_graph(data, path, graph, manifest), BundleError, path, *naming, seconds=30
    )


def change_refused(bundle: Path, graph: str, change: Change, *naming: str) -> str:
    """The same of a graph after a change."""
    return graph_refused(bundle, graph, changed(bundle, graph, change), *naming)


def resealed(bundle: Path, out: Path, files: Mapping[str, bytes]) -> Path:
    """A copy with other files, whose manifest has their sizes and checksums."""
    shutil.copytree(bundle, out)
    manifest = open_manifest(out)
    for name, data in files.items():
        (out / name).write_bytes(data)
    sealed = {n: FileEntry(len(d), hashlib.sha256(d).hexdigest()) for n, d in files.items()}
    manifest = msgspec.structs.replace(manifest, files=manifest.files | sealed)
    (out / "manifest.json").write_bytes(encode_manifest(manifest))
    return out


def node(model: onnx.ModelProto, operator: str) -> onnx.NodeProto:
    """The first node of an operator."""
    found: onnx.NodeProto = next(node for node in model.graph.node if node.op_type == operator)
    return found


def attribute(model: onnx.ModelProto, operator: str, name: str) -> onnx.AttributeProto:
    """An attribute of that node."""
    found: onnx.AttributeProto = next(a for a in node(model, operator).attribute if a.name == name)
    return found


def external(model: onnx.ModelProto, index: int = 0) -> onnx.TensorProto:
    """A tensor whose bytes lie in another file."""
    found: list[onnx.TensorProto] = [t for t in model.graph.initializer if t.external_data]
    return found[index]


def inline(model: onnx.ModelProto) -> onnx.TensorProto:
    """A tensor in the graph itself."""
    found: onnx.TensorProto = next(t for t in model.graph.initializer if t.raw_data)
    return found
