"""The memory plan is a promise: the measured peak of a process stays below its budget."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from make_checkpoint import Shape, write_checkpoint

import stem_edge
from stem_edge.runtime import prepared
from stem_edge.units import parse_size

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")

SCRIPT = """
import json, sys, threading, time
import numpy as np
import stem_edge
from stem_edge.runtime.machine import own_memory
from stem_edge.runtime import prepared
prepared.LEAST_NBYTES = int(sys.argv[4])

peak, done = 0, threading.Event()
def watch():
    global peak
    while not done.wait(0.001):
        peak = max(peak, own_memory())

thread = threading.Thread(target=watch)
thread.start()
try:
    with stem_edge.load(sys.argv[1], memory=int(sys.argv[2]), cache_dir=sys.argv[3]) as model:
        plan, V = model.plan, model.config.vocab_size
        rng = np.random.default_rng(0)
        for _ in range(2):  # adversarial: nearly every token misses
            prompt = rng.integers(0, V, plan.context_length - 40).tolist()
            list(model.generate(prompt, max_new_tokens=40))
        print(json.dumps({"planned": plan.total, "slots": plan.slots, "chunk": plan.chunk_tokens,
                          "peak": max(peak, own_memory())}))
except stem_edge.MemoryPlanError as error:
    print(json.dumps({"refused": str(error)}))
finally:
    done.set()
    thread.join()
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    shape = Shape(
        vocab_size=4000, dim=256, n_layers=4, n_heads=8, n_kv_heads=4, d_ff=2048,
        stem_layers=(1, 2, 3), max_seqlen=1024,
    )  # fmt: skip
    write_checkpoint(folder / "c", shape, dtype="bf16", layout="consolidated")
    stem_edge.export_bundle(folder / "c", folder / "bundle")
    return folder / "bundle"


def run(bundle: Path, memory: int, cache_dir: Path, least: int) -> dict[str, int]:
    arguments = [str(bundle), str(memory), str(cache_dir), str(least)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("is_prepared", [False, True])
def test_three_budgets(bundle: Path, tmp_path: Path, is_prepared: bool) -> None:
    least = 0 if is_prepared else prepared.LEAST_NBYTES
    refused = run(bundle, 1_000_000, tmp_path, least)
    match = re.search(r"at least (\S+ MB) are needed", str(refused["refused"]))
    assert match
    smallest = parse_size(match[1]) + 4_000_000  # the next process may begin larger
    found = [run(bundle, smallest + more, tmp_path, least) for more in (0, 16_000_000, 40_000_000)]
    for budget, one in zip((0, 16_000_000, 40_000_000), found, strict=True):
        assert one["planned"] <= smallest + budget
        assert one["peak"] <= smallest + budget
    assert found[0]["slots"] < found[1]["slots"] < found[2]["slots"]
    assert found[0]["chunk"] < found[2]["chunk"]
