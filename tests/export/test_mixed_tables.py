"""Mixed tables from export to tokens: values, reads and counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from loading import load_fixed
from whole_model import forward

import stem_edge
from stem_edge.bundle.checksums import verify
from stem_edge.bundle.opening import open_bundle
from stem_edge.commands.bundles.bundle_report import bundle_table
from stem_edge.export.checkpoints.lingua import read_checkpoint
from stem_edge.numerics.matrix import ArrayMatrix

# Tokens are bytes: 13 letters and the space, more of them than 5 % of 300.
TEXT = "the cat sat on the mat and the dog sat on the hat " * 8
FREQUENT = 15


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "text.txt").write_text(TEXT)
    stem_edge.export_bundle(
        tiny_checkpoint,
        folder / "mixed",
        type="fp32",
        rows="mixed",
        calibration=folder / "text.txt",
    )
    return folder / "mixed"


def test_what_is_computed_is_what_open_tables_shows(bundle: Path, tiny_checkpoint: Path) -> None:
    source, ids = read_checkpoint(tiny_checkpoint), [*b"the zebra sat on 0123"]
    with stem_edge.open_tables(bundle) as tables:
        rows = {layer: ArrayMatrix(tables[:, layer]) for layer in tables.layers}
    expected = forward(source.config, source.backbone, rows, ids)
    with load_fixed(bundle) as model:
        assert np.abs(model.logits(ids) - expected).max() < 1e-4


def test_letters_of_the_text_have_more_bits(bundle: Path, tiny_checkpoint: Path) -> None:
    layout = open_bundle(bundle).manifest
    assert layout.rare_tables is not None
    assert layout.rare_tables.records == 300 - FREQUENT
    table = read_checkpoint(tiny_checkpoint).tables[1].rows(0, 300)
    with stem_edge.open_tables(bundle) as tables:
        error = np.abs(tables[:, 1] - table).max(axis=1) / np.abs(table).max(axis=1)
    used = sorted(set(TEXT.encode()))
    assert error[used].max() < 0.008
    assert (error < 0.008).sum() == FREQUENT


def test_sequences_together_give_the_same_tokens(bundle: Path) -> None:
    assert set(verify(bundle).values()) == {"ok"}
    texts = ["the cat", "a zebra sat", "on the hat"]
    with stem_edge.load(bundle) as model:
        alone = [model.generate_text(text, max_new_tokens=8) for text in texts]
        assert model.generate_texts(texts, exact=True, max_new_tokens=8) == alone


def test_the_report_tells_both_kinds_apart(bundle: Path) -> None:
    text = bundle_table(open_bundle(bundle))
    assert "int8 of 15 records in groups of 64, int4 of 285" in text


def test_mixed_tables_need_a_text(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(stem_edge.errors.ExportError, match="--calibration FILE"):
        stem_edge.export_bundle(tiny_checkpoint, tmp_path / "out", rows="mixed")
    assert not (tmp_path / "out").exists()
