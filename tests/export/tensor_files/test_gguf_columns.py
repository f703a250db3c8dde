"""Columns of tensors in GGUF files: the values of the whole, and codes as they are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import coded, random_blocks, write_file
from matrices import recorded_in

from stem_edge.export.tensor_files.gguf import open_gguf
from stem_edge.export.tensor_files.gguf_tensor import coded_rows, with_codes
from stem_edge.numerics.quantize import U8

ROWS, WIDTH, PARTS = 7, 384, 4  # a part is one and a half of the larger blocks
BLOCKS = ("Q8_0", "Q4_0")


def stored(type: str) -> U8:
    """Return rows of random codes, with scales of 1 where blocks may have them."""
    if type in ("F32", "F16", "BF16"):
        values = np.random.default_rng(3).normal(size=(ROWS, WIDTH * PARTS)).astype(np.float32)
        return coded(values, type).view(np.uint8)
    return random_blocks(type, (ROWS, WIDTH * PARTS))


@pytest.mark.parametrize(
    "type", ["F32", "F16", "BF16", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "Q4_1", *BLOCKS]
)
def test_columns_have_the_values_of_the_whole(type: str, tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.gguf", {}, {"t": (stored(type), type)})
    tensor = open_gguf(path).tensors["t"]
    whole = tensor.rows(0, ROWS)
    assert np.isfinite(whole).all() and whole.std() > 0
    for part, found in enumerate(coded_rows(tensor, WIDTH).columns(WIDTH)):
        assert found.shape == (ROWS, WIDTH)
        expected = whole[2:5, part * WIDTH : (part + 1) * WIDTH]
        np.testing.assert_array_equal(found.rows(2, 5), expected)
        assert (found.codes is not None) == (type in BLOCKS)
        if found.codes is not None:
            codes, scales = found.codes.read(2, 5), found.codes.scales(2, 5)
            assert (codes.shape, scales.shape) == ((3, WIDTH), (3, WIDTH // 32))
            values = codes.astype(np.float32) - (1 << (found.codes.bits - 1))
            np.testing.assert_array_equal(values * np.repeat(scales, 32, axis=1), expected)
    matrix = with_codes(tensor)
    assert (matrix is not None) == (type in ("Q4_1", *BLOCKS))
    if matrix is not None and (blocks := matrix.codes) is not None:
        levels = blocks.read(0, ROWS).astype(np.float32) - (1 << (blocks.bits - 1))
        values = levels * np.repeat(blocks.scales(0, ROWS), 32, axis=1)
        if blocks.offsets is not None:
            values += np.repeat(blocks.offsets(0, ROWS), 32, axis=1)
        np.testing.assert_array_equal(values, whole)


@pytest.mark.parametrize("type", ["Q4_0", "F16"])
def test_columns_read_the_rows_once(type: str, tmp_path: Path) -> None:
    path, spans = write_file(tmp_path / "a.gguf", {}, {"t": (stored(type), type)}), list[Any]()
    tensor = open_gguf(path).tensors["t"]
    parts = coded_rows(tensor.reread(ROWS, recorded_in(spans)), WIDTH).columns(WIDTH)
    for part in parts * 2:
        if part.codes is None:
            part.rows(0, 4)
        else:
            part.codes.read(0, 4)
            part.codes.scales(0, 4)
    parts[0].rows(4, ROWS)
    assert spans == [(0, 4), (4, ROWS)]
