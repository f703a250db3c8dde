"""Hostile and damaged GGUF files: headers, counts, lengths, offsets, and other files of that name."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract import refused

from stem_edge.errors import CheckpointError
from stem_edge.export.tensor_files.gguf import open_gguf

UINT8, UINT32, INT32, FLOAT, BOOL, TEXT, ARRAY, INT64 = 0, 4, 5, 6, 7, 8, 9, 11
F32, Q4_0, GONE, I8, I32, KINDS_OF_LATER = 0, 2, 4, 24, 26, 255


def text(value: str | bytes, length: int | None = None) -> bytes:
    """A text that may claim another length."""
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data) if length is None else length) + data


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(name: str, kind: int, count: int, values: bytes = b"") -> bytes:
    return key(name, ARRAY, struct.pack("<IQ", kind, count) + values)


def tensor(name: str | bytes, *sizes: int, kind: int = F32, at: int = 0, axes: int = 0) -> bytes:
    """An entry of the list; sizes begin with the contiguous axis."""
    data = text(name) + struct.pack(f"<I{len(sizes)}Q", axes or len(sizes), *sizes)
    return data + struct.pack("<IQ", kind, at)


GOOD_KEYS = [
    key("general.architecture", TEXT, text("llama")), key("n", UINT32, struct.pack("<I", 5)),
]  # fmt: skip
GOOD_TENSORS = [tensor("a", 3, 2), tensor("b", 4, at=32)]
VALUES = np.arange(6, dtype="<f4").tobytes() + bytes(8) + bytes(16)


def encoded(
    keys: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    values: bytes = VALUES,
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A file with these keys and tensors, which may claim other counts."""
    keys = GOOD_KEYS if keys is None else keys
    tensors = GOOD_TENSORS if tensors is None else tensors
    claimed = (len(tensors), len(keys)) if counts is None else counts
    data = b"GGUF" + struct.pack("<IQQ", version, *claimed) + b"".join([*keys, *tensors])
    return data + bytes(-len(data) % alignment) + values


def opened(folder: Path, data: bytes, *naming: str) -> str:
    path = folder / "model.gguf"
    path.write_bytes(data)
    return refused(lambda: open_gguf(path), CheckpointError, path, *naming, kept=[folder])


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("padding", [0, 16])
def test_the_file_that_is_damaged_below_is_read(tmp_path: Path, version: int, padding: int) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(encoded(version=version) + bytes(padding))
    file = open_gguf(path)
    assert file.keys == {"general.architecture": "llama", "n": 5}
    assert file.tensors["a"].rows(1, 2).tolist() == [[3.0, 4.0, 5.0]]
    assert file.tensors["b"].shape == (4,)


HUGE = [1 << 32, 1 << 62, 2**63, 2**64 - 1]


@pytest.mark.parametrize("count", HUGE)
def test_c5_counts_and_lengths(tmp_path: Path, count: int) -> None:
    shown = str(count)
    opened(tmp_path, encoded(counts=(count, 2)), f"{shown} tensors; expected at most")
    opened(tmp_path, encoded(counts=(2, count)), f"{shown} keys; expected at most")
    opened(tmp_path, encoded([text("a", count)]), "a key of", shown)
    opened(tmp_path, encoded([key("a", TEXT, text("b", count))]), "a of", shown)
    opened(tmp_path, encoded([array("a", UINT32, count)]), f"{shown} values of a")
    opened(tmp_path, encoded([array("a", TEXT, 1, text("b", count))]), "a text in a of", shown)
    opened(tmp_path, encoded(tensors=[text("a", count)]), "the name of a tensor of", shown)


def test_c5_what_fits_the_limits_but_not_the_file(tmp_path: Path) -> None:
    for data in (  # other bytes are read as the length of a name or text
        encoded(counts=(60_000, 2)), encoded(counts=(2, 16_000)),
        encoded([array("a", TEXT, 1_000)]),
    ):  # fmt: skip
        opened(tmp_path, data, "expected at most")
    for data in (
        encoded([array("a", UINT32, 4_000_000)]),
        encoded([key("a", TEXT, text("b", 1 << 20))]),
    ):  # fmt: skip
        opened(tmp_path, data, "its header would go on to byte", "the file ends at")


def test_c5_a_sparse_file_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(encoded([array("a", UINT8, 1 << 22)] * 2))
    os.truncate(path, 1 << 40)
    refused(lambda: open_gguf(path), CheckpointError, "not a GGUF file", seconds=5)


