"""Worker process that tries a ggml library.

Not a command for users: `stem_edge.ggml.check` starts it, and explains why. Small models with every type of
weights and rows compute a prompt, a token and a few tokens; their logits are compared with those of the numpy
model. The name of each goes to stdout before it is computed, so that the parent can tell where a crash happened.
On failure the last line of stderr gives the reason.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from itertools import accumulate, cycle, pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError
from stem_edge.ggml import types
from stem_edge.ggml.check import DIFFERS, REFUSED
from stem_edge.ggml.gguf_schema import BASE, KV_TENSORS, usual_kv
from stem_edge.ggml.gguf_tensors import GgufWeights, planned_tensors
from stem_edge.ggml.library import Ggml
from stem_edge.graph.formats import GgufType, OwnTypes
from stem_edge.graph.kv import KvType
from stem_edge.layers import Llama3Rope
from stem_edge.numerics.matrix import ArrayMatrix, IndexedMatrix
from stem_edge.numerics.quantize import F32
from stem_edge.numerics.reference import forward
from stem_edge.runtime.backends.ggml.backend import GgmlBackend
from stem_edge.runtime.backends.ggml.graph import GgmlGraph, HeldVectors, Scratch
from stem_edge.runtime.backends.ggml.slots import BlockSlots
from stem_edge.runtime.backends.ggml.weights import GgmlModel
from stem_edge.system.child import limit_this_process
from stem_edge.tables.codecs import FORMS, Form
from stem_edge.tables.packing import make_layout, pack_records

MEMORY_NBYTES = 1 << 30
CPU_SECONDS = 120  # ends the trial even if its parent is gone and cannot kill it
# Tokens of steps; products with many columns, one and a few use other kernels.
STEPS = 64, 1, 8
GROUP = 32  # values of a row that share a scale
# Root mean square error of logits over their own, from rounding hidden states to 8 bits or adding in 16 bits,
# with a margin of three. A wrong kernel is far beyond it.
LOGITS: dict[GgufType | None, float] = {"f32": 0.001, "f16": 0.02}
LOGITS_OF_CODES = 0.15
LOGITS_OF_INT4_KV = 0.6  # with a margin of two

WIDE = ModelConfig(
    vocab_size=64,
    dim=256,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=64,
    d_ff=256,
    stem_layers=(1,),
    norm_eps=1e-5,
    rope_theta=10000.0,
    max_context=128,
)
# Each type that other GGUF files may have, but those that take long (types.RARE_TYPES).
FOREIGN = {
    "embedding": "Q4_1",
    "head": "BF16",
    "wq": "Q2_K",
    "wk": "Q3_K",
    "wv": "IQ4_NL",
    "wo": "IQ4_XS",
    "gate": "MXFP4",
    "up": "Q4_1",
    "down": "Q4_1",
}
# Widths that are no multiple of 256, because K-quants cannot hold them, and optional operators.
NARROW = msgspec.structs.replace(
    WIDE,
    dim=64,
    head_dim=32,
    n_heads=2,
    d_ff=96,
    rope_interleaved=False,
    rope_scaling=Llama3Rope(8.0, 1.0, 4.0, 32),
    sliding_window=40,
    qk_norm_eps=1e-5,
    biases=("wq",),
    logit_softcap=30.0,
)


class WrongResultError(Exception):
    """A library computes something other than the reference."""


class Case(NamedTuple):
    """A small model that a trial runs."""

    name: str
    config: ModelConfig
    weights: GgufType | OwnTypes
    row_type: Form
    kv: KvType | None = None  # type of keys and values; None: as for these weights


def cases() -> Iterator[Case]:
    """Yield models for every type of weights and rows."""
    for weights, row_type in zip(BASE, cycle(FORMS)):
        yield Case(f"a model with {weights} weights and {row_type} rows", WIDE, weights, row_type)
    for weights in ("q6_k", "q5_k_m", "q4_k_m"):
        yield Case(f"a narrow model with {weights} weights", NARROW, weights, "int8")
    yield Case("a model with types of other GGUF files", WIDE, FOREIGN, "int8")
    for kv in KV_TENSORS:
        yield Case(f"a model with {kv} keys and values", WIDE, "q8_0", "int8", kv=kv)


def run(path: Path) -> None:
    """Check every case, printing its name before. Raises BackendError, WrongResultError."""
    print("loading it", flush=True)
    ggml = Ggml(path)
    for case in cases():
        print(case.name, flush=True)
        try:
            check(ggml, case)
        except WrongResultError as error:
            raise WrongResultError(f"{case.name}: {error}") from error


def check(ggml: Ggml, case: Case) -> None:
    """Compare the logits of a model with the numpy model's. Raises WrongResultError."""
    config, random = case.config, np.random.default_rng(0)
    values = {name: _values(random, shape) for name, shape in config.backbone_shapes().items()}
    shapes = config.records, config.stem_layers, config.row_parts()
    layout = make_layout(*shapes, case.row_type, GROUP)
    shape = (layout.records, layout.row_width)
    records = pack_records(
        layout, [random.standard_normal(shape, np.float32) for _ in layout.layers]
    )
    slots = BlockSlots(layout, layout.records)
    slots.write(np.arange(layout.records), records)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        file = _write(Path(folder) / "weights", ggml, case, values)
        kv = KV_TENSORS[case.kv or usual_kv(case.weights)]
        model = GgmlModel(ggml, config, file, slots, 1, kv)
    stored = {name: _stored(model, name, given) for name, given in values.items()}
    rows = {layer: layout.unpack(records, at) for at, layer in enumerate(layout.layers)}
    check_logits(model, case, stored, rows)


