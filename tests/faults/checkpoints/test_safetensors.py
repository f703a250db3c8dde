"""Hostile and damaged safetensors: headers, offsets, indexes, and other files of that name."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract import refused

from stem_edge.errors import CheckpointError
from stem_edge.export.tensor_files.safetensors import INDEX, open_folder, open_tensors

HEADER: dict[str, Any] = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}
VALUES = np.arange(6, dtype="<f4").tobytes() + bytes(8)


def encoded(header: Any = HEADER, values: bytes = VALUES, length: int | None = None) -> bytes:
    """A file with this header, which may be bytes, and claim another length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + values


def changed(name: str, **fields: Any) -> dict[str, Any]:
    """The header with other fields of one tensor."""
    return HEADER | {name: HEADER[name] | fields}


def opened(folder: Path, data: bytes, *naming: str) -> str:
    path = folder / "model.safetensors"
    path.write_bytes(data)
    return refused(lambda: open_tensors(path), CheckpointError, path, *naming, kept=[folder])


def test_the_file_that_is_damaged_below_is_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(encoded())
    tensors = open_tensors(tmp_path / "model.safetensors")
    assert tensors["a"].rows(1, 2).tolist() == [[3.0, 4.0, 5.0]]
    assert tensors["b"].shape == (4,)


def archive() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr("data.pkl", b"")
    return stream.getvalue()


def test_c2_a_polyglot_is_refused(tmp_path: Path) -> None:
    """A safetensors file to its reader, a zip archive to others, which look at the end first."""
    opened(tmp_path, encoded() + archive(), "file not fully covered")
    zip_head = b"PK\x03\x04" + bytes(4) + b"{}" + bytes(1 << 10)  # a header of 67 megabytes
    opened(tmp_path, zip_head, "a zip archive")


def test_c5_a_sparse_file_with_a_huge_header_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 39) + b"{")
    os.truncate(path, 1 << 40)
    refused(lambda: open_tensors(path), CheckpointError, "header too large", seconds=5)


def test_c6_a_header_of_millions_of_values_is_refused_before_it_fills_the_memory(
    tmp_path: Path,
) -> None:
    header = {"a": HEADER["a"] | {"shape": [2, 3] + [1] * 5_000_000}, "b": HEADER["b"]}
    for each in (header, b"," * 5_000_000):  # the library does not see them
        opened(tmp_path, encoded(each), "more than 4194304 values")


FILES: list[tuple[bytes, str]] = [
    (pickle.dumps({"a": [1.0] * 9}), "a bare pickle, which can carry code"),
    (archive(), "a zip archive"),
    (b"\x1f\x8b\x08" + bytes(99), "a gzip archive"),
    (b"GGUF" + bytes(99), "a GGUF file"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-lfs"),
    (b"<!DOCTYPE html><title>404</title>", "a web page"),
    (archive() + encoded(), "a zip archive"),
]  # fmt: skip
# The library's words. Of the rules that it checks, each has a case here.
HEADERS: list[tuple[bytes, str]] = [
    (b'{"a\xff": 1}', "UTF-8"), (b'{"a": ', "EOF"), (b"[1, 2]", "invalid JSON"),
    (b'{"__metadata__": ' + b'{"a":' * 100_000, "invalid type"), (b'{"a": 3}', "invalid type"),
    (b'{"a": {"shape": [1], "data_offsets": [0, 4]}}', "missing field `dtype`"),
]  # fmt: skip
PLACES: list[tuple[Any, bytes, str]] = [
    (changed("b", data_offsets=[23, 31]), VALUES, "invalid offset for tensor `b`"),
    (changed("b", data_offsets=[26, 34]), VALUES + b"xx", "invalid offset for tensor `b`"),
    (HEADER, VALUES + b"tail", "not fully covered"), (HEADER, VALUES[:-1], "not fully covered"),
]  # fmt: skip
FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"shape": [2**40, 2**40]}, "overflow"), ({"shape": [-2, -3]}, "invalid value"),
    ({"shape": [2, 4]}, "invalid shape"), ({"shape": [2, 3, *[1] * 99]}, "impossible shape"),
    ({"dtype": "FLOAT"}, "unknown variant `FLOAT`"), ({"data_offsets": [24, 0]}, "invalid offset"),
    ({"data_offsets": [0, 2**64]}, "invalid type"), ({"data_offsets": [0, -24]}, "invalid value"),
]  # fmt: skip
REFUSED = FILES + [(encoded(header), said) for header, said in HEADERS]
REFUSED += [(encoded(header, values), said) for header, values, said in PLACES]
REFUSED += [(encoded(changed("a", **fields)), said) for fields, said in FIELDS]
LENGTHS = (0, 1, 7, 1 << 20, 100_000_001, 1 << 62, 2**63, 2**64 - 1)  # of a header
REFUSED += [(encoded(length=length), "header") for length in LENGTHS]
REFUSED += [(encoded()[:keep], "copy it again") for keep in (0, 7, 8, 40, -1)]


