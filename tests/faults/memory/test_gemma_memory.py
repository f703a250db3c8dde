"""Memory that a prompt and the logits of every position take, beside what the plan says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from gemma_checkpoint import describe, write_gemma
from prompt_graph import without_prompt_graph
from threads import run_script

import stem_edge

SIZES: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 10,
    "num_kv_shared_layers": 5, "vocab_size": 1 << 16, "vocab_size_per_layer_input": 1024,
    "head_dim": 64, "global_head_dim": 128, "max_position_embeddings": 1024,
}  # fmt: skip
GROWTH = """
import json, sys, threading
import numpy as np, stem_edge
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.loading import load_with
from stem_edge.system.memory import own_memory, return_freed_memory
model = load_with(sys.argv[1], LoadOptions(slots=256))
ids = np.random.default_rng(0).integers(300, 1000, 512).tolist()
uses = {
    "prompt": lambda: list(model.generate(ids, max_new_tokens=2)),
    "logits": lambda: sum(len(piece) for piece in model.logits_chunks(ids)),
}
model.logits(ids[:16])  # so that all graphs are open, whose weights are no part of what a prompt takes
peak, done = 0, threading.Event()
def watch():
    global peak
    while not done.wait(0.001):
        peak = max(peak, own_memory())
thread = threading.Thread(target=watch)
thread.start()
plan, found = model.plan, {}
planned = plan.activations + plan.kv_cache + plan.reads + plan.row_cache
for what, use in uses.items():
    return_freed_memory()
    loaded = peak = own_memory()
    use()
    found[what] = [peak - loaded, planned, peak, plan.total]
done.set()
thread.join()
print(json.dumps(found))
model.close()
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundles of a checkpoint: with a graph for prompts, and without."""
    folder = tmp_path_factory.mktemp("gemma")
    write_gemma(folder / "checkpoint", describe("gemma-4-e2b", **SIZES))
    options: Any = {"type": "int4", "prefill_graph": True, "max_kl": 99.0}
    stem_edge.export_bundle(folder / "checkpoint", folder / "prefill", **options)
    without_prompt_graph(folder / "prefill", folder / "plain")
    return folder


@pytest.mark.parametrize("name", ["plain", "prefill"])
def test_no_more_is_taken_than_planned_and_not_much_less(name: str, folder: Path) -> None:
    done = run_script(GROWTH, folder / name)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for what, (grown, planned, peak, total) in found.items():
        assert grown <= planned and peak <= total, (what, grown, planned)
    assert max(grown for grown, *_ in found.values()) > planned / 4
