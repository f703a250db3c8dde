"""Packs the matrices of a graph one at a time, so that it takes the memory of one of them.

onnxruntime packs all matrices of a graph when it loads it, and can save what it packed, but holds
all of them in memory meanwhile. So each matrix is loaded and saved in a separate graph, and the
packed forms are put together in the file of weights of the whole graph.

On loading, onnxruntime packs each plain matrix again and compares it with the packed form in the same
file. So plain matrices are copied, though the bundle has them. They are read only then, and lie apart from
packed ones: where memory is short, the system drops pages and reads them again with their neighbours.

Where sums of products of u8 and s8 saturate, onnxruntime makes u8 of s8 matrices when it loads a graph
(providers/session.py), in memory. So they are written as u8 there.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from stem_edge.bundle.opening import Bundle
from stem_edge.files import disk
from stem_edge.files.plain_files import damaged
from stem_edge.graph.encoder import encode
from stem_edge.graph.ir import ElementType, Graph, Node, Tensor
from stem_edge.graph.weight_plan import WeightPlan
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.onnxruntime.prepared.packed_file import packed_forms
from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU
from stem_edge.runtime.backends.onnxruntime.providers.session import (
    GraphSource,
    open_session,
    products_saturate,
)
from stem_edge.system.memory import return_freed_memory

# Operators that pack their second input -> type of their first one.
ACTIVATIONS = {
    "FusedMatMul": np.float32,
    "MatMulIntegerToFloat": np.uint8,
    "MatMulNBits": np.float32,
}
# onnxruntime copies a packed matrix that begins elsewhere in the file, instead of mapping it.
PACKED_ALIGNMENT = 256
PIECE_NBYTES = 8 << 20  # copied at once
CHECKED_TOKENS = (1, 4)  # kernels for one token are others than those for several


class OtherProductsError(Exception):
    """onnxruntime computes other products from a saved matrix than from the plain one."""


class Packer:
    """Writes graphs over packed weights to a folder; all graphs of a bundle share their weights."""

    def __init__(self, bundle: Bundle, folder: Path, threads: int) -> None:
        self.folder, self._bundle, self._threads = folder, bundle, threads
        self._placed: dict[Tensor, Tensor] = {}  # of the bundle -> in the folder

    def pack(self, name: str, graph: Graph) -> None:
        """Write a graph, and the weights that no graph before it had, to name and name.data.

        Raises OtherProductsError, OSError, and what `open_session` raises.
        """
        path = self.folder / name
        if any(tensor.file and tensor not in self._placed for tensor in graph.tensors.values()):
            path.with_name(f"{name}.data").touch()
            self._gather(graph, WeightPlan(f"{name}.data"))
        path.write_bytes(encode(self._over_packed(graph)))

    def _gather(self, graph: Graph, plan: WeightPlan) -> None:
        """Write the weights of a graph: plain matrices, then everything else, and packed matrices."""
        nodes = {node.inputs[1]: node for node in graph.nodes if node.op in ACTIVATIONS}
        fresh = {n: t for n, t in graph.tensors.items() if t.file and t not in self._placed}
        with (self.folder / plan.file).open("r+b") as file:
            for name in sorted(fresh, key=lambda name: name not in nodes):
                self._copy_plain(fresh[name], file, plan)
        for node in nodes.values():
            if node.inputs[1] in fresh:
                self._pack_matrix(_alone(graph, node), plan)

    def _copy_plain(self, tensor: Tensor, file: IO[bytes], plan: WeightPlan) -> None:
        place = _place(plan, tensor.nbytes)
        widened = tensor.type == ElementType.INT8 and products_saturate()
        type = ElementType.UINT8 if widened else tensor.type
        self._placed[tensor] = replace(tensor, type=type, file=plan.file, offset=place)
        path, end = self._bundle.file(tensor.file), tensor.offset + tensor.nbytes
        with os.fdopen(disk.open_file(path), "rb") as source:
            if not _copy(source, tensor.offset, file, place, tensor.nbytes, flip=widened):
                raise damaged(path, f"ends before byte {end:,}")

    def _pack_matrix(self, graph: Graph, plan: WeightPlan) -> None:
        """Append the packed forms of a graph of one product, and compare its products with them.

        The file is closed before it is compared: Windows refuses to read one that others may write.
        """
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            saved = Path(folder) / "graph.onnx"
            expected = self._products(graph, saved)
            with (
                saved.with_name("graph.onnx.data").open("rb") as source,
                (self.folder / plan.file).open("r+b") as file,
            ):
                for name, form in packed_forms(saved).items():
                    tensor = graph.tensors[name]
                    text = _append(form, source, file, plan)
                    self._placed[tensor] = replace(self._placed[tensor], packed=text)
        found = self._products(graph)
        for first, second in zip(expected, found, strict=True):
            if not np.array_equal(first, second, equal_nan=True):
                raise OtherProductsError(graph.nodes[0].outputs[0])

    def _over_packed(self, graph: Graph) -> Graph:
        """Return a graph over the weights in the folder, which are in the order of use."""
        names = dict.fromkeys(name for node in graph.nodes for name in node.inputs)
        tensors = {n: graph.tensors[n] for n in [*names, *graph.tensors] if n in graph.tensors}
        tensors = {name: self._placed.get(tensor, tensor) for name, tensor in tensors.items()}
        widened = {name for name, t in tensors.items() if t.type != graph.tensors[name].type}
        nodes = [_widened(one) if widened & set(one.inputs) else one for one in graph.nodes]
        return replace(graph, nodes=nodes, tensors=tensors)

    def _products(self, graph: Graph, save_to: Path | None = None) -> list[F32]:
        """Return products of noise, of one token and of several."""
        source = GraphSource("product", encode(self._over_packed(graph)), self.folder)
        stepped = bool(self._bundle.manifest.model.ranges)
        session = open_session(source, self._threads, [CPU], save_to=save_to, whole_steps=stepped)
        (x,) = graph.inputs
        try:
            return [session.run(None, {x: noise})[0] for noise in _noise(graph)]
        finally:
            del session
            return_freed_memory()


def _alone(graph: Graph, node: Node) -> Graph:
    """Return a graph of one product of a graph, with activations as its input."""
    tensors = {name: graph.tensors[name] for name in node.inputs if name in graph.tensors}
    alone = Graph(nodes=[node], tensors=tensors)
    dims = tensors[node.inputs[1]].dims
    width = dims[-1] if node.attributes.get("transB") else dims[0]
    if node.op == "MatMulNBits":
        width = node.size("K")
    alone.input(node.inputs[0], ACTIVATIONS[node.op], [1, "T", width])
    alone.output(node.outputs[0], np.float32, None)
    return alone


def _widened(node: Node) -> Node:
    """Return a product with a matrix that has the activations' zero point, 128."""
    return replace(node, inputs=[*node.inputs, node.inputs[4]])