@pytest.mark.parametrize(("data", "said"), REFUSED, ids=range(len(REFUSED)))
def test_c2_c5_c6_c7_c8_c10_what_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    opened(tmp_path, data, said)


def folder_of(folder: Path, places: dict[str, str], headers: dict[str, Any]) -> object:
    for name, header in headers.items():
        (folder / name).write_bytes(encoded(header, bytes(4 * len(header))))
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return open_folder(folder)


def one(*names: str) -> dict[str, Any]:
    """A header of tensors of one value."""
    at = enumerate(names)
    return {n: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, n in at}


ONE, TWO = "1.safetensors", "2.safetensors"
FOLDERS: dict[str, tuple[dict[str, str], dict[str, Any], tuple[str, ...]]] = {
    "all gone": (
        {"a": ONE, "b": TWO},
        {},
        (ONE, "cannot open (No such file or directory); copy all files"),
    ),
    "gone": ({"a": ONE, "b": ONE}, {ONE: one("a")}, (f"(b is not in {ONE})",)),
    "elsewhere": (
        {"a": ONE, "b": ONE, "c": TWO},
        {ONE: one("a"), TWO: one("b", "c")},
        (f"(b is not in {ONE})",),
    ),
    "no file": (
        {"a": ONE, "b": TWO},
        {ONE: one("a")},
        (TWO, "cannot open (No such file or directory); copy all files"),
    ),
    "a path": ({"a": "x/" + ONE}, {}, ("tensor a is in 'x/1.safetensors'",)),
    "paths": ({"a": "../" + ONE, "b": "/" + ONE, "c": "x\\" + ONE}, {}, ("../1", "'/1", "c is")),
    "a NUL": ({"a": "x\0.safetensors"}, {}, ("tensor a is in",)),
    "another kind": ({"a": "a.bin"}, {}, ("tensor a is in 'a.bin'",)),
    "no name": ({"a": ".safetensors"}, {}, ("tensor a is in '.safetensors'",)),
    "a long name": ({"a": "x" * 201 + ".safetensors"}, {}, ("tensor a is in",)),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_c9_indexes_that_do_not_fit_name_every_problem(tmp_path: Path, case: str) -> None:
    places, headers, said = FOLDERS[case]
    refused(lambda: folder_of(tmp_path, places, headers), CheckpointError, tmp_path, *said)


def index_refused(folder: Path, text: str, said: str) -> None:
    (folder / INDEX).write_text(text)
    refused(lambda: open_folder(folder), CheckpointError, folder / INDEX, said, kept=[folder])


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "[" * 100_000]
)
def test_c9_a_file_that_is_not_an_index(tmp_path: Path, text: str) -> None:
    index_refused(tmp_path, text, "not an index of safetensors files")


def test_c10_a_file_that_is_cut_while_it_is_read_is_an_error_and_not_a_signal(
    tmp_path: Path,
) -> None:
    """The format has no checksums: other bytes of the same size are other weights to any reader."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(
        encoded(
            {"a": {"dtype": "F32", "shape": [4096, 4], "data_offsets": [0, 65536]}}, bytes(65536)
        )
    )
    tensor = open_tensors(path)["a"]
    assert tensor.rows(0, 4096).sum() == 0
    os.truncate(path, 8192)
    refused(lambda: tensor.rows(2048, 4096), CheckpointError, path, "changed during the export")
