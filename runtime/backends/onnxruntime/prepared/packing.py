"""Packs the matrices of a graph a few at a time, which takes little memory.

When onnxruntime loads a graph, it packs all of its matrices, and it can save them packed. But then it holds
all matrices in memory at once. So groups of matrices are loaded and saved as small graphs, and their packed
forms are copied into the weight file of the whole graph.

When onnxruntime loads the written graph, it packs each plain matrix again, and maps the packed form from the
file only if both are the same. So the file has copies of the bundle's plain matrices, too. They come before
the packed ones, because the system reads pages with their neighbours, and plain matrices are read only once
(but for rows of the embedding, if a head's greatest logits are computed again).

On processors where sums of u8 * s8 products saturate, onnxruntime converts s8 matrices to u8 in memory at
each load (providers/session.py). So these matrices are written as u8.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import IO

import numpy as np

from stem_edge.bundle.opening import Bundle
from stem_edge.files import disk
from stem_edge.files.plain_files import damaged
from stem_edge.graph.encoder import PACKED, encode, with_length
from stem_edge.graph.ir import ElementType, Graph, Node, Tensor
from stem_edge.graph.weight_plan import WeightPlan
from stem_edge.runtime.backends.onnxruntime.prepared.deciding import PACKED_AT_ONCE
from stem_edge.runtime.backends.onnxruntime.providers.session import (
    GraphSource,
    open_session,
    products_saturate,
)
from stem_edge.system.memory import return_freed_memory

# Operators that pack their second input -> type of their first input.
ACTIVATIONS = {
    "FusedMatMul": np.float32,
    "MatMulIntegerToFloat": np.uint8,
    "MatMulNBits": np.float32,
}
# onnxruntime copies a packed matrix that begins elsewhere in the file, instead of mapping it.
PACKED_ALIGNMENT = 256
GROUP_NBYTES = PACKED_AT_ONCE  # of matrices packed together; a larger matrix is packed alone
PIECE_NBYTES = 8 << 20  # copied at once
# Packed form of a tensor, as onnxruntime writes it (undocumented): key|offset;bytes;checksum|...
FORM = re.compile(rb"[^|]*(\|\d+;\d+;\d+)+")
NAME, KEY, VALUE = 8, 1, b"\x12"  # field numbers in onnx.proto, and the tag of a value


class Packer:
    """Writes graphs and their packed weights to a folder. All graphs of a bundle share the weights."""

    def __init__(self, bundle: Bundle, folder: Path, threads: int) -> None:
        self.folder, self._bundle, self._threads = folder, bundle, threads
        self._placed: dict[Tensor, Tensor] = {}  # tensor of the bundle -> tensor in the folder

    def pack(self, name: str, graph: Graph) -> None:
        """Write a graph to the file `name`, and to `name`.data those weights that no earlier graph has.

        Raises OSError, and what `open_session` raises.
        """
        fresh = {n: t for n, t in graph.tensors.items() if t.file and t not in self._placed}
        if fresh:
            plan, packed = (
                WeightPlan(f"{name}.data"),
                (n for n in graph.nodes if n.op in ACTIVATIONS),
            )
            # Matrix -> one node that multiplies by it.
            matrices = {node.inputs[1]: node for node in packed if node.inputs[1] in fresh}
            with (self.folder / plan.file).open("w+b") as file:
                for tensor in sorted(fresh, key=lambda tensor: tensor not in matrices):
                    self._copy_plain(fresh[tensor], file, plan)
            for group in _groups(matrices.values(), fresh):
                self._pack_group(_products_of(graph, group), plan)
        (self.folder / name).write_bytes(encode(self._over_packed(graph)))

    def _copy_plain(self, tensor: Tensor, file: IO[bytes], plan: WeightPlan) -> None:
        place = _place(plan, tensor.nbytes)
        widened = tensor.type == ElementType.INT8 and products_saturate()
        type = ElementType.UINT8 if widened else tensor.type
        self._placed[tensor] = replace(tensor, type=type, file=plan.file, offset=place, parts=())
        for part in tensor.parts or (tensor,):
            path, end = self._bundle.file(part.file), part.offset + part.nbytes
            with os.fdopen(disk.open_file(path), "rb") as source:
                if not _copy(source, part.offset, file, place, part.nbytes, flip=widened):
                    raise damaged(path, f"ends before byte {end:,}")
            place += part.nbytes

    def _pack_group(self, graph: Graph, plan: WeightPlan) -> None:
        """Pack the matrices of a small graph, and append the packed weights to the plan's weight file."""
        source = GraphSource("product", encode(self._over_packed(graph)), self.folder)
        stepped = bool(self._bundle.manifest.model.ranges)
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            saved = Path(folder) / "graph.onnx"
            open_session(source, self._threads, save_to=saved, whole_steps=stepped)
            return_freed_memory()
            with (
                saved.with_name("graph.onnx.data").open("rb") as packed,
                (self.folder / plan.file).open("r+b") as file,
            ):
                for name, form in packed_forms(saved.read_bytes(), graph.tensors).items():
                    tensor, text = graph.tensors[name], _append(form, packed, file, plan)
                    self._placed[tensor] = replace(self._placed[tensor], packed=text)

    def _over_packed(self, graph: Graph) -> Graph:
        """Return the graph with its weights taken from `folder` and listed in the order of use."""
        names = dict.fromkeys(name for node in graph.nodes for name in node.inputs)
        tensors = {n: graph.tensors[n] for n in [*names, *graph.tensors] if n in graph.tensors}
        tensors = {name: self._placed.get(tensor, tensor) for name, tensor in tensors.items()}
        widened = {name for name, t in tensors.items() if t.type != graph.tensors[name].type}
        nodes = [
            # With a zero point of 128 for a matrix that is u8 now instead of s8.
            replace(one, inputs=[*one.inputs, one.inputs[4]]) if widened & set(one.inputs) else one
            for one in graph.nodes
        ]
        return replace(graph, nodes=nodes, tensors=tensors)


