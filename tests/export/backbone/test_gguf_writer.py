"""GGUF files: their bytes, and how another program reads them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stem_edge.errors import CheckpointError, ExportError
from stem_edge.export.backbone.gguf_values import TensorSource
from stem_edge.export.backbone.gguf_writer import encode_header, write_gguf
from stem_edge.export.job.files import create_file
from stem_edge.export.quantization import streams
from stem_edge.ggml import types
from stem_edge.ggml.gguf_schema import Value
from stem_edge.ggml.library import Ggml
from stem_edge.ggml.types import WEIGHT_TYPES, TensorType
from stem_edge.numerics.matrix import ArrayMatrix
from stem_edge.numerics.quantize import F32, U8

gguf = pytest.importorskip("gguf")
QUANTIZED = [t for t in WEIGHT_TYPES.values() if t.block > 1]
METADATA: dict[str, Value] = {"a.text": "Grüße", "a.count": 7}


def values(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def source(name: str, array: F32, type: TensorType, importance: F32 | None = None) -> TensorSource:
    return TensorSource(name, ArrayMatrix(array), type, importance)


def write(
    path: Path,
    ggml: Ggml,
    tensors: list[TensorSource],
    metadata: dict[str, Value] | None = None,
    threads: int = 2,
) -> Any:
    """The file as another program reads it."""
    keys: dict[str, Value] = {"general.architecture": "stem", **(metadata or {})}
    weights = streams.MatrixReader(threads, lambda nbytes: None)
    with create_file(path) as file:
        write_gguf(file, ggml, keys, tensors, weights)
    assert file.entry.nbytes == path.stat().st_size
    return gguf.GGUFReader(path)


def quantize(ggml: Ggml, array: F32, type: TensorType, importance: F32 | None = None) -> U8:
    """Bytes of the whole matrix, by ggml in one call."""
    coded = np.empty((len(array), type.row_nbytes(array.shape[1])), np.uint8)
    channels = None if importance is None else importance.ctypes.data
    ggml.quantize_chunk(
        type.number, array.ctypes.data, coded.ctypes.data, 0, *array.shape, channels
    )
    return coded


def test_the_header_is_what_another_writer_makes_of_the_same(tmp_path: Path) -> None:
    other = gguf.GGUFWriter(tmp_path / "x", "stem")
    other.add_string("a.text", METADATA["a.text"])
    other.add_uint32("a.count", 7)
    tensors = [source("m", values(3, 64), types.Q8_0), source("v", values(5), types.F32)]
    for tensor in tensors:
        of = gguf.GGMLQuantizationType(tensor.type.number)
        nbytes = {"m": 3 * 2 * 34, "v": 20}[tensor.name]
        other.add_tensor_info(tensor.name, tensor.matrix.shape, np.float32, nbytes, of)
    other.write_header_to_file()
    other.write_kv_data_to_file()
    other.write_ti_data_to_file()
    other.close()
    found = encode_header({"general.architecture": "stem", **METADATA}, tensors)
    assert found == (tmp_path / "x").read_bytes()


def test_another_program_reads_every_key_and_tensor(ggml: Ggml, tmp_path: Path) -> None:
    arrays = {type: values(5, 512, seed=n) for n, type in enumerate(WEIGHT_TYPES.values())}
    tensors = [source(t.name, array, t) for t, array in arrays.items()]
    vector = values(300)
    reader = write(tmp_path / "x", ggml, [*tensors, source("v", vector, types.F32)], METADATA)
    for key, value in METADATA.items():
        assert reader.fields[key].contents() == value
    by_name = {tensor.name: tensor for tensor in reader.tensors}
    assert list(by_name) == [*(tensor.name for tensor in tensors), "v"]
    assert np.array_equal(by_name["v"].data, vector)
    for type, array in arrays.items():
        tensor = by_name[type.name]
        assert tensor.tensor_type == type.number
        assert tensor.data_offset % 32 == 0
        assert tensor.shape.tolist() == [512, 5]
        stored = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        peak = np.abs(array).max()
        # Half a step of the type's codes; the K-quants share scales that are themselves rounded.
        bits = {"F32": 24, "F16": 11, "Q4_0": 4, "Q4_K": 4, "Q8_0": 8, "Q6_K": 6}
        bound = peak * 2.0 ** -(bits.get(type.name, 5) - 1)
        assert np.abs(stored - array).max() <= bound
        if bits.get(type.name, 0) < 11:
            assert np.abs(stored - array).max() > bound / 16  # it was quantized, and as that type


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("type", QUANTIZED, ids=lambda type: type.name)
def test_pieces_and_threads_do_not_matter(
    ggml: Ggml,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    type: TensorType,
    weighted: bool,
) -> None:
    array = values(37, 512)
    importance = np.abs(values(512, seed=1)) if weighted else None
    whole = quantize(ggml, array, type, importance)
    for rows, threads in itertools.product((1, 5, 64), (1, 3)):
        monkeypatch.setattr(streams, "PIECE_VALUES", rows * 512)
        path = tmp_path / f"{rows}-{threads}"
        tensors = [source("m", array, type, importance)]
        found = write(path, ggml, tensors, threads=threads).tensors[0].data
        assert np.array_equal(found, whole)
    if weighted and type != types.Q8_0:  # because ggml cannot use it there
        assert not np.array_equal(whole, quantize(ggml, array, type))


@pytest.mark.parametrize("type", [types.F16, types.Q4_0, types.Q6_K], ids=lambda t: t.name)
def test_values_that_a_type_cannot_hold_are_refused(
    ggml: Ggml, tmp_path: Path, type: TensorType
) -> None:
    array = values(4, 256)
    array[2, 9] = -1e5
    with pytest.raises(ExportError, match=f"gate: holds 100000, but {type.name} goes up to 65504"):
        write(tmp_path / "x", ggml, [source("gate", array, type)])
    array[2, 9] = np.nan
    with pytest.raises(CheckpointError, match="gate: 1 NaN or infinite values, the first in row 2"):
        write(tmp_path / "y", ggml, [source("gate", array, type)])
