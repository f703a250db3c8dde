"""A first load stays within its memory, all processes together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from make_checkpoint import Shape, write_checkpoint

import stem_edge

MEMORY = 200_000_000
# 143 MB of matrices that decode and 113 MB for prompts, which took 600 MB packed at once.
SHAPE = Shape(
    vocab_size=8000, dim=1024, n_layers=8, n_heads=16, n_kv_heads=4, d_ff=3584, stem_layers=()
)
SECONDS = 0.01  # between samples
LOAD = """\
import json, sys
import stem_edge
with stem_edge.load(**json.loads(sys.argv[1])) as model:
    assert [*model.generate("Once upon a time", max_new_tokens=8)]"""


def peak_of_load(options: dict[str, object]) -> int:
    """Load in a process of its own; return the most anonymous memory of it and its children."""
    process = subprocess.Popen([sys.executable, "-P", "-c", LOAD, json.dumps(options)])
    root, peak = psutil.Process(process.pid), 0
    while True:
        try:
            status: int | None = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            peak = max(peak, sum(anonymous(one) for one in processes(root)))
        else:
            assert status == 0
            return peak


def processes(root: psutil.Process) -> list[psutil.Process]:
    try:
        return [root, *root.children(recursive=True)]
    except psutil.Error:  # it has ended
        return []


def anonymous(process: psutil.Process) -> int:
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    sizes = [line.split()[1] for line in lines if line.startswith(("RssAnon:", "VmSwap:"))]
    return sum(map(int, sizes)) << 10


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_all_processes_of_a_first_load(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", SHAPE)
    bundle = stem_edge.export_bundle(
        checkpoint, tmp_path / "bundle", type="int8", prefill_graph=True
    )
    asked: dict[str, object] = {"path": str(bundle.path), "memory": MEMORY, "threads": 1}
    asked |= {"context_length": 128, "cache_dir": str(tmp_path / "cache")}
    peaks = [peak_of_load(asked) for _ in range(2)]
    assert 0 < max(peaks) <= MEMORY
    assert [*(tmp_path / "cache" / "prepared").iterdir()]
