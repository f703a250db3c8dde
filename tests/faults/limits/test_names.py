"""Limits of texts in messages, and of JSON: just inside is accepted, just outside is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from contract import takes

from stem_edge.shown import one_line
from stem_edge.tables import zarr_json


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x" * 300, "x" * 300), ("x" * 301, "x" * 300 + "..."), ("a\nb", "a b"),
        ("\x1b[2J", r"\x1b[2J"), ("é", "é"), (ValueError("no"), "no"),
    ],
)  # fmt: skip
def test_one_line(text: object, line: str) -> None:
    assert one_line(text) == line


# Files of JSON


def test_the_size_of_a_zarr_json(tmp_path: Path) -> None:
    def read(nbytes: int) -> None:
        (tmp_path / "zarr.json").write_bytes(b"{}".ljust(nbytes))
        assert zarr_json.read_json(tmp_path / "zarr.json") == {}

    takes(read, zarr_json.MAX_JSON_NBYTES, "larger than 1048576 bytes")
