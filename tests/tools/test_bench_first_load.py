"""A first load stays within its memory, all processes together."""

from __future__ import annotations

import sys
from pathlib import Path

import bench_first_load
import pytest
from make_checkpoint import Shape, write_checkpoint

import stem_edge

MEMORY = 200_000_000
# 143 MB of matrices that decode and 113 MB for prompts, which took 600 MB packed at once.
SHAPE = Shape(
    vocab_size=8000, dim=1024, n_layers=8, n_heads=16, n_kv_heads=4, d_ff=3584, stem_layers=()
)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_all_processes_of_a_first_load(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", SHAPE)
    options = {"type": "int8", "prefill_graph": True}
    bundle = stem_edge.export_bundle(checkpoint, tmp_path / "bundle", **options)  # type: ignore[arg-type]
    asked = {"path": str(bundle.path), "memory": MEMORY, "context_length": 128, "threads": 1}
    peaks = []
    for _ in range(2):
        found = bench_first_load.load(asked | {"cache_dir": str(tmp_path / "cache")}, None)
        assert "load" in found
        peaks.append(found["peak"])
    assert max(peaks) <= MEMORY
    assert [*(tmp_path / "cache" / "prepared").iterdir()]
