"""A warm start: counts of a text or of earlier runs fill the row cache; whatever is wrong with them
costs a cold start and nothing else."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from faulty_disk import watch
from installed import DEMO
from loading import load_fixed

import stem_edge
from stem_edge.bundle.opening import open_bundle
from stem_edge.files.names import cache_folder
from stem_edge.runtime.rows.warm import uses_file
from stem_edge.tables.token_counts import Uses, encode_counts, read_uses, write_uses

PROMPT = "The capital of France is Paris. The capital of Peru is"


@pytest.fixture
def bundle(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A bundle that counted a text of mostly "aaaa"."""
    (tmp_path / "text.txt").write_text("aaaaaaaa bb")
    stem_edge.export_bundle(tiny_checkpoint, tmp_path / "bundle", calibration=tmp_path / "text.txt")
    return tmp_path / "bundle"


def test_tokens_of_the_exporters_text_are_resident(bundle: Path) -> None:
    with load_fixed(bundle, slots=4) as model:
        model.logits(list(b"ab "))
        assert (model.stats.row_hits, model.stats.row_misses) == (3, 0)
    with load_fixed(bundle, slots=4, warm_start=False) as model:
        model.logits(list(b"ab "))
        assert (model.stats.row_hits, model.stats.row_misses) == (0, 3)


@pytest.mark.parametrize("damage", [b"", b"x" * 1000, encode_counts(np.ones(7, np.uint32))])
def test_damaged_and_foreign_counts_are_ignored(bundle: Path, damage: bytes) -> None:
    path = uses_file(cache_folder(None), open_bundle(bundle))
    path.parent.mkdir(parents=True)
    path.write_bytes(damage)
    with load_fixed(bundle, slots=4) as model:
        model.logits(list(b"ab "))
        assert model.stats.row_misses == 0


@pytest.mark.slow
def test_what_was_used_is_counted(tmp_path: Path) -> None:
    with load_fixed(DEMO, cache_dir=tmp_path) as model:
        model.logits([5, 5, 6])
        model.logits([7], stem_ids=[[8, 9]])  # a mean, which no other run can count on
    uses = read_uses(uses_file(tmp_path, open_bundle(DEMO)), 1756)
    assert uses is not None
    counts = dict(zip(*uses, strict=True))
    assert (counts[5], counts[6], sum(counts.values())) == (2, 1, 3)
    with load_fixed(DEMO, cache_dir=tmp_path / "none", warm_start=False) as model:
        model.logits([5])
    assert not (tmp_path / "none" / "counts").exists()


def test_flash_that_fails_while_filling_is_reported_when_a_row_is_needed(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, main, failed = False, threading.current_thread(), [0]

    def broken(_: str) -> None:
        if loaded or threading.current_thread() is not main:
            failed[0] += 1
            raise OSError(5, "Input/output error")

    watch(monkeypatch, ["pread"], broken)
    with load_fixed(bundle) as model:
        loaded = True
        assert failed[0]
        with pytest.raises(stem_edge.errors.RowReadError):
            model.logits(list(b"ab"))
        monkeypatch.undo()
        assert np.isfinite(model.logits(list(b"ab"))).all()


def test_the_same_text_from_a_warm_and_a_cold_start(tmp_path: Path) -> None:
    path = uses_file(tmp_path, open_bundle(DEMO))
    write_uses(path, Uses(np.arange(1756), np.arange(1756, dtype=np.uint32)))
    texts = []
    for warm_start in (False, True):
        with load_fixed(DEMO, slots=20, cache_dir=tmp_path, warm_start=warm_start) as model:
            texts.append(model.generate_text(PROMPT))
    assert texts[0] == texts[1]