def packed_forms(saved: bytes, names: Iterable[str]) -> dict[str, str]:
    """Return tensor name -> text that says where its packed weights are in the data file.

    Such a text is "key|offset;bytes;checksum|...", with one place for each piece. saved: a graph
    file that onnxruntime wrote; the text follows the tensor's name. Raises ValueError for other
    contents.
    """
    heads = {name: with_length(NAME, name.encode()) for name in names}
    starts = sorted((at, name) for name, head in heads.items() if (at := saved.find(head)) >= 0)
    key, found = with_length(KEY, PACKED.encode()) + VALUE, dict[str, str]()
    for (start, name), (stop, _) in pairwise([*starts, (len(saved), "")]):
        if (at := saved.find(key, start, stop)) >= 0:
            low, high = saved[at + len(key) : at + len(key) + 2]
            size, skipped = (low, 1) if low < 128 else (low - 128 + (high << 7), 2)
            text = saved[at + len(key) + skipped :][:size]
            if not FORM.fullmatch(text):
                raise ValueError(f"packed form {text!r}")
            found[name] = text.decode()
    return found


def _groups(nodes: Iterable[Node], tensors: dict[str, Tensor]) -> Iterator[list[Node]]:
    group, nbytes = list[Node](), 0
    for node in nodes:
        size = tensors[node.inputs[1]].nbytes
        if group and nbytes + size > GROUP_NBYTES:
            yield group
            group, nbytes = [], 0
        group.append(node)
        nbytes += size
    if group:
        yield group


def _products_of(graph: Graph, nodes: Sequence[Node]) -> Graph:
    """Return a graph of only these matrix products, with the activations of each as an input."""
    names = {name for node in nodes for name in node.inputs}
    made = Graph(tensors={n: t for n, t in graph.tensors.items() if n in names})
    for number, node in enumerate(nodes):
        dims = made.tensors[node.inputs[1]].dims
        width = dims[-1] if node.attributes.get("transB") else dims[0]
        if node.op == "MatMulNBits":
            width = node.attributes["K"]
        made.nodes.append(replace(node, inputs=[x := f"activations.{number}", *node.inputs[1:]]))
        made.input(x, ACTIVATIONS[node.op], [1, "T", width])
        made.output(node.outputs[0], np.float32, None)
    return made


def _append(form: str, source: IO[bytes], file: IO[bytes], plan: WeightPlan) -> str:
    """Copy packed weights to the end of `file`; return `form` (packed_forms) with new offsets."""
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
    """Copy `nbytes` bytes from offset `start` to offset `to`. Return False if the source ends early.

    flip: convert s8 to u8, by adding 128.
    """
    source.seek(start)
    target.seek(to)
    for at in range(0, nbytes, PIECE_NBYTES):
        size = min(PIECE_NBYTES, nbytes - at)
        data = source.read(size)
        data = (np.frombuffer(data, np.uint8) ^ np.uint8(128)).tobytes() if flip else data
        if target.write(data) < size:
            return False
    return True
