"""GGUF files as llama.cpp's package writes them: keys, tensors of all types, split models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from exports import refused
from gguf_files import write_file

from stem_edge.export.checkpoints.head_padding import order_heads
from stem_edge.export.tensor_files.gguf import open_gguf
from stem_edge.export.tensor_files.gguf_tensor import decoded
from stem_edge.ggml.types import KEPT_TYPES, TensorType

RANDOM = np.random.default_rng(0)


def test_every_kind_of_number(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{kind}")(kind, 100)
    writer.add_float64("float64", 1e-300)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = open_gguf(tmp_path / "a.gguf").keys
    assert found.pop("float64") == 1e-300
    assert found.pop("general.architecture") == "llama"
    assert len(found) == 8 and {*found.values()} == {100}


def codes_of(kind: TensorType, rows: int) -> Any:
    """Random blocks, whose scales may be anything."""
    return RANDOM.integers(0, 256, (rows, kind.row_nbytes(512)), np.uint8)


@pytest.mark.parametrize("kind", KEPT_TYPES.values(), ids=lambda kind: kind.name)
def test_rows_of_every_type_are_those_of_its_package(kind: TensorType, tmp_path: Path) -> None:
    codes = codes_of(kind, 6)
    path = write_file(tmp_path / "a.gguf", {}, {"t": (codes, kind.name)})
    tensor = open_gguf(path).tensors["t"]
    assert tensor.stored is not None
    assert (tensor.shape, tensor.stored.type) == ((6, 512), kind)
    assert repr(tensor) == f"a tensor [6, 512] of {kind.name}"
    np.testing.assert_array_equal(tensor.stored.read(1, 4), codes[1:4])
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(codes, gguf.GGMLQuantizationType(kind.number))
    for start, stop, rows in ((0, 6, expected), (2, 3, expected[2:3]), (5, 99, expected[5:])):
        found = tensor.rows(start, stop)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, rows)


def test_vectors_and_order_of_axes(tmp_path: Path) -> None:
    arrays = {"v": np.arange(5, dtype=np.float32), "m": np.arange(6.0).reshape(2, 3).astype("f4")}
    tensors = open_gguf(write_file(tmp_path / "a.gguf", {}, arrays)).tensors
    for name, array in arrays.items():
        assert tensors[name].shape == array.shape
        np.testing.assert_array_equal(tensors[name].rows(0, len(array)), array)
    np.testing.assert_array_equal(tensors["v"].rows(2, 4), [2, 3])


def test_heads_in_another_order_keep_the_codes_of_their_rows(tmp_path: Path) -> None:
    kind = next(kind for kind in KEPT_TYPES.values() if kind.name == "Q8_0")
    codes = codes_of(kind, 12)
    path = write_file(tmp_path / "a.gguf", {}, {"t": (codes, "Q8_0")})
    tensor, order = open_gguf(path).tensors["t"], np.array([2, 0, 3, 1])
    heads = order_heads(tensor, order)
    assert heads.stored is not None
    expected = codes.reshape(3, 4, -1)[:, order].reshape(codes.shape)
    for start, stop in ((0, 12), (3, 9), (4, 8), (11, 12)):
        np.testing.assert_array_equal(heads.stored.read(start, stop), expected[start:stop])
        np.testing.assert_array_equal(heads.rows(start, stop), decoded(expected[start:stop], kind))
    again = order_heads(heads, np.argsort(order))
    assert again.stored is not None
    np.testing.assert_array_equal(again.stored.read(0, 12), codes)


def test_a_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    keys = {"split.no": 1, "split.count": 3, "split.tensors.count": 3}
    path = write_file(tmp_path / "m.gguf", keys, {"t": np.zeros((1, 2), np.float32)})
    refused(lambda: open_gguf(path), path, "one of 3 files", "llama-gguf-split --merge")