def check_logits(
    model: GgmlModel, case: Case, backbone: dict[str, F32], rows: dict[int, F32]
) -> None:
    """Compare the logits of a prompt, of a token and of a few tokens. Raises WrongResultError.

    rows: STEM layer -> its row in each record.
    """
    mixture = case.weights if isinstance(case.weights, str) else None
    config, usual = case.config, LOGITS.get(mixture, LOGITS_OF_CODES)
    tolerance = LOGITS_OF_INT4_KV if case.kv == "int4" else usual
    ids = np.random.default_rng(1).integers(0, config.vocab_size, sum(STEPS))
    record_of = np.arange(config.vocab_size, dtype=np.int32) % config.records
    tables = {layer: IndexedMatrix(ArrayMatrix(one), record_of) for layer, one in rows.items()}
    weights = {name: ArrayMatrix(values) for name, values in backbone.items()}
    expected = forward(config, weights, tables, ids.tolist())
    context = GgmlBackend(model).open_context(len(ids))
    for start, stop in pairwise(accumulate(STEPS, initial=0)):
        context.begin(ids[start:stop], start)
        logits = context.finish(record_of[ids[start:stop]], stop - start)
        compare(f"logits of {stop - start} tokens", logits, expected[start:stop], tolerance)


def _values(random: np.random.Generator, shape: tuple[int, ...]) -> F32:
    """Return normally distributed values, scaled so that a product with a matrix keeps its size."""
    values = random.standard_normal(shape, np.float32)
    return values * np.float32(shape[1] ** -0.5) if len(shape) == 2 else values


def _write(path: Path, ggml: Ggml, case: Case, values: dict[str, F32]) -> GgufWeights:
    """Write these values as a backbone.gguf without a header."""
    planned = dict(zip(values, planned_tensors(case.config, case.weights), strict=True))
    with path.open("wb") as file:
        for name, tensor in planned.items():
            given, data = values[name], np.empty(tensor.nbytes, np.uint8)
            width, pointers = given.shape[-1], (given.ctypes.data, data.ctypes.data)
            kind, rows = tensor.type, given.size // width
            nbytes = ggml.quantize_chunk(kind.number, *pointers, 0, rows, width, None)
            if nbytes != tensor.nbytes:
                raise WrongResultError(f"{kind.name} takes {nbytes} bytes, not {tensor.nbytes}")
            file.seek(tensor.offset)
            file.write(data.tobytes())
        file.truncate(tensor.end)
    return GgufWeights(path, tensor.end, planned)


def _stored(model: GgmlModel, name: str, given: F32) -> F32:
    """Return a tensor's values as ggml decodes them."""
    *rows, width = given.shape
    graph = GgmlGraph(model.processor, 8)
    ids = graph.input(types.I32, *(rows or [1]))
    result = HeldVectors(model.ggml, width, *(rows or [1]))
    read = graph.op("get_rows", model.weights.tensors[name], ids)
    result.take(read)
    graph.emit(read)
    scratch = Scratch(model.ggml)
    scratch.place(graph)
    graph.set(ids, np.arange(len(result.values), dtype=np.int32))
    graph.run()
    return result.values.reshape(given.shape).copy()


def compare(what: str, found: F32, expected: F32, tolerance: float) -> None:
    """Raise WrongResultError if values differ by more than `tolerance` times their size, on average."""
    a, b = found.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
    distance = np.abs(a - b)
    worst = int(np.where(np.isnan(distance), np.inf, distance).argmax())
    if not np.sqrt(np.mean(distance**2)) <= tolerance * np.sqrt(np.mean(b * b)):
        raise WrongResultError(
            f"{what}, value {worst} of {a.size}: found {a[worst]:.6g}, expected {b[worst]:.6g}"
        )


def main() -> int:
    limit_this_process(MEMORY_NBYTES, CPU_SECONDS)
    try:
        run(Path(sys.argv[1]))
    except (BackendError, WrongResultError) as error:
        print(error, file=sys.stderr)
        return REFUSED if isinstance(error, BackendError) else DIFFERS
    return 0


if __name__ == "__main__":
    sys.exit(main())
