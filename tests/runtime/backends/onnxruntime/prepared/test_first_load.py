"""A first load stays within its memory, all processes together, and within the disk that it forecasts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from make_checkpoint import Shape, write_checkpoint

import stem_edge
from stem_edge.shown import parse_size
from stem_edge.system.process_memory import MemoryReader

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


def load(options: dict[str, object], cache: Path) -> tuple[int, int, str]:
    """Load in another process; return the peaks of all its processes' memory and of disk, and its stderr."""
    command = [sys.executable, "-P", "-c", LOAD, json.dumps(options)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    root, memory, disk = psutil.Process(process.pid), 0, 0
    while True:
        try:
            _, said = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            memory, disk = map(max, (memory, disk), used(root, cache))
        else:
            assert process.returncode == 0, said
            return memory, disk, said


def used(root: psutil.Process, cache: Path) -> tuple[int, int]:
    try:
        running = [root, *root.children(recursive=True)]
        files = (Path(folder, name) for folder, _, names in os.walk(cache) for name in names)
        memory = sum(MemoryReader(one.pid).unevictable() for one in running)
        return memory, sum(path.stat().st_blocks << 9 for path in files)
    except (OSError, psutil.Error):  # a process has ended, or a file was renamed
        return 0, 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_first_load_in_its_memory_and_disk(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", SHAPE)
    bundle = stem_edge.export_bundle(
        checkpoint, tmp_path / "bundle", type="int8", prefill_graph=True
    )
    asked: dict[str, object] = {"path": str(bundle.path), "memory": MEMORY, "threads": 1}
    asked |= {"context_length": 128, "cache_dir": str(tmp_path / "cache"), "progress": True}
    first, second = (load(asked, tmp_path / "cache") for _ in range(2))
    assert 0 < max(first[0], second[0]) <= MEMORY
    forecast = re.search(r"preparing .*up to (.+?) of disk", first[2])
    assert forecast and first[1] <= parse_size(forecast[1]) < 2 * first[1], first
