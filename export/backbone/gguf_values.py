"""Encodes matrix rows in one of ggml's types: float32, float16, or a quantized type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stem_edge.errors import ExportError
from stem_edge.ggml.library import Ggml
from stem_edge.ggml.types import F16, TensorType
from stem_edge.ggml.types import F32 as FLOAT32
from stem_edge.numerics.matrix import Matrix
from stem_edge.numerics.quantize import F32, U8

# Largest value in all types except float32, because the scales of quantized blocks are float16.
GREATEST = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class TensorSource:
    """Tensor to be written to a GGUF file: its name, its values and the type to store it in."""

    name: str  # in the file
    matrix: Matrix  # [rows, width], or a vector [rows]
    type: TensorType
    importance: F32 | None = None  # [width]: weight of each channel in a quantized type


def encoder(ggml: Ggml, tensor: TensorSource) -> Callable[[F32], U8]:
    """Return a thread-safe function that encodes float32 rows [n, K] of the tensor as bytes.

    Each row is encoded by itself, so callers may pass any number of rows.
    """
    type = tensor.type
    if type == FLOAT32:
        return lambda values: _bytes(values.astype("<f4"))
    code = None if type == F16 else _quantizer(ggml, tensor)

    def work(values: F32) -> U8:
        if (peak := float(np.abs(values).max(initial=0))) > GREATEST:
            raise ExportError(
                f"{tensor.name}: holds {peak:g}, but {type.name} goes up to {GREATEST:g}; check that "
                "the checkpoint is not damaged, or export with --type f32"
            )
        return code(values) if code else _bytes(values.astype("<f2"))

    return work


def _quantizer(ggml: Ggml, tensor: TensorSource) -> Callable[[F32], U8]:
    """Return ggml's quantizer for a tensor as a thread-safe function: rows [n, K] -> bytes."""
    type, weights = tensor.type, tensor.importance
    ggml.quantize_init(type.number)  # before threads start, because it fills the library's tables
    if weights is not None:
        weights = np.ascontiguousarray(weights, np.float32)

    def code(values: F32) -> U8:
        rows, width = values.shape
        source = np.ascontiguousarray(values, np.float32)
        coded = np.empty(rows * type.row_nbytes(width), np.uint8)
        ggml.quantize_chunk(
            type.number,
            source.ctypes.data,
            coded.ctypes.data,
            0,
            rows,
            width,
            None if weights is None else weights.ctypes.data,
        )
        return coded

    return code


def _bytes(values: npt.NDArray[Any]) -> U8:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
