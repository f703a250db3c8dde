"""Whether a backbone's .onnx files are graphs that the exporter could have written for this bundle.

onnxruntime trusts a file: it opens others that the file names, reads tensors where the file says,
and some of its kernels compute with sizes that nothing was compared with. So before it sees a graph,
everything in it is compared: with what files hold, with the manifest's model, and with what operators
can take. Weights can have any values: only checksums see those (stem-edge verify).

| file | knows |
|---|---|
| protobuf.py | how messages are written |
| onnx_file.py | what messages and tensors a graph may have |
| onnx_operators.py, onnx_rules.py, onnx_fused.py | what operators, with what attributes, on what shapes |
| onnx_device.py, onnx_portable.py | those that variants have |
| onnx_expected.py | what each graph must be; graph_io.py what goes in and comes out |

Graphs that onnxruntime wrote itself, in the cache folder, are not of this kind and are not checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from stem_edge import disk
from stem_edge.bundle import BACKBONE_DATA, PREFILL_DATA, Bundle, Manifest
from stem_edge.errors import BundleError
from stem_edge.graph_io import PREFILL, VARIANTS, Value, Values, Variant, graph_file
from stem_edge.onnx_expected import Expected, expected
from stem_edge.onnx_file import Node, OnnxFile, Place, Tensor, parse_onnx
from stem_edge.onnx_operators import find_operator, results
from stem_edge.onnx_rules import Step

IR_VERSION = 10
# A layer of the graph for prompts has about 10 KiB. What is above is refused before it is read.
LAYER_NBYTES = 1 << 16
MAX_GRAPH_NBYTES = 1 << 24
ALIGNMENT = 64  # of tensors in the file beside the graph
SHOWN_DIFFERENCES = 3
MAX_REASON = 800  # characters; names in a file can be long
EVERY: tuple[Variant | None, ...] = (None, *VARIANTS)
REMEDY = "copy the bundle again, or export it again with: stem-edge export CHECKPOINT OUT"


def check_graphs(bundle: Bundle, variants: Collection[Variant | None] = EVERY) -> None:
    """Raises BundleError unless the graphs of a bundle are backbones of its model.

    variants: whose graphs; None for those of the CPU. Default: all.
    """
    # Variants share weights; each by itself has them once.
    places: dict[tuple[str, Variant | None], list[Place]] = {}
    graphs = [pair for pair in bundle.manifest.all_graphs() if pair[1] in variants]
    for graph, variant in graphs:
        path = bundle.file(graph_file(graph, variant))
        try:
            data = disk.read_file(path, MAX_GRAPH_NBYTES)
        except OSError as error:
            raise BundleError(f"{path}: cannot read ({error.strerror}); {REMEDY}") from error
        for place in check_graph(data, path, graph, bundle.manifest, variant):
            places.setdefault((place.location, variant), []).append(place)
    for (name, _), found in places.items():
        _check_data(bundle.file(name), bundle.manifest.files[name].nbytes, found)


def check_graph(
    data: bytes, path: Path, graph: str, manifest: Manifest, variant: Variant | None = None
) -> list[Place]:
    """Check the bytes of one graph; returns where its weights lie. Raises BundleError.

    path: for messages only.
    """
    limit = min(MAX_GRAPH_NBYTES, LAYER_NBYTES * (manifest.model.n_layers + 16))
    try:
        if len(data) > limit:
            raise ValueError(f"more than {limit} bytes, the most for so many layers")
        file, known = parse_onnx(data), expected(graph, variant, manifest)
        _check_count(file, known)
        _check_places(file.tensors.values(), graph, manifest)
        _check_values(file, known)
        _check_nodes(file, known, manifest)
        _check_versions(file, known)
    except ValueError as error:
        raise BundleError(
            f"{path}: not the graph that the bundle's manifest describes ({str(error)[:MAX_REASON]}); {REMEDY}"
        ) from error
    return [tensor.place for tensor in file.tensors.values() if tensor.place is not None]


def _check_data(path: Path, nbytes: int, places: list[Place]) -> None:
    """The file that weights lie in is there, and no byte belongs to two of them."""
    try:
        descriptor = disk.open_file(path)
        try:
            found = disk.size(descriptor)
        finally:
            disk.close(descriptor)
    except OSError as error:
        raise BundleError(f"{path}: cannot read ({error.strerror}); {REMEDY}") from error
    if found != nbytes:
        raise BundleError(f"{path}: {found} bytes found, {nbytes} expected; {REMEDY}")
    for one, other in pairwise(sorted(places, key=lambda place: place.offset)):
        if one.offset + one.nbytes > other.offset:
            raise BundleError(
                f"{path}: the weights at bytes {one.offset} and {other.offset} overlap; {REMEDY}"
            )


def _check_count(file: OnnxFile, known: Expected) -> None:
    if len(file.nodes) > known.nodes:
        raise ValueError(f"{len(file.nodes)} operators, expected at most {known.nodes}")


def _check_places(tensors: Iterable[Tensor], graph: str, manifest: Manifest) -> None:
    location = PREFILL_DATA if graph == PREFILL else BACKBONE_DATA
    nbytes = manifest.files[location].nbytes
    for tensor in tensors:
        place = tensor.place
        if place is None:
            continue
        if place.location != location:
            raise ValueError(
                f"tensor {tensor.name!r} is in {place.location[:80]!a}, expected {location!r}"
            )
        if place.offset % ALIGNMENT or place.offset + place.nbytes > nbytes:
            raise ValueError(
                f"tensor {tensor.name!r} of {place.nbytes} bytes at {place.offset} is not aligned to "
                f"{ALIGNMENT}, or ends beyond the {nbytes} bytes of {location}"
            )


def _check_values(file: OnnxFile, known: Expected) -> None:
    differences = [
        *_differences("input", file.inputs, known.declared),
        *_differences("output", file.outputs, known.outputs),
    ]
    if differences:
        more = len(differences) - SHOWN_DIFFERENCES
        raise ValueError(
            "; ".join(differences[:SHOWN_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
        )


def _differences(what: str, found: Values, expected: Values) -> Iterator[str]:
    for name, value in expected.items():
        if found.get(name) != value:
            yield f"{what} {name} is {found.get(name, 'missing')}, expected {value}"
    for name in sorted(found.keys() - expected.keys()):
        yield f"{what} {name} is none of this graph's"


def _check_nodes(file: OnnxFile, expected: Expected, manifest: Manifest) -> None:
    """Each operator gets what it can take, and the last of them give what the graph must give."""
    known = dict(expected.inputs)
    made = {name for node in file.nodes for name in node.outputs}
    # Rules know inputs by their names, so nothing else has such a name, whichever graph takes it.
    if taken := sorted(expected.reserved & (made | file.tensors.keys())):
        raise ValueError(f"{taken[0]!r} is made in it, and is the name of an input")
    for name, tensor in file.tensors.items():
        known[name] = Value(tensor.type, tensor.dims, tensor.sizes)
    for node in file.nodes:
        try:
            _add_results(known, node, expected, manifest)
        except ValueError as error:
            raise ValueError(f"{node.operator} {node.outputs[:1]!a}: {error}") from error
    uses = Counter(name for node in file.nodes for name in node.inputs)
    for name, tensor in file.tensors.items():
        if tensor.place is not None and uses[name] != 1:
            raise ValueError(f"tensor {name!r} is used {uses[name]} times, expected once")
    for name, value in expected.outputs.items():
        if name not in made or known[name] != value:
            raise ValueError(f"output {name} is {known.get(name, 'not made')}, expected {value}")


def _add_results(known: Values, node: Node, expected: Expected, manifest: Manifest) -> None:
    operator = find_operator(node, expected.operators)
    for name in node.inputs:
        if name and name not in known:
            raise ValueError(f"its input {name!r} is made by no node before it")
    inputs = [known[name] if name else None for name in node.inputs]
    step = Step(node, inputs, manifest.model, manifest.tables, expected.floats)
    made = results(operator, step)
    for name, value in zip(node.outputs, made, strict=True):
        if (value is None) != (not name):
            raise ValueError(f"its outputs are {node.outputs}")
        if value is None:
            continue
        if name in known:
            raise ValueError(f"its output {name!r} is there already")
        known[name] = value


def _check_versions(file: OnnxFile, known: Expected) -> None:
    found, versions = (file.ir_version, file.opsets), (IR_VERSION, known.opsets)
    if found != versions:
        raise ValueError(f"IR version and operator sets are {found}, expected {versions}")
