"""Hostile and damaged safetensors: headers, offsets, indexes; and what else bears that name."""

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
from stem_edge.export.safetensors_files import TensorFiles, open_tensors

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
    assert (tensors["b"].shape, tensors["b"].nbytes) == ((4,), 8)


def archive() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr("data.pkl", b"")
    return stream.getvalue()


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (pickle.dumps({"a": [1.0] * 9}), "a bare pickle, which can carry code"),
        (archive(), "a zip archive"),
        (b"\x1f\x8b\x08" + bytes(99), "a gzip archive"),
        (b"GGUF" + bytes(99), "a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-lfs"),
        (b"<!DOCTYPE html><title>404</title>", "a page of a web site"),
        (archive() + encoded(), "a zip archive"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_c2_other_files_under_this_name_are_called_by_theirs(
    tmp_path: Path, data: bytes, what: str
) -> None:
    opened(tmp_path, data, what)


def test_c2_a_polyglot_is_refused(tmp_path: Path) -> None:
    """A safetensors file to its reader, a zip archive to others, which look at the end first."""
    opened(tmp_path, encoded() + archive(), f"{len(archive())} bytes are stray")
    zip_head = b"PK\x03\x04" + bytes(4) + b"{}" + bytes(1 << 10)  # a header of 67 megabytes
    opened(tmp_path, zip_head, "a zip archive")


@pytest.mark.parametrize("length", [0, 1, 7, 1 << 20, 100_000_001, 1 << 62, 2**63, 2**64 - 1])
def test_c5_header_lengths(tmp_path: Path, length: int) -> None:
    opened(tmp_path, encoded(length=length), str(length) if length != 7 else "not a safetensors")


@pytest.mark.parametrize("data", [b"", b"\0", bytes(7), bytes(8)], ids=len)
def test_c5_files_shorter_than_a_header(tmp_path: Path, data: bytes) -> None:
    opened(tmp_path, data, "bytes")


def test_c5_a_sparse_file_with_a_huge_header_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 39) + b"{")
    os.truncate(path, 1 << 40)
    refused(lambda: open_tensors(path), CheckpointError, "549755813888", seconds=5)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b'{"a\xff": 1}', "position 3"),
        (b'{"a": ', "char"),
        (b"[1, 2]", "object"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (json.dumps(HEADER).encode()[:-1] + b', "a": {}}', "more than once"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested deeper than 32"),
        (b'{"__metadata__": ' + b'{"a":' * 100_000, "nested deeper than 32"),
        (b'{"a": {"dtype": "F32", "dtype": "F16"}}', "more than once"),
        (b'{"a": 3}', "tensor a"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], "run": 1}}', "tensor a"),
        (b'{"a": {"shape": [1], "data_offsets": [0, 4]}}', "dtype"),
    ],
    ids=range(11),
)
def test_c6_headers_that_are_no_plain_json(tmp_path: Path, header: bytes, said: str) -> None:
    opened(tmp_path, encoded(header), said)


def test_c6_a_header_of_millions_of_values_is_refused_before_it_fills_the_memory(
    tmp_path: Path,
) -> None:
    opened(tmp_path, encoded(b'{"a": [' + b"[]," * 5_000_000 + b"[]]}"), "more than 4194304 values")


