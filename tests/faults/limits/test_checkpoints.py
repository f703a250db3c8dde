"""Limits of checkpoints: JSON, first bytes, stored values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract import refused

from stem_edge.errors import CheckpointError
from stem_edge.export.tensor_files import json as json_files
from stem_edge.export.tensor_files.json import read_json
from stem_edge.export.tensor_files.source_file import SourceFile
from stem_edge.export.tensor_files.tensor import file_tensor

# JSON


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.json"


def not_json(file: Path, data: bytes, said: str) -> None:
    file.write_bytes(data)
    refused(lambda: read_json(file, "a test", dict), CheckpointError, file, "a test", said)


def test_the_size_of_json(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (json_files.MAX_NBYTES, json_files.MAX_VALUES) == (16_777_216, 4_194_304)
    monkeypatch.setattr(json_files, "MAX_NBYTES", 100)
    file.write_bytes(b"{}".ljust(100))
    assert read_json(file, "a test", dict) == {}
    not_json(file, b"{}".ljust(101), "larger than 100 bytes")
    monkeypatch.setattr(json_files, "MAX_VALUES", 4)
    file.write_bytes(b'{"a": [1, 2], "b": 0}')
    assert read_json(file, "a test", dict) == {"a": [1, 2], "b": 0}
    not_json(file, b'{"a": [1, 2, 3], "b": 0}', "more than 4 values")
    not_json(file, b'{"a": [1, 2], "b": {}}', "more than 4 values")
    not_json(file, b"[]", "object")


# Values that lie in files


def source(path: Path, values: bytes) -> SourceFile:
    path.write_bytes(values)
    return SourceFile(path)


def tensor(path: Path, dtype: str, shape: tuple[int, ...], values: bytes, **fields: Any) -> Any:
    return file_tensor(source(path, values), "w", dtype, shape, fields.pop("at", 0), **fields)


VALUES_OF = {
    "F32": np.array([1.5, -2, 3, 4], "<f4"),
    "F16": np.array([1.5, -2, 3, 4], "<f2"),
    "F64": np.array([1.5, -2, 3, 4], "<f8"),
    "BF16": np.array([0x3FC0, 0xC000, 0x4040, 0x4080], "<u2"),
}


def test_values_of_every_type(file: Path) -> None:
    for dtype, values in VALUES_OF.items():
        found = tensor(file, dtype, (2, 2), values.tobytes())
        assert repr(found) == f"a tensor [2, 2] of {dtype}"
        assert found.rows(0, 2).tolist() == [[1.5, -2], [3, 4]]
        assert found.rows(0, 2).dtype == np.float32
        assert found.rows(1, 9).tolist() == [[3, 4]]
        assert found.rows(2, 9).shape == found.rows(5, 9).shape == (0, 2)
        part = found.part(1, 2)
        assert (part.name, part.shape, part.path) == (found.name, (1, 2), file)
        assert part.rows(0, 1).tolist() == [[3, 4]]
    for dtype, kind in (("I32", "<i4"), ("I64", "<i8")):
        found = tensor(file, dtype, (3,), np.array([1, -2, 3], kind).tobytes())
        assert (found.numbers().tolist(), found.numbers().dtype) == ([1, -2, 3], kind)
    huge = tensor(file, "F64", (1,), np.array([1e300]).tobytes())
    assert huge.rows(0, 1).tolist() == [np.inf]
