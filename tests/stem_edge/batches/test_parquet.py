"""Rows of parquet files."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from stem_edge.batches.reading import count_rows, read_rows
from stem_edge.errors import InputError


@pytest.mark.slow
def test_rows_of_a_column(tmp_path: Path) -> None:
    table = pytest.importorskip("pyarrow").table
    write = pytest.importorskip("pyarrow.parquet").write_table
    path = tmp_path / "in.parquet"
    messages = [[{"role": "user", "content": str(n), "name": None}] for n in range(1000)]
    columns = {
        "id": [f"r{n}" for n in range(999)] + ["r5"],
        "text": ["a", None, *(f"prompt {n}" for n in range(2, 1000))],
        "tokens": [[n, n + 1] for n in range(1000)],
        "messages": messages,
        "bytes": [b"\xff"] * 1000,
    }
    write(table(columns), path, row_group_size=300)
    assert count_rows(path, "text") == 1000
    found = list(read_rows(path, "text"))
    assert msgspec.json.decode(found[2].data) == {"id": "r2", "prompt": "prompt 2"}
    assert [found[0].id, found[1].wrong, found[1].line] == [
        "r0",
        "the column has no value in this row",
        2,
    ]
    assert "an earlier row has the id 'r5'" in str(found[999].wrong)
    tokens, talks = list(read_rows(path, "tokens")), list(read_rows(path, "messages"))
    assert msgspec.json.decode(tokens[7].data)["prompt"] == [7, 8]
    talk = [{"role": "user", "content": "7"}]
    assert msgspec.json.decode(talks[7].data)["messages"] == talk
    assert next(read_rows(path, "id")).id == 1  # a column of prompts is no column of ids
    for column, message in [(None, "no column is given"), ("txt", "there is no column 'txt'")]:
        with pytest.raises(InputError, match=f"{message}; take one of id, text"):
            count_rows(path, column)
    path.write_bytes(b"no parquet")
    with pytest.raises(InputError, match="cannot read the rows"):
        count_rows(path, "text")


def test_parquet_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"pip install 'stem-edge\[parquet\]'"):
        count_rows(tmp_path / "in.parquet", "text")
