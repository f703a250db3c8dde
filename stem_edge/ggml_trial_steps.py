"""What `stem_edge.ggml_trial` computes with ggml, and the same with numpy.

Everything that the engine needs of ggml is here once: products with every type of weights that
stem_edge.gguf_schema has, one column for decoding and many for prompts, and the operators between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stem_edge import ggml_types as types
from stem_edge.ggml import ROPE_HALVES, ROPE_PAIRS, SUCCESS, Ggml, InitParams
from stem_edge.ggml_types import TensorType
from stem_edge.quantize import F32

ARENA_NBYTES, GRAPH_SIZE = 64 << 10, 32
REPACKED = (types.Q4_0, types.Q4_K)
SLOTS = (types.F32, types.F16, types.Q8_0, types.Q4_0)  # types of rows, which experts are, too
ROWS, WIDTH, COLUMNS = 64, 512, (1, 64)
KEYS, HEADS, KV_HEADS, HEAD_DIM = 96, 4, 2, 64
EPSILON, ROPE_BASE = 1e-5, 10000.0

# Largest error of normally distributed values over their root mean square: what a type loses, with
# a margin of two, and what rounding the other operand to 8 bits does to a product.
LOST = {
    types.F32: 0.0,
    types.F16: 0.003,
    types.Q8_0: 0.04,
    types.Q6_K: 0.2,
    types.Q5_K: 0.4,
    types.Q5_0: 0.4,
    types.Q5_1: 0.4,
    types.Q4_K: 0.7,
    types.Q4_0: 0.7,
}
PRODUCT = {types.F32: 1e-4, types.F16: 0.01}
PRODUCT_OF_CODES = 0.1
EXACT = 1e-4
KEY_TYPES = {"float32": 0.001, "float16": 0.02}  # of keys and values

Values = npt.NDArray[Any]
Build = Callable[..., int]  # context, tensors -> the result's tensor


class WrongResultError(Exception):
    """What a library does that it should not."""


class Operand(NamedTuple):
    """Contents of a tensor: its sizes innermost first, its bytes in an array."""

    kind: TensorType
    sizes: tuple[int, ...]
    data: Values


class Result(NamedTuple):
    """What ggml computed, what numpy did, and how far apart they may be (see LOST)."""

    found: Values
    expected: Values
    tolerance: float


class Trial:
    """One graph at a time, on one thread."""

    def __init__(self, ggml: Ggml) -> None:
        self.ggml = ggml
        self.random = np.random.default_rng(0)
        self._backend = ggml.backend_cpu_init()
        ggml.backend_cpu_set_n_threads(self._backend, 1)
        self._device = ggml.backend_reg_dev_get(ggml.backend_cpu_reg(), 0)

    def normal(self, *shape: int) -> F32:
        """Random values."""
        return self.random.standard_normal(shape, np.float32)

    def quantized(self, kind: TensorType, values: F32) -> Operand:
        """Values [..., width] as a tensor of any type of weights."""
        width = values.shape[-1]
        rows = values.size // width
        data = np.empty(rows * kind.row_nbytes(width), np.uint8)
        pointers = values.ctypes.data, data.ctypes.data
        nbytes = self.ggml.quantize_chunk(kind.number, *pointers, 0, rows, width, None)
        if nbytes != data.nbytes:
            raise WrongResultError(f"{kind.name} takes {nbytes} bytes, expected {data.nbytes}")
        return Operand(kind, values.shape[::-1], data)

    def compute(
        self, build: Build, *operands: Values | Operand, like: Values, memory: int | None = None
    ) -> Values | None:
        """The result of a graph, in the shape and dtype of `like`.

        `memory`: a type of buffer for the first operand; None if the operator does not take it there.
        """
        ggml, given = self.ggml, [_operand(o) for o in operands]
        with contextlib.ExitStack() as last:
            context = ggml.init(InitParams(ARENA_NBYTES, None, True))
            last.callback(ggml.free, context)
            tensors = [self._tensor(context, operand) for operand in given]
            if memory is not None:
                nbytes = ggml.backend_buft_get_alloc_size(memory, tensors[0])
                buffer = ggml.backend_buft_alloc_buffer(memory, nbytes)
                last.callback(ggml.backend_buffer_free, buffer)
                base = ggml.backend_buffer_get_base(buffer)
                ggml.backend_tensor_alloc(buffer, tensors[0], base)
            result = build(context, *tensors)
            if not ggml.backend_dev_supports_op(self._device, result):
                return None
            ggml.set_output(result)
            graph = ggml.new_graph_custom(context, GRAPH_SIZE, False)
            ggml.build_forward_expand(graph, result)
            scratch = ggml.gallocr_new(ggml.backend_cpu_buffer_type())
            last.callback(ggml.gallocr_free, scratch)
            if not ggml.gallocr_alloc_graph(scratch, graph):
                raise WrongResultError("no memory for a graph")
            for tensor, operand in zip(tensors, given, strict=True):
                data = operand.data
                ggml.backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)
            status = ggml.backend_graph_compute(self._backend, graph)
            if status != SUCCESS or ggml.nbytes(result) != like.nbytes:
                nbytes = ggml.nbytes(result)
                raise WrongResultError(f"status {status}, {nbytes} bytes, expected {like.nbytes}")
            found = np.empty_like(like)
            ggml.backend_tensor_get(result, found.ctypes.data, 0, found.nbytes)
        return found

    def result(
        self, build: Build, *operands: Values | Operand, expected: Values, tolerance: float
    ) -> Iterator[Result]:
        """Computed by ggml, and as expected."""
        found = self.compute(build, *operands, like=expected)
        if found is None:
            raise WrongResultError("it is not supported")
        yield Result(found, expected, tolerance)

    def _tensor(self, context: int, operand: Operand) -> int:
        new = getattr(self.ggml, f"new_tensor_{len(operand.sizes)}d")
        tensor = int(new(context, operand.kind.number, *operand.sizes))
        self.ggml.set_input(tensor)
        return tensor


def _operand(given: Values | Operand) -> Operand:
    if isinstance(given, Operand):
        return given
    kinds = {"float32": types.F32, "float16": types.F16, "int32": types.I32, "int64": types.I64}
    return Operand(kinds[given.dtype.name], given.shape[::-1], np.ascontiguousarray(given))


def products(trial: Trial, kind: TensorType) -> Iterator[Result]:
    """Rows of a matrix, and its products with one and with many columns."""
    ggml, values = trial.ggml, trial.normal(ROWS, WIDTH)
    weights, rows = trial.quantized(kind, values), np.arange(ROWS, dtype=np.int32)[::-1]
    stored = trial.compute(ggml.get_rows, weights, rows, like=values)
    if stored is None:
        raise WrongResultError("get_rows is not supported")
    yield Result(stored[::-1], values, LOST[kind])
    tolerance = PRODUCT.get(kind, PRODUCT_OF_CODES)
    for columns in COLUMNS:
        inputs = trial.normal(columns, WIDTH)
        expected = inputs @ stored[::-1].T
        yield from trial.result(
            ggml.mul_mat, weights, inputs, expected=expected, tolerance=tolerance
        )


def expert_products(trial: Trial, kind: TensorType) -> Iterator[Result]:
    """Products with matrices that each token chooses."""
    ggml, values = trial.ggml, trial.normal(3, ROWS, WIDTH)
    chosen = np.array([[0], [2], [1], [2]], np.int32)
    inputs = trial.normal(len(chosen), 1, WIDTH)
    expected = np.einsum("tuk,turk->tur", inputs, values[chosen])
    tolerance = PRODUCT.get(kind, PRODUCT_OF_CODES) + LOST[kind]
    weights = trial.quantized(kind, values)
    yield from trial.result(
        ggml.mul_mat_id, weights, inputs, chosen, expected=expected, tolerance=tolerance
    )


def repacked_products(trial: Trial, kind: TensorType, memory: int) -> Iterator[Result]:
    """Products of a rearranged matrix; none if this build does not rearrange the type."""
    ggml, values = trial.ggml, trial.normal(ROWS, WIDTH)
    weights, rows = trial.quantized(kind, values), np.arange(ROWS, dtype=np.int32)
    stored = trial.compute(ggml.get_rows, weights, rows, like=values)
    for columns in COLUMNS:
        inputs = trial.normal(columns, WIDTH)
        like = np.empty((columns, ROWS), np.float32)
        found = trial.compute(ggml.mul_mat, weights, inputs, like=like, memory=memory)
        if found is not None and stored is not None:
            yield Result(found, inputs @ stored.T, PRODUCT_OF_CODES)


def norms(trial: Trial) -> Iterator[Result]:
    """RMS norm."""
    x = trial.normal(5, WIDTH)
    expected = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(EPSILON))

    def build(context: int, tensor: int) -> int:
        return int(trial.ggml.rms_norm(context, tensor, EPSILON))

    yield from trial.result(build, x, expected=expected, tolerance=EXACT)


def rotations(trial: Trial) -> Iterator[Result]:
    """RoPE of neighbours and of halves, with a divisor for each frequency."""
    half, positions = HEAD_DIM // 2, np.arange(7, 12, dtype=np.int32)
    factors = np.linspace(1, 8, half, dtype=np.float32)
    x = trial.normal(len(positions), HEADS, HEAD_DIM)
    angles = positions[:, None] * ROPE_BASE ** (-np.arange(half) / half) / factors
    turned = np.exp(1j * angles)[:, None, :]
    for mode in (ROPE_PAIRS, ROPE_HALVES):
        shape = (*x.shape[:2], half, 2) if mode == ROPE_PAIRS else (*x.shape[:2], 2, half)
        axis = -1 if mode == ROPE_PAIRS else -2
        parts = x.reshape(shape)
        complex_ = (parts.take(0, axis) + 1j * parts.take(1, axis)) * turned
        expected = np.stack((complex_.real, complex_.imag), axis).reshape(x.shape)

        def build(context: int, *tensors: int, mode: int = mode) -> int:
            scaling = (ROPE_BASE, 1.0, 0.0, 1.0, 0.0, 0.0)
            return int(trial.ggml.rope_ext(context, *tensors, HEAD_DIM, mode, 0, *scaling))

        expected = expected.astype(np.float32)
        yield from trial.result(build, x, positions, factors, expected=expected, tolerance=EXACT)


def gates(trial: Trial) -> Iterator[Result]:
    """SwiGLU of two tensors."""
    gate, up = trial.normal(5, WIDTH), trial.normal(5, WIDTH)
    expected = gate / (1 + np.exp(-gate)) * up
    tolerance = 0.001
    yield from trial.result(
        trial.ggml.swiglu_split, gate, up, expected=expected, tolerance=tolerance
    )


def attention(trial: Trial, dtype: str) -> Iterator[Result]:
    """Causal attention of one and of many positions to keys and values of a type."""
    scale = HEAD_DIM**-0.5
    for queries in COLUMNS:
        q = trial.normal(HEADS, queries, HEAD_DIM)
        k, v = (trial.normal(KV_HEADS, KEYS, HEAD_DIM).astype(dtype) for _ in range(2))
        hidden = np.arange(KEYS) > np.arange(queries)[:, None] + KEYS // 4
        mask = np.where(hidden, np.float16(-np.inf), np.float16(0))
        keys, values = (x.astype(np.float32).repeat(HEADS // KV_HEADS, 0) for x in (k, v))
        scores = q @ keys.swapaxes(1, 2) * scale + mask.astype(np.float32)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        expected = (weights / weights.sum(-1, keepdims=True)) @ values
        expected = np.ascontiguousarray(expected.swapaxes(0, 1))

        def build(context: int, *tensors: int) -> int:
            return int(trial.ggml.flash_attn_ext(context, *tensors, scale, 0.0, 0.0))

        yield from trial.result(build, q, k, v, mask, expected=expected, tolerance=KEY_TYPES[dtype])


def stores(trial: Trial, dtype: str) -> Iterator[Result]:
    """Rows written into keys and values of a type."""
    into, rows = trial.normal(KEYS, HEAD_DIM).astype(dtype), trial.normal(3, HEAD_DIM)
    places = np.array([5, 0, KEYS - 1])
    expected = into.copy()
    expected[places] = rows
    yield from trial.result(
        trial.ggml.set_rows, into, rows, places, expected=expected, tolerance=KEY_TYPES[dtype]
    )


def steps(trial: Trial, memory: int | None) -> Iterator[tuple[str, Iterator[Result]]]:
    """All of them, with their names. `memory`: where matrices are rearranged."""
    yield "RMS norms", norms(trial)
    for kind in types.WEIGHT_TYPES.values():
        yield f"products of {kind.name} matrices", products(trial, kind)
    for kind in SLOTS:
        yield f"products of chosen {kind.name} matrices", expert_products(trial, kind)
    if memory is not None:
        for kind in REPACKED:
            name = f"products of rearranged {kind.name} matrices"
            yield name, repacked_products(trial, kind, memory)
    yield "RoPE", rotations(trial)
    yield "SwiGLU", gates(trial)
    for dtype in KEY_TYPES:
        yield f"stores of {dtype} keys", stores(trial, dtype)
        yield f"attention to {dtype} keys", attention(trial, dtype)
