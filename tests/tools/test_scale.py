"""The sizes of docs/scale.md: as an export would write them."""

from __future__ import annotations

import pytest
from installed import ROOT
from scale_shapes import SHAPES, SHARES, main, model_of, read_nbytes, sizes_of, stem_layers


def test_tables_are_placed_as_in_the_paper() -> None:
    assert [len(stem_layers(share, 16)) for share in SHARES] == [5, 8, 15]
    assert stem_layers("1/3", 16) == (2, 5, 8, 11, 14)


def test_sizes_are_those_of_an_export() -> None:
    """Bytes of the file that `stem-edge export` wrote of the 1B shape (docs/results.md)."""
    full = sizes_of("1B", "full")
    assert full.backbone_nbytes == 665_600_000
    assert read_nbytes(full) == 126_724
    model = model_of("1B", "1/3")
    assert round((model.backbone_parameters + model.table_parameters) / 1e9, 2) == 6.67
    mixed, int8 = sizes_of("1B", "full", "mixed"), sizes_of("1B", "full")
    assert mixed.tables_nbytes / int8.tables_nbytes == pytest.approx(0.524, abs=5e-4)


def test_the_table_is_that_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    printed = capsys.readouterr().out
    assert printed in (ROOT / "docs" / "scale.md").read_text("utf-8")
    assert len(printed.splitlines()) == 2 + len(SHAPES) * len(SHARES)
