"""token_counts.npy: exact bytes, and nothing of a foreign file is believed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stem_edge.tables.token_counts import count_tokens, encode_counts, read_counts, write_counts

COUNTS = np.array([3, 0, 1, 4294967295], np.uint32)


def test_exact_bytes() -> None:
    data = encode_counts(COUNTS)
    assert data[:8] == b"\x93NUMPY\x01\x00\x76\x00"[:8]
    assert b"'descr': '<u4', 'fortran_order': False, 'shape': (4,)" in data
    assert data[-16:] == b"\3\0\0\0\0\0\0\0\1\0\0\0\xff\xff\xff\xff"


def test_counts_come_back_and_numpy_reads_them(tmp_path: Path) -> None:
    write_counts(tmp_path / "new" / "c.npy", COUNTS)
    found = read_counts(tmp_path / "new" / "c.npy", 4)
    assert found is not None
    assert np.array_equal(found, COUNTS)
    assert np.array_equal(np.load(tmp_path / "new" / "c.npy"), COUNTS)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["c.npy"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY",
        encode_counts(COUNTS)[:-1],
        encode_counts(COUNTS) + b"\0",
        encode_counts(COUNTS).replace(b"<u4", b"|O8"),
        encode_counts(COUNTS).replace(b"False", b"True "),
        encode_counts(COUNTS[:3]),
        bytes(len(encode_counts(COUNTS))),
    ],
)
def test_damaged_and_foreign_files_are_ignored(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "c.npy").write_bytes(data)
    assert read_counts(tmp_path / "c.npy", 4) is None


def test_a_missing_file_and_a_folder_are_ignored(tmp_path: Path) -> None:
    assert read_counts(tmp_path / "none", 4) is None
    assert read_counts(tmp_path, 4) is None


def test_counting() -> None:
    counts = count_tokens(np.array([5, 1, 5, 5], np.int64), 7)
    assert counts.tolist() == [0, 1, 0, 0, 0, 3, 0]
    assert counts.dtype == np.uint32