def _noise(graph: Graph) -> Iterator[npt.NDArray[Any]]:
    (value,) = graph.inputs.values()
    *_, width = value.shape or ()
    rng = np.random.default_rng(0)
    for tokens in CHECKED_TOKENS:
        size = (1, tokens, int(width))
        if value.type == ElementType.UINT8:
            yield rng.integers(0, 256, size, np.uint8)
        else:
            yield rng.standard_normal(size, np.float32)


def _append(form: str, source: IO[bytes], file: IO[bytes], plan: WeightPlan) -> str:
    """Append the bytes of a packed form; return the text that says where they are."""
    key, *places = form.split("|")
    texts = [key]
    for offset, nbytes, checksum in (map(int, place.split(";")) for place in places):
        plan.nbytes += -plan.nbytes % PACKED_ALIGNMENT
        place = _place(plan, nbytes)
        _copy(source, offset, file, place, nbytes)
        texts.append(f"{place};{nbytes};{checksum}")
    return "|".join(texts)


def _place(plan: WeightPlan, nbytes: int) -> int:
    return plan.place("", np.uint8, (nbytes,)).offset


def _copy(
    source: IO[bytes], start: int, target: IO[bytes], to: int, nbytes: int, *, flip: bool = False
) -> bool:
    """Copy bytes; return whether all of them were there. flip: make u8 around 128 of s8."""
    source.seek(start)
    target.seek(to)
    for at in range(0, nbytes, PIECE_NBYTES):
        size = min(PIECE_NBYTES, nbytes - at)
        data = source.read(size)
        data = (np.frombuffer(data, np.uint8) ^ np.uint8(128)).tobytes() if flip else data
        if target.write(data) < size:
            return False
    return True
