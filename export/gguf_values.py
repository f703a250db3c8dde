"""Rows of a matrix as ggml stores them: float32, float16, or codes from ggml's own quantizers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from stem_edge.errors import ExportError
from stem_edge.export.report import ErrorMeter
from stem_edge.ggml import INSTALL, Ggml
from stem_edge.ggml_types import F16, TensorType
from stem_edge.ggml_types import F32 as FLOAT32
from stem_edge.quantize import F32

GREATEST = float(np.finfo(np.float16).max)  # of a value, and of the scales of quantized blocks
EVERY = 4  # rows of which one is measured

Bytes = npt.NDArray[np.uint8]


def encoder(
    ggml: Ggml,
    name: str,
    kind: str,
    type: TensorType,
    importance: F32 | None,
    meter: ErrorMeter,
) -> Callable[[F32], Bytes]:
    """work(rows [n, K]) -> their bytes in a type, for any thread; the meter gets the error of every
    fourth row, because measuring all would double the time of the fast types.

    A row is coded by itself, so that it does not matter which rows come together.
    importance: [K], how much each channel counts for a quantized type; the other types have no use
        for it.
    """
    if type == FLOAT32:
        return lambda values: _bytes(values.astype("<f4"))
    code = _half if type == F16 else _quantizer(ggml, name, type, importance)
    decode = _decoder(type)

    def work(values: F32) -> Bytes:
        _check_range(name, type, values)
        coded = code(values)
        sample = np.ascontiguousarray(coded.reshape(len(values), -1)[::EVERY])
        meter.add(kind, values[::EVERY], decode(sample))
        return coded

    return work


def _half(values: F32) -> Bytes:
    return _bytes(values.astype("<f2"))


def _quantizer(
    ggml: Ggml, name: str, type: TensorType, importance: F32 | None
) -> Callable[[F32], Bytes]:
    """ggml's quantizer of a type; ctypes lets other threads run meanwhile."""
    ggml.quantize_init(type.number)  # before threads: it fills tables of the library
    weights = None if importance is None else np.ascontiguousarray(importance, np.float32)

    def code(values: F32) -> Bytes:
        rows, width = values.shape
        source = np.ascontiguousarray(values, np.float32)
        coded = np.empty(rows * type.row_nbytes(width), np.uint8)
        written = ggml.quantize_chunk(
            type.number,
            source.ctypes.data,
            coded.ctypes.data,
            0,
            rows,
            width,
            None if weights is None else weights.ctypes.data,
        )
        if written != coded.nbytes:
            raise ExportError(
                f"{name}: ggml wrote {written} bytes of {type.name}, expected {coded.nbytes}; "
                f"install the library again with: {INSTALL}"
            )
        return coded

    return code


def import_gguf() -> Any:
    """The gguf package, which only exports for ggml need. Raises ExportError."""
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise ExportError(
            f"the quantization error is measured with the gguf package, which did not import "
            f"({error}); install it with: {INSTALL}"
        ) from error


def _decoder(type: TensorType) -> Callable[[Bytes], F32]:
    """Rows of bytes [n, b] -> values [n, K]: by the gguf package, whose reading is not ggml's own."""
    if type == F16:
        return lambda coded: coded.view("<f2").astype(np.float32)
    gguf = import_gguf()
    number = gguf.GGMLQuantizationType(type.number)

    def decode(coded: Bytes) -> F32:
        found: F32 = gguf.quants.dequantize(coded, number)
        return found

    return decode


def _check_range(name: str, type: TensorType, values: F32) -> None:
    peak = float(np.abs(values).max(initial=0))
    if peak > GREATEST:
        raise ExportError(
            f"{name}: holds {peak:g}, {type.name} goes to {GREATEST:g}; the checkpoint may be "
            "damaged, or export with --backbone f32"
        )


def _bytes(values: npt.NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