@pytest.mark.parametrize(
    ("header", "values", "said"),
    [
        (changed("b", data_offsets=[20, 28]), VALUES, "tensor b lies over another one"),
        (changed("b", data_offsets=[26, 34]), VALUES + b"xx", "behind 2 bytes of no tensor"),
        (HEADER, VALUES + b"tail", "4 bytes are stray"),
        (HEADER, VALUES[:-1], "tensor b ends at byte"),
        (changed("a", data_offsets=[4, 28]), VALUES, "behind 4 bytes"),
        (changed("b", data_offsets=[0, 8]), VALUES, "over another one"),
    ],
)
def test_c7_overlaps_holes_and_stray_bytes(
    tmp_path: Path, header: Any, values: bytes, said: str
) -> None:
    opened(tmp_path, encoded(header, values), said)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"shape": [2**63, 2]}, "impossible shape"),
        ({"shape": [2**40, 2**40]}, "more than"),
        ({"shape": [2**32, 2**32, 2**32]}, "more than"),
        ({"shape": [-2, -3]}, "impossible shape"),
        ({"shape": [2, 4]}, "24 bytes, needs 32"),
        ({"shape": [1] * 99}, "impossible shape"),
        ({"shape": [10**40]}, "tensor a"),
        ({"shape": [2.5]}, "tensor a"),
        ({"dtype": "F64"}, "24 bytes, needs 48"),
        ({"dtype": "FLOAT"}, "unknown type FLOAT"),
        ({"dtype": ["F32"]}, "tensor a"),
        ({"data_offsets": [24, 0]}, "tensor a"),
        ({"data_offsets": [0, 2**64]}, "tensor a"),
        ({"data_offsets": [0, -24]}, "tensor a"),
        ({"data_offsets": [0, 24, 48]}, "tensor a"),
        ({"shape": [2**40, 0]}, "24 bytes, needs 0"),
    ],
)
def test_c8_shapes_and_types(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    opened(tmp_path, encoded(changed("a", **fields)), said, "a")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Four files of one tensor each, and their index."""
    for number in range(4):
        header = {f"t{number}": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
        (tmp_path / f"part{number}.safetensors").write_bytes(encoded(header, bytes(4)))
    places = {f"t{number}": f"part{number}.safetensors" for number in range(4)}
    write_index(tmp_path, {"weight_map": places})
    return tmp_path


def write_index(folder: Path, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "model.safetensors.index.json").write_text(text)


def files_refused(folder: Path, *naming: str) -> None:
    refused(lambda: TensorFiles(folder), CheckpointError, *naming, kept=[folder])


def test_c9_all_missing_shards_are_named_at_once(shards: Path) -> None:
    for number in (1, 3):
        (shards / f"part{number}.safetensors").unlink()
    files_refused(shards, "part1.safetensors", "part3.safetensors", "missing")


def test_c9_all_places_outside_of_the_folder_are_named_at_once(shards: Path) -> None:
    places = {"a": "../x.safetensors", "b": "/etc/x.safetensors", "c": "x\0.safetensors"}
    write_index(shards, {"weight_map": places})
    files_refused(shards, "../x", "/etc/x", "c lies in")


def test_c9_the_same_tensor_twice(shards: Path) -> None:
    text = '{"weight_map": {"t0": "part0.safetensors", "t0": "part1.safetensors"}}'
    write_index(shards, text)
    files_refused(shards, "'t0' is there more than once")
    (shards / "part1.safetensors").write_bytes((shards / "part0.safetensors").read_bytes())
    write_index(shards, {"weight_map": {"t0": "part0.safetensors", "t1": "part1.safetensors"}})
    files_refused(shards, "t0 is in part0.safetensors, too")


def test_c9_tensors_that_are_not_where_the_index_says(shards: Path) -> None:
    places = {"t0": "part1.safetensors", "t1": "part0.safetensors", "t7": "part2.safetensors"}
    write_index(shards, {"weight_map": places})
    files_refused(shards, "t0 is not in part1", "t1 is not in part0", "t7 is not in part2")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "[" * 100_000]
)
def test_c9_an_index_that_is_none(shards: Path, text: str) -> None:
    write_index(shards, text)
    files_refused(shards, "not an index of safetensors files")


@pytest.mark.parametrize("keep", [0, 7, 8, 40, -1])
def test_c10_a_truncated_shard_is_named(shards: Path, keep: int) -> None:
    path = shards / "part2.safetensors"
    os.truncate(path, keep % path.stat().st_size)
    files_refused(shards, str(path), "copy it again")


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
    refused(lambda: tensor.rows(2048, 4096), CheckpointError, path, "changed meanwhile")