FILES: list[tuple[bytes, str]] = [
    (b"", "it is empty"), (b"GGU", "bytes 47 47 55"), (b"FUGG" + bytes(40), "46 55 47 47"),
    (pickle.dumps({"a": [1.0] * 9}), "a bare pickle"), (b"PK\x03\x04" + bytes(40), "zip archive"),
    (b"<!DOCTYPE html>", "a web page"), (b"version https://git-lfs.x", "git-lfs"),
    (b"gguf" + encoded()[4:], "bytes 67 67 75 66"), (b"GGUF", "go on to byte 8"),
    (encoded(version=0), "version 0; expected 2 or 3"),
    (encoded(version=1), "version 1; expected 2 or 3"),
    (encoded(version=4), "version 4; expected 2 or 3"),
    (encoded(version=0x03000000), "not of big-endian machines"),
]  # fmt: skip
KEYS: list[tuple[list[bytes], str]] = [
    ([key("a", 13, b"")], "a has the unknown type 13"),
    ([key("a", 2**32 - 1, b"")], "a has the unknown type 4294967295"),
    ([array("a", ARRAY, 1, struct.pack("<IQ", UINT8, 1) + b"a")], "a has the unknown type 9"),
    ([array("a", 99, 1)], "a has the unknown type 99"),
    ([key("a", UINT8, b"a")] * 2, "the key a is there twice"),
    ([key(b"a\xff", UINT8, b"a")], "can't decode"),
    ([key("a", TEXT, text(b"\xff"))], "can't decode"),
    ([key("a\x1b[2J\n", 13, b"")], "has the unknown type"),
    ([key("", UINT8, b"a")] * 2, "is there twice"),
    ([key("a" * 1025, UINT8, b"a")], "a key of 1025 bytes at byte"),
    ([array("a", FLOAT, 2**62)], "values of a; expected at most"),
    ([array("a", TEXT, 3, text("b"))], "a text in a of"),
    ([key("general.alignment", INT32, struct.pack("<i", 13))], "general.alignment is 13"),
    ([key("general.alignment", INT32, struct.pack("<i", -32))], "general.alignment is -32"),
    ([key("general.alignment", INT64, struct.pack("<q", 1 << 40))], "general.alignment is 10"),
    ([key("general.alignment", UINT32, struct.pack("<I", 1))], "general.alignment is 1; expected"),
    ([key("general.alignment", FLOAT, struct.pack("<f", 32))], "general.alignment is 32.0"),
    ([key("general.alignment", BOOL, b"\1")], "general.alignment is True"),
    ([array("general.alignment", UINT32, 1, struct.pack("<I", 32))], "general.alignment is [32]"),
    ([key("general.alignment", UINT32, struct.pack("<I", 0))], "general.alignment is 0"),
    ([key("general.alignment", UINT32, struct.pack("<I", 24))], "general.alignment is 24"),
    ([key("general.alignment", UINT32, struct.pack("<I", 1 << 31))], "general.alignment is 2"),
    ([key("general.alignment", TEXT, text("32"))], "general.alignment is 32; expected"),
]  # fmt: skip
PLACES: list[tuple[list[bytes], bytes, str]] = [
    ([tensor("a", 3, 2), tensor("b", 4, at=16)], VALUES, "tensor b is at byte"),
    ([tensor("a", 3, 2), tensor("b", 4, at=0)], VALUES, "tensor b is at byte"),
    ([tensor("a", 3, 2), tensor("b", 4, at=64)], VALUES + bytes(32), "tensor b is at byte"),
    ([tensor("a", 3, 2, at=32)], VALUES, "tensor a is at byte"),
    ([tensor("a", 3, 2, at=2**64 - 32)], VALUES, "tensor a is at byte"),
    ([tensor("a", 3, 2), tensor("b", 4, at=24)], VALUES, "tensor b is at byte"),
    ([tensor("a", 3, 2), tensor("b", 4, at=33)], VALUES, "tensor b is at byte"),
    ([tensor("a", 3, 2), tensor("b", 4, at=32)], VALUES[:-1], "tensor b ends at byte"),
    ([tensor("a", 3, 2), tensor("b", 4, at=32)], b"", "tensor a ends at byte"),
    ([tensor("a", 2**46), tensor("b", 2**46, at=2**48)], VALUES, "tensor a ends at byte"),
    ([tensor("a", 3, 2)], VALUES[:23], "tensor a ends at byte"),
    ([tensor("a", 3, 2)], VALUES, "16 bytes are stray after its last tensor"),
    ([tensor("a", 3, 2), tensor("a", 4, at=32)], VALUES, "tensor a is there twice"),
]  # fmt: skip
ENTRIES: list[tuple[bytes, str]] = [
    (tensor("a", axes=5), "has 5 axes; expected 1 to 4"),
    (tensor("a", axes=2**32 - 1), "has 4294967295 axes"),
    (tensor("a"), "has 0 axes"),
    (tensor("a", 2**63, 2), "impossible shape"), (tensor("a", 2**40, 2**40), "more than"),
    (tensor("a", 2**16, 2**16, 2**16, 2**16), "more than"), (tensor("a", 2**40), "ends at byte"),
    (tensor("a", 0, 3), "cannot be F32"), (tensor("a", 3, 0), "cannot be F32"),
    (tensor("a", 33, 2, kind=Q4_0), "[2, 33] cannot be Q4_0"),
    (tensor("a", 32, kind=Q4_0), "[32] cannot be Q4_0"),
    (tensor("a", 2**63 - 64, kind=I8), "impossible shape"), (tensor("a", 2**47, 2**17), "more than"),
    (tensor("a", 2**64 - 1), "impossible shape"), (tensor("a", 2**63 - 1, 2), "impossible shape"),
    (tensor("a", 0, 2**63, 2), "impossible shape"), (tensor("a", 0, 0, 0, 0), "cannot be F32"),
    (tensor("a" * 1025, 3), "the name of a tensor of 1025 bytes"),
    (tensor("a", 3, kind=GONE), "is of type 4,"), (tensor("a", 3, kind=I8), "is of type 24,"),
    (tensor("a", 3, kind=KINDS_OF_LATER), "is of type 255,"),
    (tensor("a", 3, kind=9), "is of type 9, which is not known here"),
    (tensor("a", 3, kind=2**32 - 1), "is of type 4294967295"),
    (tensor("a", 3, 2, kind=I32), "is of type 26,"),
    (tensor(b"a\xfe", 3), "can't decode"),
]  # fmt: skip
REFUSED = FILES + [(encoded(keys), said) for keys, said in KEYS]
REFUSED += [(encoded(tensors=tensors, values=values), said) for tensors, values, said in PLACES]
REFUSED += [(encoded(tensors=[entry]), said) for entry, said in ENTRIES]


