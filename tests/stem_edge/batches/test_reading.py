"""Rows of JSON lines, as they are read."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from open_files import posix

from stem_edge.batches import reading
from stem_edge.batches.reading import count_rows, read_rows


@posix
def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    os.mkfifo(path)
    with ThreadPoolExecutor(1) as writer:
        writer.submit(path.write_bytes, b'{"id":"a"}\n')
        assert count_rows(path) is None
        assert [row.id for row in read_rows(path)] == ["a"]


@pytest.mark.parametrize(
    ("data", "ids"),
    [
        (b'{"id":"a"}\n{"id":"b"}\n', ["a", "b"]),
        (b'{"id":"a"}\n{"id":"b"}', ["a", "b"]),
        (b'\xef\xbb\xbf{"id":"a"}\r\n\r\n{}\r\n', ["a", 3]),
        (b'{"id":"1"}\n{"id":1}\n{"id":null}\n', ["1", 1, 3]),
        (b'{"id":3}\n{}\n{}\n', [3, 2, None]),  # the third has the id of the first
        (b'{"custom_id":"a","id":"b"}\n', ["a"]),
        (b'{"id":"a","long":"' + b"x" * 60 + b'"}\n{"id":"b"}\n', [None, "b"]),
        (b'{"id":"a","long":"' + b"x" * 60, [None]),
        (b'{"id":"' + b"x" * 32 + b'"}', ["x" * 32]),  # of the most bytes
    ],
)
def test_ids_of_rows(
    data: bytes, ids: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_ROW_NBYTES", 41)
    monkeypatch.setattr(reading, "PIECE", 7)
    path = tmp_path / "in.jsonl"
    path.write_bytes(data)
    rows = list(read_rows(path))
    assert [row.id for row in rows] == ids
    assert [row.wrong is None for row in rows] == [id is not None for id in ids]
    assert count_rows(path) == rows[-1].line
