"""Rates of ggml, timed on graphs of one operator with more data than a cache holds, and a tiny model.

Every byte of the data is FILL, which is a small number in every type and as a scale. It is not zero,
because the system need not keep pages of zeros in memory.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stem_edge.bundle.manifest import TABLES
from stem_edge.bundle.opening import open_bundle
from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError
from stem_edge.ggml import types as ggml_types
from stem_edge.ggml.check import checked_ggml
from stem_edge.ggml.gguf_schema import (
    ALIGNMENT,
    KV_TENSORS,
    backbone_nbytes,
    repacks,
    tensor_types,
    usual_kv,
)
from stem_edge.ggml.gguf_tensors import GgufWeights, planned_tensors
from stem_edge.ggml.library import Ggml
from stem_edge.ggml.types import TensorType
from stem_edge.graph.formats import GgufFormat, GgufType
from stem_edge.graph.kv import KvType
from stem_edge.measuring.planning.timing import DEMO, MATRIX_SHAPE, Rates, steps_seconds, timed
from stem_edge.runtime.backends.ggml.backend import GgmlBackend
from stem_edge.runtime.backends.ggml.graph import Arena, Graph, Memory, Processor, Scratch, Tensor
from stem_edge.runtime.backends.ggml.model import GgmlModel
from stem_edge.runtime.backends.ggml.slots import BlockSlots
from stem_edge.runtime.backends.ggml.weights import RepackedMemory
from stem_edge.runtime.backends.interface import LEAST_CHUNK
from stem_edge.runtime.engine import Engine
from stem_edge.runtime.rows.cache import RowCache
from stem_edge.runtime.rows.prefetch import Prefetcher
from stem_edge.runtime.rows.store import open_store
from stem_edge.system.memory import page_aligned

FILL = 0x11
PROBE_NBYTES = 96 << 20  # of matrices, or of keys and values
ATTENTION_TOKENS = 2048
MOST_LAYERS = 64
SLOTS = 64  # in the tiny model's row cache

Kind = tuple[TensorType, bool]  # type of matrices, and whether they are rearranged


def ggml_rates(
    config: ModelConfig, gguf: GgufFormat, kv: KvType, threads: int, *, repack: bool
) -> Rates:
    """Time matrices, attention, and the rest of a layer; `repack` as in stem_edge.load."""
    ggml = checked_ggml()
    processor = Processor(ggml, threads)
    layers, head = _nbytes(config, gguf, repack=repack)
    rates = {kind: _product_rate(processor, *kind) for kind in layers | head}
    return Rates(
        _mean_rate(layers, rates),
        _mean_rate(head, rates),
        _attention_rate(processor, config, KV_TENSORS[kv]),
        _layer_seconds(ggml, gguf, threads),
        f"measured on this machine, {threads} threads",
    )


def _nbytes(
    config: ModelConfig, gguf: GgufFormat, *, repack: bool
) -> tuple[Counter[Kind], Counter[Kind]]:
    """Return kind -> bytes of the matrices in the layers, and in the head."""
    types, sizes = tensor_types(config, gguf.weights), backbone_nbytes(config, gguf.weights)
    layers, head = Counter[Kind](), Counter[Kind]()
    of_head = "embedding" if config.tied_head else "head"
    for name, shape in config.backbone_shapes().items():
        kind = types[name], repack and repacks(types[name], shape[0])
        if name == of_head:
            head[kind] += sizes[name]
        elif len(shape) == 2 and name != "embedding":
            layers[kind] += sizes[name]
    return layers, head


def _mean_rate(nbytes: Counter[Kind], rates: dict[Kind, float]) -> float:
    """Return the bytes a second of a mixture with so many bytes of each kind."""
    return nbytes.total() / sum(count / rates[kind] for kind, count in nbytes.items())


def _product_rate(processor: Processor, kind: TensorType, repacked: bool) -> float:
    """Return the bytes a second of products with one vector, through pairs of matrices in turn."""
    inner, outer = MATRIX_SHAPE
    nbytes = kind.row_nbytes(inner) * outer
    pairs = max(1, PROBE_NBYTES // (2 * nbytes))
    graph, arena = Graph(processor, 4 * pairs + 4), Arena(processor.ggml, 2 * pairs)
    x = graph.input(ggml_types.F32, inner)
    matrices = []
    for _ in range(pairs):
        matrices += [arena.tensor(kind, inner, outer), arena.tensor(kind, outer, inner)]
    memory = (_place_repacked if repacked else _place)(processor.ggml, matrices)
    for there, back in zip(matrices[0::2], matrices[1::2], strict=True):
        graph.emit(graph.op("mul_mat", back, graph.op("mul_mat", there, x)))
    seconds = _graph_seconds(graph, {x: np.ones(inner, np.float32)}, memory)
    return 2 * pairs * nbytes / seconds


def _attention_rate(processor: Processor, config: ModelConfig, kind: TensorType) -> float:
    """Return the bytes a second of keys and values that one token attends to, in the model's heads."""
    heads, kv_heads, width = config.n_heads, config.n_kv_heads, config.head_dim
    cell = kind.row_nbytes(width) * kv_heads
    layers = min(MOST_LAYERS, max(1, PROBE_NBYTES // (2 * cell * ATTENTION_TOKENS)))
    graph, arena = Graph(processor, 8 * layers + 8), Arena(processor.ggml, 2 * layers)
    mask = graph.input(ggml_types.F16, ATTENTION_TOKENS, 1)
    query = graph.input(ggml_types.F32, width, heads, 1)
    caches = [arena.tensor(kind, kv_heads * width, ATTENTION_TOKENS) for _ in range(2 * layers)]
    memory = _place(processor.ggml, caches)
    for number in range(layers):
        keys, values = (
            graph.op("view_3d", cache, width, ATTENTION_TOKENS, kv_heads, cell, cell // kv_heads, 0)
            for cache in caches[2 * number : 2 * number + 2]
        )
        q = graph.op("permute", query, 0, 2, 1, 3)
        graph.emit(graph.op("flash_attn_ext", q, keys, values, mask, width**-0.5, 0.0, 0.0))
    inputs: dict[Tensor, npt.NDArray[Any]] = {
        mask: np.zeros(ATTENTION_TOKENS, np.float16),
        query: np.ones(width * heads, np.float32),
    }
    seconds = _graph_seconds(graph, inputs, memory)
    return 2 * layers * cell * ATTENTION_TOKENS / seconds


def _graph_seconds(
    graph: Graph, inputs: Mapping[Tensor, npt.NDArray[Any]], memory: object
) -> float:
    """Time a graph; `memory`, which its tensors lie in, is passed to keep it alive meanwhile."""
    scratch = Scratch(graph.ggml)
    scratch.place(graph)

    def run() -> None:
        for tensor, values in inputs.items():  # again, because results may have taken their memory
            graph.set(tensor, values)
        graph.run()

    return timed(run)


def _place(ggml: Ggml, tensors: list[Tensor]) -> Memory:
    """Return filled memory of our own for tensors."""
    sizes = [-(-ggml.nbytes(tensor) // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    data = page_aligned((sum(sizes),))
    data.fill(FILL)
    memory = Memory(ggml, data)
    for at, tensor in zip(accumulate(sizes, initial=0), tensors, strict=False):
        memory.place(tensor, at)
    return memory


def _place_repacked(ggml: Ggml, tensors: list[Tensor]) -> RepackedMemory:
    """Return memory for tensors, filled and rearranged. Raises BackendError if this build cannot."""
    memory = RepackedMemory(ggml, tensors)
    values = np.full(max(ggml.nbytes(tensor) for tensor in tensors), FILL, np.uint8)
    for tensor in tensors:
        memory.fill(tensor, values.ctypes.data)
    return memory


def _layer_seconds(ggml: Ggml, gguf: GgufFormat, threads: int) -> float:
    """Time a model shaped as the one inside this package, in which matrices hardly take time.

    Its weights are zeros, its rows are those of that model.
    """
    bundle = open_bundle(DEMO)
    config, tables = bundle.manifest.model, bundle.manifest.table_format
    if tables is None:
        raise BackendError(f"{DEMO} has no tables; install stem-edge again")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # Types of a GGUF file fit its own model only.
        weights: GgufType = gguf.weights if isinstance(gguf.weights, str) else "q4_0"
        path, planned = Path(folder) / "zeros", planned_tensors(config, weights)
        with path.open("wb") as zeros:
            zeros.truncate(planned[-1].end)
        tensors = dict(zip(config.backbone_shapes(), planned, strict=True))
        file = GgufWeights(path, planned[-1].end, tensors)
        slots = BlockSlots(tables.tables, SLOTS)
        rows = Prefetcher(open_store(bundle.file(TABLES), tables, "pread"), RowCache(slots))
        kv = KV_TENSORS[usual_kv(gguf.weights)]
        model = GgmlModel(ggml, config, file, slots, threads, kv, repack=False)
        engine = Engine(GgmlBackend(model), rows, LEAST_CHUNK, overlap=True)
        try:
            return steps_seconds(engine) / config.n_layers
        finally:
            engine.close()
