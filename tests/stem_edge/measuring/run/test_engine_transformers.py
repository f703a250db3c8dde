"""transformers as a subject of a bench: what it computes in bfloat16, and its tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from installed import DATA

import stem_edge
from stem_edge.measuring.bench.bench import bench
from stem_edge.measuring.run.engine_transformers import TransformersModel

pytestmark = pytest.mark.slow
GEMMA = DATA / "conformance" / "gemma4-text"


def test_tokens_are_those_of_the_reference() -> None:
    with np.load(GEMMA / "reference.npz") as data:
        ids, best = data["ids"].tolist(), data["logits"].argmax(-1)
    model = TransformersModel(str(GEMMA), len(ids), 1)
    for _ in range(2):  # from an empty context each time
        model.clear()
        assert model.choose(ids) == best[-1]
    model.clear()
    same = np.array([model.choose([token]) for token in ids]) == best
    assert same.mean() > 0.8  # not all, because bfloat16 rounds the sharp scores of random weights


def test_bench_takes_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stem_edge.measuring.bench.rounds.BANDWIDTH_NBYTES", 1 << 20)
    stem_edge.export_bundle(GEMMA, tmp_path / "bundle")
    np.save(tmp_path / "ids.npy", np.arange(16))
    found = bench(
        tmp_path / "bundle",
        tmp_path / "ids.npy",
        against=[f"transformers={GEMMA}"],
        prompt_tokens=8,
        new_tokens=2,
        rounds=1,
        loads=1,
        threads=1,
    )
    assert list(found.subjects) == ["bundle", f"transformers {GEMMA.name}"]
    other = found.subjects[f"transformers {GEMMA.name}"]
    assert other.decode_tokens_per_second > 0 and other.load_seconds is None
