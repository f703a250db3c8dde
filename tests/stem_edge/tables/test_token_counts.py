"""token_counts.npy: its exact bytes, and other files, which are ignored."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from stem_edge.tables.token_counts import encode_counts, read_counts

COUNTS = np.array([3, 0, 1, 4294967295], np.uint32)


def test_exact_bytes() -> None:
    data = encode_counts(COUNTS)
    assert data[:8] == b"\x93NUMPY\x01\x00\x76\x00"[:8]
    assert b"'descr': '<u4', 'fortran_order': False, 'shape': (4,)" in data
    assert data[-16:] == b"\3\0\0\0\0\0\0\0\1\0\0\0\xff\xff\xff\xff"


def test_counts_come_back_and_numpy_reads_them(tmp_path: Path) -> None:
    (tmp_path / "c.npy").write_bytes(GOOD)
    found = read_counts(tmp_path / "c.npy", 4)
    assert found is not None
    assert np.array_equal(found, COUNTS)
    assert np.array_equal(np.load(tmp_path / "c.npy"), COUNTS)


def npy(header: str) -> bytes:
    """Bytes of a .npy file with this header and 16 bytes of data."""
    header += " " * (-(len(header) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\0" + len(header).to_bytes(2, "little") + header.encode() + bytes(16)


GOOD = encode_counts(COUNTS)
BAD = {
    "empty": b"",
    "only the magic": b"\x93NUMPY",
    "cut": GOOD[:-1],
    "longer": GOOD + b"\0",
    "another type": GOOD.replace(b"<u4", b"|O8"),
    "another order": GOOD.replace(b"False", b"True "),
    "fewer counts": encode_counts(COUNTS[:3]),
    "zeros": bytes(len(GOOD)),
    "version 2": GOOD[:6] + b"\x02\0" + GOOD[8:],
    "version 3": GOOD[:6] + b"\x03\0" + GOOD[8:],
    "version 255": GOOD[:6] + b"\xff\xff" + GOOD[8:],
    "objects": npy("{'descr': '|O', 'fortran_order': False, 'shape': (4,), }"),
    "a huge shape": npy("{'descr': '<u4', 'fortran_order': False, 'shape': (1000000000000000,), }"),
    "deep": npy("(" * 60_000),
    "code": npy("{'descr': __import__('os').mkdir('hacked')}"),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_damaged_and_hostile_files_are_ignored(
    tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header is compared, not parsed, so no code in it can run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.npy").write_bytes(data)
    assert read_counts(tmp_path / "c.npy", 4) is None
    assert [path.name for path in tmp_path.iterdir()] == ["c.npy"]


def test_missing_odd_and_sparse_files_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "sparse.npy").write_bytes(GOOD)
    os.truncate(tmp_path / "sparse.npy", 1 << 40)
    (tmp_path / "link.npy").symlink_to("sparse.npy")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.npy")
    for name in ("sparse.npy", "link.npy", "pipe.npy", "none", "."):
        assert read_counts(tmp_path / name, 4) is None