@pytest.mark.parametrize(("data", "said"), REFUSED, ids=range(len(REFUSED)))
def test_c2_c6_c7_c8_files_keys_places_and_shapes(tmp_path: Path, data: bytes, said: str) -> None:
    opened(tmp_path, data, said)


def test_c10_a_file_that_is_cut_while_it_is_read_is_an_error_and_not_a_signal(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(encoded(tensors=[tensor("a", 4, 4096)], values=bytes(65536)))
    found = open_gguf(path).tensors["a"]
    assert found.rows(0, 4096).sum() == 0
    os.truncate(path, 8192)
    refused(lambda: found.rows(2048, 4096), CheckpointError, path, "changed during the export")


# Odd files that are right: file -> keys, names of tensors.
READ: list[tuple[bytes, dict[str, Any], list[str]]] = [
    (encoded([], [], b""), {}, []),
    (encoded([], [], b"", alignment=1), {}, []),
    (encoded([key("", UINT8, b"\1")], [], b""), {"": 1}, []),
    (encoded([array("a", TEXT, 0)], [], b""), {"a": []}, []),
    (encoded([array("a", TEXT, 2, text("") + text("x"))], [], b""), {"a": ["", "x"]}, []),
    (encoded([array("a", UINT32, 2, struct.pack("<2I", 1, 2))], [], b""), {"a": [1, 2]}, []),
    (encoded([], [tensor("", 4)], bytes(16)), {}, [""]),
    (encoded([], [tensor("a" * 1024, 1, 1, 1, 1)], bytes(4)), {}, ["a" * 1024]),
    (encoded([key("general.alignment", UINT32, struct.pack("<I", 8))],
             [tensor("a", 1), tensor("b", 1, at=8)], bytes(12), alignment=8),
     {"general.alignment": 8}, ["a", "b"]),
]  # fmt: skip


@pytest.mark.parametrize(("data", "keys", "names"), READ, ids=range(len(READ)))
def test_odd_files_that_are_right(
    tmp_path: Path, data: bytes, keys: dict[str, Any], names: list[str]
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    file = open_gguf(path)
    assert (file.keys, [*file.tensors]) == (keys, names)
    assert all(tensor.rows(0, 1).sum() == 0 for tensor in file.tensors.values())
